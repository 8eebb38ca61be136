"""The disk tier of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.demo.settings import WARM_UP_TOKENS, Prompt, engine_config, num_blocks_of
from kvtier.engine import ModelConfig
from kvtier.engine.cache import array_page_bytes
from kvtier.tiering.disk.layout import Geometry

__all__ = ["disk_tier"]


def disk_tier(path: Path, model: ModelConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """An entry of `secondary_tiers`: a slab file with room for all blocks of these prompts.

    It has all the time it wants: on a busy machine a deadline would say something about the
    machine.
    """
    # For what warms the engine up, a slot for each token is more than enough.
    num_slots = (sum(map(num_blocks_of, prompts)) + WARM_UP_TOKENS) * len(model.groups)
    block_bytes = sum(array_page_bytes(model, engine_config(model, prompts)))
    return {
        "type": "disk",
        "path": str(path),
        "max_bytes": Geometry(block_bytes, num_slots).needed_bytes,
        "max_pinned_share": 0.5,
        "load_timeout_ms": 60_000,
        "store_timeout_ms": 60_000,
    }
