"""The calls of the engine to the manager: each is recorded, and must not raise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingStats,
    OffloadKey,
    OffloadPolicy,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from kvtier.tiering.manager import TieringOffloadingManager
from tests.tiering.simulation.world import World, name

P = ParamSpec("P")
T = TypeVar("T")


class WatchedCalls:
    """One method for each method of the manager. Time may pass between any two calls."""

    def __init__(
        self,
        world: World,
        manager: TieringOffloadingManager,
        after_call: Callable[[str], None],
    ) -> None:
        self._world = world
        self._manager = manager
        self._after_call = after_call

    def _call(self, what: str, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        world = self._world
        if world.happens(0.05):
            world.time.advance(world.rng.random() * world.scale * 1e-3)
        try:
            answer = method(*args, **kwargs)
        except Exception as error:
            world.note(f"{what} raised {error!r}")
            world.witness.testify()
            raise world.witness.saw(f"{what} raised {error!r}") from error
        world.witness.testify()
        self._after_call(what)
        return answer

    def lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        answer = self._call("lookup", self._manager.lookup, key, context)
        self._world.note(f"lookup {context.req_id} {name(key)}: {answer.name}")
        until = self._world.leases.get((context, key))
        if until is not None and self._world.time.now < until and answer is not LookupResult.HIT:
            raise self._world.witness.saw(
                f"{name(key)} was evicted during its lease for {context.req_id}"
            )
        is_pending = answer in (LookupResult.HIT_PENDING, LookupResult.RETRY)
        self._check_wait([key], context, is_pending)
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], context: ReqContext) -> PrefixLookup:
        answer = self._call("lookup_prefix", self._manager.lookup_prefix, keys, context)
        self._world.note(
            f"lookup_prefix {context.req_id} {' '.join(map(name, keys))}: "
            f"{answer.num_hits} {answer.is_final}"
        )
        self._check_wait(keys, context, not answer.is_final)
        if not 0 <= answer.num_hits <= len(keys):
            raise self._world.witness.saw(f"{answer.num_hits} hits among {len(keys)} keys")
        return answer

    def _check_wait(
        self, keys: Sequence[OffloadKey], context: ReqContext, is_pending: bool
    ) -> None:
        """A request that has waited in vain must not have to wait again."""
        world = self._world
        must_not_wait = world.must_not_wait(keys, context)
        if is_pending:
            if must_not_wait:
                names = " ".join(map(name, keys))
                raise world.witness.saw(f"{context.req_id} has to wait again for {names}")
            for key in keys:
                world.last_waits[context, key] = world.step

    def prepare_load(self, keys: list[OffloadKey], context: ReqContext) -> list[int]:
        self._world.end_wait(context)
        spec = self._call("prepare_load", self._manager.prepare_load, keys, context)
        assert isinstance(spec, BlockIDsLoadStoreSpec)
        slots: list[int] = spec.block_ids.tolist()
        self._world.note(f"prepare_load {context.req_id} {' '.join(map(name, keys))}: {slots}")
        for key, slot in zip(keys, slots, strict=True):
            if slot < 0:
                raise self._world.witness.saw(f"{name(key)} was a hit and cannot be loaded")
            if self._world.memory.row(slot) != self._world.expected(key):
                raise self._world.witness.saw(f"slot {slot} does not hold {name(key)}")
        return slots

    def complete_load(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        self._world.note(f"complete_load {context.req_id} {' '.join(map(name, keys))}")
        self._call("complete_load", self._manager.complete_load, keys, context)

    def prepare_store(
        self, keys: list[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = self._call("prepare_store", self._manager.prepare_store, keys, context)
        accepted = None if output is None else [name(key) for key in output.keys_to_store]
        self._world.note(
            f"prepare_store {context.req_id} {' '.join(map(name, keys))}: {accepted} "
            f"{'' if output is None else output.store_spec}"
        )
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], context: ReqContext, success: bool
    ) -> None:
        self._world.note(f"complete_store {context.req_id} {' '.join(map(name, keys))} {success}")
        self._call("complete_store", self._manager.complete_store, keys, context, success)

    def touch(self, keys: list[OffloadKey], context: ReqContext) -> None:
        self._world.note(f"touch {context.req_id}")
        self._call("touch", self._manager.touch, keys, context)

    def on_new_request(self, context: ReqContext) -> OffloadPolicy:
        self._world.note(f"on_new_request {context.req_id} {context.load_tier_filter}")
        return self._call("on_new_request", self._manager.on_new_request, context).policy

    def on_request_queued(
        self,
        context: ReqContext,
        find_blocks: Callable[[], Sequence[OffloadKey]],
        priority: int,
    ) -> None:
        self._world.note(f"on_request_queued {context.req_id} {priority}")
        queue = partial(self._manager.on_request_queued, priority=priority)
        self._call("on_request_queued", queue, context, find_blocks)

    def on_request_finished(self, context: ReqContext) -> None:
        self._world.note(f"on_request_finished {context.req_id}")
        self._world.end_wait(context)
        self._call("on_request_finished", self._manager.on_request_finished, context)

    def on_schedule_end(self, new: list[str], preempted: list[str]) -> None:
        self._world.note(f"on_schedule_end {new} {preempted}")
        context = ScheduleEndContext(new, preempted)
        self._call("on_schedule_end", self._manager.on_schedule_end, context)

    def has_pending_work(self) -> bool:
        answer = self._call("has_pending_work", self._manager.has_pending_work)
        self._world.note(f"has_pending_work: {answer}")
        return answer

    def take_events(self) -> Iterable[OffloadingEvent]:
        return list(self._call("take_events", self._manager.take_events))

    def get_stats(self) -> OffloadingStats:
        stats = self._call("get_stats", self._manager.get_stats)
        assert stats is not None
        return stats

    def reset_cache(self) -> None:
        self._world.note("reset_cache")
        self._world.leases.clear()
        self._world.given_up.clear()
        self._call("reset_cache", self._manager.reset_cache)

    def shutdown(self) -> None:
        self._world.note("shutdown")
        self._call("shutdown", self._manager.shutdown)
