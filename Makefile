# fedp3: `make demo` and `make test` work on a machine with Python >= 3.11, make and git, and nothing else.
# PIP_ARGS passes through to pip, e.g. to choose where a CPU or CUDA build of torch comes from.
PYTHON  ?= python3
VENV    ?= .venv
PIP_ARGS ?=
BIN     := $(VENV)/bin
PINS    := pyproject.toml constraints.txt
PIP     := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)
CORE    := $(VENV)/.core
FULL    := $(VENV)/.full
DOCS    := $(VENV)/.docs
BUILD   := $(VENV)/.build
# One torch thread per process: tests spread over processes instead.
TESTENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg
JOBS    ?= 2

.PHONY: help demo install hooks test test-slow test-deploy coverage lint types bench docs wheel clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "fedp3 needs Python 3.11, 3.12 or 3.13; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q --upgrade 'pip>=25.1'

# torch goes first and pinned, so that nothing else can pull another build of it.
$(CORE): $(PINS) | $(BIN)/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	@touch $@

$(FULL): $(CORE) $(PINS) paper/pyproject.toml
	$(PIP) -e '.[flower,privacy,tensorboard,mlflow,wandb,onnx,hf]' -e paper --group dev
	@touch $@

$(DOCS): $(CORE) $(PINS)
	$(PIP) -e '.[flower,privacy,tensorboard]' --group docs
	@touch $@

$(BUILD): $(PINS) | $(BIN)/python
	$(PIP) --group build
	@touch $@

demo: $(CORE)    ## train FedAvg and FedP3 on embedded digits, end at a report (core environment only)
	$(BIN)/fedp3 demo

install: $(FULL) ## environment with every extra, the commands of paper/ and the development tools

hooks: $(FULL)   ## run ruff, mypy and a check of file sizes before every commit
	$(BIN)/pre-commit install

test: $(FULL) lint types ## lint, type-check, then every test that is not slow or against a cluster
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not deploy"

test-slow: $(FULL) ## the tests that take minutes
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

test-deploy: $(FULL) ## Flower's server and nodes as real processes: faults, TLS, resume
	$(TESTENV) $(BIN)/python -m pytest -m deploy tests/flower

coverage: $(FULL) ## the lines and branches that `make test` reaches, with pages in build/coverage
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not deploy" --cov --cov-report=term --cov-report=html

lint: $(FULL)    ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FULL)   ## mypy, strict on both packages
	$(BIN)/mypy

bench: $(FULL)   ## speed and memory as ratios, measured in one run
	$(BIN)/python -m benchmarks

docs: $(DOCS)    ## the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -E -W --keep-going -d build/doctrees docs build/docs

wheel: $(BUILD)  ## sdist and wheel in dist, installed into an empty environment and tried out there
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/wheel.py dist/*.whl $(PIP_ARGS)

clean:           ## remove the environment, what was built, and caches
	rm -rf $(VENV) build dist docs/reference/api .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
