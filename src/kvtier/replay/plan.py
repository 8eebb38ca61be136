"""What tiers of given sizes and speeds hold for a model, and when loading beats computing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.replay.settings import TierSettings

__all__ = ["ModelError", "ModelShape", "TierPlan", "host_sizes", "read_model"]

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number of the KV cache, by the name of its type."""
_LARGEST_CONFIG = 16 << 20


class ModelError(ValueError):
    """The file does not describe a model whose KV cache is known. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the KV cache of one token consists of."""

    num_layers: int
    numbers_per_layer: int
    """Numbers that one layer keeps for each token."""
    number_bytes: int
    has_windows: bool
    """True if some layers keep only the last tokens, so that long prompts need less."""

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.numbers_per_layer * self.number_bytes


def read_model(path: str, kv_dtype: str | None = None) -> ModelShape:
    """Read a model's `config.json`, in Hugging Face's form. `kv_dtype`: the type of numbers in the
    cache; None: that of the model.

    Raises `ModelError`, and `OSError` if the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(_LARGEST_CONFIG + 1)
    try:
        config = json.loads(content) if len(content) <= _LARGEST_CONFIG else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object: give a model's config.json")
    if isinstance(config.get("text_config"), dict):  # a model that also sees or hears
        config = config | config["text_config"]
    return _shape_of(path, config, kv_dtype)


def _shape_of(path: str, config: Mapping[str, Any], kv_dtype: str | None) -> ModelShape:
    named = config.get("layer_types") or []
    if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named):
        raise ModelError(f"{path}: layer_types is not a list of names: give a model's config.json")
    kinds = set(named)
    if config.get("layers_block_type") or kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{path}: layers other than attention keep a state that does not grow with the prompt, "
            "so there is no size per token: take it from your engine's log, and give "
            "--kv-bytes-per-token"
        )
    dtype = kv_dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in NUMBER_BYTES:
        raise ModelError(
            f"{path}: numbers of type {dtype!r}: give --kv-dtype, one of {', '.join(NUMBER_BYTES)}"
        )
    num_layers = _number(path, config, "num_hidden_layers")
    if config.get("kv_lora_rank"):  # multi-head latent attention keeps one vector for all heads
        numbers = _number(path, config, "kv_lora_rank") + _number(path, config, "qk_rope_head_dim")
    else:
        num_heads = _number(path, config, "num_attention_heads")
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is not None:
            kv_heads = _number(path, config, "num_key_value_heads")
        if config.get("head_dim") is not None:
            head_dim = _number(path, config, "head_dim")
        else:
            head_dim = _number(path, config, "hidden_size") // num_heads
        numbers = 2 * (kv_heads or num_heads) * head_dim
    uses_window = config.get("use_sliding_window", True) and bool(config.get("sliding_window"))
    has_windows = "sliding_attention" in kinds or (not kinds and uses_window)
    return ModelShape(num_layers, numbers, NUMBER_BYTES[dtype], has_windows)


def _number(path: str, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        what = "is missing" if value is None else f"is {json.dumps(value)[:40]}"
        raise ModelError(
            f"{path}: {name} {what}: give the config.json of a model with attention, or "
            "--kv-bytes-per-token"
        )
    return value


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier and one model."""

    name: str
    num_bytes: int
    num_tokens: int
    num_conversations: int
    load_s: float
    """Seconds to load one conversation from this tier on its own."""
    break_even_tokens_per_s: float
    """Loading a conversation is faster than computing it if the engine computes fewer prompt tokens
    per second."""

    @staticmethod
    def of(tier: TierSettings, bytes_per_token: int, conversation_tokens: int) -> TierPlan:
        num_tokens = tier.num_bytes // bytes_per_token
        num_bytes = conversation_tokens * bytes_per_token
        load_s = tier.latency_s + num_bytes / tier.read_bytes_per_s
        return TierPlan(
            tier.name,
            tier.num_bytes,
            num_tokens,
            num_tokens // conversation_tokens,
            load_s,
            conversation_tokens / load_s,
        )


def host_sizes(num_bytes: int, block_bytes: int) -> Iterator[int]:
    """Sizes of host memory to try: from an eighth of the given one to eight times as much, those
    that hold a block."""
    for exponent in range(-3, 4):
        size = int(num_bytes * 2.0**exponent)
        if size >= block_bytes:
            yield size
