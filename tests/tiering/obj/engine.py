"""An engine with an obj tier in a process of its own. Each line that it reads is an order, which it
answers with one line. It ends with its input.

python -m tests.tiering.obj.engine SETUP
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.base import Medium
from kvtier.connector.events import BlockStored
from kvtier.cpu.region_file import reclaim_dead_regions
from kvtier.tiering.obj.janitor import JanitorTimes
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from tests.tiering.reference import ReferenceEngine, prompts

__all__ = ["Answer", "EngineProcess", "engines"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine has done with some prompts."""

    num_loaded: int
    """Tokens loaded."""
    num_stored: int
    """Blocks that the engine has written, by its events."""
    figures: Mapping[str, float]


class EngineProcess:
    """The test's side of an engine."""

    def __init__(
        self, tier: Mapping[str, Any], times: JanitorTimes, options: Mapping[str, Any]
    ) -> None:
        setup = {"tier": dict(tier), "times": asdict(times), "options": dict(options)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def wait_for_start(self) -> None:
        assert self._read() == "ready"

    def serve(self, count: int, start: int = 0) -> Answer:
        """Serve prompts one after the other, and wait for the stores."""
        self.begin(count, start)
        return self.result()

    def begin(self, count: int, start: int = 0) -> None:
        """The same, without waiting for `result`."""
        self._order(["serve", count, start])

    def result(self) -> Answer:
        return Answer(*self._read())

    def reset(self) -> None:
        """Let the engine reset its cache: its host memory; with `reset_scope` "all" it also uses
        private blocks from now on."""
        self._order(["reset"])
        self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End in good order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _order(self, order: Sequence[object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine has ended: {self._process.wait()}"
        return json.loads(line)


@contextmanager
def engines(
    count: int,
    tier: Mapping[str, Any],
    times: JanitorTimes | None = None,
    **options: Any,
) -> Iterator[list[EngineProcess]]:
    """Engines that have started. Those that still run at the end are killed."""
    with ExitStack() as stack:
        stack.callback(reclaim_dead_regions, "/dev/shm")
        started = []
        for _ in range(count):
            process = EngineProcess(tier, times or JanitorTimes(), options)
            stack.callback(process.close)
            started.append(process)
        for process in started:
            process.wait_for_start()
        yield started


# --- in the process ------------------------------------------------------------------------------


def _main() -> None:
    setup = json.loads(sys.argv[1])
    ObjSecondaryTierManager.janitor_times = JanitorTimes(**setup["times"])
    tier = {"type": "obj", "enable_kv_events": True, **setup["tier"]}
    with ReferenceEngine(tier, **setup["options"]) as engine:
        _answer("ready")
        for line in sys.stdin:
            match json.loads(line):
                case ["serve", count, start]:
                    num_loaded = engine.serve(prompts(count, start))
                    engine.settle()
                    stored = sum(
                        len(event.block_hashes)
                        for event in engine.events()
                        if isinstance(event, BlockStored) and event.medium is Medium.STORAGE
                    )
                    _answer([num_loaded, stored, engine.figures()])
                case ["reset"]:
                    engine.forget()
                    _answer("done")


def _answer(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    _main()
