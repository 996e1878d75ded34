# Two commands do everything: `make train` and `make test`. Both make their own environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test pytest lint format types table docs browser bench chaos clean

train: $(VENV)/.installed
	$(BIN)/paceline train quickstart --procs 2

# Types are checked beside the tests, which leave a core idle at times.
test: lint
	$(MAKE) --no-print-directory -j2 types pytest

pytest: $(VENV)/.installed-dev
	$(BIN)/pytest --durations=10

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# After a registered name, its signature or the version of a library has changed.
table: $(VENV)/.installed-dev
	$(BIN)/python scripts/registry_table.py
	$(BIN)/python scripts/recipe_reference.py > docs/recipe-reference.md

# The documentation as pages in build/site; needs no network once the environment is there.
docs: $(VENV)/.installed
	$(BIN)/python scripts/docs_site.py

# The report is tested in Chromium. Without it, or without the right to install it, that test is skipped.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } || \
	echo "no Chromium, and it cannot be installed here: the browser test will be skipped"

# Needs an idle machine for most of an hour.
bench: .venv-bench/.installed .venv-bench/pysodmetrics/.installed
	.venv-bench/bin/python -m benchmarks

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m chaos

clean:
	rm -rf $(VENV) .venv-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Torch comes first and alone: with it in place, no other package can pull in another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

.venv-bench/.installed: pyproject.toml constraints.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# An environment of its own within the other, since PySODMetrics needs an older numpy.
.venv-bench/pysodmetrics/.installed: .venv-bench/.installed
	.venv-bench/bin/python -m venv .venv-bench/pysodmetrics
	.venv-bench/pysodmetrics/bin/pip install --quiet --disable-pip-version-check pysodmetrics==1.6.2
	touch $@
