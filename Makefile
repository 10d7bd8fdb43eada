# GPU Portal: `make run` sets everything up and runs it; `make test` sets everything up and runs all tests.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
WITHOUT ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint bench clean setup setup-test demo

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(VENV)/run.stamp: requirements.txt
	@test -n "$(PYTHON)" || { echo "gpuportal: Python 3.11 or newer with venv is needed (on Debian: apt-get install python3 python3-venv)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp requirements-test.txt
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements-test.txt
	@touch $@

setup: $(VENV)/run.stamp  ## the environment to run it
setup-test: $(VENV)/test.stamp
	@tools/test-packages.sh $(WITHOUT)

run: setup  ## set up and run the portal (PORT=8000)
	@$(BIN)/python manage.py up --port $(PORT)

demo: setup  ## load the demonstration into the database
	@$(BIN)/python manage.py demo

lint: $(VENV)/test.stamp  ## style, types, import directions, migrations, templates
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy scheduling/engine scheduling/services teams/services
	$(BIN)/lint-imports
	GPUPORTAL_DATA=$$(mktemp -d) $(BIN)/python manage.py makemigrations --check --dry-run
	GPUPORTAL_DATA=$$(mktemp -d) $(BIN)/python tools/check_templates.py

test: setup-test lint  ## lint and all tests; WITHOUT="slurm browser" leaves groups out
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(foreach g,$(WITHOUT),--without $(g)) $(PYTEST_ARGS)

bench: $(VENV)/test.stamp  ## benchmarks; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

clean:  ## remove the environment and caches, not the data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './data/*' -prune -exec rm -rf {} +
