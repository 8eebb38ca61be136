"""One cache for several tenants: who is charged for a block, and whose block is evicted.

Each tenant has an `Account` with a floor and a cap, and an eviction policy of its own, so that any
policy can be used. `TenantPolicy` stands above them: it is a `CachePolicy` itself, and chooses the
tenant that gives room. Scheduler thread only.

- A cap is never exceeded: a tenant at its cap evicts its own blocks, even if slots are free.
- A floor is never taken: another tenant's store evicts blocks of a tenant only while that tenant
  has more than its floor.
- Room that a tenant does not use is lent, and given back at the owner's next store that needs it.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Reversible, Sequence, Set
from functools import cache, partial
from itertools import chain, islice
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from kvtier.base import ReqContext
from kvtier.config import ConfigError, Problem
from kvtier.config.tenants import (
    DEFAULT_TENANT,
    HIGHEST_PRIORITY,
    NORMAL_PRIORITY,
    TenantRule,
)
from kvtier.cpu.policies.base import BlockStatus, CachePolicy
from kvtier.hints import RequestHints, hints_of, new_context

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.config import OffloadingOptions

_FORK: OffloadKey = b""  # type: ignore[assignment]
"""Stands for several different blocks that follow one."""
_charge_of = attrgetter("charge")

_Pair: TypeAlias = "tuple[OffloadKey, BlockStatus]"

_DROPPED, _RETAINED = -1, HIGHEST_PRIORITY + 1
"""Ranks of the shelves below and above those of the priorities."""
_DOUBLES_EVERY = 2
"""A block of this many priorities more stays twice as long without a use."""
_QUANTUM, _ALIKE = 128, 0.8
"""One tenant gives room until it has given this part of the cache. Then it is the turn of those
that had nearly as much, and after them all are compared again."""
_MAX_VISITS = 65_536
"""The largest number of running requests that are remembered."""


class BlockQuota(NamedTuple):
    """What a tenant may have of one cache, in blocks."""

    tenant: str
    floor: int
    """Others never take this much while the tenant uses it."""
    cap: int
    """The tenant never has more."""


class Tenancy(NamedTuple):
    """How tenants share one cache."""

    quotas: tuple[BlockQuota, ...]
    """One for each tenant, by the index of its rule."""
    max_retained: float
    """The part of the cache that retained blocks of all tenants may take."""
    clock: Callable[[], float] = time.monotonic

    def tag_of(self, context: ReqContext) -> int:
        """The tag of a request's tenant. Any thread."""
        return tenant_tag(self.quotas[hints_of(context).tenant.index].tenant)

    @classmethod
    def of(
        cls, options: OffloadingOptions, tier: str, at: str, num_blocks: int, block_bytes: int
    ) -> Tenancy | None:
        """The quotas in a tier of `num_blocks`, from the operator's rules; None without rules.
        `tier`: "host", or a label as in "0:disk". `at`: the key that sets the tier's size. Raises
        `ConfigError` if the tier cannot keep them."""
        if options.tenants is None:
            return None
        rules = options.tenants
        rules.require_floors_fit(tier, at, num_blocks, block_bytes)
        quotas = tuple(_quota_in(rule, tier, at, num_blocks, block_bytes) for rule in rules)
        return cls(quotas, options.max_retained_share)


class Shelf:
    """The blocks of one tenant that have the same rank, with an eviction policy of their own."""

    __slots__ = ("account", "most", "num_blocks", "num_idle", "policy", "rank", "weight")

    def __init__(self, account: Account, policy: CachePolicy, rank: int) -> None:
        self.account = account
        self.policy = policy
        self.most = policy.cache_capacity
        """The most blocks that the tenant may have."""
        self.rank = rank
        """A priority. Blocks of `_DROPPED` leave before all others, those of `_RETAINED`
        after all others."""
        self.weight = 2.0 ** ((rank - NORMAL_PRIORITY) / _DOUBLES_EVERY)
        """A block leaves before one of weight 1 if its last use is more than `weight` times as long
        ago."""
        self.num_blocks = 0
        self.num_idle = 0
        """Blocks that can be evicted."""

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        context: ReqContext,
    ) -> None:
        """Add blocks to the policy. The caller counts them."""
        policy = self.policy
        policy.cache_capacity = max(policy.cache_capacity, self.num_blocks + len(blocks))
        policy.insert_run(keys, blocks, brought, context)

    def evict(
        self,
        n: int,
        protected: Set[OffloadKey],
        storing: Sequence[OffloadKey],
        context: ReqContext,
        share: int,
    ) -> list[_Pair]:
        """Remove `n` blocks from the policy, or as many as it gives. `storing`: the blocks that
        `context` is about to store here. `share`: the part of the cache of one of all shelves."""
        # A policy such as ARC remembers as many evicted blocks. Those of all shelves together must
        # not be many times as many as the cache has.
        self.policy.cache_capacity = min(self.most, self.num_blocks + share)
        num = min(n, self.num_idle)
        is_exact = False
        victims: list[_Pair] = []
        while num > 0:
            self.policy.on_store_miss(storing, context)
            taken = self.policy.evict(num, protected)
            if taken is not None:
                self.num_blocks -= len(taken)
                self.num_idle -= len(taken)
                victims += taken
                num = min(n - len(victims), num)
            elif is_exact:
                num //= 2  # the policy protects further blocks of the request
            else:
                is_exact = True
                get = self.account.get
                kept = [block for key in protected if (block := get(key)) is not None]
                own = sum(block.charge is self and block.ref_cnt == 0 for block in kept)
                num = min(num, self.num_idle - own)
        return victims


class Retained:
    """The retained blocks of one tenant. What is kept is bounded by their number."""

    def __init__(self) -> None:
        self._ends: dict[OffloadKey, tuple[float, int]] = {}
        """For each block: when its retention ends, and its rank then."""
        self._by_second: dict[int, dict[OffloadKey, None]] = {}
        """The blocks whose retention ends in the second before this one."""

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._ends

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._ends)

    def end_of(self, key: OffloadKey) -> tuple[float, int] | None:
        """When the retention of a block ends, and its rank then; None if it is not retained."""
        return self._ends.get(key)

    def keep(self, key: OffloadKey, until: float, rank: int) -> None:
        """Retain a block, or change its retention."""
        self.discard(key)
        self._ends[key] = until, rank
        self._by_second.setdefault(ceil(until), {})[key] = None

    def raise_rank(self, key: OffloadKey, rank: int) -> None:
        """A retained block gets at least this rank when its retention ends."""
        until, own = self._ends[key]
        self._ends[key] = until, max(own, rank)

    def discard(self, key: OffloadKey) -> None:
        """End the retention of a block, if it is retained."""
        ended = self._ends.pop(key, None)
        if ended is not None:
            second = ceil(ended[0])
            keys = self._by_second[second]
            del keys[key]
            if not keys:
                del self._by_second[second]

    def take(self, second: int) -> dict[int, list[OffloadKey]]:
        """End the retentions that end in the second before this one. Returns the blocks by rank."""
        by_rank: dict[int, list[OffloadKey]] = {}
        for key in self._by_second.pop(second, ()):
            _, rank = self._ends.pop(key)
            by_rank.setdefault(rank, []).append(key)
        return by_rank

    def clear(self) -> None:
        """Forget all blocks."""
        self._ends.clear()
        self._by_second.clear()


class Account:
    """What one tenant has of the cache."""

    def __init__(
        self,
        index: int,
        quota: BlockQuota,
        get: Callable[[OffloadKey], BlockStatus | None],
        make_policy: Callable[[], CachePolicy],
        now: Callable[[], int],
    ) -> None:
        """`now`: the clock of uses."""
        self._now = now
        self.stamps_from = 0
        """When the account got its second shelf. Since then, its blocks have the times of their
        last uses; before, nobody compares them."""
        self.index = index
        self.name, self.floor, self.cap = quota
        self.get = get
        self._make_policy = make_policy
        self.shelves: dict[int, Shelf] = {}
        """By rank."""
        self.num_blocks = 0
        """Blocks that the tenant is charged for: readable, or being written."""
        self.num_idle = 0
        """Those of them that can be evicted."""
        self.used_at = 0
        """When the tenant last used or stored a block, on the clock of `TenantPolicy`."""
        self.lendable = 0
        """Blocks that stores of other tenants may evict."""
        self.guarded = 0
        """Blocks that count towards the floor."""
        self.retained = Retained()
        """The blocks of the `_RETAINED` shelf."""
        self.num_stored = 0
        """Blocks that the tenant has stored, since the start."""
        self.num_lost = 0
        """Blocks that others' stores have evicted, since the start."""

    def shelf(self, rank: int) -> Shelf:
        """The shelf of a rank, made when it is first needed."""
        shelf = self.shelves.get(rank)
        if shelf is None:
            if len(self.shelves) == 1:
                self.stamps_from = self._now()
            shelf = self.shelves[rank] = Shelf(self, self._make_policy(), rank)
        return shelf

    def evict(
        self,
        n: int,
        protected: Set[OffloadKey],
        target: Shelf,
        storing: Sequence[OffloadKey],
        context: ReqContext,
        now: int,
        share: int,
    ) -> list[_Pair]:
        """Remove `n` blocks from the policies, or as many as they give; dropped ones first,
        retained ones last. `target`: where `context` is about to store the blocks `storing`.
        `share`: as for a shelf."""
        in_use = self._in_use()
        middle = [shelf for shelf in in_use if _DROPPED < shelf.rank < _RETAINED]
        shares: Iterable[tuple[Shelf, int]] = [(shelf, n) for shelf in middle]
        if len(middle) > 1:
            num_dropped = sum(shelf.num_idle for shelf in in_use if shelf.rank == _DROPPED)
            weighed = _weigh(middle, max(n - num_dropped, 0), protected, now)
            shares = chain(weighed, shares)
        first = [(shelf, n) for shelf in in_use if shelf.rank == _DROPPED]
        last = [(shelf, n) for shelf in in_use if shelf.rank == _RETAINED]
        victims: list[_Pair] = []
        for shelf, most in chain(first, shares, last):
            num = min(n - len(victims), most)
            if num > 0:
                keys = storing if shelf is target else ()
                victims += shelf.evict(num, protected, keys, context, share)
        self.num_blocks -= len(victims)
        self.num_idle -= len(victims)
        if self.retained:
            for key, _ in victims:
                self.retained.discard(key)
        return victims

    def _in_use(self) -> list[Shelf]:
        """The shelves with blocks that can be evicted, the lowest rank first."""
        in_use = [shelf for shelf in self.shelves.values() if shelf.num_idle]
        return sorted(in_use, key=_rank_of) if len(in_use) > 1 else in_use

    def next_to_leave(self, n: int, now: int) -> list[_Pair] | None:
        """The blocks that `evict` would remove. None: the policy cannot tell."""
        leaving: list[_Pair] = []
        in_use = self._in_use()
        middle = [shelf for shelf in in_use if _DROPPED < shelf.rank < _RETAINED]
        first = [(shelf, n) for shelf in in_use if shelf.rank == _DROPPED]
        last = [(shelf, n) for shelf in in_use if shelf.rank == _RETAINED]
        shares = (
            _weigh(middle, n, frozenset(), now) if len(middle) > 1 else [(s, n) for s in middle]
        )
        for shelf, most in chain(first, shares, last):
            if len(leaving) < n:
                named = shelf.policy.next_to_leave(min(n - len(leaving), most))
                if named is None:
                    return None
                leaving += named
        return leaving


def _weigh(
    shelves: Sequence[Shelf], n: int, protected: Set[OffloadKey], now: int
) -> list[tuple[Shelf, int]]:
    """How many of `n` blocks each shelf gives. Its next block to leave is compared with those of
    the others: the time since its last use, divided by the weight."""
    queues = []
    for shelf in shelves:
        named = shelf.policy.next_to_leave(n)
        if named is None:  # the policy cannot tell: by size
            total = sum(each.num_idle / each.weight for each in shelves)
            return [(each, int(n * each.num_idle / each.weight / total) + 1) for each in shelves]
        since = shelf.account.stamps_from
        ages = [
            ((max(block.used_at, since) - now) / shelf.weight, shelf.rank)
            for key, block in named
            if key not in protected
        ]
        queues.append(ages)
    by_rank = {shelf.rank: shelf for shelf in shelves}
    chosen = Counter(rank for _, (_, rank) in zip(range(n), heapq.merge(*queues), strict=False))
    return [(by_rank[rank], count) for rank, count in sorted(chosen.items())]


def _rank_of(shelf: Shelf) -> int:
    return shelf.rank


def _note_forks(keys: list[OffloadKey], blocks: dict[OffloadKey, BlockStatus]) -> None:
    """A request had these blocks, in prompt order. Record what follows each, and where prompts
    part."""
    for block, following in zip(map(blocks.get, keys), keys[1:], strict=False):
        if block is None:
            continue
        known = block.following
        if known is not following and known != following:
            block.following = following if known is None else _FORK


def _own_tail(
    keys: list[OffloadKey], blocks: dict[OffloadKey, BlockStatus]
) -> Iterator[BlockStatus]:
    """The blocks that only this prompt has: first those that continue it, from the last one, then
    its own, up to the last one that it shares with another prompt."""
    behind: list[BlockStatus] = []
    last = blocks.get(keys[-1]) if keys else None
    key = None if last is None else last.following
    while key is not None and (block := blocks.get(key)) is not None and len(behind) < len(blocks):
        behind.append(block)
        key = block.following
    own = [block for key in keys if (block := blocks.get(key)) is not None]
    for block in chain(reversed(behind), reversed(own)):
        if block.following == _FORK:
            return
        yield block


class _Shelves:
    """All blocks of a cache with tenants, and the shelf that each is on."""

    def __init__(self, capacity: int, blocks: dict[OffloadKey, BlockStatus]) -> None:
        self.capacity = capacity
        self.blocks = blocks
        self.accounts: list[Account] = []
        """By the index of the tenant's rule."""
        self.now = 0
        """Counts uses and stored blocks."""
        self.lendable = self.guarded = 0
        """Sums over all accounts."""
        self.num_policies = 0
        """The shelves of all accounts."""
        self.heirs: dict[OffloadKey, tuple[Shelf, int]] = {}
        """Who has used a block last, if that is not the tenant that is charged for it, and the
        number of blocks that this tenant had stored until then."""
        self.on_handed_over: Callable[[Sequence[BlockStatus], str], None] | None = None
        """See `TenantPolicy.on_handed_over`."""
        self._visits: dict[str, dict[Shelf, None]] = {}
        """By request: the shelves whose policies know it."""

    def settle(self, account: Account) -> None:
        """The counts of an account have changed."""
        above = account.num_blocks - account.floor
        lendable = max(min(account.num_idle, above), 0)
        guarded = account.num_blocks if above < 0 else account.floor
        self.lendable += lendable - account.lendable
        self.guarded += guarded - account.guarded
        account.lendable, account.guarded = lendable, guarded

    def add(self, shelf: Shelf, num_blocks: int, num_idle: int) -> None:
        """A shelf has got blocks, or lost some (negative numbers)."""
        account = shelf.account
        shelf.num_blocks += num_blocks
        shelf.num_idle += num_idle
        account.num_blocks += num_blocks
        account.num_idle += num_idle
        self.settle(account)

    def visit(self, context: ReqContext, shelf: Shelf) -> None:
        """The policy of a shelf has heard of a request."""
        visits = self._visits.get(context.req_id)
        if visits is None:
            if len(self._visits) >= _MAX_VISITS:
                self.end_visits((), ReqContext(next(iter(self._visits))))
            visits = self._visits[context.req_id] = {}
        visits[shelf] = None

    def visited_by(self, context: ReqContext) -> Iterable[Shelf]:
        """The shelves whose policies have heard of a request."""
        return self._visits.get(context.req_id, ())

    def end_visits(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        """A request has ended. `keys`: all its blocks."""
        for shelf in self._visits.pop(context.req_id, ()):
            shelf.policy.on_request_finished(keys, context)

    def move(self, blocks: Sequence[BlockStatus], target: Shelf, context: ReqContext) -> None:
        """Put blocks, given in prompt order, on another shelf."""
        idle = [block for block in blocks if block.ref_cnt == 0]
        for shelf, part in _by_shelf(idle):
            for block in part:
                block.ref_cnt = 1  # policies get and drop blocks only while these are in use
            shelf.policy.pinned(part)
            self.add(shelf, 0, -len(part))
        for shelf, part in _by_shelf(blocks):
            for block in part:
                shelf.policy.remove(block.key)
            self.add(shelf, -len(part), 0)
        self.put(blocks, idle, target, context)

    def put(
        self,
        blocks: Sequence[BlockStatus],
        idle: Sequence[BlockStatus],
        target: Shelf,
        context: ReqContext,
    ) -> None:
        """Put blocks that are on no shelf on this one. `idle`: those that can be evicted."""
        keys = [block.key for block in blocks]
        for block in idle:
            block.ref_cnt = 1
        target.insert_run(keys, blocks, keys, context)
        self.visit(context, target)
        for block in blocks:
            block.charge = target
        for block in idle:
            block.ref_cnt = 0
        target.policy.unpinned(idle)
        self.add(target, len(blocks), len(idle))

    def clear(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
        self.num_policies = 0
        for account in self.accounts:
            account.shelves.clear()
            account.retained.clear()
            account.num_blocks = account.num_idle = 0
            self.settle(account)
        self.heirs.clear()
        self._visits.clear()


class _Retention:
    """Blocks that requests want to be kept for a while, and those that nobody will ask for again.

    A retained block leaves only when its tenant has nothing else to give. A tenant retains at most
    a part of what it may have, so retention never takes room from other tenants.
    """

    def __init__(self, shelves: _Shelves, max_retained: float, clock: Callable[[], float]) -> None:
        self._shelves = shelves
        self._max_retained = max_retained
        self._clock = clock
        self._expiring: dict[int, dict[Account, None]] = {}
        """The tenants with retentions that end in the second before this one. A tenant stays here
        if its blocks leave earlier, so there is at most one entry for each tenant and second."""
        self._seconds: list[int] = []
        """A heap of the keys of `_expiring`."""

    def note_prompt(
        self, keys: list[OffloadKey], hints: RequestHints, home: Shelf, context: ReqContext
    ) -> None:
        """A request had these blocks, in prompt order. Do what it has said about them."""
        _note_forks(keys, self._shelves.blocks)
        if hints.drop:
            self._drop(keys, home.account, context)
        elif hints.retain_s:
            self._retain(keys, hints.retain_s, home, context)

    def _retain(
        self, keys: Sequence[OffloadKey], seconds: float, home: Shelf, context: ReqContext
    ) -> None:
        """Keep blocks of the request's tenant: the first ones, as many as it may retain."""
        self.expire()
        account, blocks = home.account, self._shelves.blocks
        deadline = self._clock() + seconds
        retained = account.retained
        most = len(retained) + self._num_retainable(account)
        moved: list[BlockStatus] = []
        is_longer = False
        for key in dict.fromkeys(keys):
            block = blocks.get(key)
            if block is None or block.charge.account is not account:
                continue
            until, rank = retained.end_of(key) or (0.0, block.charge.rank)
            if key not in retained:
                if len(retained) >= most:
                    break
                moved.append(block)
            elif until >= deadline:
                continue
            retained.keep(key, deadline, max(rank, home.rank))
            is_longer = True
        if moved:
            self._shelves.move(moved, account.shelf(_RETAINED), context)
        if is_longer:
            second = ceil(deadline)
            if second not in self._expiring:
                self._expiring[second] = {}
                heapq.heappush(self._seconds, second)
            self._expiring[second][account] = None

    def _num_retainable(self, account: Account) -> int:
        """How many more blocks a tenant may retain now. The part of each floor that may be retained
        is never taken by other tenants."""
        share, accounts = self._max_retained, self._shelves.accounts
        own = int(share * account.floor) - len(account.retained)
        taken = sum(max(len(each.retained), int(share * each.floor)) for each in accounts)
        left = int(share * self._shelves.capacity) - taken
        return min(max(own, 0) + max(left, 0), int(share * account.cap) - len(account.retained))

    def expire(self) -> None:
        """End the retentions whose time has come, within a second. Their blocks get the rank that
        their requests gave them."""
        if not self._seconds or self._seconds[0] > (now := self._clock()):
            return
        blocks = self._shelves.blocks
        while self._seconds and self._seconds[0] <= now:
            second = heapq.heappop(self._seconds)
            context = ReqContext(f"kvtier ends retention {second}")
            for account in self._expiring.pop(second):
                for rank, keys in account.retained.take(second).items():
                    moved = [blocks[key] for key in keys]
                    self._shelves.move(moved, account.shelf(rank), context)
            self._shelves.end_visits((), context)

    def _drop(self, keys: list[OffloadKey], account: Account, context: ReqContext) -> None:
        """Nobody will ask for these blocks again. Let those leave first that no other prompt and no
        other tenant shares."""
        dropped = []
        for block in _own_tail(keys, self._shelves.blocks):
            if block.charge.account is not account or block.key in self._shelves.heirs:
                break
            account.retained.discard(block.key)
            if block.charge.rank != _DROPPED:
                dropped.append(block)
        if dropped:
            self._shelves.move(dropped[::-1], account.shelf(_DROPPED), context)

    def clear(self) -> None:
        """Forget all blocks."""
        self._expiring.clear()
        self._seconds.clear()


class _Givers:
    """Chooses the tenants that give room: those that have most beyond their floors. What a tenant
    has counts more, the longer it has used nothing."""

    def __init__(self, shelves: _Shelves) -> None:
        self._shelves = shelves
        self._quantum = 1 + shelves.capacity // _QUANTUM
        self._chosen: list[Account] = []
        """Who gives next; the next one is last."""
        self._num_to_give = 0
        """Blocks that the next one still gives, before it is another's turn."""

    def next(self, spent: Set[Account]) -> tuple[Account, int] | None:
        """The tenant that gives next, and how many blocks. None: nobody but `spent` has any to
        give."""
        for _ in range(2):
            while self._chosen:
                giver = self._chosen[-1]
                if self._num_to_give > 0 and giver.lendable and giver not in spent:
                    return giver, min(self._num_to_give, giver.lendable)
                self._chosen.pop()
                self._num_to_give = self._quantum
            self._choose(spent)
        return None

    def _choose(self, spent: Set[Account]) -> None:
        """All that have nearly as much as the one that has most."""
        now, capacity = self._shelves.now, self._shelves.capacity
        pressures = {
            account: (account.num_blocks - account.floor) * (capacity + now - account.used_at)
            for account in self._shelves.accounts
            if account.lendable and account not in spent
        }
        if pressures:
            least = max(pressures.values()) * _ALIKE
            alike = [account for account, pressure in pressures.items() if pressure >= least]
            self._chosen = sorted(alike, key=pressures.__getitem__)
        self._num_to_give = self._quantum

    def note_given(self, num_blocks: int) -> None:
        """The tenant has given blocks."""
        self._num_to_give -= num_blocks


class _Eviction:
    """Makes room for one store."""

    def __init__(
        self,
        shelves: _Shelves,
        protected: Set[OffloadKey],
        home: Shelf,
        storing: Sequence[OffloadKey],
        context: ReqContext,
        slack: int,
    ) -> None:
        """`storing`: the blocks that `context` is about to store on the shelf `home`. `slack`: how
        many more blocks than are wanted could be evicted."""
        self._shelves = shelves
        self._protected = protected
        self._home = home
        self._storing = storing
        self._context = context
        self._slack = slack
        self._victims: list[_Pair] = []

    def run(self, n: int, givers: _Givers) -> list[_Pair]:
        """Evict at least `n` blocks, and of the tenant that stores until it may have the new ones;
        fewer if the policies protect further blocks of the request."""
        own, victims = self._home.account, self._victims
        if self._storing:
            while (over := own.num_blocks + len(self._storing) - own.cap) > 0:
                if not self._take(own, over):
                    return victims
        spent: set[Account] = set()
        while len(victims) < n and (found := givers.next(spent)) is not None:
            giver, most = found
            num_taken = self._take(giver, min(most, n - len(victims)))
            givers.note_given(num_taken)
            if giver is not own:
                giver.num_lost += num_taken
            if not num_taken:
                spent.add(giver)
        while len(victims) < n and self._take(own, n - len(victims)):
            pass
        return victims

    def _take(self, account: Account, n: int) -> int:
        """Take up to `n` blocks from a tenant, and return how many. Those that another tenant has
        used since are handed over to it, if possible, and the others are evicted."""
        taken = self._evict(account, n)
        heirs = self._shelves.heirs
        if not heirs or heirs.keys().isdisjoint([key for key, _ in taken]):
            self._victims += taken
            return len(taken)
        by_heir: dict[Shelf, list[_Pair]] = {}
        for pair in taken:
            heir, num_stored = heirs.pop(pair[0], (None, 0))
            # After as many stores as the heir may have blocks, it would have evicted the block
            # itself. Then it must not give a newer one for it.
            if heir is None or heir.account.num_stored - num_stored >= heir.account.cap:
                self._victims.append(pair)
            else:
                by_heir.setdefault(heir, []).append(pair)
        for heir, pairs in by_heir.items():
            self._hand_over(pairs, heir)
        return len(taken)

    def _hand_over(self, pairs: list[_Pair], heir: Shelf) -> None:
        """Charge the tenant that has used these blocks last: with as many as it has room for, and,
        at its cap, with as many as it gives others for. Evict the rest, tails of prompts first."""
        account = heir.account
        num_coming = len(self._storing) if account is self._home.account else 0
        room = min(max(account.cap - account.num_blocks - num_coming, 0), len(pairs))
        num_given = min(room, max(self._slack, 0))
        self._slack -= num_given
        instead = self._evict(account, len(pairs) - room) if room < len(pairs) else []
        for key, _ in instead:
            self._shelves.heirs.pop(key, None)
        num_leaving = len(pairs) - num_given - len(instead)
        self._victims += instead + pairs[:num_leaving]
        kept = [block for _, block in reversed(pairs[num_leaving:])]
        if kept:
            context = ReqContext("kvtier hands over blocks")
            self._shelves.put(kept, kept, heir, context)
            self._shelves.end_visits((), context)
            if self._shelves.on_handed_over is not None:
                self._shelves.on_handed_over(kept, account.name)

    def _evict(self, account: Account, n: int) -> list[_Pair]:
        shelves = self._shelves
        share = shelves.capacity // max(shelves.num_policies, 1)
        victims = account.evict(
            n, self._protected, self._home, self._storing, self._context, shelves.now, share
        )
        shelves.settle(account)
        return victims


class TenantPolicy(CachePolicy):
    """The eviction policy of a cache with tenants. A block is charged to the tenant that stored it.

    If another tenant has used a block since, the block is handed over to that tenant instead of
    being evicted; if that tenant is at its cap, it gives its own next block for it.
    """

    def __init__(
        self,
        policy_cls: type[CachePolicy],
        capacity: int,
        tenancy: Tenancy,
    ) -> None:
        super().__init__(capacity)
        self.may_evict_newest = policy_cls.may_evict_newest  # type: ignore[misc]
        self._policy_cls = policy_cls
        self._admits_all = False
        self._shelves = _Shelves(capacity, self.blocks)
        self.accounts = self._shelves.accounts
        """By the index of the tenant's rule. Read-only for callers."""
        for index, quota in enumerate(tenancy.quotas):
            make_policy = self._policy_maker(max(min(quota.cap, capacity), 1))
            clock = partial(getattr, self._shelves, "now")
            self.accounts.append(Account(index, quota, self.blocks.get, make_policy, clock))
        self._by_tag = {tenant_tag(each.name): each.index for each in self.accounts}
        self._retention = _Retention(self._shelves, tenancy.max_retained, tenancy.clock)
        self._givers = _Givers(self._shelves)
        self._storing: Sequence[OffloadKey] = ()
        self._context = ReqContext("")
        """The request that stores next, and its blocks."""
        self._last_context: ReqContext | None = None
        self._last_home = self.accounts[0].shelf(NORMAL_PRIORITY)

    def _policy_maker(self, most: int) -> Callable[[], CachePolicy]:
        def make() -> CachePolicy:
            policy = self._policy_cls(cache_capacity=most)
            self._shelves.num_policies += 1
            if self._admits_all:
                policy.admit_all()
            return policy

        return make

    def _home_of(self, context: ReqContext) -> Shelf:
        """Where blocks go that a request stores."""
        if context is not self._last_context:
            hints = hints_of(context)
            account = self.accounts[hints.tenant.index]
            self._last_context, self._last_home = context, account.shelf(hints.priority)
        return self._last_home

    def on_handed_over(self, note: Callable[[Sequence[BlockStatus], str], None]) -> None:
        """Call `note` with blocks that are charged to another tenant from now on, and its name.
        `note` must not change the cache."""
        self._shelves.on_handed_over = note

    def index_of(self, tag: int) -> int:
        """The tenant with this tag; 0 for one that has no rule now."""
        return self._by_tag.get(tag, 0)

    def context_of(self, index: int, req_id: str = "") -> ReqContext:
        """A request of this tenant that kvtier makes itself."""
        rule = TenantRule(self.accounts[index].name, index)
        return new_context(req_id, None, RequestHints(tenant=rule))

    # --- questions ------------------------------------------------------------------------------

    def num_under_cap(self, context: ReqContext) -> int:
        """Blocks that a request's tenant may store without evicting its own."""
        account = self._home_of(context).account
        return max(0, account.cap - account.num_blocks)

    def room_for(
        self, context: ReqContext, kept: Sequence[BlockStatus], num_free: int
    ) -> tuple[int, int]:
        """How many new blocks a request can store now, and how many it could if nothing was pinned
        or being written. `kept`: blocks that may not be evicted for them."""
        own = self._home_of(context).account
        own_idle, others = self._evictable(own, kept)
        now = min(num_free + own_idle + others, own.cap - own.num_blocks + own_idle)
        num_kept = Counter(block.charge.account for block in kept)
        num_own = num_kept.pop(own, 0)
        taken = self._shelves.guarded - own.guarded + num_own
        taken += sum(max(0, num - account.guarded) for account, num in num_kept.items())
        ever = min(own.cap - num_own, self.cache_capacity - taken)
        return max(now, 0), max(ever, 0)

    def sure_room_for(self, context: ReqContext, num_kept: int, num_free: int) -> int:
        """A lower limit of what `room_for` says first, for `num_kept` blocks. Takes less time."""
        own = self._home_of(context).account
        others = self._shelves.lendable - own.lendable
        own_idle = max(own.num_idle - num_kept, 0)
        now = num_free + max(own.num_idle + others - num_kept, 0)
        return min(now, own.cap - own.num_blocks + own_idle)

    def _evictable(self, own: Account, kept: Iterable[BlockStatus]) -> tuple[int, int]:
        """Blocks besides `kept` that a store of this tenant may evict: its own, and others'."""
        idle = Counter(block.charge.account for block in kept if block.ref_cnt == 0)
        own_idle = own.num_idle - idle.pop(own, 0)
        others = self._shelves.lendable - own.lendable
        for account, num_kept in idle.items():
            left = min(account.num_idle - num_kept, account.num_blocks - account.floor)
            others -= account.lendable - max(left, 0)
        return own_idle, others

    # --- uses -----------------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        for shelf, part in self._note_uses(keys, keys, req_context):
            shelf.policy.touch(part, req_context)

    def on_use(
        self,
        keys: Sequence[OffloadKey],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        for shelf, part in self._note_uses(list(keys), brought, req_context):
            shelf.policy.on_use(part, brought, req_context)

    def renew(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._stamp(keys, self._home_of(req_context).account)
        for shelf in self._shelves.visited_by(req_context):
            shelf.policy.renew(keys, req_context)

    def on_request_finished(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if keys:
            self._stamp(keys, self._home_of(req_context).account)
            self.note_prompt(keys, req_context)
        self._shelves.end_visits(keys, req_context)
        self._last_context = None

    def note_prompt(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request had these blocks, in prompt order. Do what it has said about them."""
        home = self._home_of(req_context)
        self._retention.note_prompt(list(keys), hints_of(req_context), home, req_context)

    def _stamp(self, keys: Iterable[OffloadKey], account: Account) -> None:
        """A tenant uses blocks."""
        self._shelves.now += 1
        account.used_at = now = self._shelves.now
        if len(account.shelves) > 1:  # otherwise nobody compares
            for block in filter(None, map(self.blocks.get, keys)):
                if block.charge.account is account:
                    block.used_at = now

    def _note_uses(
        self, keys: list[OffloadKey], brought: Iterable[OffloadKey], context: ReqContext
    ) -> Iterable[tuple[Shelf, list[OffloadKey]]]:
        """A request uses these blocks. Returns the shelves of its tenant that have them, with their
        keys. `brought`: all keys of the request so far, in prompt order.

        Only a tenant's own uses change the order of its blocks: nobody keeps blocks in another's
        floor by using them."""
        home = self._home_of(context)
        self._stamp(keys, home.account)
        heirs = self._shelves.heirs
        blocks = list(map(self.blocks.get, keys))
        shelves = set(map(_charge_of, filter(None, blocks)))
        if not shelves or shelves == {home}:
            if heirs:
                for key in keys:
                    heirs.pop(key, None)
            self._shelves.visit(context, home)
            return ((home, keys),)
        if self._raise(blocks, home, context):
            # The moved blocks come last in the policy's order. Restore that of the prompt.
            home.policy.touch(brought, context)
        parts: dict[Shelf, list[OffloadKey]] = {}
        claim = home, home.account.num_stored
        for key, block in zip(keys, blocks, strict=True):
            shelf = home if block is None else block.charge
            if shelf.account is home.account:
                parts.setdefault(shelf, []).append(key)
                heirs.pop(key, None)
            else:
                heirs[key] = claim
        for shelf in parts:
            self._shelves.visit(context, shelf)
        return parts.items()

    def _raise(
        self, blocks: Iterable[BlockStatus | None], home: Shelf, context: ReqContext
    ) -> bool:
        """Blocks of the tenant get at least the rank of the request that uses them. So a prompt's
        first blocks never have a lower rank than later ones. Returns True if blocks were moved."""
        retained = home.account.retained
        lower: dict[BlockStatus, None] = {}
        for block in blocks:
            if block is None or block.charge.account is not home.account:
                continue
            if block.charge.rank < home.rank:
                lower[block] = None
            elif block.charge.rank == _RETAINED:
                retained.raise_rank(block.key, home.rank)
        if lower:
            self._shelves.move(list(lower), home, context)
        return bool(lower)

    # --- stores ---------------------------------------------------------------------------------

    def num_admitted(
        self, keys: Sequence[OffloadKey], num_free: int, req_context: ReqContext
    ) -> int:
        home = self._home_of(req_context)
        own = home.account
        lent = self._shelves.lendable - own.lendable if own.num_blocks < own.floor else 0
        num_free = max(0, min(num_free + lent, own.cap - own.num_blocks))
        self._shelves.visit(req_context, home)
        return home.policy.num_admitted(keys, num_free, req_context)

    def admit_all(self) -> None:
        self._admits_all = True
        for account in self.accounts:
            for shelf in account.shelves.values():
                shelf.policy.admit_all()

    def on_store_miss(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._storing, self._context = keys, req_context
        self._home_of(req_context).policy.on_store_miss(keys, req_context)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_run((key,), (block,), (key,), self._context)

    def insert_run(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[BlockStatus],
        brought: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        home = self._home_of(req_context)
        home.insert_run(keys, blocks, brought, req_context)
        self._shelves.visit(req_context, home)
        self.blocks.update(zip(keys, blocks, strict=True))
        self._shelves.now += len(blocks)
        home.account.used_at = now = self._shelves.now
        home.account.num_stored += len(blocks)
        for block, following in zip(blocks, (*keys[1:], None), strict=True):
            block.charge = home
            block.following = following
        if len(brought) > len(keys) and isinstance(brought, Reversible):
            # Note at once where prompts part: another one may be dropped before this request ends.
            before = next(islice(reversed(brought), len(keys), None))
            _note_forks([before, keys[0]], self.blocks)
        if len(home.account.shelves) > 1:
            for block in blocks:
                block.used_at = now
        self._shelves.add(home, len(blocks), 0)

    def remove(self, key: OffloadKey) -> None:
        block = self.blocks.pop(key)
        shelf: Shelf = block.charge
        shelf.policy.remove(key)
        shelf.account.retained.discard(key)
        self._shelves.heirs.pop(key, None)
        self._shelves.add(shelf, -1, -(block.ref_cnt == 0))

    def pinned(self, blocks: Iterable[BlockStatus]) -> None:
        for shelf, part in _by_shelf(blocks):
            shelf.policy.pinned(part)
            self._shelves.add(shelf, 0, -len(part))

    def unpinned(self, blocks: Iterable[BlockStatus]) -> None:
        for shelf, part in _by_shelf(blocks):
            shelf.policy.unpinned(part)
            self._shelves.add(shelf, 0, len(part))

    def mark_evictable(self, key: OffloadKey) -> None:
        self.unpinned((self.blocks[key],))

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.pinned((self.blocks[key],))

    # --- eviction -------------------------------------------------------------------------------

    def evict(self, n: int, protected: Set[OffloadKey]) -> list[_Pair] | None:
        self._retention.expire()
        context, self._storing = self._context, ()
        if self._slack(n, 0, protected) < 0:
            return None
        home = self._home_of(context)
        eviction = _Eviction(self._shelves, protected, home, (), context, slack=0)
        victims = eviction.run(n, self._givers)
        if len(victims) < n:
            undo = ReqContext("kvtier undoes an eviction")
            for _, block in victims:
                self._shelves.put((block,), (block,), block.charge, undo)
            self._shelves.end_visits((), undo)
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def make_room(self, num_slots: int, protected: Set[OffloadKey]) -> list[_Pair] | None:
        """Evict blocks for the store that `on_store_miss` has named: at least `num_slots`, and of
        the tenant that stores until it may have the new blocks.

        Returns None and evicts nothing if there are too few. Evicts fewer if the policy protects
        further blocks of the request; `num_under_cap` then tells how many it may store.
        """
        self._retention.expire()
        context, storing = self._context, self._storing
        self._storing = ()
        home = self._home_of(context)
        num_own = home.account.num_blocks + len(storing) - home.account.cap
        if num_slots <= 0 and num_own <= 0:
            return []
        slack = self._slack(num_slots, num_own, protected)
        if slack < 0:
            return None
        eviction = _Eviction(self._shelves, protected, home, storing, context, slack)
        victims = eviction.run(num_slots, self._givers)
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def _slack(self, n: int, num_own: int, protected: Set[OffloadKey]) -> int:
        """How many more blocks could be evicted than `n` of all tenants, and `num_own` of the one
        that stores. At most what is easy to tell; below 0: there are too few."""
        own = self._home_of(self._context).account
        own_idle = own.num_idle - len(protected)
        others = self._shelves.lendable - own.lendable
        if own_idle < num_own or own_idle + others < n:
            kept = [block for key in protected if (block := self.blocks.get(key)) is not None]
            own_idle, others = self._evictable(own, kept)
        return -1 if own_idle < num_own else own_idle + others - max(n, num_own)

    def next_to_leave(self, n: int) -> list[_Pair] | None:
        """A guess, because it depends on who stores next: of each tenant, in proportion to what it
        has."""
        accounts = [account for account in self.accounts if account.num_idle]
        if not accounts:
            return None if self._last_home.policy.next_to_leave(0) is None else []
        total = sum(account.num_idle for account in accounts)
        leaving: list[_Pair] = []
        for account in accounts:
            named = account.next_to_leave(-(-n * account.num_idle // total), self._shelves.now)
            if named is None:
                return None
            leaving += named
        return leaving[:n]

    def clear(self) -> None:
        self._shelves.clear()
        self._retention.clear()
        self._givers = _Givers(self._shelves)
        self._last_context, self._last_home = None, self.accounts[0].shelf(NORMAL_PRIORITY)
        self._storing = ()


@cache
def tenant_tag(tenant: str) -> int:
    """A number that stands for a tenant in what tiers keep, of 6 bytes. 0: "default"."""
    return 0 if tenant == DEFAULT_TENANT else xxh3_64_intdigest(tenant.encode()) >> 16 or 1


def new_policy(
    policy_cls: type[CachePolicy], capacity: int, tenancy: Tenancy | None
) -> CachePolicy:
    """A policy of this class; with tenants, one that keeps their quotas, and orders each tenant's
    blocks as this class does."""
    if tenancy is None:
        return policy_cls(cache_capacity=capacity)
    return TenantPolicy(policy_cls, capacity, tenancy)


def _quota_in(
    rule: TenantRule, tier: str, at: str, num_blocks: int, block_bytes: int
) -> BlockQuota:
    quota = rule.quota(tier)
    floor = quota.floor.in_blocks(num_blocks, block_bytes)
    cap = quota.cap.in_blocks(num_blocks, block_bytes)
    for name, amount, num in (("floor", quota.floor, floor), ("cap", quota.cap, cap)):
        if not num and (amount.millionths or amount.num_bytes):
            raise ConfigError(
                Problem(
                    f"tenants.{rule.name}.{tier}.{name}",
                    f"less than one block of {block_bytes} bytes",
                    f"0, or at least one of the {num_blocks} blocks that {at} holds",
                    "Raise it, or use smaller blocks",
                )
            )
    if floor > cap:
        raise ConfigError(
            Problem(
                f"tenants.{rule.name}.{tier}.floor",
                f"{floor} blocks",
                f"at most the cap, {cap} blocks",
                "Lower the floor, or raise the cap",
            )
        )
    return BlockQuota(rule.name, floor, cap)


def _by_shelf(blocks: Iterable[BlockStatus]) -> Iterable[tuple[Shelf, Sequence[BlockStatus]]]:
    """The blocks of each shelf, in their order."""
    blocks = blocks if isinstance(blocks, list) else list(blocks)
    shelves = set(map(_charge_of, blocks))
    if len(shelves) < 2:
        return [(shelf, blocks) for shelf in shelves]
    parts: dict[Shelf, list[BlockStatus]] = {}
    for block in blocks:
        parts.setdefault(block.charge, []).append(block)
    return parts.items()
