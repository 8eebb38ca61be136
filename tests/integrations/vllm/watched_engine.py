"""An engine that shows what kvtier's connector keeps, hears, and passes on."""

from __future__ import annotations

from typing import Any

from tests.e2e.vllm.scenarios.faulty_transfers import FaultyEngine
from tests.integrations.vllm.counting_tier import ASKED_FOR


class WatchedEngine(FaultyEngine):
    """Its copies can be made to fail, or to wait."""

    def __init__(self, model: str, kvtier: dict[str, Any], **engine_args: Any) -> None:
        super().__init__(model, kvtier, **engine_args)
        clock = self._connector._clock
        self._prefills: list[tuple[int, float, bool]] = []
        note_prefill = clock._note_prefill

        def note(num_tokens: int, mean_position: float, seconds: float) -> None:
            self._prefills.append((num_tokens, mean_position, seconds > 0))
            note_prefill(num_tokens, mean_position, seconds)

        clock._note_prefill = note

    @property
    def _connector(self) -> Any:
        return self._engine._scheduler.connector

    def kept(self) -> dict[str, int]:
        """The sizes of all tables that have to do with single requests, where there are any."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector, rank = self._connector, get_kv_transfer_group()
        adapter, worker = connector._manager, rank.connector_worker.worker
        sizes = {
            "connector: loads": len(connector._loading),
            "connector: steps": len(connector._clock._under_way),
            "manager: requests": len(adapter._requests),
            "kvtier's manager: requests": len(getattr(adapter.inner, "_requests", ())),
            "rank: failed blocks": len(rank._failed_blocks),
            "rank: failed requests": len(rank._failed_requests),
            "worker: loads": len(worker._loads),
            "worker: stores": len(worker._stores),
            "worker: lost": len(worker._lost),
        }
        return {name: size for name, size in sizes.items() if size}

    def prefills(self) -> list[tuple[int, float, bool]]:
        """What kvtier was told of steps that computed prompts: tokens, mean position, and whether
        they took time."""
        return self._prefills

    def expected_prompts(self) -> list[int | None]:
        """What kvtier knows of the length of the prompts that are not answered yet."""
        requests = self._connector._manager._requests.values()
        return [request.context.num_prompt_tokens for request in requests]

    def lookups_behind_a_miss(self, num_keys: int) -> int:
        """How many of these blocks, which are nowhere, the tier is asked for in one step."""
        from kvtier.base import make_offload_key
        from kvtier.integrations.vllm import vllm_api

        manager = self._connector._manager
        context = vllm_api.ReqContext("a prompt that nobody has computed")
        manager.on_new_request(context)
        before = len(ASKED_FOR)
        for number in range(num_keys):
            manager.lookup(make_offload_key(number.to_bytes(32, "big"), 0), context)
        manager.on_request_finished(context)
        return len(ASKED_FOR) - before
