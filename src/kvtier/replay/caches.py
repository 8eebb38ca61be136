"""The real managers of one engine over tiers that keep keys and no bytes, by a clock that the
replay sets; above them the engine's own cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np

from kvtier.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.replay.figures import Figures, GpuFigures, PlaceFigures
from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.health import TierSettings as GuardSettings
from kvtier.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    GroupShape,
    TieringOffloadingManager,
)
from kvtier.tiering.metrics import tier_label, tier_series

if TYPE_CHECKING:
    from kvtier.cpu.shared_offload_region import SharedOffloadRegion
    from kvtier.replay.pool import Pool
    from kvtier.replay.settings import ReplaySettings, TierSettings

__all__ = [
    "ALONE",
    "Caches",
    "Clock",
    "DeviceCache",
    "KeyTier",
    "Lane",
    "Member",
    "Move",
    "result_of",
]

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_NO_LIMIT_S = 1e9
_UNTIMED_BLOCK_BYTES = 1
_COUNTED_OF_A_TIER = (
    "loaded_blocks",
    "declined_slower_blocks",
    "declined_late_blocks",
    "declined_unmeasured_blocks",
    "declined_trial_blocks",
    "dropped_blocks",
    "shed_blocks",
    "left_out_blocks",
    "unwritten_blocks",
    "over_budget_blocks",
)
"""What the orchestrator counts of each tier (`tier_series`), and `Figures` contain."""
"""The size of a block to the orchestrator if nothing takes time. Its limits on bytes per second
have no meaning then, and no block is large enough to reach them."""


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Lane:
    """Transfers one after the other, at one speed."""

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._free_at = 0.0

    def end_of(self, num_bytes: int) -> tuple[float, float]:
        """Begin a transfer. Returns when it ends, and how long it takes without the wait for
        earlier ones. The latencies of transfers overlap."""
        now = self._clock.now
        begins = max(now + self._latency_s, self._free_at)
        seconds = num_bytes / self._bytes_per_s
        self._free_at = begins + seconds
        return self._free_at, seconds + self._latency_s


class _UntouchedSlots:
    """Host memory without memory: a view of the right shape over one byte."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        byte = np.zeros(1, np.uint8)
        self._view = np.lib.stride_tricks.as_strided(byte, (num_blocks, block_bytes), (0, 0)).data

    def create_kv_memoryview(self) -> memoryview:
        return self._view

    def cleanup(self) -> None:
        """Called by the manager's `shutdown`."""


class _TraceSpec(OffloadingSpec):
    """Tells tiers the names that are part of every key's namespace. Nothing is ever stored."""

    def __init__(self) -> None:
        super().__init__(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",)),),
                worker_kv_bytes_per_block=4096,
                engine_id="replay",
                model=OffloadingModelConfig(name="trace", dtype="none"),
                cache=OffloadingCacheConfig(tokens_per_hash=16),
                parallel=OffloadingParallelConfig(),
                extra_config={"cpu_bytes_to_use": 1 << 20},
            )
        )

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError("a replay makes its managers itself")

    def get_worker(self, kv_caches: object) -> OffloadingWorker:
        raise NotImplementedError("a replay moves no bytes")


class Move:
    """A job of a tier that is under way."""

    __slots__ = ("_end", "ends_s", "result")

    def __init__(self, ends_s: float, end: Callable[[], JobResult]) -> None:
        """`end`: ends the job. It is called once."""
        self.ends_s = ends_s
        self._end = end
        self.result: JobResult | None = None
        """None until the job has ended."""

    def finish(self) -> JobResult:
        """End the job, unless it has ended already."""
        if self.result is None:
            self.result = self._end()
        return self.result


class KeyTier(SecondaryTierManager):
    """One tier below host memory, in virtual time.

    A `CPUOffloadingManager` keeps the keys, so that the tier evicts as host memory does, with any
    eviction policy. Loads do not wait for stores: each direction has a lane of its own.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        settings: TierSettings,
        table: CPUOffloadingManager,
        block_bytes: int,
        clock: Clock | None,
    ) -> None:
        """`clock`: None: every job ends at once."""
        nothing = np.zeros((1, 1), np.uint8).data
        super().__init__(_TraceSpec(), nothing, settings.name)
        self.capacity_blocks = table.num_blocks
        self.table = table
        self._get = self.table.slots.get
        self._block_bytes = block_bytes
        self._clock = clock
        if clock is not None:
            self._reading = Lane(settings.read_bytes_per_s, settings.latency_s, clock)
            self._writing = Lane(settings.write_bytes_per_s, settings.latency_s, clock)
        self._loads: deque[Move] = deque()
        self._stores: deque[Move] = deque()
        self.num_refused = 0
        """Blocks of stores for which there was no room."""

    # --- lookups and uses -----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        block = self._get(key)
        return _MISS if block is None or block.ref_cnt < 0 else _HIT

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        answers = []
        for block in map(self._get, keys):
            if block is None or block.ref_cnt < 0:
                answers.append(_MISS)
                break
            answers.append(_HIT)
        return answers

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        return [key for key in keys if self._get(key) is None]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.table.touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self.table.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.table.on_request_finished(req_context)

    # --- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        output, kept = self._prepare_store(job)
        new = output.keys_to_store
        seconds: float | None = None

        def end() -> JobResult:
            self.table.complete_store(new, job.req_context)
            return result_of(job, kept, seconds)

        ends_s, seconds = self._times(job, len(new))
        self._begin(self._stores, Move(ends_s, end))

    def submit_load(self, job: TransferJob) -> None:
        found = self._readable(job.keys)
        self.table.prepare_load(found, job.req_context)
        seconds: float | None = None

        def end() -> JobResult:
            self.table.complete_load(found, job.req_context)
            return result_of(job, found, seconds)

        ends_s, seconds = self._times(job, len(found))
        self._begin(self._loads, Move(ends_s, end))

    def _readable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        blocks = zip(keys, map(self._get, keys), strict=True)
        return [key for key, block in blocks if block is not None and block.ref_cnt >= 0]

    def _prepare_store(self, job: TransferJob) -> tuple[PrepareStoreOutput, list[OffloadKey]]:
        """Make room for the blocks of a store. Returns also those that are here, or will be. Raises
        `JobNotBegun`."""
        output = self.table.prepare_store(job.keys, job.req_context)
        if output is None:
            self.num_refused += len(job.keys)
            raise JobNotBegun("too many blocks are being written")
        kept = [key for key in job.keys if self._get(key) is not None]
        self.num_refused += len(job.keys) - len(kept)
        return output, kept

    def _times(self, job: TransferJob, num_moved: int) -> tuple[float, float | None]:
        """When a job ends that begins now, and how long it takes."""
        if self._clock is None:
            return 0.0, None
        lane = self._reading if job.is_promotion else self._writing
        return lane.end_of(num_moved * self._block_bytes)

    def _begin(self, queue: deque[Move], move: Move) -> None:
        queue.append(move)
        if self._clock is None:
            move.finish()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        now = _NO_LIMIT_S if self._clock is None else self._clock.now
        results = []
        for queue in (self._loads, self._stores):
            while queue and queue[0].ends_s <= now:
                results.append(queue.popleft().finish())
        return results

    def drain_jobs(self) -> None:
        for queue in (self._loads, self._stores):
            for move in queue:
                move.finish()

    def die(self) -> None:
        """The engine has died, and this tier with it."""

    @property
    def next_end_s(self) -> float | None:
        """When the next job ends; None if there is none."""
        return min(
            (queue[0].ends_s for queue in (self._loads, self._stores) if queue),
            default=None,
        )


def result_of(job: TransferJob, done: list[OffloadKey], seconds: float | None) -> JobResult:
    """`done`: the keys whose blocks were moved or are there."""
    is_whole = len(done) == len(job.keys)
    # Of a job that was begun, the eviction policy declined what it does not keep.
    num_declined = len(job.keys) - len(done)
    return JobResult(
        job.job_id, is_whole, None if is_whole else done, seconds, num_declined=num_declined
    )


class DeviceCache:
    """Blocks of prompts in device memory, as vLLM keeps them.

    A running request holds its blocks. When it has ended, they stay until others need their room:
    the least recently used leave first, and of one prompt the tail before the head. Blocks for
    which there is no room, because running requests hold all of it, are not kept.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._holders: dict[OffloadKey, int] = {}
        """How many running requests hold a block."""
        self._idle: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that no request holds. The first to leave comes first."""

    def num_hits(self, keys: Sequence[OffloadKey]) -> int:
        """How many blocks at the start of a prompt are here."""
        holders, idle = self._holders, self._idle
        for number, key in enumerate(keys):
            if key not in holders and key not in idle:
                return number
        return len(keys)

    def hold(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """A running request has found or computed these blocks. Returns those that it holds now;
        the caller ends that with `release`."""
        holders, idle = self._holders, self._idle
        held = []
        for key in keys:
            if key in holders:
                holders[key] += 1
            elif key in idle:
                del idle[key]
                holders[key] = 1
            elif self._make_room():
                holders[key] = 1
            else:
                continue
            held.append(key)
        return held

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """A request has ended, and held these blocks, in prompt order."""
        holders = self._holders
        for key in reversed(keys):
            holders[key] -= 1
            if not holders[key]:
                del holders[key]
                self._idle[key] = None

    def _make_room(self) -> bool:
        if len(self._holders) + len(self._idle) < self.num_blocks:
            return True
        if not self._idle:
            return False
        self._idle.popitem(last=False)
        self.num_evicted += 1
        return True


class Member(NamedTuple):
    """The place of an engine in a fleet."""

    number: int
    """From 0."""
    pools: Mapping[str, Pool]
    """The tiers that the engines share, by name."""
    has_events: bool
    """True if host memory records what it stores and evicts, for a router."""


ALONE = Member(0, {}, False)
"""The only engine."""


class Caches:
    """The engine's own cache, host memory and the tiers below it."""

    def __init__(
        self, settings: ReplaySettings, block_tokens: int, clock: Clock, member: Member = ALONE
    ) -> None:
        """`clock`: the replay sets it. If the settings are not timed, tiers take no time, but the
        orchestrator limits what it offers to tiers by time all the same."""
        block_bytes = settings.block_bytes(block_tokens)
        is_timed = settings.is_timed
        host = settings.host
        num_blocks = host.num_bytes // block_bytes
        self.num_blocks = num_blocks
        gpu_bytes = settings.gpu_bytes
        self.device = None if gpu_bytes is None else DeviceCache(gpu_bytes // block_bytes)
        self.host: CPUOffloadingManager
        self.tiers: list[KeyTier] = []
        self.manager: OffloadingManager
        self.tiering: TieringOffloadingManager | None = None
        if not settings.tiers:
            self.host = self.manager = CPUOffloadingManager(
                num_blocks, host.policy, enable_events=member.has_events
            )
            return
        slots = _UntouchedSlots(num_blocks, block_bytes if is_timed else _UNTIMED_BLOCK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            cast("SharedOffloadRegion", slots),
            host.policy,
            enable_events=member.has_events,
        )
        self.host = primary
        tier_clock = clock if is_timed else None
        self.tiers = [
            KeyTier(
                tier,
                CPUOffloadingManager(tier.num_bytes // block_bytes, tier.policy),
                block_bytes,
                tier_clock,
            )
            if tier.sharing is None
            else member.pools[tier.name].join(member.number, tier_clock)
            for tier in settings.tiers
        ]
        # Without times, a tier has ended its stores before their slots are wanted again.
        limits: dict[str, Any] = {} if is_timed else {"max_pinned_share": 1.0}
        self.manager = self.tiering = TieringOffloadingManager(
            primary,
            self.tiers,
            settings=[
                GuardSettings(
                    write_policy=tier.write_policy, write_budget=tier.write_budget, **limits
                )
                for tier in settings.tiers
            ],
            groups={0: GroupShape(block_tokens)},
            # Without times, a block that a tier has is always loaded.
            prefill_tokens_per_s=None if is_timed else 0,
            clock=clock,
        )

    def hits_by_place(
        self, keys: Sequence[OffloadKey], num_hits: int, context: ReqContext
    ) -> list[int]:
        """How many of the first `num_hits` blocks were in host memory, and in each tier."""
        hits = [num_hits] + [0] * len(self.tiers)
        if self.tiering is None:
            return hits
        sources = self.tiering.tiers_of(context)
        if not sources:
            return hits
        place_of = {tier: n for n, tier in enumerate(self.tiers, start=1)}
        for key in keys[:num_hits]:
            tier = sources.get(key)
            if tier is not None:
                hits[place_of[cast("KeyTier", tier)]] += 1
                hits[0] -= 1
        return hits

    def figures(self, settings: ReplaySettings, block_tokens: int) -> Figures:
        """Empty figures, with a place for host memory and one for each tier."""
        places = [PlaceFigures(settings.host.name, settings.host.policy, self.num_blocks)]
        places += [
            PlaceFigures(its.name, its.policy, tier.table.num_blocks, str(its.write_policy))
            for its, tier in zip(settings.tiers, self.tiers, strict=True)
        ]
        gpu = None if self.device is None else GpuFigures(self.device.num_blocks)
        return Figures(block_tokens, settings.block_bytes(block_tokens), places, gpu)

    def die(self, figures: Figures) -> None:
        """The engine has died. Ends its jobs in shared tiers, and counts what it has done."""
        for tier in self.tiers:
            tier.die()
        self.count_into(figures)

    def count_into(self, figures: Figures) -> None:
        """Add what the managers have counted since the last call."""
        if figures.gpu is not None and self.device is not None:
            figures.gpu.evicted_blocks += self.device.num_evicted
            self.device.num_evicted = 0
        stats = self.manager.get_stats()
        host = figures.places[0]
        counted = stats.counters if stats is not None else {}
        _add_counters(host, counted)
        for position, (tier, place) in enumerate(zip(self.tiers, figures.places[1:], strict=True)):
            label = tier_label(position, tier.tier_type)
            counted_of = {
                name: int(counted.get(tier_series(label, name), 0)) for name in _COUNTED_OF_A_TIER
            }
            own = tier.table.get_stats().counters
            place.read_blocks += counted_of["loaded_blocks"]
            place.declined_blocks += sum(
                count for name, count in counted_of.items() if name.startswith("declined_")
            )
            place.written_blocks += int(own.get("kvtier_cpu_stored_blocks", 0))
            place.evicted_blocks += int(own.get("kvtier_cpu_evicted_blocks", 0))
            tier.num_refused -= int(own.get("kvtier_cpu_declined_blocks", 0))
            place.refused_blocks += (
                tier.num_refused + counted_of["dropped_blocks"] + counted_of["shed_blocks"]
            )
            tier.num_refused = 0
            place.left_out_blocks += counted_of["left_out_blocks"]
            place.unwritten_blocks += counted_of["unwritten_blocks"]
            place.over_budget_blocks += counted_of["over_budget_blocks"]


def _add_counters(host: PlaceFigures, counted: dict[str, float]) -> None:
    host.written_blocks += int(counted.get("kvtier_cpu_stored_blocks", 0))
    host.promoted_blocks += int(
        counted.get("kvtier_cpu_promoted_blocks", 0) + counted.get("kvtier_cpu_adopted_blocks", 0)
    )
    host.evicted_blocks += int(counted.get("kvtier_cpu_evicted_blocks", 0))
    # Refused stores are offered again; the engine counts those that never found room.
    host.refused_blocks += int(counted.get("kvtier_cpu_truncated_blocks", 0))
