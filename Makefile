# Two commands: `make train` trains a language model on this machine, `make test` runs every check.
PYTHON ?= python3
BIN := .venv/bin
DATA := datasets/stdlib

.PHONY: help train demo docs wheel test test-oldest test-slurm test-kubernetes lint page-types clean

help:
	@echo "make train        build a data set from Python's own source, train a small GPT on it, show what it learnt"
	@echo "make demo         a small job with a slow rank and later a hang, and the dashboard on it"
	@echo "make test         lint, types and tests"
	@echo "make docs         the documents as a site in .site; links are strict"
	@echo "make wheel        build the package into dist/, install it into a new environment and try it (PROJECT_URL: its address)"
	@echo "make test-oldest  the tests with the oldest torch that is supported, in an environment of its own"
	@echo "make test-slurm   the tests under a real Slurm (root; Debian's slurm-wlm and munge)"
	@echo "make test-kubernetes  the tests on a real Kubernetes, built once from Debian's source (root)"
	@echo "make clean        remove the environments (.venv*); runs/ and datasets/ stay"

.venv/ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "megascale needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "could not make .venv; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

.venv/core: .venv/ready pyproject.toml constraints.txt
	@echo "installing megascale into .venv (PyTorch is large: this can take some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots,spans]'
	@touch $@

.venv/dev: .venv/core
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: .venv/core
	@$(BIN)/megascale data build --stdlib --out $(DATA)
	@$(BIN)/megascale train examples/stdlib.toml

demo: .venv/dev
	@test -e $(DATA)/train.idx || $(BIN)/megascale data build --stdlib --out $(DATA)
	@$(BIN)/python scripts/demo.py

docs: .venv/dev
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs .site
	@echo "open .site/index.html"

# An environment of its own: what the wheel lacks, a clone on the path would hide.
wheel: .venv/ready
	@rm -rf dist .venv-wheel
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	@$(PYTHON) -m venv .venv-wheel
	@.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	@cd dist && ../.venv-wheel/bin/megascale --version && ../.venv-wheel/bin/megascale examples examples
	@cd dist && ../.venv-wheel/bin/megascale train --dry-run --model.preset=gpt2-124m >/dev/null && rm -r examples
	@echo "the wheel works: $$(ls dist/*.whl)"

lint: .venv/dev
	@$(BIN)/ruff check src benchmarks tests scripts
	@$(BIN)/ruff format --check src benchmarks tests scripts
	@$(BIN)/mypy
	@found=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$found"; exit 1; }
	@$(BIN)/python scripts/check_imports.py
	@$(BIN)/python scripts/style_report.py
	@if command -v npm >/dev/null 2>&1 && $(MAKE) -s scripts/page-types/node_modules 2>/dev/null; \
	then $(MAKE) --no-print-directory page-types; \
	else echo "no npm, or no TypeScript from it: the types of the dashboard's pages are not checked"; fi

# The dashboard's pages are plain modules with their types in comments; TypeScript checks them and makes nothing.
page-types: scripts/page-types/node_modules
	@cd scripts/page-types && npx --no-install tsc -p .

scripts/page-types/node_modules: scripts/page-types/package-lock.json
	@cd scripts/page-types && npm ci --no-audit --no-fund --silent && touch node_modules

test: .venv/dev lint
	@scripts/system-packages
	@rm -f .pytest_cache/v/cache/lastfailed
	@$(BIN)/python -m pytest -n 2 --dist loadgroup || { test $$? = 1 && $(BIN)/python scripts/repeat_failed.py; }

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

# Each trains under a slurmctld and slurmds of its own; skipped with the reason where there can be none.
test-slurm: .venv/dev
	@scripts/system-packages slurm
	@MEGASCALE_TEST_SLURM=1 $(BIN)/python -m pytest tests/slurm

# Under an API server and kubelets of its own, which are built once (some minutes); skipped with the reason where there
# can be none.
test-kubernetes: .venv/dev
	@scripts/kubernetes-build || true
	@MEGASCALE_TEST_KUBERNETES=1 $(BIN)/python -m pytest tests/kubernetes tests/resilience/cluster/test_containerfile.py

clean:
	rm -rf .venv .venv-oldest .venv-wheel scripts/page-types/node_modules
