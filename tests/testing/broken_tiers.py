"""Tiers with one mistake each, of the kind that a tier's author could make."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from kvtier import seal
from kvtier.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from kvtier.tiering.base import JobNotBegun, JobResult, TransferJob
from kvtier.tiering.example.io_thread import ExampleTransfer, IOThread, SealedBlock
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from tests.testing.gated_tier import GatedTier

Example = ExampleSecondaryTierManager

# --- reporting ---------------------------------------------------------------------------------


class LeaksWhatIsThere(Example):
    def submit_store(self, job: TransferJob) -> None:
        if job.keys and all(key in self.blocks for key in job.keys):
            return
        super().submit_store(job)


class LeaksWithoutRoom(Example):
    def submit_store(self, job: TransferJob) -> None:
        if len(job.keys) <= self.max_blocks:
            super().submit_store(job)


class LeaksEmptyJobs(Example):
    def submit_store(self, job: TransferJob) -> None:
        if job.keys:
            super().submit_store(job)


class RaisesForUnknownBlocks(Example):
    def submit_load(self, job: TransferJob) -> None:
        for key in job.keys:
            self.blocks[key]
        super().submit_load(job)


class SaysAllArrived(Example):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [JobResult(result.job_id, True) for result in super().get_finished_jobs()]


class NamesNothingOfAPart(Example):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [JobResult(result.job_id, result.success) for result in super().get_finished_jobs()]


class GivesUpEarly(Example):
    """A load ends at the first block that is not there."""

    def submit_load(self, job: TransferJob) -> None:
        if all(key in self.blocks for key in job.keys):
            super().submit_load(job)
        else:
            self._results.append(JobResult(job.job_id, False))


class ReportsBeforeItWrites(Example):
    _to_write: TransferJob | None = None

    def submit_load(self, job: TransferJob) -> None:
        self._to_write = job
        self._results.append(JobResult(job.job_id, all(key in self.blocks for key in job.keys)))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._to_write is not None:
            super().submit_load(self._to_write)
            self._results.clear()
            self._to_write = None


# --- bytes -------------------------------------------------------------------------------------


class LoadsInSlotOrder(Example):
    """Assumes that the slots of a job are adjacent."""

    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(replace(job, block_ids=np.sort(job.block_ids)))


class WritesIntoSlotsItReads(Example):
    def submit_store(self, job: TransferJob) -> None:
        super().submit_store(job)
        for slot in job.block_ids.tolist():
            self.rows[slot][0] ^= 1


class ReadsSlotsTooLate(Example):
    """Queues stores, and copies the blocks after it has reported them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._aside: list[TransferJob] = []

    def submit_store(self, job: TransferJob) -> None:
        self._aside.append(job)
        self._results.append(JobResult(job.job_id, True))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for job in self._aside:
            super().submit_store(job)
            self._results.pop()
        self._aside.clear()


class LoadsOnlyOnce(Example):
    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        for key in job.keys:
            self.blocks.pop(key, None)


class IgnoresTheGroup(Example):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        known = {kept[:-4] for kept in self.blocks}
        return LookupResult.HIT if key[:-4] in known else LookupResult.MISS


class ReplacesInPlace(GatedTier):
    """Drops a block that is stored again, and then stores it."""

    def submit_store(self, job: TransferJob) -> None:
        for key in job.keys:
            self.blocks.pop(key, None)
        super().submit_store(job)


class KeepsLess(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_blocks = 500


class LoadsByKey(Example):
    """Remembers the slot of a wanted block by its key: of two loads of it, the second wins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slot_of: dict[OffloadKey, int] = {}
        self._waiting: list[JobResult] = []

    def submit_load(self, job: TransferJob) -> None:
        found = [key for key in job.keys if key in self.blocks]
        self._slot_of.update(zip(job.keys, job.block_ids.tolist(), strict=True))
        self._waiting.append(JobResult(job.job_id, len(found) == len(job.keys), found))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for key, slot in self._slot_of.items():
            if key in self.blocks:
                self.rows[slot][:] = self.blocks[key].payload.data
        self._slot_of.clear()
        results = [*super().get_finished_jobs(), *self._waiting]
        self._waiting.clear()
        return results


class TakesTwoForNone(GatedTier):
    """Drops a block that two stores bring at the same time."""

    def _end_store(self, transfer: ExampleTransfer) -> None:
        twice = [key for key in transfer.blocks if key in self.blocks]
        super()._end_store(transfer)
        for key in twice:
            del self.blocks[key]


# --- capacity ----------------------------------------------------------------------------------


class KeepsMore(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_blocks += 1


class ForgetsWhatIsUnderWay(GatedTier):
    """Makes room for each store as if it were the only one in flight."""

    def submit_store(self, job: TransferJob) -> None:
        super().submit_store(job)
        self._num_reserved = 0

    def _end_store(self, transfer: ExampleTransfer) -> None:
        transfer.num_reserved = 0
        super()._end_store(transfer)


# --- lookups and events ------------------------------------------------------------------------


class PromisesEverythingInBatches(Example):
    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        return [LookupResult.HIT] * len(keys)


class EndsBatchesTooSoon(Example):
    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        return super().lookup_batch(keys, req_context)[:2]


class RemembersMisses(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._missed: set[OffloadKey] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answer = super().lookup(key, req_context)
        if answer is LookupResult.MISS or key in self._missed:
            self._missed.add(key)
            return LookupResult.MISS
        return answer


class MissesWhatIsBeingStored(GatedTier):
    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        return [key for key in keys if key not in self.blocks]


class MissesEverything(Example):
    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        return keys


class NeverKnows(Example):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.RETRY


class RecordsEventsForNobody(Example):
    def _report_event(self, keys: list[OffloadKey], removed: bool) -> None:
        self.enable_kv_events = True
        super()._report_event(keys, removed)


class DoesNotTellWhoLeft(Example):
    def take_events(self) -> Iterable[OffloadingEvent]:
        return [event for event in super().take_events() if not event.removed]


# --- the end -----------------------------------------------------------------------------------


class DrainsNothing(GatedTier):
    """`drain_jobs` returns while the thread is still working."""

    def drain_jobs(self) -> None:
        return

    def _move_block(self, transfer: ExampleTransfer) -> None:
        time.sleep(0.01)
        super()._move_block(transfer)


class DrainsForEver(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ended = threading.Event()

    def drain_jobs(self) -> None:
        self._ended.wait()

    def shutdown(self) -> None:
        self._ended.set()
        super().shutdown()


class WritesAgain(Example):
    """Writes into the slots of a load after it has reported it."""

    _last_slot: int | None = None

    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        self._last_slot = job.block_ids.tolist()[-1] if job.keys else None

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._last_slot is not None:
            self.rows[self._last_slot][0] = 1


class NamesBlocksItDoesNotHave(Example):
    """Names blocks in `known_keys` that it does not have."""

    def known_keys(self, most: int) -> list[OffloadKey]:
        return [OffloadKey(b"%036d" % number) for number in range(most)]


class BeginsWhatItRefuses(Example):
    """Raises `JobNotBegun` for a load that it has begun."""

    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        raise JobNotBegun("no time")


class WritesAfterShutdown(Example):
    """Its thread continues its last load after `shutdown`."""

    left: ClassVar[list[threading.Event]] = []

    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        ended = threading.Event()
        self.left.append(ended)
        row = self.rows[job.block_ids.tolist()[0]]
        threading.Thread(target=self._write, args=[row, ended], daemon=True).start()

    @staticmethod
    def _write(row: memoryview, ended: threading.Event) -> None:
        while not ended.wait(0.001):
            row[0] = 1


class ShutsDownOnlyOnce(Example):
    def shutdown(self) -> None:
        super().shutdown()
        del self.max_blocks


class ShutsDownOnlyWhenUsed(Example):
    """Waits for its last job even if there was none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first_job = threading.Event()

    def submit_store(self, job: TransferJob) -> None:
        self._first_job.set()
        super().submit_store(job)

    def shutdown(self) -> None:
        self._first_job.wait(1.0)
        super().shutdown()


class KeepsARow(Example):
    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        self.kept_row = self.rows[job.block_ids.tolist()[0]]


class KeepsAnArray(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept_array = np.asarray(args[1])


class LeavesAThread(Example):
    left: ClassVar[list[threading.Event]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        ended = threading.Event()
        self.left.append(ended)
        threading.Thread(target=ended.wait, name="left-behind", daemon=True).start()


class LeavesItsPool(Example):
    """Uses a thread pool, and does not end its idle thread."""

    pools: ClassVar[WeakSet[ThreadPoolExecutor]] = WeakSet()
    """Not kept here: a pool that nobody keeps ends its threads, which is what misleads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pool = ThreadPoolExecutor(1, "idle")
        self.pools.add(self._pool)

    def submit_store(self, job: TransferJob) -> None:
        self._pool.submit(super().submit_store, job).result()


class LeavesADescriptor(Example):
    left: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.left.append(os.open(os.devnull, os.O_RDONLY))


def clean_up_after_broken_tiers() -> None:
    """End what these tiers leave behind on purpose."""
    for events in (LeavesAThread.left, WritesAfterShutdown.left):
        for ended in events:
            ended.set()
        events.clear()
    for pool in list(LeavesItsPool.pools):
        pool.shutdown()
    for descriptor in LeavesADescriptor.left:
        os.close(descriptor)
    LeavesADescriptor.left.clear()


# --- seals -------------------------------------------------------------------------------------


class IgnoresSeals(Example):
    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        return True


class DoesNotCountRefusals(Example):
    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        return seal.check(header, payload, key, job.fingerprint) is None


class RefusesTheWholeJob(Example):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [JobResult(result.job_id, result.success) for result in super().get_finished_jobs()]


class KeepsRefusedBlocks(Example):
    def _forget(self, keys: list[OffloadKey]) -> None:
        return


# --- epochs ------------------------------------------------------------------------------------


class IgnoresTheEpoch(Example):
    def begin_epoch(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint


class KeepsUnderItsOwnEpoch(GatedTier):
    """Keeps the blocks of a store in the epoch in which the store ends."""

    def _end_store(self, transfer: ExampleTransfer) -> None:
        transfer.job = replace(transfer.job, fingerprint=self.fingerprint)
        super()._end_store(transfer)


class IgnoresTheFingerprint(Example):
    def submit_store(self, job: TransferJob) -> None:
        super().submit_store(replace(job, fingerprint=self.fingerprint))


class SharesWithoutFingerprint(Example):
    """Several tiers share one storage, in which the key alone names a block."""

    storage: ClassVar[dict[OffloadKey, SealedBlock]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.blocks.update(self.storage)

    def shutdown(self) -> None:
        self.storage.update(self.blocks)
        super().shutdown()


# --- calls -------------------------------------------------------------------------------------


class WaitsInSubmit(Example):
    def submit_store(self, job: TransferJob) -> None:
        time.sleep(0.03)
        super().submit_store(job)


class HoldsTheLockDuringIO(GatedTier):
    """Lookups wait while a block is moved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def _move_block(self, transfer: ExampleTransfer) -> None:
        with self._lock:
            self._gate.wait(0.05)
            Example._move_block(self, transfer)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        with self._lock:
            return super().lookup(key, req_context)


class LoadsBehindStores(GatedTier):
    """One queue for everything, first come, first served."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self._io, IOThread)
        self._io._loads = _Diversion(self._io._stores)


class _Diversion(deque[Any]):
    """A queue that is always empty: what is put into it goes into another."""

    def __init__(self, other: deque[Any]) -> None:
        super().__init__()
        self._other = other

    def append(self, item: Any) -> None:
        self._other.append(item)


class LoadsAndStoresInOnePool(GatedTier):
    """The same with several threads: a load has to wait until one of them is free."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self._io, IOThread)
        self._io.stop()
        self._io = _Pool(self._move_block)  # type: ignore[assignment]


class _Pool:
    """Does the work of an `IOThread` with four threads."""

    def __init__(self, move_block: Callable[[ExampleTransfer], None]) -> None:
        self._move_block = move_block
        self._threads = ThreadPoolExecutor(4)
        self._begun: list[Future[None]] = []
        self._ended: SimpleQueue[ExampleTransfer] = SimpleQueue()

    def submit(self, transfer: ExampleTransfer) -> None:
        self._begun.append(self._threads.submit(self._carry_out, transfer))

    def _carry_out(self, transfer: ExampleTransfer) -> None:
        while transfer.todo:
            self._move_block(transfer)
        self._ended.put(transfer)

    def take_ended(self) -> list[ExampleTransfer]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def wait_until_idle(self) -> bool:
        wait(self._begun)
        return True

    def stop(self) -> None:
        self._threads.shutdown()


class KnowsOnlyItsRequests(Example):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._requests: set[str] = set()

    def on_new_request(self, req_context: ReqContext) -> Any:
        self._requests.add(req_context.req_id)
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.remove(req_context.req_id)


class AnswersNothing(Example):
    def on_new_request(self, req_context: ReqContext) -> Any:
        return None


class ReportsAnUndefinedFigure(Example):
    def get_stats(self) -> OffloadingStats:
        return OffloadingStats(counters={"made_up": 1.0})


class GivesNone(Example):
    def get_finished_jobs(self) -> Any:
        return list(super().get_finished_jobs()) or None


class GivesNoEvents(Example):
    def take_events(self) -> Any:
        return list(super().take_events()) or None


class NotSetUp(Example):
    """Does not call the base class's constructor."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.blocks = OrderedDict()
        self._io = None


# --- across restarts ---------------------------------------------------------------------------


class Persistent(Example):
    """Not wrong: its blocks outlive it, under its fingerprint."""

    storage: ClassVar[dict[bytes, dict[OffloadKey, SealedBlock]]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.blocks.update(self.storage.get(self.fingerprint, {}))

    def shutdown(self) -> None:
        if self.blocks:
            self.storage[self.fingerprint] = dict(self.blocks)
        super().shutdown()
