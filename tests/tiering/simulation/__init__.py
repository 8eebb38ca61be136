"""Whole lives of an engine above faulty tiers, decided by one seed and played in virtual time.

`python -m tests.tiering.simulation --help` runs them from the command line.
"""
