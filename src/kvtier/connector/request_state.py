"""What the connector remembers of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.connector.hints import RequestHints, parse_hints

if TYPE_CHECKING:
    from kvtier.connector.common import EngineRequest
    from kvtier.connector.geometry import Geometry, GroupGeometry


@dataclass(slots=True)
class RequestGroupState:
    """How far one KV-cache group of a request has been offloaded."""

    geometry: GroupGeometry
    keys: list[OffloadKey] = field(default_factory=list)
    """Of the offloaded blocks (chunks) that the request's tokens fill so far."""
    num_offered: int = 0
    """Chunks that were offered for storing, or need not be."""
    loaded: range = range(0)
    """Chunks that were loaded: they are not offered."""
    num_described: int = 0
    """Chunks whose tokens the events know."""


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """One request, from `on_new_request` until its last transfer has ended."""

    req: EngineRequest
    config: Geometry
    req_context: ReqContext = field(init=False)
    """Made once, and passed to every call that acts for the request."""
    hints: RequestHints = field(init=False)
    group_states: tuple[RequestGroupState, ...] = field(init=False)
    stores_hits: bool = False
    """Whether what it has loaded is offered for storing as well."""
    has_failed_load: bool = False
    """Whether it computes for itself, because a load has failed."""
    is_on_device: bool = False
    """Whether the engine has taken it in, and not preempted it since."""
    is_loading: bool = False
    """Whether the engine waits for the end of a load."""
    num_jobs: int = 0
    is_finished: bool = False

    def __post_init__(self) -> None:
        params = self.req.kv_transfer_params
        self.hints = parse_hints(params)
        if not isinstance(params, Mapping):
            params = None  # tiers need not be told what cannot be read
        self.req_context = ReqContext(
            self.req.request_id,
            params,
            self.hints.load_tiers,
            num_prompt_tokens=self.req.num_prompt_tokens,
        )
        self.group_states = tuple(RequestGroupState(group) for group in self.config.groups)

    def update_keys(self) -> None:
        """Make keys for the chunks that have become full since the last time."""
        hashes = self.req.block_hashes
        for state in self.group_states:
            per_chunk = state.geometry.hashes_per_chunk
            for end in range((len(state.keys) + 1) * per_chunk, len(hashes) + 1, per_chunk):
                key = make_offload_key(hashes[end - 1], state.geometry.group_idx)
                state.keys.append(key)

    def loads(self, start: int, end: int) -> None:
        """Its tokens from `start` to `end` come from where they would be stored: they need not be
        offered. What the device's own cache had is offered: it may be nowhere else."""
        if not self.stores_hits:
            for state in self.group_states:
                size = state.geometry.tokens_per_chunk
                state.loaded = range(-(-start // size), end // size)

    def start_again(self) -> None:
        """All that it had on the device is gone."""
        self.has_failed_load = False
        self.is_on_device = False
        for state in self.group_states:
            state.num_offered = 0
            state.loaded = range(0)
