"""Tiering managers to be measured: kvtier's, and vLLM's own.

The benchmark compares the work of the scheduler thread. vLLM's example tier moves no bytes: a store
writes a name into a dictionary and never removes one. kvtier's example tier evicts, and copies and
seals on a thread of its own. That thread waits for the end of each request (`Subject.settle`), so
that it does not take the interpreter from the scheduler during a measurement. Its work displaces
the scheduler's tables from the processor's caches. To treat both managers alike, a few megabytes
are copied between two requests of either.

Time is the scheduler thread's processor time. Wall time would count interruptions, which are more
frequent the longer a thread runs on a busy machine.

Each function imports what it needs: this module runs in two environments, and only one has vLLM.
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
    """Least number of blocks on their way into each tier, at any time."""
    settle: bool = True
    """If False, the tiers' threads start at once, and wall time is measured."""
    slots: int = 20_000
    row_bytes: int = ROW_BYTES
    tenants: int = 0
    """Tenants that share the primary tier. Their requests take turns."""

    def __str__(self) -> str:
        tiers = "1 tier" if self.num_tiers == 1 else f"{self.num_tiers} tiers"
        waiting = f", {self.in_flight:,} blocks in flight" if self.in_flight else ""
        return f"{self.policy}, {tiers}{waiting}"


class Memory:
    """Rows like those of the primary tier's region, of any length and without a file."""

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
    """Displace the processor's caches, as other work in an engine does."""
    _COPY[:] = _COPIED


@dataclass
class Tiered:
    """A tiering manager to be measured, and its tiers."""

    subject: Subject
    tiers: list[Any]

    def withhold(self, withholds: bool) -> None:
        """If True, transfers that start from now on are never reported."""
        for tier in self.tiers:
            tier.withholds = withholds


def vllm_tiered(case: Case) -> Tiered:
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    class WithholdingTier(ExampleSecondaryTierManager):  # type: ignore[misc]
        """vLLM's example tier. While `withholds` is set, it does not report finished jobs."""

        withholds = False

        def submit_store(self, job_metadata: Any) -> None:
            super().submit_store(job_metadata)
            if self.withholds:
                self.completed_jobs.pop()

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
    from tests.bench.kvtier_tiers import contexts_of, make_manager

    memory = Memory(case.slots, case.row_bytes)
    manager, tiers = make_manager(
        case.policy, case.slots, memory, case.num_tiers, max_blocks, case.tenants
    )
    manager.journal.keep()
    for tier in tiers:
        tier.hold(case.settle)

    def settle() -> None:
        manager.journal.take_over()  # in an engine, the status socket's thread does this
        if case.settle:
            for tier in tiers:
                tier.settle()
        leave_caches()

    subject = Subject(
        manager,
        contexts_of(case.tenants) if case.tenants else ReqContext,
        make_offload_key,
        ScheduleEndContext((), ()),
        harvests=True,
        settle=settle,
        clock=time.thread_time_ns if case.settle else time.perf_counter_ns,
    )
    return Tiered(subject, tiers)


SUBJECTS = {"kvtier": kvtier_tiered, "vllm": vllm_tiered}
