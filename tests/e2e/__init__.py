"""The proof that offloading does not change a token: whole lives of an engine, each from a seed.

`python -m tests.e2e --seed N` lives one of them again.
"""
