"""Random lives of requests against a small independent model of the primary tier.

The model has the slot and the users of every block, and shares no code with the manager. Requests
are paths in a tree of blocks, so prompts share prefixes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

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

from kvtier.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import SlotState
from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.recency import RecencyList
from tests.cpu.policies.tree_checks import check_tree

NUM_NODES = 24


@dataclass
class Block:
    """A resident block as the model sees it."""

    slot: int
    writer: str | None
    """The request that is writing it; None once it is readable."""
    users: set[str] = field(default_factory=set)
    """Requests that have used it since it was stored, the one that stored it included."""
    pins: Counter[str] = field(default_factory=Counter)

    @property
    def is_ready(self) -> bool:
        return self.writer is None

    @property
    def is_evictable(self) -> bool:
        return self.is_ready and not self.pins.total()


@dataclass
class Transfer:
    """A store or a load under way."""

    request: str
    keys: list[OffloadKey]


@dataclass
class Request:
    context: ReqContext
    path: list[OffloadKey]
    num_offered: int = 0
    finished: bool = False
    brought: set[OffloadKey] = field(default_factory=set)
    """Keys that it has used, stored, offered or touched, resident or not."""
    has_loaded: bool = False
    is_stale: bool = False
    """True if it has been running since before the last reset."""
    first_withheld: OffloadKey | None = None
    """The first key that it offered while it was stale."""


class PrimaryTier(RuleBasedStateMachine):
    policy = "lru"

    @initialize(
        num_blocks=st.integers(1, 12),
        parents=st.lists(st.integers(0, 10**6), min_size=NUM_NODES, max_size=NUM_NODES),
    )
    def start(self, num_blocks: int, parents: list[int]) -> None:
        self.manager = CPUOffloadingManager(
            num_blocks, cache_policy=self.policy, enable_events=True, strict=False
        )
        self.num_blocks = num_blocks
        nodes = [make_offload_key(bytes([i]) * 8, i % 2) for i in range(NUM_NODES)]
        self.parent = {
            nodes[i]: nodes[parents[i] % i] if i and parents[i] % 5 else None
            for i in range(NUM_NODES)
        }
        self.nodes = nodes
        self.requests: dict[str, Request] = {}
        self.num_requests = 0
        self.blocks: dict[OffloadKey, Block] = {}
        self.quarantine: set[int] = set()
        self.allowance = 0
        self.steps_in_quarantine = 0
        self.stores: list[Transfer] = []
        self.loads: list[Transfer] = []
        self.bygone: list[tuple[bool, Transfer]] = []
        """(is a store, transfer) that has ended already, or is from before a reset."""
        self.announced: set[OffloadKey] = set()
        self.num_misuses = 0

    def path_to(self, node: OffloadKey) -> list[OffloadKey]:
        path = [node]
        while (parent := self.parent[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]

    def running(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.finished]

    def pick(self, choice: int) -> Request:
        running = self.running()
        return running[choice % len(running)]

    # --- what an engine does ----------------------------------------------------------------

    @rule(node=st.integers(0, NUM_NODES - 1))
    def arrive(self, node: int) -> None:
        self.num_requests += 1
        request = Request(ReqContext(f"r{self.num_requests}"), self.path_to(self.nodes[node]))
        self.requests[request.context.req_id] = request
        self.manager.on_new_request(request.context)

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99), one_by_one=st.booleans())
    def look_up(self, choice: int, one_by_one: bool) -> None:
        request = self.pick(choice)
        expected = 0
        for key in request.path:
            block = self.blocks.get(key)
            if one_by_one:
                result = self.manager.lookup(key, request.context)
                if block is None:
                    assert result is LookupResult.MISS
                elif block.is_ready:
                    assert result is LookupResult.HIT
                else:
                    assert result is LookupResult.HIT_PENDING
            if block is None:
                break
            expected += 1
        self.note_use(request, request.path[:expected])
        if not one_by_one:
            found = self.manager.lookup_prefix(request.path, request.context)
            assert found.num_hits == expected
            hits = [self.blocks[key] for key in request.path[:expected]]
            assert found.is_final == all(block.is_ready for block in hits)

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99))
    def touch(self, choice: int) -> None:
        request = self.pick(choice)
        self.manager.touch(request.path, request.context)
        self.note_use(request, request.path)
        request.brought.update(request.path)

    def note_use(self, request: Request, keys: list[OffloadKey]) -> None:
        for key in keys:
            if key in self.blocks:
                self.blocks[key].users.add(request.context.req_id)
                request.brought.add(key)

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99), length=st.integers(1, NUM_NODES))
    def store(self, choice: int, length: int) -> None:
        request = self.pick(choice)
        # As an engine does: it has looked before it computes.
        found = self.manager.lookup_prefix(request.path, request.context)
        self.note_use(request, request.path[: found.num_hits])
        offered = request.path[request.num_offered :][:length]
        if not offered:
            return
        new = [key for key in offered if key not in self.blocks]
        kept = [key for key in offered if key in self.blocks]
        output = self.manager.prepare_store(offered, request.context)
        if self.is_withheld(request, offered):
            assert output is not None
            assert not output.keys_to_store, "a block from before the reset was stored"
            request.num_offered += len(offered)
            return
        self.note_use(request, kept)
        request.brought.update(offered)
        num_free = self.num_blocks - len(self.blocks) - len(self.quarantine)
        expected = self.num_storable(len(new), request, num_free)
        if output is None:
            assert expected is None
            return
        assert output.keys_to_store == new[:expected], "the head, in the order offered"
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        slots = output.store_spec.block_ids.tolist()
        for key in output.evicted_keys:
            assert key not in request.brought, "a request evicted its own"
            assert self.blocks.pop(key).is_evictable, "a block in use was evicted"
        assert len(output.evicted_keys) == max(len(slots) - num_free, 0), "needless eviction"
        used = {block.slot for block in self.blocks.values()} | self.quarantine
        assert len(set(slots)) == len(slots) == len(output.keys_to_store)
        assert used.isdisjoint(slots), "a slot in use was handed out"
        assert all(0 <= slot < self.num_blocks for slot in slots)
        for key, slot in zip(output.keys_to_store, slots, strict=True):
            name = request.context.req_id
            self.blocks[key] = Block(slot, name, {name})
            request.brought.add(key)
        self.allowance -= len(output.keys_to_store)
        if output.keys_to_store:
            self.stores.append(Transfer(request.context.req_id, output.keys_to_store))
        request.num_offered += len(offered)

    def is_withheld(self, request: Request, offered: list[OffloadKey]) -> bool:
        if not request.is_stale and request.first_withheld in (None, *offered):
            request.first_withheld = None
            return False
        request.first_withheld = request.first_withheld or offered[0]
        return True

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99))
    def start_offering_again(self, choice: int) -> None:
        self.pick(choice).num_offered = 0

    def num_storable(self, wanted: int, request: Request, num_free: int) -> int | None:
        """How many new blocks a store should take; None: it should be refused."""
        reserve = self.manager.reserve
        if wanted and self.quarantine:
            return min(wanted, self.allowance) or None
        own = request.brought & self.blocks.keys()
        wanted = min(wanted, self.num_blocks - max(reserve, len(own)))
        evictable = sum(block.is_evictable for key, block in self.blocks.items() if key not in own)
        in_transfer = sum(not block.is_evictable for block in self.blocks.values())
        room = min(num_free + evictable, self.num_blocks - reserve - in_transfer)
        return wanted if wanted <= room else None

    @precondition(lambda self: self.stores)
    @rule(choice=st.integers(0, 99), success=st.booleans(), seed=st.integers(0, 99))
    def end_store(self, choice: int, success: bool, seed: int) -> None:
        transfer = self.stores.pop(choice % len(self.stores))
        context = self.requests[transfer.request].context
        keys = random.Random(seed).sample(transfer.keys, len(transfer.keys))
        self.manager.complete_store(keys, context, success)
        for key in keys:
            block = self.blocks[key]
            assert block.writer == transfer.request
            if success:
                block.writer = None
            else:
                del self.blocks[key]
        self.quarantine.clear()
        self.bygone.append((True, transfer))

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99), backwards=st.booleans())
    def load(self, choice: int, backwards: bool) -> None:
        request = self.pick(choice)
        keys = []
        for key in request.path:
            if key not in self.blocks or not self.blocks[key].is_ready:
                break
            keys.append(key)
        for key in reversed(keys) if backwards else keys:
            assert self.manager.lookup(key, request.context) is LookupResult.HIT
        self.note_use(request, keys)
        if not keys:
            return
        spec = self.manager.prepare_load(keys, request.context)
        assert isinstance(spec, CPULoadStoreSpec)
        assert spec.block_ids.tolist() == [self.blocks[key].slot for key in keys]
        request.has_loaded = True
        for key in keys:
            self.blocks[key].pins[request.context.req_id] += 1
        self.loads.append(Transfer(request.context.req_id, keys))

    @precondition(lambda self: self.loads)
    @rule(choice=st.integers(0, 99), seed=st.integers(0, 99))
    def end_load(self, choice: int, seed: int) -> None:
        transfer = self.loads.pop(choice % len(self.loads))
        context = self.requests[transfer.request].context
        keys = random.Random(seed).sample(transfer.keys, len(transfer.keys))
        self.manager.complete_load(keys, context)
        for key in keys:
            self.blocks[key].pins[transfer.request] -= 1
        self.quarantine.clear()
        self.bygone.append((False, transfer))

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99))
    def finish(self, choice: int) -> None:
        request = self.pick(choice)
        request.finished = True
        self.manager.on_request_finished(request.context)

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        names = [request.context.req_id for request in self.running()]
        begun, preempted = (
            data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
            for _ in range(2)
        )
        self.manager.on_schedule_end(ScheduleEndContext(begun, preempted))
        for name in preempted:
            self.requests[name].has_loaded = self.requests[name].is_stale = False
        for name in begun:
            self.requests[name].is_stale &= self.requests[name].has_loaded
        if self.quarantine:
            self.steps_in_quarantine += 1
            if self.steps_in_quarantine > 1 and not self.allowance:
                self.quarantine.clear()

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        for block in self.blocks.values():
            if not block.is_evictable:
                self.quarantine.add(block.slot)
        self.blocks.clear()
        self.bygone += [(True, transfer) for transfer in self.stores]
        self.bygone += [(False, transfer) for transfer in self.loads]
        self.stores.clear()
        self.loads.clear()
        for request in self.requests.values():
            request.num_offered = 0
            request.brought.clear()
            request.is_stale = not request.finished
            request.first_withheld = None
        self.allowance = (self.num_blocks - len(self.quarantine) + 1) // 2
        self.steps_in_quarantine = 0

    # --- what it should not do --------------------------------------------------------------

    @precondition(lambda self: self.bygone)
    @rule(choice=st.integers(0, 99), success=st.booleans())
    def complete_again_or_late(self, choice: int, success: bool) -> None:
        is_store, transfer = self.bygone[choice % len(self.bygone)]
        outstanding = self.stores if is_store else self.loads
        keys = [
            key
            for key in transfer.keys
            if not any(t.request == transfer.request and key in t.keys for t in outstanding)
        ]
        self.complete_wrongly(is_store, keys, transfer.request, success)

    @precondition(lambda self: (self.stores or self.loads) and len(self.requests) > 1)
    @rule(choice=st.integers(0, 99), other=st.integers(0, 99), is_store=st.booleans())
    def complete_for_another(self, choice: int, other: int, is_store: bool) -> None:
        transfers = self.stores if is_store else self.loads
        if not transfers:
            return
        transfer = transfers[choice % len(transfers)]
        names = sorted(self.requests.keys() - {transfer.request})
        name = names[other % len(names)]
        keys = [
            key
            for key in transfer.keys
            if not any(t.request == name and key in t.keys for t in transfers)
        ]
        self.complete_wrongly(is_store, keys, name, success=True)

    def complete_wrongly(
        self, is_store: bool, keys: list[OffloadKey], name: str, success: bool
    ) -> None:
        context = self.requests[name].context
        if is_store:
            self.manager.complete_store(keys, context, success)
        else:
            self.manager.complete_load(keys, context)
        self.num_misuses += len(keys)

    @precondition(lambda self: self.running())
    @rule(choice=st.integers(0, 99))
    def load_unasked(self, choice: int) -> None:
        request = self.pick(choice)
        missing = [
            key for key in request.path if key not in self.blocks or not self.blocks[key].is_ready
        ]
        if missing:
            spec = self.manager.prepare_load(missing, request.context)
            assert isinstance(spec, CPULoadStoreSpec)
            assert set(spec.block_ids.tolist()) == {-1}, "an unreadable block was handed out"
            self.num_misuses += len(missing)

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        writing = sum(not block.is_ready for block in self.blocks.values())
        assert self.manager.slots.states() == +Counter(
            {
                SlotState.WRITING: writing,
                SlotState.READY: len(self.blocks) - writing,
                SlotState.QUARANTINED: len(self.quarantine),
                SlotState.FREE: self.num_blocks - len(self.blocks) - len(self.quarantine),
            }
        )
        gauges = self.manager.get_stats().gauges
        pinned = sum(block.is_ready and not block.is_evictable for block in self.blocks.values())
        assert gauges["kvtier_cpu_writing_blocks"] == writing
        assert gauges["kvtier_cpu_pinned_blocks"] == pinned
        assert gauges["kvtier_cpu_resident_blocks"] == len(self.blocks) - writing
        assert gauges["kvtier_cpu_quarantined_slots"] == len(self.quarantine)

    @invariant()
    def events_tell_what_is_readable(self) -> None:
        for event in self.manager.take_events():
            keys = set(event.keys)
            assert len(keys) == len(event.keys)
            if event.removed:
                assert keys <= self.announced
                self.announced -= keys
            else:
                assert not keys & self.announced
                self.announced |= keys
            assert len(self.announced) <= self.num_blocks, "removed must precede stored"
        readable = {key for key, block in self.blocks.items() if block.is_ready}
        assert self.announced == readable
        assert sorted(self.manager.resident_keys()) == sorted(readable)

    @invariant()
    def mistakes_are_counted(self) -> None:
        assert self.manager.misuse.total == self.num_misuses

    @invariant()
    def the_head_is_the_last_to_leave(self) -> None:
        lists = [list(order) for order in self.orders()]
        policy = self.manager.slots.policy
        if isinstance(policy, ARCCachePolicy):
            assert len(policy.t1) + len(policy.b1) <= self.num_blocks
            assert len(policy.blocks) + len(policy.b1) + len(policy.b2) <= 2 * self.num_blocks
            assert not policy.b1.keys() & policy.b2.keys()
            assert not policy.blocks.keys() & (policy.b1.keys() | policy.b2.keys())
        assert Counter(key for order in lists for key in order) == Counter(list(self.blocks))
        for order in lists:
            rank = {key: i for i, key in enumerate(order)}
            for key in order:
                for ancestor in self.path_to(key)[:-1]:
                    if ancestor in rank and rank[ancestor] < rank[key]:
                        both = self.blocks[key].users & self.blocks[ancestor].users
                        assert not both, f"{key.hex()} outlives {ancestor.hex()} for {both}"

    def orders(self) -> list[RecencyList]:
        policy = self.manager.slots.policy
        if isinstance(policy, DensityCachePolicy):
            return []
        if isinstance(policy, LRUCachePolicy):
            return [policy._order]
        assert isinstance(policy, ARCCachePolicy)
        return [policy.t1, policy.t2]

    def teardown(self) -> None:
        """When all transfers have ended, no slot is held and no request is remembered."""
        if not hasattr(self, "manager"):
            return
        while self.stores:
            self.end_store(0, True, 0)
        while self.loads:
            self.end_load(0, 0)
        for request in self.running():
            request.finished = True
            self.manager.on_request_finished(request.context)
        states = self.manager.slots.states()
        assert states[SlotState.WRITING] == 0
        assert self.manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 0
        assert not self.manager.uses, "a finished request is remembered"
        for order in self.orders():
            assert not order._by_owner, "a finished request is remembered"
            assert all(run.blocks for run in order._runs), "an empty run is kept"
            for run in order._runs:
                idle = sum(block.ref_cnt == 0 for block in run.blocks.values())
                assert run.idle == idle, "a block is evictable and not counted so, or the reverse"
        if not self.quarantine:
            assert states[SlotState.QUARANTINED] == 0


class PrimaryTierWithARC(PrimaryTier):
    policy = "arc"


class PrimaryTierWithDensity(PrimaryTier):
    policy = "density"

    @invariant()
    def the_head_is_the_last_to_leave(self) -> None:
        """The tree has every block once, and counts right. See also `test_density.py`."""
        policy = self.manager.slots.policy
        assert isinstance(policy, DensityCachePolicy)
        assert policy.blocks.keys() == self.blocks.keys()
        check_tree(policy)


MACHINES = pytest.mark.parametrize(
    "machine", [PrimaryTier, PrimaryTierWithARC, PrimaryTierWithDensity]
)


@MACHINES
def test_random_lives(machine: type[PrimaryTier]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=400, stateful_step_count=60))


@pytest.mark.soak
@MACHINES
def test_random_lives_for_long(machine: type[PrimaryTier]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(settings.get_profile("soak"), stateful_step_count=200)
    )
