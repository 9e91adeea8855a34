# SPDX-License-Identifier: Apache-2.0
# make run    a virtual environment, install, a config if there is none, serve
# make test   all that the tests need, then all tests but those in a browser
# Needs make and Python 3.11 or newer with venv; everything else is fetched.

VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= engage.toml
# More arguments for pytest, and how many tests run at once.
PYTEST_ARGS ?=
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
# Exit status 5: there was no such test, which is fine for a part of the suite.
NONE_IS_FINE = || [ $$? -eq 5 ]

.PHONY: help run install test test-fast test-browser lint bench clean

help:
	@sed -n 's/^# //p' Makefile | sed -n '2,3p'
	@echo "also: make test-fast, test-browser, lint, bench, clean"

run: install
	@[ -e "$(CONFIG)" ] || $(BIN)/engage init --config "$(CONFIG)"
	@exec $(BIN)/engage serve --config "$(CONFIG)"

install: $(VENV)/.run

# pyproject.toml names the dependencies and the plugins: both are only seen by installing anew.
$(VENV)/.run: pyproject.toml
	@sh .ci/venv "$(VENV)"
	$(BIN)/pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: pyproject.toml
	@sh .ci/venv "$(VENV)"
	$(BIN)/pip install -q --disable-pip-version-check -U "pip>=25.1"
	$(BIN)/pip install -q --disable-pip-version-check -e . --group test --group lint
	@touch $@ $(VENV)/.run

test: $(VENV)/.test
	@sh .ci/packages
	@$(BIN)/python tests/support/prepare.py
	$(PYTEST) -m "not sdk and not browser"
	$(PYTEST) --dist worksteal -m "sdk and not browser" $(NONE_IS_FINE)

test-fast: $(VENV)/.test
	$(PYTEST) -m "not slow and not sdk and not browser and not mongo"

test-browser: $(VENV)/.test
	@sh .ci/packages chromium
	@$(BIN)/python tests/support/prepare.py browser
	$(PYTEST) --dist worksteal -m browser $(NONE_IS_FINE)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	@sh .ci/packages
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/mongo.py
	$(BIN)/python benchmarks/webhooks.py

clean:
	rm -rf "$(VENV)" .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
