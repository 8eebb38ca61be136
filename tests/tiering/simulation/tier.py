"""A tier in virtual time that keeps real sealed blocks, and misbehaves as its seed decides."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, cast

from kvtier import seal
from kvtier.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.jobs import Job
from tests.tiering.simulation.backing import Backing
from tests.tiering.simulation.caller_rules import CallerRules
from tests.tiering.simulation.corruption import Kept
from tests.tiering.simulation.faults import Faults, Weather
from tests.tiering.simulation.memory import Use
from tests.tiering.simulation.piecework import Piecework
from tests.tiering.simulation.traits import TierTraits, spec_of
from tests.tiering.simulation.truth import Truth
from tests.tiering.simulation.world import World, name

_SLOWNESS = (1.1, 1.5, 4.0, 20.0)
"""How long a slow job or lookup takes, in multiples of its deadline."""
_NONSENSE: tuple[Any, ...] = (None, 7, "HIT", True, (), LookupResult.HIT_PENDING)
_NO_TIMES: tuple[Any, ...] = (-1.0, float("nan"), float("inf"), 1e12, "soon")
_NO_KEYS: tuple[Any, ...] = (7, "keys", [None], [OffloadKey(b"nobody's" + bytes(4))])


class TierFault(Exception):
    """Raised by a tier on purpose."""


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job that has not been reported."""

    job: TransferJob
    use: Use
    begun: float
    due: float
    num_resets: int
    num_waits: int
    is_given_up: bool = False
    """True if it was late and not reported when the manager polled."""
    is_hung: bool = False
    is_dropped: bool = False
    arrived: list[OffloadKey] = field(default_factory=list)
    work: Piecework | None = None
    """None if the submission raised before the work began, which the manager cannot know."""


class SimulatedTier(SecondaryTierManager):
    """A tier with the given traits. `position` is its place in the order of lookups."""

    def __init__(
        self, world: World, primary_kv_view: memoryview, position: int, traits: TierTraits
    ) -> None:
        super().__init__(spec_of(world.fingerprint()), primary_kv_view, f"sim{position}")
        self.locality = traits.locality
        self.traits = traits
        self.world = world
        self.faults = traits.faults
        self.weather = Weather.FAIR
        self.rules = CallerRules(world, self.tier_type, self.medium, self.locality)
        self.backing = Backing(world, traits.capacity, traits.faults, traits.locality)
        self.neighbours: list[SimulatedTier] = []
        self.jobs_of_manager: Mapping[int, Job] = {}
        """The manager's own records of loads: whether a request waits for each."""
        self.unreported: dict[int, RunningJob] = {}
        self.just_brought: list[OffloadKey] = []
        """Valid blocks that the last poll has reported as loaded."""
        self._finished: deque[JobResult] = deque()
        self._withheld: list[JobResult] = []
        self._asking: dict[OffloadKey, float] = {}
        """When the answer for a block is known."""
        self._answered: dict[OffloadKey, int] = {}
        """The step in which the answer was given."""
        self._has_died = False
        self.truth = Truth(self.rows.row_bytes)

    # --- the surroundings ----------------------------------------------------------------------

    @property
    def is_blameless(self) -> bool:
        """True if the tier has done nothing wrong."""
        is_sound = self.traits.faults == Faults() and self.traits.remembers_answers
        return is_sound and not self.backing.has_evicted and not self._has_died

    def change_weather(self) -> None:
        """Change the weather, at the rate of this tier."""
        if not self.world.happens(self.faults.weather):
            return
        worse = (Weather.BLACK_HOLE, Weather.BLACK_HOLE, Weather.STORM)
        is_fair = self.weather is Weather.FAIR
        self.weather = self.world.rng.choice(worse) if is_fair else Weather.FAIR
        self.world.note(f"{self.tier_type} weather {self.weather.name}")
        self.world.tally[f"weather: {self.weather.name}"] += 1
        if self.weather is not Weather.BLACK_HOLE:
            for running in self.unreported.values():
                if running.work is not None:
                    running.work.resume()

    def recover(self) -> None:
        """From now on the tier is sound, and reports everything that it has held back."""
        self.world.note(f"{self.tier_type} recovers")
        self.faults = Faults()
        self.weather = Weather.FAIR
        self._asking.clear()
        for running in self.unreported.values():
            running.is_hung = running.is_dropped = False
            if running.work is None:
                self._end(running)
            else:
                soon = self._duration(self.traits.settings.load_timeout_s)
                self.world.time.at(self.world.time.now + soon, running.work.finish_now)
        self._finished += self._withheld
        self._withheld = []

    def die(self) -> None:
        """From now on nothing moves any more."""
        self.world.note(f"{self.tier_type} dies")
        self.weather = Weather.BLACK_HOLE
        self.faults = replace(self.faults, weather=0.0)
        self._has_died = True

    # --- lookups -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answer = self._lookup(key, req_context)
        self.truth.answered([answer], 1)
        return answer

    def _lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.rules.asked_for(req_context)
        self._may_raise("lookup")
        if self.world.happens(self.faults.garbage):
            self.world.tally["garbage answers"] += 1
            return cast(LookupResult, self.world.rng.choice(_NONSENSE))
        return self._answer(key)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        answers = self._lookup_batch(keys, req_context)
        self.truth.answered(answers, len(keys))
        return answers

    def _lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        if not self.traits.has_own_batch:
            # As the default does it: up to the first miss.
            found: list[LookupResult] = []
            while len(found) < len(keys) and LookupResult.MISS not in found[-1:]:
                found.append(self._lookup(keys[len(found)], req_context))
            return found
        self.rules.asked_for(req_context)
        self._may_raise("lookup_batch")
        answers = [self._answer(key) for key in keys]
        if self.world.happens(self.faults.garbage):
            self.world.tally["garbage answers"] += 1
            wrong: list[Any] = [None, 3, answers * 2, answers[:-1], iter(answers), [None] * 99]
            return cast(Sequence[LookupResult], self.world.rng.choice([*wrong, [None, "HIT"]]))
        return answers

    def _answer(self, key: OffloadKey) -> LookupResult:
        if self.weather is Weather.BLACK_HOLE:
            return LookupResult.RETRY
        if not self.traits.answers_at_once and self.world.time.now < self._known_at(key):
            return LookupResult.RETRY
        is_kept = self.backing.has(self.fingerprint, key)
        return LookupResult.HIT if is_kept else LookupResult.MISS

    def _known_at(self, key: OffloadKey) -> float:
        step = self.world.step
        if not self.traits.remembers_answers and self._answered.get(key, step) < step:
            del self._answered[key], self._asking[key]
        known_at = self._asking.get(key)
        if known_at is None:
            known_at = self.world.time.now + self._duration(self.traits.settings.lookup_timeout_s)
            self._asking[key] = known_at
        if known_at <= self.world.time.now:
            self._answered[key] = step
        return known_at

    def begin_epoch(self, fingerprint: bytes) -> None:
        self._may_raise("begin_epoch")
        super().begin_epoch(fingerprint)
        self._asking.clear()
        self._answered.clear()

    # --- jobs ----------------------------------------------------------------------------------

    def submit_load(self, job: TransferJob) -> None:
        timeout = self.traits.settings.load_timeout_s
        self._check_submitted(job, is_promotion=True)
        self.rules.promoting(job, self.world.time.now + timeout)
        running = self._begin(job, timeout)
        fetched: dict[int, Kept | None] = {}
        halves = [i for i in range(len(job.keys)) for _ in range(2)]
        self.world.rng.shuffle(halves)
        self._start(running, [partial(self._load_half, running, fetched, i) for i in halves])
        self._may_raise_from_submit(running, self.faults.raises)

    def _load_half(self, running: RunningJob, fetched: dict[int, Kept | None], i: int) -> None:
        key, row = running.job.keys[i], self.rows[int(running.job.block_ids[i])]
        half = len(row) // 2
        if i not in fetched:
            kept = fetched[i] = self._fetch(running.job, key)
            if kept is not None:
                row[:half] = kept.payload[:half]
            return
        kept = fetched[i]
        if kept is None:
            row[:] = bytes(len(row))  # a load that fails may leave anything behind
            return
        row[half:] = kept.payload[half:]
        if self.verify_block(running.job, key, kept.header, row):
            running.arrived.append(key)

    def _fetch(self, job: TransferJob, key: OffloadKey) -> Kept | None:
        if self.weather is Weather.STORM or self.world.happens(self.faults.fails_partly):
            return None
        return self.backing.fetch(job.fingerprint, key)

    def verify_block(
        self,
        job: TransferJob,
        key: OffloadKey,
        header: bytes | bytearray | memoryview,
        payload: memoryview,
    ) -> bool:
        if super().verify_block(job, key, header, payload):
            return True
        failure = seal.check(header, payload, key, job.fingerprint)
        self.world.tally[f"seal failures: {failure}"] += 1
        return False

    def submit_store(self, job: TransferJob) -> None:
        self._check_submitted(job, is_promotion=False)
        running = self._begin(job, self.traits.settings.store_timeout_s)
        stores = [other for other in self.unreported.values() if not other.use.writes]
        self.rules.pinned(len({slot for store in stores for slot in store.use.slots}))
        order = self.world.rng.sample(range(len(job.keys)), len(job.keys))
        self._start(running, [partial(self._store, running, i) for i in order])
        self._may_raise_from_submit(running, self.faults.raises)

    def _store(self, running: RunningJob, i: int) -> None:
        job = running.job
        key, row = job.keys[i], self.rows[int(job.block_ids[i])]
        if row != self.world.truth.payload(key, self.world.version_of(job.fingerprint)):
            raise self.world.witness.saw(f"job {job.job_id} was given wrong bytes for {name(key)}")
        if self.weather is Weather.STORM or self.world.happens(self.faults.fails_partly):
            return
        kept = Kept(self.seal_block(job, key, row), bytes(row))
        self.backing.keep(job.fingerprint, key, kept)
        running.arrived.append(key)

    def _check_submitted(self, job: TransferJob, is_promotion: bool) -> None:
        way = "load" if is_promotion else "store"
        self.world.note(
            f"{self.tier_type} {way} {job.job_id} for {job.req_context.req_id}: "
            f"{' '.join(map(name, job.keys))} in {job.block_ids.tolist()}"
        )
        if job.is_promotion is not is_promotion:
            raise self.world.witness.saw(f"job {job.job_id} goes the wrong way")
        self.rules.submitted(job)
        self.world.last_submission = self.world.time.now
        tally = self.world.tally
        tally[f"{way} jobs"] += 1
        tally[f"blocks in {way} jobs"] += len(job.keys)
        tally[f"windowed blocks in {way} jobs"] += sum(key[-1] for key in job.keys)
        if self.traits.wants_whole_requests:
            known = [key for key in job.keys if self.backing.has(job.fingerprint, key)]
            tally[f"known blocks in {way} jobs of whole requests"] += len(known)

    def _begin(self, job: TransferJob, timeout: float) -> RunningJob:
        """Begin a job: from now on its slots belong to this tier."""
        world, now = self.world, self.world.time.now
        slots: list[int] = job.block_ids.tolist()
        use = Use(f"{self.tier_type} job {job.job_id}", slots, writes=job.is_promotion)
        world.uses.begin(use)
        due = now + self._duration(timeout)
        num_waits = world.num_waits[job.req_context]
        running = RunningJob(job, use, now, due, world.num_resets, num_waits)
        running.is_hung = world.happens(self.faults.hangs)
        running.is_dropped = world.happens(self.faults.drops)
        self.unreported[job.job_id] = running
        if world.happens(self.faults.refuses):
            self._let_go_of(running)
            world.note(f"{self.tier_type} does not begin {job.job_id}")
            world.tally["jobs not begun"] += 1
            self.truth.refused(job)
            raise JobNotBegun("no time")
        self._may_raise_from_submit(running, self._raise_rate())
        return running

    def _let_go_of(self, running: RunningJob) -> None:
        """Its slots no longer belong to this tier."""
        world, job = self.world, running.job
        del self.unreported[job.job_id]
        world.uses.end(running.use)
        if running.use.writes:
            for key in job.keys:
                if key in world.promoting and world.promoting[key].job_id == job.job_id:
                    del world.promoting[key]

    def _start(self, running: RunningJob, actions: Sequence[Callable[[], None]]) -> None:
        running.work = Piecework(
            self.world.time,
            self.world.rng,
            () if self.world.happens(self.faults.fails) else actions,
            running.due - self.world.time.now,
            lambda: self._end(running),
            lambda: not (running.is_hung or self.weather is Weather.BLACK_HOLE),
        )

    def _may_raise_from_submit(self, running: RunningJob, rate: float) -> None:
        """Raise from a submission, before or after the work began. Not `JobNotBegun`: the manager
        must assume that the job has begun."""
        if self.world.happens(rate):
            running.is_given_up = True
            if running.use.writes:
                for key in running.job.keys:
                    self.world.promoting[key].overdue_at = self.world.time.now
            self._raise("submit")

    def _end(self, running: RunningJob) -> None:
        """The job has ended: make its report."""
        world, arrived = self.world, running.arrived
        is_complete = len(arrived) == len(running.job.keys)
        keys: Any = None
        seconds: Any = world.time.now - running.begun
        if not is_complete and arrived:
            keys = world.rng.choice((list, tuple, dict.fromkeys))(arrived)
        if world.happens(self.faults.garbage):
            seconds = world.rng.choice(_NO_TIMES)
        if not is_complete and world.happens(self.faults.garbage):
            keys, running.arrived = world.rng.choice(_NO_KEYS), []
        result = JobResult(running.job.job_id, is_complete, keys, seconds)
        if running.is_dropped:
            world.tally["dropped results"] += 1
            self._withheld.append(result)
            return
        self._finished.append(result)
        if world.happens(self.faults.duplicates):
            later = world.time.now + self._duration(self.traits.settings.store_timeout_s)
            world.time.at(later, lambda: self._finished.append(result))

    # --- reports -------------------------------------------------------------------------------

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.rules.polled()
        if self.world.is_ending:  # the manager waits between two polls
            self.world.time.advance(self.traits.settings.store_timeout_s / 8)
        self.just_brought = []
        if self.weather is Weather.BLACK_HOLE:
            self._give_up_late_jobs()
            return []
        if self.world.happens(self._raise_rate()):
            self._give_up_late_jobs()
            self._raise("get_finished_jobs")
        if self.world.happens(self.faults.garbage / 4):
            self._give_up_late_jobs()
            return cast(Iterable[JobResult], self.world.rng.choice(_NONSENSE[:4]))
        return self._reports() if self.traits.reports_lazily else list(self._reports())

    def _reports(self) -> Iterator[JobResult]:
        if self.world.happens(self.faults.invents):
            yield self._invented()
        while self._finished:
            result = self._finished.popleft()
            self._hand_over(result)
            self.world.last_report = self.world.time.now
            yield result
            if self.traits.reports_lazily and self.world.happens(self._raise_rate()):
                self._give_up_late_jobs()
                self._raise("get_finished_jobs")
        self._give_up_late_jobs()

    def _invented(self) -> JobResult:
        """A report of an unknown job, or of another tier's job."""
        self.world.tally["invented results"] += 1
        anothers = [job_id for other in self.neighbours for job_id in other.unreported]
        job_id = self.world.rng.choice([-1, 10**9, 0, *anothers])
        return JobResult(job_id, self.world.happens(0.8), None, 0.001)

    def _hand_over(self, result: JobResult) -> None:
        """The manager learns that a job has ended: its slots no longer belong to this tier."""
        world = self.world
        running = self.unreported.get(result.job_id)
        if running is None:
            world.tally["duplicate results"] += 1
            return
        world.note(f"{self.tier_type} reports {result.job_id}: {len(running.arrived)}")
        self.truth.ended(running.job, running.arrived)
        self._let_go_of(running)
        if not running.use.writes:
            return
        if running.num_resets != world.num_resets:
            return
        # Without blocks that another job is still loading: it may be given up right after.
        self.just_brought += [key for key in running.arrived if key not in world.promoting]
        # Blocks of a load that only measures the tier are leased to no request.
        if not running.is_given_up and self.jobs_of_manager[result.job_id].is_awaited:
            until = world.time.now + self.traits.settings.load_timeout_s
            world.tally["leased blocks"] += len(running.arrived)
            for key in running.arrived:
                world.leases[running.job.req_context, key] = until

    def _give_up_late_jobs(self) -> None:
        """No request waits for jobs that were late and not reported when the manager polled."""
        world, timeout = self.world, self.traits.settings.load_timeout_s
        for running in self.unreported.values():
            if running.is_given_up or world.time.now < running.begun + timeout:
                continue
            running.is_given_up = True
            context = running.job.req_context
            is_same_wait = running.num_waits == world.num_waits[context]
            if running.use.writes and is_same_wait and running.num_resets == world.num_resets:
                world.give_up(running.job.keys, context)

    def _duration(self, timeout: float) -> float:
        rng = self.world.rng
        if self.world.happens(self.faults.slow):
            return timeout * rng.choice(_SLOWNESS)
        return timeout * self.traits.latency * rng.random()

    # --- the rest of the contract --------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.rules.announced(req_context)
        self._may_raise("on_new_request")
        if self.world.happens(self.faults.garbage):
            return cast(RequestOffloadingContext, self.world.rng.choice(_NONSENSE))
        if self.traits.wants_whole_requests:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.rules.finished(req_context)
        self._may_raise("on_request_finished")

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.rules.asked_for(req_context, for_loading=False)
        self.rules.touched(req_context)
        self._may_raise("touch")

    def missing(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        self.rules.asked_for(req_context, for_loading=False)
        self._may_raise("missing")
        if self.world.happens(self.faults.garbage):
            self.world.tally["garbage answers"] += 1
            wrong: list[Any] = [None, 3, "keys", [None], [*keys, *keys], [b"nobody's"], iter(keys)]
            return cast(Sequence[OffloadKey], self.world.rng.choice(wrong))
        coming = {
            key
            for running in self.unreported.values()
            if not running.use.writes
            for key in running.job.keys
        }
        missing = [
            key for key in keys if key not in coming and not self.backing.has(self.fingerprint, key)
        ]
        self.world.tally["blocks named missing"] += len(missing)
        return missing

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._may_raise("on_schedule_end")

    def has_pending_work(self) -> bool:
        self._may_raise("has_pending_work")
        if self.world.happens(self.faults.garbage):
            return cast(bool, None)
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._may_raise("take_events")
        if self.world.happens(self.faults.garbage):
            return cast(Iterable[OffloadingEvent], self.world.rng.choice(_NONSENSE[:3]))
        return self.backing.take_events()

    def get_stats(self) -> OffloadingStats | None:
        self._may_raise("get_stats")
        if self.world.happens(self.faults.garbage):
            return cast(OffloadingStats, self.world.rng.choice(_NONSENSE))
        return OffloadingStats(gauges={f"{self.tier_type}_kept": len(self.backing)})

    def take_seal_failures(self) -> Counter[seal.SealFailure]:
        self._may_raise("take_seal_failures")
        return super().take_seal_failures()

    def drain_jobs(self) -> None:
        self._may_raise("drain_jobs")
        for running in self.unreported.values():
            if self.weather is not Weather.BLACK_HOLE and running.work is not None:
                running.work.finish_now()

    def shutdown(self) -> None:
        self._may_raise("shutdown")

    def _raise_rate(self) -> float:
        return self.faults.raises + (self.weather is Weather.STORM) / 2

    def _may_raise(self, method: str) -> None:
        if self.world.happens(self._raise_rate()):
            self._raise(method)

    def _raise(self, method: str) -> NoReturn:
        self.world.note(f"{self.tier_type} raises from {method}")
        self.world.tally[f"raised: {method}"] += 1
        raise TierFault(f"{self.tier_type}: {method}")


class SimulatedStorage(SimulatedTier):
    """A simulated tier with a medium, so that filters apply to it."""

    medium = Medium.STORAGE
