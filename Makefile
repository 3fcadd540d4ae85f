# Every target sets up what it needs: .venv gets the four distributions with torch and Triton for `make demo`, and the
# tools as well for the others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRITON ?= 3.7.1
DEMO_STAMP := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
COVERAGE_STAMP := $(VENV)/.installed-coverage
PIP = $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
BUILDER ?= html
# as many tests at a time as there are cores; what PYTEST_ARGS says comes later and counts, such as -n 0
PARALLEL := -n auto --dist worksteal
TIERS ?=
JOBS ?= 1
# what a part of the tests says is no result to be kept
GPU_REPORT ?= $(if $(PYTEST_ARGS),out,benchmarks/results)
GPU_VENV := .venv-gpu
# modules and not packages: from here, Python takes the folder iris_core for an empty package
OURS := iris_core.testing, iris_allocators.settings, iris_triton.settings, iris_gluon.settings
COMMA := ,
NEEDED := torch, triton, numpy, pluggy, pydantic_settings, importlib_metadata, rich, pytest
WITH_GPU_PYTHON = python=$$($(MAKE) --no-print-directory --silent gpu-python) && echo "running with $$python" &&

.PHONY: help demo test test-all coverage lint format docs gpu-test gpu-python test-triton test-nccl bench gpu-bench soak litmus urls clean

help:
	@echo "make demo         the main job: a multi-rank Triton program, on GPUs where there are any, else on the CPU"
	@echo "make test         the whole test suite on all cores (no GPU needed)"
	@echo "make test-all     the same with every combination of dtypes, reductions, shapes, places and ranks; much longer"
	@echo "make coverage     make test, and how much of each module ran; fails below the share in pyproject.toml"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documentation, in build/docs/index.html; warnings are errors"
	@echo "make gpu-test     the tests that need GPUs, in tiers of 1, 2, 4 and 8; TIERS=\"1 2\" for some of them,"
	@echo "                  JOBS=12 for as many at the same time (needs pytest-xdist)"
	@echo "make test-triton TRITON=3.6.0 TORCH=2.11.0   the suite with others, in an environment of its own"
	@echo "make test-nccl    compiles kernels that reach other nodes with every NCCL and Triton; fetches 1.3 GB, once"
	@echo "make bench        the benchmarks of the CPU path; JSON under benchmarks/results"
	@echo "make litmus       litmus tests of PTX under 2000 seeds each; SEEDS=100 for others"
	@echo "make soak         whether memory, descriptors or threads grow, for SECONDS=120 on CPU ranks, then on 2 GPUs"
	@echo "make urls URL=https://HOST/OWNER/NAME   states the addresses of a public repository in all four pyproject files"
	@echo "make gpu-bench    remote memory access, bulk copies, GEMM and collectives on all GPUs; see docs/benchmarks.md"

$(DEMO_STAMP): requirements.txt $(wildcard iris_*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit("Iris needs Python 3.11 or newer, not " + sys.version.split()[0] + "; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, triton and Iris into $(VENV): some minutes, the first time"
	$(PIP) install 'setuptools>=77'
	$(PIP) install --no-build-isolation -r requirements.txt
	@touch $@

$(STAMP): requirements-dev.txt $(DEMO_STAMP)
	$(PIP) install --quiet -r requirements-dev.txt
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/iris demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

litmus: $(STAMP)
	SEEDS=$(or $(SEEDS),2000) $(BIN)/python -m pytest tests/checker/test_litmus.py

test-all: $(STAMP)
	$(BIN)/python -m pytest --exhaustive $(PARALLEL) $(PYTEST_ARGS)

$(COVERAGE_STAMP): $(STAMP)
	$(PIP) install --quiet 'pytest-cov>=7'
	@touch $@

coverage: $(COVERAGE_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_STAMP): requirements-docs.txt $(STAMP)
	$(PIP) install --quiet -r requirements-docs.txt
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --builder $(BUILDER) --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs

# Runs every tier that the visible GPUs allow; with TIERS="1 2" these, and fails if one of them does not run.
#
# GPU hosts often have torch and triton of their own, and no package index.  Therefore what runs on GPUs runs, the first
# of these that there is, with
#   - $(PYTHON) as it is, where VENV is empty, or where it can import the four distributions and what they need;
#   - the environment of `make test`, if it is there;
#   - an environment on top of $(PYTHON)'s packages, where those hold all but the four distributions: no index is asked;
#   - else the environment of `make test`, which is made from the index; what $(PYTHON) lacks is named before.
GPU_TIERS = --gpu-tiers="$(if $(TIERS),$(TIERS),all)" --gpu-report="$(GPU_REPORT)" $(PYTEST_ARGS)
gpu-test:
	@$(WITH_GPU_PYTHON) $$python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist worksteal) $(GPU_TIERS)

gpu-python:
ifeq ($(VENV),)
	@echo $(PYTHON)
else
	@if $(PYTHON) -c "import $(OURS), $(NEEDED)" 2>/dev/null; then echo $(PYTHON); \
	elif test ! -e $(STAMP) && $(PYTHON) -c "import $(NEEDED), setuptools, venv" 2>/dev/null; then \
		$(MAKE) --no-print-directory $(GPU_VENV)/.installed >&2 && echo $(GPU_VENV)/bin/python; \
	else \
		test -e $(STAMP) || { for module in $(subst $(COMMA),,$(NEEDED)) setuptools venv; do \
			$(PYTHON) -c "import $$module" 2>/dev/null || lacking="$$lacking $$module"; done; \
			echo "$(PYTHON) cannot import:$$lacking. $(VENV) is made from the package index instead; on a host that has" \
				"none, install these for $(PYTHON)." >&2; }; \
		$(MAKE) --no-print-directory $(STAMP) >&2 && echo $(BIN)/python; \
	fi
endif

$(GPU_VENV)/.installed: $(wildcard iris_*/pyproject.toml)
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-build-isolation --no-deps \
		-e ./iris_core -e ./iris_allocators -e ./iris_triton -e ./iris_gluon
	@touch $@

# The same suite with another Triton, and with another torch where TORCH names one.  The pins of requirements.txt are left
# out, everything else stays.
TORCH ?= $(shell sed -n 's/^torch==//p' requirements.txt)
OTHER := .venv-triton-$(TRITON)-torch-$(TORCH)
test-triton:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	sed -e '/^triton==/d' -e '/^torch==/d' -e 's#-e \./#-e $(CURDIR)/#' requirements.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -r $(OTHER)/requirements.txt \
		-r requirements-dev.txt torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==$(TRITON)
	$(OTHER)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# NCCL's device functions and the compilers alone, beside the environment: nothing in it changes.
NCCLS ?= 2.30.7 2.32.3
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
BESIDE = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target
test-nccl: $(STAMP)
	for version in $(NCCLS); do \
		test -d build/nccl/$$version || $(BESIDE) build/nccl/$$version nvidia-nccl-cu13==$$version || exit; done
	for version in $(TRITONS); do \
		test -d build/triton/$$version || $(BESIDE) build/triton/$$version triton==$$version || exit; \
		PYTHONPATH=$(CURDIR)/build/triton/$$version $(BIN)/python -m pytest tests/compile/test_nccl.py $(PYTEST_ARGS) || exit; done

bench: $(STAMP)
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/cpu_executor.py

gpu-bench:
	@$(WITH_GPU_PYTHON) for name in rma gluon_bulk gluon_gemm ccl_launch ccl ops_launch fused norm models torch_backend nodes; do $$python benchmarks/$$name.py || exit; done

SECONDS ?= 120
soak:
	@$(WITH_GPU_PYTHON) $$python benchmarks/soak.py --seconds $(SECONDS)

urls:
	@test -n "$(URL)" && ! grep '^\[project.urls\]' iris_*/pyproject.toml || { echo "say make urls URL=https://HOST/OWNER/NAME, once" >&2; exit 2; }
	@printf '\n[project.urls]\n%s = "$(URL)%s"\n%s = "$(URL)%s"\n%s = "$(URL)%s"\n%s = "$(URL)%s"\n' Source "" \
		Documentation /tree/main/docs Changelog /blob/main/CHANGELOG.md Issues /issues | tee -a iris_*/pyproject.toml

clean:
	rm -rf .venv $(GPU_VENV) .venv-triton-* build dist out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
