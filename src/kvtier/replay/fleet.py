"""Serves a load with several engines: a router, tiers that engines share, and engines that die.

Each engine is that of `kvtier.replay.engine`, with managers of its own. The fleet keeps their
clocks in order: whatever happens next in virtual time, on any engine, is done next. With one
engine, the figures are those of the engine alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from kvtier.replay.caches import Member
from kvtier.replay.engine import Counting, Serving, SteppedEngine
from kvtier.replay.figures import (
    EngineFigures,
    Figures,
    FleetFigures,
    PoolFigures,
    Timing,
)
from kvtier.replay.pool import Pool
from kvtier.replay.settings import RouterName, SettingError

if TYPE_CHECKING:
    from kvtier.base import OffloadingEvent, OffloadKey
    from kvtier.replay.copies import FleetLoad, FleetRequest
    from kvtier.replay.settings import FleetSettings, ReplaySettings

__all__ = ["Fleet"]


# --- routers ------------------------------------------------------------------------------------


class _Router(ABC):
    """Decides which engine gets a request."""

    def __init__(self, num_engines: int) -> None:
        self.is_alive = [True] * num_engines
        self._following = 0

    @abstractmethod
    def choose(self, keys: Sequence[OffloadKey], conversation: int, loads: Sequence[int]) -> int:
        """The number of an engine. `loads`: tokens that each engine has yet to compute."""

    def note(self, engine: int, events: Iterable[OffloadingEvent]) -> None:
        """Host memory of an engine has stored or evicted blocks. Called only for routers that want
        these events."""
        raise NotImplementedError

    def forget(self, engine: int) -> None:
        """An engine has died."""
        self.is_alive[engine] = False

    def in_turn(self) -> int:
        """The next engine that is alive."""
        count = len(self.is_alive)
        while not self.is_alive[self._following % count]:
            self._following += 1
        chosen = self._following % count
        self._following += 1
        return chosen


class _RoundRobin(_Router):
    def choose(self, keys: Sequence[OffloadKey], conversation: int, loads: Sequence[int]) -> int:
        return self.in_turn()


class _Sticky(_Router):
    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._engines: dict[int, int] = {}

    def choose(self, keys: Sequence[OffloadKey], conversation: int, loads: Sequence[int]) -> int:
        engine = self._engines.get(conversation)
        if engine is None or not self.is_alive[engine]:
            engine = self._engines[conversation] = self.in_turn()
        return engine


class _ByPrefix(_Router):
    """Follows the events of all host memories, as a router does that subscribes to them.

    It compares the engines with the most blocks of the prompt with the one that has the least to
    do: who has fewer tokens to compute, those of this prompt that it lacks included, gets the
    request.
    """

    def __init__(self, num_engines: int, block_tokens: int) -> None:
        super().__init__(num_engines)
        self._block_tokens = block_tokens
        self._holders: dict[OffloadKey, int] = {}
        """By block, the engines that have it: bit `n` is engine `n`."""

    def choose(self, keys: Sequence[OffloadKey], conversation: int, loads: Sequence[int]) -> int:
        idle = self._least_loaded(loads)
        holders, num_found = self._longest(keys)
        found = [n for n in range(len(loads)) if holders >> n & 1] if num_found else []
        if not found:
            return idle
        best = min(found, key=lambda n: (loads[n], n))
        if loads[best] <= loads[idle] + num_found * self._block_tokens:
            return best
        return idle

    def _longest(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """The engines with the most blocks at the start of a prompt, and how many these are."""
        found, most = 0, -1
        for number, key in enumerate(keys):
            holders = self._holders.get(key, 0) & most
            if not holders:
                return found, number
            found = most = holders
        return found, len(keys)

    def _least_loaded(self, loads: Sequence[int]) -> int:
        least = min(load for load, alive in zip(loads, self.is_alive, strict=True) if alive)
        while True:
            engine = self.in_turn()
            if loads[engine] == least:
                return engine

    def note(self, engine: int, events: Iterable[OffloadingEvent]) -> None:
        bit, holders = 1 << engine, self._holders
        for event in events:
            for key in event.keys:
                if not event.removed:
                    holders[key] = holders.get(key, 0) | bit
                elif left := holders.get(key, 0) & ~bit:
                    holders[key] = left
                else:
                    holders.pop(key, None)

    def forget(self, engine: int) -> None:
        super().forget(engine)
        bit = 1 << engine
        self._holders = {
            key: left for key, holders in self._holders.items() if (left := holders & ~bit)
        }


def _router_of(fleet: FleetSettings, block_tokens: int) -> _Router:
    if fleet.router is RouterName.PREFIX:
        return _ByPrefix(fleet.num_engines, block_tokens)
    return (_Sticky if fleet.router is RouterName.STICKY else _RoundRobin)(fleet.num_engines)


# --- the fleet ----------------------------------------------------------------------------------


class Fleet:
    """Engines, the tiers that they share, and the router before them."""

    def __init__(self, settings: ReplaySettings, block_tokens: int) -> None:
        assert settings.fleet is not None
        self._settings = settings
        self._fleet = fleet = settings.fleet
        self._block_tokens = block_tokens
        self._speed_up = settings.speed_up if settings.is_timed else 1.0
        block_bytes = settings.block_bytes(block_tokens)
        self.pools = {
            tier.name: Pool(tier, fleet.num_engines, block_bytes)
            for tier in settings.tiers
            if tier.sharing is not None
        }
        has_events = fleet.router is RouterName.PREFIX
        self._router = _router_of(fleet, block_tokens)
        self.engines: list[SteppedEngine] = []
        self.counting: list[Counting] = []
        """Instead of `engines`, if nothing takes time."""
        for number in range(fleet.num_engines):
            member = Member(number, self.pools, has_events)
            if settings.is_timed:
                self.engines.append(SteppedEngine(settings, block_tokens, member))
            else:
                self.counting.append(Counting(settings, block_tokens, member))
        self._loads = [0] * fleet.num_engines
        self._steps: list[tuple[float, int]] = []
        """A heap of the ends of steps, with the engines; some are outdated."""
        self._names = count()
        self._first_s = self._now_s = self._last_arrival_s = 0.0
        self._common_references_percent = 0.0
        self._num_rerouted = 0
        self.routed: list[int] = []
        """The engine of each request, in order of arrival."""

    def serve(self, load: FleetLoad) -> Iterator[None]:
        """Serve all requests, and end their stores. Yields after each step of an engine and each
        arrival. Raises `SettingError` if all engines would be dead at the same time."""
        self._first_s = self._now_s = load.first_s / self._speed_up
        self._common_references_percent = load.common_references_percent
        incidents = self._incidents(load)
        coming = iter(load)
        following = next(coming, None)
        while True:
            arrives_s, step_s = self._arrival_s(following), self._next_step_s()
            incident_s = incidents[0][0] if incidents else inf
            if arrives_s == step_s == inf:
                return
            self._now_s = min(arrives_s, step_s, incident_s)
            if incident_s <= self._now_s:
                self._suffer(*incidents.pop(0))
            elif following is not None and arrives_s <= self._now_s:
                self._arrive(following, arrives_s)
                following = next(coming, None)
            else:
                self._end_step(heappop(self._steps)[1], is_last=following is None)
            yield

    def _arrival_s(self, following: FleetRequest | None) -> float:
        return inf if following is None else following.request.arrives_s / self._speed_up

    def _next_step_s(self) -> float:
        """When the next step ends."""
        while self._steps:
            ends_s, number = self._steps[0]
            if self.engines[number].step_ends_s == ends_s:
                return ends_s
            heappop(self._steps)
        return inf

    # --- requests and steps -----------------------------------------------------------------------

    def _arrive(self, following: FleetRequest, arrives_s: float) -> None:
        name, request = str(next(self._names)), following.request
        self._last_arrival_s = arrives_s
        if self.counting:
            number = self._router.choose(request.keys, following.conversation, self._loads)
            self.routed.append(number)
            self.counting[number].serve_one(name, request)
            self._tell_router(number)
            return
        self.routed.append(
            self._send(Serving(name, request, arrives_s, following.conversation), arrives_s)
        )

    def _send(self, serving: Serving, now_s: float) -> int:
        number = self._router.choose(serving.keys, serving.conversation, self._loads)
        engine = self.engines[number]
        engine.accept(serving)
        self._loads[number] = engine.num_pending_tokens
        before_s = engine.step_ends_s
        engine.cut_short(now_s)
        if engine.step_ends_s != before_s:
            heappush(self._steps, (engine.step_ends_s, number))
        return number

    def _end_step(self, number: int, *, is_last: bool) -> None:
        """The step of an engine has ended. `is_last`: no further request arrives."""
        engine = self.engines[number]
        engine.end_step()
        if is_last and not engine.has_requests() and not engine.is_moving_blocks():
            engine.park()
        else:
            engine.begin_step()
            if is_last and engine.step_ends_s == inf:
                engine.wait_briefly()
            if engine.step_ends_s < inf:
                heappush(self._steps, (engine.step_ends_s, number))
        self._loads[number] = engine.num_pending_tokens
        self._tell_router(number)

    def _tell_router(self, number: int) -> None:
        events = self._members[number].caches.host.take_events()
        if events:
            self._router.note(number, events)

    # --- engines die ------------------------------------------------------------------------------

    def _incidents(self, load: FleetLoad) -> list[tuple[float, bool, int]]:
        """When engines die and come back, in order of time: the second is True for a death."""
        fleet, speed_up = self._fleet, self._speed_up
        lasts_s = load.last_s - load.first_s
        incidents = []
        for failure in fleet.failures:
            dies_s = (load.first_s + lasts_s * failure.percent / 100) / speed_up
            incidents += [
                (dies_s, True, failure.engine),
                (dies_s + fleet.restart_s, False, failure.engine),
            ]
        incidents.sort()
        num_dead: set[int] = set()
        for when_s, is_death, number in incidents:
            if not is_death:
                num_dead.discard(number)
                continue
            if number in num_dead:
                raise SettingError(
                    "--fail",
                    f"engine {number} would die again at {when_s - self._first_s:.0f} s, before it "
                    f"is back: give a shorter --restart-after than {fleet.restart_s:g}s",
                )
            num_dead.add(number)
        return incidents

    def _suffer(self, when_s: float, is_death: bool, number: int) -> None:
        if not is_death:
            self._router.is_alive[number] = True
            for pool in self.pools.values():
                pool.revive(number)
            if self.engines:
                self.engines[number].start(when_s)
            return
        for pool in self.pools.values():
            pool.advance(when_s)
        lost: list[Serving] = []
        if self.counting:
            self.counting[number].die()
        else:
            lost = self.engines[number].die()
        for pool in self.pools.values():
            pool.lose(number)
        self._router.forget(number)
        self._loads[number] = 0
        self._num_rerouted += len(lost)
        for serving in lost:
            again = Serving(
                str(next(self._names)),
                serving.request,
                serving.arrived_s,
                serving.conversation,
                has_answered=serving.has_answered,
            )
            self._send(again, when_s)

    # --- figures ----------------------------------------------------------------------------------

    @property
    def _members(self) -> Sequence[SteppedEngine | Counting]:
        return self.engines or self.counting

    def figures_of_engines(self) -> list[Figures]:
        """The figures of each engine. Those of shared tiers have a meaning only together."""
        return [member.end() for member in self._members]

    def end(self) -> Figures:
        """The figures of everything served so far, of all engines together."""
        each = self.figures_of_engines()
        total = self._members[0].caches.figures(self._settings, self._block_tokens)
        if total.gpu is not None:
            total.gpu.capacity_blocks *= len(each)
        for place in total.places:
            if place.name not in self.pools:
                place.capacity_blocks *= len(each)
        for figures in each:
            _add(total, figures)
        if self.engines:
            total.timing = self._timing(each)
        total.trace_s = max(0.0, self._last_arrival_s - self._first_s)
        total.fleet = self._fleet_figures(each, total)
        return total

    def _timing(self, each: Sequence[Figures]) -> Timing:
        timing = Timing()
        for figures in each:
            assert figures.timing is not None
            timing.first_token_s += figures.timing.first_token_s
            timing.busy_s += figures.timing.busy_s / len(each)
            timing.prompt_tokens += figures.timing.prompt_tokens
            timing.output_tokens += figures.timing.output_tokens
        is_over = not any(engine.has_requests() for engine in self.engines)
        ended_s = max(engine.last_finish_s for engine in self.engines) if is_over else self._now_s
        timing.seconds = max(0.0, ended_s - self._first_s)
        return timing

    def _fleet_figures(self, each: Sequence[Figures], total: Figures) -> FleetFigures:
        seconds = None if total.timing is None else total.timing.seconds
        engines = []
        for number, figures in enumerate(each):
            ports = [pool.ports[number] for pool in self.pools.values()]
            engines.append(
                EngineFigures(
                    figures.num_requests,
                    figures.hit_percent,
                    None if figures.timing is None else figures.timing.busy_s,
                    sum(port.incoming.num_bytes for port in ports),
                    sum(port.outgoing.num_bytes for port in ports),
                )
            )
        kept, distinct, in_hosts, in_some_host = self._kept()
        return FleetFigures(
            settings=self._fleet,
            common_references_percent=self._common_references_percent,
            num_rerouted=self._num_rerouted,
            seconds=seconds,
            engines=engines,
            pools=[
                PoolFigures(
                    name,
                    str(pool.settings.sharing),
                    pool.replicas,
                    pool.table.num_blocks * pool.replicas,
                    pool.traffic.read_blocks,
                    pool.traffic.foreign_blocks,
                    pool.traffic.local_blocks,
                    pool.traffic.lost_blocks,
                )
                for name, pool in self.pools.items()
            ],
            kept_blocks=kept,
            distinct_blocks=distinct,
            host_blocks=in_hosts,
            distinct_host_blocks=in_some_host,
        )

    def _kept(self) -> tuple[int, int, int, int]:
        """Blocks in all places with all copies, and how many different ones these are; the same for
        host memories alone."""
        num_in_hosts, num_kept = 0, 0
        keys: set[OffloadKey] = set()
        for member in self._members:
            resident = member.caches.host.resident_keys()
            num_in_hosts += len(resident)
            keys.update(resident)
        num_different = len(keys)
        num_kept = num_in_hosts
        for member in self._members:
            for tier in member.caches.tiers:
                if tier.tier_type not in self.pools:
                    resident = tier.table.resident_keys()
                    num_kept += len(resident)
                    keys.update(resident)
        for pool in self.pools.values():
            resident = pool.table.resident_keys()
            num_kept += pool.num_copies()
            keys.update(resident)
        return num_kept, len(keys), num_in_hosts, num_different


def _add(total: Figures, figures: Figures) -> None:
    """Add the counts of one engine."""
    total.num_requests += figures.num_requests
    total.num_references += figures.num_references
    total.prompt_tokens += figures.prompt_tokens
    if total.gpu is not None and figures.gpu is not None:
        total.gpu.hit_blocks += figures.gpu.hit_blocks
        total.gpu.evicted_blocks += figures.gpu.evicted_blocks
    for place, one in zip(total.places, figures.places, strict=True):
        place.add(one)
