"""What the manager's adapter keeps between two calls of vLLM, one class per subject.

`ManagerAdapter` is the only user. Everything runs on the scheduler thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.cpu.notice_board import NoticeBoard
from kvtier.hints import HintReader, RequestHints, new_context
from kvtier.integrations.vllm import vllm_api

if TYPE_CHECKING:
    from kvtier.integrations.vllm.manager import ManagerAdapter
    from kvtier.observe.observer import ObservedManager
    from kvtier.tiering.base import SecondaryTierManager

__all__ = [
    "LoadSources",
    "PrefixAnswers",
    "RequestState",
    "RequestStates",
    "StoreFailures",
    "announce_prefix_lookups",
    "prefix_answers",
]

logger = logging.getLogger(__name__)


# --- requests -----------------------------------------------------------------------------------


class RequestState:
    """A request of vLLM, in kvtier's terms. It is kept in vLLM's own context, as the attribute
    `kvtier`."""

    __slots__ = (
        "context",
        "has_started",
        "head_is_reported",
        "load_context",
        "may_store",
        "namespace",
        "num_described",
        "num_on_device",
        "private_keys",
    )

    def __init__(self, context: ReqContext, hints: RequestHints) -> None:
        self.context = context
        self.load_context = None if hints.skip else context
        """`context` while the request may load; None once it must compute its blocks."""
        self.may_store = hints.may_store
        self.namespace = hints.namespace
        """Makes the keys of a private tenant's blocks; None: they are vLLM's own."""
        self.private_keys: dict[OffloadKey, OffloadKey] = {}
        """kvtier's keys of the request's blocks by vLLM's, if there is a namespace."""
        self.num_on_device = 0
        """Tokens of the request that vLLM had on the device when it looked it up."""
        self.has_started = False
        """True once vLLM has begun to run it or to load for it."""
        self.num_described = 0
        """Number of the request's block hashes when `ConnectorEvents.describe` was last called."""
        self.head_is_reported = vllm_api.REPORTS_USE
        """True once kvtier knows that the request uses the first blocks of its prompt; always True
        if vLLM reports uses itself (`REPORTS_USE`). Other releases of vLLM find blocks on the
        device without a call to kvtier. If the adapter did not report the use of these blocks, host
        memory would evict them before the later blocks of the prompt, which are useless without
        them."""

    def private_key(self, key: OffloadKey) -> OffloadKey:
        """kvtier's key of a block. Call it only if there is a namespace. `key`: vLLM's."""
        private = self.private_keys.get(key)
        if private is None:
            assert self.namespace is not None
            private = self.private_keys[key] = self.namespace.key_of(key)
        return private

    def in_namespace(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """kvtier's keys of these blocks, in the same order."""
        if self.namespace is None:
            return keys
        return [self.private_key(key) for key in keys]

    def head_to_report(
        self, keys: Collection[OffloadKey], req_context: vllm_api.ReqContext
    ) -> list[OffloadKey]:
        """The prompt's keys, for the caller to report as used. An empty list if `keys`, which the
        request uses now, begin with the prompt's first key. Call this only while `head_is_reported`
        is False; it becomes True."""
        self.head_is_reported = True
        if vllm_api.begins_prompt(keys, req_context):
            return []
        return vllm_api.keys_in_prompt_order(req_context)


class RequestStates:
    """Makes the states of vLLM's requests, and finds them again in vLLM's own contexts."""

    def __init__(self, hints: HintReader) -> None:
        self._hints = hints
        self._salts: dict[str, str] = {}

    def expect_salt(self, req_id: str, cache_salt: str | None) -> None:
        """Note the salt of a request that vLLM is about to announce."""
        if cache_salt:
            self._salts[req_id] = cache_salt

    def new(self, req_context: vllm_api.ReqContext) -> RequestState:
        """Make the state of a request, and keep it in vLLM's own context for later calls."""
        # Do not use vLLM's parser: it allows every tier if no entry of `kv_load_tiers` is valid.
        params = req_context.kv_transfer_params
        orders = vllm_api.orders_in(req_context)
        salt = self._salts.pop(req_context.req_id, None) if self._salts else None
        hints = self._hints.read(params, orders, salt)
        state = RequestState(new_context(req_context.req_id, params, hints), hints)
        req_context.kvtier = state
        return state

    def of(self, req_context: vllm_api.ReqContext) -> RequestState:
        """The state of a request; a new one if vLLM has not announced the request."""
        state: RequestState | None = getattr(req_context, "kvtier", None)
        return state or self.new(req_context)


# --- lookups of a prefix ------------------------------------------------------------------------


class PrefixAnswers(NamedTuple):
    """Answers to the lookups of one prefix."""

    hits: Iterator[OffloadKey]
    """Keys of readable blocks, in the order in which vLLM looks them up."""
    others: Iterator[vllm_api.LookupResult] | None
    """Answers to all other lookups, in order; None: the adapter asks the manager."""


def prefix_answers(
    manager: ObservedManager, prefix: list[OffloadKey], state: RequestState, context: ReqContext
) -> PrefixAnswers:
    """Ask the manager once for this prefix, which vLLM is about to look up one by one, up to the
    first miss.

    One call for thousands of keys takes less time than a call for each. The manager can also decide
    at once whether loading the hits takes longer than computing them; with single lookups, the
    request would wait a whole engine step for that decision.
    """
    misses = repeat(vllm_api.LookupResult.MISS)
    keys = prefix if state.namespace is None else [state.private_key(key) for key in prefix]
    # Most prompts are new. If the first key is a miss, vLLM looks no further.
    if manager.lookup(keys[0], context) is LookupResult.MISS:
        manager.note_wanted(keys, context)
        return PrefixAnswers(iter(()), misses)
    num_hits, is_final = manager.lookup_prefix(keys, context)
    if is_final:
        return PrefixAnswers(iter(prefix[:num_hits]), None)
    # The first answer makes the request wait, and the second ends vLLM's loop.
    return PrefixAnswers(iter(()), chain((vllm_api.LookupResult.HIT_PENDING,), misses))


_LOOP = "_maximal_prefix_lookup"
"""The method of vLLM's scheduler that looks up the keys of a prompt one by one, up to the first
miss. It is the same in all tested releases, apart from additional arguments at the end."""


def announce_prefix_lookups(scheduler: Any, manager: ManagerAdapter) -> None:
    """Make vLLM's scheduler call `begin_prefix` with the keys of a prefix before it looks them up
    one by one. `KVTierConnector` calls this once.

    vLLM has no hook for this, so a wrapper replaces the method `_LOOP` of `scheduler`. In a release
    without that method, keys are looked up one by one, with the same answers. The alternative, to
    compute the keys from the hashes of the request, would compute and keep every key twice.
    """
    one_by_one: Callable[..., int | None] | None = getattr(scheduler, _LOOP, None)
    if one_by_one is None:
        logger.info(
            "this vLLM has no %s: blocks are looked up one by one, which takes longer", _LOOP
        )
        return

    def look_up(
        keys: Iterable[OffloadKey], req_context: vllm_api.ReqContext, *others: Any, **named: Any
    ) -> int | None:
        prompt = keys if isinstance(keys, list) else list(keys)
        manager.begin_prefix(prompt, req_context)
        try:
            return one_by_one(prompt, req_context, *others, **named)
        finally:
            manager.end_prefix()

    setattr(scheduler, _LOOP, look_up)


class LoadSources:
    """The tiers that the blocks of one request came from. vLLM asks for all blocks of one request
    before it asks for those of the next."""

    __slots__ = ("req_context", "tiers")

    def __init__(self) -> None:
        self.req_context: vllm_api.ReqContext | None = None
        self.tiers: Mapping[OffloadKey, SecondaryTierManager] = {}
        """The tier of each block, without blocks that were in host memory already."""


# --- stores that failed on a rank ---------------------------------------------------------------


class StoreFailures:
    """Stores that failed on a rank, as the ranks record them on the notice board.

    vLLM's connector asserts that every transfer succeeds. So a worker first records the slots of a
    failed store as poisoned, and then reports the store as done (`worker.py`). This class reads
    these records.
    """

    def __init__(
        self,
        board: NoticeBoard,
        slots_of: Callable[[Collection[OffloadKey]], Mapping[OffloadKey, int]],
    ) -> None:
        """`slots_of`: the slots of blocks that are being stored."""
        self._board = board
        self._slots_of = slots_of
        self._num_storing = 0
        """Number of blocks that are being stored, without stores from before a reset."""

    def begin(self, num_blocks: int) -> None:
        """Note that a store of this number of blocks has begun."""
        self._num_storing += num_blocks

    def end(self, keys: Collection[OffloadKey], success: bool) -> set[OffloadKey]:
        """Note that the store of these blocks has ended. Returns the blocks whose store failed on a
        rank, unless `success` is False: then all of them have failed."""
        self._num_storing -= len(keys)
        if not success or not self._board.has_news():
            return set()
        slots = self._slots_of(keys)
        poisoned = self._board.take_poisoned(slots.values())
        if not self._num_storing:
            # Clear the records of stores from before a reset: vLLM does not report their end.
            self._board.forget()
        return {key for key, slot in slots.items() if slot in poisoned}

    def reset(self) -> None:
        """Forget the stores under way: vLLM does not report their end after a reset."""
        self._num_storing = 0

    def close(self) -> None:
        """Close the board."""
        self._board.close()
