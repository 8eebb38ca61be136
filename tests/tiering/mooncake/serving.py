"""The reference engine over a mooncake tier, in a process of its own: it serves prompts when it is
told to, and compares every token with those of an engine without tiers. Its end can be watched, and
a crash of the client's library ends no test run.

    python -m tests.tiering.mooncake.serving SETUP    one line of output for each line of input
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.base import Medium
from kvtier.connector.events import BlockStored
from kvtier.cpu.region_file import reclaim_dead_regions
from tests.tiering.mooncake.pool import Master, Place
from tests.tiering.networks import REPO, environment_of_tests
from tests.tiering.patience import wait_until
from tests.tiering.reference import BLOCKS_PER_PROMPT, ReferenceEngine, prompts

__all__ = ["LONGEST_S", "TOKENS", "EngineProcess", "Served", "Start", "engines", "tier_on"]

TOKENS = 16 * BLOCKS_PER_PROMPT
"""Of a prompt that was loaded as a whole."""
LONGEST_S = 10.0
"""A request waits 1.5 s for the tier at most. The rest is for a busy machine."""
_PATIENCE_S = 90.0
_DEADLINES = {"lookup_timeout_ms": 500, "load_timeout_ms": 1000, "store_timeout_ms": 2000}


def tier_on(master: Master, **keys: Any) -> dict[str, Any]:
    """The entry of a tier in this pool."""
    return {
        "type": "mooncake",
        "master": master.address,
        "metadata": master.metadata_url,
        "max_pinned_share": 1,
        "enable_kv_events": True,
        **_DEADLINES,
        **keys,
    }


@dataclass(frozen=True, slots=True)
class Start:
    """Where an engine starts, and how."""

    place: Place
    tier: Mapping[str, Any]
    address: str = "127.0.0.1"
    environment: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None
    """Arguments of `ReferenceEngine`."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine has done with some prompts."""

    loaded: Sequence[int]
    """Tokens loaded, for each prompt."""
    num_stored: int
    """Blocks that the engine has written since it was last told to do something."""
    slowest_s: float
    """The longest time to a first token."""


class EngineProcess:
    """The test's side of an engine."""

    def __init__(self, start: Start) -> None:
        setup = {"tier": dict(start.tier), "options": dict(start.options or {})}
        environment = {
            "MC_TCP_BIND_ADDRESS": start.address,
            "OPENBLAS_NUM_THREADS": "1",
            **(start.environment or {}),
        }
        with start.place.entered():
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPO,
                env=environment_of_tests() | environment,
            )

    def wait_for_start(self) -> None:
        assert self._read() == "ready"

    def serve(self, count: int, start: int = 0, *, from_tiers: bool = True) -> Served:
        """Serve prompts one after the other, and wait for the stores. `from_tiers`: with empty host
        memory. Nobody may wait much longer than the tier's deadlines."""
        self.begin(count, start, from_tiers=from_tiers)
        return self.result()

    def begin(self, count: int, start: int = 0, *, from_tiers: bool = True) -> None:
        """The same, without waiting for `result`."""
        self._order(["serve", count, start, from_tiers])

    def result(self) -> Served:
        served = Served(*self._read())
        assert served.slowest_s < LONGEST_S, f"a request was held for {served.slowest_s:.1f} s"
        return served

    def serve_until_loaded(self, count: int, start: int = 0) -> None:
        """Serve until all prompts come from the pool in one round. Raises if they never do."""
        wait_until(
            lambda: self.serve(count, start).loaded == [TOKENS] * count, "all prompts are loaded"
        )

    def figure(self, name: str, **labels: str) -> float:
        """A counter of the tier since the start, or a gauge."""
        self._order(["figures"])
        figures: dict[str, float] = self._read()
        others = "".join(f',{label}="{value}"' for label, value in labels.items())
        return figures.get(f'kvtier_{name}{{tier="0:mooncake"{others}}}', 0.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> float:
        """End in good order. Returns how many seconds it took."""
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.stdin.close()
        code = self._process.wait(_PATIENCE_S)
        assert code == 0, f"the engine has ended with {code}"
        return time.monotonic() - began

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
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
        assert ready, "the engine does not answer"
        line = self._process.stdout.readline()
        assert line, f"the engine has ended: {self._process.wait()}"
        return json.loads(line)


@contextmanager
def engines(*starts: Start) -> Iterator[list[EngineProcess]]:
    """Engines that have started. Those that still run at the end are killed."""
    with ExitStack() as stack:
        stack.callback(reclaim_dead_regions, "/dev/shm")
        started = []
        for start in starts:
            process = EngineProcess(start)
            stack.callback(process.close)
            started.append(process)
        for process in started:
            process.wait_for_start()
        yield started


# --- in the process ------------------------------------------------------------------------------


def _main() -> None:
    setup = json.loads(sys.argv[1])
    # What the client's library writes to standard output must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: object) -> None:
        print(json.dumps(what), file=answers, flush=True)

    with ReferenceEngine(setup["tier"], **setup["options"]) as engine:
        answer("ready")
        for line in sys.stdin:
            match json.loads(line):
                case ["serve", count, start, from_tiers]:
                    if from_tiers:
                        engine.forget()
                    answer(_serve(engine, count, start))
                case ["figures"]:
                    answer(engine.figures())


def _serve(engine: ReferenceEngine, count: int, start: int) -> list[Any]:
    engine.slowest_s = 0.0
    loaded = [engine.serve([prompt]) for prompt in prompts(count, start)]
    engine.settle()
    stored = sum(
        len(event.block_hashes)
        for event in engine.events()
        if isinstance(event, BlockStored) and event.medium is Medium.STORAGE
    )
    return [loaded, stored, engine.slowest_s]


if __name__ == "__main__":
    _main()
