"""What processes with vLLM are told to do, one idea per module."""
