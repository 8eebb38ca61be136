"""A run: several lives on one slab, one after the other, all drawn from one seed."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from kvtier.config.options import WritePolicyName
from kvtier.tiering.disk.layout import Geometry
from tests.tiering.crash.oracle import Violation
from tests.tiering.crash.processes import EngineProcesses, Report
from tests.tiering.crash.runs import CrashSuite
from tests.tiering.disk.crash.mutants import MUTANTS
from tests.tiering.disk.crash.oracle import Oracle
from tests.tiering.disk.crash.orders import Bias, Orders
from tests.tiering.disk.crash.points import (
    AFTER_CREATION_FAILED,
    AT_CREATION,
    AT_SHRINKING,
    MANY_TIMES,
    POINTS,
)
from tests.tiering.disk.crash.power_cut import KINDS, Loss, PowerCut

NUM_LIVES = 8
_ROW_BYTES = (4096, 4096, 4096, 12288)
_NUM_SLOTS = (3, 8, 20, 70, 130)
_ROTA = (*POINTS, *MANY_TIMES)
"""The points take turns; those that are reached most often have two."""
_STRIDE = 7
"""Step from one turn to the next, so that points that follow each other differ."""


class SlabRun:
    """Draws the orders of each life, and checks the file between them."""

    def __init__(
        self, seed: int, processes: EngineProcesses, path: Path, mutant: str | None
    ) -> None:
        self._bias = Bias() if mutant is None else MUTANTS[mutant].bias
        self.oracle = Oracle()
        self.num_lives = 0
        self.trace: list[str] = []
        self.reports: list[Report] = []
        self._found_by_last_life = b""
        """Content of the slab before the last life."""
        self._seed = seed
        self._random = random = Random(seed)
        self._processes = processes
        self._path = path
        self._num_slots = random.choice(_NUM_SLOTS)
        self._most_bytes = 0
        self._orders = Orders(
            seed="",
            number=0,
            path=str(path),
            row_bytes=random.choice(_ROW_BYTES),
            max_bytes=0,
            namespace="ours",
            policy=random.choice(("lru", "lru", "arc")),
            num_keys=max(4, int(self._num_slots * random.uniform(0.8, 1.6))),
            num_operations=0,
            write_every_s=random.choice((0.001, 0.005, 0.02)),
            epoch_rate=self._bias.epoch_rate or random.choice((0.0, 0.01, 0.05)),
            point=None,
            nth=1,
            kill_after_s=None,
            ends_cleanly=False,
            mutant=mutant,
        )

    @property
    def tally(self) -> Counter[str]:
        return self.oracle.tally

    def keep(self) -> None:
        """Save the slab as the last life found it, beside the slab as that life left it."""
        self._path.with_name("before.slab").write_bytes(self._found_by_last_life)

    def run(self) -> None:
        former = self._orders
        for _ in range(NUM_LIVES):
            orders = self._draw()
            self._live(orders, former)
            former = orders
        # The last life only inspects the slab, and is not killed.
        last = replace(
            former, number=former.number + 1, num_operations=0, ends_cleanly=True, point=None,
            kill_after_s=None, write=None,
        )  # fmt: skip
        self._live(last, former)

    def _draw(self) -> Orders:
        random = self._random
        point = self._draw_point()
        if point in AT_SHRINKING:
            self._num_slots = max(1, int(self._num_slots * random.uniform(0.5, 0.95)))
        elif random.random() < 0.15:
            self._num_slots = max(1, int(self._num_slots * random.uniform(0.6, 1.7)))
        if random.random() < (self._bias.row_rate or 0.03):
            self._orders = replace(self._orders, row_bytes=random.choice(_ROW_BYTES))
        if random.random() < 0.1:
            self._orders = replace(self._orders, namespace=random.choice(("ours", "theirs")))
        geometry = Geometry(self._orders.row_bytes, self._num_slots)
        self._orders = replace(
            self._orders,
            number=self._orders.number + 1,
            seed=f"{self._seed}/{self._orders.number}",
            max_bytes=geometry.needed_bytes + random.choice((0, 0, 1, 4095)),
            num_operations=random.choice((0, 20, 60, 60, 120, 120)),
            point=point,
            nth=random.randint(1, 12) if point in MANY_TIMES else random.choice((1, 1, 1, 2)),
            kill_after_s=random.uniform(0.0, 0.15) if point is None else None,
            ends_cleanly=random.random() < 0.15,
        )
        if self._orders.mutant is None:
            self._orders = replace(self._orders, write=self._draw_write_policy())
        return self._orders

    def _draw_write_policy(self) -> str | None:
        """Half of the lives have an engine. Seeds and lives take turns with its write policies."""
        policies = list(WritePolicyName)
        turn = self._seed + self._orders.number
        return policies[turn // 2 % len(policies)] if turn % 2 else None

    def _draw_point(self) -> str | None:
        """Every point takes its turn; those of creation when there is no file."""
        random = self._random
        number = self._orders.number
        turn = self._seed * NUM_LIVES + number
        if number == 0:
            return AT_CREATION[self._seed % len(AT_CREATION)]
        if not self._path.exists() and random.random() < 0.5:
            return random.choice(AFTER_CREATION_FAILED)
        if random.random() < 0.2:
            return None
        if self._bias.point is not None and random.random() < 0.5:
            return self._bias.point
        return _ROTA[turn * _STRIDE % len(_ROTA)]

    def _live(self, orders: Orders, former: Orders) -> None:
        self.num_lives += 1
        self.trace.append(str(orders))
        oracle = self.oracle
        oracle.expect_after(former, orders)
        self._most_bytes = max(self._most_bytes, orders.max_bytes)
        power_cut = PowerCut(self._path)
        self._found_by_last_life = power_cut.before
        if orders.write is not None:
            oracle.tally[f"lives with {orders.write}"] += 1
        violation: Violation | None = None
        for report in self._processes.live(orders):
            self.reports.append(report)
            if orders.write is not None and report[1] == "acked":
                oracle.tally[f"blocks stored with {orders.write}"] += len(report[2])
            try:
                if report[1] == "opened":
                    self._check_file(orders, *report[4:])
                oracle.follow(report)
            except Violation as seen:  # keep reading, until the life has ended
                violation = violation or seen
        if violation is not None:
            raise violation
        self._check_size_after_death()
        kind = self._draw_power_cut(orders)
        if kind is not None:
            loss = power_cut.strike(kind, self._random)
            if loss is not Loss.NOTHING:
                oracle.tally[f"power cut: {kind}"] += 1
                self.trace.append(kind)
            if loss is Loss.BLOCKS:
                oracle.expect_nothing()

    def _draw_power_cut(self, orders: Orders) -> str | None:
        random = self._random
        if self._bias.power_cut is not None and random.random() < 0.7:
            return self._bias.power_cut
        if orders.point == "slot half" and random.random() < 0.8:
            return "torn index"  # then recovery reads this slot: a header without its block
        return random.choice(KINDS) if random.random() < 0.4 else None

    def _check_file(self, orders: Orders, size: int, allocated: int) -> None:
        """Once a slab is open, its size is exact and there is no other file."""
        self._most_bytes = orders.max_bytes
        expected = Geometry.within(orders.max_bytes, orders.row_bytes).file_bytes
        if size != expected:
            raise Violation(f"the file has {size} bytes instead of {expected}")
        if not size <= allocated <= orders.max_bytes:
            raise Violation(f"du says {allocated}: {size} bytes, max_bytes {orders.max_bytes}")
        beside = [name for name in os.listdir(self._path.parent) if name != self._path.name]
        if beside:
            raise Violation(f"{beside} lies beside the slab")

    def _check_size_after_death(self) -> None:
        """At whatever moment the life was killed, the file stays within its limit."""
        if self._path.exists():
            allocated = self._path.stat().st_blocks * 512
            if allocated > self._most_bytes:
                raise Violation(f"du says {allocated}, more than max_bytes {self._most_bytes}")


SUITE = CrashSuite(
    "tests.tiering.disk.crash",
    lambda seed, processes, directory, mutant: SlabRun(
        seed, processes, directory / "kv.slab", mutant
    ),
    MUTANTS,
)
