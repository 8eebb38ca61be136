"""What an engine and the connector tell each other, and what travels to the workers.

The engine keeps its own requests, blocks and scheduling. Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, TransferResult

NO_DEVICE_BLOCK = -1
"""Stands in a block table where a request has no block any more: it has left the window."""


class EngineRequest(Protocol):
    """What the connector has to know of a request. An engine's own request object may be one."""

    @property
    def request_id(self) -> str:
        """Distinct among the requests that are alive, or whose load has not been reported."""

    @property
    def num_tokens(self) -> int:
        """Prompt, and what was generated so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for every full `tokens_per_hash` tokens so far. Each stands for all tokens up to its
        end, so equal hashes mean equal prefixes. Grows while the request does."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All `num_tokens` of them. Asked for only when events describe themselves."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the user of the engine wants for this request."""


class PrefixMatch(NamedTuple):
    """Answer of `get_num_new_matched_tokens`."""

    num_tokens: int
    """Tokens behind the computed ones that can be loaded. Never all tokens of the request: at least
    one is left to be computed."""
    is_pending: bool
    """True: not known yet, or on its way. Leave the request waiting, and ask again next step."""


@dataclass(slots=True)
class ScheduledRequest:
    """A request that the engine runs in this step."""

    request_id: str
    block_ids: tuple[Sequence[int], ...]
    """For each group, the request's device blocks by position in the prompt, as far as it has
    any; `NO_DEVICE_BLOCK` for those that it has given back."""
    num_computed_tokens: int
    """Tokens whose KV is complete on the device before the step runs, in all groups."""


@dataclass(slots=True)
class StepPlan:
    """What the engine has decided for one step, before it runs the model."""

    scheduled: Sequence[ScheduledRequest] = ()
    new_req_ids: Collection[str] = ()
    """Requests that run for the first time, or for the first time since they were preempted."""
    preempted_req_ids: Collection[str] = ()
    allocated_block_ids: tuple[Collection[int], ...] = ()
    """For each group, device blocks that were given to a request in this step. Whatever still reads
    or writes them for someone else has to end first."""


MIN_PREFILL_TOKENS = 64
"""Prompt tokens of a step that says something of what prompts cost. Those with fewer decode."""


class ComputedTokens(NamedTuple):
    """Tokens of one request that the model has computed in one step."""

    first: int
    """Position of the first of them in the request."""
    num_tokens: int


class Prefill(NamedTuple):
    """The prompt tokens that a step computes."""

    num_tokens: int
    mean_position: float


def prefill_in(computed: Iterable[ComputedTokens]) -> Prefill | None:
    """What of a step is prefill; None: too little of it, the step decodes."""
    num_tokens = num_requests = 0
    sum_of_positions = 0.0
    for first, count in computed:
        if count > 1:
            num_requests += 1
            num_tokens += count
            sum_of_positions += count * (first + count / 2)
    if num_tokens - num_requests < MIN_PREFILL_TOKENS:
        return None
    return Prefill(num_tokens, sum_of_positions / num_tokens)


class TransferOrder(NamedTuple):
    """One transfer that every rank carries out for its part of the blocks."""

    job_id: int
    device: GPULoadStoreSpec
    offloaded: LoadStoreSpec


@dataclass(slots=True)
class ConnectorMetadata:
    """What the workers have to do in one step, in this order, before the model runs. Pickled where
    they are other processes."""

    flush: list[int] = field(default_factory=list)
    """Jobs from before a reset: wait for them."""
    stores: list[TransferOrder] = field(default_factory=list)
    """Start these."""
    wait_for: list[int] = field(default_factory=list)
    """Stores, maybe of this very step, whose device blocks were given away: wait for them."""
    loads: list[TransferOrder] = field(default_factory=list)
    """Start these."""


class LoadedRequest(NamedTuple):
    """A load has ended."""

    request_id: str
    num_computed_tokens: int
    """Tokens of the request that are on the device now. Fewer than were to be loaded, if part of it
    failed: the engine computes the rest."""


@dataclass(slots=True)
class WorkerOutput:
    """What one rank reports after a step."""

    rank: int
    finished: list[TransferResult] = field(default_factory=list)
