"""What the connector remembers of one request."""

from __future__ import annotations

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
    """Whether what it has found, rather than computed, is offered for storing as well."""
    has_failed_load: bool = False
    """Whether it computes for itself, because a load has failed."""
    is_loading: bool = False
    num_jobs: int = 0
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.hints = parse_hints(self.req.kv_transfer_params)
        self.req_context = ReqContext(
            self.req.request_id, self.req.kv_transfer_params, self.hints.load_tiers
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

    def found(self, num_tokens: int) -> None:
        """It has so many tokens that it need not compute: those are there already."""
        if not self.stores_hits:
            for state in self.group_states:
                state.num_offered = num_tokens // state.geometry.tokens_per_chunk

    def start_again(self) -> None:
        """All that it had on the device is gone."""
        self.has_failed_load = False
        for state in self.group_states:
            state.num_offered = 0
