"""A run: several lives on one root, some of them at the same time, all drawn from one seed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.tiering.crash.oracle import Violation
from tests.tiering.crash.processes import EngineProcesses, Report
from tests.tiering.crash.runs import CrashSuite
from tests.tiering.fs.crash.mutants import MUTANTS
from tests.tiering.fs.crash.oracle import Oracle
from tests.tiering.fs.crash.orders import Bias, Orders
from tests.tiering.fs.crash.points import (
    AT_CLEARING,
    AT_CLOSING,
    AT_MAKING,
    AT_OPENING,
    AT_RECOUNTING,
    AT_WORK,
    POINTS,
)

NUM_LIVES = 8
_LONGEST_RUN_S = 120.0
_LOOK_EVERY_S = 0.04
_CHARGE = 16_640
"""Most bytes that one block takes."""
_LEAST_BYTES = 2 << 20
_NAMESPACE_BYTES = 258 * 4096
_NUM_BLOCKS = (12, 20, 40, 80)
_MORE_BLOCKS = 45
"""Blocks that fit in addition if there is only one namespace."""
_ROTA = Random(0).sample((*POINTS, *AT_WORK), len(POINTS) + len(AT_WORK))
"""The points take turns, in an order without neighbours that are alike; those that are reached most
often have two."""


class RootRun:
    """Draws the orders of each life, and checks the root many times meanwhile."""

    def __init__(
        self, seed: int, processes: EngineProcesses, root: Path, mutant: str | None
    ) -> None:
        self._bias = bias = Bias() if mutant is None else MUTANTS[mutant].bias
        self._seed = seed
        self._random = random = Random(seed)
        self._processes = processes
        self._root = root
        self._look_at = 0.0
        self.num_lives = 0
        self.trace: list[str] = []
        self.reports: list[Report] = []
        num_blocks = bias.num_blocks or random.choice(_NUM_BLOCKS)
        self._epoch_rate = bias.epoch_rate or random.choice((0.0, 0.0, 0.05))
        self._num_at_once = random.randint(2, 4)
        self._foreign_rate = bias.foreign_rate or random.choice((0.0, 0.2))
        max_bytes = _LEAST_BYTES + num_blocks * _CHARGE
        if bias.num_blocks is None:
            # Space for other namespaces, or hardly any.
            max_bytes += random.choice((0, 1, 2)) * _NAMESPACE_BYTES
        excess = 3.0 if bias.num_blocks else random.uniform(0.6, 2.0)
        self._orders = Orders(
            seed="",
            number=-1,
            root=str(root),
            max_bytes=max_bytes,
            namespace="ours",
            boot=1,
            num_keys=int((num_blocks + _MORE_BLOCKS) * excess),
            num_operations=0,
            quiet_patience_s=20.0 if mutant is None else bias.quiet_patience_s,
            mutant=mutant,
        )
        self.oracle = Oracle(root, max_bytes)

    @property
    def tally(self) -> Counter[str]:
        return self.oracle.tally

    def keep(self) -> None:
        """Nothing to add: the root is in the directory."""

    def run(self) -> None:
        """Raises `Violation`. No life is left running."""
        try:
            self._run()
        finally:
            self._processes.end_all()

    def _run(self) -> None:
        for _ in range(NUM_LIVES):
            self._listen_until(lambda: len(self._processes.running) < self._num_at_once)
            orders = self._draw()
            if orders.point in AT_RECOUNTING or self._random.random() < 0.05:
                orders = self._restart_machine(orders)
            self._start(orders)
        self._listen_until(lambda: not self._processes.running)
        # The last life works a little, inspects everything, and is not killed.
        last = replace(
            self._next(),
            namespace="ours",
            num_operations=10,
            epoch_rate=0.0,
            inspects=True,
            ends_cleanly=True,
        )
        self._start(last)
        self._listen_until(lambda: not self._processes.running)
        self.oracle.look_at_the_end()

    def _next(self) -> Orders:
        number = self._orders.number + 1
        self._orders = replace(self._orders, number=number, seed=f"{self._seed}/{number}")
        return self._orders

    def _draw(self) -> Orders:
        random = self._random
        orders = self._next()
        point = self._draw_point(orders.number)
        is_foreign = orders.number > 0 and random.random() < self._foreign_rate
        epoch_rate = self._epoch_rate
        if point in AT_CLEARING or (point in AT_MAKING and orders.number):
            epoch_rate = max(epoch_rate, 0.1)
        return replace(
            orders,
            namespace="theirs" if is_foreign else "ours",
            num_operations=random.choice((15, 30, 60)),
            epoch_rate=epoch_rate,
            point=point,
            nth=self._draw_nth(point),
            kill_after_s=random.uniform(0.0, 0.4) if point is None else None,
            ends_cleanly=point in AT_CLOSING or random.random() < 0.3,
        )

    def _draw_point(self, number: int) -> str | None:
        """Every point takes its turn; those of creation in the first life."""
        random = self._random
        if number == 0:
            at_creation = (*AT_OPENING, *AT_MAKING)
            return at_creation[self._seed % len(at_creation)]
        if random.random() < 0.2:
            return None
        if self._bias.point is not None and random.random() < 0.6:
            return self._bias.point
        return _ROTA[(self._seed * NUM_LIVES + number) % len(_ROTA)]

    def _draw_nth(self, point: str | None) -> int:
        if point == "make namespace: mkdir after":
            return self._random.randint(1, 256)
        if point in AT_WORK:
            return self._random.randint(1, 8)
        return 1 if point in (*AT_OPENING, *AT_RECOUNTING) else self._random.choice((1, 1, 2))

    def _restart_machine(self, orders: Orders) -> Orders:
        """Kill all lives. The next ones do not trust the ledger, or find it lost."""
        self._listen_until(lambda: not self._processes.running, is_impatient=True)
        self._orders = replace(self._orders, boot=self._orders.boot + 1)
        self.oracle.tally["restarts of the machine"] += 1
        if self._random.random() < 0.3 and (self._root / "ledger").exists():
            os.truncate(self._root / "ledger", 0)
            self.oracle.note_lost_ledger()
        return replace(orders, boot=self._orders.boot)

    # --- while lives run -----------------------------------------------------------------------

    def _start(self, orders: Orders) -> None:
        self.num_lives += 1
        self.trace.append(str(orders))
        self._processes.start(orders)

    def _listen_until(self, is_so: Callable[[], bool], is_impatient: bool = False) -> None:
        deadline = time.monotonic() + _LONGEST_RUN_S
        while not is_so():
            if time.monotonic() > deadline:
                raise Violation("a run does not end")
            if is_impatient:
                for number in self._processes.running:
                    self._processes.kill(number)
            self._follow(_LOOK_EVERY_S)
            if time.monotonic() < self._look_at:
                continue
            with self._processes.standstill():
                self._follow(0)
                self.oracle.look()
            self._look_at = time.monotonic() + _LOOK_EVERY_S

    def _follow(self, wait_s: float) -> None:
        for report in self._processes.reports(wait_s):
            self.reports.append(report)
            self.oracle.follow(report)


SUITE = CrashSuite(
    "tests.tiering.fs.crash",
    lambda seed, processes, directory, mutant: RootRun(seed, processes, directory / "root", mutant),
    MUTANTS,
)
