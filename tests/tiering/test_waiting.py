"""A request that waits for a promotion repeats its lookup in every step."""

from __future__ import annotations

import sys
from typing import Any

from kvtier.base import ReqContext
from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, keys


def with_waiting(**settings: Any) -> tuple[DrivenManager, ReqContext]:
    """A tier has six of its eight blocks, and is loading them."""
    rig = DrivenManager(num_blocks=40, **settings)
    rig.keep_below(keys(*range(6)))
    request = rig.begin("waits")
    for _ in range(3):
        assert rig.manager.lookup_prefix(keys(*range(8)), request) == (6, False)
        rig.step()
    assert len(rig.tiers[0].loads()) == 1
    return rig, request


def test_it_is_told_when_they_are_there() -> None:
    rig, request = with_waiting()
    rig.tiers[0].finish()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (6, True)
    rig.load(keys(*range(6)), request)


def test_it_is_told_when_some_did_not_come() -> None:
    rig, request = with_waiting()
    rig.tiers[0].finish(fail=keys(4))
    rig.step()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (4, True)


def test_it_is_told_when_the_tier_is_late() -> None:
    rig, request = with_waiting(load_timeout_s=2.0)
    rig.step(seconds=2.1)
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (0, True)


def test_it_is_told_when_it_has_waited_long_enough() -> None:
    """For several promotions, of which none is late."""
    rig = DrivenManager(num_blocks=40, load_timeout_s=2.0, lookup_timeout_s=0.5)
    (tier,) = rig.tiers
    request = rig.begin("waits")
    waited = 0.0
    for number in range(20):
        rig.keep_below(keys(number))
        found = rig.manager.lookup_prefix(keys(*range(20)), request)
        if found.is_final:
            break
        rig.step(seconds=0.9)
        waited += 0.9
        rig.manager.lookup_prefix(keys(*range(20)), request)
        tier.finish()
        rig.step(seconds=0.0)
    assert waited <= 2.0 + 0.5 + 0.9


def test_it_may_ask_for_less_and_for_more_meanwhile() -> None:
    rig, request = with_waiting()
    assert rig.manager.lookup_prefix(keys(*range(3)), request) == (3, False)
    assert rig.manager.lookup_prefix(keys(*range(2, 5)), request) == (3, False)
    assert rig.manager.lookup_prefix(keys(7), request) == (0, True)
    rig.step()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (6, False)


def test_it_starts_anew_after_a_reset() -> None:
    rig, request = with_waiting()
    rig.manager.reset_cache()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (0, True)


def test_what_is_there_only_later_is_found_once_it_waits_no_more() -> None:
    rig, request = with_waiting()
    rig.store(keys(6, 7), rig.begin("other"))
    rig.step()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (6, False)
    rig.tiers[0].finish()
    rig.step()
    assert rig.manager.lookup_prefix(keys(*range(8)), request) == (8, True)


def test_it_waits_in_every_group() -> None:
    rig = DrivenManager(num_blocks=40, groups={0: GroupShape(16), 1: GroupShape(16)})
    first, second = keys(*range(4)), keys(*range(4), group=1)
    rig.keep_below([*first, *second])
    request = rig.begin("waits")
    for _ in range(3):
        assert rig.manager.lookup_prefix(first, request) == (4, False)
        assert rig.manager.lookup_prefix(second, request) == (4, False)
        rig.step()
    rig.tiers[0].finish()
    rig.step()
    assert rig.manager.lookup_prefix(first, request) == (4, True)
    assert rig.manager.lookup_prefix(second, request) == (4, True)


def test_its_promotion_is_not_lost_to_a_second_request_that_waits_too() -> None:
    rig, request = with_waiting()
    other = rig.begin("waits too")
    for _ in range(2):
        assert rig.manager.lookup_prefix(keys(*range(8)), other) == (6, False)
        rig.step()
    rig.manager.on_request_finished(request)
    rig.tiers[0].finish()
    rig.step()
    assert rig.manager.lookup_prefix(keys(*range(8)), other) == (6, True)
    rig.load(keys(*range(6)), other)


def num_calls_to_ask_again(num_blocks: int) -> int:
    """The number of Python calls in the second lookup of a waiting request."""
    rig = DrivenManager(num_blocks=4 * num_blocks)
    blocks = keys(*range(num_blocks))
    rig.keep_below(blocks)
    request = rig.begin("waits")
    for _ in range(2):
        assert rig.manager.lookup_prefix(blocks, request) == (num_blocks, False)
        rig.step()
    calls: list[str] = []

    def note(frame: object, event: str, argument: object) -> None:
        if event == "call":
            calls.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        answer = rig.manager.lookup_prefix(blocks, request)
    finally:
        sys.setprofile(before)
    assert answer == (num_blocks, False)
    return len(calls)


def test_asking_again_takes_no_more_for_many_blocks_than_for_few() -> None:
    """The threads that load the blocks need the interpreter meanwhile."""
    assert num_calls_to_ask_again(400) == num_calls_to_ask_again(20)
