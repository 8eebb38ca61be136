"""The example tier: small and complete. Copy it to write a tier of your own."""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from kvtier.config import ConfigError, Problem, TierOptions, fields
from kvtier.tiering.base import JobResult, SecondaryTierManager, TierUsage, TransferJob
from kvtier.tiering.example.io_thread import ExampleTransfer, IOThread, SealedBlock

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.trial import TrialBlocks

__all__ = ["ExampleOptions", "ExampleSecondaryTierManager"]

logger = logging.getLogger(__name__)

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS

RESIDENT = "kvtier_example_resident_blocks"
EVICTED = "kvtier_example_evicted_blocks"
REFUSED = "kvtier_example_refused_blocks"
FORGOTTEN = "kvtier_example_forgotten_blocks"


@dataclass(frozen=True, slots=True)
class ExampleOptions(TierOptions):
    """The keys of an entry with `"type": "example"`."""

    max_blocks: int = fields.key(fields.whole_number(1), "Blocks that are kept.", default=1000)
    simulate_async: bool = fields.key(
        fields.BOOLEAN, "Move blocks on an I/O thread, as a real tier does.", default=False
    )
    latency_ms: float = fields.key(
        fields.number_between(0, 3_600_000, "a number of milliseconds from 0 to 3600000"),
        "Milliseconds added to every job; needs `simulate_async`.",
        default=0,
    )
    loss: float = fields.key(
        fields.number_between(0, 1, "a number from 0 (no block is lost) to 1 (every block is)"),
        "Probability that a block which was a HIT cannot be loaded.",
        default=0,
    )
    seed: int = fields.key(fields.whole_number(0), "Decides which blocks are lost.", default=0)

    def require_consistent(self) -> None:
        if self.latency_ms and not self.simulate_async:
            raise ConfigError(
                Problem(
                    "latency_ms",
                    self.as_given("latency_ms"),
                    "0 while simulate_async is false: the scheduler itself would wait",
                    "Set simulate_async to true, or leave latency_ms out",
                )
            )


class ExampleSecondaryTierManager(SecondaryTierManager):
    """Keeps sealed blocks in host memory, and evicts the least recently used ones first.

    The pattern works for a tier on any medium:

    - Only the scheduler thread uses the table of blocks (`blocks`). It looks blocks up, evicts
      them, and enters new ones when it collects finished jobs. So the table needs no lock, and no
      call waits.
    - Only the I/O thread copies, seals and verifies (`_move_block`). It uses only the transfer it
      was given and the slots of that transfer.
    - A transfer goes from the scheduler thread to the I/O thread and back. It always comes back,
      and becomes exactly one `JobResult`.

    A store evicts before it begins, so the tier never holds more than `max_blocks`, including those
    being written. (A block that is evicted while a load reads it is freed after that load.)

    With `simulate_async=False` there is no I/O thread, and a job has ended when its submit returns.
    Use this for learning and for tests that run step by step. A real tier must not do it, because
    the scheduler would wait for every copy.

    Faults can be simulated. `latency_ms`: milliseconds added to every job that moves a block; needs
    `simulate_async=True`. `loss`: probability that a block which was a HIT cannot be loaded; with
    the same `seed` and the same calls, the same blocks are lost.
    """

    medium: ClassVar[Medium | None] = Medium.CPU
    options_cls = ExampleOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: the keys that `ExampleOptions` declares, with their values."""
        options = ExampleOptions.parse(keys)
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        self.max_blocks = self.capacity_blocks = options.max_blocks
        self.blocks: OrderedDict[OffloadKey, SealedBlock] = OrderedDict()
        """All blocks, least recently used first. All of them were stored under the current
        `fingerprint`, which names the namespace."""
        self._num_reserved = 0
        """Blocks that stores in flight will add."""
        self._storing: set[OffloadKey] = set()
        """Keys of the blocks that stores in flight will add."""
        self._loss = options.loss
        self._random = random.Random(options.seed)
        self._results: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._counters = dict.fromkeys((EVICTED, REFUSED, FORGOTTEN), 0)
        self._latency_s = options.latency_ms / 1000
        # Started last, because a constructor that raises must not leave a thread running.
        self._io: IOThread | None = (
            IOThread(f"kvtier-{tier_type}", self._move_block, self._latency_s)
            if options.simulate_async
            else None
        )

    # --- lookups and uses: scheduler thread ----------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _HIT if key in self.blocks else _MISS

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        """One answer for each key up to the first miss; the caller needs no more."""
        num_hits = len(list(takewhile(self.blocks.__contains__, keys)))
        answers = [_HIT] * num_hits
        if num_hits < len(keys):
            answers.append(_MISS)
        return answers

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        blocks, storing = self.blocks, self._storing
        absent = [key for key in keys if key not in blocks]
        return [key for key in absent if key not in storing]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        blocks = self.blocks
        if not any(map(blocks.__contains__, keys)):
            return
        # The tail of the prompt first, so that its head is evicted last.
        for key in reversed(tuple(keys)):
            if key in blocks:
                blocks.move_to_end(key)

    def begin_epoch(self, fingerprint: bytes) -> None:
        super().begin_epoch(fingerprint)
        self._storing.clear()
        self._report_event(list(self.blocks), removed=True)
        self.blocks.clear()

    # --- a store: scheduler thread -------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        if job.fingerprint != self.fingerprint:
            self._finish(ExampleTransfer(job, deque()))
            return
        blocks = self.blocks
        slots = job.block_ids.tolist()
        fitting = job.keys[: self.max_blocks - self._num_reserved]
        todo = deque(zip(fitting, slots, strict=False))
        here: list[OffloadKey] = []
        if any(map(blocks.__contains__, job.keys)):
            # Make the blocks of this prompt the most recently used, its head last, so that
            # `_make_room` evicts other blocks first, and the head of this prompt last.
            self.touch(job.keys, job.req_context)
            todo = deque((key, slot) for key, slot in todo if key not in blocks)
        evicted = self._make_room(len(todo))
        self._storing.update([key for key, _ in todo])
        if len(todo) < len(job.keys):
            here = [key for key in job.keys if key in blocks]
            self._counters[REFUSED] += len(job.keys) - len(here) - len(todo)
        self._start(ExampleTransfer(job, todo, done=here, num_reserved=len(todo), evicted=evicted))

    def _make_room(self, num_blocks: int) -> list[SealedBlock]:
        """Reserve room for a store. Returns the blocks that were evicted for it."""
        blocks = self.blocks
        num_evicted = len(blocks) + self._num_reserved + num_blocks - self.max_blocks
        self._num_reserved += num_blocks
        if num_evicted <= 0:
            return []
        evicted = list(islice(blocks, num_evicted))
        self._counters[EVICTED] += num_evicted
        self._report_event(evicted, removed=True)
        return [blocks.pop(key) for key in evicted]

    def _end_store(self, transfer: ExampleTransfer) -> None:
        self._num_reserved -= transfer.num_reserved
        job = transfer.job
        if job.fingerprint != self.fingerprint:
            return  # a new epoch has begun, so the blocks of this job are invalid
        self._storing.difference_update(job.keys)
        blocks, stored = self.blocks, transfer.blocks
        if any(map(blocks.__contains__, stored)):
            stored = {key: block for key, block in stored.items() if key not in blocks}
        for key, block in reversed(stored.items()):  # tail first, as in `touch`
            blocks[key] = block
        if len(stored) < len(job.keys):
            self.touch(job.keys, job.req_context)
        self._report_event(list(stored), removed=False)

    # --- a load: scheduler thread --------------------------------------------------------------

    def submit_load(self, job: TransferJob) -> None:
        found: dict[OffloadKey, SealedBlock] = {}
        if job.fingerprint == self.fingerprint:
            self.touch(job.keys, job.req_context)
            here = [key for key in job.keys if key in self.blocks]
            self._forget([key for key in here if self._random.random() < self._loss])
            found = {key: self.blocks[key] for key in here if key in self.blocks}
        slots = zip(job.keys, job.block_ids.tolist(), strict=True)
        todo = deque((key, slot) for key, slot in slots if key in found)
        self._start(ExampleTransfer(job, todo, blocks=found))

    def _end_load(self, transfer: ExampleTransfer) -> None:
        # Forget the blocks that failed: otherwise they would be HITs that fail each time.
        blocks = transfer.blocks
        self._forget([key for key in transfer.failed if self.blocks.get(key) is blocks[key]])

    def _forget(self, keys: list[OffloadKey]) -> None:
        for key in keys:
            del self.blocks[key]
        self._counters[FORGOTTEN] += len(keys)
        self._report_event(keys, removed=True)

    # --- jobs: scheduler thread ----------------------------------------------------------------

    def _start(self, transfer: ExampleTransfer) -> None:
        if self._io is not None and transfer.todo:
            self._io.submit(transfer)
            return
        while transfer.todo:
            self._move_block(transfer)
        self._finish(transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        if self._io is not None and self._io.wait_until_idle():
            self._collect()

    def shutdown(self) -> None:
        """Give up blocks that have not been moved. `get_finished_jobs` still returns all
        results."""
        if self._io is not None:
            self._io.stop()
        self._collect()
        self.blocks.clear()
        self.rows.release()

    def _collect(self) -> None:
        if self._io is not None:
            for transfer in self._io.take_ended():
                self._finish(transfer)

    def _finish(self, transfer: ExampleTransfer) -> None:
        job = transfer.job
        if job.is_promotion:
            self._end_load(transfer)
        else:
            self._end_store(transfer)
        success = len(transfer.done) == len(job.keys)
        seconds = None if transfer.seconds is None else transfer.seconds + self._latency_s
        self._results.append(
            JobResult(job.job_id, success, None if success else transfer.done, seconds)
        )

    # --- one block: I/O thread -----------------------------------------------------------------

    def _move_block(self, transfer: ExampleTransfer) -> None:
        """Move the next block of a transfer. Never raises, because that would end the I/O
        thread."""
        started = time.perf_counter()
        transfer.evicted.clear()
        key, slot = transfer.todo.popleft()
        move = self._load_block if transfer.job.is_promotion else self._store_block
        try:
            moved = move(transfer, key, slot)
        except Exception:
            logger.exception("%s: a block could not be moved", self.tier_type)
            moved = False
        (transfer.done if moved else transfer.failed).append(key)
        transfer.seconds = (transfer.seconds or 0.0) + time.perf_counter() - started

    def _store_block(self, transfer: ExampleTransfer, key: OffloadKey, slot: int) -> bool:
        # numpy releases the interpreter lock while it copies.
        payload = np.frombuffer(self.rows[slot], np.uint8).copy()
        header = self.seal_block(transfer.job, key, payload.data)
        transfer.blocks[key] = SealedBlock(header, payload)
        return True

    def _load_block(self, transfer: ExampleTransfer, key: OffloadKey, slot: int) -> bool:
        header, payload = transfer.blocks[key]
        row = self.rows[slot]
        size = min(payload.nbytes, row.nbytes)  # if the sizes differ, verification fails
        np.frombuffer(row, np.uint8)[:size] = payload[:size]
        return self.verify_block(transfer.job, key, header, row)

    # --- events and metrics: scheduler thread --------------------------------------------------

    def _report_event(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self.enable_kv_events:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed, self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def usage(self) -> TierUsage:
        row_bytes = self.rows.row_bytes
        return TierUsage(len(self.blocks) * row_bytes, self.max_blocks * row_bytes)

    def get_stats(self) -> OffloadingStats:
        counters: dict[str, float] = {**self._counters}
        self._counters = dict.fromkeys(self._counters, 0)
        return OffloadingStats(counters, gauges={RESIDENT: len(self.blocks)})

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        return nullcontext(keys)  # its blocks are its own, and end with it

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
