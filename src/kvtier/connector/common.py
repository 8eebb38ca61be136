"""The data that an engine, the connector and the workers pass to each other.

The engine keeps its own requests, blocks and scheduling. Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, TransferResult

NO_DEVICE_BLOCK = -1
"""Entry of a block table for a block that the request no longer holds, because the block has left
the attention window of its group."""


class EngineRequest(Protocol):
    """What the connector needs of a request. An engine's own request object can satisfy it."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that are alive or whose load has not been reported."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash for every `tokens_per_hash` tokens that are complete; grows while the request
        does. A hash covers all tokens from the start of the request up to the end of these tokens,
        so equal hashes mean equal prefixes."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All `num_tokens` tokens. Read only when events are self-describing."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Hints from the user for this request; see `kvtier.hints.RequestHints`."""


class PrefixMatch(NamedTuple):
    """Answer of `get_num_new_matched_tokens`."""

    num_tokens: int
    """Number of tokens that can be loaded. They follow the tokens that are already computed. At
    least one token of the request is left to be computed."""
    is_pending: bool
    """True if the manager does not know the answer yet, or is still promoting blocks. Leave the
    request waiting, and ask again in the next step."""


@dataclass(slots=True)
class ScheduledRequest:
    """A request that the engine runs in this step."""

    request_id: str
    block_ids: tuple[Sequence[int], ...]
    """For each group, the request's device blocks by position in the prompt; `NO_DEVICE_BLOCK` for
    blocks that it no longer holds."""
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
    """For each group, device blocks that the engine gave to a request in this step. The workers
    first wait for stores that still read these blocks for another request."""


MIN_PREFILL_TOKENS = 64
"""A step is used to measure prefill only if it computes at least this number of prompt tokens, not
counting one token of each request. Other steps mostly decode."""


class ComputedTokens(NamedTuple):
    """Tokens of one request that the model has computed in one step."""

    first: int
    """Position of the first token in the request."""
    num_tokens: int


class Prefill(NamedTuple):
    """The prompt tokens that a step computes."""

    num_tokens: int
    mean_position: float
    """Tokens of the prompt that precede each of these tokens, on average."""


def prefill_in(computed: Iterable[ComputedTokens]) -> Prefill | None:
    """The prompt tokens that a step computes; None if there are too few to measure
    (`MIN_PREFILL_TOKENS`). A request with a single token in the step counts as decoding."""
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
    """What the workers have to do in one step, in this order, before the model runs. It is pickled
    if the workers are other processes."""

    flush: list[int] = field(default_factory=list)
    """Jobs to wait for because they began before a reset."""
    stores: list[TransferOrder] = field(default_factory=list)
    """Stores to start."""
    wait_for: list[int] = field(default_factory=list)
    """Stores to wait for, including stores of this step, because their device blocks were given to
    other requests."""
    loads: list[TransferOrder] = field(default_factory=list)
    """Loads to start."""


class LoadedRequest(NamedTuple):
    """A load that has ended."""

    request_id: str
    num_computed_tokens: int
    """Tokens of the request that are valid on the device now. After a failed load: the tokens from
    before the load. After a reset: 0. The engine computes the rest."""


@dataclass(slots=True)
class WorkerOutput:
    """Transfers that one rank reports after a step."""

    rank: int
    finished: list[TransferResult] = field(default_factory=list)
