# Every target sets up what it needs: a virtual environment in .venv with the four distributions and the tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRITON ?= 3.7.1
STAMP := $(VENV)/.installed
MANIFESTS := requirements-dev.txt $(wildcard iris_*/pyproject.toml)
PYTEST_ARGS ?=

.PHONY: help demo test lint format gpu-test test-triton bench clean

help:
	@echo "make demo         the main job: a multi-rank Triton program, on GPUs where there are any, else on the CPU"
	@echo "make test         the whole test suite (no GPU needed)"
	@echo "make lint         ruff and mypy"
	@echo "make gpu-test     the tests that need GPUs"
	@echo "make test-triton TRITON=3.6.0   the suite with another Triton, in its own environment"
	@echo "make bench        the benchmarks of the CPU path; JSON under benchmarks/results"

$(STAMP): $(MANIFESTS)
	@$(PYTHON) -c 'import sys; sys.exit("Iris needs Python 3.11 or newer, not " + sys.version.split()[0] + "; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/iris demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m "gpu or multigpu" $(PYTEST_ARGS)

# The same suite with another Triton.  The pin of requirements-dev.txt is left out, everything else stays.
test-triton:
	test -x .venv-triton-$(TRITON)/bin/python || $(PYTHON) -m venv .venv-triton-$(TRITON)
	sed '/^triton==/d' requirements-dev.txt > .venv-triton-$(TRITON)/requirements.txt
	sed -i 's#-e \./#-e $(CURDIR)/#' .venv-triton-$(TRITON)/requirements.txt
	.venv-triton-$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check -r .venv-triton-$(TRITON)/requirements.txt triton==$(TRITON)
	.venv-triton-$(TRITON)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/cpu_executor.py

clean:
	rm -rf .venv .venv-triton-* build dist out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
