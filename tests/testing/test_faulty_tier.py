"""Each fault does what it says, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvtier.base import (
    Locality,
    LookupResult,
    OffloadingStats,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kvtier.testing import Damage, Fault, FaultKind, FaultSchedule, FaultyTier, InjectedFault
from kvtier.testing.faults import FAULTS_OF
from kvtier.tiering.base import JobResult, SecondaryTierManager
from tests.testing.fault_bench import (
    REQUEST,
    Bench,
    Clock,
    bench_with,
    bench_with_fault,
    keys_of,
)

LOAD, STORE = "submit_load", "submit_store"


def test_a_delay_by_polls_holds_back_the_result_alone() -> None:
    with bench_with_fault(LOAD, FaultKind.DELAY, polls=2) as bench:
        bench.keep(1)
        late, prompt = bench.load(1), bench.load(1)
        assert bench.arrived(late) == [True]
        assert [bench.poll_ids() for _ in range(4)] == [[prompt.job_id], [], [late.job_id], []]


def test_a_delay_by_the_clock() -> None:
    clock = Clock()
    with bench_with_fault(STORE, FaultKind.DELAY, clock, seconds=5.0) as bench:
        job = bench.store(1)
        assert bench.poll_ids() == []
        clock.now = 4.9
        assert bench.poll_ids() == []
        clock.now = 5.0
        assert bench.poll_ids() == [job.job_id]


def test_a_dropped_job_is_carried_out_and_never_reported() -> None:
    with bench_with_fault(LOAD, FaultKind.DROP) as bench:
        bench.keep(1)
        job = bench.load(1)
        assert bench.arrived(job) == [True]
        bench.tier.drain_jobs()
        assert [bench.poll_ids() for _ in range(20)] == [[]] * 20


def test_a_job_can_be_dropped_and_still_write_late() -> None:
    with bench_with_fault(LOAD, FaultKind.DROP, polls=3) as bench:
        bench.keep(1)
        job = bench.load(1)
        assert [bench.poll_ids() for _ in range(2)] == [[], []]
        assert bench.untouched(job)
        assert bench.poll_ids() == []
        assert bench.arrived(job) == [True]
        assert bench.poll_ids() == []


@pytest.mark.parametrize(("polls", "seen"), [(0, [[1, 1], [], []]), (2, [[1], [], [1]])])
def test_a_duplicate_is_reported_twice(polls: int, seen: list[list[int]]) -> None:
    with bench_with_fault(STORE, FaultKind.DUPLICATE, polls=polls) as bench:
        bench.store(1)
        assert [bench.poll_ids() for _ in range(3)] == seen


def test_results_are_reordered() -> None:
    with bench_with_fault("get_finished_jobs", FaultKind.REORDER) as bench:
        ids = [bench.store(number).job_id for number in range(5)]
        reported = bench.poll_ids()
        assert reported != ids
        assert sorted(reported) == ids


def test_one_result_has_no_order() -> None:
    with bench_with_fault("get_finished_jobs", FaultKind.REORDER) as bench:
        bench.store(1)
        assert bench.poll_ids() == [1]
        assert bench.tier.injected == []


def test_a_load_that_fails_leaves_rubbish() -> None:
    with bench_with_fault(LOAD, FaultKind.FAIL) as bench:
        bench.keep(1, 2)
        job = bench.load(1, 2)
        (result,) = bench.poll()
        assert (result.job_id, result.success, result.successful_keys) == (job.job_id, False, None)
        assert bench.arrived(job) == [False, False]
        assert not bench.untouched(job)


def test_a_store_that_fails_leaves_its_slots_alone() -> None:
    with bench_with_fault(STORE, FaultKind.FAIL) as bench:
        job = bench.store(1, 2)
        (result,) = bench.poll()
        assert not result.success
        assert bench.arrived(job) == [True, True]


def test_a_part_fails() -> None:
    with bench_with_fault(LOAD, FaultKind.PARTIAL) as bench:
        bench.keep(1, 2, 3, 4)
        job = bench.load(1, 2, 9, 3, 4)
        (result,) = bench.poll()
        assert not result.success
        assert result.successful_keys is not None
        assert 0 < len(result.successful_keys) < 4
        for key, arrived in zip(job.keys, bench.arrived(job), strict=True):
            assert arrived == (key in result.successful_keys)


def test_one_block_fails_as_a_whole() -> None:
    with bench_with_fault(STORE, FaultKind.PARTIAL) as bench:
        bench.store(1)
        (result,) = bench.poll()
        assert (result.success, result.successful_keys) == (False, None)


def test_a_late_write_comes_when_nobody_expects_it() -> None:
    clock = Clock()
    with bench_with_fault(LOAD, FaultKind.LATE_WRITE, clock, polls=1, seconds=60.0) as bench:
        bench.keep(1)
        job = bench.load(1)
        assert [bench.poll_ids() for _ in range(5)] == [[]] * 5
        assert bench.untouched(job)
        clock.now = 60.0
        assert bench.untouched(job)
        assert bench.poll_ids() == [job.job_id]
        assert bench.arrived(job) == [True]


def test_draining_ends_what_is_late() -> None:
    faults = [
        Fault(STORE, 0, FaultKind.LATE_WRITE, polls=100),
        Fault(STORE, 1, FaultKind.DELAY, polls=100),
        Fault(STORE, 2, FaultKind.DELAY, seconds=100.0),
    ]
    with bench_with(FaultSchedule(faults=faults, clock=Clock())) as bench:
        jobs = [bench.store(number) for number in range(3)]
        assert bench.poll_ids() == []
        bench.tier.drain_jobs()
        assert sorted(bench.poll_ids()) == [job.job_id for job in jobs]
        assert bench.poll_ids() == []


def test_a_job_hangs_until_the_tier_recovers() -> None:
    with bench_with_fault(LOAD, FaultKind.HANG) as bench:
        bench.keep(1)
        hung, prompt = bench.load(1), bench.load(1)
        assert [bench.poll_ids() for _ in range(5)] == [[prompt.job_id], [], [], [], []]
        assert bench.untouched(hung)
        bench.tier.recover()
        assert bench.untouched(hung)
        assert bench.poll_ids() == [hung.job_id]
        assert bench.arrived(hung) == [True]


def start(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("end", ["recover", "shutdown"])
def test_draining_waits_for_a_job_that_hangs(end: str) -> None:
    with bench_with_fault(LOAD, FaultKind.HANG) as bench:
        bench.keep(1)
        job = bench.load(1)
        draining = start(bench.tier.drain_jobs)
        draining.join(0.02)
        assert draining.is_alive()
        getattr(bench.tier, end)()
        draining.join()
        assert bench.untouched(job) == (end == "shutdown")
        assert bench.poll_ids() == ([job.job_id] if end == "recover" else [])


@pytest.mark.parametrize("method", ["drain_jobs", "shutdown"])
def test_the_end_hangs_until_the_tier_recovers(method: str) -> None:
    with bench_with_fault(method, FaultKind.HANG) as bench:
        ending = start(getattr(bench.tier, method))
        ending.join(0.02)
        assert ending.is_alive()
        bench.tier.recover()
        ending.join()


def test_a_black_hole_swallows_everything_and_gives_it_back() -> None:
    with bench_with(FaultSchedule()) as bench:
        bench.keep(1, 2)
        done = bench.store(3)
        bench.tier.go_dark()
        keys = keys_of(1, 2, 9)
        assert bench.tier.lookup(keys[0], REQUEST) is LookupResult.RETRY
        assert bench.tier.lookup_batch(keys, REQUEST) == [LookupResult.RETRY] * 3
        load, store = bench.load(1, 2), bench.store(4)
        assert [bench.poll_ids() for _ in range(5)] == [[]] * 5
        assert bench.untouched(load)
        draining = start(bench.tier.drain_jobs)
        draining.join(0.02)
        assert draining.is_alive()
        bench.tier.recover()
        draining.join()
        assert sorted(bench.poll_ids()) == [done.job_id, load.job_id, store.job_id]
        assert bench.arrived(load) == [True, True]
        hits = [bench.tier.lookup(key, REQUEST) for key in keys_of(1, 4, 9)]
        assert hits == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.GARBAGE, FaultKind.DELAY])
def test_in_the_dark_no_other_fault_happens_to_a_lookup(kind: FaultKind) -> None:
    methods = ("lookup", "lookup_batch")
    faults = [Fault(method, call, kind) for method in methods for call in (0, 1)]
    with bench_with(FaultSchedule(faults=faults)) as bench:
        bench.keep(1, 2)
        keys = keys_of(1, 2)
        bench.tier.go_dark()
        assert bench.tier.lookup(keys[0], REQUEST) is LookupResult.RETRY
        assert bench.tier.lookup_batch(keys, REQUEST) == [LookupResult.RETRY] * 2
        assert bench.tier.injected == []
        bench.tier.recover()
        for method in methods:  # the second call has the second fault, as without the dark
            if kind is FaultKind.RAISE:
                with pytest.raises(InjectedFault):
                    call(bench, method)
            else:
                call(bench, method)
        assert bench.tier.injected == [faults[1], faults[3]]


def test_in_the_dark_draining_waits_though_it_would_raise() -> None:
    with bench_with_fault("drain_jobs", FaultKind.RAISE) as bench:
        bench.tier.go_dark()
        draining = start(bench.tier.drain_jobs)
        draining.join(0.02)
        assert draining.is_alive()
        bench.tier.recover()
        draining.join()
        assert bench.tier.injected == []


def test_a_job_nobody_submitted_is_reported() -> None:
    with bench_with_fault("get_finished_jobs", FaultKind.UNKNOWN_JOB) as bench:
        job = bench.store(1)
        first = bench.poll_ids()
        assert len(first) == 2
        assert job.job_id in first
        assert bench.poll_ids() == []


def test_a_lookup_is_answered_later() -> None:
    with bench_with_fault("lookup", FaultKind.DELAY) as bench:
        bench.keep(1)
        (key,) = keys_of(1)
        answers = [bench.tier.lookup(key, REQUEST) for _ in range(2)]
        assert answers == [LookupResult.RETRY, LookupResult.HIT]


def test_one_answer_of_a_batch_comes_later() -> None:
    with bench_with_fault("lookup_batch", FaultKind.DELAY) as bench:
        bench.keep(1, 2)
        keys = keys_of(1, 2)
        answers = bench.tier.lookup_batch(keys, REQUEST)
        assert sorted(answer.name for answer in answers) == ["HIT", "RETRY"]
        assert bench.tier.lookup_batch(keys, REQUEST) == [LookupResult.HIT] * 2


def call(bench: Bench, method: str) -> Any:
    job = bench.new_job(keys_of(1), is_promotion=method == LOAD)
    arguments: dict[str, tuple[Any, ...]] = {
        "lookup": (keys_of(1)[0], REQUEST),
        "lookup_batch": (keys_of(1, 2), REQUEST),
        STORE: (job,),
        LOAD: (job,),
        "touch": (keys_of(1), REQUEST),
        "drop": (keys_of(1), REQUEST),
        "missing": (keys_of(1), REQUEST),
        "on_new_request": (REQUEST,),
        "on_request_finished": (REQUEST,),
        "on_schedule_end": (ScheduleEndContext(),),
        "begin_epoch": (bytes(16),),
    }
    return getattr(bench.tier, method)(*arguments.get(method, ()))


@pytest.mark.parametrize("method", FAULTS_OF)
def test_a_method_raises_once(method: str) -> None:
    with bench_with_fault(method, FaultKind.RAISE) as bench:
        before = bench.example.fingerprint
        with pytest.raises(InjectedFault, match=method):
            call(bench, method)
        assert bench.tier.injected == [Fault(method, 0, FaultKind.RAISE)]
        if method == "begin_epoch":
            assert bench.example.fingerprint == before
        if method != "shutdown":
            assert bench.poll_ids() == []  # what raised has not been taken
        call(bench, method)


def test_results_outlive_a_poll_that_raises() -> None:
    with bench_with_fault("get_finished_jobs", FaultKind.RAISE) as bench:
        job = bench.store(1)
        with pytest.raises(InjectedFault):
            bench.poll()
        assert bench.poll_ids() == [job.job_id]


@pytest.mark.parametrize("method", [LOAD, STORE])
def test_a_submission_raises_and_the_job_is_carried_out(method: str) -> None:
    with bench_with_fault(method, FaultKind.RAISE_AFTER) as bench:
        with pytest.raises(InjectedFault, match="accepted all the same"):
            call(bench, method)
        assert bench.poll_ids() == [bench.num_jobs]


RIGHT_TYPES: dict[str, Any] = {
    "lookup": LookupResult,
    "on_new_request": RequestOffloadingContext,
    "has_pending_work": bool,
    "get_stats": OffloadingStats,
}


@pytest.mark.parametrize("method", RIGHT_TYPES)
def test_an_answer_is_of_another_type(method: str) -> None:
    with bench_with_fault(method, FaultKind.GARBAGE) as bench:
        assert not isinstance(call(bench, method), RIGHT_TYPES[method])
        assert isinstance(call(bench, method), RIGHT_TYPES[method])


def test_garbage_among_results_loses_none_of_them() -> None:
    with bench_with(FaultSchedule(5, {"get_finished_jobs.garbage": 0.5})) as bench:
        right: list[int] = []
        shapes: set[type] = set()
        for number in range(100):
            if number < 50:
                bench.store(number)
            answer: Any = bench.tier.get_finished_jobs()
            shapes.add(type(answer))
            if isinstance(answer, list):
                shapes |= {type(result) for result in answer}
                right += [result.job_id for result in answer if isinstance(result, JobResult)]
        assert sorted(right) == list(range(1, 51))
        assert shapes >= {list, JobResult, str, int, object, type(None)}


def test_a_batch_of_garbage_is_garbage() -> None:
    with bench_with(FaultSchedule(1, {"lookup_batch.garbage": 1.0})) as bench:
        keys = keys_of(1, 2)
        answers: list[Any] = [bench.tier.lookup_batch(keys, REQUEST) for _ in range(30)]
        assert not any(
            isinstance(answer, list)
            and len(answer) <= len(keys)
            and all(isinstance(one, LookupResult) for one in answer)
            for answer in answers
        )
        assert [LookupResult.HIT] * 3 in answers  # more answers than questions


@pytest.mark.parametrize("damage", list(Damage))
def test_a_kept_block_is_damaged_before_it_is_loaded(damage: Damage) -> None:
    with bench_with_fault(LOAD, FaultKind.CORRUPT, damage=damage) as bench:
        bench.store(1, 2, 3)
        bench.poll()
        job = bench.load(1, 2)
        (result,) = bench.poll()
        assert not result.success
        good = set(result.successful_keys or ())
        assert bench.arrived(job) == [key in good for key in job.keys]
        refused = bench.tier.take_seal_failures().total()
        assert refused == 2 - len(good) >= 1
        assert [fault.damage for fault in bench.tier.injected] == [damage]


@pytest.mark.parametrize("damage", [Damage.FLIP, Damage.SWAP])
def test_what_is_not_kept_cannot_be_damaged(damage: Damage) -> None:
    with bench_with_fault(LOAD, FaultKind.CORRUPT, damage=damage) as bench:
        bench.load(1)
        assert bench.poll_ids() == [1]
        assert bench.tier.injected == []


def test_a_single_block_cannot_be_swapped() -> None:
    with bench_with_fault(LOAD, FaultKind.CORRUPT, damage=Damage.SWAP) as bench:
        bench.store(1)
        bench.load(1)
        assert [result.success for result in bench.poll()] == [True, True]
        assert bench.tier.injected == []


def test_damage_needs_to_know_where_the_bytes_are() -> None:
    with (
        bench_with(FaultSchedule()) as bench,
        pytest.raises(ValueError, match="give `backing`"),
    ):
        FaultyTier(bench.example, FaultSchedule(0, {"corrupt": 0.1}))


def test_nothing_of_the_base_class_answers_in_place_of_the_tier() -> None:
    # Class methods and `options_cls` are used before there is a tier to wrap.
    members = {
        name
        for name, member in vars(SecondaryTierManager).items()
        if not name.startswith("_") and not isinstance(member, classmethod)
    }
    assert members - {"options_cls"} - vars(FaultyTier).keys() == set()
    with bench_with(FaultSchedule()) as bench:
        stored = set(SecondaryTierManager.__init__.__code__.co_names) & vars(bench.example).keys()
        attributes = {name for name in stored if not name.startswith("_")}
        assert {"rows", "fingerprint", "locality", "enable_kv_events"} <= attributes
        for name in attributes:
            assert getattr(bench.tier, name) is getattr(bench.example, name)
        assert vars(bench.tier).keys().isdisjoint(attributes)


def test_what_is_set_is_set_at_the_tier() -> None:
    with bench_with(FaultSchedule()) as bench:
        tier, below = bench.tier, bench.example
        tier.locality = Locality.REMOTE
        tier.enable_kv_events = False
        tier.begin_epoch(bytes(range(16)))
        assert below.locality is Locality.REMOTE
        assert below.enable_kv_events is False
        assert tier.fingerprint == below.fingerprint == bytes(range(16))


def test_it_describes_and_seals_as_the_tier_does() -> None:
    with bench_with(FaultSchedule()) as bench:
        tier, below = bench.tier, bench.example
        assert isinstance(tier, SecondaryTierManager)
        assert tier.medium is below.medium
        assert tier.build_metric_definitions({}) == below.build_metric_definitions({})
        job = bench.new_job(keys_of(1), is_promotion=True)
        payload = memoryview(bytes(64))
        header = tier.seal_block(job, job.keys[0], payload)
        assert tier.verify_block(job, job.keys[0], header, payload)
        assert not tier.verify_block(job, job.keys[0], bytes(256), payload)
        assert below.take_seal_failures().total() == 1


def test_the_figures_are_those_of_the_tier_below() -> None:
    with bench_with(FaultSchedule()) as bench:
        definitions = bench.tier.build_metric_definitions({})
        assert definitions == bench.example.build_metric_definitions({}) != {}
    assert FaultyTier.build_metric_definitions({}) == {}, "asked before there is a tier"
