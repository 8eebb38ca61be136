"""One guarded tier: which calls it gets, and how much it is trusted with."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.tiering.base import JobResult
from kvtier.tiering.health import BreakerSettings
from tests.tiering.driven_manager import DrivenManager, HandTier, keys

# --- a tier that rests --------------------------------------------------------------------------


def finished(tier: HandTier) -> int:
    return sum(kind == "finished" for kind, _ in tier.calls)


def test_a_tier_that_rests_is_notified_of_ended_requests_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = DrivenManager(
        num_blocks=64, breaker=BreakerSettings(max_timeouts_in_a_row=1, first_pause_s=1.0)
    )
    tier = rig.tiers[0]
    requests = [rig.begin(f"r{number}") for number in range(150)]

    def slow(*args: Any) -> Any:
        rig.clock.now += 0.5
        return HandTier.lookup(tier, *args)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "lookup", slow)
        rig.look_up(keys(1), requests[0])
    for request in requests:
        rig.manager.on_request_finished(request)
        rig.step(seconds=0.0)
    assert finished(tier) == 0
    rig.clock.now += 1.0
    rig.look_up(keys(2), rig.begin("tries it again"))
    notified = [0]
    while notified[-1] < len(requests):
        rig.step()
        notified.append(finished(tier))
        assert 0 < notified[-1] - notified[-2] <= 64, "not all of them in one step"
    assert [req_id for kind, req_id in tier.calls if kind == "finished"] == [
        request.req_id for request in requests
    ]


# --- outcomes -----------------------------------------------------------------------------------


def late(rig: DrivenManager, number: int) -> None:
    """A load that misses its deadline, and is then reported all the same."""
    rig.keep_below(keys(number))
    request = rig.begin(f"waits for {number}")
    rig.look_up(keys(number), request)
    rig.step(seconds=2.1)
    rig.look_up(keys(number), request)
    rig.manager.on_request_finished(request)
    rig.tiers[0].finish()
    rig.step()


def test_loads_that_come_too_late_are_no_successes() -> None:
    rig = DrivenManager(num_blocks=32, breaker=BreakerSettings(max_timeouts_in_a_row=3))
    for number in range(3):
        late(rig, number)
    assert rig.stat("breaker_state") == 2


def test_loads_that_bring_a_part_are_no_failures() -> None:
    rig = DrivenManager(num_blocks=64, breaker=BreakerSettings(min_failures=3))
    for number in range(0, 20, 2):
        blocks = keys(number, number + 1)
        rig.keep_below(blocks)
        rig.look_up(blocks, rig.begin(f"r{number}"))
        rig.step()
        rig.tiers[0].finish(fail=blocks[1:])
        rig.step()
    assert rig.stat("failed_loads") == 10
    assert rig.stat("breaker_state") == 0


@pytest.mark.parametrize(
    ("num_gone", "state"), [(2, 0), (1, 2), (0, 2), (None, 2), ("all of them", 2)]
)
def test_loads_of_what_others_have_removed_are_no_failures(num_gone: Any, state: int) -> None:
    """Blocks that are gone are no failure of a shared tier; other failures are."""
    rig = DrivenManager(num_blocks=64, breaker=BreakerSettings(min_failures=3))
    for number in range(0, 20, 2):
        blocks = keys(number, number + 1)
        rig.keep_below(blocks)
        rig.look_up(blocks, rig.begin(f"r{number}"))
        rig.step()
        rig.tiers[0].finish(success=False, num_gone=num_gone)
        rig.step()
    assert rig.stat("breaker_state") == state


@pytest.mark.parametrize(
    ("num_declined", "state", "num_failed"),
    [(2, 0, 0), (3, 0, 0), (1, 2, 1), (0, 2, 2), (-1, 2, 2), (None, 2, 2)],
)
def test_stores_of_what_the_tier_does_not_want_are_no_failures(
    num_declined: Any, state: int, num_failed: int
) -> None:
    rig = DrivenManager(num_blocks=64, breaker=BreakerSettings(min_failures=3))
    for number in range(0, 20, 2):
        rig.store(keys(number, number + 1), rig.begin(f"r{number}"))
        rig.step()
        (tier,) = rig.tiers
        for job in tier.waiting:
            tier.results.append(JobResult(job.job_id, False, num_declined=num_declined))
        tier.waiting = []
        rig.step()
        if number == 0:
            assert rig.stat("failed_stores") == num_failed
    assert rig.stat("store_breaker_state") == state


def test_lookups_that_come_too_late_cut_a_tier_off() -> None:
    rig = DrivenManager(lookup_timeout_s=0.25, breaker=BreakerSettings(max_timeouts_in_a_row=2))
    rig.tiers[0].unknown.update(keys(1))
    for number in range(2):
        request = rig.begin(f"r{number}")
        assert rig.look_up(keys(1), request) == "R"
        rig.step(seconds=0.3)
        assert rig.look_up(keys(1), request) == "M"
        rig.step()
    assert rig.stat("breaker_state") == 2


@pytest.mark.parametrize("seconds", [1e3, 1e9])
def test_a_time_that_a_job_cannot_have_taken_counts_as_unknown(seconds: float) -> None:
    rig = DrivenManager(num_blocks=32, store_timeout_s=10.0)
    for number in range(5):
        rig.store(keys(number), rig.begin(f"r{number}"))
        rig.tiers[0].finish(transfer_time=seconds)
        rig.step()
    assert rig.stat("store_breaker_state") == 0


def test_a_tier_that_has_given_slots_back_gets_more_than_its_share_again() -> None:
    rig = DrivenManager(num_blocks=400, max_pinned_share=0.1)
    late(rig, 1)
    blocks = keys(*range(100, 160))
    rig.keep_below(blocks)
    rig.look_up(blocks, rig.begin("r"))
    rig.step()
    (job,) = rig.tiers[0].loads()
    assert len(job.keys) == 60, "its share is 40"


def test_stores_are_shed_while_a_tier_cannot_store() -> None:
    rig = DrivenManager(num_blocks=32, breaker=BreakerSettings(min_failures=3, first_pause_s=1.0))
    tier = rig.tiers[0]
    for number in range(3):
        rig.store(keys(number), rig.begin(f"r{number}"))
        tier.finish(success=False)
        rig.step()
    assert rig.stat("store_breaker_state") == 2
    rig.store(keys(10, 11), rig.begin("shed"))
    assert tier.waiting == []
    assert rig.stat("shed_blocks") == 2
    rig.clock.now += 1.0
    rig.store(keys(12), rig.begin("tries"))
    rig.store(keys(13), rig.begin("has to wait"))
    assert [list(job.keys) for job in tier.waiting] == [keys(12)]


# --- who may try a tier that was cut off --------------------------------------------------------


def about_to_be_tried() -> DrivenManager:
    """A tier that was cut off, and may be tried by one request."""
    rig = DrivenManager(
        num_blocks=16, lookup_timeout_s=5.0, breaker=BreakerSettings(first_pause_s=1.0)
    )
    rig.tiers[0].results.append(JobResult(10**9, success=True))
    rig.step(seconds=2.0)
    assert rig.stat("breaker_state") == 2
    rig.tiers[0].unknown.update(keys(1))
    rig.keep_below(keys(1, 2))
    return rig


def test_a_request_that_waits_for_an_answer_keeps_its_turn() -> None:
    rig = about_to_be_tried()
    prober, other = rig.begin("prober"), rig.begin("other")
    for _ in range(3):
        assert rig.look_up(keys(1), prober) == "R"
        assert rig.look_up(keys(2), other) == "M"
        rig.step()
        assert rig.look_up(keys(2), other) == "M", "also before the prober in a step"
    rig.tiers[0].unknown.clear()
    assert rig.look_up(keys(1), prober) == "P"


def test_a_request_that_ends_leaves_its_turn_to_another() -> None:
    rig = about_to_be_tried()
    prober = rig.begin("prober")
    assert rig.look_up(keys(1), prober) == "R"
    rig.manager.on_request_finished(prober)
    assert rig.look_up(keys(2), rig.begin("other")) == "P"
