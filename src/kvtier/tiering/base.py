"""The contract of a tier below the primary one: jobs, results, and the abstract tier.

A tier keeps blocks somewhere slower and larger than host memory. It never sees the device: it reads
blocks out of the primary tier's slots and writes them back into slots.

Threads. Every method of a tier is called from the engine's scheduler thread, except `drain_jobs`
and `shutdown`, which come from a thread of their own while no other call is made. No method but
those two may wait, do I/O, or copy a block: that is for the tier's own threads. Around every tier
stands `kvtier.tiering.health`: one that is late, raises or misreports is cut off, and the engine
goes on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtier import seal
from kvtier.base import (
    Locality,
    LookupResult,
    Medium,
    MetricDefinition,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

__all__ = [
    "JobNotBegun",
    "JobResult",
    "PrimaryRows",
    "SecondaryTierManager",
    "TierRefused",
    "TransferJob",
]


@dataclass(frozen=True, slots=True, eq=False)
class TransferJob:
    """Blocks to be moved between the primary tier and one tier below. The slots are the job's until
    it is reported: they are read by nobody else while they are written, and not written at all
    while they are read."""

    job_id: int
    """Never used twice by one engine."""
    keys: Sequence[OffloadKey]
    """In prompt order where that is known: of what does not fit, the head is worth the most."""
    block_ids: NDArray[np.int64]
    """The slot of each key, in the same order. Read-only."""
    is_promotion: bool
    """True: from the tier into the slots. False: from the slots to the tier."""
    req_context: ReqContext
    """The request the blocks belong to, or were first wanted by."""
    fingerprint: bytes = bytes(16)
    """What the blocks are sealed with, and the namespace they are kept in. That of the time of the
    job: the tier's own may have changed since."""


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """How a job ended. Reported exactly once, when the tier will not touch the slots again."""

    job_id: int
    success: bool
    """Whether all blocks were moved, or were there already."""
    successful_keys: Collection[OffloadKey] | None = None
    """Where not all were: those that were. None: none of them. A load must name those whose seal
    was verified, and no others."""
    transfer_time: float | None = None
    """Seconds that the I/O took, stamped where it happened. None: not known; then this tier is not
    measured, and no promotion is refused for being slower than recomputing."""
    num_gone: int = 0
    """A load: so many blocks had left since they were looked up, by someone else's doing. That is
    no failure of the tier."""


class JobNotBegun(Exception):
    """Raised by `submit_store` and `submit_load`: the job was not begun. The tier does not touch
    its slots and does not report it. The slots are free at once; otherwise the job counts as one
    that was reported as failed."""


class TierRefused(Exception):
    """A tier cannot start, for a reason that is not in its configuration alone. Raised by its
    constructor; the message names the reason, and ends with the remedy."""


class PrimaryRows:
    """The primary tier's slots as a tier sees them: rows of bytes, without a copy. Any thread.

    After `release`, asking for a row raises `ValueError`. Whoever holds a row then keeps the memory
    behind it alive; a tier drops its rows when a job ends.
    """

    def __init__(self, view: memoryview) -> None:
        self.num_rows, self.row_bytes = view.shape if view.shape is not None else (0, 0)
        self._flat = view.cast("B")

    def __getitem__(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_rows:
            raise IndexError(f"slot {block_id}: there are {self.num_rows}")
        start = block_id * self.row_bytes
        return self._flat[start : start + self.row_bytes]

    def release(self) -> None:
        """End this tier's access to the primary tier."""
        self._flat.release()


class SecondaryTierManager(ABC):
    """One tier below the primary tier.

    Made by `SecondaryTierFactory`, which passes the arguments below by name, and the tier's own
    keys of its entry in `secondary_tiers` as further keyword arguments, exactly as the user wrote
    them: a tier checks them and raises `kvtier.config.ConfigError` or `ValueError`.

    Every submitted job is reported by `get_finished_jobs` exactly once: also when there was nothing
    to do because all blocks were there, when there was no room, and when it failed. A submit that
    raises `JobNotBegun` has refused the job, which is not reported then. One that raises anything
    else counts as begun: nobody waits for the job, but its slots are the tier's until it reports
    it.
    """

    medium: ClassVar[Medium | None] = None
    """What kind of memory the blocks are kept in. None: fits every filter."""
    capacity_blocks: int | None = None
    """How many blocks there is room for. A tier that knows sets it; engines say it when they
    start."""

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        """`primary_kv_view`: all slots, writable, of shape (num_blocks, row_bytes)."""
        self.offloading_spec = offloading_spec
        self.tier_type = tier_type
        self.locality: Locality | None = None
        """Set by the tier; what the user gives in `locality` replaces it."""
        self.enable_kv_events = True
        """Whether anyone takes the events; set by the orchestrator. While False, record none."""
        self.rows = PrimaryRows(primary_kv_view)
        self.fingerprint: bytes = offloading_spec.config.fingerprint()
        """The namespace of what is looked up now. See `begin_epoch`."""
        self._writer = offloading_spec.config.engine_id
        self._seal_failures: Counter[seal.SealFailure] = Counter()
        self._seal_failures_lock = threading.Lock()

    # --- what a tier author implements ---------------------------------------------------------

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a block is kept here, in the namespace `self.fingerprint`.

        HIT: it can be loaded. MISS: it is not here. RETRY: not known yet, ask again at the next
        step; the tier finds out meanwhile. A HIT is no promise: a load may still fail.
        """

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        """The same for several blocks in prompt order, one answer each.

        What follows the first MISS is not looked at, so the answers may end with it.
        """
        results = []
        for key in keys:
            result = self.lookup(key, req_context)
            results.append(result)
            if result is LookupResult.MISS:
                break
        return results

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Start keeping the blocks in `job.block_ids`. Those that are here already need no copy."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Start writing blocks into `job.block_ids`. Must not wait behind stores."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call. Asked once per scheduling step, and once
        more where a store finds no room in host memory."""

    @abstractmethod
    def drain_jobs(self) -> None:
        """Wait until every job has ended; their results are still to be had afterwards.

        Jobs that have not begun may be given up, and are then reported as failed.
        """

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has used these blocks, given in prompt order, wherever it had them from: the
        device, host memory, this tier or another one.

        Called once for each request, when it has ended and its stores have left the device. Loads
        and stores are not announced here as well.
        """
        return

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Those of these blocks that are known to be neither kept here nor being stored.

        Asked right after `touch`, with the same keys. Of the blocks named, those still in host
        memory are offered again with `submit_store`, at a bounded rate. Answer from memory: name no
        block rather than wait to find out. The default names none, so nothing is offered again.
        """
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request arrived. Answers which of its blocks the tier wants to be offered."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further call for this request follows. Its jobs may still be under way."""
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """One scheduling step has ended; its jobs have been submitted."""
        return

    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping for something other than jobs. Asked, and heeded,
        for at most a second after the engine last brought work: an engine that has nothing else to
        do rests then, whatever tiers have to do."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that appeared or disappeared here since the last call, in order."""
        return ()

    def get_stats(self) -> OffloadingStats | None:
        """Figures since the last call, named as in `build_metric_definitions`."""
        return None

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        """Every figure that `get_stats` may report."""
        return {}

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        """Some blocks that can be loaded, at most so many; () if there are none, or if it is not
        known yet. Asked once, when the engine starts: a few are loaded, so that the engine knows
        how quick the tier is before the first request comes."""
        return ()

    def keep_note(self, note: bytes) -> None:
        """Keep this note of at most 1,024 bytes for the next engine with this storage, in place of
        the one before. It says how quick the tier is. For tiers that outlive the process; writing
        it is for a thread of the tier."""
        return

    def kept_note(self) -> bytes | None:
        """The note that an earlier engine left. None: there is none. It need not be checked."""
        return None

    def begin_epoch(self, fingerprint: bytes) -> None:
        """From now on, look up in another namespace: what was kept before is no longer valid for
        this engine. Answers found out, or being found out, for the old one must be forgotten. Jobs
        under way go on, each in the namespace it carries. Must not wait."""
        self.fingerprint = fingerprint

    def shutdown(self) -> None:
        """Release everything: threads, files, connections. Comes after `drain_jobs`, or instead of
        its end when that takes too long. No call follows."""
        return

    # --- what a tier author uses ---------------------------------------------------------------

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        """The seal to be kept with a block of a store job. On an I/O thread of the tier."""
        return seal.make(key, payload, job.fingerprint, self._writer)

    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        """Whether what a load job has brought is the block of `key`; if not, it is counted.

        On an I/O thread of the tier, before the job is reported. `payload` is best the slot itself:
        then nothing can change between the check and the use.
        """
        failure = seal.check(header, payload, key, job.fingerprint)
        if failure is None:
            return True
        self.refuse_block(failure)
        return False

    def refuse_block(self, failure: seal.SealFailure) -> None:
        """Count a block that is not what it should be, for a reason that the tier itself has found.
        On an I/O thread of the tier."""
        with self._seal_failures_lock:
            self._seal_failures[failure] += 1

    def take_seal_failures(self) -> Counter[seal.SealFailure]:
        """Blocks refused since the last call, by reason. Scheduler thread."""
        if not self._seal_failures:
            return Counter()
        with self._seal_failures_lock:
            taken, self._seal_failures = self._seal_failures, Counter()
        return taken
