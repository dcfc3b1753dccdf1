# One command each: install once into .venv, then demo, test, test-all, lint, wheel.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo report test test-all lint wheel clean

install: $(STAMP)

# torch goes first and alone: with it in place, deepspeed's build finds it, and on a machine whose
# index offers a CPU build of the constrained version pip does not pull the CUDA packages.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: install
	$(BIN)/python benchmarks/compare.py $(if $(TEXT),--text $(TEXT))

# docs/results.md and peer_suite.md from the committed result files, docs/support.md from the table
# of its tests
report: install
	$(BIN)/python benchmarks/make_report.py
	$(BIN)/python benchmarks/peer_page.py
	$(BIN)/python -m tests.distributed.support

# What the markers leave out: test-all takes what is slow, too. Two workers, as ranks mostly wait for
# each other; tests that compare times come last and alone.
test: LEFT_OUT := gpu or slow
test-all: LEFT_OUT := gpu
test test-all: install
	$(BIN)/python -m pytest -m "not ($(LEFT_OUT) or alone)" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m "alone and not ($(LEFT_OUT))"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# build/ is removed because setuptools would pack modules left there by an earlier build.
wheel: install
	rm -rf build
	$(BIN)/python -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
