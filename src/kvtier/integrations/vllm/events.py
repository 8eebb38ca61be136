"""The KV-cache events of offloaded blocks, as vLLM publishes them.

vLLM's own translation knows a block's tokens only while host memory has it, and not in every
release. This one takes vLLM's place in `KVTierConnector`: it is the same in all releases, and
describes blocks that an earlier engine left on disk. Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.base import (
    OffloadingSpec,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvtier.connector.descriptions import BlockDescription, DescribedRun, DescriptionBook
from kvtier.connector.events import Place, RemovedBlocks, event_stream, new_book
from kvtier.integrations.vllm import vllm_api

if TYPE_CHECKING:
    from kvtier.integrations.vllm.manager import ManagerAdapter

__all__ = ["ConnectorEvents"]


class ConnectorEvents:
    """Describes the blocks of vLLM's requests, and makes vLLM's events of kvtier's."""

    def __init__(self, scheduler: Any, adapter: ManagerAdapter, spec: OffloadingSpec) -> None:
        """`scheduler`: the scheduler side of vLLM's connector. `spec`: kvtier's own."""
        self._scheduler = scheduler
        self._manager = manager = adapter.inner
        self._state_of = adapter.state_of
        self._book = spec.describer = new_book(spec.config)
        self._stream = event_stream(spec.config, self._book, manager.media)
        self.stores_output = not spec.config.options.offload_prompt_only
        """True if blocks of generated tokens are stored."""

    def describe(self, req_ids: Iterable[str]) -> None:
        """Remember the blocks of these requests that are complete, in case they are stored or
        promoted. Called often: takes little time if there are no new ones."""
        if self._book is None:
            return
        statuses = self._scheduler._req_status
        for req_id in req_ids:
            status = statuses.get(req_id)
            if status is not None:
                self._describe(status, status.req, self._book)

    def _describe(self, status: Any, request: vllm_api.Request, book: DescriptionBook) -> None:
        state = self._state_of(status.req_context)
        if state.num_described == len(request.block_hashes) or state.namespace is not None:
            return  # neither events nor tiers get the tokens of private blocks
        status.update_offload_keys()
        groups = zip(status.group_states, self._scheduler.config.kv_group_configs, strict=True)
        for group_state, group in groups:
            keys = group_state.offload_keys
            first = state.num_described // group.hashes_per_chunk
            if first < len(keys):
                book.add(keys[first:], _run_of(request, group, first, len(keys)))
        state.num_described = len(request.block_hashes)

    def take(self) -> list[Any]:
        """vLLM's events since the last call."""
        taken: list[Any] = []
        for change in self._stream.read(self._manager.take_events()):
            if isinstance(change, RemovedBlocks):
                taken += _removed(change)
                continue
            for key in change.plain:
                hashes = [get_offload_block_hash(key)]
                taken.append(_stored(change.place, get_offload_group_idx(key), hashes, None))
            for group, block in change.described:
                taken.append(_stored(change.place, group, block.block_hashes, block))
        return taken


def _run_of(request: vllm_api.Request, group: Any, first: int, end: int) -> DescribedRun:
    """The request's offloaded blocks from `first` to `end` in one group."""
    per_chunk, size = group.hashes_per_chunk, group.tokens_per_chunk
    num_blocks = size // group.tokens_per_block
    per_block = per_chunk // num_blocks
    if per_chunk % num_blocks:  # a device block does not end where a hash ends
        num_blocks, per_block = 1, per_chunk
    hashes = request.block_hashes
    lora = request.lora_request
    spec = group.kv_event_group_spec
    return DescribedRun(
        array("I", request.all_token_ids[first * size : end * size]),
        hashes[first * per_chunk + per_block - 1 : end * per_chunk : per_block],
        hashes[first * per_chunk - 1] if first else None,
        num_blocks,
        size // num_blocks,
        spec.kv_cache_spec_kind,
        spec.kv_cache_spec_sliding_window,
        lora.name if lora is not None else None,
        lora.adapter_id if lora is not None else None,
        vllm_api.extra_keys_of(request, first * size, end * size, size // num_blocks),
    )


def _place(place: Place) -> dict[str, Any]:
    """The fields that say where a block is."""
    medium, locality, tier = place
    return {
        "medium": vllm_api.EVENT_MEDIA[medium],
        "locality": locality,
        **vllm_api.owner_in_event(tier),
    }


def _hashes(hashes: Iterable[bytes]) -> list[Any]:
    return [vllm_api.event_hash(block_hash) for block_hash in hashes]


def _stored(
    place: Place, group: int, hashes: Sequence[bytes], block: BlockDescription | None
) -> Any:
    if block is None:
        return vllm_api.BlockStored(
            block_hashes=_hashes(hashes),
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            lora_name=None,
            group_idx=group,
            **_place(place),
        )
    extra = block.extra_keys
    return vllm_api.BlockStored(
        block_hashes=_hashes(hashes),
        parent_block_hash=None if block.parent is None else vllm_api.event_hash(block.parent),
        token_ids=block.token_ids.tolist(),
        block_size=block.block_size,
        lora_id=block.lora_id,
        lora_name=block.lora_name,
        extra_keys=None if extra is None else [_as_tuple(keys) for keys in extra],
        group_idx=group,
        kv_cache_spec_kind=block.kind,
        kv_cache_spec_sliding_window=block.window,
        **_place(place),
    )


def _as_tuple(value: Any) -> Any:
    """vLLM hashes its events, so their lists of keys are tuples. Those from a disk are lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, (list, tuple)) else value


def _removed(change: RemovedBlocks) -> Iterable[Any]:
    groups: dict[int, list[bytes]] = {}
    for group, block_hash in change.blocks:
        groups.setdefault(group, []).append(block_hash)
    for group, hashes in groups.items():
        yield vllm_api.BlockRemoved(
            block_hashes=_hashes(hashes), group_idx=group, **_place(change.place)
        )
