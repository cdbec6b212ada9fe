# Every target sets up what it needs, from a bare clone. PYTHON=python3.12 chooses the interpreter (3.11 or newer); after `make clean`, if .venv has another.
PYTHON ?= python3
BIN := .venv/bin
TYPED := client/tandem router prefill_worker decode_worker rank_worker switchable_worker kvtransfer engine mesh checkpoint worker gateway tandem_cli bench demo_model examples docs_site
SOURCES := $(TYPED) tests
FAST := 'not gpu and not soak'
# Hundreds of processes import the same modules: images of containers that set this would have each compile them anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests of processes wait more than they compute, so two cores take four at once.
TESTS_AT_ONCE ?= 4

.PHONY: demo up docs pictures test retest kernels lint style types protos wheels parity test-gpu netns upgrade compose-test interrupts chaos soak defects bench bench-guard clean
.DEFAULT_GOAL := test

# --no-compile: pip would compile all 19,000 modules, one after the other, of which a few thousand are ever imported.
.venv/.installed: pyproject.toml client/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e ./client -e '.[dev]'
	touch $@

# Once for an environment, modules that tests import are compiled here: the processes of the tests begin together, and
# each would compile all of them.
.venv/.imported: .venv/.installed
	$(BIN)/pytest -qq -m $(FAST) --collect-only | tail -n 3
	touch $@

demo: .venv/.installed  ## Start a mesh, show confidence, kill a decode worker in the middle of an answer, stop.
	$(BIN)/python examples/demo.py

up: .venv/.installed  ## Serve the bundled model until Ctrl-C.
	$(BIN)/tandem up

# Kernels first: they take longest where nothing is compiled yet.
test: .venv/.installed  ## Everything CI asks for: lint, types, import rules, protocol, documentation, tests.
	$(MAKE) --no-print-directory -j2 kernels lint docs .venv/.imported
	@echo 'Tests in $(TESTS_AT_ONCE) processes; then the slowest ones. What fails runs once more, alone (make retest).'
	$(BIN)/pytest -q -m $(FAST) -n $(TESTS_AT_ONCE) --durations 15 --durations-min 5 || $(MAKE) --no-print-directory retest

retest: .venv/.installed  ## Run the tests that failed last once more, one by one; name those that pass now.
	$(BIN)/pytest -q -m $(FAST) --last-failed --last-failed-no-failures none -rpfE

kernels: .venv/.installed  ## Compile the CPU kernels, which a first start compiles otherwise (minutes).
	$(BIN)/tandem compile --all

lint: style types  ## Style, types, import rules, protocol lint and generated code.

style: .venv/.installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check -q $(SOURCES)
	$(BIN)/lint-imports
	BIN=$(BIN) protos/check.sh

types: .venv/.installed
	$(BIN)/mypy $(TYPED)

docs: .venv/.installed  ## The documentation as a site in build/site; every page listed, every link and anchor checked.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: .venv/.installed  ## Pictures of README.md and docs/, from a real mesh; needs Chromium (minutes).
	$(BIN)/python -m docs_site.pictures

protos: .venv/.installed  ## Generate client/tandem/v1 and mesh/v1 from protos/.
	BIN=$(BIN) protos/generate.sh

wheels: .venv/.installed  ## Build both wheels, install each into an empty environment, and make a real call (minutes).
	$(BIN)/pytest -q -s -m soak tests/wheels

parity: .venv/.installed  ## Every model family against transformers, through a mesh, over ranks and from quantised checkpoints, as tables (several minutes).
	$(BIN)/python -m tests.parity
	$(BIN)/python -m tests.parity --tensor-parallel 2
	$(BIN)/python -m tests.parity --quantized

test-gpu:  ## All that needs a GPU, in under ten minutes, with the machine's own Python packages: PYTHON=python3 make test-gpu
	PYTHONPATH=.:client $(PYTHON) -m tests.gpu.plan --docs docs/gpu.md

netns: .venv/.installed  ## A mesh on three machines and a worker on two, which are namespaces: takes no privilege on most systems (~10 minutes).
	TANDEM_NETNS=1 unshare --map-root-user --net $(BIN)/pytest -q -m netns tests/netns

FROM ?=
upgrade: .venv/.installed  ## A mesh of an older revision is upgraded under load. FROM=REVISION; default: the last release, else 50 commits ago.
	$(if $(FROM),TANDEM_UPGRADE_FROM=$(FROM)) $(BIN)/pytest -q -m soak tests/e2e/test_upgrade.py

compose-test: .venv/.installed  ## The image as SageMaker starts it; the cluster of docker-compose.yml, each part killed in the middle of answers; needs a Docker engine (minutes).
	$(BIN)/pytest -q -s -m soak tests/compose

interrupts: .venv/.installed  ## Ctrl-C, SIGTERM and SIGHUP at each program that people run, at several moments (~90 minutes).
	$(BIN)/pytest -q -m soak tests/e2e/test_interrupts.py

chaos: .venv/.installed  ## Everything that has figures: faults of all kinds under load; ends with the table (about an hour).
	$(BIN)/pytest -q -m '(evidence or soak) and not gpu' --ignore=tests/wheels --ignore=tests/compose --ignore=tests/e2e/test_interrupts.py

soak: export TANDEM_SOAK_S ?= 7200
soak: export TANDEM_SOAK_SAMPLES ?= soak.jsonl
soak: .venv/.installed  ## Load with a fault a minute for TANDEM_SOAK_S, samples in soak.jsonl; so far: python -m tests.chaos.samples soak.jsonl
	nice -n 10 $(BIN)/pytest -q -s tests/chaos/test_soak.py

defects: .venv/.installed  ## Every defect found by attack and acceptance tests: what was tried, before, after.
	$(BIN)/pytest -q -m 'defect and not gpu and not soak' -n $(TESTS_AT_ONCE)

bench: .venv/.installed  ## Speed of the mesh, of its engine alone, and of each KV transport.
	$(BIN)/python -m bench.serving
	$(BIN)/python -m bench.transfer
	$(BIN)/python -m bench.attention

AGAINST ?= HEAD~1
bench-guard: .venv/.installed  ## Has the last commit made anything slower? Both commits in turns (~15 minutes). AGAINST=COMMIT for another one.
	$(BIN)/python -m bench.guard --against $(AGAINST)

clean:  ## Remove what the other targets made.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build client/build *.egg-info client/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
