"""The orchestrator with recorded calls of stock vLLM, over simulated tiers."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvtier.base import ScheduleEndContext
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    GroupShape,
)
from tests import vllm_calls
from tests.tiering.simulation.faults import CHARACTERS
from tests.tiering.simulation.invariants import Inspector
from tests.tiering.simulation.memory import SlotUses, Truth, Use, plain_memory
from tests.tiering.simulation.tier import SimulatedTier
from tests.tiering.simulation.traits import TierTraits
from tests.tiering.simulation.violation import Witness
from tests.tiering.simulation.watched_manager import WatchedManager
from tests.tiering.simulation.world import World
from tests.vllm_calls import Recording
from tests.vllm_replay import Replay, Transfer

RECORDINGS = vllm_calls.recordings()
CAPACITIES = {"one slot": 1, "tiny": 5, "small": 24, "large": 512}
STEP_S = 0.02
SETTINGS = TierSettings(lookup_timeout_s=0.1, load_timeout_s=0.3, store_timeout_s=1.0)


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """The tiers misbehave in every way, so warnings are expected."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Rig:
    """A manager over simulated tiers, and the device."""

    def __init__(self, recording: Recording, num_blocks: int, characters: list[str]) -> None:
        witness = Witness()
        memory = plain_memory(num_blocks)
        uses, truth = SlotUses(num_blocks, witness), Truth(memory.row_bytes)
        self.world = World(random.Random(recording.scenario), memory, witness, uses, truth)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_blocks, memory.region, enable_events=True, strict=True
        )
        view = self.primary.get_kv_memoryview()
        self.tiers = [
            SimulatedTier(self.world, view, position, _traits(character))
            for position, character in enumerate(characters)
        ]
        # Group 2 of those with windows is the one with full attention.
        is_windowed = "sliding_window" in recording.scenario
        self.manager = WatchedManager(
            self.world,
            self.primary,
            self.tiers,
            settings=[SETTINGS for _ in self.tiers],
            groups={
                group: GroupShape(16, window_blocks=2 if is_windowed and group < 2 else None)
                for group in set(recording.key_groups)
            },
            new_fingerprint=self.world.fingerprint,
            prefill_tokens_per_s=0,
            clock=self.world.time,
        )
        for tier in self.tiers:
            tier.jobs_of_manager = self.manager._promotions.jobs
            tier.rules.max_pinned = num_blocks
        self.inspector = Inspector(self.world, self.manager, self.primary, self.tiers)
        self._uses: dict[Transfer, Use] = {}
        self._bygone: list[Use] = []

    # --- what a worker does --------------------------------------------------------------------

    def begin(self, transfer: Transfer) -> None:
        use = Use(f"device transfer of {transfer.request}", transfer.slots, transfer.is_store)
        self.world.uses.begin(use)
        self._uses[transfer] = use

    def end(self, transfer: Transfer) -> None:
        world = self.world
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            if transfer.is_store:
                world.memory.write_half(slot, world.expected(key), second=False)
                world.memory.write_half(slot, world.expected(key), second=True)
            assert world.memory.row(slot) == world.expected(key)
        world.uses.end(self._uses.pop(transfer))

    def end_step(self) -> None:
        for use in self._bygone:
            self.world.uses.end(use)
        self._bygone.clear()
        self.world.step += 1
        for tier in self.tiers:
            tier.rules.begin_step()
            tier.change_weather()
        self.inspector.after_step()
        self.world.time.advance(STEP_S)
        self.world.witness.testify()

    def reset(self) -> None:
        self._bygone += self._uses.values()
        self._uses.clear()
        self.world.version += 1
        self.world.num_resets += 1

    # --- the end -------------------------------------------------------------------------------

    def settle(self) -> None:
        """All tiers recover, and report everything."""
        for tier in self.tiers:
            tier.recover()
        for _ in range(100):
            self.manager.on_schedule_end(ScheduleEndContext())
            self.end_step()
            if not any(tier.unreported for tier in self.tiers):
                return
        pytest.fail("tiers have reported, and were not heard")

    def close(self) -> None:
        self.world.memory.release()
        self.manager.shutdown()
        self.world.witness.testify()


def _traits(character: str) -> TierTraits:
    return TierTraits(
        character=character,
        faults=CHARACTERS[character],
        settings=SETTINGS,
        capacity=1000,
        latency=0.1,
        answers_at_once=character != "slow",
        has_own_batch=character == "sound",
    )


def _replay(scenario: str, num_blocks: int, characters: list[str]) -> tuple[Rig, Counter[str]]:
    recording = vllm_calls.load(RECORDINGS[scenario])
    rig = Rig(recording, num_blocks, characters)
    answers = Replay(recording, rig.manager, worker=rig).run().answers
    rig.settle()
    return rig, answers


@pytest.mark.parametrize(
    "characters", [["sound"], ["slow", "failing"], ["everything"] * 3], ids=str
)
@pytest.mark.parametrize("num_blocks", CAPACITIES.values(), ids=CAPACITIES)
@pytest.mark.parametrize("scenario", RECORDINGS)
def test_holds_under_vllms_calls(scenario: str, num_blocks: int, characters: list[str]) -> None:
    rig, answers = _replay(scenario, num_blocks, characters)

    assert answers["stores"] > 0
    assert rig.primary.misuse.total == 0
    states = rig.primary.slots.states()
    assert states[SlotState.WRITING] == 0
    assert states.total() == num_blocks
    assert not rig.primary.tier_pins()
    assert not any(rig.manager.open_work().values())
    rig.close()


def test_blocks_come_back_from_below() -> None:
    """Most recorded hits are hits, also in a primary tier that is too small for all of them."""
    num_loads: Counter[str] = Counter()
    for scenario in RECORDINGS:
        for characters in ([], ["sound"]):
            rig, answers = _replay(scenario, 24, characters)
            num_loads[" ".join(characters)] += answers["loads"]
            rig.close()
    assert num_loads["sound"] > num_loads[""]
