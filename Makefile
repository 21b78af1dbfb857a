# Two commands: `make train` trains a language model on this machine, `make test` runs every check.
PYTHON ?= python3
BIN := .venv/bin
DATA := datasets/stdlib

.PHONY: help train test test-oldest lint clean

help:
	@echo "make train        build a data set from Python's own source, train a small GPT on it, show what it learnt"
	@echo "make test         lint, types and tests"
	@echo "make test-oldest  the tests with the oldest torch that is supported, in an environment of its own"
	@echo "make clean        remove the environments (.venv*); runs/ and datasets/ stay"

.venv/ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "megascale needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "could not make .venv; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

.venv/core: .venv/ready pyproject.toml constraints.txt
	@echo "installing megascale into .venv (PyTorch is large: this can take some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/core
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: .venv/core
	@$(BIN)/megascale data build --stdlib --out $(DATA)
	@$(BIN)/megascale train examples/stdlib.toml

lint: .venv/dev
	@$(BIN)/ruff check src tests scripts
	@$(BIN)/ruff format --check src tests scripts
	@$(BIN)/mypy
	@found=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$found"; exit 1; }
	@$(BIN)/python scripts/lint_words.py

test: .venv/dev lint
	@scripts/system-packages
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

# The other end of the range of torch in pyproject.toml, in an environment of its own. Some gigabytes, since this release
# comes with CUDA; set PIP_EXTRA_INDEX_URL to an index of CPU builds to have a tenth.
OLDEST := torch==2.11.0
.venv-oldest/ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-oldest
	@grep -v '^torch==' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt \
	  '$(OLDEST)' -e '.[test]'
	@touch $@

test-oldest: .venv-oldest/ready
	@.venv-oldest/bin/python -m pytest -n 2 --dist loadgroup

clean:
	rm -rf .venv .venv-oldest
