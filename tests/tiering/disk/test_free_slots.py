"""Free slots: every one is handed out once, neighbours together, in any order of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.disk.free_slots import FreeSlots


def test_those_of_use_to_nobody_come_first_and_in_order() -> None:
    free = FreeSlots([0, 1, 4, 5], [2, 3])
    assert len(free) == 6
    assert free.take(3) == [0, 1, 4]
    assert free.take(2) == [5, 2]
    assert free.take(2) == [3]
    assert free.take(2) == []
    assert len(free) == 0


def test_taking_none_takes_none() -> None:
    free = FreeSlots([0, 1], [])
    assert free.take(0) == []
    assert len(free) == 2


def test_starting_over_hands_out_all_but_the_busy_ones() -> None:
    free = FreeSlots([7], [])
    free.start_over(6, {1, 4})
    assert len(free) == 4
    assert free.take(2) == [0, 2]
    free.give([1])
    assert sorted(free.take(9)) == [1, 3, 5]
    free.give([4])
    assert free.take(9) == [4]


@given(
    num_slots=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "give", "start over"]), st.integers(0, 12)), max_size=60
    ),
)
def test_no_slot_is_handed_out_twice(num_slots: int, steps: list[tuple[str, int]]) -> None:
    free = FreeSlots(list(range(0, num_slots, 2)), list(range(1, num_slots, 2)))
    used: list[int] = []
    for what, number in steps:
        if what == "take":
            taken = free.take(number)
            assert len(taken) == min(number, num_slots - len(used))
            assert not set(taken) & set(used)
            used += taken
        elif what == "give":
            free.give(used[:number])
            del used[:number]
        else:
            del used[number:]  # the others are idle, and free now
            free.start_over(num_slots, set(used))
        assert len(free) == num_slots - len(used)
    assert sorted(free.take(num_slots) + used) == list(range(num_slots))
