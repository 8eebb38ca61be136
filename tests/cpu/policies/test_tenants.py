"""Tenants share host memory: caps are exact, floors are kept, lent room returns, and what requests
say about their blocks counts among the blocks of their own tenant alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Set

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import ConfigError, OffloadingOptions
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import BlockStatus, CachePolicy
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.policies.tenants import BlockQuota, Tenancy
from tests.cpu.policies.shared_cache import SharedCache, prompt_of, request_of
from tests.trace_replay import replay
from tests.traces import conversation, num_unique

POLICIES = ["lru", "arc", "density", "plain"]
CAPACITY = 200


class PlainPolicy(CachePolicy):
    """Somebody else's policy: first in, first out, and only what a policy must have."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order: dict[OffloadKey, None] = {}

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block
        self._order[key] = None

    def remove(self, key: OffloadKey) -> None:
        del self.blocks[key], self._order[key]

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        return

    def evict(
        self, n: int, protected: Set[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims = [
            (key, self.blocks[key])
            for key in self._order
            if self.blocks[key].ref_cnt == 0 and key not in protected
        ][:n]
        if len(victims) < n:
            return None
        for key, _ in victims:
            self.remove(key)
        return victims

    def clear(self) -> None:
        self.blocks.clear()
        self._order.clear()


@pytest.fixture(autouse=True, scope="module")
def _plain_policy() -> None:
    if "plain" not in CachePolicyFactory.known_names():
        CachePolicyFactory.register_cache_policy("plain", __name__, "PlainPolicy")


def fill(cache: SharedCache, tenant: int, num_prompts: int, length: int = 10) -> None:
    for number in range(num_prompts):
        cache.run(tenant, prompt_of(f"{tenant}-{cache.num_requests}-{number}", length))


# --- caps and floors ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cap_is_never_exceeded_though_slots_are_free(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 33), policy=policy)
    for number in range(20):
        cache.run(1, prompt_of(str(number), 10))
        assert cache.num_blocks(1) == min(10 * (number + 1), 33)
    assert cache.manager.slots.num_free() == CAPACITY - 33


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_above_the_cap_is_stored_from_its_start(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 33), policy=policy)
    prompt = prompt_of("long", 50)
    cache.run(1, prompt)
    assert cache.has(prompt) == [True] * 33 + [False] * 17
    assert cache.run(1, prompt) == 33


@pytest.mark.parametrize("policy", POLICIES)
def test_a_floor_is_not_taken_by_a_flood(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (60, CAPACITY), policy=policy)
    fill(cache, 1, 10)
    assert cache.num_blocks(1) == 100
    fill(cache, 0, 200)
    assert cache.num_blocks(1) in range(60, 75)
    assert cache.num_blocks(0) == CAPACITY - cache.num_blocks(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_that_is_lent_returns_with_the_next_store(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (60, CAPACITY), policy=policy)
    fill(cache, 0, 50)
    assert cache.num_blocks(0) == CAPACITY
    for number in range(6):
        prompt = prompt_of(f"owner-{number}", 10)
        cache.run(1, prompt)
        assert cache.num_blocks(1) == 10 * (number + 1)
        assert all(cache.has(prompt))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_lent_by_nobody_is_shared_alike(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, CAPACITY), (0, CAPACITY), policy=policy)
    fill(cache, 0, 40)
    for _ in range(60):
        fill(cache, 1, 9)
        fill(cache, 2, 1)
    shares = [cache.num_blocks(tenant) for tenant in range(3)]
    assert shares[0] < 20, "what an idle tenant has must leave"
    assert min(shares[1:]) > 70, "a rate of one to nine must not decide alone"


def test_a_tenant_that_is_idle_keeps_its_floor_alone() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (30, CAPACITY))
    fill(cache, 1, 20)
    fill(cache, 0, 2000)
    assert cache.num_blocks(1) in range(30, 36)


def test_a_tenant_without_room_evicts_its_own_blocks() -> None:
    """Floors leave it nothing but what it has."""
    cache = SharedCache(CAPACITY, (0, CAPACITY), (150, CAPACITY))
    fill(cache, 1, 20)
    fill(cache, 0, 2000)
    assert (cache.num_blocks(0), cache.num_blocks(1)) == (50, 150)
    prompt = prompt_of("new", 10)
    cache.run(0, prompt)
    assert all(cache.has(prompt))
    assert (cache.num_blocks(0), cache.num_blocks(1)) == (50, 150)


def test_a_tenant_may_have_nothing_at_all() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 0))
    cache.run(1, prompt_of("none", 10))
    assert cache.num_blocks(1) == 0
    assert cache.manager.slots.num_free() == CAPACITY


def test_a_store_waits_while_the_blocks_of_its_tenant_are_in_use() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 20))
    prompt = prompt_of("first", 20)
    cache.run(1, prompt)
    manager = cache.manager
    reader = request_of(1, "reader")
    manager.on_new_request(reader)
    assert manager.lookup_prefix(prompt, reader).num_hits == 20
    manager.prepare_load(prompt, reader)
    writer = request_of(1, "writer")
    manager.on_new_request(writer)
    new = prompt_of("second", 5)
    assert manager.prepare_store(new, writer) is None
    manager.complete_load(prompt, reader)
    output = manager.prepare_store(new, writer)
    assert output is not None
    assert output.keys_to_store == new
    assert sorted(output.evicted_keys) == prompt[15:]


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_one_tenant_alone_has_the_same_hits_as_without_tenants(policy: str) -> None:
    requests = conversation()[:3000]
    capacity = num_unique(requests) // 20
    alone = CPUOffloadingManager(capacity, policy)
    tenancy = Tenancy((BlockQuota("default", 0, capacity),), 0.25)
    shared = CPUOffloadingManager(capacity, policy, tenancy=tenancy)
    expected, found = replay(requests, alone), replay(requests, shared)
    assert found.num_hits == expected.num_hits
    assert list(map(sorted, found.evicted)) == list(map(sorted, expected.evicted))


def test_a_reset_empties_all_accounts() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (60, 100))
    fill(cache, 0, 10)
    fill(cache, 1, 20, 8)
    cache.manager.reset_cache()
    assert [cache.num_blocks(0), cache.num_blocks(1)] == [0, 0]
    fill(cache, 1, 20, 8)
    assert cache.num_blocks(1) == 100


def test_what_arc_remembers_of_all_tenants_is_bounded_by_the_cache() -> None:
    num_tenants = 20
    cache = SharedCache(CAPACITY, *[(0, CAPACITY)] * num_tenants, policy="arc")
    for number in range(100):
        for tenant in range(num_tenants):
            cache.run(tenant, prompt_of(f"{tenant}-{number}", 10), priority=number % 10)
    remembered = 0
    for account in cache.policy.accounts:
        for shelf in account.shelves.values():
            assert isinstance(shelf.policy, ARCCachePolicy)
            remembered += len(shelf.policy.b1) + len(shelf.policy.b2)
    assert remembered <= 10 * CAPACITY, "200 policies would remember 200 times as many"


# --- blocks that two tenants use ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_a_shared_block_is_handed_over_to_the_tenant_that_uses_it(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 50), policy=policy)
    head = prompt_of("head", 20)
    cache.run(1, head)
    cache.run(0, head + prompt_of("tail", 10))
    assert (cache.num_blocks(1), cache.num_blocks(0)) == (20, 10)
    fill(cache, 1, 30)
    assert all(cache.has(head)), "the other tenant's cap must not take its prompt's head"
    charged = [cache.policy.blocks[key].charge.account.index for key in head]
    assert charged == [0] * 20 or policy == "arc", "ARC itself keeps what was used twice"
    assert cache.num_blocks(1) <= 50


def test_a_tenant_at_its_cap_gives_a_block_for_one_that_it_gets() -> None:
    cache = SharedCache(CAPACITY, (0, 30), (0, 50))
    fill(cache, 0, 2)
    head = prompt_of("head", 20)
    cache.run(1, head)
    cache.run(0, head + prompt_of("tail", 10))
    assert cache.num_blocks(0) == 30
    fill(cache, 1, 30)
    assert cache.has(head + prompt_of("tail", 10)) == [True] * 30
    assert cache.num_blocks(0) == 30
    assert cache.num_blocks(1) <= 50


def test_a_tenant_gives_no_newer_block_for_one_that_it_has_not_used_for_long() -> None:
    cache = SharedCache(CAPACITY, (0, 150), (50, 50))
    old, work = prompt_of("old", 30), prompt_of("work", 50)
    cache.run(0, old)
    cache.run(1, old)
    for start in range(0, 50, 10):
        cache.run(1, work[start : start + 10])
    fill(cache, 0, 40)
    assert all(cache.has(work))
    assert not any(cache.has(old))


def test_an_owner_that_uses_a_shared_block_again_keeps_it() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, 50))
    head = prompt_of("head", 20)
    cache.run(1, head)
    cache.run(0, head)
    cache.run(1, head)
    fill(cache, 1, 3)
    assert cache.num_blocks(0) == 0
    fill(cache, 1, 30)
    assert not any(cache.has(head))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_cannot_keep_its_blocks_in_the_floor_of_another(policy: str) -> None:
    """Tenant 1 works with 40 blocks, and has a floor of 50. Tenant 0 uses over and over what
    tenant 1 has stored once."""
    hits = {}
    for has_attack in (False, True):
        cache = SharedCache(100, (0, 100), (50, 50), policy=policy)
        documents = prompt_of("documents", 30)
        cache.run(1, documents)
        hits[has_attack] = 0
        for number in range(60):
            for _ in range(3 * has_attack):
                cache.run(0, documents)
            hits[has_attack] += cache.run(1, prompt_of(f"work-{number % 4}", 10))
        assert cache.num_blocks(1) <= 50
    assert hits[True] >= hits[False] >= 500


# --- priority -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_higher_priority_stays_longer_and_not_for_ever(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), policy=policy)
    high, low = prompt_of("high", 10), prompt_of("low", 10)
    cache.run(0, high, priority=9)
    cache.run(0, low)
    fill(cache, 0, 25)
    assert not any(cache.has(low))
    assert all(cache.has(high))
    fill(cache, 0, 120)
    assert not any(cache.has(high)), "a priority multiplies a block's worth, and does not pin it"


def test_a_priority_counts_within_its_tenant_alone() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (100, CAPACITY))
    for number in range(40):
        cache.run(0, prompt_of(f"high-{number}", 10), priority=9)
    fill(cache, 1, 20)
    assert cache.num_blocks(1) >= 100


@pytest.mark.parametrize("first", [1, 5, 9])
@pytest.mark.parametrize("second", [1, 5, 9])
def test_a_head_never_leaves_before_its_tail(first: int, second: int) -> None:
    """Whatever priorities the requests have that use it."""
    cache = SharedCache(CAPACITY, (0, CAPACITY))
    prompt = prompt_of("prompt", 30)
    cache.run(0, prompt[:10], priority=first)
    cache.run(0, prompt[:20], priority=second)
    cache.run(0, prompt, priority=5)
    for _ in range(300):
        fill(cache, 0, 1, 3)
        is_here = cache.has(prompt)
        assert is_here == sorted(is_here, reverse=True)
    assert not any(cache.has(prompt))


# --- retention and drop -------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("policy", POLICIES)
def test_retained_blocks_stay_until_their_time_is_up(policy: str) -> None:
    clock = Clock()
    cache = SharedCache(CAPACITY, (0, CAPACITY), policy=policy, clock=clock)
    prompt = prompt_of("paused", 20)
    cache.run(0, prompt, retain_s=40.0)
    fill(cache, 0, 100)
    assert all(cache.has(prompt))
    clock.now += 39
    fill(cache, 0, 100)
    assert all(cache.has(prompt))
    clock.now += 2
    fill(cache, 0, 100)
    assert not any(cache.has(prompt))
    assert not cache.policy.accounts[0].retained


def test_at_most_a_share_is_retained_and_the_head_of_a_prompt_first() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), max_retained=0.1)
    prompt = prompt_of("long", 50)
    cache.run(0, prompt, retain_s=1000.0)
    assert len(cache.policy.accounts[0].retained) == 20
    fill(cache, 0, 100)
    assert cache.has(prompt) == [True] * 20 + [False] * 30


def test_what_one_tenant_retains_takes_no_room_from_another() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (100, CAPACITY), max_retained=1.0)
    for number in range(20):
        cache.run(0, prompt_of(f"kept-{number}", 10), retain_s=1000.0)
    fill(cache, 1, 10)
    assert cache.num_blocks(1) == 100
    assert len(cache.policy.accounts[0].retained) <= 100


def test_the_right_to_retain_is_kept_for_those_with_a_floor() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (100, CAPACITY), max_retained=0.2)
    for number in range(10):
        cache.run(0, prompt_of(f"kept-{number}", 10), retain_s=1000.0)
    assert len(cache.policy.accounts[0].retained) == 20
    cache.run(1, prompt_of("other", 30), retain_s=1000.0)
    assert len(cache.policy.accounts[1].retained) == 20


def test_a_longer_retention_wins_and_a_shorter_one_changes_nothing() -> None:
    clock = Clock()
    cache = SharedCache(CAPACITY, (0, CAPACITY), clock=clock)
    prompt = prompt_of("paused", 10)
    cache.run(0, prompt, retain_s=10.0)
    cache.run(0, prompt, retain_s=100.0)
    cache.run(0, prompt, retain_s=1.0)
    clock.now += 50
    fill(cache, 0, 50)
    assert all(cache.has(prompt))
    clock.now += 51
    fill(cache, 0, 50)
    assert not any(cache.has(prompt))


def test_retaining_again_and_again_takes_no_memory() -> None:
    clock = Clock()
    cache = SharedCache(CAPACITY, (0, CAPACITY), clock=clock)
    prompt = prompt_of("paused", 20)

    def retain_for_an_hour(num_times: int) -> None:
        for number in range(num_times):
            clock.now += 1 / 1000
            cache.run(0, prompt, retain_s=3600.0, drop=number % 3 == 0)

    retain_for_an_hour(100)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        retain_for_an_hour(2000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000
    clock.now += 3602
    fill(cache, 0, 100)
    assert not any(cache.has(prompt))


@pytest.mark.parametrize("policy", POLICIES)
def test_dropped_blocks_leave_first(policy: str) -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), policy=policy)
    fill(cache, 0, 17)
    ended = prompt_of("ended", 20)
    cache.run(0, ended)
    cache.run(0, ended, drop=True)
    before = {block.key for block in cache.policy.blocks.values()} - set(ended)
    fill(cache, 0, 2)
    assert cache.has(ended) == [True] * 10 + [False] * 10
    assert before <= cache.policy.blocks.keys()


def test_what_another_prompt_shares_is_not_dropped() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, CAPACITY))
    system = prompt_of("system", 10)
    for name in ("one", "two"):
        cache.run(0, system + prompt_of(name, 10))
    cache.run(0, system + prompt_of("one", 10), drop=True)
    fill(cache, 0, 16)
    cache.run(0, prompt_of("new", 20))
    assert not any(cache.has(prompt_of("one", 10)))
    assert all(cache.has(system + prompt_of("two", 10)))


def test_what_a_running_request_shares_is_not_dropped() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY))
    system, ended = prompt_of("system", 10), prompt_of("ended", 10)
    running = request_of(0, "running")
    cache.manager.on_new_request(running)
    for part in (system, prompt_of("running", 10)):
        output = cache.manager.prepare_store(part, running)
        assert output is not None
        cache.manager.complete_store(output.keys_to_store, running)
    cache.run(0, system + ended)
    cache.run(0, system + ended, drop=True)
    blocks = cache.policy.blocks
    assert [blocks[key].charge.rank for key in system + ended] == [5] * 10 + [-1] * 10


def test_what_another_tenant_uses_is_not_dropped() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY), (0, CAPACITY))
    prompt = prompt_of("shared", 20)
    cache.run(0, prompt)
    cache.run(1, prompt[:10])
    cache.run(0, prompt[:5], drop=True)
    ranks = [cache.policy.blocks[key].charge.rank for key in prompt]
    assert ranks == [5] * 10 + [-1] * 10


def test_a_dropped_block_that_is_used_counts_as_any_other() -> None:
    cache = SharedCache(CAPACITY, (0, CAPACITY))
    prompt = prompt_of("back", 20)
    cache.run(0, prompt, drop=True)
    assert cache.run(0, prompt) == 20
    fill(cache, 0, 15)
    assert all(cache.has(prompt))


# --- the configuration --------------------------------------------------------------------------


def tenancy_of(tenants: object, num_blocks: int = 100, block_bytes: int = 1000) -> Tenancy | None:
    given = {"cpu_bytes_to_use": 100_000, "tenants": tenants}
    options = OffloadingOptions.from_extra_config(given)
    return Tenancy.of(options, "host", "cpu_bytes_to_use", num_blocks, block_bytes)


def test_shares_and_sizes_become_whole_blocks() -> None:
    tenancy = tenancy_of({"acme": {"host": {"floor": "12.5%", "cap": 20_999}}})
    assert tenancy is not None
    assert tenancy.quotas == (BlockQuota("default", 0, 100), BlockQuota("acme", 12, 20))


def test_there_is_no_tenancy_without_the_key() -> None:
    options = OffloadingOptions.from_extra_config({"cpu_bytes_to_use": 100_000})
    assert Tenancy.of(options, "host", "cpu_bytes_to_use", 100, 1000) is None
    assert type(CPUOffloadingManager(10).slots.policy).__name__ == "LRUCachePolicy"


@pytest.mark.parametrize(
    ("tenants", "named"),
    [
        ({"acme": {"host": {"cap": 999}}}, "tenants.acme.host.cap"),
        ({"acme": {"host": {"floor": "0.5%"}}}, "tenants.acme.host.floor"),
        ({"acme": {"host": {"floor": 60_000, "cap": "50%"}}}, "tenants.acme.host.floor"),
        ({"a": {"host": {"floor": 60_000}}, "b": {"host": {"floor": "50%"}}}, "110 blocks"),
    ],
)
def test_a_quota_that_the_tier_cannot_keep_is_refused(tenants: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        tenancy_of(tenants)


# --- a flood, in simulation ---------------------------------------------------------------------


def hit_percentage(manager: CPUOffloadingManager, *, has_flood: bool) -> float:
    """The hits of tenant 1, which has a real trace; tenant 0 may flood the cache with ten times as
    many blocks."""
    num_hits = num_blocks = 0
    cache = SharedCache.around(manager)
    for number, blocks in enumerate(conversation()[:NUM_REQUESTS]):
        prompt = [prompt_of("victim", 1, block)[0] for block in blocks]
        num_hits += cache.run(1, prompt)
        num_blocks += len(prompt)
        if has_flood:
            cache.run(0, prompt_of(f"flood-{number}", 10 * len(prompt)))
    return 100 * num_hits / num_blocks


NUM_REQUESTS = 1000


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_a_victim_has_at_least_the_hits_of_its_floor_alone(policy: str) -> None:
    floor = num_unique(conversation()[:NUM_REQUESTS]) // 4
    quotas = BlockQuota("default", 0, 2 * floor), BlockQuota("victim", floor, 2 * floor)
    shared = CPUOffloadingManager(2 * floor, policy, tenancy=Tenancy(quotas, 0.25))
    alone = hit_percentage(CPUOffloadingManager(floor, policy), has_flood=False)
    assert hit_percentage(shared, has_flood=True) >= alone - 2
    unprotected = hit_percentage(CPUOffloadingManager(floor, policy), has_flood=True)
    assert unprotected < alone - 4, "this flood would hurt nobody"
