"""Code that runs in processes with vLLM, one subject per module."""
