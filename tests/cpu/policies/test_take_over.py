"""A prompt that comes again takes over the run of the one before: cheaper, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.recency import RecencyList

CAPACITY = 400


def keys_of(document: int, start: int, end: int) -> list[OffloadKey]:
    return [make_offload_key(b"%d %d" % (document, n), 0) for n in range(start, end)]


class Life:
    """Requests of one document each, one after the other; some never finish."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._num_requests = 0

    def serve(self, document: int, start: int, end: int, stores: bool, finishes: bool) -> None:
        self._num_requests += 1
        context = ReqContext(str(self._num_requests))
        keys = keys_of(document, start, end)
        self.policy.touch(keys, context)
        new = [key for key in keys if self.policy.get(key) is None]
        if stores and new:
            self.policy.on_store_miss(new, context)
            excess = len(self.policy.blocks) + len(new) - CAPACITY
            if excess > 0 and self.policy.evict(excess, set(keys)) is None:
                return
            blocks = [BlockStatus(n) for n in range(len(new))]
            for key, block in zip(new, blocks, strict=True):
                block.key = key
            self.policy.insert_run(new, blocks, keys, context)
            for block in blocks:
                block.ref_cnt = 0
            self.policy.unpinned(blocks)
        if finishes:
            self.policy.on_request_finished(keys, context)

    def order(self) -> list[list[OffloadKey]]:
        policy = self.policy
        lists = [policy._order] if isinstance(policy, LRUCachePolicy) else [policy.t1, policy.t2]
        for each in lists:
            assert len(each) == len(list(each))
            for run in each._runs:
                assert run.blocks, "a run that holds nothing is forgotten"
                assert run.idle == sum(block.ref_cnt == 0 for block in run.blocks.values())
                assert all(block.place is run for block in run.blocks.values())
        return [list(each) for each in lists]


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0, 0, 0, 20, 90]),
        st.sampled_from([70, 100, 150, 200]),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
@given(requests=REQUESTS)
def test_it_makes_no_difference_to_the_order(
    policy_cls: Any, requests: list[tuple[int, int, int, bool, bool]]
) -> None:
    one, other = Life(policy_cls(CAPACITY)), Life(policy_cls(CAPACITY))
    for request in requests:
        one.serve(*request)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecencyList, "take_over", lambda *_: False)
            other.serve(*request)
        assert one.order() == other.order()


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_a_prompt_that_comes_again_or_goes_on_keeps_its_run(policy_cls: Any) -> None:
    policy = policy_cls(CAPACITY)
    life = Life(policy)
    life.serve(0, 0, 100, stores=True, finishes=True)
    (first,) = {id(block.place) for block in policy.blocks.values()}
    life.serve(0, 0, 100, stores=False, finishes=True)
    life.serve(0, 0, 150, stores=False, finishes=True)
    assert {id(block.place) for block in policy.blocks.values()} == {first}


def test_the_run_of_a_request_that_goes_on_is_left_to_it() -> None:
    policy = LRUCachePolicy(CAPACITY)
    life = Life(policy)
    life.serve(0, 0, 100, stores=True, finishes=False)
    (first,) = {id(block.place) for block in policy.blocks.values()}
    life.serve(0, 0, 100, stores=False, finishes=False)
    assert first not in {id(block.place) for block in policy.blocks.values()}
