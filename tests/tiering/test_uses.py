"""Every tier is told which blocks requests have used, and gets again those that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering import cascade
from kvtier.tiering.write_policy import WriteMoment
from tests.tiering.driven_manager import DrivenManager, HandTier, keys


def end(rig: DrivenManager, request: ReqContext) -> None:
    rig.manager.on_request_finished(request)
    rig.step()


def finish_all(rig: DrivenManager) -> None:
    for tier in rig.tiers:
        tier.finish()
    rig.step(seconds=10.0)


def wait_for(rig: DrivenManager, blocks: Sequence[OffloadKey], request: ReqContext) -> int:
    while True:
        answer = rig.manager.lookup_prefix(blocks, request)
        if answer.is_final:
            return answer.num_hits
        rig.step()
        for tier in rig.tiers:
            tier.finish()


def forget_below(tier: HandTier, blocks: Sequence[OffloadKey]) -> None:
    """The tier evicts these."""
    for block in blocks:
        tier.kept.pop((tier.fingerprint, block), None)


def stored(rig: DrivenManager, blocks: Sequence[OffloadKey], name: str = "stores") -> None:
    """These blocks are in host memory and in every tier, and nothing is under way."""
    request = rig.begin(name)
    rig.store(blocks, request)
    end(rig, request)
    finish_all(rig)
    for tier in rig.tiers:
        tier.touched.clear()


# --- which blocks are touched -------------------------------------------------------------------


def test_every_tier_hears_what_a_request_had_from_host_memory() -> None:
    rig = DrivenManager(num_tiers=2)
    stored(rig, keys(1, 2, 3))
    request = rig.begin("r")
    assert rig.look_up(keys(1, 2, 3), request) == "HHH"
    rig.load(keys(1, 2, 3), request)
    assert [tier.touched for tier in rig.tiers] == [[], []]
    end(rig, request)
    assert [tier.touched for tier in rig.tiers] == [[keys(1, 2, 3)]] * 2


def test_every_tier_hears_what_a_request_had_from_another_tier() -> None:
    rig = DrivenManager(num_tiers=2)
    rig.keep_below(keys(1, 2), rig.tiers[1])
    request = rig.begin("r")
    assert wait_for(rig, keys(1, 2), request) == 2
    rig.load(keys(1, 2), request)
    end(rig, request)
    assert [tier.touched for tier in rig.tiers] == [[keys(1, 2)]] * 2


def test_every_tier_hears_of_blocks_that_were_on_the_device() -> None:
    """The engine says so. They need not be in host memory."""
    rig = DrivenManager(num_tiers=2)
    request = rig.begin("r")
    rig.manager.touch(keys(1, 2), request)
    end(rig, request)
    assert [tier.touched for tier in rig.tiers] == [[keys(1, 2)]] * 2


def test_a_use_is_told_once_however_often_the_engine_says_so() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    for prompt in ([1, 2], [1, 2], [1, 2, 3], [1, 2, 3]):
        rig.manager.touch(keys(*prompt), request)
        rig.step()
    rig.store(keys(3, 4), request)
    end(rig, request)
    assert rig.tiers[0].touched == [keys(1, 2, 3, 4)]


def test_blocks_are_told_in_prompt_order_when_the_last_store_has_left_the_device() -> None:
    """By then every block of the prompt has been given to the tier, so that its head can be the
    last to leave."""
    rig = DrivenManager()
    stored(rig, keys(1, 2))
    request = rig.begin("r")
    rig.look_up(keys(1, 2), request)
    rig.load(keys(1, 2), request)
    output = rig.manager.prepare_store(keys(3, 4), request)
    assert output is not None
    end(rig, request)
    assert rig.tiers[0].touched == []
    rig.manager.complete_store(set(keys(3, 4)), request)
    assert rig.tiers[0].touched == [keys(1, 2, 3, 4)]
    assert rig.tiers[0].calls[-2:] == [("store", "r"), ("finished", "r")]


def test_a_request_that_only_looked_up_has_used_nothing() -> None:
    """It was aborted while it waited."""
    rig = DrivenManager(num_tiers=2)
    rig.keep_below(keys(1, 2), rig.tiers[1])
    request = rig.begin("r")
    assert wait_for(rig, keys(1, 2), request) == 2
    end(rig, request)
    finish_all(rig)
    assert [tier.touched for tier in rig.tiers] == [[], []]
    assert not rig.tiers[0].holds(*keys(1))


def test_what_was_used_before_a_reset_is_not_told_after_it() -> None:
    rig = DrivenManager()
    request = rig.begin("r")
    output = rig.manager.prepare_store(keys(1, 2), request)
    assert output is not None
    end(rig, request)
    rig.manager.reset_cache()
    rig.step()
    assert rig.tiers[0].touched == []
    assert rig.manager.open_work()["requests"] == 0


# --- what is offered again ----------------------------------------------------------------------


def use(rig: DrivenManager, blocks: Sequence[OffloadKey], name: str) -> None:
    """A request has these blocks from host memory."""
    request = rig.begin(name)
    rig.manager.lookup_prefix(blocks, request)
    rig.load(blocks, request)
    end(rig, request)


def test_what_a_tier_lacks_is_offered_again_when_it_is_used() -> None:
    rig = DrivenManager(num_blocks=64, num_tiers=2)
    stored(rig, keys(1, 2, 3))
    forget_below(rig.tiers[0], keys(2, 3))
    use(rig, keys(1, 2, 3), "r")
    (job,) = rig.tiers[0].waiting
    assert list(job.keys) == keys(2, 3)
    assert rig.tiers[1].waiting == []
    finish_all(rig)
    assert rig.tiers[0].holds(*keys(1, 2, 3))
    counters = rig.manager.get_stats().counters
    assert counters['kvtier_tier_offered_again_blocks{tier="0:hand0"}'] == 2
    assert 'kvtier_tier_offered_again_blocks{tier="1:hand1"}' not in counters


def test_what_a_tier_lacks_is_not_offered_when_it_is_not_in_host_memory() -> None:
    rig = DrivenManager(num_blocks=64)
    stored(rig, keys(1, 2))
    request = rig.begin("r")
    rig.manager.touch(keys(1, 2, 3), request)  # the third is on the device alone
    forget_below(rig.tiers[0], keys(2))
    end(rig, request)
    (job,) = rig.tiers[0].waiting
    assert list(job.keys) == keys(2)


def test_a_promoted_block_fills_the_tiers_before_its_source() -> None:
    """Otherwise a prompt that a peer has stored in a shared directory would always cross the
    network."""
    rig = DrivenManager(num_blocks=64, num_tiers=3)
    prompt = keys(*range(10))
    rig.keep_below(prompt, rig.tiers[2])
    request = rig.begin("r")
    assert wait_for(rig, prompt, request) == 10
    rig.load(prompt, request)
    end(rig, request)
    finish_all(rig)
    assert rig.tiers[0].holds(*prompt)
    assert rig.tiers[1].holds(*prompt)
    # Next time it comes from the first.
    stored(rig, keys(*range(100, 160)), "fills host memory")
    loads_before = [tier.calls.count(("load", "again")) for tier in rig.tiers]
    again = rig.begin("again")
    assert wait_for(rig, prompt, again) == 10
    loads = [tier.calls.count(("load", "again")) for tier in rig.tiers]
    assert loads_before == [0, 0, 0]
    assert loads == [1, 0, 0]


def test_a_block_that_is_being_stored_is_not_offered_again() -> None:
    rig = DrivenManager(num_blocks=64)
    request = rig.begin("r")
    rig.store(keys(1, 2), request)
    end(rig, request)
    assert len(rig.tiers[0].waiting) == 1


def test_a_tier_that_does_not_say_what_it_lacks_is_offered_nothing() -> None:
    rig = DrivenManager(num_blocks=64)
    stored(rig, keys(1, 2))
    rig.tiers[0].names_missing = False
    forget_below(rig.tiers[0], keys(1, 2))
    use(rig, keys(1, 2), "r")
    assert rig.tiers[0].waiting == []


def test_one_offer_is_under_way_at_a_time() -> None:
    rig = DrivenManager(num_blocks=64)
    tier = rig.tiers[0]
    stored(rig, keys(1, 2))
    stored(rig, keys(3, 4), "others")
    forget_below(tier, keys(1, 2, 3, 4))
    use(rig, keys(1, 2), "a")
    rig.clock.now += 100
    use(rig, keys(3, 4), "b")
    assert [list(job.keys) for job in tier.waiting] == [keys(1, 2)]
    assert rig.stat("held_back_blocks") == 2
    finish_all(rig)
    use(rig, keys(3, 4), "c")
    assert [list(job.keys) for job in tier.waiting] == [keys(3, 4)]


def test_offers_have_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an offer the next one waits for as long as the bound gives the first."""
    rig = DrivenManager(num_blocks=64)
    tier = rig.tiers[0]
    monkeypatch.setattr(cascade, "_OFFERED_BYTES_PER_S", 10 * rig.primary.block_bytes)
    prompts = [keys(*range(n, n + 5)) for n in range(0, 50, 5)]
    for n, prompt in enumerate(prompts):
        stored(rig, prompt, f"stores {n}")
    forget_below(tier, [block for prompt in prompts for block in prompt])
    began = rig.clock.now
    rig.manager.get_stats()
    num_rounds = 0
    while not all(tier.holds(*prompt) for prompt in prompts):
        num_rounds += 1
        for n, prompt in enumerate(prompts):
            use(rig, prompt, f"{num_rounds}-{n}")
            tier.finish()
            rig.step(seconds=0.01)
    assert rig.clock.now - began >= 45 / 10
    counters = rig.manager.get_stats().counters
    assert counters['kvtier_tier_offered_again_blocks{tier="0:hand0"}'] == 50
    assert counters['kvtier_tier_not_stored_blocks{tier="0:hand0",reason="held_back"}'] > 0


def test_an_offer_leaves_half_of_the_share_to_new_stores() -> None:
    """And the head of the prompt goes first."""
    rig = DrivenManager(num_blocks=400, max_pinned_share=0.25)
    tier = rig.tiers[0]
    prompt = keys(*range(80))
    stored(rig, prompt)
    forget_below(tier, prompt)
    use(rig, prompt, "r")
    (job,) = tier.waiting
    assert list(job.keys) == prompt[:50]
    assert rig.stat("held_back_blocks") == 30
    rig.store(keys(*range(100, 150)), rig.begin("new"))
    assert len(tier.waiting) == 2  # at once


@pytest.mark.parametrize(("seconds", "num_blocks"), [(0.1, 100), (5.0, 2), (100.0, 1)])
def test_an_offer_takes_a_tier_about_a_quarter_of_a_second(seconds: float, num_blocks: int) -> None:
    """So that a new store does not wait longer behind it."""
    rig = DrivenManager(num_blocks=400)
    tier = rig.tiers[0]
    prompt = keys(*range(140))
    stored(rig, prompt)
    forget_below(tier, prompt)
    use(rig, prompt[:40], "first")
    rig.clock.now += seconds
    tier.finish(transfer_time=seconds)
    rig.step(seconds=10.0)
    use(rig, prompt[40:], "second")
    (job,) = tier.waiting
    assert list(job.keys) == prompt[40 : 40 + num_blocks]


def test_nothing_is_offered_while_new_stores_wait() -> None:
    rig = DrivenManager(num_blocks=200, max_pinned_share=0.16)
    tier = rig.tiers[0]
    stored(rig, keys(1, 2))
    forget_below(tier, keys(1, 2))
    rig.store(keys(*range(100, 140)), rig.begin("new"))
    assert rig.stat("waiting_blocks") > 0
    num_jobs = len(tier.waiting)
    use(rig, keys(1, 2), "r")
    assert len(tier.waiting) == num_jobs


def test_nothing_is_offered_to_a_tier_whose_stores_are_cut_off() -> None:
    rig = DrivenManager(num_blocks=64)
    tier = rig.tiers[0]
    stored(rig, keys(1, 2))
    for n in range(5):
        rig.store(keys(10 + n), rig.begin(f"fails {n}"))
        tier.finish(success=False)
        rig.step()
    assert rig.stat("store_breaker_state") == 2
    forget_below(tier, keys(1, 2))
    use(rig, keys(1, 2), "r")
    assert tier.waiting == []


def test_the_write_policy_decides_what_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DrivenManager(num_blocks=64)
    stored(rig, keys(1, 2, 3))
    asked: list[Any] = []

    class LastOnly:
        def select(
            self, blocks: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
        ) -> Sequence[OffloadKey]:
            asked.append((list(blocks), moment, req_context.req_id))
            return blocks[-1:]

    monkeypatch.setattr(rig.manager._tiers[0], "write_policy", LastOnly())
    forget_below(rig.tiers[0], keys(1, 2, 3))
    use(rig, keys(1, 2, 3), "r")
    assert asked == [(keys(1, 2, 3), WriteMoment.USED, "r")]
    (job,) = rig.tiers[0].waiting
    assert list(job.keys) == keys(3)
    assert rig.stat("held_back_blocks") == 0


@pytest.mark.parametrize("answer", [None, 7, "keys", [None], keys(9), keys(1, 1), iter(keys(1))])
def test_a_tier_that_names_what_it_was_not_asked_for_is_cut_off(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DrivenManager(num_blocks=64)
    stored(rig, keys(1, 2))
    monkeypatch.setattr(rig.tiers[0], "missing", lambda *_: answer)
    use(rig, keys(1, 2), "r")
    stats = rig.manager.get_stats()
    assert stats.counters['kvtier_tier_faults{tier="0:hand0",kind="violation"}'] == 1
    assert stats.gauges['kvtier_tier_breaker_state{tier="0:hand0",direction="load"}'] == 2
    assert rig.tiers[0].waiting == []
