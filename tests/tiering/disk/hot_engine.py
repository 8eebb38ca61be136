"""An engine that serves a hot prompt from host memory between cold ones, until it is killed.

python -m tests.tiering.disk.hot_engine PATH NUM_BLOCKS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvtier.testing import TierHarness
from tests.tiering.disk.engine import configured_engine

HOT = TierHarness.keys(8)


def main() -> None:
    path, num_blocks = Path(sys.argv[1]), int(sys.argv[2])
    with configured_engine(path, num_rows=128, num_blocks=num_blocks) as engine:
        engine.serve(HOT)
        for number in range(1, 7):
            engine.serve(TierHarness.keys(8, start=8 * number))
            assert engine.serve(HOT) == 8
        engine.settle()
        print("served", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    main()
