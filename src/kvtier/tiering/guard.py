"""Decides whether to load blocks from a tier or to compute them.

On an idle engine, the faster of the two is chosen. On a busy one, computing a prompt also delays
every other request that the device works on, while loading it delays none. So blocks are loaded if

    load_s <= compute_s * (1 + num_held_up)

where `load_s` includes the loads that the tier has to do first and the steps in which the engine
takes over the blocks, and `num_held_up` is the number of other requests that compute, decode or
wait for the device, up to four. A request that waits for a load is not held up. So the more
requests load, the sooner the next one computes, and both sides stay busy. A request that computes
the same blocks is not held up either: it needs what is computed.

A load that would miss its deadline is not begun. Then only as many blocks are loaded as arrive in
time, if that is better than computing them, and the request computes the rest.

`LoadGuard` applies this rule to the costs that `kvtier.tiering.cost` has learnt. To replace the
rule, replace `LoadGuard.judge` and `LoadGuard.objection_to`. `LoadSpeed` measures one tier, even
while no request loads from it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kvtier.tiering.cost import Learnt, PrefillRate, TransferEstimate, read_note, write_note

if TYPE_CHECKING:
    from kvtier.base import OffloadingStats, OffloadKey
    from kvtier.tiering.jobs import Job
    from kvtier.tiering.lookup import Groups
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.tier_calls import GuardedTier

logger = logging.getLogger(__name__)

PROBE_SIZES = (1, 8)
"""Sizes, in blocks, of the loads that measure a tier when the engine starts (probes). Two sizes
separate latency from time per block. If the tier names no blocks at the start, the first load for a
request is the probe, with at most as many blocks as the larger of these."""
_PROBE_PATIENCE_S = 0.25
"""Seconds. A request waits no longer than this for the probes of a tier."""
_BLIND_S, _BLIND_REQUESTS = 1.0, 8
"""While the cost of computing is not known, the first `_BLIND_REQUESTS` requests whose loads would
take longer than `_BLIND_S` seconds compute instead: only computing shows what it costs."""

_MOST_HELD_UP = 4
"""The most requests that count as held up. Where many only decode, computing a prompt makes each of
them a little later, while a long load makes one request wait for long."""
_STEPS_OF_HIT = 2
"""Steps of the engine from the end of a load to the first step that computes: one in which it finds
the blocks, and one in which they are copied to the device."""
_IN_TIME = 0.75
"""If a load would miss its deadline, only as many blocks are loaded as are expected in this share
of the time."""
_TRIAL_SHARE = 1 / 32
"""Trials may cost this share of the time of all loads. In a trial, a request computes blocks
although the rule prefers to load them."""
_MEASURED_FACTOR = 8
"""Trials are this many times rarer where the cost of computing was measured."""
_LEAST_TRIED_S = 0.05
"""Seconds. Shorter loads cause no trial, because a wrong decision there costs a request little."""

_MUCH_FASTER = 4
"""A request stops waiting for blocks that other requests load if it can compute them more than this
many times faster."""
_EXPLORED_BLOCKS, _EXPLORED_S = 8, 0.25
"""An exploration is a load that shows whether a tier is still slower than computing. The first one
has `_EXPLORED_BLOCKS` blocks, or more if they are expected to take less than `_EXPLORED_S`
seconds."""
_EXPLORE_EVERY_S = 20.0
"""Seconds from one exploration of a tier to the next."""
_KEPT_EVERY_S = 30.0
"""Seconds from one note with the learnt costs to the next. Tiers keep it for the next engine."""
_LONGEST_EXPLORATION_S, _EXPLORATION_SHARE = 1.0, 0.5
"""The longest exploration, in seconds and as a share of the load timeout. The smaller limit counts.
An exploration must not be late, and must not keep other loads waiting for long."""


class Choice(Enum):
    """What to do with blocks that a request has found in a tier."""

    LOAD = "load"
    MEASURE = "measure"
    """Load a few of them, to see how long the tier takes."""
    WAIT = "wait"
    """The tier is being measured: decide in the next step."""
    COMPUTE = "compute"
    """Compute them: loading takes too long, or its cost is not known yet."""
    TRY_COMPUTING = "try computing"
    """Compute them as a trial, although the rule prefers to load them. See `Trials`."""


class Verdict(NamedTuple):
    """The answer of `LoadGuard.judge`."""

    choice: Choice
    load_s: float | None
    """Seconds that loading is expected to take. None: not known."""
    objection: Objection | None = None
    """Why the blocks are computed, or those behind `num_blocks`."""
    num_blocks: int = 0
    """If the choice is to load: how many leading blocks. The request computes the others."""
    compute_s: float | None = None
    """Seconds that computing all of them is expected to take. None: not known."""
    whole_s: float | None = None
    """If only some are loaded: seconds that loading all of them would take."""


class Objection(Enum):
    """Why blocks should be computed and not loaded. The value is the tier's counter."""

    SLOWER = "declined_slower_blocks"
    """Loading takes longer than computing, also for the requests that computing holds up."""
    LATE = "declined_late_blocks"
    """The load would probably miss its deadline."""
    UNMEASURED = "declined_unmeasured_blocks"
    """The cost of computing or of loading is not known yet, and is measured first."""
    TRIAL = "declined_trial_blocks"
    """Computed as a trial."""


class Load(NamedTuple):
    """Blocks of a tier that a request may load, and what else goes on."""

    keys: Sequence[OffloadKey]
    tier: GuardedTier
    request: TierRequest
    num_held_up: int
    """Other requests that have to wait while this one computes."""
    step_s: float
    """How long a step of the engine takes."""


class _Costs(NamedTuple):
    """What loading and computing some blocks are expected to cost."""

    load_s: float | None
    """Until the tier has loaded them. None: not known."""
    compute_s: float | None
    """None: not known."""
    num_tokens: int
    mean_position: float
    """The mean position of these tokens in the prompt; 0 while `compute_s` is not known."""


class LoadGuard:
    """Decides whether to load blocks from a tier or to compute them again. Scheduler thread only.

    `Promotions` calls `judge` for each request and each tier that has blocks for it.
    """

    def __init__(
        self,
        prefill: PrefillRate,
        groups: Groups,
        tiers: Sequence[GuardedTier],
        fingerprint: bytes,
    ) -> None:
        """`fingerprint`: the namespace before any reset. The next engine starts with the same."""
        self._prefill = prefill
        self._groups = groups
        self._tiers = tiers
        self._fingerprint = fingerprint
        self._keep_at = inf
        self._trials = Trials()
        self._num_blind = 0
        """Requests that computed because the cost of computing was not known."""
        self.num_trials = 0
        """Requests that computed as a trial."""

    @property
    def knows_compute_cost(self) -> bool:
        """True if the cost of computing is known, so that a load can be compared with it."""
        return self._prefill.is_known

    # --- decisions ------------------------------------------------------------------------------

    def judge(self, load: Load, now: float) -> Verdict:
        """Decide about blocks that a tier has, and count the decision."""
        tier, costs = load.tier, self._costs(load)
        objection = self._objection(load, costs, now)
        if objection is Objection.LATE and (num_in_time := self._num_in_time(load, now)):
            part_s = self._load_s(tier, num_in_time)
            whole_s, compute_s = costs.load_s, costs.compute_s
            return Verdict(Choice.LOAD, part_s, objection, num_in_time, compute_s, whole_s)
        if objection is not None:
            self._num_blind += costs.load_s is not None and costs.compute_s is None
            return Verdict(Choice.COMPUTE, costs.load_s, objection, 0, costs.compute_s)
        is_urgent = load.request.queued is None and not load.request.context.is_prefetch
        if is_urgent and self._is_trial_due(costs):
            self._trials.note_trial()
            self.num_trials += 1
            objection = Objection.TRIAL
            return Verdict(Choice.TRY_COMPUTING, costs.load_s, objection, 0, costs.compute_s)
        if tier.load_speed.is_being_probed:
            return Verdict(Choice.WAIT, costs.load_s)
        if costs.load_s is None and self._prefill.may_learn and not tier.load_speed.was_probed:
            num_measured = min(len(load.keys), PROBE_SIZES[-1])
            return Verdict(Choice.MEASURE, costs.load_s, None, num_measured)
        return Verdict(Choice.LOAD, costs.load_s, None, len(load.keys))

    def objection_to(self, load: Load, now: float) -> Verdict | None:
        """The verdict if the request should rather compute all of these blocks; None if it should
        load at least some of them. Counts nothing."""
        costs = self._costs(load)
        objection = self._objection(load, costs, now)
        if objection is None or (objection is Objection.LATE and self._num_in_time(load, now)):
            return None
        return Verdict(Choice.COMPUTE, costs.load_s, objection, 0, costs.compute_s)

    def much_faster(
        self, keys: Sequence[OffloadKey], request: TierRequest, wait_s: float, num_before: int
    ) -> float | None:
        """The seconds to compute these blocks, if that is far less than `wait_s`, the time to wait
        for them; otherwise None. A small advantage does not count: blocks that many requests share
        should be loaded once. It has to be the larger, the more requests compute them already
        (`num_before`)."""
        if not self._prefill.is_known:
            return None
        num_tokens = self._groups.num_tokens(keys)
        deepest = max(num_tokens, request.context.num_prompt_tokens or 0)
        compute_s = self._prefill.seconds_for(num_tokens, deepest - num_tokens / 2)
        return compute_s if compute_s * _MUCH_FASTER * (1 + num_before) < wait_s else None

    def note_load(self, verdict: Verdict) -> None:
        """The blocks of this verdict are being loaded."""
        if verdict.load_s is not None:
            self._trials.note_load(verdict.load_s)

    def _objection(self, load: Load, costs: _Costs, now: float) -> Objection | None:
        """What the known costs say against loading the blocks."""
        load_s, compute_s = costs.load_s, costs.compute_s
        if load_s is None:
            speed = load.tier.load_speed
            may_wait = speed.began_probing_within(now, _PROBE_PATIENCE_S)
            return None if may_wait or not speed.is_being_probed else Objection.UNMEASURED
        if compute_s is not None and load_s > load.tier.settings.load_timeout_s:
            return Objection.LATE  # no request waits for a late load
        if load.request.context.is_prefetch:
            return None  # nobody waits for it, but somebody would wait for computing
        if compute_s is not None:
            ready_s = load_s + _STEPS_OF_HIT * load.step_s
            weight = 1 + min(load.num_held_up, _MOST_HELD_UP)
            return None if ready_s <= compute_s * weight else Objection.SLOWER
        may_learn = self._prefill.may_learn and costs.num_tokens > 0
        is_accepted = load_s <= _BLIND_S or not may_learn or self._num_blind >= _BLIND_REQUESTS
        return None if is_accepted else Objection.UNMEASURED

    def _num_in_time(self, load: Load, now: float) -> int:
        """If loading all blocks would take too long: how many leading ones to load instead. 0 if
        computing those is faster, too."""
        tier = load.tier
        limit = tier.settings.load_timeout_s * _IN_TIME
        sizes = range(1, len(load.keys) + 1)
        count = bisect_right(sizes, limit, key=lambda size: self._load_s(tier, size) or 0.0)
        part = load._replace(keys=load.keys[:count])
        return count if count and self._objection(part, self._costs(part), now) is None else 0

    def _load_s(self, tier: GuardedTier, num_blocks: int) -> float | None:
        """How long the tier takes for this many blocks, with its loads under way before them. None:
        not known."""
        return tier.load_speed.estimate.predict(num_blocks + tier.jobs.num_loading_in_time) or None

    def _is_trial_due(self, costs: _Costs) -> bool:
        load_s, compute_s, num_tokens, mean_position = costs
        if load_s is None or compute_s is None or not self._prefill.has_reports:
            return False
        is_measured = self._prefill.is_measured(num_tokens, mean_position)
        return self._trials.are_due(load_s, compute_s, is_measured=is_measured)

    def _costs(self, load: Load) -> _Costs:
        keys, tier, request = load.keys, load.tier, load.request
        load_s = self._load_s(tier, len(keys))
        num_tokens = self._groups.num_tokens(keys)
        if load_s is None or not num_tokens or not self._prefill.is_known:
            return _Costs(load_s, None, num_tokens, 0.0)
        wanted, num_below = request.wanted, num_tokens
        if wanted.num_blocks > len(keys):  # other tiers have the rest
            num_below = self._groups.num_tokens(
                [key for run in wanted.runs.values() for key in run]
            )
        mean_position = _earliest_start(request, num_below) + num_tokens / 2
        compute_s = self._prefill.seconds_for(num_tokens, mean_position)
        return _Costs(load_s, compute_s, num_tokens, mean_position)

    # --- what was learnt, from one engine to the next -------------------------------------------

    def begin(self, now: float) -> None:
        """Read the notes that an earlier engine left with the tiers. What it had saved up of a
        write budget is taken over, and the note is written anew without it."""
        self._keep_at = now + _KEPT_EVERY_S
        for tier in self._tiers:
            if not self._keeps_note(tier):
                continue
            note = tier.call("kept_note", tier.manager.kept_note, default=None)
            learnt = read_note(note, self._fingerprint)
            if self._prefill.may_learn and learnt.loads is not None:
                tier.load_speed.estimate.recall(learnt.loads)
            if self._prefill.may_learn and learnt.prefill is not None:
                self._prefill.recall(learnt.prefill)
            if learnt.saved_up:
                self._write(learnt._replace(saved_up=0.0), tier)
                tier.budget.inherit(learnt.saved_up, now)

        if self._tiers and not self._prefill.is_known:
            logger.info(
                "The cost of computing prompts is %s, so loading is not compared with computing.",
                "not known yet"
                if self._prefill.learns_from_stores
                else "configured as 0 (not known)",
            )

    def step_ended(self, now: float) -> None:
        """A scheduling step has ended."""
        self._prefill.step_ended(now)
        if now >= self._keep_at:
            self._keep_at = now + _KEPT_EVERY_S
            self.keep()

    def add_to(self, stats: OffloadingStats) -> None:
        """Move the counter into `stats`, and add the gauge."""
        if self.num_trials:
            stats.counters["kvtier_tiering_trial_requests"] = self.num_trials
            self.num_trials = 0
        stats.gauges["kvtier_tiering_prefill_tokens_per_s"] = self._prefill.tokens_per_s or 0.0

    def keep(self, now: float | None = None) -> None:
        """Give every tier that is in use a note for the next engine. The tier writes it on a thread
        of its own. `now`: given at shutdown, when no more is written to the tiers."""
        for tier in self._tiers:
            if not self._keeps_note(tier) or not tier.breaker.is_closed:
                continue
            learnt = Learnt(None, None)
            if self._prefill.may_learn:
                learnt = Learnt(tier.load_speed.estimate.sums, self._prefill.line)
            if now is not None:
                learnt = learnt._replace(saved_up=tier.budget.saved_up(now))
            if learnt != Learnt(None, None) or tier.budget.is_limited:
                self._write(learnt, tier)

    def _keeps_note(self, tier: GuardedTier) -> bool:
        """False if there is nothing to note: the cost of computing is configured, and the tier has
        no write budget."""
        return self._prefill.may_learn or tier.budget.is_limited

    def _write(self, learnt: Learnt, tier: GuardedTier) -> None:
        note = write_note(learnt, self._fingerprint)
        tier.call("keep_note", tier.manager.keep_note, note, default=None)


def _earliest_start(request: TierRequest, num_tokens: int) -> int:
    """The earliest position in the prompt at which the tokens that a request wants can begin.

    If the length of the prompt is known and the lookup has found everything, these tokens end where
    the prompt ends. Otherwise their position is not known, and the answer is 0.
    """
    num_prompt_tokens = request.context.num_prompt_tokens
    if num_prompt_tokens is None or request.wanted.ended:
        return 0
    return max(0, num_prompt_tokens - num_tokens)


class Trials:
    """Decides when to compute blocks although the rule prefers to load them. Scheduler thread only.

    A prompt that is loaded is not computed. So an estimate of the cost of computing that is too
    high would never be corrected. Therefore a few prompts are computed, and measured. The expected
    cost of a trial is saved up first: all trials together cost at most a thirty-second of the time
    of all loads.
    """

    def __init__(self) -> None:
        self._saved_s = 0.0

    def note_load(self, load_s: float) -> None:
        """A load has begun that is expected to take `load_s`."""
        self._saved_s += load_s * _TRIAL_SHARE

    def are_due(self, load_s: float, compute_s: float, *, is_measured: bool) -> bool:
        """True if blocks with these expected costs should be computed as a trial. `is_measured`:
        the cost of computing is not extrapolated."""
        cost = max(compute_s - load_s, load_s) * (_MEASURED_FACTOR if is_measured else 1)
        return load_s >= _LEAST_TRIED_S and self._saved_s >= cost

    def note_trial(self) -> None:
        """A trial has begun. Saving up starts again from zero."""
        self._saved_s = 0.0


class LoadSpeed:
    """How fast one tier loads. Loads for requests, probes at the start and explorations measure it.
    Scheduler thread only."""

    def __init__(self, load_timeout_s: float) -> None:
        self.estimate = TransferEstimate()
        self._exploration = Exploration(
            min(_LONGEST_EXPLORATION_S, load_timeout_s * _EXPLORATION_SHARE)
        )
        self._explore_at = 0.0
        self._probes: set[int] = set()
        """Jobs under way that measure the tier for the first time."""
        self._probed_at = -inf

    @property
    def is_being_probed(self) -> bool:
        """True while the tier is measured for the first time."""
        return bool(self._probes)

    @property
    def was_probed(self) -> bool:
        """True once the first measurement has begun."""
        return self._probed_at > -inf

    def began_probing_within(self, now: float, seconds: float) -> bool:
        """True if the first measurement has begun at most `seconds` ago."""
        return now - self._probed_at <= seconds

    def begin_probing(self, job_ids: Iterable[int], now: float) -> None:
        """These jobs measure the tier for the first time."""
        self._probes.update(job_ids)
        self._probed_at = now

    def may_explore(self, now: float) -> bool:
        """True if it is time to explore the tier."""
        return now >= self._explore_at

    def num_to_explore(self, most: int) -> int:
        """How many blocks to load to explore the tier, up to `most`. 0 while probes measure it."""
        return 0 if self._probes else self._exploration.num_blocks(most, self.estimate)

    def explored(self, now: float) -> None:
        """An exploration has begun."""
        self._explore_at = now + _EXPLORE_EVERY_S

    def note(self, job: Job, seconds: float, num_beside: int, now: float) -> None:
        """A load has ended with blocks. `num_beside`: blocks of other loads at the same time."""
        num_blocks = len(job.transfer.keys)
        self.estimate.note(num_blocks, seconds, num_beside)
        if job.is_awaited:
            self._exploration.begin_anew()
        else:
            self._exploration.note(num_blocks, seconds)
            if self.estimate.is_in_doubt:
                self._explore_at = now  # explore again at once, to confirm it

    def note_late(self, job: Job, seconds: float) -> None:
        """A load has missed its deadline."""
        self.estimate.note_late(len(job.transfer.keys) + job.num_beside, seconds)
        self._exploration.begin_anew()
        self.note_ended(job)

    def note_ended(self, job: Job) -> None:
        """A load has ended or is late. After the last probe, the tier counts as measured."""
        if job.transfer.job_id in self._probes:
            self._probes.remove(job.transfer.job_id)
            if not self._probes:
                self.estimate.trust()


class Exploration:
    """How many blocks to load to see whether a tier is still slower than computing. Scheduler
    thread only.

    With a few blocks, the time per block of a tier with high latency looks too high. So the number
    doubles after each exploration that took little time, even if the estimate is high.
    """

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the longest time that an exploration should take."""
        self._longest_s = longest_s
        self._num_blocks = _EXPLORED_BLOCKS

    def num_blocks(self, most: int, estimate: TransferEstimate) -> int:
        """The number for the next exploration, up to `most`. It is doubled while twice as many
        blocks are expected to take less than `_EXPLORED_S`."""
        count = self._num_blocks
        while count < most and (estimate.predict(2 * count) or _EXPLORED_S) < _EXPLORED_S:
            count *= 2
        return min(count, most)

    def note(self, num_blocks: int, seconds: float) -> None:
        """An exploration has ended."""
        if seconds > self._longest_s:
            self.begin_anew()
        elif 2 * seconds <= self._longest_s:
            self._num_blocks = max(self._num_blocks, 2 * num_blocks)

    def begin_anew(self) -> None:
        """Start again with a small number. Called when a request has loaded from the tier, or a
        load was late or an exploration too long."""
        self._num_blocks = _EXPLORED_BLOCKS
