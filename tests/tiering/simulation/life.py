"""One life: an engine, its tiers and their faults, all decided by one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.base import Locality
from kvtier.config.options import WritePolicyName
from kvtier.tiering.health import BreakerSettings, TierSettings
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager
from tests.tiering.simulation.calls import WatchedCalls
from tests.tiering.simulation.engine import Engine, Habits
from tests.tiering.simulation.faults import CHARACTERS
from tests.tiering.simulation.invariants import Inspector
from tests.tiering.simulation.memory import Memory, SlotUses, Truth, plain_memory
from tests.tiering.simulation.request import Group, PromptTree
from tests.tiering.simulation.tier import SimulatedStorage, SimulatedTier
from tests.tiering.simulation.traits import TierTraits
from tests.tiering.simulation.violation import Violation, Witness
from tests.tiering.simulation.watched_manager import WatchedManager
from tests.tiering.simulation.world import World

_PATIENCE = 400
"""Steps within which everything that ends at all must have ended."""


@dataclass(slots=True)
class Outcome:
    """The result of a life."""

    seed: int
    num_steps: int
    seconds: float
    """Seconds of virtual time."""
    digest: int
    tally: Counter[str]
    violation: Violation | None
    trace: list[str]


def live(
    seed: int, keeps_trace: bool = False, write: WritePolicyName = WritePolicyName.THROUGH
) -> Outcome:
    """Run one life. The same seed and write policy give the same life."""
    life = Life(seed, keeps_trace, write=write)
    violation = None
    try:
        life.run()
    except Violation as seen:
        violation = seen
    except Exception as error:
        error.add_note(f"in the simulation itself, with seed {seed}")
        raise
    world = life.world
    return Outcome(
        seed, world.step, world.time.now, world.digest, world.tally, violation, world.trace
    )


class Life:
    """All parts of one life."""

    def __init__(
        self,
        seed: int,
        keeps_trace: bool = False,
        make_memory: Callable[[int], Memory] = plain_memory,
        write: WritePolicyName = WritePolicyName.THROUGH,
    ) -> None:
        """`make_memory` makes the given number of slots. `write`: the policy of all tiers."""
        rng = random.Random(seed)
        self._write = write
        num_blocks = rng.choice((rng.randint(1, 4), 6, 8, 12, 16, 20, 24, 32))
        witness = Witness()
        memory = make_memory(num_blocks)
        uses, truth = SlotUses(num_blocks, witness), Truth(memory.row_bytes)
        self.world = world = World(rng, memory, witness, uses, truth, keeps_trace=keeps_trace)
        world.resets_change_weights = rng.random() < 0.85
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks,
            memory.region,
            cache_policy=rng.choice(("lru", "arc")),
            enable_events=True,
            store_threshold=rng.choice((1,) * 9 + (2,)),
            strict=True,
        )
        self._groups = groups = _groups(rng)
        world.scale = 10 ** rng.uniform(-2, 0)
        self.tiers = [self._tier(position) for position in range(rng.choice((1, 1, 2, 2, 3)))]
        self.manager = WatchedManager(
            self.world,
            self.primary,
            self.tiers,
            settings=[tier.traits.settings for tier in self.tiers],
            groups={group.index: group.shape() for group in groups},
            new_fingerprint=world.fingerprint if world.resets_change_weights else None,
            prefill_tokens_per_s=rng.choice((0.0,) * 8 + (None, 10 ** rng.uniform(0, 4))),
            shutdown_timeout_s=5.0,
            clock=world.time,
        )
        for tier, guarded in zip(self.tiers, self.manager._tiers, strict=True):
            tier.rules.breaker = guarded.breaker
            share = int(tier.traits.settings.max_pinned_share * num_blocks)
            least = max(1, min(32, num_blocks - self.primary.reserve))
            tier.rules.max_pinned = max(share, least)
            tier.jobs_of_manager = self.manager._promotions.jobs
            tier.neighbours = [other for other in self.tiers if other is not tier]
        self.inspector = Inspector(world, self.manager, self.primary, self.tiers)
        self.calls = WatchedCalls(world, self.manager, self.inspector.after_call)
        num_nodes = max(4, int(num_blocks * 10 ** rng.uniform(0.0, 0.8)))
        self._prompts = PromptTree(rng, num_nodes, rng.random())
        self.engine = Engine(
            world,
            self.calls,
            _habits(rng, groups, world.scale),
            self._prompts,
            self.inspector.on_wait,
        )
        world.note(
            f"seed {seed}: {num_blocks} slots, groups {groups}, "
            f"{[(tier.traits.character, tier.traits.settings) for tier in self.tiers]}"
        )

    def _tier(self, position: int) -> SimulatedTier:
        rng, scale = self.world.rng, self.world.scale
        names = list(CHARACTERS)
        character = rng.choice(names + ["sound"] * 4 + ["black hole"])
        is_quick = character in ("sound", "evicting")
        traits = TierTraits(
            character=character,
            faults=CHARACTERS[character],
            settings=TierSettings(
                lookup_timeout_s=scale * 10 ** rng.uniform(-1, 0.5),
                load_timeout_s=scale * 10 ** rng.uniform(-0.5, 1),
                store_timeout_s=scale * 10 ** rng.uniform(0, 1.5),
                max_pinned_share=rng.choice((0.1, 0.25, 0.5, 1.0)),
                enable_kv_events=rng.random() < 0.3,
                write_policy=self._write,
                breaker=BreakerSettings(
                    first_pause_s=scale * rng.choice((0.5, 3.0)), longest_pause_s=scale * 20
                ),
            ),
            capacity=rng.choice((0, 4, 20) + (1000,) * 9),
            latency=rng.choice((0.01, 0.3)) if is_quick else rng.choice((0.01, 0.3, 0.9)),
            answers_at_once=rng.random() < 0.5,
            is_shared=rng.random() < 0.8,
            wants_whole_requests=rng.random() < 0.2,
            has_own_batch=rng.random() < 0.5,
            remembers_answers=rng.random() < 0.5,
            reports_lazily=rng.random() < 0.3,
            locality=rng.choice((None, Locality.LOCAL, Locality.REMOTE)),
        )
        cls = rng.choice((SimulatedTier, SimulatedStorage))
        return cls(self.world, self.primary.get_kv_memoryview(), position, traits)

    # --- from the beginning to the end ---------------------------------------------------------

    def run(self) -> None:
        """Run the life."""
        rng = self.world.rng
        self.share(12)
        num_resets = 0
        for _ in range(rng.choice((15, 30, 60))):
            was_reset = self.world.num_resets != num_resets
            num_resets = self.world.num_resets
            if was_reset or rng.random() < 0.1:
                self.share(12 if was_reset else 1)
            self.engine.arrive()
            if self.engine.is_busy or self.calls.has_pending_work():
                self.step()
            else:
                self.engine.idle(10 ** rng.uniform(-3, 1))
        ending = rng.choice((self.end_recovered, self.end_with_the_dead, self.end_abruptly))
        ending()
        self.shut_down()

    def share(self, most: int) -> None:
        """Other engines store up to `most` prompts in shared tiers."""
        rng = self.world.rng
        for tier in self.tiers:
            if tier.traits.is_shared:
                for _ in range(rng.randint(0, most)):
                    chunks = self._prompts.prompt(rng, num_own=0)
                    for group in self._groups:
                        for key in group.keys(chunks):
                            tier.backing.receive(key)

    def step(self) -> None:
        """One step of the engine, and all checks."""
        self.engine.step()
        for tier in self.tiers:
            tier.change_weather()
        self.inspector.after_step()
        if self.world.happens(0.5):
            self.inspector.note_events(list(self.calls.take_events()))
            self.inspector.note_stats(self.calls.get_stats())

    def wind_down(self) -> None:
        """No further requests arrive, and all requests end, whatever the tiers do."""
        self.world.note("wind down")
        waits = self.inspector.longest_wait()
        self.engine.shortest_step = waits / 8
        for number in range(_PATIENCE):
            if not self.engine.is_busy:
                self.engine.is_at_peace = False
                return
            self.engine.is_at_peace = number > _PATIENCE // 8
            self.step()
        raise self.inspector.broken(f"{len(self.engine.requests)} requests never end")

    def end_abruptly(self) -> None:
        """The engine is shut down while requests and jobs are under way."""
        self.world.tally["abrupt ends"] += 1

    def end_with_the_dead(self) -> None:
        """Some tiers never recover, and no request waits for them."""
        self.wind_down()
        for tier in self.tiers:
            if self.world.happens(0.6):
                tier.die()
                self.world.tally["dead tiers"] += 1
        patience = max(
            max(tier.traits.settings.store_timeout_s, tier.traits.settings.load_timeout_s)
            for tier in self.tiers
        )
        self.engine.shortest_step = patience / 8
        self._step_until_idle(patience)
        self._lift_quarantine()
        self._step_until_idle(patience)
        self.step()  # what is late is given up when a step begins
        self.inspector.check_only_the_dead_hold()

    def _step_until_idle(self, patience: float) -> None:
        world = self.world
        began = world.time.now
        while self.calls.has_pending_work():
            # While stores end, those behind them are not late.
            if world.time.now > max(began, world.last_submission, world.last_report) + patience:
                raise self.inspector.broken("there is pending work that nobody will end")
            self.step()

    def end_recovered(self) -> None:
        """All tiers recover and report everything: nothing is left."""
        self.wind_down()
        for tier in self.tiers:
            tier.recover()
        self._take_in_everything()
        self._lift_quarantine()
        self._take_in_everything()
        self.inspector.note_events(list(self.calls.take_events()))
        self.inspector.note_stats(self.calls.get_stats())
        self.inspector.check_all_returned()
        self.inspector.check_metrics()

    def _take_in_everything(self) -> None:
        for _ in range(_PATIENCE):
            was_idle = not any(tier.unreported for tier in self.tiers)
            self.step()
            # A step may begin stores of blocks that are about to leave host memory.
            if was_idle and not any(tier.unreported for tier in self.tiers):
                return
        raise self.inspector.broken("jobs have ended, but their results are not taken in")

    def _lift_quarantine(self) -> None:
        """After a reset, slots that the device used are free only when a later transfer ends."""
        self.engine.is_at_peace = True
        self.engine.arrive_twice(num_own_chunks=2)
        for _ in range(_PATIENCE):
            if not self.engine.is_busy:
                break
            self.step()
        else:
            raise self.inspector.broken("the last request never ends")

    def shut_down(self) -> None:
        """Shut down; no tier can reach the slots afterwards."""
        self.engine.device.stop()
        self.world.memory.release()
        self.calls.shutdown()
        for tier in self.tiers:
            try:
                tier.rows[0]
            except ValueError:
                continue
            raise self.inspector.broken(f"{tier.tier_type} can read slots after the end")
        self.world.witness.testify()


def _groups(rng: random.Random) -> list[Group]:
    are_known = rng.random() < 0.85
    groups = [Group(0, is_known=are_known)]
    if rng.random() < 0.35:
        size, window = rng.choice((1, 1, 2)), rng.choice((1, 2, 3))
        groups.append(Group(1, size, window, is_known=are_known))
    return groups


def _habits(rng: random.Random, groups: list[Group], scale: float) -> Habits:
    resets = rng.choice((0.0, 0.02, 0.1))
    return Habits(
        groups=groups,
        max_requests=rng.choice((2, 4, 8)),
        arrivals=rng.choice((0.3, 0.6, 0.9)),
        num_own_chunks=rng.choice((0, 1, 4)),
        chunks_per_step=rng.choice((1, 4, 50)),
        step_scale=scale * 10 ** rng.uniform(-2, 0.5),
        asks_by_prefix=rng.random() < 0.5,
        offers_again_after_preemption=rng.random() < 0.5,
        preemptions=rng.choice((0.0, 0.02, 0.2)),
        aborts=rng.choice((0.0, 0.01, 0.1)),
        resets=resets,
        filters=rng.choice((0.0, 0.2)),
        reused_ids=rng.choice((0.0, 0.3)),
        # The manager cannot know that blocks of an unannounced request are from before a reset.
        unannounced=0.0 if resets else rng.choice((0.0, 0.1)),
        queued=rng.choice((0.0, 0.5, 1.0)),
    )
