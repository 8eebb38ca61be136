"""A tier that all engines of a fleet share: in memory that they lend each other, or on a server.

As in `KeyTier`, a `CPUOffloadingManager` keeps the keys: here one for all engines. A block that one
engine has stored is a hit for all others, and is not stored again.

Lent memory has one slot of the table for each set of copies. Copy `r` of slot `s` is in the memory
of engine `(s * replicas + r) % num_engines`, so copies are spread evenly, those of one block are in
the memory of different engines, and each engine lends what it was told to. A block is lost when the
last engine with a copy dies. Lost copies of other blocks are not made again until the block is
stored anew.

Transfers take room on the links of the engines (each direction has its own), and on the memory or
the server that keeps the blocks. Each of these carries its jobs one after the other. A job ends
when the last of them has carried its part.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, cast

from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.replay.caches import Clock, KeyTier, Move, result_of
from kvtier.replay.settings import Sharing
from kvtier.tiering.base import JobResult, TransferJob

if TYPE_CHECKING:
    from kvtier.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
    from kvtier.cpu.common import CPULoadStoreSpec
    from kvtier.cpu.policies.base import BlockStatus
    from kvtier.replay.settings import TierSettings

__all__ = ["Pool", "PooledTier", "Traffic"]


class _Link:
    """Carries bytes one after the other, at one speed."""

    __slots__ = ("_bytes_per_s", "_free_at_s", "num_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self.num_bytes = 0

    def carry(self, start_s: float, num_bytes: int) -> tuple[float, float]:
        """Carry bytes that are ready at `start_s`. Returns when that begins, and how long it
        takes."""
        begins_s = max(start_s, self._free_at_s)
        seconds = num_bytes / self._bytes_per_s
        self._free_at_s = begins_s + seconds
        self.num_bytes += num_bytes
        return begins_s, seconds


class _Port:
    """What one engine has to do with a pool: its link, and the memory that it lends."""

    def __init__(self, settings: TierSettings) -> None:
        self.incoming = _Link(settings.link_bytes_per_s)
        self.outgoing = _Link(settings.link_bytes_per_s)
        self.reads = _Link(settings.read_bytes_per_s)
        """Of the memory that it lends."""
        self.writes = _Link(settings.write_bytes_per_s)
        self.is_alive = True
        self.loads_end_s = self.stores_end_s = 0.0
        """When its last job ends, by direction."""


class Traffic:
    """What the jobs of one pool have moved, in blocks."""

    def __init__(self) -> None:
        self.read_blocks = 0
        self.foreign_blocks = 0
        """Of these, those that another engine had stored."""
        self.local_blocks = 0
        """Of these, those that came from the engine's own part of the pool, over no link."""
        self.lost_blocks = 0
        """Blocks whose last copy was lost with an engine."""


class Pool:
    """One shared tier. Engines see it through the tiers of `join`.

    The replay calls it in the order of virtual time. Jobs end in that order, too, whether or not
    their engine has asked for them.
    """

    def __init__(self, settings: TierSettings, num_engines: int, block_bytes: int) -> None:
        self.settings = settings
        self.block_bytes = block_bytes
        self.is_lent = settings.sharing is Sharing.LENT
        self.num_engines = num_engines
        self.replicas = settings.replicas
        num_slots = settings.num_bytes // block_bytes * (num_engines if self.is_lent else 1)
        self.table = CPUOffloadingManager(max(1, num_slots // self.replicas), settings.policy)
        self.ports = [_Port(settings) for _ in range(num_engines)]
        self._server_reads = _Link(settings.read_bytes_per_s)
        self._server_writes = _Link(settings.write_bytes_per_s)
        self.traffic = Traffic()
        self.doomed: set[OffloadKey] = set()
        """Blocks that are lost while jobs use their slots."""
        self._copies: dict[int, int] = {}
        """By slot, the copies that were stored and not lost: bit `r` is copy `r`."""
        self._writers: dict[int, int] = {}
        """By slot, the engine that has stored the block."""
        self._moves: list[tuple[float, int, Move]] = []
        """A heap of the jobs under way."""
        self._order = count()

    def join(self, engine: int, clock: Clock | None) -> PooledTier:
        """The pool as an engine sees it that starts now."""
        return PooledTier(self, engine, clock)

    # --- jobs -----------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """End the jobs of all engines that end by now."""
        while self._moves and self._moves[0][0] <= now_s:
            heappop(self._moves)[2].finish()

    def enter(self, move: Move) -> None:
        heappush(self._moves, (move.ends_s, next(self._order), move))

    def store(self, engine: int, slots: Collection[int]) -> Counter[int]:
        """An engine stores blocks in these slots. Returns the number of blocks that the memory of
        each engine gets."""
        by_lender: Counter[int] = Counter()
        for slot in slots:
            self._writers[slot] = engine
            if self.is_lent:
                alive = self._alive_copies(slot)
                self._copies[slot] = sum(1 << copy for copy, _ in alive)
                by_lender.update(lender for _, lender in alive)
        return by_lender

    def load(self, engine: int, slots: Collection[int]) -> Counter[int]:
        """An engine loads the blocks of these slots. Returns the number of blocks that come from
        the memory of each engine: its own if it has a copy, or else one after the other."""
        by_lender: Counter[int] = Counter()
        traffic = self.traffic
        traffic.read_blocks += len(slots)
        for slot in slots:
            traffic.foreign_blocks += self._writers[slot] != engine
            if self.is_lent:
                stored = self._copies[slot]
                lenders = [lender for copy, lender in self._lenders(slot) if stored >> copy & 1]
                source = engine if engine in lenders else lenders[(engine + slot) % len(lenders)]
                traffic.local_blocks += source == engine
                by_lender[source] += 1
        return by_lender

    def times(
        self, engine: int, now_s: float, num_blocks: int, by_lender: Counter[int], *, is_load: bool
    ) -> tuple[float, float]:
        """When a job ends that begins now, and how long it takes: with its waits for other engines,
        and without those for earlier jobs of this engine."""
        start_s = now_s + self.settings.latency_s
        port = self.ports[engine]
        own_s = max(start_s, port.loads_end_s if is_load else port.stores_end_s)
        parts = self._parts(engine, num_blocks, by_lender, is_load=is_load)
        carried = [link.carry(start_s, n * self.block_bytes) for link, n in parts if n]
        begins_s, seconds = max(carried, key=sum, default=(own_s, 0.0))
        ends_s = max(begins_s + seconds, own_s)
        if is_load:
            port.loads_end_s = ends_s
        else:
            port.stores_end_s = ends_s
        return ends_s, seconds + self.settings.latency_s + max(0.0, begins_s - own_s)

    def _parts(
        self, engine: int, num_blocks: int, by_lender: Counter[int], *, is_load: bool
    ) -> Iterable[tuple[_Link, int]]:
        """The links that carry a job, with their numbers of blocks."""
        own = self.ports[engine]
        if not self.is_lent:
            yield (self._server_reads if is_load else self._server_writes), num_blocks
            yield (own.incoming if is_load else own.outgoing), num_blocks
            return
        num_remote = 0
        for lender, n in by_lender.items():
            port = self.ports[lender]
            yield (port.reads if is_load else port.writes), n
            if lender != engine:
                num_remote += n
                yield (port.outgoing if is_load else port.incoming), n
        yield (own.incoming if is_load else own.outgoing), num_remote

    # --- engines die ----------------------------------------------------------------------------

    def lose(self, engine: int) -> None:
        """An engine has died, with the memory that it lends. Its own jobs have been ended."""
        self.ports[engine].is_alive = False
        if not self.is_lent:
            return
        withdrawn = set()
        for slot in range(self.table.num_blocks):
            lost = sum(1 << copy for copy, lender in self._lenders(slot) if lender == engine)
            if lost:
                self._copies[slot] = self._copies.get(slot, 0) & ~lost
                if not self._alive_copies(slot):
                    withdrawn.add(slot)
        gone = [block for block in self.table.slots.used if self._is_gone(block)]
        self.traffic.lost_blocks += sum(block.ref_cnt >= 0 for block in gone)
        self.doomed.update(block.key for block in gone if block.ref_cnt)
        self.table.slots.drop([block for block in gone if not block.ref_cnt])
        self.table.slots.withdraw(withdrawn)

    def _is_gone(self, block: BlockStatus) -> bool:
        """True if no copy of a block is left, and that is news."""
        is_here = block.ref_cnt >= 0 or block.writer is not None
        copies = self._copies.get(block.block_id)
        return is_here and copies == 0 and block.key not in self.doomed

    def num_copies(self) -> int:
        """Copies of all readable blocks."""
        blocks = [block for block in self.table.slots.used if block.is_ready]
        if not self.is_lent:
            return len(blocks)
        return sum(self._copies[block.block_id].bit_count() for block in blocks)

    def revive(self, engine: int) -> None:
        """The engine lends its memory again. It is empty."""
        port = self.ports[engine]
        port.is_alive = True
        port.loads_end_s = port.stores_end_s = 0.0
        slots = self.table.slots
        slots.let_go([block for block in slots.held if self._alive_copies(block.block_id)])

    def bury(self, keys: Collection[OffloadKey], slots_of_job: Collection[int]) -> None:
        """A job with these blocks has ended. Drop those that were lost meanwhile."""
        slots = self.table.slots
        for key in self.doomed.intersection(keys):
            block = slots.get(key)
            if block is not None and block.ref_cnt > 0:
                continue  # other jobs still read it
            self.doomed.discard(key)
            if block is not None:
                slots.drop([block])
        slots.withdraw({slot for slot in slots_of_job if not self._alive_copies(slot)})

    def _lenders(self, slot: int) -> list[tuple[int, int]]:
        """The copies of a slot, with the engine that lends the memory of each."""
        first = slot * self.replicas
        return [(copy, (first + copy) % self.num_engines) for copy in range(self.replicas)]

    def _alive_copies(self, slot: int) -> list[tuple[int, int]]:
        return [pair for pair in self._lenders(slot) if self.ports[pair[1]].is_alive]


class PooledTier(KeyTier):
    """A pool as one engine sees it."""

    def __init__(self, pool: Pool, engine: int, clock: Clock | None) -> None:
        super().__init__(pool.settings, pool.table, pool.block_bytes, clock)
        self._pool = pool
        self._engine = engine
        self._is_dead = False
        self._requests: dict[str, ReqContext] = {}

    # --- lookups and uses -----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._advance()
        return super().lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        self._advance()
        if self._pool.doomed:
            lost = (n for n, key in enumerate(keys) if key in self._pool.doomed)
            keys = keys[: next(lost, len(keys))]
        return super().lookup_batch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = req_context
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    # --- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job: TransferJob) -> None:
        self._advance()
        pool = self._pool
        output, kept = self._prepare_store(job)
        new = output.keys_to_store
        slots = cast("CPULoadStoreSpec", output.store_spec).block_ids.tolist()
        seconds: float | None = None

        def end() -> JobResult:
            lost = set(new) if self._is_dead else pool.doomed.intersection(new)
            self.table.complete_store([key for key in new if key not in lost], job.req_context)
            if lost:
                self.table.complete_store([*lost], job.req_context, success=False)
                pool.bury(lost, slots)
            return result_of(job, [key for key in kept if key not in lost], seconds)

        by_lender = pool.store(self._engine, slots)
        ends_s, seconds = self._ending(len(new), by_lender, is_load=False)
        self._begin(self._stores, Move(ends_s, end))

    def submit_load(self, job: TransferJob) -> None:
        self._advance()
        pool = self._pool
        found = self._readable(job.keys)
        spec = cast("CPULoadStoreSpec", self.table.prepare_load(found, job.req_context))
        slots = spec.block_ids.tolist()
        seconds: float | None = None

        def end() -> JobResult:
            self.table.complete_load(found, job.req_context)
            lost = pool.doomed.intersection(found)
            if lost:
                pool.bury(lost, slots)
            return result_of(job, [key for key in found if key not in lost], seconds)

        by_lender = pool.load(self._engine, slots)
        ends_s, seconds = self._ending(len(found), by_lender, is_load=True)
        self._begin(self._loads, Move(ends_s, end))

    def _readable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        found = super()._readable(keys)
        return [key for key in found if key not in self._pool.doomed]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._advance()
        return super().get_finished_jobs()

    def _ending(
        self, num_blocks: int, by_lender: Counter[int], *, is_load: bool
    ) -> tuple[float, float | None]:
        now_s = 0.0 if self._clock is None else self._clock.now
        ends_s, seconds = self._pool.times(
            self._engine, now_s, num_blocks, by_lender, is_load=is_load
        )
        return (0.0, None) if self._clock is None else (ends_s, seconds)

    def _begin(self, queue: deque[Move], move: Move) -> None:
        super()._begin(queue, move)
        if self._clock is not None:
            self._pool.enter(move)

    def _advance(self) -> None:
        if self._clock is not None:
            self._pool.advance(self._clock.now)

    def die(self) -> None:
        """The engine has died. Its stores fail, and nothing of its requests remains open."""
        self._is_dead = True
        self.drain_jobs()
        for context in [*self._requests.values()]:
            self.on_request_finished(context)
