"""The reference engine with a status socket, and questions to it."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.base import OffloadingManager
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.engine import Engine
from kvtier.engine.offloading import Connector, make_connector, offloading_config
from kvtier.engine.request import RequestResult
from kvtier.observe.client import ask
from kvtier.tiering.manager import TieringOffloadingManager

BLOCK = 16
MODEL = ModelConfig(
    num_layers=1, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_hidden=32
)
ROW_BYTES = BLOCK * MODEL.kv_bytes_per_token_and_layer
PAGE_BYTES = 4096
"""Rows are whole pages."""


class ExplainedEngine:
    """An engine, whose prompts are given as numbers: equal numbers are equal prompts."""

    def __init__(
        self,
        run_dir: Path,
        *tiers: Mapping[str, Any],
        host_blocks: int = 64,
        device_blocks: int = 256,
        token_budget: int = 512,
        **options: Any,
    ) -> None:
        self.socket = run_dir / f"{uuid.uuid4().hex[:12]}.sock"
        engine = EngineConfig(num_blocks=(device_blocks,), token_budget=token_budget)
        row_bytes = -(-ROW_BYTES // PAGE_BYTES) * PAGE_BYTES
        keys: dict[str, Any] = {
            "cpu_bytes_to_use": host_blocks * row_bytes,
            "prefill_tokens_per_s": 0,
            "status_socket": str(self.socket),
            "secondary_tiers": list(tiers),
            "cache_namespace": "explained",
            **options,
        }
        config = offloading_config(
            MODEL, engine, keys, uuid.uuid4().hex, enable_kv_cache_events=True
        )
        self.connector: Connector = make_connector(config)
        self.engine = Engine(MODEL, engine, self.connector)

    def __enter__(self) -> ExplainedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    @property
    def manager(self) -> OffloadingManager:
        scheduler: Any = self.connector.scheduler
        manager: OffloadingManager = scheduler.manager
        return manager

    def tier(self, position: int = 0) -> Any:
        assert isinstance(self.manager, TieringOffloadingManager)
        return self.manager.secondary_tiers[position]

    # --- work -----------------------------------------------------------------------------------

    def serve(
        self, tokens: Sequence[int], *, cold: bool = True, drain: bool = True, **params: Any
    ) -> RequestResult:
        """Serve one prompt, without what the device has if `cold`. `params`: the hints."""
        if cold:
            self.engine.drop_device_cache()
        (result,) = self.engine.generate(
            [list(tokens)], max_tokens=1, kv_transfer_params=params or None
        )
        if drain:
            assert self.engine.drain()
        return result

    def slow_down(self, seconds: float) -> None:
        """Let each run of the model take this much longer."""
        run = self.engine.model.run

        def slowly(*args: Any) -> Any:
            time.sleep(seconds)
            return run(*args)

        self.engine.model.run = slowly  # type: ignore[method-assign,assignment]

    def settle(self) -> None:
        assert self.engine.drain()

    def step(self, seconds: float = 0.0) -> None:
        """Steps for this time, and at least one."""
        until = time.monotonic() + seconds
        self.engine.step()
        while time.monotonic() < until:
            self.engine.step()

    # --- questions ------------------------------------------------------------------------------

    def ask(self, **question: Any) -> dict[str, Any]:
        return ask(self.socket, "explain", **question)

    def explain(self, request: RequestResult | str | None = None) -> dict[str, Any]:
        """The explanation of a request; None: of the last one."""
        if request is None:
            (found,) = self.ask(last=1)["requests"]
        else:
            name = request if isinstance(request, str) else request.request_id
            (found,) = self.ask(request=name)["requests"]
        explained: dict[str, Any] = found
        return explained

    def why(self, request: RequestResult | str | None = None) -> dict[str, dict[str, Any]]:
        """The reasons, by name. Each has a sentence."""
        reasons = self.explain(request)["why"]
        assert reasons
        assert all(reason["text"].endswith(".") for reason in reasons), reasons
        return {reason["reason"]: reason for reason in reasons}


def prompt(number: int, num_blocks: int = 6, extra: int = 4) -> list[int]:
    """A prompt of full blocks and some tokens more. Prompts with one number begin alike."""
    rng = random.Random(number)
    return [rng.randrange(256) for _ in range(num_blocks * BLOCK + extra)]


def command_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": "src"}
