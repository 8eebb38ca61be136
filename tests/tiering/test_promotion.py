"""Which blocks are promoted, for which requests, and how long they are kept."""

from __future__ import annotations

import pytest

from kvtier.base import LookupResult
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, keys

WINDOWED = {0: GroupShape(16), 1: GroupShape(16, window_blocks=2)}


def test_one_job_for_each_tier_and_request_at_the_end_of_the_step() -> None:
    rig = DrivenManager(num_blocks=20, num_tiers=2)
    rig.keep_below(keys(1, 2, 5, 6), rig.tiers[0])
    rig.keep_below(keys(3, 4), rig.tiers[1])
    first, second = rig.begin("first"), rig.begin("second")
    assert rig.look_up(keys(1, 2, 3, 4), first) == "PPPP"
    assert rig.look_up(keys(5, 6), second) == "PP"
    assert all(tier.waiting == [] for tier in rig.tiers)
    rig.step()
    sent = [[list(job.keys) for job in tier.loads()] for tier in rig.tiers]
    assert sent == [[keys(1, 2), keys(5, 6)], [keys(3, 4)]]


def test_nothing_behind_a_miss_is_promoted() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1, 3))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3), request) == "PMM"
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == keys(1)


def test_nothing_behind_an_unknown_is_promoted_before_it_is_known() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1, 2, 3))
    tier = rig.tiers[0]
    tier.unknown.update(keys(2))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3), request) == "PRP"
    rig.step()
    assert [list(job.keys) for job in tier.loads()] == [keys(1)]
    tier.unknown.clear()
    assert rig.look_up(keys(1, 2, 3), request) == "PPP"
    rig.step()
    assert [list(job.keys) for job in tier.loads()] == [keys(1), keys(2, 3)]


def test_a_block_that_several_want_is_promoted_once_and_kept_for_all() -> None:
    rig = DrivenManager(num_blocks=4)
    rig.keep_below(keys(1, 2))
    tier = rig.tiers[0]
    first, second, third = rig.begin("first"), rig.begin("second"), rig.begin("third")
    assert rig.look_up(keys(1, 2), first) == "PP"
    assert rig.look_up(keys(1), second) == "P"
    rig.step()
    assert rig.look_up(keys(1, 2), third) == "PP"
    rig.step()
    (job,) = tier.loads()
    assert list(job.keys) == keys(1, 2)
    tier.finish()
    for request in (first, second, third):
        assert rig.stat("leased_blocks") == (0 if request is first else 2)
        assert rig.look_up(keys(1), request) == "H"
        assert rig.stat("leased_blocks") == 2
        rig.load(keys(1), request)
    assert rig.stat("leased_blocks") == 0


def test_promoted_blocks_are_not_evicted_before_they_are_loaded() -> None:
    rig = DrivenManager(num_blocks=4, load_timeout_s=5.0)
    rig.keep_below(keys(1, 2))
    request, other = rig.begin("r"), rig.begin("other")
    rig.look_up(keys(1, 2), request)
    rig.step()
    rig.tiers[0].finish()
    rig.step()
    assert rig.manager.prepare_store(keys(11, 12), other) is None
    assert rig.store(keys(11), other) == keys(11)
    rig.tiers[0].finish()
    rig.step()
    assert rig.look_up(keys(1, 2), request) == "HH"
    rig.load(keys(1, 2), request)
    assert rig.store(keys(12, 13), other) == keys(12, 13)


@pytest.mark.parametrize("end", ["finishes", "stays away"])
def test_a_lease_ends_when_the_request_does_not_come(end: str) -> None:
    rig = DrivenManager(num_blocks=3, load_timeout_s=5.0)
    rig.keep_below(keys(1, 2))
    request, other = rig.begin("r"), rig.begin("other")
    rig.look_up(keys(1, 2), request)
    rig.step()
    rig.tiers[0].finish()
    rig.step()
    assert rig.stat("leased_blocks") == 2
    if end == "finishes":
        rig.manager.on_request_finished(request)
    else:
        rig.step(seconds=6.0)
        rig.step()
    assert rig.stat("leased_blocks") == 0
    assert rig.store(keys(11, 12), other) == keys(11, 12)


def test_what_can_never_fit_is_a_miss_at_once() -> None:
    rig = DrivenManager(num_blocks=8)
    rig.keep_below(keys(*range(20)))
    request = rig.begin("r")
    letters = rig.look_up(keys(*range(20)), request)
    assert letters == "P" * 6 + "M" * 14
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == keys(*range(6))
    rig.tiers[0].finish()
    assert rig.look_up(keys(*range(20)), request)[:6] == "HHHHHH"


def test_what_a_request_has_found_here_leaves_less_room_for_what_is_below() -> None:
    rig = DrivenManager(num_blocks=8)
    rig.tiers[0].at_once = True
    rig.store(keys(0, 1, 2, 3), rig.begin("stores"))
    rig.keep_below(keys(*range(20)))
    rig.step()
    request = rig.begin("r")
    assert rig.look_up(keys(*range(20)), request) == "HHHHPPP" + "M" * 13
    rig.step()
    rig.step()
    assert rig.look_up(keys(*range(7)), request) == "HHHHHHH"


def test_one_that_waits_for_slots_takes_them_as_they_come() -> None:
    rig = DrivenManager(num_blocks=8, load_timeout_s=5.0)
    rig.keep_below(keys(1, 2, 3, 4))
    writer = rig.begin("writer")
    assert rig.manager.prepare_store(keys(*range(10, 15)), writer) is not None
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3, 4), request) == "PPPP"
    rig.step()
    assert [list(job.keys) for job in rig.tiers[0].loads()] == [keys(1, 2)], "the head"
    rig.tiers[0].finish()
    rig.manager.complete_store(set(keys(*range(10, 15))), writer)
    for _ in range(2):  # the writer's blocks are pinned until they have cascaded
        assert rig.look_up(keys(1, 2, 3, 4), request) == "HHPP"
        rig.step()
        rig.tiers[0].finish()
    assert rig.look_up(keys(1, 2, 3, 4), request) == "HHHH"
    rig.load(keys(1, 2, 3, 4), request)


def test_partial_results_keep_what_arrived() -> None:
    rig = DrivenManager(num_tiers=2)
    rig.keep_below(keys(1, 2, 3))
    request = rig.begin("r")
    rig.look_up(keys(1, 2, 3), request)
    rig.step()
    rig.tiers[0].finish(fail=keys(2))
    assert rig.look_up(keys(1, 2, 3), request) == "HMH"
    assert rig.stat("failed_loads") == 1
    rig.load(keys(1, 3), request)


def test_what_one_tier_could_not_deliver_is_taken_from_the_next() -> None:
    rig = DrivenManager(num_tiers=2)
    for tier in rig.tiers:
        rig.keep_below(keys(1), tier)
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    rig.tiers[0].finish(success=False)
    assert rig.look_up(keys(1), request) == "P"
    rig.step()
    rig.tiers[1].finish()
    assert rig.look_up(keys(1), request) == "H"
    rig.load(keys(1), request)


def test_a_request_that_goes_away_wants_nothing() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.manager.on_request_finished(request)
    rig.step()
    assert rig.tiers[0].loads() == []
    assert not rig.manager.has_pending_work()


def test_a_promotion_goes_on_when_its_request_ends() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    rig.manager.on_request_finished(request)
    rig.tiers[0].finish()
    rig.step()
    assert rig.look_up(keys(1), rig.begin("next")) == "H"
    assert rig.stat("cpu_pinned_blocks") == 0


def test_blocks_stored_by_another_request_meanwhile_are_not_promoted() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1, 2))
    request = rig.begin("r")
    rig.look_up(keys(1, 2), request)
    rig.store(keys(1), rig.begin("other"))
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == keys(2)


# --- windowed groups ----------------------------------------------------------------------------


def test_a_windowed_group_promotes_the_window_it_ends_with() -> None:
    rig = DrivenManager(num_blocks=20, groups=WINDOWED)
    blocks = keys(*range(10), group=1)
    rig.keep_below([blocks[i] for i in (9, 7, 5, 4, 3, 2, 1)])
    request = rig.begin("r")
    assert rig.look_up([blocks[i] for i in (9, 8, 7, 6, 5, 4)], request) == "PMPMPP"
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == [blocks[4], blocks[5]], "in prompt order"


def test_a_window_with_an_unknown_is_promoted_when_it_is_known() -> None:
    rig = DrivenManager(num_blocks=20, groups=WINDOWED)
    blocks = keys(*range(6), group=1)
    rig.keep_below([blocks[i] for i in (5, 4, 3, 2)])
    tier = rig.tiers[0]
    tier.unknown.add(blocks[4])
    request = rig.begin("r")
    assert rig.look_up([blocks[i] for i in (5, 4, 3, 2)], request) == "PRPP"
    rig.step()
    assert tier.loads() == []
    tier.unknown.clear()
    assert rig.look_up([blocks[5], blocks[4]], request) == "PP"
    rig.step()
    (job,) = tier.loads()
    assert list(job.keys) == [blocks[4], blocks[5]]


def test_another_scan_in_the_same_step_replaces_the_first() -> None:
    rig = DrivenManager(num_blocks=40, groups=WINDOWED)
    blocks = keys(*range(30), group=1)
    rig.keep_below(blocks)
    request = rig.begin("r")
    rig.look_up([blocks[29], blocks[28]], request)
    rig.look_up(keys(*range(3)), request)  # the other group ends the hit early
    rig.look_up([blocks[2], blocks[1]], request)
    rig.step()
    (job,) = rig.tiers[0].loads()
    wanted = list(job.keys)
    assert blocks[1] in wanted
    assert blocks[2] in wanted
    assert len(wanted) <= 4


def test_blocks_here_count_in_a_window() -> None:
    rig = DrivenManager(num_blocks=20, groups=WINDOWED)
    blocks = keys(*range(4), group=1)
    rig.store([blocks[3]], rig.begin("stores"))
    rig.keep_below(blocks)
    request = rig.begin("r")
    assert rig.look_up([blocks[3], blocks[2]], request) == "HP"
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == [blocks[2]]


# --- load or recompute --------------------------------------------------------------------------


def trained(tokens_per_s: float, seconds_per_block: float) -> DrivenManager:
    """A rig whose tier was measured to take that long."""
    rig = DrivenManager(
        num_blocks=64, groups={0: GroupShape(16)}, prefill_tokens_per_s=tokens_per_s
    )
    for number in range(10):
        blocks = keys(number)
        rig.keep_below(blocks)
        request = rig.begin(f"train {number}")
        rig.look_up(blocks, request)
        rig.step()
        rig.tiers[0].finish(transfer_time=seconds_per_block)
        rig.look_up(blocks, request)
        rig.manager.on_request_finished(request)
        rig.step()
    return rig


def test_a_promotion_slower_than_computing_is_a_miss() -> None:
    rig = trained(tokens_per_s=1600, seconds_per_block=0.03)  # computing a block takes 0.01 s
    rig.keep_below(keys(*range(100, 140)))
    rig.clock.now += 60.0
    rig.stat("declined_slower_blocks")
    first, request = rig.begin("first"), rig.begin("second")
    rig.look_up(keys(*range(100, 120)), first)
    rig.look_up(keys(*range(120, 140)), request)
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert len(job.keys) <= 8, "to see whether the tier is still that slow"
    assert rig.look_up(keys(*range(100, 120)), first)[8:] == "M" * 12
    assert rig.look_up(keys(*range(120, 140)), request) == "M" * 20
    assert rig.stat("declined_slower_blocks") == 40


def test_a_promotion_faster_than_computing_is_made() -> None:
    rig = trained(tokens_per_s=1600, seconds_per_block=0.005)
    rig.keep_below(keys(*range(100, 120)))
    rig.look_up(keys(*range(100, 120)), rig.begin("r"))
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert len(job.keys) == 20


def test_without_a_rate_everything_is_promoted() -> None:
    rig = trained(tokens_per_s=0, seconds_per_block=1.0)
    rig.keep_below(keys(100))
    rig.look_up(keys(100), rig.begin("r"))
    rig.step()
    assert len(rig.tiers[0].loads()) == 1
    assert rig.stat("prefill_tokens_per_s") == 0


def test_the_rate_is_learnt_from_stores() -> None:
    rig = DrivenManager(
        num_blocks=64, num_tiers=0, groups={0: GroupShape(16)}, prefill_tokens_per_s=None
    )
    request = rig.begin("r")
    for number in range(14):
        assert rig.stat("prefill_tokens_per_s") == (0 if number < 11 else pytest.approx(640))
        rig.store(keys(*range(4 * number, 4 * number + 4)), request)
        rig.step(seconds=0.1)


def test_slots_are_all_accounted_for() -> None:
    rig = DrivenManager(num_blocks=8)
    rig.keep_below(keys(1, 2, 3))
    request = rig.begin("r")
    rig.look_up(keys(1, 2, 3), request)
    rig.step()
    assert rig.primary.slots.states()[SlotState.WRITING] == 3
    rig.tiers[0].finish(fail=keys(1))
    rig.step()
    states = rig.primary.slots.states()
    assert (states[SlotState.READY], states[SlotState.FREE]) == (2, 6)


def test_the_queue_before_it_counts_in_the_time_a_load_takes() -> None:
    rig = trained(tokens_per_s=1600, seconds_per_block=0.009)
    rig.keep_below(keys(*range(100, 140)))
    rig.look_up(keys(*range(100, 120)), rig.begin("first"))
    rig.step()
    assert len(rig.tiers[0].loads()) == 1
    rig.clock.now += 0.001
    rig.manager._tiers[0].load_speed._explore_at = rig.clock.now + 60
    second = rig.begin("second")
    rig.look_up(keys(*range(120, 140)), second)
    rig.step()
    assert rig.look_up(keys(*range(120, 140)), second) == "M" * 20


def test_stores_do_not_teach_how_long_loads_take() -> None:
    rig = trained(tokens_per_s=1600, seconds_per_block=0.005)
    for number in range(30):
        rig.store(keys(500 + number), rig.begin(f"stores {number}"))
        rig.tiers[0].finish(transfer_time=0.5)
        rig.step()
    rig.keep_below(keys(*range(100, 120)))
    rig.look_up(keys(*range(100, 120)), rig.begin("r"))
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert len(job.keys) == 20


def test_of_a_long_scan_backwards_no_more_than_the_window_is_promoted() -> None:
    rig = DrivenManager(num_blocks=100, groups=WINDOWED)
    blocks = keys(*range(50), group=1)
    rig.keep_below(blocks)
    rig.look_up(blocks[::-1], rig.begin("r"))
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == blocks[:4]


def test_a_tier_that_says_pending_is_asked_again() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    answers = [LookupResult.HIT_PENDING, LookupResult.HIT]
    tier.lookup = lambda *args: answers.pop(0)  # type: ignore[method-assign]
    request = rig.begin("r")
    assert rig.look_up(keys(1), request) == "R"
    rig.step()
    assert rig.look_up(keys(1), request) == "P"


def test_what_is_kept_for_a_request_does_not_stand_in_its_own_way() -> None:
    rig = DrivenManager(num_blocks=100, load_timeout_s=60.0)
    blocks = keys(*range(70))
    rig.keep_below(blocks)
    tier = rig.tiers[0]
    tier.unknown.update(blocks[40:])
    request = rig.begin("r")
    assert rig.look_up(blocks, request) == "P" * 40 + "R" * 30
    rig.step()
    tier.finish()
    tier.unknown.clear()
    assert rig.look_up(blocks, request) == "H" * 40 + "P" * 30
    rig.step()
    tier.finish()
    assert rig.look_up(blocks, request) == "H" * 70
