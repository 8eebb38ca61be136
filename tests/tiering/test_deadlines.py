"""No request waits past a deadline, and late jobs do no harm."""

from __future__ import annotations

import logging

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.base import JobResult
from kvtier.tiering.health import BreakerSettings
from tests.tiering.driven_manager import DrivenManager, key, keys, payload


def with_late_promotion(num_blocks: int = 8) -> DrivenManager:
    """Request "r" wanted blocks 1 and 2, which are late."""
    rig = DrivenManager(num_blocks, load_timeout_s=2.0)
    rig.keep_below(keys(1, 2))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2), request) == "PP"
    rig.step(seconds=1.9)
    assert rig.look_up(keys(1, 2), request) == "PP"
    rig.step(seconds=0.2)
    assert rig.look_up(keys(1, 2), request) == "MM"
    rig.step()
    return rig


def test_a_late_promotion_is_a_miss_and_its_slots_are_quarantined() -> None:
    rig = with_late_promotion()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 2
    assert not rig.manager.has_pending_work()
    assert rig.stat("late_loads") == 1


def test_quarantined_slots_are_given_to_nobody() -> None:
    rig = with_late_promotion(num_blocks=5)
    (job,) = rig.tiers[0].loads()
    other = rig.begin("other")
    assert rig.store(keys(11, 12, 13), other) == keys(11, 12)
    taken = {block.block_id for block in rig.primary.slots.used if block.is_ready}
    assert not taken & set(job.block_ids.tolist())


def test_what_arrives_late_is_adopted() -> None:
    rig = with_late_promotion()
    rig.tiers[0].finish()
    request = rig.begin("next")
    assert rig.look_up(keys(1, 2), request) == "HH"
    rig.load(keys(1, 2), request)
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 0
    assert rig.stat("adopted_blocks") == 2


def test_what_arrives_late_and_broken_is_not_adopted() -> None:
    rig = with_late_promotion()
    rig.tiers[0].finish(fail=keys(1))
    assert rig.look_up(keys(2), rig.begin("next")) == "H"
    assert rig.primary.slots.states()[SlotState.FREE] == 7


def test_what_someone_stored_meanwhile_is_not_replaced() -> None:
    rig = with_late_promotion()
    other = rig.begin("other")
    rig.store(keys(1), other)
    tier = rig.tiers[0]
    tier.finish(tier.loads()[0])
    rig.step()
    assert rig.stat("adopted_blocks") == 1
    tier.finish()
    rig.step()
    rig.load(keys(1, 2), other)
    assert rig.primary.slots.states()[SlotState.READY] == 2
    assert rig.primary.slots.states()[SlotState.FREE] == 6


def test_what_arrives_after_a_reset_is_not_adopted() -> None:
    rig = with_late_promotion()
    rig.manager.reset_cache()
    rig.tiers[0].finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.FREE] == 8


def test_a_long_engine_step_makes_nobody_late() -> None:
    rig = DrivenManager(load_timeout_s=2.0, store_timeout_s=2.0)
    rig.keep_below(keys(1, 2))
    request = rig.begin("r")
    rig.store(keys(5), request)
    rig.look_up(keys(1, 2), request)
    rig.step(seconds=60.0)
    rig.tiers[0].finish(transfer_time=0.01)  # it did its work while the engine was busy
    assert rig.look_up(keys(1, 2), request) == "HH"
    assert rig.stat("late_loads") == 0
    assert rig.stat("breaker_state") == 0


def test_an_unanswered_lookup_is_a_miss_after_its_deadline() -> None:
    rig = DrivenManager(lookup_timeout_s=0.5)
    rig.tiers[0].unknown.update(keys(1))
    request = rig.begin("r")
    answers = ""
    for _ in range(8):
        answers += rig.look_up(keys(1), request)
        rig.step(seconds=0.09)
    assert answers == "RRRRRRMM"
    assert rig.stat("late_lookups") == 1


def test_answers_that_come_in_time_for_each_block_do_not_add_up() -> None:
    rig = DrivenManager(num_blocks=32, lookup_timeout_s=0.5, load_timeout_s=5.0)
    blocks = keys(*range(10))
    rig.keep_below(blocks)
    tier = rig.tiers[0]
    tier.unknown.update(blocks)
    request = rig.begin("r")
    for block in blocks:
        rig.look_up(blocks, request)
        rig.step(seconds=0.3 if block in blocks[:1] else 0.01)
        tier.unknown.discard(block)
    assert rig.look_up(blocks, request) == "P" * 10
    assert rig.stat("late_lookups") == 0


@pytest.mark.parametrize("batched", [False, True])
def test_one_that_finds_no_slot_waits_no_longer_than_it_may(batched: bool) -> None:
    rig = DrivenManager(num_blocks=4, lookup_timeout_s=0.5, load_timeout_s=1.5)
    rig.keep_below(keys(1, 2))
    assert rig.manager.prepare_store(keys(11, 12, 13), rig.begin("writer")) is not None
    request = rig.begin("r")
    waited = 0.0
    while waited < 60:
        if batched:
            is_waiting = not rig.manager.lookup_prefix(keys(1, 2), request).is_final
        else:
            is_waiting = "P" in rig.look_up(keys(1, 2), request)
        if not is_waiting:
            break
        rig.step(seconds=0.25)
        waited += 0.25
    assert waited == 2.25
    assert rig.tiers[0].loads() == []


def test_a_request_that_comes_back_much_later_may_wait_again() -> None:
    rig = with_late_promotion()
    for _ in range(3):
        rig.step(seconds=60.0)
    rig.keep_below(keys(3))
    assert rig.look_up(keys(3), rig.begin("r")) == "P"


def test_a_preempted_request_may_wait_again() -> None:
    rig = with_late_promotion()
    request = rig.manager._requests.of(ReqContext("r")).context
    rig.keep_below(keys(3))
    assert rig.look_up(keys(3), request) == "M"
    rig.step(preempted_req_ids=["r"])
    assert rig.look_up(keys(3), request) == "P"


def test_pending_work_is_work_that_can_still_end() -> None:
    rig = DrivenManager(store_timeout_s=3.0, load_timeout_s=3.0)
    rig.keep_below(keys(9))
    request = rig.begin("r")
    assert not rig.manager.has_pending_work()
    rig.store(keys(1), request)
    assert rig.manager.has_pending_work()
    rig.tiers[0].finish()
    rig.step()
    assert not rig.manager.has_pending_work()
    rig.look_up(keys(9), request)
    assert rig.manager.has_pending_work()
    rig.step()
    assert rig.manager.has_pending_work()
    rig.clock.now += 3.1
    assert not rig.manager.has_pending_work()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 1, "it was found to be late"


def test_an_engine_is_not_kept_stepping_for_stores_that_nobody_waits_for() -> None:
    """A healthy tier that takes hours for them."""
    rig = DrivenManager(num_blocks=128, max_pinned_share=0.25, store_timeout_s=3600.0)
    request = rig.begin("r")
    rig.store(keys(*range(100)), request)
    rig.manager.on_request_finished(request)
    start = rig.clock.now
    while rig.manager.has_pending_work():
        rig.step()
    assert 0.5 < rig.clock.now - start <= 1.01
    assert rig.manager.is_moving_blocks()
    rig.clock.now += 60.0
    (tier,) = rig.tiers
    tier.finish()
    assert not rig.manager.has_pending_work()
    later = rig.begin("later")
    assert rig.look_up(keys(0), later) == "H", "what has ended meanwhile is taken in here"
    assert rig.manager.has_pending_work(), "and what has waited is sent"
    assert [key for job in tier.waiting for key in job.keys] == keys(*range(32, 64))


def test_an_engine_is_kept_stepping_for_what_a_request_waits_for() -> None:
    rig = DrivenManager(load_timeout_s=60.0)
    rig.keep_below(keys(1))
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step(seconds=30.0)
    assert rig.manager.has_pending_work()
    rig.manager.on_request_finished(request)
    rig.step(seconds=2.0)
    assert not rig.manager.has_pending_work(), "it does not wait any more"


def test_an_engine_is_not_kept_stepping_for_a_tier_that_always_has_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "has_pending_work", lambda: True)
    rig.begin("r")
    assert rig.manager.has_pending_work()
    rig.step(seconds=1.1)
    assert not rig.manager.has_pending_work()


def test_a_late_store_keeps_its_slots_but_not_the_engine() -> None:
    rig = DrivenManager(num_blocks=4, store_timeout_s=1.0)
    rig.store(keys(1, 2), rig.begin("r"))
    rig.step(seconds=2.0)
    rig.step()
    assert rig.stat("late_stores") == 1
    assert rig.stat("pinned_blocks") == 2
    assert not rig.manager.has_pending_work()
    request = rig.begin("next")
    assert rig.look_up(keys(1, 2), request) == "HH", "the blocks themselves are fine"
    rig.load(keys(1, 2), request)
    rig.step()
    rig.tiers[0].finish()
    rig.step()
    assert rig.stat("pinned_blocks") == 0


# --- the breaker --------------------------------------------------------------------------------


def time_out(rig: DrivenManager, number: int) -> None:
    """One promotion that never ends."""
    rig.keep_below(keys(number))
    request = rig.begin(f"waits for {number}")
    rig.look_up(keys(number), request)
    rig.step(seconds=2.1)
    rig.look_up(keys(number), request)
    rig.manager.on_request_finished(request)
    rig.step()


def with_open_breaker() -> DrivenManager:
    rig = DrivenManager(
        num_blocks=16,
        load_timeout_s=2.0,
        breaker=BreakerSettings(max_timeouts_in_a_row=2, first_pause_s=5.0),
    )
    time_out(rig, 1)
    assert rig.stat("breaker_state") == 0
    time_out(rig, 2)
    assert rig.stat("breaker_state") == 2
    return rig


def test_while_open_a_tier_is_not_used() -> None:
    rig = with_open_breaker()
    tier = rig.tiers[0]
    rig.keep_below(keys(3))
    tier.calls.clear()
    request = rig.begin("r")
    assert rig.look_up(keys(3), request) == "M"
    rig.store(keys(4), request)
    rig.manager.touch(keys(4), request)
    rig.step()
    rig.manager.on_request_finished(request)
    assert tier.calls == []
    assert tier.touched == []


def test_stores_shed_by_an_open_breaker_are_counted() -> None:
    rig = DrivenManager(
        num_blocks=16, breaker=BreakerSettings(max_timeouts_in_a_row=1), load_timeout_s=2.0
    )
    request = rig.begin("r")
    time_out(rig, 1)
    rig.store(keys(4, 5), request)
    assert rig.stat("shed_blocks") == 2


def test_after_the_pause_one_probe_decides() -> None:
    rig = with_open_breaker()
    tier = rig.tiers[0]
    rig.keep_below(keys(3, 4))
    rig.clock.now += 5.0
    rig.step()
    prober, other = rig.begin("prober"), rig.begin("other")
    assert rig.look_up(keys(3), prober) == "P"
    assert rig.look_up(keys(4), other) == "M"
    rig.step()
    before = len(tier.loads())
    assert rig.stat("breaker_state") == 1
    assert rig.look_up(keys(4), rig.begin("third")) == "M", "the probe is under way"
    rig.step()
    assert len(tier.loads()) == before
    tier.finish(tier.loads()[-1])
    assert rig.look_up(keys(3), prober) == "H"
    assert rig.stat("breaker_state") == 0
    assert rig.look_up(keys(4), rig.begin("fourth")) == "P"


def test_a_probe_that_fails_doubles_the_pause() -> None:
    rig = with_open_breaker()
    rig.clock.now += 5.0
    time_out(rig, 3)
    assert rig.stat("breaker_state") == 2
    rig.clock.now += 8.0
    assert rig.look_up(keys(1), rig.begin("a")) == "M"
    rig.step()
    rig.clock.now += 2.0
    assert rig.look_up(keys(1), rig.begin("b")) == "P"


def test_a_store_can_be_the_probe() -> None:
    rig = with_open_breaker()
    tier = rig.tiers[0]
    rig.clock.now += 5.0
    rig.step()
    rig.store(keys(7), rig.begin("r"))
    assert [list(job.keys) for job in tier.waiting if not job.is_promotion] == [keys(7)]
    assert rig.stat("breaker_state") == 1
    tier.finish(tier.waiting[-1])
    rig.step()
    assert rig.stat("breaker_state") == 0


def test_a_tier_that_cannot_store_can_still_be_read() -> None:
    rig = DrivenManager(num_blocks=32)
    tier = rig.tiers[0]
    for number in range(10):
        request = rig.begin(f"r{number}")
        rig.store(keys(number), request)
        tier.finish(success=False)
        rig.step()
    assert rig.stat("store_breaker_state") == 2
    assert rig.stat("breaker_state") == 0
    rig.keep_below(keys(100))
    assert rig.look_up(keys(100), rig.begin("reads")) == "P"


def test_a_slow_tier_trips_by_the_time_it_stamps() -> None:
    rig = DrivenManager(num_blocks=32, load_timeout_s=2.0)
    for number in range(2):
        rig.keep_below(keys(number))
        rig.look_up(keys(number), rig.begin(f"r{number}"))
        rig.step(seconds=1.9)
        rig.tiers[0].finish(transfer_time=2.5)
        rig.step()
    assert rig.stat("breaker_state") == 2


def test_a_tier_that_keeps_slots_gets_no_more_than_its_share() -> None:
    rig = DrivenManager(
        num_blocks=400,
        max_pinned_share=0.1,
        load_timeout_s=2.0,
        breaker=BreakerSettings(max_timeouts_in_a_row=10**6, min_failures=10**6),
    )
    for number in range(100):
        rig.keep_below(keys(*range(10 * number, 10 * number + 10)))
        request = rig.begin(f"r{number}")
        rig.look_up(keys(*range(10 * number, 10 * number + 10)), request)
        rig.step(seconds=2.1)
        rig.look_up(keys(10 * number), request)
        rig.manager.on_request_finished(request)
        rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 40


def test_late_bytes_land_in_quarantine_only() -> None:
    rig = with_late_promotion()
    tier = rig.tiers[0]
    (job,) = tier.loads()
    other = rig.begin("other")
    rig.store(keys(*range(20, 25)), other)
    for slot in job.block_ids:
        tier.rows[int(slot)][:] = bytes([255]) * 64  # a late, wrong write
    rig.load(keys(*range(20, 25)), other)
    tier.results.append(JobResult(job.job_id, success=False))
    tier.waiting.remove(job)
    tier.finish()
    rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 0
    assert (rig.memory.rows[int(job.block_ids[0])] != payload(key(1))).any()
    assert rig.look_up(keys(1), rig.begin("next")) == "P", "it has to be read again"


@pytest.mark.parametrize("seconds", [0.15, 5.0, 60.0])
def test_with_long_steps_a_quick_tier_still_serves(seconds: float) -> None:
    rig = DrivenManager(lookup_timeout_s=0.02, load_timeout_s=0.1)
    rig.keep_below(keys(1, 2))
    tier = rig.tiers[0]
    tier.unknown.update(keys(1, 2))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2), request) == "RR"
    tier.unknown.clear()  # it knows in no time, and is asked after the step
    rig.step(seconds)
    assert rig.look_up(keys(1, 2), request) == "PP"
    rig.step(seconds)
    tier.finish(transfer_time=0.01)
    assert rig.look_up(keys(1, 2), request) == "HH"
    assert rig.stat("breaker_state") == 0


def test_tiers_that_never_give_back_leave_slots_for_stores() -> None:
    rig = DrivenManager(num_blocks=100, num_tiers=2, load_timeout_s=2.0)
    for place, tier in enumerate(rig.tiers):
        rig.keep_below(keys(*range(100 * place, 100 * place + 80)), tier)
    for place in (0, 1, 0, 1):
        request = rig.begin(f"r{place}")
        blocks = keys(*range(100 * place, 100 * place + 80))
        rig.look_up(blocks, request)
        rig.step(seconds=2.1)
        rig.look_up(blocks, request)
        rig.manager.on_request_finished(request)
        rig.manager.reset_cache()
        for tier in rig.tiers:
            rig.keep_below(blocks, tier)
        rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] <= 75
    assert rig.store(keys(*range(900, 910)), rig.begin("stores")) == keys(*range(900, 910))


def test_leases_leave_slots_for_stores() -> None:
    rig = DrivenManager(num_blocks=100, load_timeout_s=60.0)
    for number in range(5):
        blocks = keys(*range(100 * number, 100 * number + 30))
        rig.keep_below(blocks)
        rig.look_up(blocks, rig.begin(f"r{number}"))
        rig.step()
        rig.tiers[0].finish()
        rig.step()
    assert rig.stat("leased_blocks") <= 75
    assert rig.store(keys(*range(900, 910)), rig.begin("stores")) == keys(*range(900, 910))


def test_blocks_that_are_not_there_take_no_room() -> None:
    rig = DrivenManager(num_blocks=100)
    blocks = keys(*range(60))
    rig.keep_below(blocks)
    request = rig.begin("r")
    rig.manager.touch(blocks, request)
    assert rig.look_up(blocks, request) == "P" * 60


def test_a_wait_after_a_load_in_the_same_step_is_another_one() -> None:
    rig = DrivenManager(num_blocks=16, lookup_timeout_s=0.25, load_timeout_s=2.0)
    rig.store(keys(1), rig.begin("stores"))
    rig.keep_below(keys(2), rig.tiers[0])
    request = rig.begin("r")
    assert rig.look_up(keys(1), request) == "H"
    rig.load(keys(1), request)
    assert rig.look_up(keys(2), request) == "P"
    rig.step(seconds=1.0)
    assert rig.look_up(keys(2), request) == "P", "it may take two seconds"


def test_a_late_store_that_was_the_probe_ends_the_trial() -> None:
    rig = with_open_breaker()
    rig.clock.now += 5.0
    rig.step()
    rig.store(keys(7), rig.begin("r"))
    rig.step(seconds=11.0)
    rig.step()
    assert rig.stat("breaker_state") == 2


def test_an_operator_reads_when_a_tier_is_cut_off_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="kvtier.tiering.recording"):
        rig = with_open_breaker()
        assert "tier 0 (hand0): cut off: 2 deadlines in a row were missed" in caplog.text
        assert "Tried again in 5 s" in caplog.text
        caplog.clear()
        rig.clock.now += 5.0
        rig.keep_below(keys(3))
        rig.look_up(keys(3), rig.begin("prober"))
        rig.step()
        rig.tiers[0].finish()
        rig.step()
        assert "tier 0 (hand0): in use again" in caplog.text
