"""The number of slots that a promotion may have."""

from __future__ import annotations

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from tests.tiering.driven_manager import STEP, DrivenManager, Memory, keys

REQUEST = ReqContext("r")


def primary_of(num_blocks: int) -> CPUPrimaryTierOffloadingManager:
    return CPUPrimaryTierOffloadingManager(num_blocks, Memory(num_blocks))  # type: ignore[arg-type]


def stored(primary: CPUPrimaryTierOffloadingManager, count: int, context: ReqContext) -> None:
    blocks = keys(*range(count))
    output = primary.prepare_store(blocks, context)
    assert output is not None
    assert output.keys_to_store == blocks
    primary.complete_store(blocks, context)


def test_three_quarters_may_be_on_their_way_up() -> None:
    primary = primary_of(100)
    assert primary.num_writable(100, 0, REQUEST) == 75
    assert primary.prepare_write(1, keys(*range(50)), REQUEST) is not None
    assert primary.num_writable(100, 0, REQUEST) == 25
    assert primary.num_writable(100, 20, REQUEST) == 5, "20 are kept for others"
    assert primary.prepare_write(2, keys(*range(100, 126)), REQUEST) is None


def test_slots_of_writes_that_were_given_up_count_until_they_end() -> None:
    primary = primary_of(100)
    primary.prepare_write(1, keys(*range(50)), REQUEST)
    primary.give_up_write(1)
    assert primary.num_writable(100, 0, REQUEST) == 25
    primary.complete_write(1, ())
    assert primary.num_writable(100, 0, REQUEST) == 75


def test_slots_that_are_written_during_a_reset_count_until_they_end() -> None:
    primary = primary_of(100)
    primary.prepare_write(1, keys(*range(50)), REQUEST)
    primary.reset_cache()
    assert primary.num_writable(100, 0, REQUEST) == 25
    primary.complete_write(1, keys(*range(50)))
    assert primary.num_writable(100, 0, REQUEST) == 75


def test_what_a_request_has_found_here_is_not_evicted_for_what_is_below() -> None:
    primary = primary_of(8)
    stored(primary, 6, ReqContext("stores"))
    for block in keys(*range(6)):
        primary.lookup(block, REQUEST)
    assert primary.num_writable(6, 0, REQUEST) == 2
    assert primary.num_writable(6, 0, ReqContext("other")) == 6


def test_promotions_leave_a_slot_for_the_store_that_ends_a_quarantine() -> None:
    primary = primary_of(8)
    assert primary.prepare_store(keys(1, 2), REQUEST) is not None
    primary.reset_cache()
    assert primary.slots.states()[SlotState.QUARANTINED] == 2
    writable = primary.num_writable(8, 0, ReqContext("promotes"))
    assert writable > 0
    assert primary.prepare_write(1, keys(*range(10, 10 + writable)), ReqContext("promotes"))
    primary.on_schedule_end(STEP)
    stores = ReqContext("stores")
    primary.on_new_request(stores)
    output = primary.prepare_store(keys(30, 31), stores)
    assert output is not None
    assert output.keys_to_store
    primary.complete_store(output.keys_to_store, stores)
    assert primary.slots.states()[SlotState.QUARANTINED] == 0


def test_tiers_get_no_slot_that_the_device_may_still_be_writing() -> None:
    """All slots were being written at a reset, so no later store can prove that they are not any
    more. After two steps the device may have them: its transfers wait for the earlier ones. A tier
    has to wait for the end of such a transfer."""
    primary = primary_of(8)
    everything = keys(*range(7))
    assert primary.prepare_store(everything, REQUEST) is not None
    assert primary.prepare_write(1, keys(7), ReqContext("before")) is None, "one slot is kept back"
    primary.reset_cache()
    primary.slots.allowance = 0  # as after stores and promotions that have taken all of it
    promotes, stores = ReqContext("promotes"), ReqContext("stores")
    for _ in range(3):
        primary.on_schedule_end(STEP)
    for _ in range(2):  # another reset proves nothing
        assert primary.slots.states()[SlotState.QUARANTINED] == 0
        assert primary.num_writable(8, 0, promotes) == 0
        assert primary.num_fitting(promotes) == 0
        assert primary.prepare_write(2, keys(10), promotes) is None
        primary.reset_cache()
    output = primary.prepare_store(keys(30), stores)
    assert output is not None
    primary.complete_store(output.keys_to_store, stores)
    assert primary.num_fitting(promotes) > 0
    assert primary.prepare_write(3, keys(10), promotes) is not None


def test_what_is_adopted_for_a_request_that_has_ended_can_be_evicted() -> None:
    rig = DrivenManager(num_blocks=8, load_timeout_s=2.0)
    blocks = keys(1, 2, 3)
    rig.keep_below(blocks)
    request = rig.begin("r")
    rig.look_up(blocks, request)
    rig.step(seconds=2.1)
    rig.look_up(blocks, request)
    rig.manager.on_request_finished(request)
    rig.step()
    rig.tiers[0].finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.READY] == 3
    later = keys(*range(10, 17))
    assert rig.store(later, rig.begin("stores")) == later
    assert rig.primary.slots.states()[SlotState.READY] == 8
