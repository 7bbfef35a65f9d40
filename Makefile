# make run        a virtual environment, hetrun with a small model, and one real answer
# make install    the same with the matrix-product backend (torch)
# make check      format, lint, types, import contracts and the quick tests: before every commit, a minute and a half
# make test       everything the tests need, and the whole behaviour, each thing once: about ten minutes
# make test-all   before a release: every row of every table, loops, environments from nothing, all Pythons: hours
# make test-ipex  the conformance table on IPEX, in an environment of its own: 8 GB, as torch 2.8 wants CUDA with it
# make fuzz-api   Schemathesis for ten minutes: whatever the server's OpenAPI document allows, and what it does not
# make release    the release gate: all of the above, faults, sanitizers, crashes, wheels, the README's figures: hours
# make bench      hetrun and llama.cpp in turn on the same file
# Tests and their marks: CONTRIBUTING.md. Programs, which are no tests, are in tests/tools (soak, stress, kill_test,
# mutants, pictures and tables of the documentation): python -m tests.tools.soak --help. On a GPU: python -m tests.cuda.
#
# PYTHON=python3.12 and VENV=elsewhere may follow, and ARGS=... for pytest. A target that is up to date installs nothing.

PYTHON ?= python3
VENV ?= .venv
IPEX_VENV ?= .venv-ipex
BIN := $(VENV)/bin
FUZZER := $(VENV)/schemathesis

SETTINGS := pyproject.toml setup.py constraints.txt scripts/install.py
SOURCES := $(shell find hetrun backends models tui -type f ! -name '*.pyc' ! -name '*.so')
# What an editable installation compiled: it does not follow these by itself.
COMPILED := $(shell find backends -name '*.[ch]')

# The richest installation that is there serves the lighter targets too; the editable one follows the sources by itself.
TESTED := $(VENV)/test.stamp
INSTALLED := $(or $(wildcard $(TESTED)),$(VENV)/install.stamp)
RUNNABLE := $(or $(wildcard $(INSTALLED)),$(VENV)/run.stamp)

TOO_OLD := hetrun needs Python 3.11 or newer, and $(PYTHON) is %s: name a newer one, as in PYTHON=python3.12
define install
@command -v $(PYTHON) >/dev/null || { \
	echo "hetrun needs Python 3.11 or newer, and there is no $(PYTHON): install one, or name it: PYTHON=python3.12"; \
	exit 1; } >&2
@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(TOO_OLD)" % sys.version.split()[0])'
@$(PYTHON) scripts/install.py --venv $(@D) $(1)
@touch $@
endef

.PHONY: help run install test test-all test-ipex check fuzz-api release bench format lint types pyright contracts clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/s/^# //p' Makefile

run: $(RUNNABLE)
	$(BIN)/hetrun run "What is the capital of France, and what is it known for?" < /dev/null

install: $(INSTALLED)

test: $(TESTED)
	$(BIN)/python -m tests.run $(ARGS)

test-all: $(TESTED)
	$(BIN)/python -m tests.run --all $(ARGS)

# IPEX goes with one torch only, an older one than the tests have otherwise.
test-ipex: $(IPEX_VENV)/ipex.stamp
	$(IPEX_VENV)/bin/pytest tests/conformance tests/backends/test_amx_*.py -k "not llamacpp"

check: $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.run --quick $(ARGS)

fuzz-api: $(TESTED) $(FUZZER)/installed.stamp
	PYTHONPATH=$(CURDIR):$(abspath $(FUZZER)) $(BIN)/python -m tests.tools.schemathesis_run

release: $(TESTED)
	$(BIN)/python -m tests.release --sign $(ARGS)

bench: $(RUNNABLE)
	$(BIN)/hetrun bench --vs llama.cpp -o table

format: $(TESTED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TESTED)
	$(BIN)/mypy
	$(BIN)/python -m tests.tools.types_reach

# A second opinion on the types; not part of `check`.
pyright: $(TESTED)
	$(BIN)/basedpyright --level error

contracts: $(TESTED)
	$(BIN)/lint-imports --no-logo

clean:
	rm -rf $(VENV) $(IPEX_VENV) build dist .emulator_cache *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/run.stamp: $(SETTINGS) $(SOURCES)
	$(call install,--wheels dist demo)

$(VENV)/install.stamp: $(SETTINGS) $(SOURCES)
	$(call install,demo amx)

$(VENV)/test.stamp: $(SETTINGS) $(COMPILED)
	$(call install,--editable demo amx test)

$(IPEX_VENV)/ipex.stamp: $(SETTINGS) $(COMPILED)
	$(call install,--editable --without torch demo ipex test)

# Beside the other packages, because its plugin would be loaded by every run of pytest.
$(FUZZER)/installed.stamp: $(TESTED) constraints.txt
	$(BIN)/python -m pip install -q --upgrade --target $(FUZZER) -c constraints.txt schemathesis
	@touch $@
