"""An engine in a process of its own that opens a slab at a given time.

    python -m tests.tiering.disk.contender ENGINE_ID NUM_BLOCKS

Reads lines `PATH TIME`: opens the slab at that time (seconds, as of `time.time`), and writes one
line: `has it`, or the refusal. Closes the slab when the next line comes, or at the end of its
input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvtier.tiering.disk import ownership, slab
from kvtier.tiering.disk.ownership import SlabRefused
from tests.tiering.disk.harness import ROW_BYTES, bytes_for


def main() -> None:
    engine_id, num_blocks = sys.argv[1], int(sys.argv[2])
    ownership._LOCK_PATIENCE_S = 0.05
    held: slab.Slab | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        if held is not None:
            held.close()
            held = None
        path, _, start = line.strip().rpartition(" ")
        if not path:
            print("let go", flush=True)
            continue
        while time.time() < float(start):
            pass
        try:
            held = slab.open_slab(Path(path), ROW_BYTES, bytes_for(num_blocks), engine_id, None)
            print("has it", flush=True)
        except SlabRefused as refused:
            print(refused, flush=True)
        except BaseException as error:
            print(f"unexpected: {error!r}", flush=True)


if __name__ == "__main__":
    main()
