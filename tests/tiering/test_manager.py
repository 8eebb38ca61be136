"""Cascades, requests, events and metrics of the orchestrator when all goes well."""

from __future__ import annotations

import pytest

from kvtier.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    PrefixLookup,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import TieringOffloadingManager
from tests.tiering.driven_manager import DrivenManager, HandTier, keys


@pytest.mark.parametrize("num_tiers", [0, 1, 3])
def test_what_is_stored_reaches_every_tier_and_comes_back(num_tiers: int) -> None:
    rig = DrivenManager(num_blocks=8, num_tiers=num_tiers)
    for tier in rig.tiers:
        tier.at_once = True
    first, second = keys(*range(6)), keys(*range(10, 16))
    for blocks in (first, second):
        request = rig.begin(f"stores {blocks[0]!r}")
        rig.store(blocks, request)
        rig.manager.on_request_finished(request)
        rig.step()
    assert all(tier.holds(*first, *second) for tier in rig.tiers)
    request = rig.begin("again")
    assert rig.look_up(first[:2], request) == "HH"
    if num_tiers:
        assert rig.look_up(first[2:], request) == "PPPP"
        rig.step()
        assert rig.look_up(first, request) == "HHHHHH"
        rig.load(first, request)
    else:
        assert rig.look_up(first[2:], request) == "MMMM"


def test_a_cascade_is_one_job_in_prompt_order_for_each_tier() -> None:
    rig = DrivenManager(num_tiers=2)
    request = rig.begin("r")
    rig.store(keys(5, 3, 9, 1), request)
    for tier in rig.tiers:
        (job,) = tier.waiting
        assert list(job.keys) == keys(5, 3, 9, 1)
        assert not job.is_promotion
        assert job.req_context is request
        assert job.fingerprint == rig.config.fingerprint()
        assert not job.block_ids.flags.writeable


def test_slots_are_pinned_until_every_tier_has_reported() -> None:
    rig = DrivenManager(num_blocks=4, num_tiers=2)
    request = rig.begin("r")
    rig.store(keys(1, 2, 3), request)
    other = rig.begin("other")
    for tier in rig.tiers:
        assert rig.manager.prepare_store(keys(4, 5, 6), other) is None
        tier.finish()
        rig.step()
    assert rig.store(keys(4, 5, 6), other) == keys(4, 5, 6)


def test_a_cascade_is_not_a_use() -> None:
    rig = DrivenManager(num_blocks=5)
    old, new = rig.begin("old"), rig.begin("new")
    rig.store(keys(1, 2), old)
    rig.manager.on_request_finished(old)
    rig.store(keys(3, 4), new)
    rig.manager.on_request_finished(new)
    # The tier reports the older one last.
    tier = rig.tiers[0]
    tier.finish(tier.waiting[1])
    rig.step()
    tier.finish()
    rig.step()
    third = rig.begin("third")
    output = rig.manager.prepare_store(keys(5, 6), third)
    assert output is not None
    assert output.evicted_keys == keys(2)


def test_a_failed_device_store_is_not_cascaded() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    rig.manager.prepare_store(keys(1, 2), request)
    rig.manager.complete_store(set(keys(1, 2)), request, success=False)
    assert rig.tiers[0].waiting == []


def test_stores_completed_in_parts_are_cascaded_in_parts() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    rig.manager.prepare_store(keys(1, 2, 3), request)
    rig.manager.complete_store(keys(2), request)
    rig.manager.on_request_finished(request)
    rig.manager.complete_store(set(keys(1, 3)), request)
    tier = rig.tiers[0]
    assert [set(job.keys) for job in tier.waiting] == [set(keys(2)), set(keys(1, 3))]
    assert tier.calls[-1] == ("finished", "r")


def test_a_slow_tier_pins_at_most_its_share() -> None:
    rig = DrivenManager(num_blocks=200, num_tiers=2, max_pinned_share=0.25)
    request = rig.begin("r")
    slow, quick = rig.tiers
    quick.at_once = True
    rig.store(keys(*range(40)), request)
    rig.step()
    rig.store(keys(*range(40, 80)), request)
    rig.step()
    assert sum(len(job.keys) for job in slow.waiting) == 50
    assert list(slow.waiting[1].keys) == keys(*range(40, 50)), "the head is worth the most"
    assert quick.holds(*keys(*range(80)))
    assert rig.stat("pinned_blocks") == 50
    assert rig.stat("waiting_blocks") == 30
    slow.finish()
    rig.step()
    assert [list(job.keys) for job in slow.waiting] == [keys(*range(50, 80))]
    assert rig.stat("waiting_blocks") == 0


def test_store_threshold_holds_for_the_device_only() -> None:
    rig = DrivenManager(store_threshold=2)
    rig.keep_below(keys(7))
    first = rig.begin("first")
    assert rig.look_up(keys(7), first) == "P"
    rig.step()
    rig.tiers[0].finish()
    assert rig.look_up(keys(7), first) == "H", "what was worth storing once is worth promoting"
    assert rig.store(keys(1), first) == []
    second = rig.begin("second")
    assert rig.store(keys(1), second) == keys(1)


# --- requests -----------------------------------------------------------------------------------


def test_a_tier_hears_of_the_end_when_no_submit_can_follow() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    request = rig.begin("r")
    output = rig.manager.prepare_store(keys(1, 2), request)
    assert output is not None
    rig.manager.on_request_finished(request)
    assert tier.calls == [("new", "r")]
    rig.manager.complete_store(set(keys(1, 2)), request)
    assert tier.calls == [("new", "r"), ("store", "r"), ("finished", "r")]


def test_an_id_that_is_used_again_is_another_request() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    first = rig.begin("r")
    rig.manager.prepare_store(keys(1), first)
    rig.manager.on_request_finished(first)
    second = rig.begin("r")
    rig.manager.complete_store(keys(1), first)
    rig.manager.on_request_finished(second)
    names = [name for name, _ in tier.calls]
    assert names.count("new") == names.count("finished") == 2
    last_end = len(names) - 1 - names[::-1].index("finished")
    assert "store" not in names[last_end:]


def test_requests_that_nobody_announced_do_not_pile_up() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    for number in range(5000):
        rig.look_up(keys(1), ReqContext(f"stranger {number}"))
    names = [name for name, _ in tier.calls]
    assert names.count("new") - names.count("finished") <= 4096
    assert len(rig.manager._requests) <= 4096


def test_a_request_reads_only_from_tiers_its_filter_allows() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    only_host = TierFilter((TierMatcher(Medium.CPU),))
    assert rig.look_up(keys(1), rig.begin("a", load_tier_filter=only_host)) == "M"
    assert rig.look_up(keys(1), rig.begin("b", load_tier_filter=TierFilter())) == "M"
    only_storage = TierFilter((TierMatcher(Medium.STORAGE),))
    assert rig.look_up(keys(1), rig.begin("c", load_tier_filter=only_storage)) == "P"


def test_a_filter_does_not_keep_blocks_from_being_stored() -> None:
    rig = DrivenManager()
    request = rig.begin("r", load_tier_filter=TierFilter())
    rig.store(keys(1), request)
    rig.tiers[0].finish()
    assert rig.tiers[0].holds(*keys(1))


def test_tiers_that_want_whole_requests_get_prefix_hits_too() -> None:
    rig = DrivenManager(num_tiers=2)
    whole, plain = rig.tiers
    whole.policy = OffloadPolicy.REQUEST_LEVEL
    plain.names_missing = False
    first = rig.begin("first")
    rig.store(keys(1, 2), first)
    writing = rig.manager.prepare_store(keys(3), first)
    assert writing is not None
    for tier in rig.tiers:
        tier.finish()
        tier.kept.clear()
    rig.step()
    second = ReqContext("second")
    assert rig.manager.on_new_request(second).policy is OffloadPolicy.REQUEST_LEVEL
    rig.store(keys(1, 2, 3, 4), second)
    rig.manager.on_request_finished(second)
    assert [list(job.keys) for job in whole.waiting] == [keys(1, 2), keys(4)]
    assert ("finished", "second") not in whole.calls, "one of its blocks is still being written"
    rig.manager.complete_store(keys(3), first)
    assert whole.calls[-1] == ("finished", "second")
    whole.finish()
    plain.finish()
    assert whole.holds(*keys(1, 2, 3, 4))
    assert not plain.holds(*keys(1))
    assert plain.holds(*keys(3, 4))


def test_block_level_is_the_answer_when_no_tier_wants_more() -> None:
    rig = DrivenManager()
    answer = rig.manager.on_new_request(ReqContext("r"))
    assert answer.policy is OffloadPolicy.BLOCK_LEVEL


# --- steps, events, figures ---------------------------------------------------------------------


def test_tiers_are_polled_once_in_a_step() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    request = rig.begin("r")
    for _ in range(3):
        before = tier.num_polls
        rig.look_up(keys(1, 2, 3), request)
        rig.manager.lookup_prefix(keys(4, 5), request)
        rig.store(keys(6), request)
        rig.step()
        assert tier.num_polls == before + 1


def test_events_of_all_tiers_in_one_stream() -> None:
    class Talking(HandTier):
        def take_events(self) -> list[OffloadingEvent]:
            return [OffloadingEvent(keys(9), Medium.STORAGE, removed=True)]

    rig = DrivenManager()
    tier = Talking(
        offloading_spec=rig.tiers[0].offloading_spec,
        primary_kv_view=rig.primary.get_kv_memoryview(),
        tier_type="talking",
    )
    for enabled in (True, False):
        settings = TierSettings(enable_kv_events=enabled)
        manager = TieringOffloadingManager(rig.primary, [tier], settings=[settings])
        context = ReqContext("r")
        manager.prepare_store(keys(int(enabled)), context)
        manager.complete_store(keys(int(enabled)), context)
        events = [(event.medium, event.removed, event.tier) for event in manager.take_events()]
        talk = [(Medium.STORAGE, True, "0:talking")] if enabled else []
        assert events == [(Medium.CPU, False, None), *talk]


def test_events_tell_tiers_of_one_medium_apart() -> None:
    class Talking(HandTier):
        def take_events(self) -> list[OffloadingEvent]:
            return [OffloadingEvent(keys(9), Medium.CPU, removed=False)]

    rig = DrivenManager()
    tiers = [
        Talking(
            offloading_spec=rig.tiers[0].offloading_spec,
            primary_kv_view=rig.primary.get_kv_memoryview(),
            tier_type="Talking-Tier",
        )
        for _ in range(2)
    ]
    settings = [TierSettings(enable_kv_events=True)] * 2
    manager = TieringOffloadingManager(rig.primary, tiers, settings=settings)
    context = ReqContext("r")
    manager.prepare_store(keys(1), context)
    manager.complete_store(keys(1), context)
    # As in the label of their metrics.
    assert [event.tier for event in manager.take_events()] == [
        None,
        "0:Talking-Tier",
        "1:Talking-Tier",
    ]


def test_promoted_blocks_are_announced() -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    rig.look_up(keys(1), rig.begin("r"))
    rig.step()
    assert list(rig.manager.take_events()) == []
    rig.tiers[0].finish()
    rig.step()
    (event,) = rig.manager.take_events()
    assert (event.keys, event.medium, event.removed) == (keys(1), Medium.CPU, False)


def test_settings_have_to_fit_the_tiers() -> None:
    rig = DrivenManager()
    with pytest.raises(ValueError, match="2 settings for 1 tiers"):
        TieringOffloadingManager(rig.primary, rig.tiers, settings=[TierSettings()] * 2)


# --- lookup_prefix ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tiers", [1, 2])
def test_lookup_prefix_says_what_single_lookups_say(num_tiers: int) -> None:
    def rig_with_blocks() -> tuple[DrivenManager, ReqContext]:
        rig = DrivenManager(num_blocks=40, num_tiers=num_tiers)
        rig.keep_below(keys(*range(3, 6), *range(8, 30)))
        if num_tiers > 1:
            rig.keep_below(keys(*range(6, 8), *range(15, 32)), rig.tiers[1])
        rig.store(keys(0, 1, 2, 10), rig.begin("stores"))
        return rig, rig.begin("r")

    asked = keys(*range(36))
    rig, request = rig_with_blocks()
    batched = rig.manager.lookup_prefix(asked, request)
    rig.step()
    other, its_request = rig_with_blocks()
    letters = other.look_up(asked, its_request)
    other.step()
    assert batched == PrefixLookup(letters.index("M"), is_final=False)
    for tier, its in zip(rig.tiers, other.tiers, strict=True):
        loads = [list(job.keys) for job in tier.loads()]
        assert loads == [list(job.keys) for job in its.loads()]
        tier.finish()
    assert rig.manager.lookup_prefix(asked, request) == PrefixLookup(batched.num_hits, True)
    rig.load(asked[: batched.num_hits], request)


def test_lookup_prefix_counts_up_to_the_first_unknown() -> None:
    rig = DrivenManager(num_blocks=20)
    rig.keep_below(keys(*range(10)))
    rig.tiers[0].unknown.update(keys(4))
    request = rig.begin("r")
    assert rig.manager.lookup_prefix(keys(*range(12)), request) == PrefixLookup(4, False)
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert list(job.keys) == keys(0, 1, 2, 3)


def test_lookup_prefix_of_nothing() -> None:
    rig = DrivenManager()
    assert rig.manager.lookup_prefix([], rig.begin("r")) == PrefixLookup(0, True)


def test_nothing_is_left_of_finished_requests() -> None:
    rig = DrivenManager(num_blocks=16)
    rig.tiers[0].at_once = True
    for number in range(50):
        request = rig.begin(f"r{number}")
        blocks = keys(*range(number % 7, number % 7 + 9))
        rig.look_up(blocks, request)
        rig.store(blocks, request)
        rig.step()
        rig.look_up(blocks, request)
        rig.manager.on_request_finished(request)
        rig.step()
    rig.step()
    manager = rig.manager
    assert not any(manager.open_work().values())
    states = rig.primary.slots.states()
    assert states[SlotState.READY] + states[SlotState.FREE] == 16
    assert rig.stat("cpu_pinned_blocks") == 0
    assert not manager.has_pending_work()
    assert manager.lookup(keys(1)[0], rig.begin("last")) is LookupResult.HIT
