"""Stock vLLM with kvtier in it: the same tokens as without, and blocks that came from a tier.

A process of the environment with vLLM imports it once (`zygote`); every scenario is a fork of that
process. Tests start them through the fixture `vllm`, see `processes` and `remote_engine`.
"""
