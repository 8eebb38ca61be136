"""Decides what each step computes: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connector.common import PrefixMatch, ScheduledRequest, StepPlan
from kvtier.engine.block_manager import BlockManager
from kvtier.engine.config import EngineConfig
from kvtier.engine.request import Request, RequestState

if TYPE_CHECKING:
    from kvtier.connector.common import LoadedRequest
    from kvtier.engine.offloading import SchedulerHooks

__all__ = ["ScheduledTokens", "Scheduler", "Step"]

_NO_MATCH = PrefixMatch(0, is_pending=False)
_BY_ARRIVAL = attrgetter("arrival")


class ScheduledTokens(NamedTuple):
    """A request, and the number of its tokens that the step computes."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step."""

    work: list[ScheduledTokens]
    plan: StepPlan
    """The same work, described for the connector."""


class Scheduler:
    """Schedules older requests first. Every request ends, because the oldest one can take the
    blocks of younger ones by preempting them, and so makes progress in every step unless it is
    loading."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, hooks: SchedulerHooks | None
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._hooks = hooks
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loading: dict[str, Request] = {}
        """Requests that are loading, and aborted requests into whose blocks a load still writes."""
        self._preempted: list[str] = []

    @property
    def has_requests(self) -> bool:
        """True while any request waits, loads or runs."""
        return bool(self._waiting or self._running or self._loading)

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        loading = [r for r in self._loading.values() if r.state is RequestState.LOADING]
        return [*self._waiting, *loading, *self._running]

    def is_known(self, request_id: str) -> bool:
        """True if the id is taken: its request, or the load of an aborted one, has not ended."""
        return request_id in self._loading or any(
            request.request_id == request_id for request in (*self._waiting, *self._running)
        )

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if self._hooks is not None:
            self._hooks.on_new_request(request, partial(self._blocks.match_prefix, request))
        insort(self._waiting, request, key=_BY_ARRIVAL)

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the tokens of the next step, and allocate blocks for them."""
        work = self._schedule_running()
        if not self._preempted:  # a request preempted in this step would take its blocks back
            work += self._admit(self._config.token_budget - sum(n for _, n in work))
        new = [request.request_id for request, _ in work if request.is_new]
        for request, _ in work:
            request.is_new = False
        preempted, self._preempted = self._preempted, []
        plan = StepPlan(
            scheduled=[on_device(request) for request, _ in work],
            new_req_ids=new,
            preempted_req_ids=preempted,
            allocated_block_ids=self._blocks.take_allocated(),
        )
        return Step(work, plan)

    def _schedule_running(self) -> list[ScheduledTokens]:
        work: list[ScheduledTokens] = []
        budget = self._config.token_budget
        for request in list(self._running):
            if not budget:
                break
            if request.state is not RequestState.RUNNING:  # preempted above, for an older request
                break
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            end = request.num_computed_tokens + num_tokens
            while not (has_blocks := self._blocks.grow(request, end)):
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is request:
                    break
            if not has_blocks:
                break
            work.append(ScheduledTokens(request, num_tokens))
            budget -= num_tokens
        return work

    def _admit(self, budget: int) -> list[ScheduledTokens]:
        """Start waiting requests. Skips requests whose lookup is pending."""
        work: list[ScheduledTokens] = []
        for request in list(self._waiting):
            if len(self._running) + len(self._loading) >= self._config.max_running:
                break
            num_matched = self._blocks.match_prefix(request)
            num_external, is_pending = self._match(request, num_matched)
            if is_pending:
                continue
            num_tokens = 0
            if not num_external:
                num_tokens = min(budget, request.num_tokens - num_matched)
                if not num_tokens:
                    break
            if not self._blocks.start(request, num_matched, num_external, num_tokens):
                break
            self._start(request, num_matched, num_external)
            if num_tokens:
                work.append(ScheduledTokens(request, num_tokens))
                budget -= num_tokens
        return work

    def _match(self, request: Request, num_matched: int) -> PrefixMatch:
        if self._hooks is None:
            return _NO_MATCH
        return self._hooks.get_num_new_matched_tokens(request, num_matched)

    def _start(self, request: Request, num_matched: int, num_external: int) -> None:
        self._waiting.remove(request)
        request.num_computed_tokens = num_matched
        if request.device_tokens is None:
            request.device_tokens = num_matched
        if self._hooks is not None:
            tables = tuple(tuple(table) for table in request.block_tables)
            self._hooks.update_state_after_alloc(request, tables, num_matched, num_external)
        if num_external:
            request.state = RequestState.LOADING
            request.num_external_tokens = num_external
            self._loading[request.request_id] = request
        else:
            self._run(request)

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        insort(self._running, request, key=_BY_ARRIVAL)

    def planned(self, step: Step) -> None:
        """Release the blocks that are now outside their group's window. Called after the connector
        has been offered all blocks of the plan."""
        for request, _ in step.work:
            self._blocks.leave_behind(request)

    def computed(self, step: Step) -> None:
        """Record the tokens that the model has computed in this step."""
        for request, num_tokens in step.work:
            request.num_computed_tokens += num_tokens
            request.run_tokens += num_tokens
            self._blocks.cache_computed(request)

    def loads_ended(self, loaded: Iterable[LoadedRequest]) -> None:
        """Continue requests whose loads the connector has reported."""
        for request_id, num_on_device in loaded:
            request = self._loading.pop(request_id)
            if request.state is RequestState.FINISHED:
                self._blocks.release(request)
                continue
            if request.is_stale:
                self._start_again(request)
                continue
            num_before = request.num_computed_tokens
            num_wanted = num_before + request.num_external_tokens
            request.num_computed_tokens = num_on_device
            self._blocks.cache_computed(request)
            request.loaded_tokens += max(0, num_on_device - num_before)
            if num_on_device == num_wanted:
                self._run(request)
            else:
                # With sliding-window attention, the window of this shorter prefix begins earlier,
                # so the request may not hold all of its blocks. So the request starts again, and
                # looks for its prefix in the device's cache.
                self._wait(request)

    # --- ends -----------------------------------------------------------------------------------

    def end(self, request: Request) -> None:
        """End a request that has finished or is aborted, and release its blocks. Blocks into which
        a load still writes are released when the connector reports the load."""
        last = on_device(request) if request.state is RequestState.RUNNING else None
        if self._hooks is not None:
            self._hooks.request_finished(request.request_id, last)
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._blocks.release(request)
        request.state = RequestState.FINISHED

    def reset(self) -> None:
        """Drop everything computed so far. Running and loading requests start again from their
        tokens."""
        self._blocks.drop_cache()
        for request in self._loading.values():
            request.is_stale = True
        for request in list(self._running):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        self._start_again(request)

    def _start_again(self, request: Request) -> None:
        self._preempted.append(request.request_id)
        request.is_new = True
        request.is_stale = False
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self._blocks.release(request)
        request.num_computed_tokens = 0
        request.num_external_tokens = 0
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=_BY_ARRIVAL)


def on_device(request: Request) -> ScheduledRequest:
    """Describe a request's current blocks and computed tokens for the connector."""
    return ScheduledRequest(
        request_id=request.request_id,
        block_ids=tuple(tuple(table) for table in request.block_tables),
        num_computed_tokens=request.num_computed_tokens,
    )
