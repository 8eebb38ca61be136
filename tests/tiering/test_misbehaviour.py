"""A tier that breaks its contract is cut off, and the engine is not affected."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.base import OffloadingStats
from kvtier.cpu.policies.base import SlotState
from kvtier.tiering.base import JobNotBegun, JobResult, TransferJob
from kvtier.tiering.health import BreakerSettings, BreakerState
from tests.tiering.driven_manager import DrivenManager, HandTier, keys

METHODS = [
    "lookup",
    "lookup_batch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "touch",
    "missing",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "has_announcements",
    "get_stats",
    "begin_epoch",
    "take_seal_failures",
]


def live(rig: DrivenManager, number: int) -> None:
    """A request that makes every kind of call."""
    request = rig.begin(f"r{number}")
    blocks = keys(*range(number % 5, number % 5 + 4))
    rig.look_up(blocks, request)
    rig.manager.lookup_prefix(blocks, request)
    rig.store(blocks, request)
    rig.step()
    if rig.look_up(blocks, request) == "HHHH":
        rig.load(blocks, request)
    rig.manager.touch(blocks, request)
    rig.manager.has_pending_work()
    rig.manager.on_request_finished(request)
    list(rig.manager.take_events())
    rig.manager.get_stats()
    rig.step(seconds=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises_does_not_reach_the_engine(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("the disk is gone")

    rig = DrivenManager(num_blocks=100, num_tiers=2)
    broken, sound = rig.tiers
    sound.at_once = True
    monkeypatch.setattr(broken, method, fail)
    for number in range(20):
        live(rig, number)
        if number == 10:
            rig.manager.reset_cache()
            rig.step()
    assert sound.holds(*keys(0, 1, 2, 3, 4, 5, 6, 7))


GARBAGE = [None, 42, "HIT", [], object()]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: type(garbage).__name__)
@pytest.mark.parametrize(
    "method", ["lookup", "lookup_batch", "get_finished_jobs", "on_new_request", "get_stats"]
)
def test_an_answer_that_is_none_does_not_reach_the_engine(
    method: str, garbage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DrivenManager(num_blocks=12)
    monkeypatch.setattr(rig.tiers[0], method, lambda *args: garbage)
    for number in range(10):
        live(rig, number)


@pytest.mark.parametrize("value", [None, "many", -1, float("nan"), float("inf")], ids=repr)
def test_a_count_that_is_none_is_left_out(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DrivenManager()
    wrong = OffloadingStats(counters={"kvtier_hand_things": value})
    monkeypatch.setattr(rig.tiers[0], "get_stats", lambda: wrong)
    rig.manager.get_stats()
    counted = rig.manager.get_stats().counters
    assert not [name for name in counted if name.startswith("kvtier_hand_things")]
    assert counted['kvtier_tier_faults{tier="0:hand0",kind="error"}'] == 1


def test_numbers_of_numpy_are_reported_as_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a status socket can send them."""
    rig = DrivenManager()
    its = OffloadingStats({"c": np.int64(2)}, {"g": np.float32(0.5)}, {"h": [np.float64(1)]})  # type: ignore[dict-item]
    monkeypatch.setattr(rig.tiers[0], "get_stats", lambda: its)
    stats = rig.manager.get_stats()
    values = [
        stats.counters['c{tier="0:hand0"}'],
        stats.gauges['g{tier="0:hand0"}'],
        *stats.histograms['h{tier="0:hand0"}'],
    ]
    assert values == [2, 0.5, 1]
    assert {type(value) for value in values} == {float}


class Panic(BaseException):
    """An exception of a client library that is not written in Python."""


def panicking() -> Iterator[bytes]:
    raise Panic
    yield b""


class PanickingKey(bytes):
    def __hash__(self) -> int:
        raise Panic


MISSING = {
    "endless": itertools.cycle(keys(1, 2)),
    "lazy": panicking(),
    "set": set(keys(1)),
    "empty set": set(),
    "too many": keys(1, 2, 1),
    "unhashable": [[]],
    "panicking key": [PanickingKey(keys(1)[0])],
}


@pytest.mark.parametrize("answer", MISSING.values(), ids=MISSING)
def test_an_answer_that_is_no_list_of_keys_is_not_iterated(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterator that may have no end, and may raise anything."""
    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "missing", lambda *_: answer)
    request = rig.begin("r")
    rig.store(keys(1, 2), request)
    rig.manager.on_request_finished(request)
    stats = rig.manager.get_stats()
    assert stats.counters['kvtier_tier_faults{tier="0:hand0",kind="violation"}'] == 1
    assert stats.gauges['kvtier_tier_breaker_state{tier="0:hand0",direction="load"}'] == 2


@pytest.mark.parametrize(
    "result",
    [
        JobResult(10**9, success=True),
        None,
        "done",
        JobResult([], success=True),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_report_of_a_job_never_given_isolates_the_tier(result: Any) -> None:
    rig = DrivenManager()
    rig.tiers[0].results.append(result)
    rig.step()
    assert rig.stat("breaker_state") == 2
    assert rig.look_up(keys(1), rig.begin("r")) == "M"


def test_a_second_report_isolates_the_tier_and_changes_nothing_else() -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]
    tier.at_once = True
    rig.store(keys(1, 2), rig.begin("r"))
    tier.results *= 2
    rig.step()
    assert rig.stat("cpu_pinned_blocks") == 0
    assert rig.stat("breaker_state") == 2


@pytest.mark.parametrize(
    "named", [42, [[]], [b"stranger"], keys(7)], ids=["number", "unhashable", "bytes", "other"]
)
def test_keys_that_were_not_in_the_job_do_not_count(named: Any) -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    (job,) = rig.tiers[0].loads()
    rig.tiers[0].waiting.clear()
    rig.tiers[0].results.append(JobResult(job.job_id, False, named))
    assert rig.look_up(keys(1), request) == "M"
    assert rig.primary.slots.states()[SlotState.FREE] == 8


@pytest.mark.parametrize("seconds", ["long", float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_counts_as_unknown(seconds: Any) -> None:
    rig = DrivenManager()
    rig.store(keys(1), rig.begin("r"))
    rig.tiers[0].finish(transfer_time=seconds)
    rig.step()
    assert rig.stat("cpu_pinned_blocks") == 0
    assert rig.stat("breaker_state") == 0


def test_what_was_reported_before_it_raised_counts() -> None:
    class Halfway(HandTier):
        def get_finished_jobs(self) -> Any:
            return self.halfway()

        def halfway(self) -> Iterator[JobResult]:
            yield from super().get_finished_jobs()
            raise ConnectionError

    rig = DrivenManager()
    rig.tiers[0].__class__ = Halfway
    rig.tiers[0].at_once = True
    rig.store(keys(1), rig.begin("r"))
    rig.step()
    assert rig.stat("cpu_pinned_blocks") == 0


def test_nobody_waits_for_a_load_that_could_not_be_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = DrivenManager()
    rig.keep_below(keys(1))
    tier = rig.tiers[0]
    accepted: list[TransferJob] = []

    def fail(job: TransferJob) -> None:
        accepted.append(job)
        raise RuntimeError("queue full")

    monkeypatch.setattr(tier, "submit_load", fail)
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    assert rig.look_up(keys(1), request) == "M"
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 1, "it may have begun"
    rig.step()
    tier.results.append(JobResult(accepted[0].job_id, success=False))
    rig.step()
    assert rig.primary.slots.states()[SlotState.QUARANTINED] == 0


def test_a_load_that_was_not_begun_gives_its_slots_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(job: TransferJob) -> None:
        raise JobNotBegun("the queue is full")

    rig = DrivenManager(num_blocks=8, num_tiers=2)
    busy, other = rig.tiers
    for tier in rig.tiers:
        rig.keep_below(keys(1, 2), tier)
    monkeypatch.setattr(busy, "submit_load", refuse)
    request = rig.begin("r")
    rig.look_up(keys(1, 2), request)
    rig.step()
    assert rig.primary.slots.states()[SlotState.FREE] == 8
    assert rig.look_up(keys(1, 2), request) == "PP", "the next tier has them too"
    rig.step()
    other.finish()
    rig.step()
    assert rig.look_up(keys(1, 2), request) == "HH"
    rig.manager.on_request_finished(request)
    rig.step()
    assert rig.stat("failed_loads") == 2
    assert not any(rig.manager.open_work().values())


def test_a_store_that_was_not_begun_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: TransferJob) -> None:
        raise JobNotBegun("the queue is full")

    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "submit_store", refuse)
    request = rig.begin("r")
    rig.store(keys(1, 2, 3), request)
    rig.manager.on_request_finished(request)
    assert rig.stat("cpu_pinned_blocks") == 0
    assert not any(rig.manager.open_work().values())
    for number in range(10):
        rig.store(keys(10 + number), rig.begin(f"r{number}"))
        rig.step()
    assert rig.stat("store_breaker_state") == BreakerState.OPEN.value


def test_a_job_that_was_not_begun_must_not_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: TransferJob) -> None:
        tier.results.append(JobResult(job.job_id, success=True))
        raise JobNotBegun("but it has")

    rig = DrivenManager()
    (tier,) = rig.tiers
    rig.keep_below(keys(1))
    monkeypatch.setattr(tier, "submit_load", refuse)
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.step()
    assert rig.look_up(keys(1), request) == "M"
    assert rig.stat("violations") == 1


def test_calls_that_block_cut_a_tier_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DrivenManager(breaker=BreakerSettings(max_timeouts_in_a_row=3))
    tier = rig.tiers[0]
    answer = tier.lookup

    def slow(*args: Any) -> Any:
        rig.clock.now += 0.5
        return answer(*args)

    monkeypatch.setattr(tier, "lookup", slow)
    start = rig.clock.now
    for number in range(100):
        rig.look_up(keys(number), rig.begin(f"r{number}"))
    assert rig.clock.now - start == 1.5
    assert rig.stat("blocking_calls") == 3


def test_a_tier_that_keeps_its_old_namespace_is_never_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "begin_epoch", lambda fingerprint: None)
    rig.keep_below(keys(1))
    with caplog.at_level(logging.ERROR):
        rig.manager.reset_cache()
    assert "begin_epoch" in caplog.text
    for _ in range(5):
        rig.step(seconds=1000.0)
        request = rig.begin("r")
        assert rig.look_up(keys(1), request) == "M"
        rig.store(keys(2), request)
        rig.manager.on_request_finished(request)
    assert rig.tiers[0].waiting == []


def test_each_kind_of_trouble_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    rig = DrivenManager(breaker=BreakerSettings(min_failures=10**6))
    monkeypatch.setattr(rig.tiers[0], "lookup", fail)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            rig.look_up(keys(number), rig.begin(f"r{number}"))
    assert caplog.text.count("the disk is gone") == 1
    assert "tier 0 (hand0)" in caplog.text
    assert rig.stat("errors") == 50


def test_metrics_of_two_tiers_of_one_type_are_labelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = DrivenManager(num_tiers=2)
    for tier in rig.tiers:
        stats = OffloadingStats({'own_count{kind="a"}': 2}, {"own_level": 3}, {"own_times": [0.1]})
        monkeypatch.setattr(tier, "get_stats", lambda stats=stats: stats)
    stats = rig.manager.get_stats()
    for label in ("0:hand0", "1:hand1"):
        assert stats.counters[f'own_count{{tier="{label}",kind="a"}}'] == 2
        assert stats.gauges[f'own_level{{tier="{label}"}}'] == 3
        assert stats.histograms[f'own_times{{tier="{label}"}}'] == [0.1]


@pytest.mark.parametrize("method", ["get_finished_jobs", "take_events", "get_stats", "touch"])
def test_a_tier_that_blocks_is_called_less_and_less(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DrivenManager(num_blocks=100, breaker=BreakerSettings(max_timeouts_in_a_row=3))
    tier = rig.tiers[0]
    answer = getattr(tier, method)
    num_calls = 0

    def slow(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        rig.clock.now += 0.5
        return answer(*args)

    request = rig.begin("hangs")
    rig.store(keys(99), request)  # a job that is never reported
    monkeypatch.setattr(tier, method, slow)
    for number in range(300):
        live(rig, number)
    assert num_calls < 30


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), BaseException("x")])
@pytest.mark.parametrize("method", ["lookup", "submit_load", "get_finished_jobs"])
def test_not_even_exceptions_of_another_kind_reach_the_engine(
    method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    rig = DrivenManager(num_blocks=100)
    rig.keep_below(keys(*range(9)))
    monkeypatch.setattr(rig.tiers[0], method, fail)
    for number in range(10):
        live(rig, number)


def test_an_interrupt_by_the_user_does_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "lookup", fail)
    with pytest.raises(KeyboardInterrupt):
        rig.look_up(keys(1), rig.begin("r"))


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def test_what_cannot_be_shown_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise Unspeakable

    rig = DrivenManager(num_tiers=2)
    monkeypatch.setattr(rig.tiers[0], "lookup", fail)
    monkeypatch.setattr(rig.tiers[1], "lookup", lambda *args: Unspeakable())
    with caplog.at_level(logging.WARNING):
        assert rig.look_up(keys(1), rig.begin("r")) == "M"
    assert caplog.text.count("Unspeakable that cannot be shown") == 2


def test_results_behind_a_broken_one_are_taken_in() -> None:
    rig = DrivenManager(num_blocks=16)
    tier = rig.tiers[0]
    tier.at_once = True
    rig.store(keys(1), rig.begin("r"))
    tier.results.insert(0, JobResult([], success=True))  # type: ignore[arg-type]
    rig.step()
    assert rig.stat("cpu_pinned_blocks") == 0


@pytest.mark.parametrize("answers", [["yes"], [None], [[1]]], ids=repr)
def test_answers_of_a_batch_that_are_none_cut_a_tier_off(
    answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "lookup_batch", lambda *args: answers)
    assert rig.manager.lookup_prefix(keys(1, 2), rig.begin("r")).num_hits == 0
    assert rig.stat("breaker_state") == 2


def test_a_prober_that_goes_away_makes_room_for_another() -> None:
    rig = DrivenManager(breaker=BreakerSettings(first_pause_s=1.0))
    tier = rig.tiers[0]
    tier.results.append(JobResult(10**9, success=True))
    rig.step(seconds=2.0)
    assert rig.stat("breaker_state") == 2
    tier.unknown.update(keys(1))
    prober = rig.begin("prober")
    assert rig.look_up(keys(1), prober) == "R"
    rig.step()
    rig.step()  # it goes on without asking again
    rig.keep_below(keys(2))
    assert rig.look_up(keys(2), rig.begin("other")) == "P"


def test_a_namespace_that_was_set_before_it_raised_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = DrivenManager()
    tier = rig.tiers[0]

    def fail(fingerprint: bytes) -> None:
        HandTier.begin_epoch(tier, fingerprint)
        raise OSError("half-way")

    monkeypatch.setattr(tier, "begin_epoch", fail)
    request = rig.begin("r")
    rig.look_up(keys(1), request)
    rig.manager.reset_cache()
    rig.keep_below(keys(1))
    assert rig.look_up(keys(1), request) == "M"
    rig.step(seconds=1000.0)
    assert rig.look_up(keys(1), rig.begin("next")) == "M"
    polls = tier.num_polls
    for _ in range(10):
        rig.step()
    assert tier.num_polls == polls, "it has nothing to report"


def test_a_success_may_be_numpys() -> None:
    rig = DrivenManager()
    rig.store(keys(1), rig.begin("r"))
    (job,) = rig.tiers[0].waiting
    rig.tiers[0].results.append(JobResult(job.job_id, np.bool_(True)))  # type: ignore[arg-type]
    rig.step()
    assert rig.stat("stored_blocks") == 1


def test_reports_without_end_do_not_hold_up_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[JobResult]:
        while True:
            yield JobResult(10**9, success=True)

    rig = DrivenManager()
    monkeypatch.setattr(rig.tiers[0], "get_finished_jobs", endless)
    rig.step()
    assert rig.stat("breaker_state") == 2
