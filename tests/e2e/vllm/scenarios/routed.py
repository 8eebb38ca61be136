"""An engine whose events a router subscribes to. Runs in vLLM's process."""

from __future__ import annotations

from typing import Any

from tests.e2e.vllm.scenarios.engine import Engine


class RoutedEngine(Engine):
    """An engine that publishes KV events at an address."""

    def __init__(
        self, model: str, kvtier: dict[str, Any], endpoint: str, replay: str, **engine_args: Any
    ) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
        }
        super().__init__(model, kvtier, kv_events_config=events, **engine_args)
