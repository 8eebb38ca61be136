"""One request: its hints, its context, and how far it is offloaded."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.hints import HintReader, RequestHints, new_context

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager
    from kvtier.connector.common import EngineRequest
    from kvtier.connector.planning import Geometry, GroupGeometry

__all__ = ["RequestGroupState", "RequestOffloadState"]


@dataclass(slots=True)
class RequestGroupState:
    """How far one KV-cache group of a request has been offloaded."""

    geometry: GroupGeometry
    keys: list[OffloadKey] = field(default_factory=list)
    """Keys of the offloaded blocks (chunks) that the request's tokens fill so far."""
    num_offered: int = 0
    """Chunks that were offered for storing, or need not be."""
    loaded: range = range(0)
    """Chunks that were loaded: they are not offered for storing."""
    num_described: int = 0
    """Chunks whose tokens `EventTranslator` has recorded."""


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """One request, from `on_new_request` until its last transfer has ended.

    The scheduler half of the connector makes it and is the only one that changes it.
    """

    req: EngineRequest
    config: Geometry
    hint_reader: InitVar[HintReader]
    may_load: bool = True
    """False for a request that computes all its blocks: by its hint `skip`, or by a switch."""
    may_store: bool = True
    """False for a request whose blocks are not offered for storing."""
    req_context: ReqContext = field(init=False)
    """Made once, and passed to every call that acts for the request."""
    hints: RequestHints = field(init=False)
    group_states: tuple[RequestGroupState, ...] = field(init=False)
    stores_hits: bool = False
    """True if blocks that the request has loaded are offered for storing as well."""
    has_failed_load: bool = False
    """True once a load has failed. Then nothing more is loaded for the request, unless it is
    preempted and starts again."""
    has_started: bool = False
    """True once the manager knows where the tokens of its prompt come from."""
    is_on_device: bool = False
    """True once the engine runs the request or loads blocks for it; False again after a
    preemption."""
    is_loading: bool = False
    """True while the engine waits for the end of a load."""
    num_jobs: int = 0
    """Transfers that have not ended."""
    is_finished: bool = False

    def __post_init__(self, hint_reader: HintReader) -> None:
        salt = getattr(self.req, "cache_salt", None)
        self.hints = hint_reader.read(self.req.kv_transfer_params, None, salt)
        self.req_context = new_context(
            self.req.request_id,
            self.req.kv_transfer_params,
            self.hints,
            num_prompt_tokens=self.req.num_prompt_tokens,
        )
        self.req_context.may_load = self.may_load
        self.req_context.is_served = self.may_load or self.may_store
        self.may_load = self.may_load and not self.hints.skip
        self.may_store = self.may_store and self.hints.may_store
        self.group_states = tuple(RequestGroupState(group) for group in self.config.groups)

    def update_keys(self) -> None:
        """Make keys for the chunks that have become full since the last call."""
        hashes, namespace = self.req.block_hashes, self.hints.namespace
        for state in self.group_states:
            per_chunk = state.geometry.hashes_per_chunk
            for end in range((len(state.keys) + 1) * per_chunk, len(hashes) + 1, per_chunk):
                key = make_offload_key(hashes[end - 1], state.geometry.group_idx)
                state.keys.append(key if namespace is None else namespace.key_of(key))

    def loads(self, start: int, end: int) -> None:
        """Note that the tokens from `start` to `end` are loaded, so they are not offered for
        storing (unless `stores_hits`). Tokens before `start` are offered: maybe only the device's
        own cache has them."""
        if not self.stores_hits:
            for state in self.group_states:
                size = state.geometry.tokens_per_chunk
                state.loaded = range(-(-start // size), end // size)

    def start(self, manager: OffloadingManager, num_on_device: int, num_loaded: int) -> None:
        """The engine starts the request, with tokens of its prompt on the device and tokens that it
        loads. Tells the manager, the first time: a preempted request starts again."""
        self.is_on_device = True
        if not self.has_started:
            self.has_started = True
            num_prompt = self.req.num_prompt_tokens
            manager.note_start(self.req_context, num_prompt, num_on_device, num_loaded)

    def has_lost_load(self, manager: OffloadingManager) -> None:
        """Note that a load has failed."""
        self.has_failed_load = True
        manager.note_failed_load(self.req_context)

    def report_to(self, manager: OffloadingManager) -> None:
        """Report the blocks of the request, which ends. If it has not run, its hints may still say
        what is to become of them: then it uses them, so that the manager applies the hints."""
        if not self.has_started and self.hints.has_intent:
            self.update_keys()
            manager.touch(self._in_prompt_order(), self.req_context)
        if self.is_on_device and self.may_store:
            self.update_keys()
            groups = self.group_states
            whole = next((group for group in groups if group.geometry.is_prefix), groups[0])
            num_prompt = self.req.num_prompt_tokens
            num_output = self.req.num_tokens - num_prompt
            manager.note_prompt(whole.keys, self.req_context, num_prompt, num_output)

    def _in_prompt_order(self) -> list[OffloadKey]:
        """All keys of the request, of all groups, by where their blocks end in the prompt."""
        placed = [
            (place * state.geometry.tokens_per_chunk, key)
            for state in self.group_states
            for place, key in enumerate(state.keys, start=1)
        ]
        placed.sort(key=itemgetter(0))
        return [key for _, key in placed]

    def report_first_token(self, manager: OffloadingManager) -> None:
        """Report that the request has produced its first token."""
        if not self.hints.prefetch:
            seconds = time.monotonic() - self.req_context.created_s
            manager.note_first_token(self.req_context, self.req.num_prompt_tokens, seconds)

    def start_again(self) -> None:
        """Note that the request has lost its device blocks: it was preempted."""
        self.has_failed_load = False
        self.is_on_device = False
        for state in self.group_states:
            state.num_offered = 0
            state.loaded = range(0)
