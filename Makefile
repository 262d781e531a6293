# `make demo` and `make test` need nothing but Python 3.11, a shell and a package index that pip is configured for.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-fast lint format clean

help:
	@echo "make demo       set up, then train the built-in student from the built-in teacher (about 10 min, no GPU)"
	@echo "make test       set up, lint, type check, all tests (about half an hour on two cores)"
	@echo "make test-fast  the tests that start no engine and no learner (under 60 s)"
	@echo "make lint       ruff and pyright"
	@echo "make format     ruff format"

setup: $(STAMP)

$(STAMP): locks/cpu.txt pyproject.toml
	@echo "Setting up $(VENV) from locks/cpu.txt: 3.3 GB, some minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --no-deps --disable-pip-version-check -r locks/cpu.txt
	@$(BIN)/pip install --quiet --no-deps --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/python -m opd.run recipes/gkd_offpolicy.py

test: setup lint
	$(BIN)/python -m pytest tests --durations=15

test-fast: setup
	$(BIN)/python -m pytest tests/unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
