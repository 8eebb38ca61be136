"""Four engines on one root under a tight quota, some of them killed by SIGKILL: the quota holds, no
wrong byte is loaded, survivors keep working, and only blocks are left in the end. The tier runs
unmodified, with its real pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random, SystemRandom

import pytest

from tests.tiering.crash.processes import EngineProcesses
from tests.tiering.fs.crash.oracle import Oracle
from tests.tiering.fs.crash.orders import Orders
from tests.tiering.fs.crash.run import SUITE

NUM_ENGINES = 4
NUM_KEYS = 300
MAX_BYTES = 5 << 20
"""Space for about 250 blocks and the directories."""
LOOK_EVERY_S = 0.05
PATIENCE_S = 60.0


class FourEngines:
    """Engines that work until a given time, or are killed before and replaced."""

    def __init__(self, processes: EngineProcesses, root: Path, seed: int, seconds: float) -> None:
        self.oracle = Oracle(root, MAX_BYTES)
        self.num_kills = 0
        self._processes = processes
        self._root = root
        self._seed = seed
        self._random = Random(seed)
        self._end = time.monotonic() + seconds
        self._numbers = count()
        self._progress: dict[int, tuple[int, int]] = {}
        """By number of a life: the blocks that it stored and loaded."""
        self._look_at = 0.0

    def run(self) -> None:
        """Raises `Violation`, or `AssertionError` if an engine stops working."""
        for _ in range(NUM_ENGINES):
            self._start()
        self._await_progress()
        while time.monotonic() < self._end:
            self._processes.kill(self._random.choice(sorted(self._processes.running)))
            self.num_kills += 1
            self._listen_for(self._random.uniform(0.0, 0.3))
            self._start()
            self._await_progress()
            self._listen_for(self._random.uniform(0.0, 0.5))
        self._await(lambda: not self._processes.running, "engines do not end")
        self._start(inspects=True, num_operations=0)
        self._await(lambda: not self._processes.running, "the last engine does not end")
        self.oracle.look_at_the_end()

    def _start(self, inspects: bool = False, num_operations: int = 10**9) -> None:
        number = next(self._numbers)
        orders = Orders(
            seed=f"{self._seed}/{number}",
            number=number,
            root=str(self._root),
            max_bytes=MAX_BYTES,
            namespace="ours",
            boot=1,
            num_keys=NUM_KEYS,
            num_operations=num_operations,
            work_for_s=max(0.0, self._end - time.monotonic()),
            is_hasty=False,
            ends_cleanly=True,
            inspects=inspects,
        )
        self._processes.start(orders)

    def _await_progress(self) -> None:
        """Every live engine stores and loads more blocks, or has ended at its given time."""
        before = dict(self._progress)

        def has_gone_on(number: int) -> bool:
            stored, loaded = self._progress.get(number, (0, 0))
            former_stored, former_loaded = before.get(number, (0, 0))
            return stored > former_stored and loaded > former_loaded

        self._await(
            lambda: time.monotonic() > self._end or all(map(has_gone_on, self._processes.running)),
            "a survivor does not go on working",
        )

    def _await(self, is_so: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, complaint
            self._listen_for(0.01)

    def _listen_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self._follow(0.01)
            if time.monotonic() >= self._look_at:
                with self._processes.standstill():
                    self._follow(0)
                    self.oracle.look()
                self._look_at = time.monotonic() + LOOK_EVERY_S
            if time.monotonic() >= end:
                return

    def _follow(self, wait_s: float) -> None:
        for report in self._processes.reports(wait_s):
            self.oracle.follow(report)
            match report:
                case [number, "progress", stored, loaded]:
                    self._progress[number] = stored, loaded


@pytest.fixture
def processes() -> Iterator[EngineProcesses]:
    with SUITE.processes() as running:
        yield running


@pytest.mark.parametrize(
    ("seconds", "least_kills"),
    [
        pytest.param(12, 4, id="seconds"),
        pytest.param(300, 100, id="minutes", marks=pytest.mark.soak),
    ],
)
def test_survivors_keep_working_within_the_quota(
    processes: EngineProcesses, tmp_path: Path, seconds: int, least_kills: int
) -> None:
    seed = SystemRandom().randrange(10**9) if least_kills > 10 else 0
    engines = FourEngines(processes, tmp_path / "root", seed, seconds)
    engines.run()
    tally = engines.oracle.tally
    print(f"seed {seed}: {engines.num_kills} kills", dict(tally))
    assert tally["kills"] >= least_kills
    assert tally["evictions"] > 100
    assert tally["blocks found"] > 100
