"""An engine in a process of its own, controlled by its standard input.

store FIRST COUNT   store blocks; answers how many are there now
hits FIRST COUNT    answers how many of these blocks are there
churn               store new blocks until the next line comes
reset               begin a new epoch; answers 0
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.testing import TierHarness
from kvtier.tiering.disk.layout import Geometry
from tests.cli.store.slabs import GEOMETRY, NAMESPACE, engine_on
from tests.test_architecture import REPO, SRC
from tests.tiering.fs.harness import fs_harness

_AT_ONCE = 16


class EngineProcess:
    """The parent's side. A context manager: at its end the engine is shut down, or killed."""

    def __init__(self, path: Path, geometry: Geometry = GEOMETRY) -> None:
        """With a disk tier."""
        self._start(
            "disk", str(path), NAMESPACE, str(geometry.payload_bytes), str(geometry.num_slots)
        )

    def _start(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": f"{SRC}:{REPO}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._answer() == "ready"

    def ask(self, line: str) -> int:
        self.tell(line)
        return int(self._answer())

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it with SIGKILL, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.process.communicate(timeout=60)  # it ends when its input does
        finally:
            self.process.kill()
            self.process.wait()


class FsEngineProcess(EngineProcess):
    """An engine with an fs tier, which has room for about `num_blocks` blocks."""

    def __init__(self, root: Path, namespace: str = NAMESPACE, num_blocks: int = 256) -> None:
        self._start("fs", str(root), namespace, str(num_blocks))


def _harness(kind: str, path: str, namespace: str, *numbers: str) -> TierHarness:
    if kind == "fs":
        return fs_harness(Path(path), int(numbers[0]), namespace=namespace)
    return engine_on(Path(path), namespace, Geometry(int(numbers[0]), int(numbers[1])))


def _serve(harness: TierHarness) -> None:
    print("ready", flush=True)
    next_new = 1_000_000
    for line in iter(sys.stdin.readline, ""):
        command, *numbers = line.split()
        if command == "churn":
            while not select.select([sys.stdin], [], [], 0)[0]:
                harness.wait_for(harness.store(harness.keys(_AT_ONCE, next_new)))
                next_new += _AT_ONCE
            continue
        if command == "reset":
            harness.begin_epoch(os.urandom(16))
            numbers = ["0", "0"]
        keys = harness.keys(int(numbers[1]), int(numbers[0]))
        if command == "store":
            harness.wait_for(harness.store(keys))
        print(len(harness.hits(keys)), flush=True)


if __name__ == "__main__":
    with _harness(*sys.argv[1:]) as serving:
        _serve(serving)
