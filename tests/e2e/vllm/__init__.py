"""Stock vLLM with kvtier: the same tokens as without it, with blocks that came from a tier.

A process of the environment with vLLM imports it once (`zygote`); every scenario is a fork of that
process. Tests start scenarios through the fixture `vllm`; see `processes` and `remote_engine`.
"""
