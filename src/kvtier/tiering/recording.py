"""What the orchestrator enters in the journal, from which `kvtier explain` answers. Scheduler
thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.hints import hints_of
from kvtier.observe.journal import Asked, Declined, Journal, TierLoad, What
from kvtier.tiering.health import BreakerState

if TYPE_CHECKING:
    from kvtier.base import OffloadingEvent, OffloadKey, ReqContext
    from kvtier.tiering.guard import Load, Verdict
    from kvtier.tiering.jobs import Job
    from kvtier.tiering.request import Step, TierRequest
    from kvtier.tiering.tier_calls import GuardedTier


logger = logging.getLogger(__name__)


class TierNotes:
    """Notes about one tier."""

    def __init__(self, journal: Journal, position: int, name: str) -> None:
        """`name`: of the tier, in the log."""
        self._journal = journal
        self._name = name
        self.place = position + 1
        """The number of the tier as a place of blocks."""

    def add(
        self, what: What, keys: Sequence[OffloadKey], context: ReqContext | None = None
    ) -> None:
        """This has happened to these blocks. `keys` must not be changed later."""
        self._journal.note(what, self.place, keys, context)

    def event(self, event: OffloadingEvent) -> None:
        """The tier has reported this."""
        if event.removed:
            self.add(What.REMOVED, event.keys)

    def breaker(self, level: int, text: str) -> None:
        """The tier is cut off, or in use again. Also logged."""
        logger.log(level, "%s: %s.", self._name, text)
        self._journal.note_breaker(self.place, False, level >= logging.WARNING, text)

    def store_breaker(self, level: int, text: str) -> None:
        """The same for its stores alone."""
        logger.log(level, "%s: stores: %s.", self._name, text)
        self._journal.note_breaker(self.place, True, level >= logging.WARNING, text)


class LookupNotes:
    """Notes about lookups: what each tier answered for the block that ended one."""

    def __init__(self, journal: Journal, tiers: Sequence[GuardedTier], step: Step) -> None:
        self._journal = journal
        self._tiers = tiers
        self._step = step

    def may_ask(self, request: TierRequest) -> bool:
        """A request begins to ask the tiers in this step. False if it has waited for too long."""
        may_wait = request.wait.may_go_on(self._step.now, self._step.number)
        record = self._journal.of(request.context)
        if record is not None:
            record.key = None
            if not may_wait and record.gave_up is None:
                record.gave_up = "wait", None, request.wait.longest_s
        return may_wait

    def answered(self, tier: GuardedTier, key: OffloadKey, request: TierRequest) -> None:
        """A tier has answered. If it did not know at first, count how long that took."""
        asked_at = request.wait.asking.pop((tier, key), None)
        if asked_at is not None:
            tier.last_call_s = self._step.now - asked_at
            tier.stats.count_late_answer(tier.last_call_s)

    def missed(self, key: OffloadKey, request: TierRequest) -> None:
        """No tier that was asked has this block."""
        record = self._journal.of(request.context)
        if record is None:
            return
        record.key, record.looked_up = key, self._journal.now()
        sources = request.sources
        if self._step.all_in_use and len(sources.open) == len(self._tiers) and not sources.failed:
            record.asked = [tier.last_call_s for tier in self._tiers]
        else:
            record.asked = [_part_of(tier, key, request) for tier in self._tiers]

    def late(self, tier: GuardedTier, request: TierRequest, seconds: float) -> None:
        """A tier has not answered in time."""
        record = self._journal.of(request.context)
        if record is not None:
            record.gave_up = "lookup", tier.notes.place, seconds

    def no_room(self, key: OffloadKey, request: TierRequest) -> None:
        """Host memory has no room for this block and those behind it."""
        record = self._journal.of(request.context)
        if record is not None and request.queued is None:
            record.no_room = key


def _part_of(tier: GuardedTier, key: OffloadKey, request: TierRequest) -> Asked:
    """What a tier has answered for a block that is a miss, and in which time; or why it was not
    asked."""
    sources = request.sources
    if tier in sources.open:
        if tier in sources.failed.get(key, ()):
            return Asked("lost")
        if tier.breaker.state is not BreakerState.OPEN:
            return Asked("no", tier.last_call_s)
    elif not hints_of(request.context).tenant.may_use(tier.label):
        return Asked("rule")
    elif tier in request.tiers and tier not in sources.all:
        is_allowed = request.context.load_tier_filter.allows(tier.medium, tier.locality)
        return Asked("switched off" if is_allowed else "hint")
    elif tier in sources.declined:
        return Asked("declined")
    elif request.wait.has_given_up:
        return Asked("gave up")
    return Asked("cut off")


def count_declined(load: Load, verdict: Verdict, journal: Journal) -> None:
    """A request computes these blocks, although a tier has them."""
    tier, objection = load.tier, verdict.objection
    assert objection is not None
    tier.stats.count("hit_blocks", len(load.keys))
    tier.stats.count(objection.value, len(load.keys))
    record = journal.of(load.request.context)
    if record is not None and load.keys:
        record.declined[tier.notes.place] = Declined(
            load.keys[0],
            len(load.keys),
            objection.name.lower(),
            verdict.load_s if verdict.whole_s is None else verdict.whole_s,
            verdict.compute_s,
            load.num_held_up,
            tier.settings.load_timeout_s,
        )


def note_load(
    job: Job,
    moved: Sequence[OffloadKey],
    readable: Sequence[OffloadKey],
    tier: GuardedTier,
    now: float,
    journal: Journal,
) -> None:
    """A load has ended or is late. `moved`: the blocks that the tier has loaded. `readable`: those
    of them that have become readable by this."""
    keys = job.transfer.keys
    tier.notes.add(What.PROMOTED, readable, job.transfer.req_context)
    if len(moved) < len(keys) and job.is_done:
        named = set(moved)
        tier.notes.add(What.LOST, [key for key in keys if key not in named])
    place, seconds = tier.notes.place, now - job.submitted
    load = TierLoad(place, len(keys), len(moved), seconds, job.is_late)
    for request in job.wanters:
        record = journal.of(request.context)
        if record is not None:
            record.note_load(load)
            if job.is_late:
                record.gave_up = "load", place, seconds
