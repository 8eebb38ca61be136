"""One request, from its arrival to its result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from kvtier.engine.block_hash import extend_chain
from kvtier.engine.products import Array

__all__ = ["FinishReason", "Request", "RequestResult", "RequestState"]


class RequestState(Enum):
    """Where a request stands."""

    WAITING = auto()
    """It has no blocks."""
    LOADING = auto()
    """It has blocks, and the connector is writing into them."""
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a request has ended."""

    LENGTH = "length"
    EOS = "eos"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of a request."""

    request_id: str
    token_ids: list[int]
    """The generated ones."""
    logits: list[Array] | None
    """For each generated token, if they were asked for."""
    finish_reason: FinishReason
    time_to_first_token_s: float | None
    """From the arrival on; None if there was no token."""
    num_prompt_tokens: int
    num_device_tokens: int
    """Prompt tokens found in the device's own cache when the request first ran."""
    num_loaded_tokens: int
    """Tokens that the connector has loaded."""
    num_computed_tokens: int
    """Tokens that went through the model, those computed again after a preemption included."""
    num_preemptions: int


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What the engine knows of a request. An `EngineRequest` for the connector."""

    request_id: str
    token_ids: list[int]
    """Prompt, and what was generated so far."""
    max_tokens: int
    eos: int | None
    keep_logits: bool
    kv_transfer_params: Mapping[str, Any] | None
    tokens_per_hash: int
    num_groups: int
    arrival: int
    """Counts up: older requests go first."""

    num_prompt_tokens: int = field(init=False)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is on the device, in all groups."""
    block_tables: tuple[list[int], ...] = field(init=False)
    num_cached_blocks: list[int] = field(init=False)
    """For each group, blocks that have been entered into the device's prefix cache."""
    num_external_tokens: int = 0
    """Tokens being loaded."""
    is_stale: bool = False
    """Whether the cache was reset while it was loading."""
    is_new: bool = True
    """Whether it has not run yet, or not since it was preempted."""
    logits: list[Array] = field(default_factory=list)
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    device_tokens: int | None = None
    loaded_tokens: int = 0
    run_tokens: int = 0
    num_preemptions: int = 0
    _block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.block_tables = tuple([] for _ in range(self.num_groups))
        self.num_cached_blocks = [0] * self.num_groups

    @property
    def num_tokens(self) -> int:
        """Prompt, and what was generated so far."""
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for every full `tokens_per_hash` tokens so far."""
        extend_chain(self._block_hashes, self.token_ids, self.tokens_per_hash)
        return self._block_hashes

    def add_token(self, token: int, logits: Array) -> FinishReason | None:
        """A token was generated. Returns why it was the last one, if it was."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.token_ids.append(token)
        if self.keep_logits:
            self.logits.append(logits)
        if token == self.eos:
            return FinishReason.EOS
        if self.num_tokens - self.num_prompt_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def result(self, reason: FinishReason) -> RequestResult:
        """The outcome, when the request has ended."""
        waited = None if self.first_token_at is None else self.first_token_at - self.arrived_at
        return RequestResult(
            request_id=self.request_id,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            logits=list(self.logits) if self.keep_logits else None,
            finish_reason=reason,
            time_to_first_token_s=waited,
            num_prompt_tokens=self.num_prompt_tokens,
            num_device_tokens=self.device_tokens or 0,
            num_loaded_tokens=self.loaded_tokens,
            num_computed_tokens=self.run_tokens,
            num_preemptions=self.num_preemptions,
        )
