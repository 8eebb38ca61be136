"""Looking ahead: what queued requests will need is in host memory when the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.manager import GroupShape
from tests.tiering.driven_manager import DrivenManager, HandTier, keys

TOKENS = 16
"""Of a block."""


class Queueing(DrivenManager):
    """An engine that announces queued requests with what its device lacks."""

    def __init__(self, num_blocks: int = 40, **kwargs: Any) -> None:
        super().__init__(num_blocks, groups={0: GroupShape(TOKENS)}, **kwargs)
        self.on_device: set[OffloadKey] = set()

    @property
    def only_tier(self) -> HandTier:
        assert self.tier is not None
        return self.tier

    def queue(
        self, req_id: str, prompt: Sequence[OffloadKey], priority: int = 0, **kwargs: Any
    ) -> ReqContext:
        """A request arrives whose prompt is below."""
        self.keep_below(prompt)
        context = self.begin(req_id, num_prompt_tokens=len(prompt) * TOKENS, **kwargs)
        self.manager.on_request_queued(
            context,
            lambda: [block for block in prompt if block not in self.on_device],
            priority=priority,
        )
        return context

    def finds(self, prompt: Sequence[OffloadKey], context: ReqContext) -> tuple[int, bool]:
        num_hits, is_final = self.manager.lookup_prefix(prompt, context)
        return num_hits, is_final

    def loading(self) -> list[tuple[str, list[OffloadKey]]]:
        """The loads under way: for which request, and what."""
        return [(job.req_context.req_id, list(job.keys)) for job in self.only_tier.loads()]

    def assert_all_ended(self) -> None:
        assert not any(self.manager.open_work().values()), self.manager.open_work()


def test_a_queued_request_finds_its_blocks_in_host_memory() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    request = rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == [("queued", prompt)]
    rig.only_tier.finish()
    rig.step()
    assert rig.finds(prompt, request) == (6, True)
    rig.load(prompt, request)
    rig.manager.on_request_finished(request)
    rig.step()
    rig.assert_all_ended()


def test_nothing_that_the_device_has_is_read() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    rig.on_device.update(prompt[:4])
    rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == [("queued", prompt[4:])]


def test_what_was_promoted_is_kept_until_the_request_starts() -> None:
    """Much longer than `load_timeout_s`, while other requests fill host memory several times."""
    rig, prompt = Queueing(num_blocks=24), keys(*range(6))
    request = rig.queue("queued", prompt)
    rig.step()
    rig.only_tier.finish()
    for n in range(10):
        other = rig.begin(f"other-{n}")
        rig.store(keys(*range(100 * n + 100, 100 * n + 112)), other)
        rig.manager.on_request_finished(other)
        rig.only_tier.finish()
        rig.step(seconds=5.0)
    assert rig.loading() == []
    assert rig.finds(prompt, request) == (6, True)


@pytest.mark.parametrize("has_arrived", [False, True])
def test_an_aborted_request_leaves_nothing_behind(has_arrived: bool) -> None:
    rig, prompt = Queueing(), keys(*range(6))
    request = rig.queue("queued", prompt)
    rig.step()
    if has_arrived:
        rig.only_tier.finish()
        rig.step()
    rig.manager.on_request_finished(request)
    rig.only_tier.finish()
    rig.step()
    rig.assert_all_ended()


def test_a_request_that_starts_without_a_lookup_leaves_the_queue() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    rig.queue("queued", prompt)
    rig.step()
    rig.only_tier.finish()
    rig.step(new_req_ids=["queued"])
    assert rig.manager.open_work()["queued requests"] == 0
    rig.step(seconds=rig.settings.load_timeout_s + 1)
    rig.step()
    assert rig.manager.open_work()["leased blocks"] == 0


def test_queued_requests_get_at_most_a_quarter_of_host_memory_in_the_order_of_their_turn() -> None:
    rig = Queueing(num_blocks=40)
    prompts = [keys(*range(10 * n, 10 * n + 5)) for n in range(5)]
    requests = [rig.queue(f"queued-{n}", prompt) for n, prompt in enumerate(prompts)]
    for _ in range(5):
        rig.step()
    assert rig.loading() == [("queued-0", prompts[0]), ("queued-1", prompts[1])]
    rig.only_tier.finish()
    rig.step()
    # The first one starts, so its share is free for the next one.
    assert rig.finds(prompts[0], requests[0]) == (5, True)
    rig.load(prompts[0], requests[0])
    rig.step(seconds=0.2)
    rig.step(seconds=0.2)
    assert rig.loading() == [("queued-2", prompts[2])]


def test_a_prompt_larger_than_the_share_is_brought_up_in_part() -> None:
    rig, prompt = Queueing(num_blocks=40), keys(*range(25))
    request = rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == [("queued", prompt[:10])]
    rig.only_tier.finish()
    rig.step()
    assert rig.finds(prompt, request) == (25, False)
    rig.step()
    assert rig.loading() == [("queued", prompt[10:])]


def test_requests_that_share_a_load_hold_no_more_than_the_share() -> None:
    """Each first one ends when its blocks have come; the second one stays in the queue."""
    rig = Queueing(num_blocks=100)
    for n in range(12):
        prompt = keys(*range(100 * n, 100 * n + 20))
        first = rig.queue(f"first-{n}", prompt)
        rig.queue(f"second-{n}", prompt)
        for _ in range(3):
            rig.step(seconds=0.15)
        rig.only_tier.finish()
        rig.step(seconds=0.15)
        rig.manager.on_request_finished(first)
        rig.step(seconds=0.15)
    assert rig.manager.open_work()["leased blocks"] == 25
    assert len(rig.store(keys(*range(9000, 9040)), rig.begin("running"))) == 40


def test_prefetches_leave_the_share_to_requests_that_somebody_waits_for() -> None:
    rig = Queueing(num_blocks=40)
    for n in range(6):
        rig.queue(f"prefetch-{n}", keys(*range(100 * n, 100 * n + 5)), is_prefetch=True)
    for _ in range(3):
        rig.step()
        rig.only_tier.finish()
    assert rig.stat("leased_blocks") == 5
    prompt = keys(*range(5000, 5008))
    rig.queue("urgent", prompt)
    rig.step()
    assert rig.loading() == [("urgent", prompt)]


@pytest.mark.parametrize("num_prefetches", [0, 20])
def test_nobody_is_held_up_by_waiting_for_a_prefetch(num_prefetches: int) -> None:
    """Loading takes five times as long as computing, on an idle engine."""
    rig = Queueing(num_blocks=400, prefill_tokens_per_s=TOKENS * 100.0, load_timeout_s=100.0)
    speed = rig.manager._tiers[0].load_speed.estimate
    for n in range(1, 13):
        speed.note(n, n / 20)
    for n in range(num_prefetches):
        rig.queue(f"prefetch-{n}", keys(5000 + n), is_prefetch=True)
    for _ in range(6):
        rig.step()
        rig.only_tier.finish(transfer_time=0.05)
    prompt = keys(*range(10))
    rig.keep_below(prompt)
    assert rig.finds(prompt, rig.begin("urgent", num_prompt_tokens=160)) == (0, True)


def test_a_prefetch_needs_no_other_request_and_is_not_kept_forever() -> None:
    rig, prompt = Queueing(num_blocks=48), keys(*range(6))
    prefetch = rig.queue("prefetch", prompt, is_prefetch=True)
    assert rig.manager.has_pending_work()
    while rig.manager.has_pending_work():  # as an idle engine does
        rig.step()
        rig.only_tier.finish()
    assert rig.stat("leased_blocks") == 6
    rig.step(seconds=61.0)
    rig.step()
    assert rig.stat("leased_blocks") == 0
    rig.manager.on_request_finished(prefetch)
    rig.assert_all_ended()


def test_priority_decides_whose_blocks_come_first() -> None:
    rig = Queueing(num_blocks=40)
    later, sooner = keys(*range(8)), keys(*range(20, 28))
    rig.queue("later", later, priority=1)
    rig.queue("sooner", sooner, priority=0)
    rig.step()
    assert rig.loading() == [("sooner", sooner), ("later", later[:2])]


def test_a_common_beginning_is_loaded_once() -> None:
    rig = Queueing(num_blocks=80)
    common = keys(*range(6))
    for n in range(4):
        rig.queue(f"queued-{n}", [*common, *keys(100 + n)])
    for _ in range(4):
        rig.step(seconds=0.2)
    loaded = [block for _, blocks in rig.loading() for block in blocks]
    assert len(loaded) == len(set(loaded)) == 6 + 4


def test_a_declined_request_is_asked_again_and_the_engine_decides_in_the_end() -> None:
    """The tier is so slow that the request should compute; then nothing else keeps it busy."""
    rig = Queueing(num_blocks=200, prefill_tokens_per_s=16.0 * 100, load_timeout_s=100.0)
    speed = rig.manager._tiers[0].load_speed.estimate
    for n in range(1, 13):
        speed.note(n, n / 90)  # computing takes a hundredth of a second
    first, second = keys(*range(10)), keys(*range(50, 60))
    rig.queue("first", first)
    rig.queue("second", second)
    assert rig.loading() == []
    rig.step()
    # Both hold up the other one, but the second would also wait for the load of the first.
    num_loading = len(rig.loading())
    assert num_loading >= 1
    rig.only_tier.finish(transfer_time=10 / 90)
    for _ in range(3):
        rig.step(seconds=0.2)
        rig.only_tier.finish(transfer_time=10 / 90)
    assert rig.stat("leased_blocks") == 20


def test_a_prefetch_loads_what_a_request_would_compute_and_comes_last() -> None:
    """The tier is a hundred times slower than computing."""
    rig = Queueing(num_blocks=200, prefill_tokens_per_s=16.0 * 1000, load_timeout_s=100.0)
    speed = rig.manager._tiers[0].load_speed.estimate
    for n in range(1, 13):
        speed.note(n, n / 10)
    hinted, slow, urgent = (keys(*range(n, n + 10)) for n in (0, 20, 40))
    rig.queue("prefetch", hinted, is_prefetch=True)
    rig.queue("declined", slow)
    rig.step()
    assert rig.loading() == [("prefetch", hinted)]
    rig.only_tier.finish()
    rig = Queueing(num_blocks=80)
    rig.queue("prefetch", hinted, is_prefetch=True)
    rig.queue("urgent", urgent)
    rig.step()
    assert rig.loading() == [("urgent", urgent), ("prefetch", hinted)]


def test_a_reset_drops_what_was_promoted() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    request = rig.queue("queued", prompt)
    rig.step()
    rig.only_tier.finish()
    rig.step()
    rig.manager.reset_cache()
    rig.step()
    assert rig.finds(prompt, request) == (0, True)
    assert rig.stat("leased_blocks") == 0


def test_an_engine_that_cannot_name_the_blocks_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, prompt = Queueing(), keys(*range(6))
    rig.keep_below(prompt)

    def fail() -> list[OffloadKey]:
        raise RuntimeError("no such request")

    requests = [rig.begin(f"queued-{n}") for n in range(2)]
    for request in requests:
        rig.manager.on_request_queued(request, fail)
    rig.step()
    rig.step()
    told = [each.message for each in caplog.records if "queued request" in each.message]
    assert len(told) == 1
    assert "Further failures are not logged" in told[0]
    assert rig.finds(prompt, requests[0])[0] == 6


# --- what is kept until the request starts -------------------------------------------------------


def fill_host_memory(rig: Queueing) -> None:
    """Other requests come and go for 5 s."""
    for n in range(10):
        other = rig.begin(f"other-{n}")
        rig.store(keys(*range(1000 * n + 1000, 1000 * n + 1012)), other)
        rig.manager.on_request_finished(other)
        for job in list(rig.only_tier.waiting):
            if not job.is_promotion:
                rig.only_tier.finish(job)
        rig.step(seconds=0.5)


def test_a_request_that_is_looked_up_again_and_again_keeps_its_blocks() -> None:
    """The engine has no room on the device for the first request of its queue."""
    rig, prompt = Queueing(num_blocks=24), keys(*range(6))
    request = rig.queue("queued", prompt)
    rig.step()
    rig.only_tier.finish()
    rig.step()
    for n in range(10):
        assert rig.finds(prompt, request) == (6, True)
        rig.store(keys(*range(100 * n + 100, 100 * n + 112)), rig.begin(f"other-{n}"))
        rig.only_tier.finish()
        rig.step(seconds=0.5)


def test_blocks_that_were_in_host_memory_are_kept_as_well() -> None:
    rig, prompt = Queueing(num_blocks=24), keys(*range(6))
    warm = rig.begin("warm")
    rig.store(prompt[:3], warm)
    rig.manager.on_request_finished(warm)
    rig.only_tier.finish()
    rig.step()
    request = rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == [("queued", prompt[3:])]
    rig.only_tier.finish()
    fill_host_memory(rig)
    assert rig.finds(prompt, request) == (6, True)


@pytest.mark.parametrize("is_prefetch", [False, True])
def test_what_another_request_has_brought_up_is_kept(is_prefetch: bool) -> None:
    rig, prompt = Queueing(num_blocks=48), keys(*range(6))
    first = rig.queue("first", prompt, is_prefetch=is_prefetch)
    rig.step()
    rig.only_tier.finish()
    rig.step()
    second = rig.queue("second", prompt)
    rig.step()
    rig.manager.on_request_finished(first)
    fill_host_memory(rig)
    assert rig.finds(prompt, second) == (6, True)


# --- looked up again -----------------------------------------------------------------------------


def test_after_a_reset_queued_requests_are_looked_up_again() -> None:
    rig, prompt = Queueing(num_blocks=40), keys(*range(10))
    rig.queue("queued", prompt)
    rig.step()
    rig.only_tier.finish()
    rig.step()
    rig.manager.reset_cache()
    rig.keep_below(prompt)
    rig.step()
    assert rig.loading() == [("queued", prompt)]


def test_failed_loads_take_no_room_and_are_tried_in_the_next_tier() -> None:
    rig, prompt, other = Queueing(num_tiers=2), keys(*range(10)), keys(*range(20, 30))
    rig.keep_below(prompt, rig.tiers[1])
    rig.queue("queued", prompt)
    rig.step()
    rig.tiers[0].finish(success=False)
    rig.step()
    rig.step()
    assert [list(job.keys) for job in rig.tiers[1].loads()] == [prompt]
    rig.tiers[1].finish(success=False)
    rig.queue("other", other)
    rig.step()
    rig.step()
    assert ("other", other) in rig.loading()


def test_a_tier_that_does_not_know_yet_is_asked_again() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    rig.only_tier.unknown.update(prompt)
    rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == []
    rig.only_tier.unknown.clear()
    rig.step()
    assert rig.loading() == [("queued", prompt)]


def test_without_room_a_request_is_looked_up_again() -> None:
    rig, prompt = Queueing(), keys(*range(6))
    busy, written = rig.begin("busy"), keys(*range(100, 139))
    rig.manager.prepare_store(written, busy)
    rig.queue("queued", prompt)
    rig.step()
    assert rig.loading() == []
    rig.manager.complete_store(set(written), busy)
    rig.manager.on_request_finished(busy)
    rig.only_tier.finish()
    for _ in range(4):
        rig.step(seconds=0.2)
    assert rig.loading() == [("queued", prompt)]


def test_while_the_tier_is_measured_a_request_is_looked_up_again() -> None:
    rig = Queueing(num_blocks=80, prefill_tokens_per_s=None)
    for n in range(2):
        rig.queue(f"queued-{n}", keys(*range(20 * n, 20 * n + 10)))
    for _ in range(20):
        rig.step(seconds=0.1)
        rig.only_tier.finish(transfer_time=0.01)
    assert rig.stat("leased_blocks") == 20


def test_a_wait_in_the_engines_queue_is_no_wait_for_tiers() -> None:
    """A request that was looked up ahead for minutes may still wait for its load."""
    rig, prompt = Queueing(num_blocks=40), keys(*range(30))
    request = rig.queue("queued", prompt)
    for _ in range(10):
        rig.step(seconds=20.0)
        rig.only_tier.finish()
    assert rig.finds(prompt, request) == (30, False)
    rig.step()
    assert rig.loading() == [("queued", prompt[10:])]
