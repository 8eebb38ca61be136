"""An engine that serves all prompts when it is told to, and says what it loaded and stored.

python -m tests.tiering.valkey.sharing_engine URL NAMESPACE
"""

from __future__ import annotations

import json
import sys

from kvtier.base import Medium
from kvtier.testing import TierHarness
from tests.tiering.engine import engine_with

BLOCKS, NUM_PROMPTS = 6, 12
PROMPTS = [TierHarness.keys(BLOCKS, start=10 * number) for number in range(NUM_PROMPTS)]
NUM_BLOCKS = BLOCKS * NUM_PROMPTS
NUM_ROWS = 2 * NUM_BLOCKS


def main() -> None:
    url, namespace = sys.argv[1:]
    entry = {"type": "valkey", "url": url}
    with engine_with(entry, num_rows=NUM_ROWS, namespace=namespace) as engine:
        print("ready", flush=True)
        sys.stdin.readline()
        loaded = sum(engine.serve(prompt) for prompt in PROMPTS)
        engine.settle()
        stored = sum(
            len(event.keys)
            for event in engine.manager.take_events()
            if event.medium is Medium.STORAGE and not event.removed
        )
        print(json.dumps({"loaded": loaded, "stored": stored}), flush=True)


if __name__ == "__main__":
    main()
