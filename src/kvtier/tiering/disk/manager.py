"""The disk tier: sealed blocks in one slab file, which the next engine finds again."""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, ClassVar

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
from kvtier.config import ConfigError, Problem
from kvtier.config.redaction import describe
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.disk import metrics
from kvtier.tiering.disk.index import namespace_tag
from kvtier.tiering.disk.keeper import IndexKeeper
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.disk.population import populate
from kvtier.tiering.disk.residents import Residents
from kvtier.tiering.disk.slab import open_slab
from kvtier.tiering.disk.slab_io import SlabIO
from kvtier.tiering.disk.transfer import SlabBlock, SlabTransfer
from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.errors import error_counter
from kvtier.tiering.io.rows import require_movable
from kvtier.tiering.io.transfer import Piece, Transfer

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.cpu.policies.base import CachePolicy

__all__ = ["DiskSecondaryTierManager"]

logger = logging.getLogger(__name__)

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS

_ANNOUNCED_AT_ONCE = 1024


class DiskSecondaryTierManager(SecondaryTierManager):
    """Blocks in the slots of a slab file.

    The scheduler's thread alone knows what is kept (`Residents`), and makes room before a store
    begins. `SlabIO` moves blocks on threads of its own. `IndexKeeper`, a thread too, writes down
    what is where, for the next engine. The slot's own header has the last word about it.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        max_bytes: int | str | None = None,
        eviction_policy: str | None = None,
        io_threads: int | None = None,
        use_o_direct: bool | str | None = None,
    ) -> None:
        config = offloading_spec.config
        options = DiskOptions.parse(
            {
                "path": path,
                "max_bytes": max_bytes,
                "eviction_policy": eviction_policy,
                "io_threads": io_threads,
                "use_o_direct": use_o_direct,
            },
            config.parallel,
        )
        config.require_weights_identity()
        # A policy of the user's own is found where the primary tier has it from.
        is_shared = options.eviction_policy == config.options.eviction_policy
        policy_cls = _policy_cls(
            options.eviction_policy,
            config.options.cache_policy_module_path if is_shared else None,
        )
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        rows_address = address_of(primary_kv_view.cast("B"))
        try:
            self._open(options, rows_address)
            try:
                self._start(policy_cls, rows_address, options.io_threads)
            except BaseException:
                self._slab.close()
                raise
        except BaseException:
            self.rows.release()
            raise

    def _open(self, options: DiskOptions, rows_address: int) -> None:
        require_movable(self.rows, rows_address, "disk")
        engine_id = self.offloading_spec.config.engine_id
        self._slab = open_slab(
            options.path,
            self.rows.row_bytes,
            options.max_bytes,
            engine_id,
            options.use_o_direct,
            namespace_tag(self.fingerprint),
        )

    def _start(
        self, policy_cls: type[CachePolicy], rows_address: int, io_threads: int | None
    ) -> None:
        started = time.monotonic()
        slab = self._slab
        geometry = slab.geometry
        self.capacity_blocks = geometry.num_slots
        self._residents = Residents(policy_cls, geometry.num_slots, slab.first_seq)
        populate(self._residents, slab, namespace_tag(self.fingerprint))
        logger.info(
            "%s: %d blocks of %d slots found for namespace %s, in %.1f s; %s",
            slab.file.path,
            len(self._residents.readable),
            geometry.num_slots,
            self.fingerprint.hex(),
            time.monotonic() - started,
            "O_DIRECT" if slab.file.is_direct else "through the page cache",
        )
        self._last_touch: tuple[str, tuple[OffloadKey, ...]] = ("", ())
        """The request whose uses were told last, if it has not ended, and what it used."""
        self._stored_since = False
        """Whether that request has stored blocks after its uses were told."""
        self._unannounced = dict.fromkeys(self._residents.readable)
        """Blocks of an earlier engine that nobody has been told of yet."""
        self._in_flight: set[Transfer[SlabBlock]] = set()
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._counters: Counter[str] = Counter()
        self._num_queued = 0
        self._clear_wanted = False
        self._io = SlabIO(self, slab, rows_address, io_threads)
        try:
            self._keeper = IndexKeeper(
                slab,
                self._residents.slots_of,
                lambda: self._residents.next_seq,
                self._want_clear,
                lambda error: self._io.errors.note(error.errno or errno.EIO, is_write=True),
            )
        except BaseException:
            self._io.stop()
            raise

    # --- what is kept: scheduler thread --------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._clear_wanted:
            self._start_over()
        return _HIT if key in self._residents.readable else _MISS

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        if self._clear_wanted:
            self._start_over()
        num_hits = len(list(takewhile(self._residents.readable.__contains__, keys)))
        answers = [_HIT] * num_hits
        if num_hits < len(keys):
            answers.append(_MISS)
        return answers

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        keys = tuple(keys)
        self._last_touch, self._stored_since = (req_context.req_id, keys), False
        self._use(keys, req_context)

    def _use(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        keys = tuple(keys)  # another thread reads it later
        self._keeper.note_use(self._residents.touch(keys, req_context), keys)

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        if self._clear_wanted:
            self._start_over()
        kept, coming = self._residents.readable, self._residents.writing
        absent = [key for key in keys if key not in kept]
        return [key for key in absent if key not in coming]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._residents.on_new_request(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        req_id, used = self._last_touch
        is_last = req_id == req_context.req_id
        try:
            if is_last and self._stored_since:
                # Blocks that were offered again, or had to wait, were stored after their uses were
                # told. This puts the head of the prompt last again, wherever they are in it. Once
                # for all of them: a long prompt is stored in many parts.
                self._use(used, req_context)
        finally:  # a policy of the user's own may raise
            if is_last:
                self._last_touch = ("", ())
            self._residents.on_request_finished(req_context)

    def known_keys(self, most: int) -> Sequence[OffloadKey]:
        return list(islice(self._residents.readable, most))

    def keep_note(self, note: bytes) -> None:
        self._keeper.keep_note(note)

    def kept_note(self) -> bytes | None:
        return self._slab.note or None

    def has_pending_work(self) -> bool:
        # vLLM may end its engine process in the middle of `shutdown`: what is stored should be in
        # the index before the engine has nothing left to do.
        return self._keeper.is_behind

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Blocks from before are gone at once for this engine, and a moment later, when that stands
        in the file, for every other."""
        super().begin_epoch(fingerprint)
        self._keeper.cut_at(self._residents.next_seq)
        self._start_over()

    def _want_clear(self) -> None:
        """On the keeper's thread: forget everything at the next call."""
        self._clear_wanted = True

    def _start_over(self) -> None:
        self._clear_wanted = False
        busy = {block.block_id for transfer in self._in_flight for _, block in transfer.pieces}
        policy, blocks = self._residents.start_over(busy)
        untold, self._unannounced = self._unannounced, {}
        if self.enable_kv_events:
            told = [key for key in blocks if key not in untold] if untold else list(blocks)
            self._report_removed(told)
        self._keeper.destroy(policy, blocks)

    # --- the life of a job: scheduler thread ---------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        self._submit(self._store, job)

    def submit_load(self, job: TransferJob) -> None:
        self._submit(self._load, job)

    def _submit(self, begin: Callable[[TransferJob], None], job: TransferJob) -> None:
        if self._clear_wanted:
            self._start_over()
        try:
            begin(job)
        except BaseException:  # a policy of the user's own
            self._results.append(JobResult(job.job_id, False))
            raise

    def _store(self, job: TransferJob) -> None:
        if job.fingerprint != self.fingerprint:
            self._results.append(JobResult(job.job_id, False))
            return
        residents = self._residents
        keys = job.keys
        todo = dict(zip(keys, job.block_ids.tolist(), strict=True))
        here: list[OffloadKey] = []
        kept, coming = residents.readable.keys(), residents.writing.keys()
        if not (kept.isdisjoint(todo.keys()) and coming.isdisjoint(todo.keys())):
            # What another job is writing counts as here.
            here = [key for key in todo if key in kept or key in coming]
            for key in here:
                del todo[key]
        # How much may wait for the disk is not up to us: what does holds slots of the primary tier,
        # and the orchestrator bounds those.
        new = list(todo)
        evicted = residents.make_room(new, keys, job.req_context)
        self._counters[metrics.EVICTED] += len(evicted)
        self._report_removed(evicted)
        blocks = residents.place(new, job.req_context)
        self._counters[metrics.REFUSED] += len(todo) - len(blocks)
        if self._last_touch[0] == job.req_context.req_id:
            self._stored_since = True
        if here:
            try:
                # Last: then the head of the prompt leaves last, wherever the new blocks are in it.
                self._use(keys, job.req_context)
            except BaseException:
                residents.not_written(blocks)
                raise
        self._num_queued += len(blocks)
        self._begin(SlabTransfer(job, list(zip(todo.values(), blocks, strict=False)), here))

    def _load(self, job: TransferJob) -> None:
        pieces: list[Piece[SlabBlock]] = []
        if job.fingerprint == self.fingerprint:
            self._use(job.keys, job.req_context)
            found = zip(job.block_ids.tolist(), self._residents.pin(job.keys), strict=True)
            pieces = [(row, block) for row, block in found if block is not None]
            pieces.sort(key=_slot_of)
        self._begin(SlabTransfer(job, pieces))

    def _begin(self, transfer: SlabTransfer) -> None:
        self._in_flight.add(transfer)
        self._io.work.submit(transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for transfer in self._io.work.take_ended():
            self._finish(transfer)
        if self._unannounced and not self.enable_kv_events:
            self._unannounced = {}  # nobody wants to be told
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        self._io.work.wait_until_idle()

    def shutdown(self) -> None:
        """Gives up what has not been begun. The results are still to be had."""
        self._io.stop()
        self._keeper.stop()
        self._slab.close()
        self.rows.release()

    def _finish(self, transfer: Transfer[SlabBlock]) -> None:
        self._in_flight.discard(transfer)
        job = transfer.job
        if job.is_promotion:
            self._end_load(transfer)
        else:
            self._end_store(transfer)
        done = None
        success = len(transfer.here) + len(transfer.done) == len(job.keys)
        if not success:
            done = transfer.here + [block.key for _, block in transfer.done]
        self._results.append(JobResult(job.job_id, success, done, transfer.seconds))

    def _end_load(self, transfer: Transfer[SlabBlock]) -> None:
        residents = self._residents
        # A block that could not be loaded once would be a HIT in vain again and again.
        forgotten = residents.unpin(
            [block for _, block in transfer.done], [block for _, block in transfer.failed]
        )
        self._counters[metrics.FORGOTTEN] += len(forgotten)
        self._report_removed(forgotten)

    def _end_store(self, transfer: Transfer[SlabBlock]) -> None:
        self._num_queued -= len(transfer.pieces)
        self._residents.not_written(block for _, block in transfer.failed)
        stored = self._residents.written(block for _, block in transfer.done)
        self._counters[metrics.FAILED] += len(transfer.failed)
        if stored and self.enable_kv_events:
            self._events.append(OffloadingEvent(stored, Medium.STORAGE, False, self.locality))

    # --- what is told: scheduler thread --------------------------------------------------------

    def _report_removed(self, keys: list[OffloadKey]) -> None:
        if not self.enable_kv_events:
            return
        if self._unannounced:
            untold = self._unannounced.keys() & keys
            keys = [key for key in keys if key not in untold]
            for key in untold:
                del self._unannounced[key]
        if keys:
            self._events.append(OffloadingEvent(keys, Medium.STORAGE, True, self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        if self._unannounced and self.enable_kv_events:
            count = min(len(self._unannounced), _ANNOUNCED_AT_ONCE)
            found = [self._unannounced.popitem()[0] for _ in range(count)]
            events.append(OffloadingEvent(found, Medium.STORAGE, False, self.locality))
        return events

    def get_stats(self) -> OffloadingStats:
        counters: dict[str, float] = {name: self._counters[name] for name in metrics.COUNTERS}
        self._counters.clear()
        for kind, count in self._io.errors.take().items():
            counters[error_counter(metrics.PREFIX, kind)] += count
        return OffloadingStats(
            counters,
            gauges={
                metrics.RESIDENT: self._residents.num_used,
                metrics.CAPACITY: self._residents.num_slots,
                metrics.FILE_BYTES: self._keeper.allocated_bytes,
                metrics.QUEUED: self._num_queued,
            },
        )

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return dict(metrics.DEFINITIONS)


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
                'the name of an eviction policy: "lru", "arc", one that is installed, or the '
                "primary tier's own",
                "Write one of these",
            )
        ) from None


def _slot_of(piece: Piece[SlabBlock]) -> int:
    return piece[1].block_id
