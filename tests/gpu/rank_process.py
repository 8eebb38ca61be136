"""A rank in a process of its own: it stores and loads on command, and returns its bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.gpu.cache_layout import plain_layout
from tests.gpu.jobs import load, store

REPO = Path(__file__).resolve().parents[2]
NUM_SLOTS, NUM_BLOCKS, BLOCKS_PER_CHUNK, WORLD_SIZE = 6, 24, 2, 2
LAYOUT = plain_layout(4096, 80, num_blocks=NUM_BLOCKS, blocks_per_chunk=BLOCKS_PER_CHUNK)


class RankProcess:
    """The test's side."""

    def __init__(self, place: str, directory: Path, rank: int) -> None:
        arguments = [place, str(directory), str(rank)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank_process", *arguments],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with status {self._process.wait()}"
        return json.loads(line)

    def end(self) -> int:
        """Tell it to shut down its worker and end; kill it if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class _Rank:
    """The process's side."""

    def __init__(self, place_name: str, directory: str, rank: int) -> None:
        from tests.gpu.checked_worker import row_bytes
        from tests.gpu.places import CPUPlace, CudaPlace

        self._place = CudaPlace() if place_name == "cuda" else CPUPlace()
        region = SharedOffloadRegion(
            "ranks",
            NUM_SLOTS,
            rank,
            row_bytes(LAYOUT, WORLD_SIZE),
            LAYOUT.cell_bytes,
            directory=directory,
        )
        self._memory = [self._place.upload(memory) for memory in LAYOUT.new_memory(rank)]
        self.worker = self._place.open_worker(
            LAYOUT.canonical(self._memory), region, BLOCKS_PER_CHUNK
        )

    def do(self, jobs: list[tuple[bool, list[int], list[int]]]) -> list[bool]:
        """Run all jobs at once. Returns True for each that succeeded."""
        from tests.gpu.checked_worker import finish

        for job_id, (is_store, blocks, slots) in enumerate(jobs):
            job = store(blocks, slots) if is_store else load(slots, blocks)
            assert job.submit(self.worker, job_id)
        return [result.success for result in finish(self.worker, range(len(jobs)))]

    def save(self, path: str) -> None:
        """Write the device's bytes to a file."""
        np.savez(path, *map(self._place.download, self._memory))


def _serve() -> None:
    rank = _Rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        command = getattr(rank, arguments.pop("command"))
        print(json.dumps(command(**arguments)), flush=True)
    rank.worker.shutdown()


if __name__ == "__main__":
    _serve()
