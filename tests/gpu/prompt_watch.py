"""Checks that a prompt's bytes are unchanged whenever vLLM's model is about to read them.

The number of requests that are computed together changes the last bits of all results, so answers
cannot be compared. Earlier results do not depend on it: a block of a prompt that is not computed
again keeps its bytes, wherever it has been.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtier.testing.vllm.in_process import BLOCK_TOKENS, InProcessEngine

_MOST_BLOCKS = 4_096


class PromptWatch:
    """Reads all blocks that a step is going to read, right before it, on the same stream.

    The first read of a block remembers its bytes, and all later ones compare. Nothing waits for the
    device before `num_wrong` is called, so bytes that come too late are seen. For one kind of
    attention only; a block that was read must not be computed again.
    """

    def __init__(self, engine: InProcessEngine) -> None:
        core = engine._engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        self._scheduler = core.scheduler
        self._caches = worker.worker.model_runner.kv_caches
        self._num_blocks = core.scheduler.kv_cache_config.num_blocks
        self._execute_model = worker.execute_model
        worker.execute_model = self._look_and_execute
        one = self._bytes_of([0])
        self._seen = one.new_empty(_MOST_BLOCKS, one.shape[1])
        self._places: dict[bytes, int] = {}
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=one.device)
        self.num_compared = 0
        """Reads of blocks."""
        self.num_busy_steps = 0
        """Steps that computed while another request waited for a load."""

    @property
    def num_wrong(self) -> int:
        return int(self._num_wrong.item())

    def _look_and_execute(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        requests = self._scheduler.requests.values()
        is_loading = any(one.status.name == "WAITING_FOR_REMOTE_KVS" for one in requests)
        if is_loading and scheduled.total_num_scheduled_tokens:
            self.num_busy_steps += 1
        for request in scheduled.scheduled_new_reqs:
            self._look(request.req_id, request.num_computed_tokens)
        running = scheduled.scheduled_cached_reqs
        for name, num_computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            self._look(name, num_computed)
        return self._execute_model(scheduled, *arguments, **options)

    def _look(self, name: str, num_computed: int) -> None:
        request = self._scheduler.requests[name]
        count = min(num_computed, request.num_prompt_tokens) // BLOCK_TOKENS
        if count == 0:
            return
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(name)
        found = self._bytes_of(blocks[:count])
        num_seen = len(self._places)
        places = [
            self._places.setdefault(bytes(key), len(self._places))
            for key in request.block_hashes[:count]
        ]
        assert len(self._places) <= _MOST_BLOCKS
        # Blocks are read in order, so new ones come last.
        num_known = sum(place < num_seen for place in places)
        self._seen[num_seen : len(self._places)] = found[num_known:]
        known = self._seen[self._on_device(places[:num_known])]
        self._num_wrong += (found[:num_known] != known).any(dim=1).sum()
        self.num_compared += num_known

    def _bytes_of(self, blocks: list[int]) -> Any:
        """A copy of these blocks, a row each."""
        on_device = self._on_device(blocks)
        layers = []
        for cache in self._caches:
            rows = cache.index_select(cache.shape.index(self._num_blocks), on_device)
            by_block = rows.movedim(cache.shape.index(self._num_blocks), 0)
            layers.append(by_block.reshape(len(blocks), -1).contiguous().view(torch.uint8))
        return torch.cat(layers, dim=1)

    def _on_device(self, numbers: list[int]) -> Any:
        on_host = torch.tensor(numbers, dtype=torch.int64)
        device = self._caches[0].device
        if device.type == "cpu":
            return on_host
        return on_host.pin_memory().to(device, non_blocking=True)
