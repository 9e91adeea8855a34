# SPDX-License-Identifier: Apache-2.0
# make run            install into .venv, write a config if there is none, and start the server
# make test           install what the tests need and run those of the first five minutes
# make test-all       run all tests but those that measure seconds; installs more (needs root on Debian)
# make test-rest      run what `make test-all` runs after `make test`
# make test-browser   run the tests in a real Chromium only
# make test-timing    run the tests that measure seconds; the machine should do nothing else
# make power-cuts     judge 528 states that a disk may have after a power cut (two minutes)
# make chaos          break a server and what is behind it for CHAOS_SECONDS (an hour)
# make fuzz           send a real server valid and broken requests for FUZZ_SECONDS (an hour)
# make soak           send SOAK_EVENTS events (ten million); the processes must not grow
# make lint           check style and types
# make bench          measure the speed
# make bench-large    measure the speed with millions of events in the store (takes an hour)
# make bench-log      measure the speed with Kafka as a log in front of the storage
# make dist           build the wheel, the sdist and SHA256SUMS of the last commit, in dist/
# make clean          delete the virtual environment and what the tests built
# Needs make and Python 3.11 or newer with venv; downloads everything else.

VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/pip --disable-pip-version-check -q
CONFIG ?= engage.toml
# Additional arguments for pytest, and the number of tests that run at the same time.
PYTEST_ARGS ?=
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
# Each process of a test would compile engage again if it did not find it compiled.
unexport PYTHONDONTWRITEBYTECODE
# pytest exits with 5 if it selected no test, which is fine for a part of the suite.
ALLOW_NO_TESTS = || [ $$? -eq 5 ]

# How long the programs of tests/faults last, and additional arguments, such as `--seed 1`.
CHAOS_SECONDS ?= 3600
FUZZ_SECONDS ?= 3600
SOAK_EVENTS ?= 10000000
FAULTS_ARGS ?=
FAULTS = PYTHONPATH=tests $(BIN)/python -m faults

# Additional arguments for the first benchmark of `make bench`, and for the others. With --log,
# `make bench` is `make bench-log`.
BENCH_ARGS ?=

.PHONY: help run install test test-all test-rest test-timing test-browser power-cuts chaos fuzz soak lint bench bench-large bench-log dist clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: install
	@[ -e "$(CONFIG)" ] || $(BIN)/engage init --then-serve --config "$(CONFIG)"
	@printf '\nStarting the server.\n\n'
	@exec $(BIN)/engage serve --config "$(CONFIG)"

install: $(VENV)/.run

# setuptools warns about every editable installation.
$(VENV)/.run $(VENV)/.test $(VENV)/.test-all: export PYTHONWARNINGS = ignore:Editable installation

# Changes of pyproject.toml, and of the version in the code, take effect when it is installed again.
$(VENV)/.run: pyproject.toml engage/__init__.py
	@sh .ci/venv "$(VENV)"
	$(PIP) install -e .
	@touch $@

# The tests of `make test`, and all tests.
$(VENV)/.test $(VENV)/.test-all: GROUPS = --group test
$(VENV)/.test-all: GROUPS += --group test-all --group lint
$(VENV)/.test $(VENV)/.test-all: pyproject.toml engage/__init__.py
	@sh .ci/venv "$(VENV)"
	$(PIP) install -U "pip>=25.1"
	$(PIP) install -e . $(GROUPS)
	@touch $@ $(VENV)/.run $(VENV)/.test

test: $(VENV)/.test
	@sh .ci/packages curl
	$(PYTEST) --part quick

test-all: test test-rest

test-rest: $(VENV)/.test-all
	@sh .ci/packages all
	@$(BIN)/python tests/support/prepare.py
	$(PYTEST) --part rest -m "not browser" $(ALLOW_NO_TESTS)
	$(PYTEST) --part rest --dist worksteal -m browser $(ALLOW_NO_TESTS)

test-timing: $(VENV)/.test-all
	$(BIN)/python -m pytest -m timing $(PYTEST_ARGS)

test-browser: $(VENV)/.test-all
	@sh .ci/packages all
	@$(BIN)/python tests/support/prepare.py browser
	$(PYTEST) --dist worksteal -m browser $(ALLOW_NO_TESTS)

power-cuts: $(VENV)/.test-all
	@sh .ci/packages all
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/plugins/sqlite/test_power_cuts.py --rounds 11 -k state $(PYTEST_ARGS)

chaos: $(VENV)/.test-all
	@sh .ci/packages all
	$(FAULTS).chaos --seconds $(CHAOS_SECONDS) $(FAULTS_ARGS)

fuzz: $(VENV)/.test-all
	$(FAULTS).fuzz --seconds $(FUZZ_SECONDS) $(FAULTS_ARGS)

soak: $(VENV)/.test-all
	$(FAULTS).soak --events $(SOAK_EVENTS) $(FAULTS_ARGS)

lint: $(VENV)/.test-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test-all
	@sh .ci/packages all
ifneq (,$(filter --log,$(BENCH_ARGS)))
	$(BIN)/python benchmarks/log.py $(filter-out --log,$(BENCH_ARGS))
else
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/mongo.py
	$(BIN)/python benchmarks/webhooks.py
endif

bench-large: $(VENV)/.test-all
	$(BIN)/python benchmarks/large.py $(BENCH_ARGS)

bench-log: $(VENV)/.test-all
	@sh .ci/packages all
	$(BIN)/python benchmarks/log.py $(BENCH_ARGS)

dist:
	@bash .ci/dist dist

clean:
	rm -rf "$(VENV)" .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
