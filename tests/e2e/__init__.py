"""Random lives of an engine show that offloading does not change a token. A life is one engine from
its start to its end, drawn from a seed; `python -m tests.e2e --seed N` repeats one.
"""
