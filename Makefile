# One command each: install once into .venv, then demo, docs, test, test-all, lint, wheel.
# HOMEPAGE=URL, the repository's address, goes into the site and into what is published.
# Without a GPU: make install TORCH_INDEX=URL, the index of torch's CPU build; the default build
# brings 5.6 GB of CUDA libraries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# CONSTRAINTS= installs the newest versions that setup.cfg allows.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

export DS_QUANT_HOMEPAGE := $(HOMEPAGE)

IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install demo report docs test test-all test-clients lint wheel clean

install: $(STAMP)

# torch goes first and alone: deepspeed's build looks for it.
$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS)
	@echo "1 of 3: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: torch$(if $(TORCH_INDEX),, (5.6 GB with CUDA; TORCH_INDEX=URL of the CPU build: 0.2 GB))"
	$(PIP_INSTALL) $(TORCH_FLAGS) torch
	@echo "3 of 3: ds_quant with its C++ kernels, DeepSpeed, and what tests, demo and docs need"
	$(PIP_INSTALL) -e ".[dev]"
	touch $(STAMP)

demo: install
	$(BIN)/python benchmarks/compare.py $(if $(TEXT),--text $(TEXT))

# A page beside every committed result file, and their list in docs/results.md
report: install
	$(BIN)/python benchmarks/sections.py

# The documentation as a site, in site/; a link that leads nowhere ends the build.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f .ci/mkdocs.yml
	@echo "open file://$(abspath site/index.html)"

# test-all takes what is slow, too; tests that compare times come last and alone. Two workers, as ranks
# mostly wait for each other. The order of the files ends with short tests.
# Every rank would compile the package again where the environment forbids to keep bytecode.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -m "not (gpu or slow or clients or alone)" $(IN_PARALLEL)

test-all: install
	$(BIN)/python -m pytest -m "not (gpu or clients or alone)" $(IN_PARALLEL)
	$(BIN)/python -m pytest -m "alone and not (gpu or clients)" $$(grep -rl mark.alone tests)

# Trains with Trainer, accelerate, TRL, peft and Lightning; their versions are pinned with the rest.
test-clients: install
	$(PIP_INSTALL) --quiet -e ".[clients]"
	$(BIN)/python -m pytest -m clients tests/clients tests/integration/test_examples.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

# What is published, in dist/: source archive, a manylinux wheel with the C++ library, and a wheel
# without it for all other platforms. build/ is removed because setuptools would pack modules left
# there by an earlier build.
wheel: install
	$(PIP_INSTALL) --quiet -e ".[release]"
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --strip --wheel-dir dist dist/*-linux_*.whl
	rm -rf build dist/*-linux_*.whl
	DS_QUANT_PURE=1 $(BIN)/python -m build --no-isolation --wheel --outdir dist
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist site demo_out *.egg-info ds_quant/kernels/_native*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
