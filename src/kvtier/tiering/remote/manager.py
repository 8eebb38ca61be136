"""The scheduler's side of a tier on a server that engines share.

This module runs on the scheduler's thread: it answers lookups from memory, passes jobs to the lanes
(I/O threads), and collects results. A tier derives from `RemoteTierManager` and gives it a
`BlockServer`, which makes everything that talks to the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from kvtier.tiering.io.lookups import LookupCache
from kvtier.tiering.io.metrics import definitions
from kvtier.tiering.io.queue import Transfer, WorkQueue
from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import BlockMover, LaneSet, RemoteLane, RemoteTransfer
from kvtier.tiering.remote.namespaces import NamespaceKeeper, NamespaceStorage
from kvtier.tiering.remote.uses import UseReports

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.inspection import Report

__all__ = ["LONGEST_KEY", "BlockServer", "RemoteTierManager", "namespace_of"]

LONGEST_KEY = 128
"""Longer keys do not fit into a seal."""
_MAX_ANNOUNCED = 262_144
_UNIT_BYTES = 4 << 20
_MOST_PIECES = 64

_GAUGES = {"queued_blocks": "Blocks of this engine that wait to be written or are being written."}
_COUNTERS = {
    "refused_blocks": "Blocks not stored because the server had no room or the key is too long.",
    "failed_blocks": "Blocks that could not be written.",
    "forgotten_blocks": "Blocks that could not be loaded, and count as absent.",
    "vanished_blocks": "Blocks that the server no longer had when they were loaded.",
}
_FAILURES = {
    FailureKind.UNREACHABLE: "Calls that failed because there was no connection, or it broke.",
    FailureKind.SILENT: "Calls that the server did not answer in time.",
    FailureKind.REFUSED: "Calls that the server refused.",
    FailureKind.FULL: "Times that the server had no room.",
    FailureKind.GARBAGE: "Answers that were none.",
}


def _metrics_of(prefix: str) -> dict[str, MetricDefinition]:
    """Definitions of the metrics that every tier on a server has."""
    failures = {f"{prefix}_failures_{kind}": text for kind, text in _FAILURES.items()}
    return definitions(
        {f"{prefix}_{name}": text for name, text in _GAUGES.items()},
        {f"{prefix}_{name}": text for name, text in _COUNTERS.items()} | failures,
    )


def namespace_of(fingerprint: bytes) -> str:
    """The name of a namespace in the storage."""
    return fingerprint.hex()


class BlockServer(ABC):
    """Makes what talks to the server. Its methods are called while the tier starts; the functions
    that they return are called on the tier's threads."""

    errors: ServerErrors
    namespaces: NamespaceStorage
    num_lookup_threads = 2
    looked_up_at_once = 128
    """Blocks of a prompt that one call of `find` gets at most."""
    most_stuck_calls = 0
    """Lanes that may hang in a call of the server and be replaced. 0: its calls end in time."""
    is_closed = False
    """True after `interrupt`."""

    @abstractmethod
    def open_mover(self, tier: SecondaryTierManager) -> BlockMover:
        """Return the mover of a new lane. Must not connect yet. Called later, too, and by another
        thread, if a lane is replaced."""

    @abstractmethod
    def find(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterable[bool]:
        """Tell for each of these blocks of a prompt if it is there. May be lazy, and end at the
        first that is not. May raise `ServerFailure`. Called by several threads."""

    def look(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterator[bool]:
        """See `kvtier.tiering.io.lookups.Look`. Does not raise: its thread would end, and no block
        would ever be found again."""
        try:
            yield from self.find(namespace, keys)
        except ServerFailure as failure:
            if not self.is_closed:
                self.errors.note(failure)
            yield False
        except Exception as error:
            self.errors.note_unexpected(error)
            yield False

    @abstractmethod
    def touch(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """See `kvtier.tiering.remote.uses.Touch`."""

    def interrupt(self) -> None:
        """Let calls that wait fail now if possible, and all later ones at once. Called at
        shutdown."""
        self.is_closed = True

    @abstractmethod
    def close(self) -> None:
        """Close the connections. Called when all threads have ended."""


class RemoteTierManager(SecondaryTierManager):
    """Keeps sealed blocks on a server. The scheduler's thread answers lookups from the
    `LookupCache`; lanes read and write; `UseReports` tells the server what is used.

    After a reset, blocks go to a private namespace. What other engines and later ones read is not
    changed by it.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE
    metric_prefix: ClassVar[str]
    schemes: ClassVar[Sequence[str]] = ()
    """How URLs of such a server begin."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        server: BlockServer,
        num_lanes: Mapping[str, int],
        max_pieces: int = _MOST_PIECES,
    ) -> None:
        """`num_lanes`: how many threads "load" and "store". `max_pieces`: the most blocks that one
        of them moves with one call."""
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.REMOTE
        self._server = server
        self._errors = server.errors
        self._namespace = namespace_of(self.fingerprint)
        self._counters: Counter[str] = Counter()
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._announced: OrderedDict[OffloadKey, None] = OrderedDict()
        """Blocks that events have reported as stored, and not yet as removed. Bounded, because this
        engine does not learn which of them the server or other engines have removed."""
        self._writing: set[OffloadKey] = set()
        self._num_queued = 0
        row_bytes = self.rows.row_bytes
        self._work: WorkQueue[OffloadKey] = WorkQueue(
            max_pieces=min(max(_UNIT_BYTES // row_bytes, 1), max_pieces)
        )
        self._lookups = LookupCache(
            [server.look] * server.num_lookup_threads,
            self._namespace,
            name=f"kvtier-{tier_type}-lookup",
            longest_key=LONGEST_KEY,
            at_once=server.looked_up_at_once,
        )
        self._uses = UseReports(
            f"kvtier-{tier_type}-uses", server.touch, self._errors, self._writing.__contains__
        )
        self._keeper = NamespaceKeeper(
            f"kvtier-{tier_type}-namespaces",
            server.errors.where,
            server.namespaces,
            self.describe_namespace(),
        )
        self._start_remark = self._keeper.get_remark
        self._lanes = LaneSet(
            f"kvtier-{tier_type}-lanes", self._open_lane, num_lanes, server.most_stuck_calls
        )
        try:
            self._lookups.start()
            self._uses.start()
            self._keeper.start()
            self._lanes.start()
        except BaseException:
            self.shutdown()
            raise

    def _open_lane(self, kind: str, number: int) -> RemoteLane:
        return RemoteLane(
            name=f"kvtier-{self.tier_type}-{kind}-{number}",
            work=self._work,
            mover=self._server.open_mover(self),
            errors=self._errors,
            is_for_loads=kind == "load",
            block_bytes=self.rows.row_bytes,
        )

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
        self._uses.note(self._namespace, tuple(keys))

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """Return the blocks that the server did not have when it was told of an earlier use."""
        absent = self._uses.absent.take(self._namespace, keys)
        if not absent:
            return absent
        here = self._writing.union(self._lookups.present_of(absent))
        return [key for key in absent if key not in here]

    def begin_epoch(self, fingerprint: bytes) -> None:
        """Leave earlier blocks to other engines, and use a private namespace from now on."""
        super().begin_epoch(fingerprint)
        self._report_removed(list(self._announced))
        self._namespace = namespace_of(fingerprint)
        self._lookups.look_into(self._namespace)
        self._uses.absent.clear()
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
        self._counters["refused_blocks"] += len(todo) - len(pieces)
        self._writing.update(key for _, key in pieces)
        self._num_queued += len(pieces)
        self._work.submit(RemoteTransfer(job, pieces, here, namespace=self._namespace))

    def submit_load(self, job: TransferJob) -> None:
        pieces: list[tuple[int, OffloadKey]] = []
        if job.fingerprint == self.fingerprint:
            pieces = list(zip(job.block_ids.tolist(), job.keys, strict=True))
        self._work.submit(RemoteTransfer(job, pieces, namespace=self._namespace))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._lookups.ask()
        for transfer in self._work.take_ended():
            self._finish(transfer)
        results, self._results = self._results, []
        return results

    def _finish(self, transfer: Transfer[OffloadKey]) -> None:
        assert isinstance(transfer, RemoteTransfer)
        job = transfer.job
        if transfer.namespace == self._namespace:
            self._lookups.note_absent(transfer.lost)
            if job.is_promotion:
                self._note_loaded(transfer)
            else:
                self._note_stored(transfer)
        if not job.is_promotion:
            self._num_queued -= len(transfer.pieces)
            self._counters["refused_blocks"] += len(transfer.refused)
            self._counters["failed_blocks"] += len(transfer.failed) - len(transfer.refused)
        self._counters["vanished_blocks"] += len(transfer.gone)
        done = transfer.here + [key for _, key in transfer.done]
        if done:
            self._keeper.note_use(transfer.namespace)
        success = len(done) == len(job.keys)
        self._results.append(
            JobResult(
                job.job_id,
                success,
                None if success else done,
                transfer.seconds,
                len(transfer.gone),
            )
        )

    def _note_loaded(self, transfer: RemoteTransfer) -> None:
        if transfer.failed:
            # Otherwise the next lookup would be a HIT, and the load would fail again.
            keys = [key for _, key in transfer.failed]
            self._counters["forgotten_blocks"] += len(keys) - len(transfer.gone)
            self._lookups.note_absent(keys)
            self._report_removed([key for key in keys if key in self._announced])

    def _note_stored(self, transfer: RemoteTransfer) -> None:
        done = [key for _, key in transfer.done]
        self._writing.difference_update(done)
        self._writing.difference_update(key for _, key in transfer.failed)
        self._lookups.note_present(done)
        self._uses.absent.discard(done)
        self._report_stored(transfer.stored)

    def drain_jobs(self) -> None:
        self._work.wait_until_idle()

    def shutdown(self) -> None:
        """Fail jobs that have not begun, end all threads, and close the connections.
        `get_finished_jobs` still returns the results, but for jobs in calls that hang."""
        self._work.stop()
        self._server.interrupt()
        if not self._lanes.join():
            self._work.stop_waiting()
        self._lookups.stop()
        self._uses.stop()
        self._keeper.stop()
        self._server.close()
        self.rows.release()

    # --- events and metrics: scheduler thread --------------------------------------------------

    def _report_stored(self, keys: list[OffloadKey]) -> None:
        if not keys or not self.enable_kv_events:
            return
        self._events.append(OffloadingEvent(keys, Medium.STORAGE, False, self.locality))
        announced = self._announced
        announced.update(dict.fromkeys(keys))
        while len(announced) > _MAX_ANNOUNCED:
            announced.popitem(last=False)

    def _report_removed(self, keys: list[OffloadKey]) -> None:
        if not keys or not self.enable_kv_events:
            return
        self._events.append(OffloadingEvent(keys, Medium.STORAGE, True, self.locality))
        for key in keys:
            self._announced.pop(key, None)

    @classmethod
    def init_storage(cls, location: str) -> Report | None:
        from kvtier.tiering.inspection import InspectionRefused

        # The URL may have a secret, so it is not shown.
        if location.lower().startswith(tuple(f"{scheme}://" for scheme in cls.schemes)):
            raise InspectionRefused(
                "a server or bucket needs no init: engines write into it as it is. A bucket is "
                "made with the tools of its service"
            )
        return None

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return _metrics_of(cls.metric_prefix)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def get_stats(self) -> OffloadingStats:
        prefix = self.metric_prefix
        counters: dict[str, float] = {f"{prefix}_{n}": self._counters[n] for n in _COUNTERS}
        self._counters.clear()
        failures = self._errors.take()
        counters |= {f"{prefix}_failures_{kind}": failures[kind] for kind in FailureKind}
        return OffloadingStats(counters, gauges={f"{prefix}_queued_blocks": self._num_queued})
