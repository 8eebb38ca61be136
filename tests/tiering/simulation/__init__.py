"""Whole lives of an engine over faulty tiers, decided by one seed, in virtual time.

`python -m tests.tiering.simulation --help` runs them from the command line.
"""
