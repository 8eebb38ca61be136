"""Write policies: which blocks a tier gets, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvtier.base import OffloadKey, ReqContext, WriteHint
from kvtier.config.options import WritePolicyName
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.tiering import write_policy
from kvtier.tiering.cascade import WriteBudget
from kvtier.tiering.cost import TransferEstimate
from kvtier.tiering.health import BreakerSettings
from kvtier.tiering.manager import GroupShape
from kvtier.tiering.write_policy import Adaptive, BlockHistory, ReuseSample, SecondUse
from tests.tiering.driven_manager import DrivenManager, key, keys

_NUM_SLOTS = 64
LEAVING = [WritePolicyName.ON_EVICT, WritePolicyName.ADAPTIVE]
"""The policies that write blocks when they are about to leave."""


def rig_with(
    write: WritePolicyName, num_blocks: int = _NUM_SLOTS, **settings: Any
) -> DrivenManager:
    rig = DrivenManager(num_blocks, write_policy=write, **settings)
    for tier in rig.tiers:
        tier.at_once = True
    return rig


def serve(
    rig: DrivenManager,
    name: str,
    blocks: Sequence[OffloadKey],
    at_once: int = 4,
    hint: WriteHint | None = None,
) -> None:
    """One request from beginning to end: loads what is found, computes and stores the rest."""
    request = rig.begin(name, write_hint=hint)
    while "P" in (found := rig.look_up(blocks, request)):
        rig.step()
    num_hits = len(found) - len(found.lstrip("H"))
    if num_hits:
        rig.load(blocks[:num_hits], request)
    rig.manager.touch(blocks, request)
    for start in range(num_hits, len(blocks), at_once):
        rig.store(blocks[start : start + at_once], request)
        rig.step()
    rig.manager.on_request_finished(request)
    rig.step()


def watch(rig: DrivenManager) -> list[list[OffloadKey]]:
    """The keys of the stores that the first tier is given from now on."""
    tier = rig.tiers[0]
    seen: list[list[OffloadKey]] = []
    submit = tier.submit_store

    def submit_store(job: Any) -> None:
        seen.append(list(job.keys))
        submit(job)

    tier.submit_store = submit_store  # type: ignore[method-assign]
    return seen


def push_out(rig: DrivenManager, number: int) -> None:
    """Serve other requests until earlier blocks have left host memory."""
    for other in range(20 * number, 20 * number + 12):
        serve(rig, f"other {other}", keys(*range(6 * other + 1000, 6 * other + 1006)))


# --- second use -----------------------------------------------------------------------------------


def test_a_block_is_written_when_its_second_request_has_ended() -> None:
    rig = rig_with(WritePolicyName.SECOND_USE)
    seen = watch(rig)
    serve(rig, "first", keys(1, 2, 3))
    assert seen == []
    serve(rig, "second", keys(1, 2))
    assert seen == [keys(1, 2)]
    serve(rig, "third", keys(1, 2))
    assert seen == [keys(1, 2)], "the tier has them"


def test_a_block_that_was_evicted_is_written_when_it_is_computed_again() -> None:
    rig = rig_with(WritePolicyName.SECOND_USE, num_blocks=8)
    seen = watch(rig)
    serve(rig, "first", keys(1, 2))
    serve(rig, "others", keys(*range(10, 18)))
    assert not rig.primary.has(key(1))
    assert rig.tier_counters()["left_out_blocks"] >= 2
    request = rig.begin("second")
    rig.store(keys(1, 2), request)
    assert seen == [keys(1, 2)]


def test_a_request_that_asks_twice_is_one_use() -> None:
    rig = rig_with(WritePolicyName.SECOND_USE)
    seen = watch(rig)
    request = rig.begin("r")
    rig.store(keys(1, 2), request)
    rig.manager.touch(keys(1, 2), request)
    rig.store(keys(1, 2), request)
    rig.manager.on_request_finished(request)
    rig.step()
    assert seen == []


def test_second_use_remembers_a_bounded_number_of_keys() -> None:
    policy = SecondUse(num_host_blocks=1)
    for number in range(1000):
        policy.note_used(keys(*range(10 * number, 10 * number + 10)))
    assert len(policy._used) == write_policy._LEAST_SEEN


def test_a_block_used_twice_is_offered_again_when_the_tier_has_lost_it() -> None:
    rig = rig_with(WritePolicyName.SECOND_USE)
    serve(rig, "first", keys(1, 2))
    serve(rig, "second", keys(1, 2))
    tier = rig.tiers[0]
    tier.kept.clear()
    rig.clock.now += 10
    serve(rig, "third", keys(1, 2))
    assert tier.holds(*keys(1, 2))


# --- on evict -------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", LEAVING)
def test_nothing_is_written_while_host_memory_has_room(write: WritePolicyName) -> None:
    rig = rig_with(write)
    seen = watch(rig)
    for number in range(8):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 4)))
    assert seen == []


@pytest.mark.parametrize("write", LEAVING)
def test_every_block_that_has_left_host_memory_is_below(write: WritePolicyName) -> None:
    rig = rig_with(write)
    for number in range(40):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    gone = [
        k for n in range(40) for k in keys(*range(10 * n, 10 * n + 6)) if not rig.primary.has(k)
    ]
    assert len(gone) > 100
    assert rig.tiers[0].holds(*gone)
    assert "unwritten_blocks" not in rig.tier_counters()


def test_blocks_are_written_coldest_first_and_heads_before_tails() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    seen = watch(rig)
    prompts = [keys(*range(10 * number, 10 * number + 6)) for number in range(12)]
    for number, prompt in enumerate(prompts):
        serve(rig, f"r{number}", prompt)
    written = [k for job in seen for k in job]
    assert set(prompts[0]) <= set(written)
    for job in seen:
        for prompt in prompts:
            own = [k for k in job if k in prompt]
            assert own == [k for k in prompt if k in own]
    order = [written.index(prompt[0]) for prompt in prompts if prompt[0] in written]
    assert order == sorted(order) or len(seen) == 1


def test_no_block_is_written_twice() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    seen = watch(rig)
    for lap in range(3):
        for number in range(20):
            serve(rig, f"r{lap}.{number}", keys(*range(10 * number, 10 * number + 6)))
    written = [k for job in seen for k in job]
    assert len(written) == len(set(written)), "what comes back from the tier is not written again"


def test_what_the_tier_has_lost_is_written_again() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    tier = rig.tiers[0]
    for number in range(20):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    serve(rig, "again", keys(*range(6)))
    tier.kept.clear()
    for number in range(20, 40):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert not rig.primary.has(key(0))
    assert tier.holds(*keys(*range(6)))


def test_blocks_that_leave_unwritten_are_counted() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT, max_pinned_share=0.1)
    rig.tiers[0].at_once = False
    for number in range(20):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    (tier,) = rig.tiers
    gone = [
        k for n in range(20) for k in keys(*range(10 * n, 10 * n + 6)) if not rig.primary.has(k)
    ]
    assert gone
    assert rig.tier_counters()["unwritten_blocks"] == len(gone)
    assert rig.manager.open_work()["waiting blocks"] == 0, "eviction does not wait"
    assert tier.waiting


@pytest.mark.parametrize("write", LEAVING)
def test_a_tier_that_is_cut_off_gets_nothing_and_blocks_are_counted(write: WritePolicyName) -> None:
    rig = rig_with(write, breaker=BreakerSettings(min_failures=1, first_pause_s=1e6))
    rig.tiers[0].at_once = False
    seen = watch(rig)
    for number in range(12):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert seen
    rig.tiers[0].finish(success=False)
    rig.step()
    num_seen = len(seen)
    for number in range(12, 40):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert len(seen) == num_seen
    assert rig.tier_counters()["unwritten_blocks"] > 100


@pytest.mark.parametrize("write", LEAVING)
def test_a_full_tier_that_stores_nothing_costs_no_request(write: WritePolicyName) -> None:
    rig = rig_with(write)
    tier = rig.tiers[0]
    tier.at_once = False
    for number in range(40):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
        tier.finish(success=False)
    assert tier.kept == {}
    assert not rig.manager.is_moving_blocks() or not tier.waiting


def test_a_step_that_takes_much_of_host_memory_makes_the_cleaner_hasty() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    seen = watch(rig)
    serve(rig, "large", keys(*range(40)), at_once=40)
    del seen[:]
    serve(rig, "next", keys(*range(100, 104)))
    assert seen[0] == keys(*range(100, 104)), "written at once"
    serve(rig, "large again", keys(*range(200, 240)), at_once=40)
    gone = [k for k in keys(*range(100, 104)) if not rig.primary.has(k)]
    assert rig.tiers[0].holds(*gone)


def test_every_tier_has_its_own_policy() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT, num_tiers=2)
    other = rig.manager._tiers[1]
    rig.manager._tiers[1].write_policy = SecondUse(_NUM_SLOTS)
    rig.manager._cascades.cleaner.writes_leaving = rig.manager._tiers[:1]
    for number in range(20):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert rig.tiers[0].kept
    assert rig.tiers[1].kept == {}
    assert other.bit != rig.manager._tiers[0].bit


# --- a reset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_epoch", [False, True])
def test_a_store_from_before_a_reset_does_not_count_for_blocks_after_it(keeps_epoch: bool) -> None:
    rig = rig_with(WritePolicyName.ON_EVICT, keeps_epoch=keeps_epoch)
    (tier,) = rig.tiers
    tier.at_once = False
    for number in range(10):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert tier.waiting
    rig.manager.reset_cache()
    rig.step()
    again = [k for job in tier.waiting for k in job.keys]
    request = rig.begin("after")
    rig.step(new_req_ids=["after"])
    rig.store(again[:4], request)
    tier.finish()
    rig.step()
    for k in again[:4]:
        block = rig.primary.slots.get(k)
        assert block is not None
        assert block.history is None or not block.history.below


def test_a_load_from_before_a_reset_does_not_count_for_blocks_after_it() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    (tier,) = rig.tiers
    serve(rig, "before", keys(1, 2))
    push_out(rig, 1)
    assert tier.holds(*keys(1, 2))
    tier.at_once = False
    request = rig.begin("reader")
    assert rig.look_up(keys(1, 2), request) == "PP"
    rig.step()
    assert [list(job.keys) for job in tier.waiting if job.is_promotion] == [keys(1, 2)]
    rig.manager.reset_cache()
    rig.step()
    rig.store(keys(1, 2), rig.begin("after"))
    rig.step(new_req_ids=["after"])
    tier.finish()
    rig.step()
    for k in keys(1, 2):
        block = rig.primary.slots.get(k)
        assert block is not None
        assert block.history is None or not block.history.below


# --- the eviction policy --------------------------------------------------------------------------


def test_a_policy_that_cannot_tell_what_leaves_next_is_written_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LRUCachePolicy, "next_to_leave", lambda policy, n: None)
    with caplog.at_level(logging.WARNING):
        rig = rig_with(WritePolicyName.ON_EVICT)
    assert "next_to_leave" in caplog.text
    serve(rig, "r", keys(1, 2))
    assert rig.tiers[0].holds(*keys(1, 2))


# --- adaptive -------------------------------------------------------------------------------------


def outcomes(sample: ReuseSample, its_class: int, used: Iterable[bool], lifetime: int) -> None:
    """Blocks of a class leave; some of them are used again in time."""
    for number, is_used in enumerate(used):
        k = key(1_000_000 * its_class + number)
        sample.note_left(k, its_class)
        sample.note_written(1)
        if is_used:
            sample.note_used([k])
    sample.note_written(2 * lifetime + 1)
    sample.note_left(key(10**9 + its_class), 99)


def test_the_sample_learns_each_class() -> None:
    sample = ReuseSample(100)
    outcomes(sample, 1, [True] * 90 + [False] * 10, 100)
    outcomes(sample, 2, [False] * 95 + [True] * 5, 100)
    assert sample.expected_reads(1) > 0.7
    assert sample.expected_reads(2) < 0.2
    assert sample.expected_reads(2) < sample.expected_reads(3) < sample.expected_reads(1)


def test_a_use_after_the_tier_would_have_evicted_the_block_is_late() -> None:
    sample = ReuseSample(10)
    sample.note_left(key(1), 1)
    sample.note_written(11)
    sample.note_used([key(1)])
    assert sample.all.share == 0
    assert sample.late.share == 1


def test_the_sample_is_bounded() -> None:
    sample = ReuseSample(10**9)
    for number in range(3 * write_policy._MAX_WATCHED):
        sample.note_left(key(number), 1)
    assert len(sample) <= write_policy._MAX_WATCHED
    assert sample.all.num_outcomes == 0, "blocks that are watched no longer are no outcomes"


def test_the_sample_recovers_when_a_tier_stores_again() -> None:
    """While a tier is cut off, blocks leave and none is written."""
    sample = ReuseSample(1000)
    for number in range(300 * write_policy._MAX_WATCHED):
        sample.note_left(key(number), 1)
    outcomes(sample, 2, [True] * 50_000, 1000)
    assert sample.expected_reads(2) > 0.9


def test_older_outcomes_count_less() -> None:
    sample = ReuseSample(4)
    outcomes(sample, 1, [True] * 2000, 4)
    outcomes(sample, 1, [False] * 2000, 4)
    assert sample.expected_reads(1) < 0.3


def with_history(num_uses: int, depth: int = 0) -> BlockHistory:
    history = BlockHistory()
    history.num_uses, history.depth = num_uses, depth
    return history


def taught(good: int, bad: int) -> Adaptive:
    """A policy that has seen blocks used twice come back, and blocks used once not."""
    policy = Adaptive(num_host_blocks=10, num_tier_blocks=100)
    for number in range(good + bad):
        k, uses = key(number), 2 if number < good else 1
        policy.note_left(k, with_history(uses), True)
        policy.note_written(1)
        if uses == 2:
            policy.note_used([k])
    policy.note_written(201)
    policy.note_left(key(10**9), with_history(4), True)
    return policy


def test_everything_is_written_until_enough_is_known() -> None:
    policy = taught(10, 100)
    assert policy.sample.all.num_outcomes < write_policy._ENOUGH
    assert policy.is_worth_writing(with_history(1))


def test_blocks_of_a_class_that_never_comes_back_are_left_out() -> None:
    policy = taught(300, 300)
    assert policy.is_worth_writing(with_history(2))
    assert not policy.is_worth_writing(with_history(1))


def test_regrets_bring_a_class_back() -> None:
    policy = taught(300, 300)
    for number in range(500):
        k = key(10**6 + number)
        policy.note_left(k, with_history(1), False)
        policy.note_used([k])
    assert policy.is_worth_writing(with_history(1))


def test_writes_that_cost_more_need_more_reads() -> None:
    policy = taught(300, 100)
    expected = policy.sample.expected_reads(write_policy._class_of(with_history(1)))
    assert policy.is_worth_writing(with_history(1)) == (expected >= policy.price)
    usual = policy.price
    policy.price_factor = 4.0
    assert policy.price == 4 * usual


def test_the_uses_of_a_block_that_was_left_out_are_remembered() -> None:
    policy = Adaptive(num_host_blocks=1, num_tier_blocks=100)
    policy.note_left(key(1), with_history(3), False)
    assert policy.recall(keys(1, 2)) == {key(1): 3}
    for number in range(1000):
        policy.note_left(key(number), with_history(1), False)
    assert len(policy._uses_of_left_out) <= policy._max_remembered


def test_a_block_that_is_computed_again_keeps_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adaptive, "is_worth_writing", lambda policy, history: False)
    rig = rig_with(WritePolicyName.ADAPTIVE, num_blocks=8)
    serve(rig, "first", keys(1, 2))
    serve(rig, "second", keys(1, 2))
    serve(rig, "others", keys(*range(10, 18)))
    assert not rig.primary.has(key(1))
    serve(rig, "third", keys(1, 2))
    block = rig.primary.slots.get(key(1))
    assert block is not None
    assert block.history.num_uses == 3


def test_a_block_is_sampled_once_for_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[OffloadKey] = []
    monkeypatch.setattr(Adaptive, "note_left", lambda policy, k, history, is_below: left.append(k))
    rig = rig_with(WritePolicyName.ADAPTIVE)
    for number in range(3):
        serve(rig, f"r{number}", keys(1, 2))
        push_out(rig, number)
        assert not rig.primary.has(key(1))
    assert rig.tiers[0].holds(*keys(1, 2))
    assert left.count(key(1)) == 1, "then it came from the tier, and was not written again"


def test_a_verdict_holds_for_one_pass() -> None:
    policy = taught(300, 300)
    assert policy.is_worth_writing(with_history(2))
    policy.price_factor = 100.0
    policy.begin_pass()
    assert not policy.is_worth_writing(with_history(2))


def test_blocks_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adaptive, "is_worth_writing", lambda policy, history: False)
    rig = rig_with(WritePolicyName.ADAPTIVE)
    seen = watch(rig)
    for number in range(20):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert seen == []
    figures = rig.tier_counters()
    assert figures["left_out_blocks"] > 50
    assert "unwritten_blocks" not in figures


def test_writes_cost_more_while_loads_wait_and_when_the_budget_is_low() -> None:
    rig = rig_with(WritePolicyName.ADAPTIVE, write_budget=86_400 * 64)
    (guarded,) = rig.manager._tiers
    cleaner = rig.manager._cascades.cleaner
    rig.clock.now += 3600
    cleaner._set_price(guarded, [], rig.clock.now)
    assert guarded.write_policy.price_factor == 1.0
    guarded.jobs.num_loading = 5
    cleaner._set_price(guarded, [], rig.clock.now)
    assert guarded.write_policy.price_factor == 2.0
    guarded.jobs.num_loading = 0
    guarded.budget.spend(guarded.budget.num_affordable(rig.clock.now))
    cleaner._set_price(guarded, [], rig.clock.now)
    assert guarded.write_policy.price_factor == 4.0


def test_writes_cost_more_when_a_read_saves_little() -> None:
    rig = rig_with(WritePolicyName.ADAPTIVE, groups={0: GroupShape(16)}, prefill_tokens_per_s=1600)
    (guarded,) = rig.manager._tiers
    cleaner = rig.manager._cascades.cleaner
    serve(rig, "r", keys(1, 2, 3, 4))
    blocks = rig.primary.slots.policy.next_to_leave(4)
    assert blocks is not None
    cleaner._set_price(guarded, blocks, rig.clock.now)
    assert guarded.write_policy.price_factor == 1.0, "how long a load takes is not known"
    for seconds, factor in ((0.0025, 4 / 3), (0.005, 2.0), (0.01, 4.0), (10.0, 4.0)):
        estimate = guarded.load_speed.estimate = TransferEstimate()
        for _ in range(50):
            estimate.note(1, seconds)
        assert estimate.predict(4) == pytest.approx(4 * seconds)
        # Computing a block takes 0.01 s.
        cleaner._set_price(guarded, blocks, rig.clock.now)
        assert guarded.write_policy.price_factor == pytest.approx(factor, rel=0.01)


# --- the budget -----------------------------------------------------------------------------------


def test_the_budget_is_kept_on_average_and_after_any_number_of_restarts() -> None:
    for lives in (1, 50):
        num_written, now = 0, 0.0
        for _ in range(lives):
            budget = WriteBudget(1000 * 100, 100, now)  # 1,000 blocks a day
            end = now + 5 * 86_400 / lives
            while now < end:
                now += 977.0
                n = budget.num_affordable(now)
                budget.spend(n)
                num_written += n
        assert now / 86_400 * 1000 * 0.6 < num_written <= now / 86_400 * 1000


def test_no_more_than_an_hour_is_saved_up() -> None:
    budget = WriteBudget(24 * 100 * 100, 100, 0.0)
    assert budget.num_affordable(0.0) == 0
    assert budget.num_affordable(30 * 86_400) == 100
    assert budget.share_left(30 * 86_400) == 1.0


def test_what_an_earlier_engine_had_left_is_not_spent_before_its_note_is_written_anew() -> None:
    budget = WriteBudget(24 * 100 * 100, 100, 0.0)
    budget.inherit(50 * 100, 0.0)
    assert budget.num_affordable(5.0) == 0
    assert budget.saved_up(5.0) > 50 * 100, "an engine that ends now leaves it to the next one"
    assert budget.num_affordable(11.0) == 50
    assert budget.num_affordable(12.0) == 50, "it is there once"


def test_without_a_budget_there_is_no_limit() -> None:
    budget = WriteBudget(None, 100, 0.0)
    budget.spend(10**9)
    assert budget.num_affordable(1.0) > 10**12
    assert budget.share_left(1.0) == 1.0


def test_a_tier_gets_no_more_than_its_budget() -> None:
    row_bytes = DrivenManager().primary.block_bytes
    rig = rig_with(WritePolicyName.THROUGH, write_budget=24 * 4 * row_bytes)
    serve(rig, "at the start", keys(1, 2))
    assert rig.tier_counters()["over_budget_blocks"] == 2
    rig.clock.now += 3600
    serve(rig, "an hour later", keys(*range(10, 16)), at_once=6)
    assert rig.tiers[0].holds(*keys(10, 11, 12, 13))
    figures = rig.tier_counters()
    assert figures["stored_blocks"] == 4
    assert figures["over_budget_blocks"] == 2


@pytest.mark.parametrize("write", LEAVING)
def test_blocks_beyond_the_budget_leave_unwritten(write: WritePolicyName) -> None:
    row_bytes = DrivenManager().primary.block_bytes
    rig = rig_with(write, write_budget=24 * 10 * row_bytes)
    rig.clock.now += 3600
    for number in range(40):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    assert len(rig.tiers[0].kept) == 10
    assert rig.tier_counters()["unwritten_blocks"] > 100


# --- the hint of a request ------------------------------------------------------------------------


@pytest.mark.parametrize("write", WritePolicyName)
def test_a_request_that_says_never_is_in_no_tier(write: WritePolicyName) -> None:
    rig = rig_with(write)
    seen = watch(rig)
    private = keys(1, 2, 3, 4)
    for number in range(3):
        serve(rig, f"private {number}", private, hint=WriteHint.NEVER)
        rig.clock.now += 10
    assert rig.look_up(private, rig.begin("hit")) == "HHHH", "host memory keeps them"
    assert rig.tier_counters()["kept_out_blocks"] == 4
    for number in range(40):  # until they have left host memory
        serve(rig, f"public {number}", keys(*range(100 + 4 * number, 104 + 4 * number)))
    assert not any(map(rig.primary.has, private))
    rig.manager.shutdown()
    assert not {block for store in seen for block in store}.intersection(private)


@pytest.mark.parametrize("write", WritePolicyName)
def test_a_request_that_says_through_is_in_the_tier_at_once(write: WritePolicyName) -> None:
    rig = rig_with(write)
    request = rig.begin("r", write_hint=WriteHint.THROUGH)
    rig.store(keys(1, 2), request)
    assert rig.tiers[0].holds(*keys(1, 2))


@pytest.mark.parametrize("write", [WritePolicyName.SECOND_USE, *LEAVING])
def test_what_through_finds_in_host_memory_goes_to_the_tier_when_it_ends(
    write: WritePolicyName,
) -> None:
    rig = rig_with(write)
    serve(rig, "first", keys(1, 2))
    assert not rig.tiers[0].kept
    serve(rig, "second", keys(1, 2, 3), hint=WriteHint.THROUGH)
    assert rig.tiers[0].holds(*keys(1, 2, 3))


@pytest.mark.parametrize("write", WritePolicyName)
def test_another_request_that_uses_the_blocks_ends_never(write: WritePolicyName) -> None:
    rig = rig_with(write)
    serve(rig, "private", keys(1, 2), hint=WriteHint.NEVER)
    rig.clock.now += 10
    serve(rig, "public", keys(1, 2))
    for number in range(40):
        rig.clock.now += 1
        serve(rig, f"other {number}", keys(*range(100 + 4 * number, 104 + 4 * number)))
    assert rig.tiers[0].holds(*keys(1, 2))


def test_a_hint_does_not_change_what_others_get() -> None:
    rig = rig_with(WritePolicyName.THROUGH)
    hinted = rig.begin("hinted", write_hint=WriteHint.NEVER)
    plain = rig.begin("plain")
    rig.store(keys(1, 2), hinted)
    rig.store(keys(3, 4), plain)
    assert rig.tiers[0].holds(*keys(3, 4))
    assert not rig.tiers[0].holds(key(1))


def test_through_does_not_exceed_the_budget() -> None:
    row_bytes = DrivenManager().primary.block_bytes
    rig = rig_with(WritePolicyName.ON_EVICT, write_budget=24 * 4 * row_bytes)
    rig.clock.now += 3600
    serve(rig, "r", keys(*range(6)), at_once=6, hint=WriteHint.THROUGH)
    assert len(rig.tiers[0].kept) == 4


# --- shutdown -------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", LEAVING)
def test_at_shutdown_the_warmest_prefixes_are_written(write: WritePolicyName) -> None:
    rig = rig_with(write)
    seen = watch(rig)
    for number in range(5):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    serve(rig, "warm again", keys(*range(6)))
    assert seen == []
    rig.manager.shutdown()
    written = [k for job in seen for k in job]
    assert written[:6] == keys(*range(6))
    assert len(written) == 30
    assert rig.tiers[0].holds(*written)


def test_a_restarted_engine_finds_what_was_warm() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    for number in range(5):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    rig.manager.shutdown()
    again = rig_with(WritePolicyName.ON_EVICT)
    again.tiers[0].kept = rig.tiers[0].kept
    request = again.begin("after the restart")
    assert again.look_up(keys(*range(6)), request) == "PPPPPP"


def test_at_shutdown_no_more_is_written_than_the_tier_holds() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT)
    rig.tiers[0].capacity_blocks = 8
    for number in range(5):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    rig.manager.shutdown()
    assert rig.tiers[0].holds(*keys(*range(40, 46)), *keys(30, 31))
    assert len(rig.tiers[0].kept) == 8


def test_shutdown_does_not_wait_for_a_tier_that_stores_nothing() -> None:
    rig = rig_with(WritePolicyName.ON_EVICT, max_pinned_share=0.1, shutdown_timeout_s=0.05)
    rig.tiers[0].at_once = False
    for number in range(8):
        serve(rig, f"r{number}", keys(*range(10 * number, 10 * number + 6)))
    rig.manager.shutdown()
    assert rig.memory.is_cleaned_up


@pytest.mark.parametrize("write", [WritePolicyName.THROUGH, WritePolicyName.SECOND_USE])
def test_other_policies_write_nothing_more_at_shutdown(write: WritePolicyName) -> None:
    rig = rig_with(write)
    serve(rig, "r", keys(1, 2, 3))
    seen = watch(rig)
    rig.manager.shutdown()
    assert seen == []


# --- what is on the books -------------------------------------------------------------------------


@pytest.mark.parametrize("write", list(WritePolicyName))
def test_nothing_is_left_when_all_has_ended(write: WritePolicyName) -> None:
    rig = rig_with(write)
    for number in range(30):
        serve(rig, f"r{number}", keys(*range(10 * (number % 12), 10 * (number % 12) + 6)))
    rig.step()
    assert not any(rig.manager.open_work().values())
    assert rig.stat("cpu_pinned_blocks") == 0
    calls = rig.tiers[0].calls
    begun = [name for what, name in calls if what == "new"]
    assert sorted(begun) == sorted(name for what, name in calls if what == "finished")
    assert len(begun) == len(set(begun))


def test_unannounced_contexts_are_enough_for_a_policy() -> None:
    policy = Adaptive()
    assert policy.select(keys(1), write_policy.WriteMoment.STORED, ReqContext("r")) == ()
