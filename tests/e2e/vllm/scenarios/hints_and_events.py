"""An engine whose requests have hints, and whose KV events have a subscriber."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.e2e.vllm.scenarios.engine import Engine
from tests.tiering import noting_tier


class HintedEngine(Engine):
    """Requests may carry `kv_transfer_params`, as those of vLLM's server do."""

    def add_with_hints(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        hints: dict[str, Any],
        salt: str | None = None,
        orders: dict[str, Any] | None = None,
    ) -> None:
        """`salt`: the request's cache_salt. `orders`: hints in its kv_hints."""
        engine = self._engine._engine
        add_request = engine.add_request

        def add_with_hints(request_id: str, inputs: Any, params: Any) -> None:
            params.extra_args = {"kv_transfer_params": hints}
            if salt is not None:
                inputs["cache_salt"] = salt
            envelope = {} if orders is None else {"kv_hints": _envelope(orders)}
            add_request(request_id, inputs, params, **envelope)

        engine.add_request = add_with_hints
        try:
            self.add(name, prompt, max_tokens)
        finally:
            engine.add_request = add_request


def _envelope(orders: dict[str, Any]) -> Any:
    """What an orchestrator passes to vLLM's Python API: an action for another component, and one
    for kvtier."""
    protocol = import_module("vllm.v1.kv_hints")
    action_type = import_module("kvtier.integrations.vllm.vllm_api").HINT_ACTION
    others = protocol.KvHintAction("1", "evict", "1", {"priority": 0, "skip": True})
    ours = protocol.KvHintAction("2", action_type, "1", orders)
    return protocol.KvHintsEnvelope("1", "message", [others, ours])


class NotedEngine(HintedEngine):
    """An engine over the tier of `tests.tiering.noting_tier`."""

    def notes(self) -> list[dict[str, Any]]:
        """All calls of the tier for requests so far."""
        (tier,) = noting_tier.TIERS
        return tier.calls

    def engines(self) -> dict[str, Any]:
        """`offloading_spec.engine` in the tier, and in a rank's spec."""
        vllm_config = self._engine._engine.vllm_config
        (tier,) = noting_tier.TIERS
        found = tier.engine
        group = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
        return {
            "is_vllms": found is vllm_config,
            "max_model_len": None if found is None else found.model_config.max_model_len,
            "of_rank": repr(group.connector_worker.spec._spec.engine),
        }


class AnnouncingEngine(HintedEngine):
    """An engine that publishes KV events, and a subscriber."""

    def __init__(self, model: str, kvtier: dict[str, Any], **engine_args: Any) -> None:
        zmq = import_module("zmq")
        self._subscriber = zmq.Context.instance().socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        # vLLM connects to an address without a wildcard.
        port = self._subscriber.bind_to_random_port("tcp://127.0.0.1")
        self._events: list[dict[str, Any]] = []
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
        }
        super().__init__(model, kvtier, kv_events_config=events, **engine_args)

    def events(self) -> list[dict[str, Any]]:
        """All events so far, one for each block: kind, medium and tier."""
        decode = import_module("msgspec").msgpack.decode
        batch_cls = import_module("vllm.distributed.kv_events").KVEventBatch
        while self._subscriber.poll(100):
            _, _, payload = self._subscriber.recv_multipart()
            for event in decode(payload, type=batch_cls).events:
                self._events += [
                    {
                        "what": type(event).__name__,
                        "where": event.medium,
                        "owner": getattr(event, "ownership", None),
                        "block": str(block),
                        "has_tokens": bool(getattr(event, "token_ids", ())),
                    }
                    for block in getattr(event, "block_hashes", ())
                ]
        return self._events

    def close(self) -> list[str]:
        self._subscriber.close(linger=0)
        return super().close()
