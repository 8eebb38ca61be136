"""Bursts: blocks that a tier cannot store at once wait in host memory and are stored later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey
from kvtier.hints import RequestHints, new_context
from kvtier.tiering import cascade
from kvtier.tiering.health import BreakerSettings
from tests.tiering.driven_manager import DrivenManager, HandTier, keys

_SHARE = 32
"""Slots that stores may pin in these rigs."""


def with_burst(num_stored: int = 100, **settings: Any) -> DrivenManager:
    """`num_stored` blocks were stored at once, for a request that has ended."""
    rig = DrivenManager(num_blocks=128, max_pinned_share=0.25, **settings)
    request = rig.begin("burst")
    rig.store(keys(*range(num_stored)), request)
    rig.manager.on_request_finished(request)
    return rig


def waiting_in(tier: HandTier) -> list[OffloadKey]:
    return [key for job in tier.waiting for key in job.keys]


def finish_all(rig: DrivenManager) -> None:
    (tier,) = rig.tiers
    while tier.waiting:
        tier.finish()
        rig.step()


def test_all_of_a_burst_reaches_the_tier_in_the_end() -> None:
    rig = with_burst()
    (tier,) = rig.tiers
    assert waiting_in(tier) == keys(*range(_SHARE)), "the head is worth the most"
    while tier.waiting:
        assert len(waiting_in(tier)) <= _SHARE
        assert rig.manager.is_moving_blocks()
        tier.finish()
        rig.step()
    assert tier.holds(*keys(*range(100)))
    assert rig.stat("dropped_blocks") == 0
    assert not any(rig.manager.open_work().values())


def test_a_tier_hears_of_the_end_of_a_request_after_its_last_blocks() -> None:
    rig = with_burst()
    (tier,) = rig.tiers
    assert ("finished", "burst") not in tier.calls
    finish_all(rig)
    assert tier.calls[-1] == ("finished", "burst")
    assert tier.calls.count(("finished", "burst")) == 1


def test_what_comes_later_waits_behind_what_waits() -> None:
    rig = with_burst(40)
    (tier,) = rig.tiers
    tier.finish(tier.waiting[0])
    rig.store(keys(90, 91), rig.begin("later"))
    rig.step()
    assert waiting_in(tier) == keys(*range(32, 40), 90, 91)


def test_what_leaves_host_memory_meanwhile_is_dropped_and_counted() -> None:
    rig = with_burst()
    (tier,) = rig.tiers
    rig.store(keys(*range(200, 290)), rig.begin("needs room"))
    gone = [key for key in keys(*range(100)) if not rig.primary.has(key)]
    assert gone
    finish_all(rig)
    assert not tier.holds(gone[0])
    assert tier.holds(*(key for key in keys(*range(100)) if key not in gone))
    assert rig.stat("dropped_blocks") == len(gone)


def test_nothing_waits_for_a_tier_that_ends_no_store() -> None:
    rig = with_burst(store_timeout_s=1.0)
    rig.step(seconds=1.1)
    rig.step()
    assert rig.manager.open_work()["waiting blocks"] == 0
    assert ("finished", "burst") in rig.tiers[0].calls
    assert rig.stat("dropped_blocks") == 100 - _SHARE
    rig.store(keys(*range(200, 210)), rig.begin("later"))
    assert rig.stat("dropped_blocks") == 10, "it has no slots to spare, and gives none back"
    finish_all(rig)
    rig.store(keys(300), rig.begin("much later"))
    finish_all(rig)
    assert rig.tiers[0].holds(*keys(300))


def test_nothing_waits_for_a_tier_that_is_cut_off() -> None:
    rig = with_burst(breaker=BreakerSettings(min_failures=1))
    rig.tiers[0].finish(success=False)
    rig.step()
    assert rig.tiers[0].waiting == []
    assert rig.stat("shed_blocks") == 100 - _SHARE
    assert not any(rig.manager.open_work().values())


@pytest.mark.parametrize("keeps_epoch", [False, True])
def test_a_reset_leaves_nothing_to_wait(keeps_epoch: bool) -> None:
    rig = with_burst(keeps_epoch=keeps_epoch)
    rig.manager.reset_cache()
    assert rig.stat("dropped_blocks") == 100 - _SHARE
    finish_all(rig)
    assert rig.tiers[0].waiting == []
    assert not any(rig.manager.open_work().values())


def test_an_id_that_is_used_again_sends_nothing_for_the_request_that_had_it() -> None:
    rig = with_burst()
    (tier,) = rig.tiers
    rig.begin("burst")
    at = len(tier.calls)
    finish_all(rig)
    assert ("store", "burst") not in tier.calls[at:], "the tier was told that it has ended"
    assert rig.stat("dropped_blocks") == 100 - _SHARE


def test_no_more_waits_than_can_be_in_host_memory() -> None:
    rig = DrivenManager(num_blocks=128, max_pinned_share=0.25)
    for number in range(20):
        rig.store(keys(*range(50 * number, 50 * number + 50)), rig.begin(f"r{number}"))
        rig.step()
        assert rig.manager.open_work()["waiting blocks"] <= 128


def test_stores_behind_others_that_end_are_not_late() -> None:
    rig = DrivenManager(num_blocks=64, store_timeout_s=1.0)
    (tier,) = rig.tiers
    for number in range(8):
        rig.store(keys(number), rig.begin(f"r{number}"))
    for _ in range(8):
        rig.step(seconds=0.9)
        assert rig.manager.is_moving_blocks()
        tier.finish(tier.waiting[0])
        rig.step()
    assert rig.stat("late_stores") == 0
    assert rig.stat("store_breaker_state") == 0


def test_a_store_is_late_once_no_other_ends() -> None:
    rig = DrivenManager(num_blocks=64, store_timeout_s=1.0)
    (tier,) = rig.tiers
    rig.store(keys(1), rig.begin("never ends"))
    rig.store(keys(2), rig.begin("ends"))
    rig.step(seconds=0.9)
    tier.finish(tier.waiting[1])
    rig.step(seconds=0.9)
    assert rig.manager.is_moving_blocks()
    rig.step(seconds=0.2)
    assert not rig.manager.is_moving_blocks()
    rig.step()
    assert rig.stat("late_stores") == 1


def test_a_long_store_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are freed one part after the other."""
    row_bytes = DrivenManager().primary.block_bytes
    monkeypatch.setattr(cascade, "_STORE_BYTES", 10 * row_bytes)
    rig = DrivenManager(num_blocks=64)
    (tier,) = rig.tiers
    blocks = keys(*range(25))
    rig.store(blocks, rig.begin("r"))
    parts = [list(job.keys) for job in tier.waiting]
    assert sorted(map(len, parts)) == [5, 10, 10]
    assert [key for part in parts for key in part] == blocks
    finish_all(rig)
    assert tier.holds(*blocks)


@given(
    bursts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ends=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_whatever_fits_is_stored(bursts: list[int], ends: list[int]) -> None:
    """Bursts of any size, and stores that end in between, now and then."""
    rig = DrivenManager(num_blocks=sum(bursts) + 8, max_pinned_share=0.01)
    (tier,) = rig.tiers
    first = 0
    for number, size in enumerate(bursts):
        request = rig.begin(f"r{number}")
        rig.store(keys(*range(first, first + size)), request)
        rig.manager.on_request_finished(request)
        first += size
        for _ in range(ends[number % len(ends)]):
            if tier.waiting:
                tier.finish(tier.waiting[0])
            rig.step()
        assert rig.stat("pinned_blocks") <= _SHARE
    finish_all(rig)
    assert tier.holds(*keys(*range(first)))
    assert not any(rig.manager.open_work().values())


def test_higher_priorities_are_stored_first_and_lower_ones_shed_first() -> None:
    rig = with_burst(_SHARE)
    (tier,) = rig.tiers
    for name, first, priority in (("low", 200, 1), ("usual", 300, 5), ("high", 400, 9)):
        context = new_context(name, None, RequestHints(priority=priority))
        rig.manager.on_new_request(context)
        rig.store(keys(*range(first, first + _SHARE)), context)
        rig.manager.on_request_finished(context)
    order = []
    while tier.waiting:
        order += [job.keys[0] for job in tier.waiting]
        tier.finish()
        rig.step()
    assert order == keys(0, 400, 300, 200)


def test_requests_of_a_higher_priority_are_promoted_first() -> None:
    rig = DrivenManager(num_blocks=16)
    (tier,) = rig.tiers
    rig.keep_below(keys(*range(30)))
    for name, first, priority in (("low", 0, 1), ("high", 10, 9), ("usual", 20, 5)):
        context = new_context(name, None, RequestHints(priority=priority))
        rig.manager.on_new_request(context)
        rig.look_up(keys(*range(first, first + 4)), context)
    rig.step()
    assert [job.req_context.req_id for job in tier.loads()] == ["high", "usual", "low"]
