"""Tries one tier without an engine: stores blocks, finds them, loads them, and compares every byte.

For `kvtier doctor` and `kvtier bench`, in their process, on the main thread, which may wait. It is
the tier's own code that moves the blocks. Engines may use the same storage meanwhile: a trial has a
namespace of its own, evicts no block, and leaves nothing behind. How, each tier says in
`SecondaryTierManager.prepare_trial`.
"""

from __future__ import annotations

import mmap
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.config import (
    FINGERPRINT_BYTES,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    new_epoch,
)
from kvtier.seal import SealFailure
from kvtier.tiering.base import JobNotBegun, JobResult, TransferJob
from kvtier.tiering.factory import PlannedTier
from kvtier.tiering.inspection import deferred_interrupts
from kvtier.tiering.tier_calls import close_tiers

__all__ = ["TierTrial", "TrialBlocks", "TrialProblem"]

_TOKENS_PER_BLOCK = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.002
_CLOSING_S = 10.0
_POISON = 0xA5
_OF_THE_USER = ("seal_key_file", "eviction_policy", "cache_policy_module_path")
"""Keys beside `secondary_tiers` that decide how a tier works."""
_NO_ROOM = ("_refused_blocks", "_failures_full", "_errors_enospc", "_errors_edquot")
"""Ends of the names of counters that count blocks for which there was no room."""
_SEAL_FAILURES = {
    SealFailure.NOT_SEALED: "nothing, or no block, where the block should be",
    SealFailure.FORMAT: "seals of another version",
    SealFailure.HEADER: "damaged seals",
    SealFailure.FINGERPRINT: "blocks of another namespace (wrong fingerprint)",
    SealFailure.KEY: "other blocks than those asked for (wrong key)",
    SealFailure.LENGTH: "blocks of another length",
    SealFailure.DIGEST: "damaged blocks (wrong digest)",
    SealFailure.UNSIGNED: "blocks without this configuration's signature",
    SealFailure.FORGED: "blocks with a wrong signature",
    SealFailure.STALE: "older blocks than those stored last",
}


class TrialProblem(Exception):
    """The tier cannot be tried, or did not do what it should."""

    def __init__(
        self, found: str, remedy: str, *, is_full: bool = False, is_untried: bool = False
    ) -> None:
        super().__init__(found)
        self.remedy = remedy
        self.is_full = is_full
        """True if there is no room for the blocks."""
        self.is_untried = is_untried
        """True if a trial is not possible, which says nothing about the tier."""


@dataclass(frozen=True, slots=True)
class TrialBlocks:
    """The blocks that a trial stores."""

    count: int
    payload_bytes: int
    """Bytes of one block, a multiple of the page size."""
    fingerprint: bytes = field(default_factory=lambda: uuid.uuid4().bytes[:FINGERPRINT_BYTES])
    """The namespace, which no engine uses."""

    @property
    def total_bytes(self) -> int:
        return self.count * self.payload_bytes

    @property
    def keys(self) -> list[OffloadKey]:
        return [self.key(number) for number in range(self.count)]

    def key(self, number: int) -> OffloadKey:
        """The key of one block. Those from `count` on are of blocks that do not exist."""
        return make_offload_key(self.fingerprint + number.to_bytes(16, "big"), 0)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A context in which SIGTERM does what Ctrl-C does, unless it has a handler. Main thread
    only."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's job in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _TrialSpec(OffloadingSpec):
    """What a tier needs of an engine."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError("a trial has no manager above the tier")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("a trial has no worker above the tier")


class TierTrial:
    """One tier, some blocks, and a slot for each. A context manager: the tier runs while it is
    open.

    Opening raises `TrialProblem`, `ConfigError` and `TierStartError`; all methods may raise
    `TrialProblem`. Ctrl-C and SIGTERM end a trial, which still removes what it stored.
    """

    def __init__(
        self,
        planned: PlannedTier,
        blocks: TrialBlocks,
        extra_config: Mapping[str, Any],
        patience_s: float = 20.0,
    ) -> None:
        """`extra_config`: all keys of the user. `patience_s`: how long a lookup or a job may
        take."""
        self.blocks = blocks
        self._planned = planned
        self._extra_config = extra_config
        self._patience_s = patience_s
        self._num_jobs = 0

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            prepared = self._planned.tier_cls.prepare_trial(self._planned.keys, self.blocks)
            if prepared is None:
                raise TrialProblem(
                    f"the tier {self._planned.config.type} offers no trial",
                    "Its author can implement prepare_trial (docs/writing-a-tier.md)",
                    is_untried=True,
                )
            undo.enter_context(_terminated_like_interrupted())
            keys = undo.enter_context(prepared)
            self._open_slots(undo)
            spec = _TrialSpec(self._config())
            self._tier = replace(self._planned, keys=keys).start(self._view, spec)
            undo.callback(close_tiers, [self._tier], _CLOSING_S)
            # A private namespace: tiers remove it when the engine ends, and after its death.
            self._tier.begin_epoch(self.blocks.fingerprint)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with deferred_interrupts() as is_pressed:
            self._undo.close()
        if is_pressed() and error is None:
            raise KeyboardInterrupt

    def _open_slots(self, undo: ExitStack) -> None:
        num_blocks, row_bytes = self.blocks.count, self.blocks.payload_bytes
        memory = mmap.mmap(-1, num_blocks * row_bytes)
        self._view = memoryview(memory).cast("B", (num_blocks, row_bytes))
        self._rows: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(
            num_blocks, row_bytes
        )

    def _config(self) -> OffloadingConfig:
        of_the_user = {
            name: self._extra_config[name] for name in _OF_THE_USER if name in self._extra_config
        }
        return OffloadingConfig(
            groups=(OffloadingGroupConfig(_TOKENS_PER_BLOCK, ("layer.0",), 0),),
            worker_kv_bytes_per_block=self.blocks.payload_bytes,
            engine_id=f"kvtier-trial-{uuid.uuid4().hex[:12]}",
            model=OffloadingModelConfig(name="kvtier trial", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=_TOKENS_PER_BLOCK),
            parallel=OffloadingParallelConfig(),
            extra_config={
                **of_the_user,
                "cpu_bytes_to_use": self.blocks.total_bytes,
                "cache_namespace": f"kvtier trial {new_epoch()!r}",
            },
        )

    # --- what a trial does ---------------------------------------------------------------------

    def store(self, numbers: Sequence[int], blocks_per_job: int | None = None) -> float:
        """Store these blocks. Returns the seconds it took."""
        for number in numbers:
            self._rows[number] = self._content(number)
        seconds, lacking = self._move(numbers, blocks_per_job, is_promotion=False)
        if lacking:
            self._explain_store(len(lacking), len(numbers))
        return seconds

    def load(self, numbers: Sequence[int], blocks_per_job: int | None = None) -> float:
        """Load these blocks, which were stored, and compare every byte. Returns the seconds that
        loading took."""
        for number in numbers:
            self._rows[number] = _POISON
        seconds, lacking = self._move(numbers, blocks_per_job, is_promotion=True)
        failures = self._tier.take_seal_failures()
        if failures:
            reasons = ", ".join(_SEAL_FAILURES[reason] for reason in failures)
            raise TrialProblem(
                f"{failures.total()} of {len(numbers)} blocks were refused by their seals: the "
                f"tier returned {reasons}",
                "What is stored there is not what was written: check the storage, and whatever "
                "stands between it and this machine",
            )
        if lacking:
            raise TrialProblem(
                f"{len(lacking)} of {len(numbers)} blocks that were just stored could not be "
                "loaded",
                "See the tier's warnings; check that its storage keeps what is written to it",
            )
        wrong = [n for n in numbers if not np.array_equal(self._rows[n], self._content(n))]
        if wrong:
            raise TrialProblem(
                f"{len(wrong)} of {len(numbers)} loaded blocks have wrong bytes, although the tier "
                "accepted their seals",
                "Do not use this tier: report it to its author",
            )
        return seconds

    def look_up(self, numbers: Sequence[int]) -> tuple[int, float]:
        """Look up these blocks. Returns how many there are, and the seconds until all answers were
        known."""
        tier, request = self._tier, self._new_request()
        wanted = [self.blocks.key(number) for number in numbers]
        num_hits = 0

        def is_known() -> bool:
            nonlocal wanted, num_hits
            answers = {key: tier.lookup(key, request) for key in wanted}
            num_hits += sum(answer is LookupResult.HIT for answer in answers.values())
            wanted = [key for key, answer in answers.items() if answer is LookupResult.RETRY]
            return not wanted

        seconds = self._wait(is_known, lambda: f"{len(wanted)} lookups had no answer")
        tier.on_request_finished(request)
        return num_hits, seconds

    # --- how it does it ------------------------------------------------------------------------

    def _content(self, number: int) -> NDArray[np.uint8]:
        seed = np.random.SFC64(int.from_bytes(self.blocks.key(number), "big"))
        return np.frombuffer(np.random.Generator(seed).bytes(self.blocks.payload_bytes), np.uint8)

    def _new_request(self) -> ReqContext:
        self._num_jobs += 1
        request = ReqContext(f"trial-{self._num_jobs}")
        self._tier.on_new_request(request)
        return request

    def _move(
        self, numbers: Sequence[int], blocks_per_job: int | None, *, is_promotion: bool
    ) -> tuple[float, list[OffloadKey]]:
        """Submit jobs and wait for them. Returns the seconds, and the keys of blocks that were not
        moved."""
        size = blocks_per_job or max(len(numbers), 1)
        jobs: dict[int, TransferJob] = {}
        lacking: list[OffloadKey] = []
        began = time.perf_counter()
        for start in range(0, len(numbers), size):
            self._submit(numbers[start : start + size], jobs, lacking, is_promotion)

        def are_reported() -> bool:
            for result in self._results:
                job = jobs.pop(result.job_id, None)
                if job is not None and not result.success:
                    moved = set(result.successful_keys or ())
                    lacking.extend(key for key in job.keys if key not in moved)
            return not jobs

        what = "loads" if is_promotion else "stores"
        self._wait(are_reported, lambda: f"{len(jobs)} {what} were not finished")
        return time.perf_counter() - began, lacking

    def _submit(
        self,
        numbers: Sequence[int],
        jobs: dict[int, TransferJob],
        lacking: list[OffloadKey],
        is_promotion: bool,
    ) -> None:
        request = self._new_request()
        rows = np.array(numbers, np.int64)
        rows.flags.writeable = False
        job = TransferJob(
            job_id=self._num_jobs,
            keys=tuple(self.blocks.key(number) for number in numbers),
            block_ids=rows,
            is_promotion=is_promotion,
            req_context=request,
            fingerprint=self.blocks.fingerprint,
        )
        try:
            (self._tier.submit_load if is_promotion else self._tier.submit_store)(job)
            jobs[job.job_id] = job
        except JobNotBegun:
            lacking += job.keys
        self._tier.on_request_finished(request)

    _results: Sequence[JobResult] = ()
    """Those of the last poll."""

    def _wait(self, is_done: Callable[[], bool], complaint: Callable[[], str]) -> float:
        """Step as an engine does until `is_done`. Returns the seconds it took."""
        began = time.perf_counter()
        pause_s = _FIRST_PAUSE_S
        while True:
            self._results = list(self._tier.get_finished_jobs())
            if is_done():
                return time.perf_counter() - began
            if time.perf_counter() - began > self._patience_s:
                raise TrialProblem(
                    f"{complaint()} within {self._patience_s:g} s",
                    "Check that the storage answers; an engine would cut this tier off and go on "
                    "without it",
                )
            self._tier.on_schedule_end(ScheduleEndContext())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _explain_store(self, num_lacking: int, num_all: int) -> NoReturn:
        """Raise `TrialProblem` for blocks that were not stored."""
        found = f"{num_lacking} of {num_all} blocks could not be stored"
        counters: Mapping[str, float] = {}
        with suppress(Exception):  # a third party's tier may raise
            stats = self._tier.get_stats()
            counters = {} if stats is None else stats.counters
        if any(count and name.endswith(_NO_ROOM) for name, count in counters.items()):
            raise TrialProblem(
                f"{found}: there is no room", "Make room, or give the tier more", is_full=True
            )
        raise TrialProblem(found, "See the tier's warnings; check its storage and the rights to it")
