"""The contract of a tier below the primary tier: jobs, results, and the abstract tier.

A tier keeps blocks in a storage that is slower and larger than host memory. It never sees the
device: it reads blocks from the primary tier's slots and writes them back into slots.

Threads. Once a tier has started, the engine calls its methods on the scheduler thread, except
`drain_jobs` and `shutdown`. These two are called at the end, each on a thread of its own, after all
other calls; `shutdown` may begin before `drain_jobs` has ended. Only they may wait, do I/O or copy
a block; for all other methods, the tier's own threads do that. The orchestrator guards every call
(`kvtier.tiering.tier_calls`): a tier that is late or raises repeatedly, or that breaks its
contract, is cut off, and the engine goes on.
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
    from kvtier.config import TierOptions
    from kvtier.tiering.inspection import Report, TierInspector

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
    """Blocks to be moved between the primary tier and one tier below. The slots belong to the job
    until it is reported: nothing else reads them while they are written, and nothing writes them
    while they are read."""

    job_id: int
    """Never used twice by one engine."""
    keys: Sequence[OffloadKey]
    """In prompt order where that is known: if not all of them fit, keep the first ones."""
    block_ids: NDArray[np.int64]
    """The slot of each key, in the same order. Read-only."""
    is_promotion: bool
    """True: from the tier into the slots. False: from the slots to the tier."""
    req_context: ReqContext
    """The request that stores the blocks, or that wanted them first."""
    fingerprint: bytes = bytes(16)
    """The namespace of the blocks, which is part of their seal. A job keeps the namespace it was
    made with, even after the tier's own has changed."""


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """How a job ended. Reported exactly once, when the tier will not touch the slots again."""

    job_id: int
    success: bool
    """True if all blocks were moved, or were there already."""
    successful_keys: Collection[OffloadKey] | None = None
    """If not all blocks were moved: the keys of those that were. None: none of them. A load names
    exactly the blocks whose seal was verified."""
    transfer_time: float | None = None
    """Seconds that the I/O took, measured where it happened. None: not known. The tier is then not
    measured, so no promotion from it is declined as slower than computing."""
    num_gone: int = 0
    """For a load: blocks that another engine or process has removed since they were looked up. They
    do not count as failures of the tier."""


class JobNotBegun(Exception):
    """Raised by `submit_store` and `submit_load`: the tier has not begun the job, does not touch
    its slots, and does not report it. The job counts as failed, and its slots are free at once."""


class TierRefused(Exception):
    """Raised by the constructor of a tier that cannot start, for a reason that lies at least partly
    outside its configuration. The message names the reason and ends with the remedy."""


class PrimaryRows:
    """The primary tier's slots as a tier sees them: rows of bytes, without a copy. For any thread.

    After `release`, asking for a row raises `ValueError`. A row that is still held keeps the memory
    behind it alive, so a tier drops its rows when a job ends.
    """

    def __init__(self, view: memoryview) -> None:
        self.num_rows, self.row_bytes = view.shape if view.shape is not None else (0, 0)
        self._flat = view.cast("B")

    def __getitem__(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_rows:
            raise IndexError(f"slot {block_id} does not exist: there are {self.num_rows} slots")
        start = block_id * self.row_bytes
        return self._flat[start : start + self.row_bytes]

    def release(self) -> None:
        """End this tier's access to the primary tier."""
        self._flat.release()


class SecondaryTierManager(ABC):
    """One tier below the primary tier.

    `SecondaryTierFactory` makes it. It passes the arguments below by name, and the tier's own keys
    of its entry in `secondary_tiers` as further keyword arguments, exactly as the user wrote them:
    the tier checks them and raises `kvtier.config.ConfigError` or `ValueError`.

    `get_finished_jobs` reports every submitted job exactly once: also when there was nothing to do
    because all blocks were there, when there was no room, and when the job failed. A submit that
    raises `JobNotBegun` has refused the job, which is then not reported. If it raises anything
    else, the job counts as begun: no request waits for it, but its slots belong to the tier until
    the tier reports it.
    """

    medium: ClassVar[Medium | None] = None
    """The kind of memory that keeps the blocks. None: the tier fits any medium that a request
    allows (`load_tier_filter`)."""
    options_cls: ClassVar[type[TierOptions] | None] = None
    """Declares the keys of a tier whose constructor takes `**keys`. None: the keys are the
    parameters of the constructor."""
    capacity_blocks: int | None = None
    """The number of blocks that fit, if the tier knows it; engines log it when they start."""

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        """`primary_kv_view`: all slots, writable, of shape (num_blocks, row_bytes)."""
        self.offloading_spec = offloading_spec
        self.tier_type = tier_type
        self.locality: Locality | None = None
        """Set by the tier; the user's key `locality` replaces it."""
        self.enable_kv_events = True
        """Set by the orchestrator. While False, nobody takes the events: record none."""
        self.rows = PrimaryRows(primary_kv_view)
        self.fingerprint: bytes = offloading_spec.config.fingerprint()
        """The current namespace for lookups. See `begin_epoch`."""
        self._writer = offloading_spec.config.engine_id
        self._seal_failures: Counter[seal.SealFailure] = Counter()
        self._seal_failures_lock = threading.Lock()

    # --- a tier author implements these --------------------------------------------------------

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look for a block in the namespace `self.fingerprint`.

        HIT: it can be loaded. MISS: it is not here. RETRY: not known yet; the tier finds out, and
        is asked again in the next step. A load may still fail after a HIT.
        """

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        """Look for several blocks, given in prompt order; one answer each.

        The caller ignores everything behind the first MISS, so the answers may end with it.
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
        """Start storing the blocks in `job.block_ids`. Blocks that are here need no copy."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Start loading blocks into `job.block_ids`. A load must not wait behind stores."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call. Called once per scheduling step, once more
        if a store finds no room in host memory, and repeatedly at shutdown."""

    @abstractmethod
    def drain_jobs(self) -> None:
        """Wait until every job has ended. `get_finished_jobs` can still be called afterwards.

        Jobs that have not begun may be given up, and are then reported as failed.
        """

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has used these blocks, given in prompt order. They may come from the device,
        host memory, this tier or another one.

        Called at most once for each request, when it has ended and its stores have left the device.
        Single loads and stores cause no call.
        """
        return

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Name the blocks that are neither kept here nor being stored.

        Called, if at all, right after `touch`, with the same keys. The named blocks that are still
        in host memory are stored again with `submit_store`, at a bounded rate. Answer from memory:
        leave a block out rather than wait to find out. The default names none, so nothing is stored
        again.
        """
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived. Returns which of its blocks the tier wants."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further call for this request follows. Its jobs may still be under way."""
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """One scheduling step has ended; its jobs have been submitted."""
        return

    def has_pending_work(self) -> bool:
        """True if the engine should keep stepping for something other than jobs. It does so for at
        most one second after its last work; after that, an engine without requests stops stepping,
        whatever this returns."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that were stored or removed here since the last call, in order."""
        return ()

    def get_stats(self) -> OffloadingStats | None:
        """Statistics since the last call, named as in `build_metric_definitions`."""
        return None

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        """Defines every metric that `get_stats` may return."""
        return {}

    @classmethod
    def open_inspector(cls, location: str) -> TierInspector | None:
        """The inspector that `kvtier store` uses for the storage at `location`, a path or a URL.

        Called in the process of the command, where no tier is running; may wait. None: the location
        is not this tier's. Raise `InspectionRefused` or `OSError` if it looks like this tier's but
        cannot be used; another tier may still claim it. The default offers no inspector.
        """
        return None

    @classmethod
    def init_storage(cls, location: str) -> Report | None:
        """Make storage at `location`, or repair it, for `kvtier store init`.

        Called like `open_inspector`; may also raise `InspectionTimedOut`. None, the default: this
        tier makes no storage at such a location.
        """
        return None

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        """At most `most` blocks that can be loaded; () if there are none, or if the tier does not
        know yet. Called at most once, when the engine starts: the engine loads these blocks to
        measure the tier before the first request."""
        return ()

    def keep_note(self, note: bytes) -> None:
        """Keep this note of at most 1,024 bytes for the next engine that uses this storage, in
        place of the last note. It contains the measured speed of the tier. Only a tier whose
        storage outlives the process need keep it. Write it on a thread of the tier."""
        return

    def kept_note(self) -> bytes | None:
        """The note that an earlier engine left; None if there is none. The tier need not check
        it."""
        return None

    def begin_epoch(self, fingerprint: bytes) -> None:
        """From now on, look up in another namespace: earlier blocks are no longer valid for this
        engine. Forget all answers for the old namespace, and lookups in it that are under way. Jobs
        under way go on, each in the namespace that it carries. Must not wait."""
        self.fingerprint = fingerprint

    def shutdown(self) -> None:
        """Release all threads, files and connections. Called after `drain_jobs` has ended, or while
        it is still running if it takes too long. No call follows."""
        return

    # --- a tier author calls these -------------------------------------------------------------

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        """The seal to keep with a block of a store job. Call it on an I/O thread of the tier."""
        return seal.make(key, payload, job.fingerprint, self._writer)

    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        """True if `payload` is the intact block of `key`. Otherwise counts the failure.

        Call it on an I/O thread of the tier, before the job is reported. Pass the slot itself as
        `payload`: then nothing can change between the check and the use.
        """
        failure = seal.check(header, payload, key, job.fingerprint)
        if failure is None:
            return True
        self.refuse_block(failure)
        return False

    def refuse_block(self, failure: seal.SealFailure) -> None:
        """Count a block that the tier itself has found to be wrong. Call it on an I/O thread of the
        tier."""
        with self._seal_failures_lock:
            self._seal_failures[failure] += 1

    def take_seal_failures(self) -> Counter[seal.SealFailure]:
        """Blocks refused since the last call, by reason. Scheduler thread."""
        if not self._seal_failures:
            return Counter()
        with self._seal_failures_lock:
            taken, self._seal_failures = self._seal_failures, Counter()
        return taken
