# One image for every service: the command says which.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tandem
RUN python3 -m venv .venv
ENV PATH=/opt/tandem/.venv/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba

# Dependencies first: they change less often than the code. PIP_ARGS can name a package index of your own.
ARG PIP_ARGS=""
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir -p tandem && touch tandem/__init__.py \
    && pip install -q --no-cache-dir ${PIP_ARGS} -c constraints.txt '.[gateway,hub,otel,redis,s3]' \
    && pip uninstall -q -y tandem-serve && rm -rf tandem

COPY . .
RUN pip install -q --no-cache-dir --no-deps -e . && useradd --system --no-create-home tandem
USER tandem
# Fits where images are built on the kind of CPU they run on; elsewhere each container compiles at its first start.
RUN python -m engine.cpu.compile
