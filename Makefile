# Every target sets up what it needs, from a bare clone. Override PYTHON to choose the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
TYPED := tandem router prefill_worker decode_worker kvtransfer engine mesh gateway cli bench models examples
SOURCES := $(TYPED) tests

.PHONY: demo up test lint protos parity test-gpu chaos bench clean
.DEFAULT_GOAL := test

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,gateway,redis]'
	touch $@

demo: .venv/.installed  ## Start a mesh of three processes, ask the bundled model, stop.
	$(BIN)/python examples/demo.py

up: .venv/.installed  ## Serve the bundled model until Ctrl-C.
	$(BIN)/tandem up

test: lint  ## Everything CI asks for: lint, types, import rules, protocol, tests.
	$(BIN)/python -m engine.cpu.compile
	$(BIN)/pytest -q -m 'not gpu and not soak' -n 2 --dist worksteal

lint: .venv/.installed  ## Style, types, import rules, protocol lint and generated code.
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check -q $(SOURCES)
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports
	BIN=$(BIN) protos/check.sh

protos: .venv/.installed  ## Generate tandem/v1 from protos/.
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/tandem/v1/*.proto

parity: .venv/.installed  ## Every model family against transformers, through a mesh, as a table (a few minutes).
	$(BIN)/python -m tests.parity

test-gpu:  ## Parity on CUDA, with the machine's own Python packages: PYTHON=python3 make test-gpu
	$(PYTHON) -m pytest -q -m gpu tests/gpu

chaos: .venv/.installed  ## Everything that has figures: faults of all kinds under load; ends with the table (~25 minutes).
	$(BIN)/pytest -q -m '(evidence or soak) and not gpu'

bench: .venv/.installed  ## Speed of the mesh, of its engine alone, and of each KV transport.
	$(BIN)/python -m bench.serving
	$(BIN)/python -m bench.transfer
	$(BIN)/python -m bench.attention

clean:  ## Remove what the other targets made.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
