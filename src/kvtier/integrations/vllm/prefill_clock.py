"""How fast the engine computes prompts, read off its steps, for the load-or-recompute guard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.connector.common import MIN_PREFILL_TOKENS, ComputedTokens, Prefill, prefill_in
from kvtier.integrations.vllm import vllm_api

__all__ = ["PrefillClock"]

_MAX_STEPS_UNDER_WAY = 256
"""More than an engine with pipeline stages ever has."""


@dataclass(frozen=True, slots=True)
class _Step:
    began: float
    prefill: Prefill


class PrefillClock:
    """Scheduler thread only. A step of decodes costs it well under a microsecond.

    vLLM says what a step is to compute when it is scheduled, and that it has been computed when its
    output comes back; the next step may have been scheduled meanwhile. What is between the two, and
    after the step before, is the time that this step took.
    """

    def __init__(
        self,
        note_prefill: Callable[[int, float, float], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`note_prefill` takes a number of prompt tokens, their mean position, and seconds."""
        self._note_prefill = note_prefill
        self._now = now
        self._under_way: deque[_Step | None] = deque(maxlen=_MAX_STEPS_UNDER_WAY)
        self._last_ended = 0.0

    def step_scheduled(self, output: vllm_api.SchedulerOutput) -> None:
        """The engine is about to compute this."""
        counts: dict[str, int] = output.num_scheduled_tokens
        is_prefill = output.total_num_scheduled_tokens - len(counts) >= MIN_PREFILL_TOKENS
        self._under_way.append(self._prefill_in(output, counts) if is_prefill else None)

    def step_ended(self) -> None:
        """The output of the oldest step that is under way has come back."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        now = self._now()
        if step is not None:
            seconds = now - max(step.began, self._last_ended)
            self._note_prefill(step.prefill.num_tokens, step.prefill.mean_position, seconds)
        self._last_ended = now

    def _prefill_in(self, output: vllm_api.SchedulerOutput, counts: dict[str, int]) -> _Step | None:
        cached = output.scheduled_cached_reqs
        starts = [
            (request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs
        ]
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        prefill = prefill_in(
            ComputedTokens(start, counts.get(req_id, 0)) for req_id, start in starts
        )
        return None if prefill is None else _Step(self._now(), prefill)
