"""Runs of a disk tier that is killed: one seed, a range of seeds, or as many as there is time for.

The same seed gives the same orders; how far each life gets with them depends on its threads.
"""

from __future__ import annotations

from tests.tiering.disk.crash.run import SUITE

if __name__ == "__main__":
    SUITE.main(__doc__)
