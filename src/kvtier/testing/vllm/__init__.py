"""Stock vLLM in tests, benchmarks and the demo: an engine in this process, and small models."""
