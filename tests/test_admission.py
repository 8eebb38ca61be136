"""The reuse filter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.admission import ReuseFilter
from kvtier.base import OffloadKey


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(8, "big"))


def test_it_admits_at_the_threshold_and_not_before() -> None:
    reuse = ReuseFilter(threshold=3, max_keys=10)
    admitted = []
    for _ in range(4):
        reuse.count([key(1)], set())
        admitted.append(bool(reuse.admitted([key(1)])))
    assert admitted == [False, False, True, True]


def test_a_request_counts_once() -> None:
    reuse = ReuseFilter(threshold=2, max_keys=10)
    brought: set[OffloadKey] = set()
    for _ in range(5):
        reuse.count([key(1), key(1)], brought)
    assert not reuse.admitted([key(1)])


def test_the_key_not_seen_for_the_longest_time_is_forgotten() -> None:
    reuse = ReuseFilter(threshold=1, max_keys=2)
    for number in (1, 2, 1, 3):
        reuse.count([key(number)], set())
    assert [bool(reuse.admitted([key(number)])) for number in (1, 2, 3)] == [True, False, True]


def test_of_a_prompt_larger_than_its_memory_it_remembers_the_head() -> None:
    reuse = ReuseFilter(threshold=2, max_keys=4)
    for _ in range(2):
        reuse.count([key(number) for number in range(10)], set())
    assert [number for number in range(10) if reuse.admitted([key(number)])] == [0, 1, 2, 3]


def test_a_request_that_came_early_is_counted_to_its_end() -> None:
    reuse = ReuseFilter(threshold=1, max_keys=100)
    brought: set[OffloadKey] = set()
    reuse.count([key(0)], brought)
    for number in range(1000, 1099):
        reuse.count([key(number)], set())
    reuse.count([key(number) for number in range(20)], brought)
    assert all(bool(reuse.admitted([key(number)])) for number in range(20))


@given(
    requests=st.lists(st.lists(st.integers(0, 20)), max_size=30),
    max_keys=st.integers(1, 8),
)
def test_it_never_grows_beyond_its_bound_and_never_overcounts(
    requests: list[list[int]], max_keys: int
) -> None:
    reuse = ReuseFilter(threshold=2, max_keys=max_keys)
    times_brought = dict.fromkeys(range(21), 0)
    for prompt in requests:
        reuse.count(map(key, prompt), set())
        assert len(reuse) <= max_keys
        for number in set(prompt):
            times_brought[number] += 1
    for number, times in times_brought.items():
        assert not reuse.admitted([key(number)]) or times >= 2
