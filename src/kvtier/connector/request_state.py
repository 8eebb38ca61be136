"""One request: its hints (`kv_transfer_params`, parsed once), and how far it is offloaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvtier.base import (
    Locality,
    Medium,
    OffloadKey,
    ReqContext,
    TierFilter,
    TierMatcher,
    WriteHint,
    make_offload_key,
)

if TYPE_CHECKING:
    from kvtier.base import OffloadingManager
    from kvtier.connector.common import EngineRequest
    from kvtier.connector.planning import Geometry, GroupGeometry

__all__ = ["RequestGroupState", "RequestHints", "RequestOffloadState", "parse_hints"]

logger = logging.getLogger(__name__)


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

    def __post_init__(self) -> None:
        params = self.req.kv_transfer_params
        self.hints = parse_hints(params)
        if not isinstance(params, Mapping):
            params = None  # not a mapping: tiers could not read it
        self.req_context = ReqContext(
            self.req.request_id,
            params,
            self.hints.load_tiers,
            num_prompt_tokens=self.req.num_prompt_tokens,
            is_prefetch=self.hints.prefetch,
            write_hint=self.hints.write,
            may_load=self.may_load,
            is_served=self.may_load or self.may_store,
        )
        self.may_load = self.may_load and not self.hints.skip
        self.may_store = self.may_store and not self.hints.skip
        self.group_states = tuple(RequestGroupState(group) for group in self.config.groups)

    def update_keys(self) -> None:
        """Make keys for the chunks that have become full since the last call."""
        hashes = self.req.block_hashes
        for state in self.group_states:
            per_chunk = state.geometry.hashes_per_chunk
            for end in range((len(state.keys) + 1) * per_chunk, len(hashes) + 1, per_chunk):
                key = make_offload_key(hashes[end - 1], state.geometry.group_idx)
                state.keys.append(key)

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
        """Report the blocks of the request, which ends, if it has run."""
        if self.is_on_device and self.may_store:
            self.update_keys()
            groups = self.group_states
            whole = next((group for group in groups if group.geometry.is_prefix), groups[0])
            num_prompt = self.req.num_prompt_tokens
            num_output = self.req.num_tokens - num_prompt
            manager.note_prompt(whole.keys, self.req_context, num_prompt, num_output)

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


# --- hints --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The user's settings for one request."""

    skip: bool = False
    """Neither load nor store anything for this request."""
    max_offload_tokens: int | None = None
    """Store only blocks within this number of tokens from the start of the prompt."""
    load_tiers: TierFilter = TierFilter.ALL
    """Tiers to load from. Host memory is always allowed."""
    prefetch: bool = False
    """Nobody waits for this request: it brings up blocks for one that is still to come."""
    write: WriteHint | None = None
    """Which of its blocks tiers get. None: what their write policies choose."""


_NONE = RequestHints()

_KEYS = ("skip", "max_offload_tokens", "kv_load_tiers", "prefetch", "write", "max_load_tokens")
"""Hints that kvtier reads, and `max_load_tokens`, which vLLM reads itself."""
_MAX_KEY_LENGTH = 32
"""Longer keys are not compared with `_KEYS`. A client chooses the keys, and comparing long keys
takes time."""


def parse_hints(params: Mapping[str, Any] | None) -> RequestHints:
    """Read the hints in a request's `kv_transfer_params`. Never raises.

    Both the connector of this package and the plug-in for vLLM call it, once per request. A value
    that cannot be read causes a warning and is ignored; but if no entry of `kv_load_tiers` can be
    read, only host memory is allowed. Keys that are not hints are for tiers. A key that looks like
    a misspelt hint causes a warning.
    """
    if not params:
        return _NONE
    if not isinstance(params, Mapping):
        _warn("", params, "is ignored: give an object.")
        return _NONE
    for key in params:
        if key not in _KEYS and (meant := _meant_by(key)):
            what = f"is not read by kvtier: did you mean {meant}?"
            _warn(f"not {meant}", params[key], what, name=key)
    skip, prefetch = _flag("skip", params), _flag("prefetch", params)
    most = params.get("max_offload_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        _warn("max_offload_tokens", most, "is ignored: give a whole number, 0 or more.")
        most = None
    entries = params.get("kv_load_tiers")
    load_tiers = TierFilter.ALL if entries is None else _filter_of(entries)
    return RequestHints(skip, most, load_tiers, prefetch, _write_hint(params.get("write")))


def _flag(name: str, params: Mapping[str, Any]) -> bool:
    value = params.get(name, False)
    if isinstance(value, bool):
        return value
    _warn(name, value, "is ignored: give true or false.")
    return False


def _write_hint(value: object) -> WriteHint | None:
    if value is None:
        return None
    if isinstance(value, str):
        for hint in WriteHint:
            if value.lower() == hint:
                return hint
    _warn("write", value, 'is ignored: give "never" or "through".')
    return None


@lru_cache(maxsize=256)
def _meant_by(key: object) -> str | None:
    """The hint that this key is probably a misspelling of."""
    if not isinstance(key, str) or len(key) > _MAX_KEY_LENGTH:
        return None
    plain = key.lower().replace("-", "_")
    return next(iter(get_close_matches(plain, _KEYS, n=1, cutoff=0.85)), None)


def _filter_of(entries: object) -> TierFilter:
    """A filter from the entries that can be read. If there are none, it allows host memory alone: a
    mistake in a list of tiers must not allow tiers that the user wanted to exclude."""
    allowed = 'give a list such as [{"medium": "STORAGE", "locality": "LOCAL"}].'
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        _warn("kv_load_tiers", entries, f"allows host memory alone: {allowed}")
        return TierFilter()
    matchers: dict[TierMatcher, None] = {}
    for place, entry in enumerate(entries):
        try:
            matchers[_matcher_of(entry)] = None
        except (ValueError, TypeError, AttributeError):
            _warn(
                "kv_load_tiers[]",
                entry,
                f"is ignored: {allowed}",
                name=f"kv_load_tiers[{place}]",
            )
    return TierFilter(tuple(matchers))


def _matcher_of(entry: object) -> TierMatcher:
    if isinstance(entry, str):
        return TierMatcher(Medium(entry.upper()))
    if not isinstance(entry, Mapping) or not set(entry) <= {"medium", "locality"}:
        raise TypeError
    medium, locality = entry.get("medium"), entry.get("locality")
    return TierMatcher(
        None if medium is None else Medium(medium.upper()),
        None if locality is None else Locality(locality.upper()),
    )


_warned_topics: set[str] = set()


def _warn(topic: str, given: object, what: str, *, name: str | None = None) -> None:
    """Log the first warning about a topic at WARNING and later ones at DEBUG, because otherwise a
    client could fill the log. `topic`: a text that warnings of the same kind share; "" for a
    `kv_transfer_params` that is not an object. `name`: the key to show, if it is not the topic."""
    level = logging.DEBUG if topic in _warned_topics else logging.WARNING
    _warned_topics.add(topic)
    key = topic if name is None else name
    where = f"kv_transfer_params.{key}" if key else "kv_transfer_params"
    logger.log(level, "%s = %.200r %s", where, given, what)
