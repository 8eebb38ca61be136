"""One life of a disk tier, in a process that is going to be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import kvtier.tiering.disk.flusher
from kvtier.tiering.disk.flusher import IndexFlusher
from kvtier.tiering.disk.slab import Slab
from tests.tiering.crash.points import plant
from tests.tiering.disk.crash.engine_life import EngineLife
from tests.tiering.disk.crash.life import Life
from tests.tiering.disk.crash.mutants import MUTANTS
from tests.tiering.disk.crash.orders import Orders
from tests.tiering.disk.crash.points import SlabPoints

_LONGEST_LIFE_S = 20


def live(orders: Orders, report: Callable[..., None]) -> None:
    """Run the life. The kit calls this in the process of the life."""
    signal.alarm(_LONGEST_LIFE_S)  # a life that hangs ends by another signal than SIGKILL
    plant(kvtier.tiering.disk.flusher, _WRITE_EVERY_S=orders.write_every_s)
    if orders.mutant is not None:
        MUTANTS[orders.mutant].plant()
    _plant_reports(report)
    SlabPoints(orders.point, orders.nth, report).plant()
    life = Life(orders, report) if orders.write is None else EngineLife(orders, report)
    life.inspect()
    life.work()
    if not orders.ends_cleanly:
        os.kill(os.getpid(), signal.SIGKILL)
    life.end()


def _plant_reports(report: Callable[..., None]) -> None:
    """Report when the index and when a cut has been written."""
    real_write, real_save = IndexFlusher._write, Slab.save_superblock

    def _write(flusher: IndexFlusher) -> None:
        report("index begins")
        real_write(flusher)
        report("index ends")

    def save_superblock(slab: Slab, **changes: Any) -> None:
        real_save(slab, **changes)
        report("cut", changes.get("cut", 0))

    plant(IndexFlusher, _write=_write)
    plant(Slab, save_superblock=save_superblock)
