"""The `density` policy: heads leave last, the same calls have the same outcome, and traffic that
suits one rule of eviction is served as well as that rule would."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import eviction_rules, reuse_odds
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.cpu.policies.prompt_tree import PromptTree, Segment, _Queue
from kvtier.cpu.policies.reuse_odds import ReuseOdds
from tests.cpu.policies import synthetic_traces
from tests.cpu.policies.test_textbook import prompts
from tests.cpu.policies.tree_checks import check_tree
from tests.trace_replay import key_of, replay
from tests.traces import conversation, num_unique


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Iterator[None]:
    """Lets the policy learn from few requests, unless a test is about real traffic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_odds, "_PERIOD", 4)
        patch.setattr(reuse_odds, "_MIN_REUSED", 2)
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_odds, "_PERIOD", 64)
    monkeypatch.setattr(reuse_odds, "_MIN_REUSED", 20)


def policy_of(manager: CPUOffloadingManager) -> DensityCachePolicy:
    policy = manager.slots.policy
    assert isinstance(policy, DensityCachePolicy)
    return policy


def hit_percentage(requests: list[list[int]], policy: str, capacity: int) -> float:
    return replay(requests, CPUOffloadingManager(capacity, cache_policy=policy)).hit_percentage


# --- the tree ------------------------------------------------------------------------------------


def check_heads_stay(requests: list[list[int]], capacity: int) -> None:
    """After each request, every stored block has all earlier blocks of its prompts."""
    manager = CPUOffloadingManager(capacity, cache_policy="density")
    for count in range(len(requests)):
        replay(requests[count : count + 1], manager)
        check_tree(policy_of(manager))
        stored = set(manager.resident_keys())
        for prompt in requests:
            present = [key_of(block) in stored for block in prompt]
            assert present == sorted(present, reverse=True), "a tail outlived its head"


@given(requests=prompts(), capacity=st.integers(2, 24))
def test_a_head_leaves_after_its_tail(requests: list[list[int]], capacity: int) -> None:
    check_heads_stay(requests, capacity)


def close_without_parent(tree: PromptTree, segment: Segment) -> None:
    if segment.is_queued:
        tree.queues[segment.group].remove(segment)
        segment.is_queued = False
    else:
        tree._unqueued.pop(segment, None)


def oldest_with_children(
    tree: PromptTree, queue: _Queue, owner: str | None, skipped: list[Segment]
) -> Segment | None:
    while (segment := queue.oldest) is not None:
        if segment.idle and segment.owner != owner:
            return segment
        tree._set_aside(segment, skipped)
    return None


def take_from_the_head(
    tree: PromptTree, segment: Segment, n: int, protected: set[OffloadKey]
) -> list[BlockStatus]:
    taken = [block for block in segment.blocks if block.key not in protected][:n]
    segment.blocks[:] = [block for block in segment.blocks if block not in taken]
    segment.idle -= len(taken)
    tree.num_idle -= len(taken)
    return taken


def undivided(tree: PromptTree, last: BlockStatus, count: int) -> Segment:
    segment: Segment = last.place
    return segment


def uncounted(tree: PromptTree, segment: Segment, blocks: list[BlockStatus]) -> None:
    segment.blocks += blocks
    for block in blocks:
        block.place = segment
        segment.idle += 1
        tree.num_idle += 1


BUGS: dict[str, tuple[str, Callable[..., object]]] = {
    "a parent does not learn that its child has gone": ("_close", close_without_parent),
    "a segment with children is evicted": ("_oldest", oldest_with_children),
    "the head of a segment is evicted first": ("_take", take_from_the_head),
    "a prompt that leaves another one is put behind its tail": ("_divide", undivided),
    "blocks that are being written count as evictable": ("extend", uncounted),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_checks_find_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7], [0, 1, 2, 3, 8], [9, 10, 11], [12, 13, 14]]
    check_heads_stay(requests * 4, 8)
    monkeypatch.setattr(PromptTree, *BUGS[bug])
    with pytest.raises((AssertionError, KeyError)):
        check_heads_stay(requests * 4, 8)


def filled(policy: DensityCachePolicy, name: str, keys: list[OffloadKey]) -> list[BlockStatus]:
    """Blocks of a request that has stored them and ended."""
    context = ReqContext(name)
    blocks = [BlockStatus(number) for number in range(len(keys))]
    for key, block in zip(keys, blocks, strict=True):
        block.key = key
    policy.insert_run(keys, blocks, keys, context)
    for block in blocks:
        block.ref_cnt = 0
    policy.unpinned(blocks)
    policy.on_request_finished(keys, context)
    return blocks


def test_evicts_exactly_n_or_nothing() -> None:
    policy = DensityCachePolicy(8)
    keys = [key_of(number) for number in range(8)]
    filled(policy, "a", keys[:4])
    filled(policy, "b", keys[4:])
    assert policy.evict(7, {keys[0], keys[4]}) is None
    assert len(policy.blocks) == 8
    victims = policy.evict(6, {keys[0], keys[4]})
    assert victims is not None
    assert [key for key, _ in victims] == [*keys[3:0:-1], *keys[:4:-1]]
    check_tree(policy)


def test_a_head_is_evicted_if_its_tail_is_pinned() -> None:
    policy = DensityCachePolicy(4)
    keys = [key_of(number) for number in range(4)]
    head = filled(policy, "a", keys[:2])
    policy.touch(keys[:2], ReqContext("b"))
    tail = [BlockStatus(2)]
    tail[0].key = keys[2]
    policy.insert_run(keys[2:3], tail, keys[:3], ReqContext("b"))
    policy.on_request_finished(keys[:3], ReqContext("b"))
    assert policy.evict(3, frozenset()) is None
    assert policy.evict(2, frozenset()) == [(keys[1], head[1]), (keys[0], head[0])]


def test_a_head_waits_for_its_tail_when_the_blocks_between_them_have_left() -> None:
    policy = DensityCachePolicy(4)
    keys = [key_of(number) for number in range(3)]
    blocks: list[BlockStatus] = []
    for number in range(3):
        context = ReqContext(f"r{number}")
        policy.touch(keys[:number], context)
        blocks.append(BlockStatus(number))
        blocks[-1].key = keys[number]
        policy.insert_run(keys[number:][:1], blocks[-1:], keys[: number + 1], context)
        policy.on_request_finished(keys[: number + 1], context)
    for block in blocks[:2]:
        block.ref_cnt = 0
    policy.unpinned(blocks[:2])
    assert policy.evict(1, frozenset()) == [(keys[1], blocks[1])]
    check_tree(policy)
    blocks[2].ref_cnt = 0
    policy.unpinned(blocks[2:])
    in_order = [(keys[2], blocks[2]), (keys[0], blocks[0])]
    assert policy.next_to_leave(2) == in_order
    assert policy.evict(2, frozenset()) == in_order


def test_a_head_that_is_stored_again_leaves_after_its_tail() -> None:
    policy = DensityCachePolicy(4)
    keys = [key_of(number) for number in range(3)]
    tail = filled(policy, "tail", keys[1:])  # its head is missing
    context = ReqContext("head")
    policy.touch(keys, context)
    head = BlockStatus(2)
    head.key = keys[0]
    policy.insert_run(keys[:1], [head], keys, context)
    policy.touch(keys, context)  # as managers do if a stored block comes after a new one
    head.ref_cnt = 0
    policy.unpinned([head])
    policy.on_request_finished(keys, context)
    check_tree(policy)
    expected = [(keys[2], tail[1]), (keys[1], tail[0]), (keys[0], head)]
    assert policy.next_to_leave(3) == expected
    assert policy.evict(3, frozenset()) == expected


def test_a_request_does_not_evict_what_it_has_stored() -> None:
    policy = DensityCachePolicy(4)
    keys = [key_of(number) for number in range(4)]
    filled(policy, "a", keys[:2])
    context = ReqContext("b")
    blocks = [BlockStatus(2), BlockStatus(3)]
    for key, block in zip(keys[2:], blocks, strict=True):
        block.key = key
    policy.insert_run(keys[2:], blocks, keys[2:], context)
    for block in blocks:
        block.ref_cnt = 0
    policy.unpinned(blocks)
    policy.on_store_miss([key_of(9)], context)
    assert policy.evict(3, frozenset()) is None
    policy.on_store_miss([key_of(9)], context)
    victims = policy.evict(2, frozenset())
    assert victims is not None
    assert [key for key, _ in victims] == [keys[1], keys[0]]


# --- what it learns ------------------------------------------------------------------------------


def test_the_worth_of_a_class_is_how_soon_it_is_used_again() -> None:
    odds = ReuseOdds(1000)
    for number in range(2000):
        odds.begin_request()
        odds.end_samples([key_of(number)])
        if number % 2 == 0:
            odds.begin_sample(key_of(number + 10), 1, 1, 0)  # used 10 requests later
        else:
            odds.begin_sample(key_of(10**6 + number), 2, 1, 0)
    often, never = odds.worth[1], odds.worth[2]
    assert often[0] > 10 * never[0]
    soon, late = reuse_odds.bucket_of(8), reuse_odds.bucket_of(100)
    assert often[soon] > often[0], "the longer it has waited, the sooner it comes"
    assert often[late] < often[0], "what has not come by now will not come"


@pytest.mark.usefixtures("patient")
def test_the_order_is_that_of_lru_until_enough_is_known() -> None:
    chance = random.Random(4)
    requests = [
        list(range(100 * number, 100 * number + chance.randrange(1, 60))) for number in range(200)
    ]
    requests[150:150] = requests[120:130]  # fewer than are needed to say which ones are worth more
    evicted = {
        policy: replay(requests, CPUOffloadingManager(1000, cache_policy=policy)).evicted
        for policy in ("lru", "density")
    }
    assert list(map(set, evicted["density"])) == list(map(set, evicted["lru"]))


@pytest.mark.usefixtures("patient")
def test_samples_that_give_way_to_others_count_as_not_used() -> None:
    odds = ReuseOdds(64)
    for number in range(2000):
        odds.begin_request()
        odds.end_samples([key_of(number)])
        odds.begin_sample(key_of(number + 2), 1, 1, 0)
        for other in range(10):
            odds.begin_sample(key_of(10**6 + 10 * number + other), 2, 1, 0)
        odds.end_samples([key_of(10**6 + 10 * (number - 2))])  # one in ten, as soon
    often, rarely = odds.worth[1], odds.worth[2]
    assert often[0] > 4 * rarely[0]


def test_what_was_learnt_long_ago_fades() -> None:
    odds = ReuseOdds(64)
    worth = []
    for is_used in (True, False):
        for number in range(1000):
            odds.begin_request()
            if is_used:
                odds.end_samples([key_of(number)])
            odds.begin_sample(key_of(number + 2 if is_used else 10**6 + number), 1, 1, 0)
            odds.begin_sample(key_of(10**7), 2, 1, 0)  # keeps enough known
            odds.end_samples([key_of(10**7)])
        worth.append(odds.worth[1][0])
    assert worth[1] < worth[0] / 10


def test_deeper_blocks_are_worth_more() -> None:
    odds = ReuseOdds(64)
    odds.is_informed, odds.worth = True, [[0.5] * 28] * reuse_odds.NUM_CLASSES
    rule = eviction_rules.Density(odds)
    assert rule.worth(Segment(None, 4096)) == 2 * rule.worth(Segment(None, 0)) == 1.0


def test_the_sticky_rule_stores_few_prompts_in_a_full_cache() -> None:
    rule = eviction_rules.Sticky()
    tree = PromptTree(1)
    admitted = [rule.num_admitted(tree, 10, 3, 0, None) for _ in range(2000)]
    assert set(admitted) == {3, 10}, "free slots are used"
    assert 50 < admitted.count(10) < 150


def test_prompts_that_are_never_used_again_do_not_displace_others() -> None:
    documents = [[1000 * document + i for i in range(10)] for document in range(6)]
    requests = []
    for number in range(1200):
        requests.append(documents[number % 6])
        requests.append([10**6 + 100 * number + i for i in range(40)])
    capacity = 100
    assert hit_percentage(requests, "lru", capacity) < 5
    assert hit_percentage(requests, "density", capacity) > 15  # 20 is the most


def digest_of_a_replay() -> str:
    """A digest of what a policy evicts, in order."""
    manager = CPUOffloadingManager(2000, cache_policy="density")
    result = replay(conversation()[:3000], manager)
    return xxh3_64_hexdigest(repr((result.evicted, result.num_hits)).encode())


@pytest.mark.usefixtures("patient")
def test_the_same_calls_have_the_same_outcome() -> None:
    """Also in a process whose sets have another order."""
    program = "from tests.cpu.policies.test_density import *; print(digest_of_a_replay())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert other.strip() == digest_of_a_replay()


# --- whole traces --------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_holds_some_of_the_conversations_of_a_loop() -> None:
    requests = synthetic_traces.loop(scale=3)
    capacity = 6144 // 3
    lru = hit_percentage(requests, "lru", capacity)
    assert hit_percentage(requests, "density", capacity) > lru + 15


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("percent", [5, 20])
@pytest.mark.parametrize("trace", ["recent", "shifting"])
def test_is_no_worse_than_lru_where_lru_is_good(trace: str, percent: int) -> None:
    requests = getattr(synthetic_traces, trace)()
    capacity = num_unique(requests) * percent // 100
    lru = hit_percentage(requests, "lru", capacity)
    assert hit_percentage(requests, "density", capacity) > lru - 1


@pytest.mark.usefixtures("patient")
def test_closes_part_of_the_gap_to_the_best_possible() -> None:
    requests = conversation()
    capacity = num_unique(requests) * 2 // 100
    lru, best = 8.0, 32.1
    closed = (hit_percentage(requests, "density", capacity) - lru) / (best - lru)
    assert closed > 0.2


class DeclinesAll(eviction_rules.Density):
    def num_admitted(self, tree: object, num_new: int, num_free: int, *_: object) -> int:
        return min(num_new, num_free)


def test_follows_lru_when_the_estimates_fail_with_short_prompts_in_a_large_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache holds thousands of prompts, and which of them are asked for changes slowly."""
    monkeypatch.setattr(eviction_rules, "Density", DeclinesAll)
    chance = random.Random(3)
    documents = [number // 10 + chance.randrange(1500) for number in range(24_000)]
    requests = [list(range(8 * document, 8 * document + 8)) for document in documents]
    capacity = 20_000
    lru = hit_percentage(requests, "lru", capacity)
    assert hit_percentage(requests, "density", capacity) > lru - 10


class CountedKeys(frozenset[OffloadKey]):
    """Counts the keys that it is asked about."""

    num_asked = 0

    def __contains__(self, key: object) -> bool:
        self.num_asked += 1
        return super().__contains__(key)

    def isdisjoint(self, keys: Iterable[object]) -> bool:
        asked = list(keys)
        self.num_asked += len(asked)
        return super().isdisjoint(asked)


def test_evicting_a_few_blocks_of_a_long_prompt_does_not_look_at_all_of_them() -> None:
    policy = DensityCachePolicy(1000)
    filled(policy, "long", [key_of(number) for number in range(1000)])
    protected = CountedKeys([key_of(5000)])
    for _ in range(20):
        assert policy.evict(5, protected) is not None
    assert protected.num_asked <= 4 * 100


def test_evicting_behind_pinned_blocks_removes_the_same_ones() -> None:
    policy = DensityCachePolicy(10)
    keys = [key_of(number) for number in range(10)]
    blocks = filled(policy, "a", keys)
    pinned = [blocks[9], blocks[6]]
    for block in pinned:
        block.ref_cnt = 1
    policy.pinned(pinned)
    expected = [(keys[n], blocks[n]) for n in (8, 5, 4)]
    assert policy.next_to_leave(4)[:1] == expected[:1]
    assert policy.evict(3, {keys[7]}) == expected
    check_tree(policy)
    left = [blocks[n] for n in (0, 1, 2, 3, 6, 7, 9)]
    assert blocks[0].place.blocks == left


def test_a_prompt_is_sampled_once_however_many_stores_it_comes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_hashed = 0

    def counted(key: OffloadKey) -> int:
        nonlocal num_hashed
        num_hashed += 1
        return xxh3_64_intdigest(key)

    monkeypatch.setattr(eviction_rules, "xxh3_64_intdigest", counted)
    manager = CPUOffloadingManager(20_000, cache_policy="density")
    context = ReqContext("long")
    manager.on_new_request(context)
    for number in range(0, 4000, 4):
        keys = [key_of(number + i) for i in range(4)]
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
    manager.on_request_finished(context)
    assert 0 < num_hashed <= 4000


def memory_of(policy: str, requests: list[list[int]], capacity: int) -> int:
    tracemalloc.start()
    try:
        manager = CPUOffloadingManager(capacity, cache_policy=policy)
        replay(requests, manager)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("prompt_size", [2, 64])
def test_takes_at_most_one_and_a_half_times_the_memory_of_lru(prompt_size: int) -> None:
    capacity = 20_000
    num_requests = 2 * capacity // prompt_size
    requests = [
        [number * prompt_size + i for i in range(prompt_size)] for number in range(num_requests)
    ]
    lru = memory_of("lru", requests, capacity)
    assert memory_of("density", requests, capacity) < 1.5 * lru
