"""The jobs of the tiers: how they are numbered, and the table of those that one tier has.

A job is entered in the table before the tier gets it, and leaves it when the tier reports or
refuses it. A job that misses its deadline is late: nobody waits for it any more, but its slots
belong to the tier until it is reported, however long that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kvtier.tiering.base import JobNotBegun, JobResult, TransferJob

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext
    from kvtier.cpu.common import CPULoadStoreSpec
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.tier_calls import GuardedTier

_MAX_EXTRA_RESULTS = 100
"""One harvest, which asks a tier for its finished jobs, reads at most twice as many reports as
there are open jobs, and this many more: a faulty tier may report without end."""
_CLOCK_SLACK_S = 1.0


class JobCount(NamedTuple):
    """The jobs of all tiers. It changes whenever a job begins, ends or becomes late."""

    last_id: int
    """The newest job number."""
    num_open: int
    """Jobs that a tier has not reported."""
    num_late: int
    """Blocks of late loads, plus late stores."""


class Job:
    """One job at one tier."""

    __slots__ = (
        "deadline",
        "is_awaited",
        "is_done",
        "is_late",
        "num_beside",
        "num_left",
        "ready_at",
        "submitted",
        "transfer",
        "wanters",
    )

    def __init__(self, transfer: TransferJob, submitted: float, deadline: float) -> None:
        self.transfer = transfer
        self.submitted = submitted
        self.deadline = deadline
        self.is_awaited = True
        """False for a load that only measures the tier: no request waits for it."""
        self.is_late = False
        """True once it has missed its deadline."""
        self.is_done = False
        self.num_beside = 0
        """A load: blocks of other loads that were under way when the tier got this one."""
        self.num_left = 0
        """A load: requests that have computed blocks of it instead of waiting for its end."""
        self.ready_at = submitted
        """A load: when it is expected to end; the time of its submission while that is not
        known."""
        self.wanters: dict[TierRequest, None] = {}
        """The requests that wait for a load."""


class JobFactory:
    """Numbers the jobs of all tiers, and gives each the current namespace. Scheduler thread."""

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.last_id = 0
        """The newest number."""

    def new_id(self) -> int:
        """A number that no other job has."""
        self.last_id += 1
        return self.last_id

    def make(
        self,
        job_id: int,
        keys: Sequence[OffloadKey],
        spec: CPULoadStoreSpec,
        is_promotion: bool,
        context: ReqContext,
    ) -> TransferJob:
        """The job, as a tier gets it."""
        block_ids = spec.block_ids
        block_ids.flags.writeable = False
        return TransferJob(job_id, keys, block_ids, is_promotion, context, self.fingerprint)


class JobTable:
    """The jobs of one tier. Scheduler thread only.

    It submits jobs through `GuardedTier.call`, and reports how each job ended to the tier's
    breakers, statistics, load speed and store limits.
    """

    def __init__(self, tier: GuardedTier, clock: Callable[[], float], block_bytes: int) -> None:
        self._tier = tier
        self._settings = tier.settings
        self._clock = clock
        self._block_bytes = block_bytes
        self._open: dict[int, Job] = {}
        """Jobs that the tier has not reported."""
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        """`_loads` and `_stores` are in order of deadlines. `take_late` removes jobs that are done
        or late when they reach the front."""
        self.num_loads = 0
        """Loads that the tier has not reported."""
        self.num_loading = 0
        """Slots that its loads are writing."""
        self._num_late_blocks = 0
        """Slots of late loads."""
        self._num_late_stores = 0
        self._no_store_late_until = -inf
        """No store is late before this time: one has ended recently, so the others may only be
        waiting for their turn."""
        self._last_harvest = clock()

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, job_id: int) -> bool:
        """True if a job is under way and not late."""
        job = self._open.get(job_id)
        return job is not None and not job.is_late

    @property
    def num_late(self) -> int:
        """Blocks of late loads, plus late stores: grows with each job that becomes late."""
        return self._num_late_blocks + self._num_late_stores

    @property
    def has_late_stores(self) -> bool:
        """True while a store is late: no block should wait for the tier then."""
        return self._num_late_stores > 0

    @property
    def num_loading_in_time(self) -> int:
        """Slots that loads are writing, without those of late loads, which the next load may
        overtake."""
        return self.num_loading - self._num_late_blocks

    def num_loadable(self, wanted: int) -> int:
        """How many of `wanted` blocks may be loaded now. A tier with late loads gets no more slots
        than its share."""
        if self._num_late_blocks:
            return max(0, min(wanted, self._tier.stores.max_pinned - self.num_loading))
        return wanted

    # --- begin ----------------------------------------------------------------------------------

    def submit_store(self, transfer: TransferJob, now: float) -> Job:
        """Give the tier a store. Its slots stay pinned until `harvest` yields the job. If the tier
        refuses the job, it is done, and the caller unpins them."""
        tier = self._tier
        job = self._enter(transfer, now, self._settings.store_timeout_s, self._stores)
        tier.stores.num_pinned += len(transfer.keys)
        tier.store_breaker.submitted(transfer.job_id)
        # If the call raises, the tier may still have begun the job: only its report ends it.
        tier.call("submit_store", self._submit, tier.manager.submit_store, job, default=None)
        return job

    def expect_load(self, transfer: TransferJob, now: float) -> Job:
        """Enter a promotion that is about to be submitted."""
        job = self._enter(transfer, now, self._settings.load_timeout_s, self._loads)
        job.num_beside = self.num_loading_in_time
        estimate = self._tier.load_speed.estimate
        job.ready_at += estimate.predict(len(transfer.keys) + job.num_beside) or 0.0
        self.num_loading += len(transfer.keys)
        self.num_loads += 1
        return job

    def submit_load(self, job: Job) -> None:
        """Give the tier a promotion. The slots are the tier's until `harvest` yields the job.

        Afterwards, the job `is_done` if the tier refused it, and `is_late` if the call raised
        anything else: no request should wait for it, but the tier may have begun it.
        """
        tier = self._tier
        is_submitted = tier.call(
            "submit_load", self._submit, tier.manager.submit_load, job, default=False
        )
        if not is_submitted:
            self._mark_late(job)

    def _enter(self, transfer: TransferJob, now: float, timeout: float, queue: deque[Job]) -> Job:
        job = self._open[transfer.job_id] = Job(transfer, now, now + timeout)
        queue.append(job)
        self._tier.breaker.submitted(transfer.job_id)
        return job

    def _submit(self, submit: Callable[[TransferJob], None], job: Job) -> bool:
        try:
            submit(job.transfer)
        except JobNotBegun as error:
            self._tier.note_refused(error)
            del self._open[job.transfer.job_id]
            refused = JobResult(job.transfer.job_id, False)
            self._settle(job, refused, (), self._clock())
        return True

    # --- end ------------------------------------------------------------------------------------

    def harvest(self, now: float) -> Iterator[tuple[Job, Sequence[OffloadKey]]]:
        """Yields each job that the tier has finished, with the keys of the blocks that were
        moved."""
        tier = self._tier
        if (not self._open and not tier.breaker.is_closed) or tier.is_resting(now):
            return
        lag, self._last_harvest = now - self._last_harvest, now
        tier.stores.harvest_begins(lag)
        for result in tier.finished_jobs(2 * len(self._open) + _MAX_EXTRA_RESULTS):
            is_valid = type(result) is JobResult and type(result.job_id) is int
            job = self._open.pop(result.job_id, None) if is_valid else None
            if job is None:
                tier.note_unknown_job(result)
                continue
            moved = self._moved(job, result)
            self._settle(job, result, moved, now)
            yield job, moved

    def _moved(self, job: Job, result: JobResult) -> Sequence[OffloadKey]:
        try:
            if bool(result.success):  # a tier may set it to a numpy bool
                return job.transfer.keys
            named = set(result.successful_keys or ())
        except Exception:
            self._tier.note_bad_report(result)
            return ()
        return [key for key in job.transfer.keys if key in named]

    def _settle(self, job: Job, result: JobResult, moved: Sequence[OffloadKey], now: float) -> None:
        """A job has ended: count it, give back its slots, learn from it, judge the tier by it."""
        job.is_done = True
        seconds = _possible_seconds(result.transfer_time, now - job.submitted)
        if job.transfer.is_promotion:
            num_excused = _possible_count(result.num_gone)
            self._settle_load(job, moved, seconds, now)
        else:
            num_excused = _possible_count(result.num_declined)
            self._settle_store(job, moved, num_excused, seconds, now)
        if not job.is_late:
            is_good = bool(moved) or len(job.transfer.keys) <= num_excused
            self._judge(job, is_good, seconds, now)

    def _settle_load(
        self, job: Job, moved: Sequence[OffloadKey], seconds: float | None, now: float
    ) -> None:
        tier, num_blocks, num_moved = self._tier, len(job.transfer.keys), len(moved)
        tier.stats.count_load(moved, num_blocks - num_moved, self._block_bytes, seconds)
        self.num_loads -= 1
        self.num_loading -= num_blocks
        self._num_late_blocks -= num_blocks * job.is_late
        if seconds is not None and num_moved:
            num_beside = job.num_beside + self.num_loading_in_time
            tier.load_speed.note(job, seconds, num_beside, now)
        if job.wanters:
            tier.stores.note_given_back(num_moved)
        tier.load_speed.note_ended(job)

    def _settle_store(
        self,
        job: Job,
        moved: Sequence[OffloadKey],
        num_declined: int,
        seconds: float | None,
        now: float,
    ) -> None:
        tier, num_blocks, num_moved = self._tier, len(job.transfer.keys), len(moved)
        num_failed = max(num_blocks - num_moved - num_declined, 0)
        tier.stats.count_store(moved, num_failed, self._block_bytes, seconds)
        tier.stores.num_pinned -= num_blocks
        self._num_late_stores -= job.is_late
        if num_moved:
            self._no_store_late_until = now + self._settings.store_timeout_s
            tier.stores.note_stored(job, seconds, now)

    def _judge(self, job: Job, is_good: bool, seconds: float | None, now: float) -> None:
        """Report the outcome of a job to the breakers. The tier's breaker counts only loads, and a
        store that was its probe."""
        tier, job_id = self._tier, job.transfer.job_id
        settings, is_promotion = self._settings, job.transfer.is_promotion
        timeout = settings.load_timeout_s if is_promotion else settings.store_timeout_s
        is_slow = seconds is not None and seconds > timeout
        breakers = []
        if is_promotion or tier.breaker.probe == job_id:
            breakers.append(tier.breaker)
        if not is_promotion:
            breakers.append(tier.store_breaker)
        for breaker in breakers:
            if is_good and not is_slow:
                breaker.succeeded(job_id)
            else:
                breaker.failed(now, job_id, is_timeout=is_slow)

    # --- deadlines ------------------------------------------------------------------------------

    def take_late(self, now: float) -> Iterator[Job]:
        """Find the jobs that are late, and yield the promotions among them. Call after
        `harvest`."""
        tier = self._tier
        for queue, breaker in ((self._loads, tier.breaker), (self._stores, tier.store_breaker)):
            while queue and (
                queue[0].is_done or queue[0].is_late or self._is_overdue(queue[0], now)
            ):
                job = queue.popleft()
                if job.is_done or job.is_late:
                    continue
                self._mark_late(job)
                breaker.failed(now, job.transfer.job_id, is_timeout=True)
                if job.transfer.is_promotion:
                    tier.stats.count("late_loads")
                    tier.load_speed.note_late(job, now - job.submitted)
                    yield job
                else:
                    tier.stats.count("late_stores")
                    if tier.breaker.probe == job.transfer.job_id:
                        tier.breaker.failed(now, job.transfer.job_id, is_timeout=True)

    def _mark_late(self, job: Job) -> None:
        job.is_late = True
        if job.transfer.is_promotion:
            self._num_late_blocks += len(job.transfer.keys)
        else:
            self._num_late_stores += 1

    def _is_overdue(self, job: Job, now: float) -> bool:
        """True if a job has missed its deadline. A store is not overdue while other stores end: a
        burst of them may take longer than the timeout of one."""
        if now < job.deadline:
            return False
        return job.transfer.is_promotion or now >= self._no_store_late_until

    def has_overdue(self, now: float) -> bool:
        """True if a job has missed its deadline and `take_late` has not found it yet."""
        # In order of deadlines: the first one that has not ended decides.
        for queue in (self._loads, self._stores):
            job = next((job for job in queue if not (job.is_done or job.is_late)), None)
            if job is not None and self._is_overdue(job, now):
                return True
        return False

    def has_awaited_loads(self, now: float) -> bool:
        """True if a request waits for a load that may still end in time."""
        return any(
            self._may_end_in_time(job, now)
            and any(not request.is_withdrawn for request in job.wanters)
            for job in self._loads
        )

    def has_pending(self, now: float) -> bool:
        """True if a job is under way that may still end in time."""
        # Most done and late jobs have left the queues, so the first job usually decides.
        for queue in (self._loads, self._stores):
            if any(self._may_end_in_time(job, now) for job in queue):
                return True
        return False

    def _may_end_in_time(self, job: Job, now: float) -> bool:
        return not (job.is_done or job.is_late or self._is_overdue(job, now))

    def forget_wanters(self) -> None:
        """The cache was reset: no request waits for a job under way."""
        for job in self._open.values():
            job.wanters.clear()


def _possible_count(number: object) -> int:
    """The count that a tier reports; 0 if it is not an int, or negative."""
    return number if type(number) is int and number > 0 else 0


def _possible_seconds(seconds: object, elapsed: float) -> float | None:
    """The seconds that a tier reports; None if a job of that age cannot have taken them."""
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= elapsed + _CLOCK_SLACK_S:
        return None
    return float(seconds)


def count_jobs(last_id: int, tables: Sequence[JobTable]) -> JobCount:
    """The jobs of all tiers. `last_id`: the newest job number."""
    return JobCount(last_id, sum(map(len, tables)), sum(table.num_late for table in tables))
