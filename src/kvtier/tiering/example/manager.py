"""The example tier: small, complete, and the one to copy when writing a tier."""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvtier.base import (
    Locality,
    LookupResult,
    Medium,
    MetricDefinition,
    MetricKind,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    ReqContext,
)
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.example.io_thread import IOThread
from kvtier.tiering.example.options import require_possible
from kvtier.tiering.example.transfer import SealedBlock, Transfer

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec

__all__ = ["ExampleSecondaryTierManager"]

logger = logging.getLogger(__name__)

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS

RESIDENT = "kvtier_example_resident_blocks"
EVICTED = "kvtier_example_evicted_blocks"
REFUSED = "kvtier_example_refused_blocks"
FORGOTTEN = "kvtier_example_forgotten_blocks"


class ExampleSecondaryTierManager(SecondaryTierManager):
    """Keeps sealed blocks in memory; those not used for the longest time leave first.

    The pattern, which serves a tier on any medium:

    - The scheduler thread alone knows what is kept (`blocks`): it looks up, makes room, and learns
      what a job has brought when it collects finished jobs. So there is nothing to lock, and no
      call waits.
    - The I/O thread alone copies, seals and verifies (`_move_block`). It sees nothing but the
      `Transfer` it was given and the slots in it.
    - A `Transfer` goes from one to the other and back. Whatever happens to it, it comes back, and
      becomes exactly one `JobResult`.

    Room is made before a store begins, so there are never more than `max_blocks`, those being
    written included. (A block that is evicted while a load reads it is freed after that load.)

    With `simulate_async=False` there is no I/O thread, and a job is done when its submit returns.
    That is good for learning and for tests that go step by step. A real tier must not do it: the
    scheduler would wait for every copy.

    Misfortune can be simulated. `latency_ms`: every job with something to move takes so much
    longer; needs `simulate_async=True`. `loss`: the probability that a block which was a HIT cannot
    be loaded; the same blocks are lost whenever `seed` and the calls are the same.
    """

    medium: ClassVar[Medium | None] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        max_blocks: int = 1000,
        simulate_async: bool = False,
        latency_ms: float = 0,
        loss: float = 0,
        seed: int = 0,
    ) -> None:
        require_possible(
            {
                "max_blocks": max_blocks,
                "simulate_async": simulate_async,
                "latency_ms": latency_ms,
                "loss": loss,
                "seed": seed,
            }
        )
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        self.max_blocks = self.capacity_blocks = max_blocks
        self.blocks: OrderedDict[OffloadKey, SealedBlock] = OrderedDict()
        """What is kept, in the namespace `fingerprint`; the first to leave comes first."""
        self._num_reserved = 0
        """Room of stores under way."""
        self._storing: set[OffloadKey] = set()
        """What those stores bring."""
        self._loss = loss
        self._chance = random.Random(int(seed))
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._counters = dict.fromkeys((EVICTED, REFUSED, FORGOTTEN), 0)
        self._latency_s = latency_ms / 1000
        # Last: a constructor that raises must not leave a thread behind.
        self._io: IOThread | None = (
            IOThread(f"kvtier-{tier_type}", self._move_block, self._latency_s)
            if simulate_async
            else None
        )

    # --- what is kept: scheduler thread --------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _HIT if key in self.blocks else _MISS

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        num_hits = len(list(takewhile(self.blocks.__contains__, keys)))
        answers = [_HIT] * num_hits
        if num_hits < len(keys):
            answers.append(_MISS)
        return answers

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        blocks = self.blocks
        if not any(map(blocks.__contains__, keys)):
            return
        # Tail first: of one prompt, the head is the last to leave.
        for key in reversed(tuple(keys)):
            if key in blocks:
                blocks.move_to_end(key)

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        blocks, storing = self.blocks, self._storing
        absent = [key for key in keys if key not in blocks]
        return [key for key in absent if key not in storing]

    def begin_epoch(self, fingerprint: bytes) -> None:
        super().begin_epoch(fingerprint)
        self._storing.clear()
        self._report_event(list(self.blocks), removed=True)
        self.blocks.clear()

    def _make_room(self, num_blocks: int) -> list[SealedBlock]:
        """Returns what had to leave."""
        blocks = self.blocks
        num_evicted = len(blocks) + self._num_reserved + num_blocks - self.max_blocks
        self._num_reserved += num_blocks
        if num_evicted <= 0:
            return []
        evicted = list(islice(blocks, num_evicted))
        self._counters[EVICTED] += num_evicted
        self._report_event(evicted, removed=True)
        return [blocks.pop(key) for key in evicted]

    def _report_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self.enable_kv_events:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed, self.locality))

    def _forget(self, keys: list[OffloadKey]) -> None:
        for key in keys:
            del self.blocks[key]
        self._counters[FORGOTTEN] += len(keys)
        self._report_event(keys, removed=True)

    # --- the life of a job: scheduler thread ---------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        if job.fingerprint != self.fingerprint:
            self._finish(Transfer(job, deque()))
            return
        blocks = self.blocks
        slots = job.block_ids.tolist()
        fitting = job.keys[: self.max_blocks - self._num_reserved]
        todo = deque(zip(fitting, slots, strict=False))
        here: list[OffloadKey] = []
        if any(map(blocks.__contains__, job.keys)):
            # What is here of this prompt leaves last, and its tail before its head: then room is
            # never made for the tail at the cost of the head.
            self.touch(job.keys, job.req_context)
            todo = deque((key, slot) for key, slot in todo if key not in blocks)
        evicted = self._make_room(len(todo))
        self._storing.update([key for key, _ in todo])
        if len(todo) < len(job.keys):
            here = [key for key in job.keys if key in blocks]
            self._counters[REFUSED] += len(job.keys) - len(here) - len(todo)
        self._start(Transfer(job, todo, done=here, num_reserved=len(todo), replaced=evicted))

    def submit_load(self, job: TransferJob) -> None:
        found: dict[OffloadKey, SealedBlock] = {}
        if job.fingerprint == self.fingerprint:
            self.touch(job.keys, job.req_context)
            here = [key for key in job.keys if key in self.blocks]
            self._forget([key for key in here if self._chance.random() < self._loss])
            found = {key: self.blocks[key] for key in here if key in self.blocks}
        slots = zip(job.keys, job.block_ids.tolist(), strict=True)
        todo = deque((key, slot) for key, slot in slots if key in found)
        self._start(Transfer(job, todo, blocks=found))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        if self._io is not None and self._io.wait_until_idle():
            self._collect()

    def shutdown(self) -> None:
        """Gives up what has not been done. The results are still to be had."""
        if self._io is not None:
            self._io.stop()
        self._collect()
        self.blocks.clear()
        self.rows.release()

    def _start(self, transfer: Transfer) -> None:
        if self._io is not None and transfer.todo:
            self._io.submit(transfer)
            return
        while transfer.todo:
            self._move_block(transfer)
        self._finish(transfer)

    def _collect(self) -> None:
        if self._io is not None:
            for transfer in self._io.take_ended():
                self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        job = transfer.job
        if job.is_promotion:
            # A block that could not be loaded once would be a HIT in vain again and again.
            blocks = transfer.blocks
            self._forget([k for k in transfer.failed if self.blocks.get(k) is blocks[k]])
        else:
            self._keep(transfer)
        success = len(transfer.done) == len(job.keys)
        seconds = None if transfer.seconds is None else transfer.seconds + self._latency_s
        self._results.append(
            JobResult(job.job_id, success, None if success else transfer.done, seconds)
        )

    def _keep(self, transfer: Transfer) -> None:
        self._num_reserved -= transfer.num_reserved
        job = transfer.job
        if job.fingerprint != self.fingerprint:
            return  # an epoch ended meanwhile, and what was stored in it is gone
        self._storing.difference_update(job.keys)
        blocks, brought = self.blocks, transfer.blocks
        if any(map(blocks.__contains__, brought)):
            brought = {key: block for key, block in brought.items() if key not in blocks}
        for key, block in reversed(brought.items()):  # as in `touch`
            blocks[key] = block
        if len(brought) < len(job.keys):
            self.touch(job.keys, job.req_context)
        self._report_event(list(brought), removed=False)

    # --- the bytes: I/O thread -----------------------------------------------------------------

    def _move_block(self, transfer: Transfer) -> None:
        """Move the next block of a job. Never raises: that would end the I/O thread."""
        started = time.perf_counter()
        transfer.replaced.clear()
        key, slot = transfer.todo.popleft()
        move = self._load_block if transfer.job.is_promotion else self._store_block
        try:
            moved = move(transfer, key, slot)
        except Exception:
            logger.exception("%s: a block could not be moved", self.tier_type)
            moved = False
        (transfer.done if moved else transfer.failed).append(key)
        transfer.seconds = (transfer.seconds or 0.0) + time.perf_counter() - started

    def _store_block(self, transfer: Transfer, key: OffloadKey, slot: int) -> bool:
        # By numpy, which lets other threads run while it copies.
        payload = np.frombuffer(self.rows[slot], np.uint8).copy()
        header = self.seal_block(transfer.job, key, payload.data)
        transfer.blocks[key] = SealedBlock(header, payload)
        return True

    def _load_block(self, transfer: Transfer, key: OffloadKey, slot: int) -> bool:
        header, payload = transfer.blocks[key]
        row = self.rows[slot]
        size = min(payload.nbytes, row.nbytes)  # a wrong size is for the seal to find
        np.frombuffer(row, np.uint8)[:size] = payload[:size]
        return self.verify_block(transfer.job, key, header, row)

    # --- what is told: scheduler thread --------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def get_stats(self) -> OffloadingStats:
        counters: dict[str, float] = {**self._counters}
        self._counters = dict.fromkeys(self._counters, 0)
        return OffloadingStats(counters, gauges={RESIDENT: len(self.blocks)})

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return {
            RESIDENT: MetricDefinition(MetricKind.GAUGE, "Blocks in the example tier."),
            EVICTED: MetricDefinition(
                MetricKind.COUNTER, "Blocks that left the example tier to make room."
            ),
            REFUSED: MetricDefinition(
                MetricKind.COUNTER, "Blocks not stored because the example tier had no room."
            ),
            FORGOTTEN: MetricDefinition(
                MetricKind.COUNTER, "Blocks of the example tier that could not be loaded."
            ),
        }
