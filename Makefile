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
# One torch thread per process: tests spread over processes instead.
TESTENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg
JOBS    ?= 2

.PHONY: help demo install test test-slow test-deploy lint types bench clean

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

$(FULL): $(CORE) $(PINS)
	$(PIP) -e '.[flower,privacy,tensorboard]' --group dev
	@touch $@

demo: $(CORE)    ## train FedAvg and FedP3 on embedded digits, end at a report (core environment only)
	$(BIN)/fedp3 demo

install: $(FULL) ## environment with every extra and the development tools

test: $(FULL) lint types ## lint, type-check, then every test that is not slow or against a cluster
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not deploy"

test-slow: $(FULL) ## the tests that take minutes
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

test-deploy: $(FULL) ## Flower's server and nodes as real processes: faults, TLS, resume
	$(TESTENV) $(BIN)/python -m pytest -m deploy tests/flower

lint: $(FULL)    ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FULL)   ## mypy, strict on src
	$(BIN)/mypy

bench: $(FULL)   ## speed and memory as ratios, measured in one run
	$(BIN)/python -m benchmarks

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
