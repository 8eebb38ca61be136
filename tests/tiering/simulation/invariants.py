"""Invariants after every call, after every step, and at the end."""

from __future__ import annotations

from collections import Counter

from kvtier.base import Medium, OffloadingEvent, OffloadingStats, OffloadKey
from kvtier.cpu.policies.base import BlockStatus, SlotState
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from kvtier.tiering.metrics import COUNTED, tier_label, tier_series
from tests.tiering.simulation.request import Request
from tests.tiering.simulation.tier import SimulatedTier
from tests.tiering.simulation.violation import Violation
from tests.tiering.simulation.world import World, name

_CALLS_THAT_EVICT_NOTHING = {"lookup", "lookup_prefix", "complete_load", "complete_store"}
_BLAMELESS = ("late_loads", "late_stores", "late_lookups", "errors", "violations")
"""Counters that stay 0 for a tier that does nothing wrong."""


class Inspector:
    """Compares the state of the manager with that of the engine, the device and the tiers."""

    def __init__(
        self,
        world: World,
        manager: TieringOffloadingManager,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: list[SimulatedTier],
    ) -> None:
        self._world = world
        self._manager = manager
        self._primary = primary
        self._tiers = tiers
        self._announced: set[OffloadKey] = set()
        self._breaker_states: dict[str, float] = {}

    def broken(self, what: str) -> Violation:
        """A violation, to be raised."""
        return self._world.witness.saw(what)

    def slots(self) -> list[BlockStatus]:
        """Every slot that was ever in use."""
        return self._primary.slots.used

    # --- after a call --------------------------------------------------------------------------

    def after_call(self, what: str) -> None:
        """Blocks that a tier has just loaded are readable, however late they are."""
        for tier in self._tiers:
            if tier.just_brought:
                brought, tier.just_brought = tier.just_brought, []
                if what in _CALLS_THAT_EVICT_NOTHING:
                    for key in brought:
                        if self._primary.slots.get(key) is None:
                            raise self.broken(
                                f"{tier.tier_type} loaded {name(key)}, but it is gone"
                            )
            if what == "on_schedule_end":
                tier.rules.begin_step()

    # --- after a step --------------------------------------------------------------------------

    def after_step(self) -> None:
        """Every readable byte is right, and every slot is accounted for."""
        world = self._world
        states = self._primary.slots.states()
        if states.total() != self._primary.num_blocks:
            raise self.broken(f"{states.total()} slots of {self._primary.num_blocks}: {states}")
        for block in self.slots():
            if block.is_ready and world.memory.row(block.block_id) != world.expected(block.key):
                raise self.broken(f"{block} is readable, but does not hold {name(block.key)}")
        world.uses.check(self.slots())
        if states[SlotState.QUARANTINED]:
            world.tally["steps with quarantined slots"] += 1

    def on_wait(self, request: Request) -> None:
        """A request has to wait. It must not wait for longer than tiers may take."""
        self._world.tally["waits"] += 1
        if any(self._world.being_stored[key] for key in request.all_keys()):
            request.waits_since = None  # it may be for the device
            return
        now = self._world.step_began
        if request.waits_since is None:
            request.waits_since, request.waited = self._world.time.now, 0.0
        elif now > request.waits_since:
            # A step counts for at most the longest timeout.
            request.waited += min(now - request.waits_since, self.longest_timeout())
            request.waits_since = now
        if request.waited > self.longest_wait():
            raise self.broken(
                f"{request.context.req_id} has waited for {request.waited:.3f} s, "
                f"at most {self.longest_wait():.3f} are allowed"
            )

    def longest_wait(self) -> float:
        """The longest time that a request may wait for tiers, in seconds."""
        settings = [tier.traits.settings for tier in self._tiers]
        return max((one.lookup_timeout_s for one in settings), default=0.0) + max(
            (one.load_timeout_s for one in settings), default=0.0
        )

    def longest_timeout(self) -> float:
        """The longest timeout of a tier, in seconds."""
        settings = [tier.traits.settings for tier in self._tiers]
        return max((max(one.lookup_timeout_s, one.load_timeout_s) for one in settings), default=0.0)

    def note_events(self, events: list[OffloadingEvent]) -> None:
        """The events of the primary tier match the readable blocks."""
        for event in events:
            if event.medium is not Medium.CPU:
                self._world.tally["events of tiers"] += len(event.keys)
                continue
            for key in event.keys:
                if (key in self._announced) is not event.removed:
                    raise self.broken(f"{name(key)} was announced twice, or not at all")
                (self._announced.remove if event.removed else self._announced.add)(key)
        readable = set(self._primary.resident_keys())
        if self._announced != readable:
            wrong = ", ".join(map(name, self._announced ^ readable))
            raise self.broken(f"events and readable blocks differ: {wrong}")

    def note_stats(self, stats: OffloadingStats) -> None:
        """Count what the manager has counted. A tier that does nothing wrong is never blamed."""
        for position, tier in enumerate(self._tiers):
            label = tier_label(position, tier.tier_type)
            series = {name: tier_series(label, name) for name in COUNTED}
            counts = {
                name: int(stats.counters[one])
                for name, one in series.items()
                if one in stats.counters
            }
            for what, n in counts.items():
                self._world.tally[f"counted: {what}"] += n
                tier.truth.counted[what] += n
            for breaker in ("breaker_state", "store_breaker_state"):
                state = stats.gauges[series[breaker]]
                self._note_breaker(series[breaker], state)
                if state and tier.is_blameless:
                    raise self.broken(f"{breaker} of {tier.tier_type}, a good tier, is {state}")
            blamed = {what: n for what, n in counts.items() if what in _BLAMELESS and n}
            if blamed and tier.is_blameless:
                raise self.broken(f"{tier.tier_type} did nothing wrong, but: {blamed}")
        for what in ("adopted", "promoted"):
            count = stats.counters.get(f"kvtier_cpu_{what}_blocks", 0)
            self._world.tally[f"counted: {what} into the primary"] += int(count)
        if stats.counters.get("kvtier_cpu_misuse"):
            raise self.broken("the manager has misused the primary tier")

    def _note_breaker(self, which: str, state: float) -> None:
        before = self._breaker_states.get(which, 0.0)
        self._breaker_states[which] = state
        if before != state:
            closed, open_ = 0.0, 2.0
            if state == open_:
                self._world.tally["breakers opened"] += 1
            elif state == closed:
                self._world.tally["breakers closed again"] += 1

    # --- when all is over ----------------------------------------------------------------------

    def check_all_returned(self) -> None:
        """All requests have ended and all tiers have reported: nothing is held any more."""
        if held := self._world.uses.in_use():
            raise self.broken(f"slots are still used by {held}")
        for block in self.slots():
            if block.state not in (SlotState.FREE, SlotState.READY) or block.ref_cnt > 0:
                raise self.broken(f"{block} is {block.state} after the end")
        gauges = self._primary.get_stats().gauges
        for what in ("writing_blocks", "pinned_blocks", "quarantined_slots"):
            if gauges[f"kvtier_cpu_{what}"]:
                raise self.broken(f"{gauges[f'kvtier_cpu_{what}']} {what} after the end")
        if +self._primary.tier_pins():
            raise self.broken(f"pins after the end: {+self._primary.tier_pins()}")
        for tier, guarded in zip(self._tiers, self._manager._tiers, strict=True):
            if tier.rules.num_open_requests() and not guarded.is_broken:
                raise self.broken(f"{tier.tier_type} was not notified that requests have finished")
        if left := self.leftovers():
            raise self.broken(f"remembered after the end: {left}")

    def check_metrics(self) -> None:
        """All requests have ended and all tiers have reported: what was counted has happened."""
        for tier in self._tiers:
            self._world.tally["compared with metrics"] += tier.truth.num_compared
            if wrong := tier.truth.differences():
                raise self.broken(f"metrics of {tier.tier_type}, and the truth: {wrong}")

    def check_only_the_dead_hold(self) -> None:
        """All requests have ended, and some tiers are dead: only slots of their jobs are held."""
        held: Counter[int] = Counter()
        for tier in self._tiers:
            for job in tier.unreported.values():
                held.update(job.use.slots)
        for block in self.slots():
            if block.state is SlotState.WRITING or block.ref_cnt > held[block.block_id]:
                raise self.broken(f"{block} is {block.state}, but no dead tier holds it")
            if block.state is SlotState.QUARANTINED and not held[block.block_id]:
                raise self.broken(f"{block} is quarantined, but no dead tier holds it")

    def leftovers(self) -> dict[str, int]:
        """The sizes of all tables of the manager that must be empty at the end."""
        manager, primary = self._manager, self._primary
        found = {
            **manager.open_work(),
            "unannounced requests": manager._requests.num_unannounced,
            "transfers": len(primary.transfers),
            "held slots": len(primary.slots.held),
            "promoting slots": primary.num_promoting,
            "requests in the primary": len(primary.uses),
        }
        for tier in manager._tiers:
            found[f"{tier.name}: jobs"] = len(tier.jobs)
            found[f"{tier.name}: queued loads"] = len(tier.jobs._loads)
            found[f"{tier.name}: queued stores"] = len(tier.jobs._stores)
            found[f"{tier.name}: pinned"] = tier.stores.num_pinned
            found[f"{tier.name}: loading"] = tier.jobs.num_loading
        return {what: n for what, n in found.items() if n}
