"""Counts the hits of a trace whose requests are served one after the other, without time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvtier.base import ReqContext, ScheduleEndContext
from kvtier.replay.caches import Caches, Clock
from kvtier.replay.figures import Figures

if TYPE_CHECKING:
    from kvtier.replay.settings import ReplaySettings
    from kvtier.replay.trace import Request

__all__ = ["Counting"]

_BETWEEN_REQUESTS_S = 1000.0
"""Enough for everything that the orchestrator limits by time."""
_STEP = ScheduleEndContext()


class Counting:
    """Serves requests one after the other: look up, use what is there, store what is missing.

    Tiers take no time, and each request finds them idle. So the figures depend only on the order of
    requests, the sizes and the policies. With tiers, a prompt is stored in the engine's steps,
    because write policies work in steps.
    """

    def __init__(self, settings: ReplaySettings, block_tokens: int) -> None:
        self._clock = Clock()
        self.caches = Caches(settings, block_tokens, self._clock)
        self.figures: Figures = self.caches.figures(settings, block_tokens)
        self._step_blocks = max(1, settings.engine.step_tokens // block_tokens)

    def serve(self, requests: Iterable[Request]) -> Iterator[None]:
        """Serve all requests. Yields after each one."""
        serve = self._serve_from_host if self.caches.tiering is None else self._serve_from_tiers
        for number, request in enumerate(requests):
            device = self.caches.device
            num_on_device = 0 if device is None else device.num_hits(request.keys)
            serve(request, ReqContext(str(number)), num_on_device)
            if device is not None:
                device.release(device.hold(request.keys))
            yield

    def end(self) -> Figures:
        """The figures of everything served so far."""
        self.caches.count_into(self.figures)
        # Every hit is read once from host memory.
        self.figures.places[0].read_blocks = sum(p.hit_blocks for p in self.figures.places)
        return self.figures

    def _serve_from_host(self, request: Request, context: ReqContext, num_on_device: int) -> None:
        manager, keys = self.caches.manager, request.keys
        manager.on_new_request(context)
        num_hits = manager.lookup_prefix(keys[num_on_device:], context).num_hits
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        assert output is not None, "nothing is in flight, so there is always something to evict"
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        self.figures.note_lookup(len(keys), request.prompt_tokens, [num_hits], num_on_device)

    def _serve_from_tiers(self, request: Request, context: ReqContext, num_on_device: int) -> None:
        manager, keys = self.caches.manager, request.keys
        asked = keys[num_on_device:]
        manager.on_new_request(context)
        found = manager.lookup_prefix(asked, context)
        while not found.is_final:
            manager.on_schedule_end(_STEP)  # promotes what was found
            found = manager.lookup_prefix(asked, context)
        hits = self.caches.hits_by_place(asked, found.num_hits, context)
        if hits[0] < found.num_hits:  # ends the leases of promoted blocks
            manager.prepare_load(asked[: found.num_hits], context)
            manager.complete_load(asked[: found.num_hits], context)
        manager.touch(keys, context)
        # Blocks on the device are offered, too: host memory may have evicted them.
        first = 0 if num_on_device else found.num_hits
        for start in range(first, len(keys), self._step_blocks):
            output = manager.prepare_store(keys[start : start + self._step_blocks], context)
            if output is not None and output.keys_to_store:
                manager.complete_store(output.keys_to_store, context)
            manager.on_schedule_end(_STEP)
        manager.on_request_finished(context)
        self.figures.note_lookup(len(keys), request.prompt_tokens, hits, num_on_device)
        tiering = self.caches.tiering
        assert tiering is not None
        manager.on_schedule_end(_STEP)
        while tiering.is_moving_blocks():
            manager.on_schedule_end(_STEP)
        self._clock.now += _BETWEEN_REQUESTS_S
