"""Promotions: blocks that were found in a tier are loaded into host memory, and kept for a while.

`kvtier.tiering.lookup` notes what a request has found. At the end of the step each request gets one
job per tier, with slots reserved for its blocks. A block that several requests want is loaded once;
they all wait for the same job. What has arrived is leased to them, so that it is not evicted before
they load it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvtier.base import LookupResult
from kvtier.hints import hints_of
from kvtier.tiering.guard import PROBE_SIZES, Choice, Load, Objection
from kvtier.tiering.leases import Leases
from kvtier.tiering.recording import count_declined, note_load

if TYPE_CHECKING:
    from kvtier.base import OffloadingStats, OffloadKey
    from kvtier.tiering.guard import LoadGuard, Verdict
    from kvtier.tiering.jobs import Job, JobFactory
    from kvtier.tiering.lookup import Groups
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import Step, TierRequest
    from kvtier.tiering.tier_calls import GuardedTier


class Promotions:
    """All promotions: wanted, under way, and arrived. Scheduler thread only."""

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        jobs: JobFactory,
        groups: Groups,
        guard: LoadGuard,
        step: Step,
    ) -> None:
        self._primary = primary
        self._job_factory = jobs
        self._groups = groups
        self._guard = guard
        self._step = step
        self.wanting: dict[TierRequest, None] = {}
        """Requests that have found blocks in lower tiers in this step. `want` adds to it."""
        self._choices = _Choices()
        self.jobs: dict[int, Job] = {}
        """Promotions under way, late ones included."""
        self.leases = Leases(primary)
        self._declined: list[tuple[GuardedTier, Sequence[OffloadKey], TierRequest]] = []
        """Blocks that were not worth loading in this step."""
        self.num_given_up = 0
        """Requests whose promotion was late."""
        self.num_left_blocks = 0
        """Blocks that requests computed instead of waiting for the load of another request."""

    def want(self, request: TierRequest) -> None:
        """A request has found blocks in lower tiers: send jobs for it at the end of the step."""
        self.wanting[request] = None
        if request.is_announced:
            self._choices.waiting.add(request)

    def drop(self, request: TierRequest) -> None:
        """Send no job for what a request has found in this step."""
        self.wanting.pop(request, None)
        request.wanted.begin(request.wanted.step)

    def await_writer(self, key: OffloadKey, request: TierRequest) -> LookupResult:
        """A block is being written in host memory: HIT_PENDING if it is worth waiting for."""
        job_id = self._primary.writer_of(key)
        if job_id is None:
            return LookupResult.HIT_PENDING  # the device writes it
        step, job = self._step, self.jobs[job_id]
        if not job.is_awaited or not request.wait.may_go_on(step.now, step.number):
            return LookupResult.MISS
        job.wanters[request] = None
        request.wait.note(step.now, step.number)
        return LookupResult.HIT_PENDING

    def leaves(
        self, writers: Sequence[int | None], keys: Sequence[OffloadKey], request: TierRequest
    ) -> bool:
        """True if a request computes these blocks instead of waiting for promotions of other
        requests: it then waits for no other block either. So a short prompt does not wait until all
        blocks of a long prompt with the same beginning are promoted.

        `writers`: for each block, the id of the job that promotes it; None if there is none.
        """
        jobs = {self.jobs[job_id] for job_id in writers if job_id is not None}
        if any(job.transfer.req_context is request.context for job in jobs):
            return False
        last = max(jobs, key=lambda job: job.ready_at)
        wait_s = last.ready_at - self._step.now
        compute_s = self._guard.much_faster(keys, request, wait_s, last.num_left)
        if compute_s is None:
            return False
        record = self._primary.journal.of(request.context)
        if record is not None:
            record.left = keys[0], wait_s, compute_s
        last.num_left += 1
        self.num_left_blocks += len(keys)
        for job in self.jobs.values():  # those of other groups, too
            job.wanters.pop(request, None)
        self._choices.waiting.discard(request)
        request.wait.give_up()
        return True

    # --- the end of a step: jobs leave ----------------------------------------------------------

    @property
    def has_some_to_send(self) -> bool:
        """True if `send` has anything to do."""
        return bool(self.wanting or self._declined)

    def send(self) -> None:
        """Send one job for each request and each tier that has blocks for it; those of a higher
        priority first, while there is room."""
        for request in _by_priority(self.wanting):
            for tier, keys in self._by_tier(request).items():
                if not self._promote(keys, tier, request):
                    break  # blocks behind these are useless without them
        self.wanting = {}
        declined, self._declined = self._declined, []
        for tier, left, request in declined:
            self._explore(left, tier, request)

    def _by_tier(self, request: TierRequest) -> dict[GuardedTier, list[OffloadKey]]:
        """The blocks to bring up for a request, in prompt order, by tier."""
        by_tier: dict[GuardedTier, list[OffloadKey]] = {}
        for group, run in request.wanted.runs.items():
            keys = list(run)
            window = self._groups.windows.get(group)
            if window is not None:
                if group in request.wanted.ended:
                    # The scan ended at a miss, or at a block that a tier still looks for.
                    continue
                keys = keys[-window:][::-1]
            for key, block in zip(keys, self._primary.blocks_of(keys), strict=True):
                tier = run[key]
                if tier is None:
                    continue
                if block is None:
                    if tier in by_tier:
                        by_tier[tier].append(key)
                    else:
                        by_tier[tier] = [key]
                elif block.ref_cnt < 0:  # being written since it was looked up
                    self.await_writer(key, request)
        return by_tier

    def _promote(self, keys: list[OffloadKey], tier: GuardedTier, request: TierRequest) -> bool:
        """Decide how many leading blocks to promote, and send a job for as many of them as there is
        room for. Returns True if the job has all blocks."""
        now = self._step.now
        if not tier.lets(request, now):
            return False
        load = self._load_of(keys, tier, request)
        verdict = self._guard.judge(load, now)
        if verdict.choice is Choice.WAIT:
            if request.queued is not None:
                request.queued.look_up_next()
            return False
        if verdict.choice is Choice.COMPUTE:
            self._decline(load, verdict)
            return False
        if verdict.choice is Choice.TRY_COMPUTING:
            count_declined(load, verdict, self._primary.journal)
            tier.stats.count(_DECISIONS[Objection.TRIAL])
            self._choices.waiting.discard(request)
            for source in request.sources.all:  # compute them, whichever tier has them
                request.decline(source)
            return False
        return self._bring_up_for(load, verdict)

    def _bring_up_for(self, load: Load, verdict: Verdict) -> bool:
        """Promote the leading blocks that a verdict allows. Returns True if those are all, and host
        memory has room for them."""
        keys, tier, request = load.keys, load.tier, load.request
        now = self._step.now
        queued = request.queued
        num_sent = self._bring_up(keys[: verdict.num_blocks], tier, request, is_awaited=True)
        if queued is not None and num_sent < len(keys):
            queued.look_up_later(now)
        if not num_sent:
            return False
        tier.stats.count("hit_blocks", num_sent)
        _count_load(verdict, tier)
        self._guard.note_load(verdict)
        if verdict.choice is Choice.MEASURE:
            self._begin_probing([self._job_factory.last_id], tier)
            if queued is not None:
                queued.look_up_next()
        if queued is None and verdict.objection is not None:
            request.decline(tier)
            count_declined(load._replace(keys=keys[num_sent:]), verdict, self._primary.journal)
        return num_sent == len(keys)

    def declines(self, group: bytes, request: TierRequest) -> bool:
        """True if a request should compute what it has found in the tier that has the first block.
        Then it does not ask that tier any more, and the caller has to repeat the lookup.

        Called when the request has looked up its whole prompt, because deciding at the end of the
        step would delay the request by one step.
        """
        run = request.wanted.runs.get(group)
        if not run or not self._guard.knows_compute_cost or not self._groups.is_only_one:
            return False
        now = self._step.now
        first = next(iter(run.values()))
        if first is None or not first.lets(request, now):
            return False
        keys = [key for key, tier in run.items() if tier is first]
        load = self._load_of(keys, first, request)
        verdict = self._guard.objection_to(load, now)
        if verdict is None:
            return False
        self._decline(load, verdict)
        self.drop(request)
        return True

    def _load_of(self, keys: list[OffloadKey], tier: GuardedTier, request: TierRequest) -> Load:
        """Blocks to decide about."""
        # Nobody decodes or computes on an idle engine: its steps are short.
        num_held_up = self._num_held_up(keys, request)
        step_s = self._step.lasts_s if num_held_up else 0.0
        return Load(keys, tier, request, num_held_up, step_s)

    def _num_held_up(self, keys: Sequence[OffloadKey], request: TierRequest) -> int:
        """Other requests that the device computes or decodes, or that wait for it. A request that
        waits for a load is not one of them, nor one that computes the same blocks: it needs them as
        well."""
        choices = self._choices
        if choices.step != self._step.number:
            candidates = set(self.wanting)
            candidates.update(*(job.wanters for job in self.jobs.values()))
            choices.begin(self._step.number, candidates)
        num_others = self._step.num_requests - request.is_announced
        num_waiting = len(choices.waiting) - (request in choices.waiting)
        computing = choices.computing.get(keys[0], ())
        return num_others - num_waiting - len(computing) + (request in computing)

    def _decline(self, load: Load, verdict: Verdict) -> None:
        """The request computes these blocks."""
        keys, tier, request = load.keys, load.tier, load.request
        assert verdict.objection is not None
        request.decline(tier)
        self._choices.waiting.discard(request)
        if request.queued is not None:  # nothing is decided until the engine looks it up
            request.queued.look_up_later(self._step.now)
            return
        if request.is_announced:
            self._choices.computing.setdefault(keys[0], set()).add(request)
        count_declined(load, verdict, self._primary.journal)
        tier.stats.count(_DECISIONS[verdict.objection])
        self._declined.append((tier, keys, request))

    def _explore(self, keys: Sequence[OffloadKey], tier: GuardedTier, request: TierRequest) -> None:
        """Now and then, load some declined blocks that no request waits for. Otherwise a tier that
        was slow once would count as slow forever."""
        now = self._step.now
        speed = tier.load_speed
        if not speed.may_explore(now) or request.is_withdrawn or not tier.lets(request, now):
            return
        num_explored = speed.num_to_explore(len(keys))
        absent = [key for key in keys[:num_explored] if not self._primary.has(key)]
        if absent:
            speed.explored(now)
            self._bring_up(absent, tier, request, is_awaited=False)

    def probe(self, keys: list[OffloadKey], tier: GuardedTier, request: TierRequest) -> None:
        """Measure a tier with blocks that no request waits for. Called when the engine starts."""
        start, job_ids = 0, []
        for size in PROBE_SIZES:
            if self._bring_up(keys[start : start + size], tier, request, is_awaited=False):
                job_ids.append(self._job_factory.last_id)
            start += size
        self._begin_probing(job_ids, tier)

    def _begin_probing(self, job_ids: list[int], tier: GuardedTier) -> None:
        """Measure a tier with these jobs. Jobs that were refused, or whose submission raised, are
        left out: they may never be reported."""
        under_way = [job_id for job_id in job_ids if tier.jobs.is_open(job_id)]
        tier.load_speed.begin_probing(under_way, self._step.now)

    def _bring_up(
        self,
        keys: Sequence[OffloadKey],
        tier: GuardedTier,
        request: TierRequest,
        *,
        is_awaited: bool,
    ) -> int:
        """Send a job for as many leading blocks as there are slots for; returns how many."""
        count = tier.jobs.num_loadable(len(keys))
        num_leased = self.leases.num_blocks - self.leases.num_blocks_of(request)
        count = min(count, self._primary.num_writable(count, num_leased, request.context))
        if not count:
            return 0
        job_id = self._job_factory.new_id()
        placed = self._primary.prepare_write(job_id, keys[:count], request.context)
        if placed is None:
            return 0
        placed_keys, spec = placed
        transfer = self._job_factory.make(job_id, placed_keys, spec, True, request.context)
        job = self.jobs[job_id] = tier.jobs.expect_load(transfer, self._step.now)
        job.is_awaited = is_awaited
        if is_awaited:
            job.wanters[request] = None
        tier.jobs.submit_load(job)
        if job.is_done:
            self.end(job, (), tier)
            return 0
        if job.is_late:
            self.give_up(job, tier)
        return len(placed_keys)

    # --- later steps: jobs end ------------------------------------------------------------------

    def end(self, job: Job, moved: Sequence[OffloadKey], tier: GuardedTier) -> None:
        """A tier has reported a promotion. `moved`: the blocks that it has verified."""
        transfer = job.transfer
        del self.jobs[transfer.job_id]
        readable = self._primary.complete_write(transfer.job_id, moved)
        wanters = [request for request in job.wanters if not request.is_withdrawn]
        note_load(job, moved, readable, tier, self._step.now, self._primary.journal)
        if len(moved) < len(transfer.keys):
            failed = set(transfer.keys).difference(moved)
            for request in wanters:
                request.sources.note_failed(failed, tier)
                if request.queued is not None:
                    request.queued.look_up_next()  # another tier may have them
        if moved and wanters:
            for request in wanters:
                request.brought_up.update(dict.fromkeys(moved, tier.manager))
            lasts_s = tier.settings.load_timeout_s
            self.leases.begin(moved, wanters, transfer.req_context, self._step.now, lasts_s)

    def give_up(self, job: Job, tier: GuardedTier) -> None:
        """A promotion is late: nobody waits for it any more. Its slots are quarantined until the
        tier reports it."""
        note_load(job, (), (), tier, self._step.now, self._primary.journal)
        self._primary.give_up_write(job.transfer.job_id)
        self.num_given_up += len(job.wanters)
        for request in job.wanters:
            request.wait.give_up()
        job.wanters.clear()

    def withdraw(self, request: TierRequest) -> None:
        """A request waits for nothing any more."""
        self.wanting.pop(request, None)
        self._choices.waiting.discard(request)
        self.leases.end_for(request)

    def open_work(self) -> dict[str, int]:
        """The sizes of the tables that must be empty once everything has ended."""
        return {
            "wanting requests": len(self.wanting),
            "promotions": len(self.jobs),
            "leases": len(self.leases),
            "leased blocks": self.leases.num_blocks,
        }

    def add_to(self, stats: OffloadingStats) -> None:
        """Move the counters into `stats`, and add the gauges."""
        if self.num_given_up:
            stats.counters["kvtier_tiering_given_up_requests"] = self.num_given_up
            self.num_given_up = 0
        if self.num_left_blocks:
            stats.counters["kvtier_tiering_left_blocks"] = self.num_left_blocks
            self.num_left_blocks = 0
        stats.gauges["kvtier_tiering_leased_blocks"] = self.leases.num_blocks

    def forget_all(self) -> None:
        """The cache was reset: what is wanted or leased is not valid any more."""
        self.wanting = {}
        self._declined = []
        self.leases.end_all()


_DECISIONS = {objection: f"decided_{objection.name.lower()}" for objection in Objection}
"""The counters of the tier."""


def _count_load(verdict: Verdict, tier: GuardedTier) -> None:
    if verdict.choice is Choice.MEASURE:
        tier.stats.count("decided_measure")
    else:
        tier.stats.count("decided_load" if verdict.objection is None else "decided_part")


def _by_priority(requests: Collection[TierRequest]) -> Collection[TierRequest]:
    """The requests with a higher priority first, otherwise in their order."""
    if len(requests) < 2:
        return requests
    priorities = {request: hints_of(request.context).priority for request in requests}
    if len(set(priorities.values())) == 1:
        return requests
    return sorted(requests, key=priorities.__getitem__, reverse=True)


class _Choices:
    """What requests have chosen in one step."""

    __slots__ = ("computing", "step", "waiting")

    def __init__(self) -> None:
        self.begin(-1, ())

    def begin(self, step: int, waiting: Collection[TierRequest]) -> None:
        """Forget the choices of earlier steps. `waiting`: requests that may wait for loads."""
        self.step = step
        self.waiting = {each for each in waiting if each.may_wait_for_loads}
        """Announced requests that wait for loads."""
        self.computing: dict[OffloadKey, set[TierRequest]] = {}
        """Announced requests that compute, by the first block that they do not load. Requests with
        the same one compute the same blocks, at least in part."""
