"""What a request waits for, and when a new wait begins."""

from __future__ import annotations

from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, keys


def test_what_it_waited_before_a_load_does_not_count_after_it() -> None:
    rig = DrivenManager(num_blocks=16, lookup_timeout_s=0.25, load_timeout_s=2.0)
    tier = rig.tiers[0]
    in_another_group = keys(2, group=1)
    rig.keep_below([*keys(1), *in_another_group])
    request = rig.begin("r")
    assert rig.look_up(keys(1), request) == "P"
    for _ in range(3):
        rig.step(seconds=0.6)
        assert rig.look_up(keys(1), request) == "P"
    rig.step(seconds=0.1)
    tier.finish()
    assert rig.look_up(keys(1, 3), request) == "HM"
    rig.load(keys(1), request)
    assert rig.look_up(in_another_group, request) == "P"
    rig.step(seconds=1.0)
    assert rig.look_up(in_another_group, request) == "P", "for a second, not for almost three"


def test_after_a_preemption_a_tier_that_did_not_know_is_asked_again() -> None:
    rig = DrivenManager(lookup_timeout_s=0.25)
    rig.keep_below(keys(1))
    rig.tiers[0].unknown.update(keys(1))
    request = rig.begin("r")
    assert rig.look_up(keys(1), request) == "R"
    rig.step(seconds=0.3)
    assert rig.look_up(keys(1), request) == "M"
    rig.tiers[0].unknown.clear()
    rig.step()
    assert rig.look_up(keys(1), request) == "M", "it does not wait for this tier any more"
    rig.step(preempted_req_ids=["r"])
    assert rig.look_up(keys(1), request) == "P"


def test_after_a_preemption_a_tier_that_could_not_deliver_is_asked_again() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    rig.tiers[0].finish(success=False)
    assert rig.look_up(keys(1), request) == "M"
    rig.step(preempted_req_ids=["r"])
    assert rig.look_up(keys(1), request) == "P"


def test_a_tier_that_does_not_know_in_time_is_late_once_for_each_request() -> None:
    rig = DrivenManager(
        num_blocks=16, lookup_timeout_s=0.25, groups={1: GroupShape(16, window_blocks=4)}
    )
    blocks = keys(*range(5), group=1)
    rig.tiers[0].unknown.update(blocks)
    request = rig.begin("r")
    assert rig.look_up(blocks, request) == "RRRRR"
    rig.step(seconds=0.3)
    assert rig.look_up(blocks, request) == "MMMMM"
    assert rig.stat("late_lookups") == 1


def test_a_tier_that_has_answered_has_all_its_time_for_another_answer() -> None:
    rig = DrivenManager(lookup_timeout_s=0.25)
    tier = rig.tiers[0]
    request = rig.begin("r")
    tier.unknown.update(keys(1))
    assert rig.look_up(keys(1), request) == "R"
    rig.step(seconds=0.2)
    tier.unknown.clear()
    assert rig.look_up(keys(1), request) == "M"
    rig.step(seconds=0.2)
    tier.unknown.update(keys(1))
    assert rig.look_up(keys(1), request) == "R", "it has been asked for no time at all"
