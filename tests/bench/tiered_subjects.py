"""Tiering managers to be measured: kvtier's, and vLLM's own.

What is compared is the work of the scheduler thread. vLLM's example tier moves no bytes: a store
writes a name into a dictionary, which never forgets one. kvtier's evicts, and copies and seals on a
thread of its own. That thread waits for the end of each request (`Subject.settle`), so that it does
not take the interpreter from the scheduler while that is timed. When it has done its work, little
of the scheduler's tables is left in the processor's caches: between two requests, both managers
have a few megabytes copied.

Time is that of the scheduler thread on a processor: on a busy machine, a thread that needs longer
is also interrupted more often.

Each function imports what it needs: this runs in two environments, of which one has vLLM.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.bench.request_life import Subject

ROW_BYTES = 4096


@dataclass(frozen=True)
class Case:
    """What to measure."""

    policy: str = "lru"
    num_tiers: int = 1
    in_flight: int = 0
    """At least so many blocks are on their way into every tier, for all of the time."""
    settle: bool = True
    """If not, the tiers' threads begin at once, and time is that of the clock on the wall."""
    slots: int = 20_000
    row_bytes: int = ROW_BYTES

    def __str__(self) -> str:
        tiers = "1 tier" if self.num_tiers == 1 else f"{self.num_tiers} tiers"
        waiting = f", {self.in_flight:,} blocks in flight" if self.in_flight else ""
        return f"{self.policy}, {tiers}{waiting}"


class Memory:
    """Rows as the primary tier's region has them, of any length and without a file."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        # Not zeros: pages that were never written are all one page.
        self._bytes = bytearray(b"\x5a") * (num_rows * row_bytes)
        self._shape = (num_rows, row_bytes)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._bytes).cast("B", self._shape)

    def cleanup(self) -> None:
        return


_COPIED = bytearray(b"\x5a") * (4 << 20)
_COPY = bytearray(len(_COPIED))


def leave_caches() -> None:
    """As in an engine, where the scheduler is not the only one at work."""
    _COPY[:] = _COPIED


@dataclass
class Tiered:
    """A tiering manager to be measured, and its tiers."""

    subject: Subject
    tiers: list[Any]

    def withhold(self, withholds: bool) -> None:
        """Whether transfers that begin from now on are never reported."""
        for tier in self.tiers:
            tier.withholds = withholds


def vllm_tiered(case: Case) -> Tiered:
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    from tests.bench.vllm_tiers import WithholdingTier

    memory = Memory(case.slots, case.row_bytes)
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks=case.slots, mmap_region=memory, cache_policy=case.policy, enable_events=True
    )
    view = primary.get_kv_memoryview()
    tiers = [WithholdingTier(None, view, "example") for _ in range(case.num_tiers)]
    manager = TieringOffloadingManager(primary, tiers)
    subject = Subject(
        manager,
        ReqContext,
        make_offload_key,
        ScheduleEndContext((), ()),
        harvests=True,
        settle=leave_caches,
        clock=time.thread_time_ns,
    )
    return Tiered(subject, tiers)


def kvtier_tiered(case: Case, max_blocks: int = 20_000) -> Tiered:
    """`max_blocks`: of each of the tiers."""
    from kvtier.base import ReqContext, ScheduleEndContext, make_offload_key
    from tests.bench.kvtier_tiers import make_manager

    memory = Memory(case.slots, case.row_bytes)
    manager, tiers = make_manager(case.policy, case.slots, memory, case.num_tiers, max_blocks)
    for tier in tiers:
        tier.hold(case.settle)

    def settle() -> None:
        if case.settle:
            for tier in tiers:
                tier.settle()
        leave_caches()

    subject = Subject(
        manager,
        ReqContext,
        make_offload_key,
        ScheduleEndContext((), ()),
        harvests=True,
        settle=settle,
        clock=time.thread_time_ns if case.settle else time.perf_counter_ns,
    )
    return Tiered(subject, tiers)


SUBJECTS = {"kvtier": kvtier_tiered, "vllm": vllm_tiered}
