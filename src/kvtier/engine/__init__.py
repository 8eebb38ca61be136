"""A reference engine: a small, real transformer in numpy with a scheduler and a paged cache.

It shows how an engine calls `kvtier.connector`. The end-to-end tests compare its tokens and logits
with and without offloading; they must be bit-equal.

    model, config = ModelConfig(), EngineConfig()
    offloading = offloading_config(model, config, {"cpu_bytes_to_use": "1GiB"}, "my-engine")
    engine = Engine(model, config, make_connector(offloading))
    [result] = engine.generate(["Once upon a time"], max_tokens=20)
    engine.shutdown()
"""

from __future__ import annotations

from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.engine import Engine
from kvtier.engine.offloading import Connector, make_connector, offloading_config
from kvtier.engine.request import FinishReason, RequestResult

__all__ = [
    "Connector",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "ModelConfig",
    "RequestResult",
    "make_connector",
    "offloading_config",
]
