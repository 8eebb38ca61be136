"""Tells sagas of engines that share a root and are killed: one seed, a range of them, or as many as
there is time for.

The same seed gives the same orders; how far each life gets with them depends on its threads.
"""

from __future__ import annotations

from tests.tiering.fs.crash.mutants import MUTANTS
from tests.tiering.fs.crash.nursery import Nursery
from tests.tiering.fs.crash.saga import tell
from tests.tiering.sagas import told_by


def main() -> None:
    with Nursery() as nursery:
        told_by("python -m tests.tiering.fs.crash", __doc__, tell, nursery, MUTANTS)


if __name__ == "__main__":
    main()
