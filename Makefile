# Everything runs from .venv, which is built on first use and rebuilt when its recipe changes.
#   make train    train a mixture-of-experts language model on 4 local processes
#   make test     what must be green before a change lands: minutes (tests/README.md)
#   make test-unit   what starts no process: seconds     make test-all   the whole suite
#   make test-python   the tests of tensors, known calls in Python where C would run them
#   make lint     ruff, mypy, import-linter
#   make bench    time beside torch's DTensor make docs     the manual, in docs/_build/html
#   make laws     the laws of placements and redistribution, a hundred thousand times, and of lists that move
#   make ops      every operator of torch's database on distributed tensors beside one device
#   make fuzz     20,000 random programs on distributed tensors beside one device
#   make rules    every rule checked, its facts in every form of its op, and every planted wrong one caught
#   make models   twenty architectures of transformers in three shardings beside one device
#   make witness  what the process groups were asked to do beside what `sw.trace()` lists
#   make explain  what `sw.explain` and `sw.explicit` say of operators beside a trace of them
#   make compositions  strategies together on whole models, beside one device
#   make walks    how many functions and files a call walks through, torch beside it; none above its ceiling
#   make corpus   what the library decides in tens of thousands of cases beside what is stored
#   make verify   every mesh of the training command beside one device, at full size

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
RECIPE := pyproject.toml constraints.txt Makefile $(wildcard src/shardwright/*/*/*.c)
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)-$(shell echo $$PPID)
TRAIN_FLAGS ?=
# Files in their order: by the number of their tests, the last would be the ones with one that takes long.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
LAWS_FLAGS ?=
OPS_FLAGS ?= --all
RULES_FLAGS ?=
WITNESS_FLAGS ?=
EXPLAIN_FLAGS ?=
COMPOSITIONS_FLAGS ?= --jobs 2
CORPUS_FLAGS ?=
MODELS_FLAGS ?=
WALKS_FLAGS ?= --check
FUZZ_FLAGS ?= --programs 20000

# Side by side: the linters work on one file after another, and the tests leave some of the time to them.
ifneq (,$(and $(filter lint,$(MAKECMDGOALS)),$(filter test,$(MAKECMDGOALS))))
MAKEFLAGS += -j2
endif

# Each rank of each world imports the tests' modules: without their bytecode it would compile them first.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install train test test-unit test-python test-all laws ops fuzz rules models witness explain compositions corpus walks verify lint bench docs clean

help:
	@sed -n '2,18s/^# *//p' Makefile

# torch comes first and alone: no range of another package can then choose a different build of it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwright needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)" setuptools
	@touch $@

# What a run needs: the library, and matplotlib for the loss curve. pip compiles what it installs, but not
# what stays where it is.
$(VENV)/.run: $(VENV)/.torch $(RECIPE)
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e ".[plot]"
	$(BIN)/python -m compileall -q src
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e ".[docs]"
	@touch $@

install: $(VENV)/.dev

train: $(VENV)/.run
	$(BIN)/shardwright train --world 4 --dp-replicate 2 --dp-shard 2 --ep 2 --out $(RUN) $(TRAIN_FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

test-unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "unit and not slow"

# The same answers without the extension: what calls on tensors come to.
test-python: $(VENV)/.dev
	SHARDWRIGHT_EXTENSION=0 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow" tests/tensor

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

laws: $(VENV)/.dev
	$(BIN)/python -m tests.laws $(LAWS_FLAGS)

ops: $(VENV)/.dev
	$(BIN)/python -m tests.ops $(OPS_FLAGS)

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz $(FUZZ_FLAGS)

rules: $(VENV)/.dev
	$(BIN)/python -m tests.rules $(RULES_FLAGS)

models: $(VENV)/.dev
	$(BIN)/python -m tests.models $(MODELS_FLAGS)

witness: $(VENV)/.dev
	$(BIN)/python -m tests.witness $(WITNESS_FLAGS)

explain: $(VENV)/.dev
	$(BIN)/python -m tests.explain $(EXPLAIN_FLAGS)

compositions: $(VENV)/.dev
	$(BIN)/python -m tests.compositions $(COMPOSITIONS_FLAGS)
	$(BIN)/python -m tests.compositions.tables_sweep
	$(BIN)/python -m tests.compositions.pipelines_sweep

walks: $(VENV)/.dev
	$(BIN)/python -m bench.walks $(WALKS_FLAGS)

corpus: $(VENV)/.dev
	$(BIN)/python -m tests.corpus $(CORPUS_FLAGS)

verify: $(VENV)/.dev
	$(BIN)/python -m bench.verify_matrix $(VERIFY)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m bench

docs: $(VENV)/.docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

clean:
	rm -rf docs/_build docs/reference/api .mypy_cache .ruff_cache .pytest_cache .hypothesis
