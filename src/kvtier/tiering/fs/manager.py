"""The fs tier: sealed blocks in the files of a directory that several engines share.

This module runs on the scheduler's thread: it answers lookups from memory, passes jobs to the lanes
(I/O threads), and collects results. `mover` moves the bytes; `publisher` and `transaction` keep the
shared root consistent.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from kvtier.tiering.base import JobResult, SecondaryTierManager, TierUsage, TransferJob
from kvtier.tiering.fs.access import remedy_for
from kvtier.tiering.fs.layout import LONGEST_KEY, block_file_bytes, namespace_path
from kvtier.tiering.fs.mover import FsMover, FsTransfer
from kvtier.tiering.fs.namespaces import FsStartLook
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.publisher import Change, Publisher
from kvtier.tiering.fs.quota import Limits, warn_of_limits
from kvtier.tiering.fs.root import RootSession, allows_o_direct, open_root
from kvtier.tiering.fs.transaction import NAME_BYTES
from kvtier.tiering.fs.uses import NUM_LOOKUP_THREADS, UseStamps, find_files
from kvtier.tiering.inspection import local_path
from kvtier.tiering.io.aio import address_of
from kvtier.tiering.io.buffers import Routes
from kvtier.tiering.io.lane import Lane, depth_for, may_have_buffers
from kvtier.tiering.io.lookups import LookupCache
from kvtier.tiering.io.metrics import ErrorLog, definitions, error_counter, error_counters
from kvtier.tiering.io.page import require_movable
from kvtier.tiering.io.queue import Transfer, Unit, WorkQueue

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.fs.inspector import FsInspector
    from kvtier.tiering.inspection import Report
    from kvtier.tiering.trial import TrialBlocks

__all__ = [
    "BLOCKS",
    "EVICTED",
    "FAILED",
    "FORGOTTEN",
    "LIMIT_BYTES",
    "PREFIX",
    "QUEUED",
    "REFUSED",
    "USED_BYTES",
    "FsSecondaryTierManager",
]

logger = logging.getLogger(__name__)

_IN_FLIGHT_BYTES = 16 << 20
_EXTENT_BYTES = 4096
"""Upper bound for the bytes that a file system needs to map the extents of one file."""

PREFIX = "kvtier_fs"
USED_BYTES = f"{PREFIX}_used_bytes"
LIMIT_BYTES = f"{PREFIX}_limit_bytes"
BLOCKS = f"{PREFIX}_blocks"
QUEUED = f"{PREFIX}_queued_blocks"
EVICTED = f"{PREFIX}_evicted_blocks"
REFUSED = f"{PREFIX}_refused_blocks"
FAILED = f"{PREFIX}_failed_blocks"
FORGOTTEN = f"{PREFIX}_forgotten_blocks"

_GAUGES = {
    USED_BYTES: "Bytes that all engines use or have reserved in the root directory; while no "
    "engine stores blocks, the same number as du prints.",
    LIMIT_BYTES: "Bytes that the root directory may take, by this engine's configuration.",
    BLOCKS: "Blocks in the root directory, of all engines and models.",
    QUEUED: "Blocks of this engine that wait to be written or are being written.",
}
_COUNTERS = {
    EVICTED: "Blocks that this engine evicted for new ones.",
    REFUSED: "Blocks not stored because there was no space or the key is too long.",
    FAILED: "Blocks that could not be written.",
    FORGOTTEN: "Blocks that could not be loaded or were damaged, and count as absent.",
    **error_counters(PREFIX),
}


class FsSecondaryTierManager(SecondaryTierManager):
    """A tier that keeps each block in a file of a shared directory.

    The scheduler's thread answers lookups from the `LookupCache`. Lanes read and write files. The
    `Publisher`'s thread publishes written blocks within the quota; the `Sweeper`'s thread finds
    blocks to evict. All lasting state is in the root, where every engine sees it.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE
    options_cls = FsOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: those of `FsOptions`."""
        config = offloading_spec.config
        options = FsOptions.parse(keys)
        options.require_place()
        config.require_weights_identity()
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.REMOTE
        self._rows_address = address_of(primary_kv_view.cast("B"))
        try:
            require_movable(self.rows, self._rows_address, "fs")
            charge = block_file_bytes(self.rows.row_bytes) + _EXTENT_BYTES + NAME_BYTES
            options.require_room_for(charge)
            info = EngineInfo.here(config.engine_id, self.fingerprint.hex())
            session = open_root(options.root_dir, info)
            try:
                self._start(options, session, charge)
            except BaseException:
                session.close()
                raise
        except BaseException:
            self.rows.release()
            raise

    def _start(self, options: FsOptions, session: RootSession, charge: int) -> None:
        self._session = session
        session.description = self.describe_namespace()
        self._is_private = False
        self._public = self._namespace = namespace_path(session.blocks, self.fingerprint)
        self._directory = str(self._namespace)
        self._max_bytes = options.max_bytes
        self._errors = ErrorLog(session.path, partial(remedy_for, session.path))
        self._counters: Counter[str] = Counter()
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._announced: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that events have reported as stored, and not yet as removed. At most as many as
        fit into `max_bytes`: this engine does not learn which of them other engines have evicted,
        so without a limit their number would grow for ever."""
        self.capacity_blocks = self._max_announced = options.max_bytes // charge
        self._writing: set[OffloadKey] = set()
        self._num_queued = 0
        self._num_evicted_reported = 0
        file_bytes = block_file_bytes(self.rows.row_bytes)
        limits = Limits(options.max_bytes, options.min_free_bytes)
        warn_of_limits(session, limits)
        is_direct = allows_o_direct(session)
        logger.info(
            "%s: namespace %s, %s",
            self._namespace.parent.parent,
            self.fingerprint.hex(),
            "O_DIRECT" if is_direct else "through the page cache",
        )
        self._work: WorkQueue[OffloadKey] = WorkQueue(max_pieces=1)
        self._publisher: Publisher[Unit[OffloadKey]] = Publisher(
            session, limits, file_bytes, charge, self._note_error
        )
        mover = FsMover(
            self,
            session.path,
            session.tree,
            self._rows_address,
            self._work,
            self._publisher,
            self._errors,
            is_direct=is_direct,
        )
        self._lanes: list[Lane[OffloadKey]] = []
        self._lookups = LookupCache(
            [partial(find_files, session.tree, self._note_error)] * NUM_LOOKUP_THREADS,
            self._directory,
            name="kvtier-fs-lookup",
            longest_key=LONGEST_KEY,
        )
        self._uses = UseStamps(session.tree, self._note_error, self._writing.__contains__)
        self._start_look = FsStartLook(session.path, session.tree, session.description)
        self._start_remark = self._start_look.get_remark
        try:
            self._start_look.start()
            self._lookups.start()
            self._uses.start()
            self._start_lanes(mover, options)
            self._publisher.use(self._namespace, self._public, junk=None)
            self._publisher.start(mover.published)
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

    # --- lookups: scheduler thread -------------------------------------------------------------

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
        """Return the blocks that had no file when `UseStamps` wanted to record an earlier use of
        them. So an evicted block is stored again at the second use after its eviction, without a
        lookup."""
        absent = self._uses.absent.take(self._directory, keys)
        if not absent:
            return absent
        here = self._writing.union(self._lookups.present_of(absent))
        return [key for key in absent if key not in here]

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Leave earlier blocks to other engines, and use a private namespace from now on. It is
        removed at the next reset, or when this engine ends."""
        super().begin_epoch(fingerprint)
        self._report_removed(list(self._announced))
        junk = self._namespace if self._is_private else None
        self._is_private = True
        self._use_namespace(junk)

    def _use_namespace(self, junk: Path | None) -> None:
        blocks = self._publisher.private_blocks if self._is_private else self._session.blocks
        self._namespace = namespace_path(blocks, self.fingerprint)
        self._directory = str(self._namespace)
        self._lookups.look_into(self._directory)
        self._uses.absent.clear()
        self._publisher.use(self._namespace, self._public, junk)
        self._writing.clear()

    # --- jobs: scheduler thread ----------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        if job.fingerprint != self.fingerprint:
            self._results.append(JobResult(job.job_id, False))
            return
        todo = dict(zip(job.keys, job.block_ids.tolist(), strict=True))
        # Blocks that another job is writing count as stored.
        here = self._lookups.present_of(todo)
        here += self._writing.intersection(todo).difference(here)
        for key in here:
            del todo[key]
        pieces = [(row, key) for key, row in todo.items() if len(key) <= LONGEST_KEY]
        self._counters[REFUSED] += len(todo) - len(pieces)
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
        if self._is_private and self._namespace.parent != self._publisher.private_blocks:
            # The engine has left the root and joined it again: its old private namespace is lost.
            self._report_removed(list(self._announced))
            self._use_namespace(junk=None)
        self._lookups.ask()
        ended = self._work.take_ended()
        # After `take_ended`: the changes of all jobs in `ended` are in the log by now.
        self._apply_changes()
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
            # Otherwise the next lookup would be a HIT, and the load would fail again.
            self._counters[FORGOTTEN] += len(transfer.failed)
            self._lookups.note_absent([key for _, key in transfer.failed])

    def _end_store(self, transfer: Transfer[OffloadKey], is_current: bool) -> None:
        self._num_queued -= len(transfer.pieces)
        assert isinstance(transfer, FsTransfer)
        self._counters[REFUSED] += len(transfer.refused)
        self._counters[FAILED] += len(transfer.failed) - len(transfer.refused)
        if is_current:
            self._writing.difference_update(key for _, key in transfer.pieces)

    def _apply_changes(self) -> None:
        """Record which blocks this engine stored, saw or removed, in the order in which it
        happened."""
        for namespace, keys, change in self._publisher.changes.take():
            if namespace != self._directory:
                continue
            if change is Change.REMOVED:
                self._lookups.forget(keys)
                self._report_removed(keys)
            else:
                self._lookups.note_present(keys)
                self._uses.absent.discard(keys)
            if change is Change.STORED:
                self._report_stored(keys)

    def drain_jobs(self) -> None:
        self._work.wait_until_idle()

    def shutdown(self) -> None:
        """Fail jobs that have not begun, end all threads, and leave the root. `get_finished_jobs`
        still returns the results."""
        self._stop_threads()
        self.rows.release()

    def _stop_threads(self) -> None:
        self._start_look.stop()
        self._work.stop()
        self._publisher.pool.close()
        for lane in self._lanes:
            lane.join()
        self._lookups.stop()
        self._uses.stop()
        self._publisher.stop()

    # --- events and metrics: scheduler thread --------------------------------------------------

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

    def usage(self) -> TierUsage:
        return TierUsage(self._publisher.usage.num_bytes, self._max_bytes)

    def get_stats(self) -> OffloadingStats:
        num_evicted = self._publisher.num_evicted
        self._counters[EVICTED] += num_evicted - self._num_evicted_reported
        self._num_evicted_reported = num_evicted
        counters: dict[str, float] = {name: self._counters[name] for name in _COUNTERS}
        self._counters.clear()
        for kind, count in self._errors.take().items():
            counters[error_counter(PREFIX, kind)] += count
        usage = self._publisher.usage
        return OffloadingStats(
            counters,
            gauges={
                USED_BYTES: usage.num_bytes,
                LIMIT_BYTES: self._max_bytes,
                BLOCKS: usage.num_blocks,
                QUEUED: self._num_queued,
            },
        )

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        from kvtier.tiering.fs.trial import trial_root

        return trial_root(keys, blocks)

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return definitions(_GAUGES, _COUNTERS)

    @classmethod
    def open_inspector(cls, location: str) -> FsInspector | None:
        from kvtier.tiering.fs.inspector import FsInspector

        path = local_path(location)
        return FsInspector(path) if path is not None and path.is_dir() else None

    @classmethod
    def init_storage(cls, location: str) -> Report | None:
        from kvtier.tiering.fs.inspector import init_root

        path = local_path(location)
        return None if path is None else init_root(path)
