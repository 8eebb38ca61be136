"""An engine whose disk tier has a write budget. It prints what it has written, until its input ends
or it is killed.

python -m tests.tiering.disk.budgeted_engine PATH MODE
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from kvtier.testing import TierHarness
from kvtier.tiering import cascade
from kvtier.tiering.disk import flusher
from kvtier.tiering.guard import LoadGuard
from tests.tiering.disk.engine import configured_engine
from tests.tiering.engine import ROW_BYTES

BLOCKS_PER_S = 30
NUM_BLOCKS = 1024
IDLE, BUSY, FORGETFUL = "idle", "busy", "forgetful"
"""Modes: write nothing; write as much as the budget allows; the same, with a planted bug."""


def main() -> None:
    path, mode = Path(sys.argv[1]), sys.argv[2]
    ends = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ends,), daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flusher, "_LOOK_EVERY_S", 0.05)
        patch.setattr(cascade, "_INHERITS_AFTER_S", 0.5)
        if mode == FORGETFUL:
            patch.setattr(LoadGuard, "_write", lambda *_: None)
        live(path, is_busy=mode != IDLE, ends=ends)


def _wait_for_end(ends: threading.Event) -> None:
    sys.stdin.read()
    ends.set()


def live(path: Path, is_busy: bool, ends: threading.Event) -> None:
    budget = BLOCKS_PER_S * 86_400 * ROW_BYTES
    num_written = 0
    with configured_engine(path, num_rows=64, num_blocks=NUM_BLOCKS, write_budget=budget) as engine:
        for number in count():
            print(num_written, flush=True)
            if ends.is_set():
                break
            if is_busy:
                engine.serve(TierHarness.keys(8, start=time.time_ns() % 10**15 + 8 * number))
            engine.step()
            num_written += int(
                engine.figures().get('kvtier_tier_blocks{tier="0:disk",direction="store"}', 0)
            )
            time.sleep(0.002)


if __name__ == "__main__":
    main()
