"""The fs tier: sealed blocks in files of a directory that several engines share."""

from __future__ import annotations

import errno
import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
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
    ScheduleEndContext,
)
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.fs import metrics
from kvtier.tiering.fs.block_file import block_file_bytes
from kvtier.tiering.fs.books import NAME_BYTES, Books
from kvtier.tiering.fs.clerk import Change, Clerk, Limits
from kvtier.tiering.fs.lookups import Lookups
from kvtier.tiering.fs.mover import FsMover, FsTransfer
from kvtier.tiering.fs.names import LONGEST_KEY, namespace_path
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.refusal import remedy_for
from kvtier.tiering.fs.root import allows_o_direct, open_root, warn_of_limits
from kvtier.tiering.fs.seat import Occupant
from kvtier.tiering.fs.uses import Uses
from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.errors import ErrorLog, error_counter
from kvtier.tiering.io.lane import Lane, depth_for, may_have_buffers
from kvtier.tiering.io.route import Routes
from kvtier.tiering.io.rows import require_movable
from kvtier.tiering.io.transfer import Transfer, Unit
from kvtier.tiering.io.work import WorkQueue

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

__all__ = ["FsSecondaryTierManager"]

logger = logging.getLogger(__name__)

_IN_FLIGHT_BYTES = 16 << 20
_EXTENT_BYTES = 4096
"""What a file system may need to remember where a file's bytes are."""


class FsSecondaryTierManager(SecondaryTierManager):
    """Blocks in files.

    The scheduler's thread knows what was heard of lately (`Lookups`). Lanes read and write files.
    The `Clerk`, a thread too, publishes what is written and sees to the quota; the `Sweeper` finds
    what may leave. Nothing is known of the root that another engine could not find out.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        max_bytes: int | str,
        min_free_bytes: int | str | None = None,
        n_read_threads: int | None = None,
        n_write_threads: int | None = None,
    ) -> None:
        config = offloading_spec.config
        options = FsOptions.parse(
            {
                "root_dir": root_dir,
                "max_bytes": max_bytes,
                "min_free_bytes": min_free_bytes,
                "n_read_threads": n_read_threads,
                "n_write_threads": n_write_threads,
            }
        )
        config.require_weights_identity()
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.REMOTE
        self._rows_address = address_of(primary_kv_view.cast("B"))
        try:
            require_movable(self.rows, self._rows_address, "fs")
            charge = block_file_bytes(self.rows.row_bytes) + _EXTENT_BYTES + NAME_BYTES
            options.require_room_for(charge)
            occupant = Occupant.here(config.engine_id, self.fingerprint.hex())
            books = open_root(options.root_dir, occupant)
            try:
                self._start(options, books, charge)
            except BaseException:
                books.close()
                raise
        except BaseException:
            self.rows.release()
            raise

    def _start(self, options: FsOptions, books: Books, charge: int) -> None:
        self._books = books
        self._is_private = False
        self._public = self._namespace = namespace_path(books.blocks, self.fingerprint)
        self._directory = str(self._namespace)
        self._max_bytes = options.max_bytes
        self._errors = ErrorLog(books.path, partial(remedy_for, books.path))
        self._counters: Counter[str] = Counter()
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._announced: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that this engine has told of, and not taken back. No more than there is room for:
        others remove some of them, and tell of that themselves."""
        self.capacity_blocks = self._max_announced = options.max_bytes // charge
        self._writing: set[OffloadKey] = set()
        self._num_queued = 0
        self._num_evicted_told = 0
        file_bytes = block_file_bytes(self.rows.row_bytes)
        warn_of_limits(books, options.max_bytes, options.min_free_bytes)
        is_direct = allows_o_direct(books)
        logger.info(
            "%s: namespace %s, %s",
            self._namespace.parent.parent,
            self.fingerprint.hex(),
            "O_DIRECT" if is_direct else "through the page cache",
        )
        self._work: WorkQueue[OffloadKey] = WorkQueue(max_pieces=1)
        self._clerk: Clerk[Unit[OffloadKey]] = Clerk(
            books,
            Limits(options.max_bytes, options.min_free_bytes),
            file_bytes,
            charge,
            self._note_error,
        )
        mover = FsMover(
            self,
            books.path,
            books.below,
            self._rows_address,
            self._work,
            self._clerk,
            self._errors,
            is_direct=is_direct,
        )
        self._lanes: list[Lane[OffloadKey]] = []
        self._lookups = Lookups(books.below, self._directory, self._note_error)
        self._uses = Uses(books.below, self._note_error, self._writing.__contains__)
        try:
            self._lookups.start()
            self._uses.start()
            self._start_lanes(mover, options)
            self._clerk.use(self._namespace, self._public, junk=None)
            self._clerk.start(mover.published)
        except BaseException:
            self._stop_threads()
            raise

    def _start_lanes(self, mover: FsMover, options: FsOptions) -> None:
        file_bytes = block_file_bytes(self.rows.row_bytes)
        depth = depth_for(_IN_FLIGHT_BYTES, file_bytes)
        routes = Routes.of(mover.where)
        num_lanes = options.n_read_threads + options.n_write_threads
        has_buffers = may_have_buffers(num_lanes * depth, file_bytes)
        for kind, count in (("read", options.n_read_threads), ("write", options.n_write_threads)):
            for number in range(count):
                self._lanes.append(
                    Lane(
                        name=f"kvtier-{self.tier_type}-{kind}-{number}",
                        work=self._work,
                        mover=mover,
                        routes=routes,
                        depth=depth,
                        max_loads=depth if kind == "read" else 0,
                        max_stores=depth if kind == "write" else 0,
                        max_pieces=1,
                        payload_bytes=self.rows.row_bytes,
                        has_buffers=has_buffers,
                    )
                )

    def _note_error(self, error: OSError) -> None:
        self._errors.note(error.errno or errno.EIO, is_write=True, path=error.filename)

    # --- what is there: scheduler thread -------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.ask()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._lookups.answer((key,))[0]

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        return self._lookups.answer(keys)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._uses.note(self._directory, tuple(keys))

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Known from an earlier use of the same blocks: when that was noted, their files were not
        there. So a block is offered again at its second use, and nothing is looked for twice."""
        absent = self._uses.take_absent(self._directory, keys)
        if not absent:
            return absent
        here = self._writing.union(self._lookups.present_of(absent))
        return [key for key in absent if key not in here]

    def begin_epoch(self, fingerprint: bytes) -> None:
        """What this engine stored before stays for others; it looks into a namespace of its own
        from now on, which ends with it."""
        super().begin_epoch(fingerprint)
        self._report_removed(list(self._announced))
        junk = self._namespace if self._is_private else None
        self._is_private = True
        self._use_namespace(junk)

    def _use_namespace(self, junk: Path | None) -> None:
        blocks = self._clerk.private_blocks if self._is_private else self._books.blocks
        self._namespace = namespace_path(blocks, self.fingerprint)
        self._directory = str(self._namespace)
        self._lookups.look_into(self._directory)
        self._uses.forget_absent()
        self._clerk.use(self._namespace, self._public, junk)
        self._writing.clear()

    # --- the life of a job: scheduler thread ---------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        if job.fingerprint != self.fingerprint:
            self._results.append(JobResult(job.job_id, False))
            return
        todo = dict(zip(job.keys, job.block_ids.tolist(), strict=True))
        # What another job is writing counts as here.
        here = self._lookups.present_of(todo)
        here += self._writing.intersection(todo).difference(here)
        for key in here:
            del todo[key]
        pieces = [(row, key) for key, row in todo.items() if len(key) <= LONGEST_KEY]
        self._counters[metrics.REFUSED] += len(todo) - len(pieces)
        if here:
            self._uses.note(self._directory, tuple(job.keys))
        self._writing.update(key for _, key in pieces)
        self._num_queued += len(pieces)
        self._work.submit(FsTransfer(job, pieces, here, namespace=self._directory))

    def submit_load(self, job: TransferJob) -> None:
        pieces: list[tuple[int, OffloadKey]] = []
        if job.fingerprint == self.fingerprint:
            pieces = list(zip(job.block_ids.tolist(), job.keys, strict=True))
        self._work.submit(FsTransfer(job, pieces, namespace=self._directory))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._is_private and self._namespace.parent != self._clerk.private_blocks:
            # Our seat was lost, and all that was in it.
            self._report_removed(list(self._announced))
            self._use_namespace(junk=None)
        self._lookups.ask()
        ended = self._work.take_ended()
        if self._clerk.news:
            self._learn()  # at least what is known of those that have ended
        for transfer in ended:
            self._finish(transfer)
        results, self._results = self._results, []
        return results

    def _finish(self, transfer: Transfer[OffloadKey]) -> None:
        job = transfer.job
        is_current = job.fingerprint == self.fingerprint
        if job.is_promotion:
            self._end_load(transfer, is_current)
        else:
            self._end_store(transfer, is_current)
        success = len(transfer.here) + len(transfer.done) == len(job.keys)
        done = None
        if not success:
            done = transfer.here + [key for _, key in transfer.done]
        assert isinstance(transfer, FsTransfer)
        num_gone = len(transfer.gone)
        self._results.append(JobResult(job.job_id, success, done, transfer.seconds, num_gone))

    def _end_load(self, transfer: Transfer[OffloadKey], is_current: bool) -> None:
        if transfer.failed and is_current:
            # A block that could not be loaded once would be a HIT in vain again and again.
            self._counters[metrics.FORGOTTEN] += len(transfer.failed)
            self._lookups.note_absent([key for _, key in transfer.failed])

    def _end_store(self, transfer: Transfer[OffloadKey], is_current: bool) -> None:
        self._num_queued -= len(transfer.pieces)
        assert isinstance(transfer, FsTransfer)
        self._counters[metrics.REFUSED] += len(transfer.refused)
        self._counters[metrics.FAILED] += len(transfer.failed) - len(transfer.refused)
        if is_current:
            self._writing.difference_update(key for _, key in transfer.pieces)

    def _learn(self) -> None:
        """What has come and gone by our own doing, in that order."""
        news = self._clerk.news
        while news:
            namespace, keys, change = news.popleft()
            if namespace != self._directory:
                continue
            if change is Change.REMOVED:
                self._lookups.forget(keys)
                self._report_removed(keys)
            else:
                self._lookups.note_present(keys)
                self._uses.note_present(keys)
            if change is Change.STORED:
                self._report_stored(keys)

    def drain_jobs(self) -> None:
        self._work.wait_until_idle()

    def shutdown(self) -> None:
        """Gives up what has not been begun. The results are still to be had."""
        self._stop_threads()
        self.rows.release()

    def _stop_threads(self) -> None:
        self._work.stop()
        self._clerk.lease.close()
        for lane in self._lanes:
            lane.join()
        self._lookups.stop()
        self._uses.stop()
        self._clerk.stop()

    # --- what is told: scheduler thread --------------------------------------------------------

    def _report_stored(self, keys: list[OffloadKey]) -> None:
        if not keys or not self.enable_kv_events:
            return
        self._events.append(OffloadingEvent(keys, Medium.STORAGE, False, self.locality))
        announced = self._announced
        announced.update(dict.fromkeys(keys))
        while len(announced) > self._max_announced:
            announced.popitem(last=False)

    def _report_removed(self, keys: list[OffloadKey]) -> None:
        if not keys or not self.enable_kv_events:
            return
        self._events.append(OffloadingEvent(keys, Medium.STORAGE, True, self.locality))
        for key in keys:
            self._announced.pop(key, None)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def get_stats(self) -> OffloadingStats:
        num_evicted = self._clerk.num_evicted
        self._counters[metrics.EVICTED] += num_evicted - self._num_evicted_told
        self._num_evicted_told = num_evicted
        counters: dict[str, float] = {name: self._counters[name] for name in metrics.COUNTERS}
        self._counters.clear()
        for kind, count in self._errors.take().items():
            counters[error_counter(metrics.PREFIX, kind)] += count
        usage = self._clerk.usage
        return OffloadingStats(
            counters,
            gauges={
                metrics.USED_BYTES: usage.num_bytes,
                metrics.LIMIT_BYTES: self._max_bytes,
                metrics.BLOCKS: usage.num_blocks,
                metrics.QUEUED: self._num_queued,
            },
        )

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return dict(metrics.DEFINITIONS)
