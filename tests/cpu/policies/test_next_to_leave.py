"""`next_to_leave` names the blocks that `evict` removes next, and changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.density import DensityCachePolicy
from tests.trace_replay import key_of, replay
from tests.traces import conversation, num_unique


def check(manager: CPUOffloadingManager, num_new: int) -> None:
    """Store new blocks, and compare what is evicted for them with what was named before."""
    policy = manager.slots.policy
    wanted = num_new - manager.slots.num_free()
    named = policy.next_to_leave(max(wanted, 0))
    assert named is not None
    again = policy.next_to_leave(max(wanted, 0))
    assert named == again
    context = ReqContext("new")
    new = [key_of(10**9 + n) for n in range(num_new)]
    output = manager.prepare_store(new, context)
    if output is not None and len(output.keys_to_store) == num_new:
        assert sorted(output.evicted_keys) == sorted(key for key, _ in named)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("num_new", [1, 7, 40])
def test_what_is_named_leaves_next_over_a_real_trace(policy: str, num_new: int) -> None:
    requests = conversation()
    manager = CPUOffloadingManager(num_unique(requests) // 50, cache_policy=policy)
    replay(requests[:3000], manager)
    check(manager, num_new)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(
    requests=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)),
    capacity=st.integers(9, 30),
    num_new=st.integers(1, 8),
)
def test_what_is_named_leaves_next(
    policy: str, requests: list[list[int]], capacity: int, num_new: int
) -> None:
    manager = CPUOffloadingManager(capacity, cache_policy=policy)
    replay(requests, manager)
    check(manager, num_new)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_pinned_blocks_are_not_named(policy: str) -> None:
    manager = CPUOffloadingManager(8, cache_policy=policy)
    replay([[1, 2, 3], [4, 5, 6]], manager)
    manager.prepare_load([key_of(1), key_of(2)], ReqContext("reader"))
    named = manager.slots.policy.next_to_leave(8)
    assert named is not None
    assert {key for key, _ in named} == {key_of(n) for n in (3, 4, 5, 6)}


def check_density(manager: CPUOffloadingManager, num_leaving: int) -> None:
    """What is named is what would be evicted, in that order."""
    policy = manager.slots.policy
    assert isinstance(policy, DensityCachePolicy)
    named = policy.next_to_leave(num_leaving)
    assert policy.next_to_leave(num_leaving) == named
    worth = policy._contest.rule.worth
    evicted = policy._tree.evict(len(named), frozenset(), None, worth)
    assert [block for _, block in named] == evicted


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=40),
    capacity=st.integers(9, 30),
    num_leaving=st.integers(1, 30),
)
def test_what_density_names_leaves_next(
    prompts: list[list[int]], capacity: int, num_leaving: int
) -> None:
    """Prompts that begin in the same way share blocks."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = [
        [numbers.setdefault(tuple(prompt[: n + 1]), len(numbers)) for n in range(len(prompt))]
        for prompt in prompts
    ]
    manager = CPUOffloadingManager(capacity, cache_policy="density")
    replay(requests, manager)
    check_density(manager, num_leaving)


def test_what_density_names_leaves_next_over_a_real_trace() -> None:
    requests = conversation()
    manager = CPUOffloadingManager(num_unique(requests) // 50, cache_policy="density")
    replay(requests[:3000], manager)
    check_density(manager, 500)


def test_a_policy_need_not_tell() -> None:
    class Plain(CachePolicy):
        insert = remove = touch = evict = clear = None  # type: ignore[assignment]

    assert Plain(8).next_to_leave(3) is None
