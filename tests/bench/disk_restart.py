"""How long the disk tier takes to start, by the number of blocks it keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.tiering.disk.layout import Superblock
from kvtier.tiering.io.page import PAGE_BYTES
from tests.bench.report import print_table, run_alone, save, scratch_directory, verdict
from tests.bench.worker import Worker, worker

SIZES = (10_000, 100_000, 1_000_000)
BLOCK_BYTES = 4096
"""The smallest block, so that a million of them fit: with its header a block takes 8 KiB."""
ROUNDS = 3
MAX_S_PER_MILLION = 3.0

NEW, KILLED, CLOSED, WIPED = "made", "after kill -9", "after a shutdown", "index wiped"


def run() -> None:
    result = {}
    rows = []
    with scratch_directory() as directory:
        for num_blocks in SIZES:
            measured = measure(directory, num_blocks)
            result[num_blocks] = measured
            rows.append(
                [
                    f"{num_blocks:,}",
                    *(
                        f"{typical(opened, 'seconds'):.3f} ({typical(opened, 'processor_s'):.3f})"
                        for opened in measured["opened"].values()
                    ),
                    f"{measured['kept']:,}",
                ]
            )
    print_table(
        "Seconds until the disk tier's constructor returns (processor seconds in parentheses),\n"
        f"in a new process, with the slab not cached. Blocks of {BLOCK_BYTES} bytes. Kept: blocks\n"
        "found after an engine was killed right after its last store was reported.",
        ["blocks", NEW, KILLED, CLOSED, WIPED, "kept"],
        rows,
    )
    largest = SIZES[-1]
    for how in (KILLED, CLOSED):
        per_million = typical(result[largest]["opened"][how], "seconds") / largest * 1e6
        print("  " + verdict(f"{how}, seconds per million", per_million, MAX_S_PER_MILLION))
    save("disk_restart", {str(num_blocks): each for num_blocks, each in result.items()})


def typical(opened: list[dict[str, float]], field: str) -> float:
    return median(each[field] for each in opened)


def measure(directory: Path, num_blocks: int) -> dict[str, Any]:
    """Time to open a full slab, by its history; and the number of blocks found after an engine was
    killed right after its last store was reported."""
    slab = directory / "kvtier.slab"
    described = {
        "directory": str(directory),
        "region": f"bench-{os.getpid()}",
        "block_bytes": BLOCK_BYTES,
        "num_blocks": num_blocks,
    }
    opened: dict[str, list[dict[str, float]]] = {how: [] for how in (NEW, KILLED, CLOSED, WIPED)}

    @contextmanager
    def engine_on_slab(how: str) -> Iterator[Worker]:
        leave_cache(slab)
        with worker(sys.executable, "tests.bench.disk_reopening") as engine:
            opened[how].append(engine.ask({"open": described}))
            yield engine

    with engine_on_slab(NEW) as engine:
        num_stored = engine.ask({"fill": num_blocks})
        assert num_stored == num_blocks
        engine.kill()
    for _ in range(ROUNDS - 1):
        with engine_on_slab(KILLED) as engine:
            engine.kill()
    with engine_on_slab(KILLED) as engine:
        num_kept = engine.ask({"count": num_blocks})
        engine.ask({"close": 0})
    for _ in range(ROUNDS):
        with engine_on_slab(CLOSED) as engine:
            assert engine.ask({"count": num_blocks}) == num_kept
            engine.ask({"close": 0})
    wipe_index(slab)
    with engine_on_slab(WIPED) as engine:
        # After a kill, the slots hold more blocks than the index lists.
        assert engine.ask({"count": num_blocks}) >= num_kept
        engine.ask({"close": 0})
    slab.unlink()
    return {"opened": opened, "kept": num_kept}


def leave_cache(path: Path) -> None:
    """Drop the file from the page cache, which would be read too quickly."""
    if not path.exists():
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def wipe_index(path: Path) -> None:
    with path.open("r+b") as file:
        geometry = Superblock.decode(file.read(PAGE_BYTES)).geometry
        file.seek(geometry.index_offset)
        file.write(bytes(geometry.file_bytes - geometry.index_offset))


if __name__ == "__main__":
    run_alone(run, __doc__)
