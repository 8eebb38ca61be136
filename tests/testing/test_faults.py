"""The same seed gives the same faults, and recorded faults can be repeated."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.testing import Damage, Fault, FaultKind, FaultSchedule, InjectedFault, payload_of
from kvtier.testing.faults import FAULTS_OF
from kvtier.tiering.base import JobResult
from tests.testing.fault_bench import REQUEST, ROW_BYTES, Clock, bench_with, keys_of

RATES: dict[str, float] = {
    kind: 0.05 for kind in FaultKind if kind not in (FaultKind.HANG, FaultKind.RAISE_AFTER)
}


def drawn(schedule: FaultSchedule, method: str, calls: int) -> list[Fault | None]:
    return [schedule.next_fault(method) for _ in range(calls)]


def test_without_rates_nothing_goes_wrong() -> None:
    schedule = FaultSchedule(1)
    for method in FAULTS_OF:
        assert drawn(schedule, method, 50) == [None] * 50


def test_a_seed_decides() -> None:
    first, again, other = (FaultSchedule(seed, RATES) for seed in (1, 1, 2))
    faults = drawn(first, "submit_load", 200)
    assert drawn(again, "submit_load", 200) == faults
    assert drawn(other, "submit_load", 200) != faults


def test_every_method_has_its_own_chance() -> None:
    alone, mixed = FaultSchedule(1, RATES), FaultSchedule(1, RATES)
    expected = drawn(alone, "submit_store", 100)
    found = []
    for _ in range(100):
        mixed.next_fault("lookup")
        found.append(mixed.next_fault("submit_store"))
        mixed.next_fault("get_finished_jobs")
    assert found == expected


def test_a_kind_happens_wherever_it_can() -> None:
    schedule = FaultSchedule(1, {"raise": 1.0})
    for method in FAULTS_OF:
        assert drawn(schedule, method, 1) == [Fault(method, 0, FaultKind.RAISE)]
    schedule = FaultSchedule(1, {"reorder": 1.0})
    with_fault = [m for m in FAULTS_OF if schedule.next_fault(m) is not None]
    assert with_fault == ["get_finished_jobs"]


def test_the_rate_of_a_method_decides_over_that_of_a_kind() -> None:
    schedule = FaultSchedule(1, {"submit_load.drop": 0.0, "drop": 1.0})
    assert schedule.next_fault("submit_load") is None
    assert schedule.next_fault("submit_store") is not None


def test_rates_are_what_they_say() -> None:
    schedule = FaultSchedule(3, {"submit_load.drop": 0.2, "submit_load.fail": 0.1})
    kinds = [fault.kind for fault in drawn(schedule, "submit_load", 5000) if fault is not None]
    assert kinds.count(FaultKind.DROP) == pytest.approx(1000, rel=0.1)
    assert kinds.count(FaultKind.FAIL) == pytest.approx(500, rel=0.15)


def test_what_comes_late_comes_within_the_range_given() -> None:
    schedule = FaultSchedule(
        1, {"submit_load.delay": 1.0}, delay_polls=(2, 4), delay_s=(1.0, 2.0), clock=Clock()
    )
    faults = [fault for fault in drawn(schedule, "submit_load", 100) if fault is not None]
    assert {fault.polls for fault in faults} == {2, 3, 4}
    assert all(1.0 <= fault.seconds <= 2.0 for fault in faults)


def test_some_lost_jobs_write_late_and_some_at_once() -> None:
    faults = drawn(FaultSchedule(1, {"submit_load.drop": 1.0}), "submit_load", 50)
    assert {fault.polls > 0 for fault in faults if fault is not None} == {True, False}


def test_every_damage_is_drawn() -> None:
    faults = drawn(FaultSchedule(1, {"corrupt": 1.0}), "submit_load", 100)
    assert {fault.damage for fault in faults if fault is not None} == set(Damage)


def test_a_planned_fault_takes_the_place_of_a_drawn_one() -> None:
    planned = Fault("lookup", 2, FaultKind.RAISE)
    schedule = FaultSchedule(1, {"lookup.delay": 1.0}, [planned])
    found = drawn(schedule, "lookup", 4)
    assert found[2] == planned
    assert all(fault is not None and fault.kind is FaultKind.DELAY for fault in found[:2])
    assert found[3] is not None


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({"dorp": 0.1}, r"rates\['dorp'\]: write a kind \(delay,"),
        ({"submit.drop": 0.1}, r"rates\['submit.drop'\].*methods: lookup,"),
        ({"lookup.drop": 0.1}, "lookup can have delay, garbage, raise"),
        ({"drop": 1.5}, "a share between 0 and 1"),
        ({"drop": 0.6, "fail": 0.6}, "the rates of submit_store sum to 1.2"),
    ],
)
def test_rates_that_make_no_sense_are_refused(rates: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FaultSchedule(0, rates)


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ("submit", FaultKind.DROP, "choose one of lookup,"),
        ("touch", FaultKind.DROP, "choose one of raise"),
    ],
)
def test_faults_that_cannot_happen_are_refused(method: str, kind: FaultKind, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault(method, 0, kind)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_kind_may_be_given_by_its_name(kind: FaultKind) -> None:
    method = next(method for method, kinds in FAULTS_OF.items() if kind in kinds)
    fault = Fault(method, 0, kind.value, damage="swap")  # type: ignore[arg-type]
    assert fault.kind is kind
    assert fault.damage is Damage.SWAP


def test_a_fault_given_by_name_happens() -> None:
    faults = [Fault("submit_load", 0, "drop")]  # type: ignore[arg-type]
    with bench_with(FaultSchedule(faults=faults)) as bench:
        bench.keep(1)
        bench.load(1)
        assert bench.poll_ids() == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"kind": "dorp"}, "kind 'dorp': choose one of delay,"),
        ({"kind": "corrupt", "damage": "filp"}, "damage 'filp': choose one of flip,"),
    ],
)
def test_names_that_nothing_has_are_refused(names: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault("submit_load", 0, **names)


def story(schedule: FaultSchedule, seed: int) -> tuple[list[Any], list[Fault]]:
    """Everything that a faulty tier returns in a random sequence of calls, and the faults."""
    clock = schedule.clock
    assert isinstance(clock, Clock)
    chance = Random(seed)
    seen: list[Any] = []
    with bench_with(schedule) as bench:
        for _ in range(120):
            clock.now += chance.random()
            numbers = chance.sample(range(8), chance.randint(1, 3))
            try:
                action = chance.random()
                if action < 0.25 and bench.slots.num_free >= 6:
                    bench.store(*numbers)
                elif action < 0.5 and bench.slots.num_free >= 6:
                    bench.load(*numbers)
                elif action < 0.7:
                    seen.append(bench.tier.lookup(keys_of(numbers[0])[0], REQUEST))
                else:
                    results: Any = bench.tier.get_finished_jobs()
                    seen += [
                        (result.job_id, result.success, result.successful_keys)
                        for result in (results if isinstance(results, list) else ())
                        if isinstance(result, JobResult)
                    ]
            except InjectedFault as error:
                seen.append(str(error))
        seen += [bench.slots.content(slot) for slot in range(64)]
        return seen, bench.tier.injected


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_life_can_be_repeated_from_its_seed_and_from_its_record(seed: int) -> None:
    def by_seed() -> FaultSchedule:
        return FaultSchedule(seed, RATES, clock=Clock(), delay_s=(0.0, 3.0))

    seen, injected = story(by_seed(), seed)
    assert story(by_seed(), seed) == (seen, injected)
    by_record = FaultSchedule(faults=injected, clock=Clock())
    assert story(by_record, seed) == (seen, injected)


def test_a_payload_is_a_function_of_its_key() -> None:
    first, second = keys_of(1, 2)
    assert payload_of(first, ROW_BYTES) == payload_of(first, ROW_BYTES)
    assert payload_of(first, ROW_BYTES) != payload_of(second, ROW_BYTES)
    assert len(payload_of(first, 100)) == 100
