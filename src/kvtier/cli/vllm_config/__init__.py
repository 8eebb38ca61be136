"""`kvtier vllm-config`: the flag for vLLM, and whether it will work on this machine."""
