"""A tier whose jobs end when the test ends them, and an engine that drives the orchestrator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import seal
from kvtier.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.config.offloading import new_epoch
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.health import BreakerSettings, TierSettings
from kvtier.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    GroupShape,
    TieringOffloadingManager,
)
from kvtier.tiering.metrics import COUNTED, tier_label, tier_series
from tests.config.sample import make_config

ROW_BYTES = 64
STEP = ScheduleEndContext()


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big") * 4, group)


def keys(*numbers: int, group: int = 0) -> list[OffloadKey]:
    return [key(number, group) for number in numbers]


def payload(of: OffloadKey) -> NDArray[np.uint8]:
    """The bytes of the block of a key."""
    return np.resize(np.frombuffer(of, dtype=np.uint8), ROW_BYTES)


class Memory:
    """Slots in plain memory instead of a shared region."""

    def __init__(self, num_blocks: int) -> None:
        self.rows = np.zeros((num_blocks, ROW_BYTES), dtype=np.uint8)
        self.is_cleaned_up = False

    def create_kv_memoryview(self) -> memoryview:
        return self.rows.data

    def cleanup(self) -> None:
        self.is_cleaned_up = True


class PlainSpec(OffloadingSpec):
    def get_manager(self) -> TieringOffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: object) -> OffloadingWorker:
        raise NotImplementedError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HandTier(SecondaryTierManager):
    """Keeps sealed blocks in a dictionary; carries a job out when `finish` is called."""

    medium = Medium.STORAGE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: dict[tuple[bytes, OffloadKey], tuple[bytes, bytes]] = {}
        self.waiting: list[TransferJob] = []
        self.results: list[JobResult] = []
        self.num_polls = 0
        self.calls: list[tuple[str, str]] = []
        """(method, request) of the calls that begin and end requests, in order."""
        self.touched: list[list[OffloadKey]] = []
        """The keys of each call of `touch`."""
        self.unknown: set[OffloadKey] = set()
        """Keys that it answers with RETRY."""
        self.policy = OffloadPolicy.BLOCK_LEVEL
        self.names_missing = True
        """True if it names the blocks that it lacks."""
        self.at_once = False
        """True if jobs end as soon as they are submitted."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self.unknown:
            return LookupResult.RETRY
        is_here = (self.fingerprint, key) in self.kept
        return LookupResult.HIT if is_here else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        self._submit("store", job)

    def submit_load(self, job: TransferJob) -> None:
        self._submit("load", job)

    def _submit(self, kind: str, job: TransferJob) -> None:
        self.calls.append((kind, job.req_context.req_id))
        self.waiting.append(job)
        if self.at_once:
            self.finish()

    def finish(
        self,
        job: TransferJob | None = None,
        success: bool = True,
        fail: Iterable[OffloadKey] = (),
        transfer_time: float | None = 0.0,
        num_gone: int = 0,
    ) -> None:
        """Carry out a job, or all that wait, and report it at the next poll."""
        for each in [job] if job is not None else list(self.waiting):
            self.waiting.remove(each)
            moved = [k for k in each.keys if success and k not in set(fail) and self._move(each, k)]
            all_moved = len(moved) == len(each.keys)
            self.results.append(JobResult(each.job_id, all_moved, moved, transfer_time, num_gone))

    def _move(self, job: TransferJob, key: OffloadKey) -> bool:
        row = self.rows[int(job.block_ids[list(job.keys).index(key)])]
        if not job.is_promotion:
            self.kept[job.fingerprint, key] = (self.seal_block(job, key, row), bytes(row))
            return True
        if (job.fingerprint, key) not in self.kept:
            return False
        header, data = self.kept[job.fingerprint, key]
        row[:] = data
        return self.verify_block(job, key, header, row)

    def get_finished_jobs(self) -> list[JobResult]:
        self.num_polls += 1
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("new", req_context.req_id))
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("finished", req_context.req_id))

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.touched.append(list(keys))

    def missing(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        if not self.names_missing:
            return []
        coming = {key for job in self.waiting if not job.is_promotion for key in job.keys}
        return [key for key in keys if not self.holds(key) and key not in coming]

    def drain_jobs(self) -> None:
        self.finish()

    def loads(self) -> list[TransferJob]:
        return [job for job in self.waiting if job.is_promotion]

    def holds(self, *blocks: OffloadKey) -> bool:
        return all((self.fingerprint, block) in self.kept for block in blocks)


class DrivenManager:
    """An orchestrator over hand-driven tiers, with the calls of an engine."""

    def __init__(
        self,
        num_blocks: int = 8,
        num_tiers: int = 1,
        *,
        groups: dict[int, GroupShape] | None = None,
        tiers: Sequence[SecondaryTierManager] | None = None,
        tier_cls: type[HandTier] = HandTier,
        prefill_tokens_per_s: float | None = 0,
        keeps_epoch: bool = False,
        shutdown_timeout_s: float = 5.0,
        store_threshold: int = 1,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.memory = Memory(num_blocks)
        self.config = make_config()
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            self.memory,  # type: ignore[arg-type]
            enable_events=True,
            store_threshold=store_threshold,
        )
        self.tiers: list[HandTier] = [
            tier_cls(
                offloading_spec=PlainSpec(self.config),
                primary_kv_view=self.primary.get_kv_memoryview(),
                tier_type=f"hand{n}",
            )
            for n in range(num_tiers)
        ]
        self.tier = self.tiers[0] if self.tiers else None
        self.settings = TierSettings(
            **{
                "breaker": BreakerSettings(min_failures=3, max_timeouts_in_a_row=2),
                "enable_kv_events": True,
                "max_pinned_share": 1.0,
                **settings,
            }
        )
        self.manager = TieringOffloadingManager(
            self.primary,
            tiers if tiers is not None else self.tiers,
            settings=[self.settings] * len(tiers if tiers is not None else self.tiers),
            groups=groups,
            new_fingerprint=None if keeps_epoch else lambda: self.config.fingerprint(new_epoch()),
            prefill_tokens_per_s=prefill_tokens_per_s,
            shutdown_timeout_s=shutdown_timeout_s,
            clock=self.clock,
        )

    def begin(self, req_id: str, **kwargs: Any) -> ReqContext:
        context = ReqContext(req_id, **kwargs)
        self.manager.on_new_request(context)
        return context

    def step(self, seconds: float = 0.001, **kwargs: Any) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(**kwargs))
        self.clock.now += seconds

    def store(self, blocks: Sequence[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Store blocks as a device would. Returns those that were stored."""
        output = self.manager.prepare_store(blocks, context)
        assert output is not None
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        for block, slot in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.memory.rows[slot] = payload(block)
        self.manager.complete_store(set(output.keys_to_store), context)
        return output.keys_to_store

    def look_up(self, blocks: Sequence[OffloadKey], context: ReqContext) -> str:
        """One letter for each block: H(it), P(ending), R(etry) or M(iss)."""
        letters = {"HIT": "H", "HIT_PENDING": "P", "RETRY": "R", "MISS": "M"}
        return "".join(letters[self.manager.lookup(block, context).name] for block in blocks)

    def load(self, blocks: Sequence[OffloadKey], context: ReqContext) -> None:
        """Load blocks as a device would, and check their bytes."""
        spec = self.manager.prepare_load(blocks, context)
        assert isinstance(spec, BlockIDsLoadStoreSpec)
        for block, slot in zip(blocks, spec.block_ids, strict=True):
            assert slot >= 0
            assert (self.memory.rows[slot] == payload(block)).all()
        self.manager.complete_load(set(blocks), context)

    def keep_below(self, blocks: Sequence[OffloadKey], tier: HandTier | None = None) -> None:
        """Give a tier blocks, as if an earlier engine had stored them."""
        tier = tier or self.tiers[0]
        for block in blocks:
            data = payload(block).data
            header = seal.make(block, data, tier.fingerprint, "an earlier engine")
            tier.kept[tier.fingerprint, block] = (header, bytes(data))

    def stat(self, name: str) -> float:
        """A metric: of the first tier, if the orchestrator counts it for tiers, or else the one
        whose name ends like this. Counters count since the last call for any metric."""
        stats = self.manager.get_stats()
        if name in COUNTED:
            series = tier_series(tier_label(0, self.tiers[0].tier_type), name)
            return (stats.gauges | stats.counters).get(series, 0.0)
        for figures in (stats.gauges, stats.counters):
            for full_name, value in figures.items():
                if full_name.endswith(name):
                    return value
        return 0.0

    def tier_counters(self) -> dict[str, int]:
        """What the orchestrator counted for the first tier since the last call for any metric."""
        counted = self.manager.get_stats().counters
        label = tier_label(0, self.tiers[0].tier_type)
        series = {name: tier_series(label, name) for name in COUNTED}
        return {name: int(counted[one]) for name, one in series.items() if one in counted}
