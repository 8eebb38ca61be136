"""The contract of a tier below the primary tier: jobs, results, and the abstract tier.

A tier keeps blocks in a storage that is slower and larger than host memory. It never sees the
device: it reads blocks from the primary tier's slots and writes them back into slots.

Threads. Once a tier has started, the engine calls its methods on the scheduler thread, except
`drain_jobs` and `shutdown`. These two are called at the end, each on a thread of its own, after all
other calls; `shutdown` may begin before `drain_jobs` has ended. Only these two may wait, do I/O or
copy a block. All other methods leave that to the tier's own threads. The orchestrator
(`kvtier.tiering.manager`) guards every call (`kvtier.tiering.tier_calls`). It cuts off a tier that
is repeatedly late, raises repeatedly or breaks its contract, and the engine goes on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
from kvtier.config.tenants import tier_label
from kvtier.cpu.policies.tenants import Tenancy
from kvtier.seal.keys import SealKeys

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.config import NamespaceDescription, TierOptions
    from kvtier.tiering.inspection import Report, TierInspector
    from kvtier.tiering.trial import TrialBlocks

__all__ = [
    "JobNotBegun",
    "JobResult",
    "PrimaryRows",
    "SecondaryTierManager",
    "TierUsage",
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
    """In prompt order, if that is known. If not all of them fit, keep the first ones."""
    block_ids: NDArray[np.int64]
    """The slot of each key, in the same order. Read-only."""
    is_promotion: bool
    """True: from the tier into the slots. False: from the slots to the tier."""
    req_context: ReqContext
    """The request that stores the blocks, or that wanted them first."""
    fingerprint: bytes = bytes(16)
    """The namespace of the blocks, which is part of their seal. It does not change when the tier
    switches to a new one (`SecondaryTierManager.begin_epoch`)."""


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """How a job ended. The tier reports it exactly once, when it no longer uses the slots."""

    job_id: int
    success: bool
    """True if every block was moved or was there already."""
    successful_keys: Collection[OffloadKey] | None = None
    """Used only if `success` is False: the keys of the blocks that were moved nevertheless. None:
    there are none. For a load, these are exactly the blocks whose seal was verified."""
    transfer_time: float | None = None
    """Seconds that the I/O took, measured where it happened. None: not known. If a tier never
    reports it, kvtier does not know how fast the tier is, and loads blocks from it without checking
    whether computing them is faster."""
    num_gone: int = 0
    """For a load: the number of blocks that another engine or process has removed since they were
    looked up. They do not count as failures of the tier."""
    num_declined: int = 0
    """For a store: the number of blocks that the tier chose not to keep, because it expects more
    from those that it has. They do not count as failures of the tier."""


class JobNotBegun(Exception):
    """Raised by `submit_store` and `submit_load` to refuse a job. The tier does not use its slots
    and does not report it. The job counts as failed, and its slots are free at once."""


class TierRefused(Exception):
    """Raised by the constructor of a tier that cannot start, for a reason that involves more than
    its configuration, such as a file. The message names the reason and ends with the remedy."""


class PrimaryRows:
    """The primary tier's slots as a tier sees them: rows of bytes, without a copy. For any thread.

    After `release`, asking for a row raises `ValueError`. A row keeps the memory behind it alive,
    so a tier must drop its references to the rows of a job when the job ends.
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


class TierUsage(NamedTuple):
    """How full a tier is. A part that the tier does not know is None."""

    used_bytes: float | None
    """Bytes that blocks take, in a shared tier those of all engines."""
    capacity_bytes: float | None
    """The most bytes that they may take."""


class SecondaryTierManager(ABC):
    """One tier below the primary tier.

    `SecondaryTierFactory` makes it, and passes the parameters of `__init__` by name. Further
    keyword arguments are the tier's own keys of its entry in `secondary_tiers`, exactly as the user
    wrote them. The tier checks these and raises `kvtier.config.ConfigError` or `ValueError`.

    `get_finished_jobs` reports every submitted job exactly once, even one that had nothing to do,
    found no room or failed. The exception is a job that `submit_store` or `submit_load` has refused
    by raising `JobNotBegun`. If they raise anything else, the job counts as begun: no request waits
    for it, but its slots belong to the tier until the tier reports it.
    """

    medium: ClassVar[Medium | None] = None
    """The kind of memory that keeps the blocks. None: the medium is not known, and fits every
    `ReqContext.load_tier_filter`."""
    options_cls: ClassVar[type[TierOptions] | None] = None
    """Declares the tier's own keys, if its constructor takes `**keys`. None: the parameters of the
    constructor are the keys."""
    keeps_quotas: ClassVar[bool] = False
    """True if the tier keeps the floors and caps of tenants (`tenancy`). An engine does not start
    with quotas for a tier that cannot keep them."""
    capacity_blocks: int | None = None
    """The number of blocks that fit; None if the tier does not know it. Engines log it when they
    start."""

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        """`primary_kv_view`: all slots, writable, of shape (num_blocks, row_bytes)."""
        self.offloading_spec = offloading_spec
        self.tier_type = tier_type
        self.locality: Locality | None = None
        """Set by the tier; the user's key `locality` replaces it."""
        self._start_remark: Callable[[], str] = str
        """What `start_remark` returns. A tier that looks for the reason replaces it."""
        self.enable_kv_events = True
        """Set by the orchestrator. While it is False, `take_events` is not called: record no
        events."""
        self.rows = PrimaryRows(primary_kv_view)
        self.fingerprint: bytes = offloading_spec.config.fingerprint()
        """The namespace in which to look up blocks. `begin_epoch` changes it."""
        self._writer = offloading_spec.config.engine_id
        key_file = offloading_spec.config.options.seal_key_file
        self.seal_keys = None if key_file is None else SealKeys.load(key_file)
        """Sign seals, if the user has given keys."""
        self._seal_failures: Counter[seal.SealFailure] = Counter()
        self._seal_failures_lock = threading.Lock()

    def tenancy(self, keys: Mapping[str, Any], num_blocks: int) -> Tenancy | None:
        """What each tenant may have of this tier, which holds `num_blocks`; None without rules.
        `keys`: the tier's own keys, as its constructor got them. Raises `ConfigError` if the tier
        cannot keep the rules. For tiers that keep quotas."""
        options = self.offloading_spec.config.options
        for tier in options.secondary_tiers:
            if tier.type == self.tier_type and tier.options == keys:
                label = tier_label(tier.position, tier.type)
                at = f"{tier.at}.max_bytes"
                return Tenancy.of(options, label, at, num_blocks, self.rows.row_bytes)
        return Tenancy.of(options, self.tier_type, "max_bytes", num_blocks, self.rows.row_bytes)

    # --- a tier author implements these --------------------------------------------------------

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look for a block in the namespace `self.fingerprint`.

        HIT: it can be loaded. MISS: it is not here. RETRY: the tier does not know yet, starts to
        find out, and is asked again in the next step. A load may still fail after a HIT.
        """

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        """Look for several blocks, given in prompt order. Returns one answer for each.

        The answers may end with the first MISS, because those behind it are rarely used.
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
        """Start storing the blocks in `job.block_ids`. Blocks that are here already need no
        copy."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Start loading blocks into `job.block_ids`. A load must not wait behind stores."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call.

        Called once per scheduling step, once more if a store finds no room in host memory, and
        repeatedly at shutdown while blocks wait for a tier.
        """

    @abstractmethod
    def drain_jobs(self) -> None:
        """Wait until every job has ended. `get_finished_jobs` must still work afterwards.

        The tier may drop jobs that it has not begun, and then reports them as failed.
        """

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request has used these blocks, given in prompt order. They may come from the device,
        host memory, this tier or another one.

        Called at most once for each request, after the request and its stores from the device to
        host memory have ended. Single loads and stores cause no call.
        """
        return

    def drop(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nobody will ask for these blocks of a request again; they are given in prompt order. They
        may leave before all others.

        Called instead of `touch`, for a request with the hint `drop`.
        """
        return

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Return those of `keys` whose blocks are neither kept here nor being stored.

        Called, if at all, right after `touch`, with the same keys; and, if the user's write policy
        is "on_evict" or "adaptive", with blocks that are about to leave host memory and were once
        stored here or loaded from here. Those that are still in host memory may then be passed to
        `submit_store`, at a bounded rate. Answer from memory: leave a block out rather than wait to
        find out. The default returns none, so nothing is stored again.
        """
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived. Return which of its blocks the tier wants."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further call for this request follows. Its jobs may still be under way."""
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """One scheduling step has ended; its jobs have been submitted."""
        return

    def has_pending_work(self) -> bool:
        """Return True if the engine should keep stepping for work of the tier other than jobs. An
        engine without requests stops stepping one second after its last work, even if this is
        True."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that were stored or removed here since the last call, in order."""
        return ()

    def has_announcements(self) -> bool:
        """Return True while `take_events` has more to return about the blocks of an earlier engine,
        so that an engine without requests takes the steps for it. Not True for ever: an engine that
        keeps stepping does not pause."""
        return False

    def get_stats(self) -> OffloadingStats | None:
        """Return statistics since the last call, named as in `build_metric_definitions`. Values are
        finite numbers, and counters never go back."""
        return None

    def usage(self) -> TierUsage | None:
        """Return how full the tier is; None if it does not know. Answer from memory."""
        return None

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        """Define every metric that `get_stats` may return."""
        return {}

    @classmethod
    def open_inspector(cls, location: str) -> TierInspector | None:
        """Return an inspector for the storage at `location`, a path or a URL; None if that is not a
        storage of this tier.

        Called by `kvtier store` in its own process, where no tier is running. May wait. Raise
        `InspectionRefused` or `OSError` if the location looks like this tier's but cannot be used;
        another tier may still claim it. The default offers no inspector.
        """
        return None

    @classmethod
    def init_storage(cls, location: str) -> Report | None:
        """Make storage at `location`, or repair it, for `kvtier store init`. Return None, like the
        default, if the tier makes no storage at such a location.

        Called like `open_inspector`. May also raise `InspectionTimedOut`.
        """
        return None

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]] | None:
        """Prepare for a trial by `kvtier doctor` or `kvtier bench`: a tier that starts with `keys`
        is to store `blocks`, while engines may use the same storage.

        Return a context manager. It yields the keys for the tier of the trial, changed so that this
        tier neither evicts blocks nor takes what others need, and it removes what is left when the
        tier has ended. It may raise `TrialProblem`, for example because storing would evict blocks
        of others. After the start, the tier of the trial is moved to the private namespace
        `blocks.fingerprint` with `begin_epoch`.

        Called like `open_inspector`. The default offers no trial.
        """
        return None

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        """Return the keys of at most `most` blocks that can be loaded; () if there are none, or if
        the tier does not know yet. Called at most once, when the engine starts: the engine loads
        these blocks to measure the tier before the first request."""
        return ()

    def keep_note(self, note: bytes) -> None:
        """Keep this note of at most 1,024 bytes for the next engine that uses this storage. It
        replaces the last note, and contains the measured costs of loading and of computing. Only a
        tier whose storage outlives the process need keep it. Write it on a thread of the tier."""
        return

    def kept_note(self) -> bytes | None:
        """Return the note that an earlier engine left; None if there is none. The tier need not
        check it."""
        return None

    @property
    def start_remark(self) -> str:
        """Why this engine finds none of the blocks that were there when it started, if the tier has
        found that out (`kvtier.tiering.namespaces`); otherwise empty. Any thread may ask."""
        return self._start_remark()

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Look up blocks in another namespace from now on: earlier blocks are no longer valid for
        this engine. Forget all answers for the old namespace, and its lookups under way. Jobs under
        way go on, each in the namespace of `TransferJob.fingerprint`. Must not wait."""
        self.fingerprint = fingerprint

    def shutdown(self) -> None:
        """Release all threads, files and connections. Called after `drain_jobs` has ended, or
        during `drain_jobs` if that takes too long. No further call follows."""
        return

    # --- a tier author calls these -------------------------------------------------------------

    def describe_namespace(self) -> NamespaceDescription:
        """Return what the namespace `self.fingerprint` is made of. A tier whose storage outlives
        the process keeps it beside the blocks (`NamespaceDescription.encode`), so that a later
        engine can say why it finds none (`kvtier.tiering.namespaces`) and `kvtier store` can name
        the model (`TierInspector.descriptions`). Write it on a thread of the tier."""
        return self.offloading_spec.config.describe(self.fingerprint)

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        """Return the seal to keep with a block of a store. Call it on an I/O thread of the tier."""
        return seal.make(key, payload, job.fingerprint, self._writer, self.seal_keys)

    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        """Return True if `payload` is the intact block of `key`. Otherwise count the failure.

        Call it on an I/O thread of the tier, before the job is reported. Pass the slot itself as
        `payload`: then the bytes that are used later are those that were checked.
        """
        failure = seal.check(header, payload, key, job.fingerprint, self.seal_keys)
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
        """Return the number of blocks refused since the last call, by reason. Scheduler thread."""
        if not self._seal_failures:
            return Counter()
        with self._seal_failures_lock:
            taken, self._seal_failures = self._seal_failures, Counter()
        return taken
