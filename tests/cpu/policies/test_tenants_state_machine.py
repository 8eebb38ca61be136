"""Random lives of requests of several tenants, with random floors and caps.

The machine keeps its own count of who stored which block, and checks after each step that caps and
floors are kept, that whoever may store can store, and that retained blocks expire.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.tenants import BlockQuota, Tenancy, TenantPolicy
from tests.cpu.policies.shared_cache import request_of

NUM_NODES = 60
MAX_RETAINED = 0.25


class Request:
    def __init__(self, tenant: int, context: ReqContext, path: list[OffloadKey]) -> None:
        self.tenant = tenant
        self.context = context
        self.path = path
        self.storing: list[list[OffloadKey]] = []
        self.loading: list[list[OffloadKey]] = []


class SharedTier(RuleBasedStateMachine):
    policy = "lru"

    @initialize(
        num_blocks=st.integers(4, 24),
        shares=st.lists(
            st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=2, max_size=4
        ),
        parents=st.lists(st.integers(0, 10**6), min_size=NUM_NODES, max_size=NUM_NODES),
    )
    def start(self, num_blocks: int, shares: list[tuple[int, int]], parents: list[int]) -> None:
        self.num_blocks = num_blocks
        self.now = 0.0
        left, quotas = num_blocks, []
        for number, (floor, cap) in enumerate(shares):
            most = max(num_blocks * cap // 100, 1) if cap < 70 else num_blocks
            least = min(left * floor // 100, most)
            left -= least
            quotas.append(BlockQuota(f"tenant-{number}", least, most))
        self.quotas = quotas
        tenancy = Tenancy(tuple(quotas), MAX_RETAINED, lambda: self.now)
        self.manager = CPUOffloadingManager(
            num_blocks, self.policy, enable_events=True, strict=True, tenancy=tenancy
        )
        policy = self.manager.slots.policy
        assert isinstance(policy, TenantPolicy)
        self.tenants = policy
        nodes = [make_offload_key(bytes([i]) * 8, 0) for i in range(NUM_NODES)]
        self.nodes = nodes
        self.parent = {
            nodes[i]: nodes[i - 1 - parents[i] // 5 % min(i, 4)] if i and parents[i] % 5 else None
            for i in range(NUM_NODES)
        }
        self.requests: list[Request] = []
        self.num_requests = 0

    def path_to(self, node: OffloadKey) -> list[OffloadKey]:
        path = [node]
        while (parent := self.parent[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]

    # --- what engines do ------------------------------------------------------------------------

    @rule(
        tenant=st.integers(0, 3),
        node=st.integers(0, NUM_NODES - 1),
        priority=st.sampled_from([5, 5, 5, 0, 9]),
        retain_s=st.sampled_from([0.0, 0.0, 3.0, 30.0]),
        drop=st.sampled_from([False, False, False, True]),
    )
    def begin(self, tenant: int, node: int, priority: int, retain_s: float, drop: bool) -> None:
        self.arrive(tenant, node, priority, retain_s, drop)

    def arrive(self, tenant: int, node: int, priority: int, retain_s: float, drop: bool) -> Request:
        self.num_requests += 1
        tenant %= len(self.quotas)
        name = f"request-{self.num_requests}"
        context = request_of(tenant, name, priority=priority, retain_s=retain_s, drop=drop)
        request = Request(tenant, context, self.path_to(self.nodes[node]))
        self.requests.append(request)
        self.manager.on_new_request(context)
        self.manager.lookup_prefix(request.path, context)
        return request

    @rule(tenant=st.integers(0, 3), seed=st.integers(0, 10**6), num=st.integers(1, 12))
    def serve_some(self, tenant: int, seed: int, num: int) -> None:
        """Requests of one tenant, one after the other."""
        draw = random.Random(seed)
        for _ in range(num):
            node = draw.randrange(NUM_NODES)
            priority, retain_s = draw.choice([5, 5, 0, 9]), draw.choice([0.0, 0.0, 30.0])
            request = self.arrive(tenant, node, priority, retain_s, draw.random() < 0.2)
            self.store_for(request)
            for keys in request.storing:
                self.manager.complete_store(keys, request.context)
            self.requests.remove(request)
            self.manager.on_request_finished(request.context)
            self.every_block_is_charged_once()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def store(self, choice: int) -> None:
        self.store_for(self.requests[choice % len(self.requests)])

    def store_for(self, request: Request) -> None:
        accounts = self.tenants.accounts
        before = {key: block.charge.account for key, block in self.tenants.blocks.items()}
        counts = [account.num_blocks for account in accounts]
        num_free = self.manager.slots.num_free()
        is_idle = not any(each.storing or each.loading for each in self.requests)
        output = self.manager.prepare_store(request.path, request.context)
        if output is None:
            assert not is_idle, "nothing is in use, so there is no reason to wait"
            return
        stored = output.keys_to_store
        own = accounts[request.tenant]
        lost = Counter(before[key].index for key in output.evicted_keys)
        for account in accounts:
            if account is not own and account.num_blocks < counts[account.index]:
                assert account.num_blocks >= account.floor, "a floor was taken"
        if is_idle:
            self.check_return(request, stored, counts, lost, num_free, before.keys())
        if stored:
            request.storing.append(stored)

    def check_return(
        self,
        request: Request,
        stored: list[OffloadKey],
        counts: list[int],
        lost: Counter[int],
        num_free: int,
        before: Collection[OffloadKey],
    ) -> None:
        """A store while nothing is in use: lent room returns, and nobody starves."""
        quota = self.quotas[request.tenant]
        new = [key for key in request.path if key not in before]
        num_kept = len(request.path) - len(new)
        room = quota.floor - counts[request.tenant]
        others = sum(quota.floor for quota in self.quotas) - quota.floor
        reserve = self.manager.reserve
        certain = min(len(new), room, self.num_blocks - reserve - num_kept - others)
        assert len(stored) >= certain, "what was lent must return at once"
        if 0 < len(new) <= room - num_kept and not stored:
            raise AssertionError("a tenant below its floor must be able to store")
        if quota.cap - num_kept > 0 and self.num_blocks - reserve - num_kept - others > 0 and new:
            assert stored, "a tenant must not starve"

    @precondition(lambda self: any(each.storing for each in self.requests))
    @rule(choice=st.integers(0, 99), success=st.booleans())
    def end_store(self, choice: int, success: bool) -> None:
        storing = [each for each in self.requests if each.storing]
        request = storing[choice % len(storing)]
        self.manager.complete_store(request.storing.pop(0), request.context, success)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def load(self, choice: int) -> None:
        request = self.requests[choice % len(self.requests)]
        found = self.manager.lookup_prefix(request.path, request.context)
        keys = request.path[: found.num_hits]
        if keys and found.is_final:
            self.manager.prepare_load(keys, request.context)
            request.loading.append(keys)

    @precondition(lambda self: any(each.loading for each in self.requests))
    @rule(choice=st.integers(0, 99))
    def end_load(self, choice: int) -> None:
        loading = [each for each in self.requests if each.loading]
        request = loading[choice % len(loading)]
        self.manager.complete_load(request.loading.pop(0), request.context)

    @precondition(lambda self: any(not (r.storing or r.loading) for r in self.requests))
    @rule(choice=st.integers(0, 99))
    def finish(self, choice: int) -> None:
        done = [each for each in self.requests if not (each.storing or each.loading)]
        request = done[choice % len(done)]
        self.requests.remove(request)
        self.manager.on_request_finished(request.context)

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        for request in self.requests:
            request.storing.clear()
            request.loading.clear()
        self.manager.reset_cache()
        self.manager.slots.end_quarantine()
        for request in self.requests:
            self.manager.on_request_finished(request.context)
        self.requests.clear()

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def every_block_is_charged_once(self) -> None:
        charged = Counter(block.charge.account.index for block in self.tenants.blocks.values())
        idle = Counter(
            block.charge.account.index
            for block in self.tenants.blocks.values()
            if block.ref_cnt == 0
        )
        for account, quota in zip(self.tenants.accounts, self.quotas, strict=True):
            assert account.num_blocks == charged[account.index]
            assert account.num_idle == idle[account.index]
            assert account.num_blocks <= quota.cap, "a cap was exceeded"
            shelves = account.shelves.values()
            assert account.num_blocks == sum(shelf.num_blocks for shelf in shelves)
            assert account.num_idle == sum(shelf.num_idle for shelf in shelves)
            for shelf in shelves:
                resident = {k for k, b in self.tenants.blocks.items() if b.charge is shelf}
                assert {k for k in self.nodes if shelf.policy.get(k) is not None} == resident
        assert len(self.tenants.blocks) + self.manager.slots.num_free() == self.num_blocks

    @invariant()
    def no_more_is_retained_than_allowed(self) -> None:
        accounts = self.tenants.accounts
        assert sum(len(account.retained) for account in accounts) <= MAX_RETAINED * self.num_blocks
        for account in accounts:
            assert set(account.retained) <= self.tenants.blocks.keys()
            shelf = account.shelves.get(10)
            assert len(account.retained) == (shelf.num_blocks if shelf else 0)

    @invariant()
    def heirs_are_other_tenants(self) -> None:
        for key, (heir, _) in self.tenants._shelves.heirs.items():
            assert self.tenants.blocks[key].charge.account is not heir.account

    @precondition(lambda self: any(account.retained for account in self.tenants.accounts))
    @rule()
    def let_retention_end(self) -> None:
        """Later than all deadlines, the next eviction finds nothing retained."""
        self.now += 1000
        before = dict(self.tenants.blocks)
        self.tenants.evict(self.num_blocks + 1, frozenset())
        assert before == self.tenants.blocks
        assert not any(account.retained for account in self.tenants.accounts)


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_random_lives(policy: str) -> None:
    machine = type("Machine", (SharedTier,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_many_random_lives(policy: str) -> None:
    machine = type("Machine", (SharedTier,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=600, stateful_step_count=80, deadline=None)
    )
