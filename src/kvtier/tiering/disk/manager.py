"""The disk tier: keeps sealed blocks in one slab file, where the next engine finds them again."""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, ClassVar, cast

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
)
from kvtier.config import ConfigError, NamespaceDescription, Problem
from kvtier.config.errors import describe
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.policies.tenants import new_policy
from kvtier.tiering.base import JobResult, SecondaryTierManager, TierUsage, TransferJob
from kvtier.tiering.disk.events import EventLog
from kvtier.tiering.disk.flusher import IndexFlusher
from kvtier.tiering.disk.index import namespace_sizes, namespace_tag, tag_name
from kvtier.tiering.disk.mover import SlabMover, SlabTransfer
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.recovery import populate
from kvtier.tiering.disk.slab import Slab, open_slab
from kvtier.tiering.disk.slots import SlabBlock, SlabTable
from kvtier.tiering.inspection import local_path
from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.metrics import definitions, error_counter, error_counters
from kvtier.tiering.io.page import require_movable
from kvtier.tiering.io.queue import Piece, Transfer
from kvtier.tiering.namespaces import (
    FoundNamespace,
    by_closeness,
    explain_cold_start,
    explain_other_root,
)

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.cpu.policies.base import CachePolicy
    from kvtier.tiering.disk.inspector import SlabInspector
    from kvtier.tiering.trial import TrialBlocks

__all__ = [
    "CAPACITY",
    "DECLINED",
    "EVICTED",
    "FAILED",
    "FILE_BYTES",
    "FORGOTTEN",
    "QUEUED",
    "REFUSED",
    "RESIDENT",
    "DiskSecondaryTierManager",
]

logger = logging.getLogger(__name__)

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS

_PREFIX = "kvtier_disk"
RESIDENT = f"{_PREFIX}_resident_blocks"
CAPACITY = f"{_PREFIX}_capacity_blocks"
FILE_BYTES = f"{_PREFIX}_file_bytes"
QUEUED = f"{_PREFIX}_queued_blocks"
EVICTED = f"{_PREFIX}_evicted_blocks"
REFUSED = f"{_PREFIX}_refused_blocks"
DECLINED = f"{_PREFIX}_declined_blocks"
FAILED = f"{_PREFIX}_failed_blocks"
FORGOTTEN = f"{_PREFIX}_forgotten_blocks"

_GAUGES = {
    RESIDENT: "Blocks in the disk tier, including those being written.",
    CAPACITY: "Blocks that the disk tier can hold.",
    FILE_BYTES: "Disk usage of the slab file in bytes, as du counts it; 0 if it was removed.",
    QUEUED: "Blocks that are waiting to be written, or being written.",
}
_COUNTERS = {
    EVICTED: "Blocks that left the disk tier to make room.",
    REFUSED: "Blocks not stored because all slots of the disk tier were being written or read.",
    DECLINED: "Blocks not stored because the eviction policy expects more of those that are there.",
    FAILED: "Blocks that could not be written.",
    FORGOTTEN: "Blocks dropped because they were damaged or could not be loaded.",
    **error_counters(_PREFIX),
}


class DiskSecondaryTierManager(SecondaryTierManager):
    """Keeps blocks in the slots of a slab file.

    A store: on the scheduler thread, `submit_store` evicts blocks and assigns slots in the
    `SlabTable`. Lanes (I/O threads) seal and write the blocks through the `SlabMover`, and
    `get_finished_jobs` makes them readable. A load: `submit_load` pins its blocks in the table,
    lanes read and verify them, and `get_finished_jobs` unpins them. The `IndexFlusher`, on a thread
    of its own, writes the index to the file for the next engine. A slot's header decides which
    block the slot holds; the index is a hint.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE
    keeps_quotas = True
    options_cls = DiskOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: those of `DiskOptions`."""
        config = offloading_spec.config
        options = DiskOptions.parse(keys).for_replica(config.parallel)
        options.require_place()
        config.require_weights_identity()
        # If the primary tier uses a policy of the same name, load it from the same module.
        is_shared = options.eviction_policy == config.options.eviction_policy
        module_path = config.options.cache_policy_module_path if is_shared else None
        policy_cls = _policy_cls(options.eviction_policy, module_path)
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        rows_address = address_of(primary_kv_view.cast("B"))
        try:
            self._open(options, rows_address)
            try:
                self._tenancy = self.tenancy(keys, self._slab.geometry.num_slots)
                self._start(policy_cls, rows_address, options.io_threads)
            except BaseException:
                self._slab.close()
                raise
        except BaseException:
            self.rows.release()
            raise

    def _open(self, options: DiskOptions, rows_address: int) -> None:
        require_movable(self.rows, rows_address, "disk")
        self._slab = open_slab(
            options.path,
            self.rows.row_bytes,
            options.max_bytes,
            self.offloading_spec.config.engine_id,
            options.use_o_direct,
            self.describe_namespace(),
        )

    def _start(
        self, policy_cls: type[CachePolicy], rows_address: int, io_threads: int | None
    ) -> None:
        started = time.monotonic()
        slab = self._slab
        geometry = slab.geometry
        self.capacity_blocks = geometry.num_slots
        policy_of = partial(new_policy, policy_cls, tenancy=self._tenancy)
        self._table = SlabTable(policy_of, geometry.num_slots, slab.first_seq)
        self._table.note_owner = slab.index.set_owner
        tag = namespace_tag(self.fingerprint)
        populate(self._table, slab.index, slab.superblock.cut, tag)
        logger.info(
            "%s: %d blocks of %d slots found for namespace %s, in %.1f s; %s",
            slab.file.path,
            len(self._table.readable),
            geometry.num_slots,
            self.fingerprint.hex(),
            time.monotonic() - started,
            "O_DIRECT" if slab.file.is_direct else "through the page cache",
        )
        self._start_remark = _remark_on(self.describe_namespace(), slab, self._table)
        self._last_touch: tuple[str, tuple[OffloadKey, ...]] = ("", ())
        """Arguments of the last `touch`: id of the request, and the keys it used. Empty once that
        request has ended."""
        self._stored_since = False
        """True if a store for the request in `_last_touch` was submitted after that touch."""
        self._events = EventLog(self, slab, self._table.readable)
        self._in_flight: set[Transfer[SlabBlock]] = set()
        self._results: list[JobResult] = []
        self._counters: Counter[str] = Counter()
        self._num_queued = 0
        self._clear_wanted = False
        self._mover = SlabMover(self, slab, rows_address, io_threads, self._tenancy)
        try:
            self._flusher = IndexFlusher(
                slab,
                self._table.slots_of,
                lambda: self._table.next_seq,
                self._want_clear,
                lambda error: self._mover.errors.note(error.errno or errno.EIO, is_write=True),
            )
        except BaseException:
            self._mover.stop()
            raise

    # --- lookups and uses: scheduler thread ----------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._clear_wanted:
            self._reset()
        return _HIT if key in self._table.readable else _MISS

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        if self._clear_wanted:
            self._reset()
        num_hits = len(list(takewhile(self._table.readable.__contains__, keys)))
        return [_HIT] * num_hits + [_MISS] * (num_hits < len(keys))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        keys = tuple(keys)
        self._last_touch, self._stored_since = (req_context.req_id, keys), False
        self._use(keys, req_context)
        self._table.note_prompt(keys, req_context)

    def drop(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._table.note_prompt(keys, req_context)

    def _use(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        keys = tuple(keys)  # the flusher reads it later, on its thread
        self._flusher.note_use(self._table.touch(keys, req_context), keys)

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        if self._clear_wanted:
            self._reset()
        absent = [key for key in keys if key not in self._table.readable]
        return [key for key in absent if key not in self._table.writing]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._table.on_new_request(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        req_id, used = self._last_touch
        is_last = req_id == req_context.req_id
        try:
            if is_last and self._stored_since:
                # Blocks stored after the touch count as more recently used than the rest of the
                # prompt. Touching all blocks again restores the order, in which the head is evicted
                # last. Doing so once, when the request ends, serves all its stores.
                self._use(used, req_context)
        finally:  # a third party's policy may raise
            if is_last:
                self._last_touch = ("", ())
            self._table.on_request_finished(req_context)

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        return list(islice(self._table.readable, most))

    def keep_note(self, note: bytes) -> None:
        self._flusher.keep_note(note)

    def kept_note(self) -> bytes | None:
        return self._slab.note or None

    def has_pending_work(self) -> bool:
        # vLLM may end its engine process during `shutdown`, so the engine counts as busy until the
        # index is in the file.
        return self._flusher.is_behind

    # --- jobs: scheduler thread ----------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        self._submit(self._store, job)

    def submit_load(self, job: TransferJob) -> None:
        self._submit(self._load, job)

    def _submit(self, begin: Callable[[TransferJob], None], job: TransferJob) -> None:
        if self._clear_wanted:
            self._reset()
        try:
            begin(job)
        except BaseException:  # a third party's policy may raise
            self._results.append(JobResult(job.job_id, False))
            raise

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for transfer in self._mover.work.take_ended():
            self._finish(cast("SlabTransfer", transfer))
        self._events.drop_if_disabled()
        results, self._results = self._results, []
        return results

    def _finish(self, transfer: SlabTransfer) -> None:
        self._in_flight.discard(transfer)
        job = transfer.job
        (self._end_load if job.is_promotion else self._end_store)(transfer)
        success = len(transfer.here) + len(transfer.done) == len(job.keys)
        done = None if success else transfer.here + [block.key for _, block in transfer.done]
        declined = transfer.num_declined
        result = JobResult(job.job_id, success, done, transfer.seconds, num_declined=declined)
        self._results.append(result)

    def drain_jobs(self) -> None:
        self._mover.work.wait_until_idle()

    def shutdown(self) -> None:
        """Fail the blocks that no lane has taken, and wait for the others. `get_finished_jobs`
        still returns the results."""
        self._events.stop()
        self._mover.stop()
        self._flusher.stop()
        self._slab.close()
        self.rows.release()

    # --- a store -------------------------------------------------------------------------------

    def _store(self, job: TransferJob) -> None:
        """Evict, assign slots, and queue the blocks that are not here. `TieringOffloadingManager`
        limits how many blocks wait in the queue, because they pin slots of the primary tier."""
        if job.fingerprint != self.fingerprint:
            self._results.append(JobResult(job.job_id, False))
            return
        table = self._table
        keys = job.keys
        todo = dict(zip(keys, job.block_ids.tolist(), strict=True))
        here = table.known(todo.keys())
        for key in here:
            del todo[key]
        new = list(todo)
        wanted = table.wanted(new, job.req_context)
        evicted = table.make_room(wanted, keys, job.req_context)
        self._counters[EVICTED] += len(evicted)
        self._events.removed(evicted)
        blocks = table.place(wanted, job.req_context)
        num_declined = len(new) - len(wanted)
        self._counters[DECLINED] += num_declined
        self._counters[REFUSED] += len(wanted) - len(blocks)
        if self._last_touch[0] == job.req_context.req_id:
            self._stored_since = True
        if here:
            try:
                # `place` has made the new blocks the most recent. Now note a use of all blocks of
                # the job, so that the head is evicted last, whichever blocks are new.
                self._use(keys, job.req_context)
            except BaseException:
                table.not_written(blocks)
                raise
        self._num_queued += len(blocks)
        pieces = list(zip(todo.values(), blocks, strict=False))
        self._begin(SlabTransfer(job, pieces, here, num_declined=num_declined))

    def _end_store(self, transfer: Transfer[SlabBlock]) -> None:
        self._num_queued -= len(transfer.pieces)
        self._table.not_written(block for _, block in transfer.failed)
        stored = self._table.written(block for _, block in transfer.done)
        self._counters[FAILED] += len(transfer.failed)
        self._events.stored(stored)

    # --- a load --------------------------------------------------------------------------------

    def _load(self, job: TransferJob) -> None:
        """Pin the blocks that are here, and queue them in ascending order of slots."""
        pieces: list[Piece[SlabBlock]] = []
        if job.fingerprint == self.fingerprint:
            self._use(job.keys, job.req_context)
            found = zip(job.block_ids.tolist(), self._table.pin(job.keys), strict=True)
            pieces = [(row, block) for row, block in found if block is not None]
            pieces.sort(key=_slot_of)
        self._begin(SlabTransfer(job, pieces))

    def _end_load(self, transfer: Transfer[SlabBlock]) -> None:
        # Forget the blocks that failed: otherwise they would be HITs that fail each time.
        forgotten = self._table.unpin(
            [block for _, block in transfer.done], [block for _, block in transfer.failed]
        )
        self._counters[FORGOTTEN] += len(forgotten)
        self._events.removed(forgotten)

    def _begin(self, transfer: SlabTransfer) -> None:
        self._in_flight.add(transfer)
        self._mover.work.submit(transfer)

    # --- reset: scheduler thread, except `_want_clear` -----------------------------------------

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Invalidate all earlier blocks: for this engine at once, and for later engines as soon as
        the flusher has written the cut, the lowest sequence number that is still valid."""
        super().begin_epoch(fingerprint)
        self._flusher.cut_at(self._table.next_seq, self.describe_namespace())
        self._reset()

    def _want_clear(self) -> None:
        """A user has asked to clear the slab. Called on the flusher's thread; the next lookup,
        store or load empties the tier."""
        self._clear_wanted = True

    def _reset(self) -> None:
        self._clear_wanted = False
        busy = {block.block_id for transfer in self._in_flight for _, block in transfer.pieces}
        policy, blocks = self._table.reset(busy)
        self._events.all_removed(blocks)
        self._flusher.destroy(policy, blocks)

    # --- events and metrics: scheduler thread --------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    def has_announcements(self) -> bool:
        return self._events.has_announcements()

    def usage(self) -> TierUsage:
        return self._table.usage(self._slab.geometry.slot_bytes)

    def get_stats(self) -> OffloadingStats:
        counters: dict[str, float] = {name: self._counters[name] for name in _COUNTERS}
        self._counters.clear()
        for kind, count in self._mover.errors.take().items():
            counters[error_counter(_PREFIX, kind)] += count
        return OffloadingStats(
            counters,
            gauges={
                RESIDENT: self._table.num_used,
                CAPACITY: self._table.num_slots,
                FILE_BYTES: self._flusher.allocated_bytes,
                QUEUED: self._num_queued,
            },
        )

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        from kvtier.tiering.disk.trial import trial_slab

        return trial_slab(keys, blocks)

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return definitions(_GAUGES, _COUNTERS)

    @classmethod
    def open_inspector(cls, location: str) -> SlabInspector | None:
        from kvtier.tiering.disk.inspector import SlabInspector

        path = local_path(location)
        return None if path is None or path.is_dir() else SlabInspector(path)


def _remark_on(own: NamespaceDescription, slab: Slab, table: SlabTable) -> Callable[[], str]:
    """Call `_explain_misses`. Returns a function that returns its answer."""
    remark = _explain_misses(own, slab, table)
    return lambda: remark


def _explain_misses(own: NamespaceDescription, slab: Slab, table: SlabTable) -> str:
    """Log why this engine will find nothing, if the slab holds blocks of others. Returns what was
    logged. `table`: the blocks in the engine's namespace."""
    where, described = str(slab.file.path), slab.found_descriptions
    if num_own := len(table.readable):
        return explain_other_root(where, own, described.get(own.namespace), num_own)
    names = {namespace_tag(bytes.fromhex(name)): name for name in described}
    others = []
    for tag, count in namespace_sizes(slab.index.entries(), slab.superblock.cut):
        name = names.get(tag, tag_name(tag))
        others.append(FoundNamespace(name, count, described.get(name)))
    for closest in by_closeness(own, others)[:1]:
        return explain_cold_start(where, own, closest)
    return ""


def _policy_cls(name: str, module_path: str | None) -> type[CachePolicy]:
    try:
        return CachePolicyFactory.get_cache_policy_cls(name, module_path)
    except ConfigError:
        if module_path is not None:
            raise
        raise ConfigError(
            Problem(
                "eviction_policy",
                describe(name),
                'the name of an eviction policy: "lru", "arc", "density", one that is '
                "installed, or the one that the primary tier uses",
                "Write one of these",
            )
        ) from None


def _slot_of(piece: Piece[SlabBlock]) -> int:
    return piece[1].block_id
