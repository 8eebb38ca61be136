"""What must hold after every call, after every step, and when all is over."""

from __future__ import annotations

from collections import Counter

from kvtier.base import Medium, OffloadingEvent, OffloadingStats, OffloadKey
from kvtier.cpu.policies.base import BlockStatus, SlotState
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from tests.tiering.simulation.request import Request
from tests.tiering.simulation.tier import SimulatedTier
from tests.tiering.simulation.violation import Violation
from tests.tiering.simulation.world import World, name

_CALLS_THAT_EVICT_NOTHING = {"lookup", "lookup_prefix", "complete_load", "complete_store"}
_BLAMELESS = ("late_loads", "late_stores", "late_lookups", "errors", "violations")
"""What is never counted for a tier that does nothing wrong."""


class Inspector:
    """Looks into the manager and compares it with what the rest of the world knows."""

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
        return self._primary._slots

    # --- after a call --------------------------------------------------------------------------

    def after_call(self, what: str) -> None:
        """What a tier has just brought is there, however late it came."""
        for tier in self._tiers:
            if tier.just_brought:
                brought, tier.just_brought = tier.just_brought, []
                if what in _CALLS_THAT_EVICT_NOTHING:
                    for key in brought:
                        if self._primary._get(key) is None:
                            raise self.broken(f"{tier.tier_type} brought {name(key)} in vain")
            if what == "on_schedule_end":
                tier.rules.begin_step()

    # --- after a step --------------------------------------------------------------------------

    def after_step(self) -> None:
        """Every readable byte is right, and every slot is accounted for."""
        world = self._world
        states = self._primary.slot_states()
        if states.total() != self._primary.num_blocks:
            raise self.broken(f"{states.total()} slots of {self._primary.num_blocks}: {states}")
        for block in self.slots():
            if block.is_ready and world.memory.row(block.block_id) != world.expected(block.key):
                raise self.broken(f"{block} is readable, but does not hold {name(block.key)}")
        world.uses.check(self.slots())
        if states[SlotState.QUARANTINED]:
            world.tally["steps with quarantined slots"] += 1

    def on_wait(self, request: Request) -> None:
        """A request was told to wait. Not for longer than tiers may take."""
        self._world.tally["waits"] += 1
        if any(self._world.being_stored[key] for key in request.all_keys()):
            request.waits_since = None  # it may be for the device
            return
        now = self._world.step_began
        if request.waits_since is None:
            request.waits_since, request.waited = self._world.time.now, 0.0
        elif now > request.waits_since:
            # Of a step that is longer than a tier may take, that much counts.
            request.waited += min(now - request.waits_since, self.longest_timeout())
            request.waits_since = now
        if request.waited > self.longest_wait():
            raise self.broken(
                f"{request.context.req_id} has waited for {request.waited:.3f} s, "
                f"at most {self.longest_wait():.3f} are allowed"
            )

    def longest_wait(self) -> float:
        """How long tiers may keep a request waiting, in seconds."""
        settings = [tier.traits.settings for tier in self._tiers]
        return max((one.lookup_timeout_s for one in settings), default=0.0) + max(
            (one.load_timeout_s for one in settings), default=0.0
        )

    def longest_timeout(self) -> float:
        """How long a tier may take for one thing, in seconds."""
        settings = [tier.traits.settings for tier in self._tiers]
        return max((max(one.lookup_timeout_s, one.load_timeout_s) for one in settings), default=0.0)

    def note_events(self, events: list[OffloadingEvent]) -> None:
        """Events of the primary tier lead to exactly what can be read."""
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
            prefix = f"kvtier_tier_{position}_{tier.tier_type}_"
            counts = {
                key.removeprefix(prefix): int(value)
                for key, value in stats.counters.items()
                if key.startswith(prefix)
            }
            for what, n in counts.items():
                self._world.tally[f"counted: {what}"] += n
            for breaker in ("breaker_state", "store_breaker_state"):
                state = stats.gauges[prefix + breaker]
                self._note_breaker(prefix + breaker, state)
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
        for tier, link in zip(self._tiers, self._manager._links, strict=True):
            if tier.rules.num_open_requests() and not link.is_broken:
                raise self.broken(f"{tier.tier_type} was not told that requests have finished")
        if left := self.leftovers():
            raise self.broken(f"remembered after the end: {left}")

    def check_only_the_dead_hold(self) -> None:
        """All requests have ended, and some tiers never will: only their slots are held."""
        held: Counter[int] = Counter()
        for tier in self._tiers:
            for job in tier.unreported.values():
                held.update(job.use.slots)
        for block in self.slots():
            if block.state is SlotState.WRITING or block.ref_cnt > held[block.block_id]:
                raise self.broken(f"{block} is {block.state}, but nobody dead holds it")
            if block.state is SlotState.QUARANTINED and not held[block.block_id]:
                raise self.broken(f"{block} is quarantined, but nobody dead holds it")

    def leftovers(self) -> dict[str, int]:
        """Everything inside the manager that should be empty when nothing goes on."""
        manager, primary = self._manager, self._primary
        found = {
            **manager.open_work(),
            "unannounced requests": len(manager._unannounced),
            "transfers": len(primary._transfers),
            "held slots": len(primary._held),
            "promoting slots": primary._num_promoting,
            "requests in the primary": len(primary._uses),
        }
        for link in manager._links:
            found[f"{link.name}: jobs"] = len(link._jobs)
            found[f"{link.name}: queued loads"] = len(link._loads)
            found[f"{link.name}: queued stores"] = len(link._stores)
            found[f"{link.name}: pinned"] = link.num_pinned
            found[f"{link.name}: loading"] = link.num_loading
        return {what: n for what, n in found.items() if n}
