# Tessella. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# By all cores, where pip would by one. Packages have files that are no Python: those say nothing.
COMPILED := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src tests || true

# A sixth of the time a worker waits for processes that start, servers and a browser.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.DEFAULT_GOAL := help
.PHONY: help quickstart test check docs wheel format gpu ray bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: $(VENV)/installed  ## install, then folder → dataset → network → plan → served, on real digits
	$(BIN)/tessella quickstart

test: $(VENV)/installed-dev  ## install, then every CPU test, the browser's included
	@.ci/browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.narrower

check: docs  ## format, lint, types, import contract, the site's links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-dev  ## the site of docs/ into build/docs, warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs

wheel: docs  ## a wheel with the site in it, into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

format: $(VENV)/installed-dev  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu:  ## the tests of tests/gpu, with the machine's own python3 (an H100 or H200)
	PYTHONPATH=src $(PYTHON) -m pytest -o addopts= tests/gpu -ra

ray: $(VENV)/installed-dev  ## install Ray (80 MB), then serve on a cluster of two nodes while parts of it die
	$(PIP) -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -n 0

bench: $(VENV)/installed-dev  ## the benchmarks behind the README's numbers that run without a GPU
	$(BIN)/python -m benchmarks.engine --target cpu

clean:  ## remove the virtual environment and what tools left
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Tessella needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(COMPILED)
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	$(COMPILED)
	touch $@
