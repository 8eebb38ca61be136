"""An engine that serves chats in turns, without end, until it is killed.

python -m tests.tiering.disk.chat_engine PATH WRITE_POLICY
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from tests.tiering.disk.engine import configured_engine

NUM_CHATS, NUM_TURNS, BLOCKS_PER_TURN = 12, 3, 4
NUM_ROWS, NUM_BLOCKS = 64, 256


def prompt(chat: int, turn: int) -> list[OffloadKey]:
    return TierHarness.keys(BLOCKS_PER_TURN * (turn + 1), start=1000 * chat)


def main() -> None:
    path, write = Path(sys.argv[1]), sys.argv[2]
    with configured_engine(path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, write=write) as engine:
        for number in count():
            chat, turn = number % NUM_CHATS, number // NUM_CHATS % NUM_TURNS
            engine.serve(prompt(chat, turn))
            print("served", flush=True)


if __name__ == "__main__":
    main()
