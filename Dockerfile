# One image for every service: the command says which.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# For GPUs, Triton compiles kernels as they are needed: deploy/compose/gpu.yml adds a C compiler.
ARG MORE_PACKAGES=""
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends python3 python3-venv ${MORE_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tandem
RUN python3 -m venv .venv
ENV PATH=/opt/tandem/.venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# Dependencies first: they change less often than the code. PIP_ARGS can name a package index of your own. On x86, PyPI
# has the CUDA build of PyTorch only, of several gigabytes; TORCH_INDEX=https://pypi.org/simple takes that one.
ARG PIP_ARGS=""
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install -q --no-cache-dir ${PIP_ARGS} --extra-index-url ${TORCH_INDEX} -c constraints.txt torch
# Readmes, which the packages name, change more often than the dependencies: empty ones will do here.
COPY pyproject.toml ./
COPY client/pyproject.toml client/
RUN touch README.md client/README.md && pip install -q --no-cache-dir ${PIP_ARGS} -c constraints.txt ./client '.[hub,otel,redis,s3]' \
    && pip uninstall -q -y tandem-client tandem-serve

COPY . .
RUN pip install -q --no-cache-dir --no-deps -e ./client -e . \
    && useradd --system --no-create-home --uid 10001 --user-group tandem \
    && install -d -o tandem -g tandem -m 700 /var/cache/tandem \
    && ln -s /opt/tandem/deploy/sagemaker/serve /usr/local/bin/serve
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
# Fits where images are built on the kind of CPU they run on; elsewhere each container compiles at its first start. The
# folder holds pickles of numba's: nobody but the service writes there. Where the container's root is read-only, it
# has to be a volume.
# What is downloaded or compiled later goes there, too.
ENV NUMBA_CACHE_DIR=/var/cache/tandem HF_HOME=/var/cache/tandem/huggingface TANDEM_MODEL_CACHE=/var/cache/tandem/models \
    TRITON_CACHE_DIR=/var/cache/tandem/triton
RUN tandem compile --all
