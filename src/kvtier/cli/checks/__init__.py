"""Checks of a machine, its vLLM and its tiers, for `kvtier vllm-config` and `kvtier doctor`."""
