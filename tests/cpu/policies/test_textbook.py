"""The built-in policies against the textbook's, over a real trace and over random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cpu.manager import CPUOffloadingManager
from tests.cpu.policies.textbook import Textbook, TextbookARC, TextbookLRU
from tests.trace_replay import key_of, replay
from tests.traces import conversation, num_unique

TEXTBOOKS: dict[str, type[Textbook]] = {"lru": TextbookLRU, "arc": TextbookARC}


def assert_same(policy: str, capacity: int, requests: list[list[int]]) -> None:
    manager = CPUOffloadingManager(capacity, cache_policy=policy)
    ours = replay(requests, manager)
    textbook = TEXTBOOKS[policy](capacity, capacity - manager.reserve)
    num_hits = 0
    for number, prompt in enumerate(requests):
        hits, evicted = textbook.request(prompt)
        num_hits += hits
        assert sorted(ours.evicted[number]) == sorted(map(key_of, evicted)), f"request {number}"
    assert ours.num_hits == num_hits


@pytest.mark.parametrize("policy", TEXTBOOKS)
@pytest.mark.parametrize("percent", [1, 10])
def test_same_hits_and_evictions_over_a_real_trace(policy: str, percent: int) -> None:
    requests = conversation()
    assert_same(policy, num_unique(requests) * percent // 100, requests)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Paths in a random tree: prompts that share prefixes and nothing else."""
    num_blocks = draw(st.integers(1, 40))
    parents = [draw(st.integers(-1, block - 1)) for block in range(num_blocks)]

    def path(block: int) -> list[int]:
        return [] if block < 0 else [*path(parents[block]), block]

    leaves = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=60))
    return [path(leaf) for leaf in leaves]


@pytest.mark.parametrize("policy", TEXTBOOKS)
@given(requests=prompts(), capacity=st.integers(2, 24))
def test_same_hits_and_evictions_over_random_prompts(
    policy: str, requests: list[list[int]], capacity: int
) -> None:
    assert_same(policy, capacity, requests)
