"""Finds out when the requests of vLLM produce their first tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtier.integrations.vllm import vllm_api

__all__ = ["FirstTokens"]

_MAX_STEPS_UNDER_WAY = 256


class FirstTokens:
    """Reports the first token of each request. Scheduler thread only.

    A request produces it in the step that computes the last token of its prompt. vLLM may schedule
    a step before the output of the previous one comes back; the outputs come in the same order.
    """

    def __init__(self, report: Callable[[str, int], None]) -> None:
        """`report` gets the request's id and the number of its prompt tokens."""
        self._report = report
        self._expected: dict[str, int] = {}
        """Prompt tokens of the requests that have not produced a token."""
        self._under_way: deque[list[str]] = deque(maxlen=_MAX_STEPS_UNDER_WAY)
        """For each step under way, the requests that produce their first token in it."""

    def expect(self, req_id: str, num_prompt_tokens: int) -> None:
        """A request has arrived."""
        self._expected[req_id] = num_prompt_tokens

    def forget(self, req_id: str) -> None:
        """A request has ended."""
        self._expected.pop(req_id, None)

    def step_scheduled(self, output: vllm_api.SchedulerOutput) -> None:
        """The engine is about to compute this step."""
        ending: list[str] = []
        if self._expected:
            counts: dict[str, int] = output.num_scheduled_tokens
            starts = {its.req_id: its.num_computed_tokens for its in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            ending = [
                req_id
                for req_id in starts.keys() & self._expected.keys()
                if starts[req_id] + counts.get(req_id, 0) >= self._expected[req_id]
            ]
        self._under_way.append(ending)

    def step_ended(self) -> None:
        """The output of the oldest step under way has come back."""
        if self._under_way:
            for req_id in self._under_way.popleft():
                num_prompt_tokens = self._expected.pop(req_id, None)
                if num_prompt_tokens is not None:
                    self._report(req_id, num_prompt_tokens)
