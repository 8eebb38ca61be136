"""One request: its tokens, block hashes and state, from its arrival to its result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from hashlib import blake2b
from typing import Any

import numpy as np

from kvtier.engine.weights import Array

__all__ = [
    "BOS",
    "EOS",
    "HASH_BYTES",
    "FinishReason",
    "Request",
    "RequestResult",
    "RequestState",
    "decode",
    "encode",
    "extend_chain",
]

BOS = 256
"""The token that begins every text. Ids below it are bytes of the text in UTF-8."""
EOS = 257

HASH_BYTES = 16
_START = b"kvtier.engine".ljust(HASH_BYTES, b"\0")


def encode(text: str) -> list[int]:
    """Return `BOS` and the ids of a text."""
    return [BOS, *text.encode()]


def decode(token_ids: Iterable[int]) -> str:
    """Return the text of some ids. Special ids are left out; bytes that are not UTF-8 become
    U+FFFD."""
    return bytes(token for token in token_ids if token < BOS).decode(errors="replace")


def extend_chain(chain: list[bytes], token_ids: Sequence[int], tokens_per_hash: int) -> None:
    """Append to `chain` the hashes that it lacks, one for every `tokens_per_hash` tokens.

    Each hash covers the hash before it and its own tokens, so it stands for all tokens up to its
    end. It is the same in every process and on every machine.
    """
    for end in range((len(chain) + 1) * tokens_per_hash, len(token_ids) + 1, tokens_per_hash):
        tokens = np.asarray(token_ids[end - tokens_per_hash : end], "<u4").tobytes()
        parent = chain[-1] if chain else _START
        chain.append(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())


class RequestState(Enum):
    """The state of a request."""

    WAITING = auto()
    """The request has no device blocks."""
    LOADING = auto()
    """The request has device blocks, and the connector is loading into them."""
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a request has ended."""

    LENGTH = "length"
    EOS = "eos"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The outcome of a request."""

    request_id: str
    token_ids: list[int]
    """The generated tokens."""
    logits: list[Array] | None
    """The logits of each generated token; None if they were not asked for."""
    finish_reason: FinishReason
    time_to_first_token_s: float | None
    """Seconds from the request's arrival to its first token; None if no token was generated."""
    num_prompt_tokens: int
    num_device_tokens: int
    """Prompt tokens found in the device's own cache when the request was first admitted."""
    num_loaded_tokens: int
    """Tokens that the connector has loaded."""
    num_computed_tokens: int
    """Tokens that the model computed, including repeats after a preemption."""
    num_preemptions: int


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the engine. The connector gets it as an `EngineRequest`."""

    request_id: str
    token_ids: list[int]
    """The prompt and the tokens generated so far."""
    max_tokens: int
    eos: int | None
    keep_logits: bool
    kv_transfer_params: Mapping[str, Any] | None
    tokens_per_hash: int
    num_groups: int
    arrival: int
    """Sequence number; requests with lower numbers are scheduled first."""

    num_prompt_tokens: int = field(init=False)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is on the device, in all groups."""
    block_tables: tuple[list[int], ...] = field(init=False)
    num_cached_blocks: list[int] = field(init=False)
    """For each group, the number of leading blocks already offered to the device's prefix cache."""
    num_external_tokens: int = 0
    """Tokens that the connector is loading."""
    is_stale: bool = False
    """True if the cache was reset while the request was loading."""
    is_new: bool = True
    """True until the request runs, and again after a preemption."""
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
        """Number of tokens: the prompt and those generated so far."""
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes so far, one for every `tokens_per_hash` tokens."""
        extend_chain(self._block_hashes, self.token_ids, self.tokens_per_hash)
        return self._block_hashes

    def add_token(self, token: int, logits: Array) -> FinishReason | None:
        """Append a generated token. Returns why it is the last one, or None."""
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
        """Return the outcome, once the request has ended."""
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
