"""kvtier's tiering manager over example tiers, for measurements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvtier.base import OffloadKey, ReqContext
from kvtier.config.tenants import TenantRule
from kvtier.cpu.policies.tenants import BlockQuota, Tenancy
from kvtier.hints import RequestHints, new_context
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.example.io_thread import ExampleTransfer
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from tests.config.sample import make_config

PATIENT = TierSettings(lookup_timeout_s=3600, load_timeout_s=3600, store_timeout_s=3600)
"""Long deadlines, so that blocks in flight stay in flight on any machine."""


class BenchTier(ExampleSecondaryTierManager):
    """An example tier whose I/O thread can be paused, and which can withhold finished jobs."""

    withholds = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._withheld: set[int] = set()
        self._may_move = threading.Event()
        super().__init__(*args, **kwargs)

    def hold(self, holds: bool) -> None:
        """If True, the I/O thread moves blocks only in `settle`."""
        if holds:
            self._may_move.clear()
        else:
            self._may_move.set()

    def _move_block(self, transfer: ExampleTransfer) -> None:
        self._may_move.wait()
        super()._move_block(transfer)

    def submit_store(self, job: TransferJob) -> None:
        if self.withholds:
            self._withheld.add(job.job_id)
        super().submit_store(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = super().get_finished_jobs()
        if not self._withheld:
            return finished
        return [result for result in finished if result.job_id not in self._withheld]

    def settle(self) -> None:
        """Let the I/O thread finish its work. The manager collects the results later."""
        assert self._io is not None
        self._may_move.set()
        self._io.wait_until_idle()
        self._may_move.clear()

    def drain_jobs(self) -> None:
        self._may_move.set()
        super().drain_jobs()

    def keep(self, keys: Sequence[OffloadKey]) -> None:
        """Store these blocks, with the contents of the first slots."""
        slots = np.arange(len(keys), dtype=np.int64)
        job = TransferJob(-1, keys, slots, False, ReqContext("keep"), self.fingerprint)
        super().submit_store(job)
        self.settle()
        assert [result.job_id for result in super().get_finished_jobs()] == [job.job_id]


class StandInSpec:
    """The part of an `OffloadingSpec` that a tier uses."""

    config = make_config()


def contexts_of(num_tenants: int) -> Callable[[str], ReqContext]:
    """Makes contexts of requests of these tenants, by the number at the end of the request's id:
    later requests for the same blocks are of the same tenant."""
    rules = [TenantRule(f"tenant-{n}", n) for n in range(num_tenants)]

    def make_context(req_id: str) -> ReqContext:
        rule = rules[int(req_id.rsplit("-", 1)[-1]) % num_tenants]
        return new_context(req_id, None, RequestHints(tenant=rule))

    return make_context


def make_manager(
    policy: str, slots: int, memory: Any, num_tiers: int, max_blocks: int, num_tenants: int = 0
) -> tuple[TieringOffloadingManager, list[BenchTier]]:
    tenancy = None
    if num_tenants:
        # Half of the slots belong to somebody, and nobody may have more than half.
        quota = slots // num_tenants // 2, slots // 2
        quotas = tuple(BlockQuota(f"tenant-{n}", *quota) for n in range(num_tenants))
        tenancy = Tenancy(quotas, 0.25)
    primary = CPUPrimaryTierOffloadingManager(
        slots, memory, cache_policy=policy, enable_events=True, tenancy=tenancy
    )
    view = primary.get_kv_memoryview()
    tiers = [
        BenchTier(StandInSpec(), view, "example", max_blocks=max_blocks, simulate_async=True)
        for _ in range(num_tiers)
    ]
    return TieringOffloadingManager(primary, tiers, settings=[PATIENT] * num_tiers), tiers
