"""Small models with random weights, for running real vLLM on any machine in seconds.

vLLM can make weights up by itself (`load_format="dummy"`), but those are so small that attention
hardly changes the outcome: a wrong KV cache would go unnoticed. These are as large as trained
ones, and attend sharply, so that one wrong block changes the logprobs, and mostly the tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 1024
MAX_TOKENS = 8192
HIDDEN = 256
HEAD = 64
HEADS = 4
KV_HEADS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "hidden_size": HIDDEN,
    "head_dim": HEAD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One architecture: what its configuration says, and how its norms are called."""

    config: dict[str, Any]
    layer_norms: tuple[str, ...]
    neutral_norm: float
    """The weight that leaves a normed value as it is."""
    cache_tensors: int
    """How many layers' caches one device block takes up. Groups of layers share them."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight, as in a checkpoint of that architecture."""
        inner = self.config["intermediate_size"]
        yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            yield f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN)
            yield f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD, HIDDEN)
            yield f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD, HIDDEN)
            yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
            yield f"{layer}.mlp.gate_proj.weight", (inner, HIDDEN)
            yield f"{layer}.mlp.up_proj.weight", (inner, HIDDEN)
            yield f"{layer}.mlp.down_proj.weight", (HIDDEN, inner)
            for norm in self.layer_norms:
                width = HEAD if norm.startswith("self_attn") else HIDDEN
                yield f"{layer}.{norm}.weight", (width,)
        yield "model.norm.weight", (HIDDEN,)
        if not self.config["tie_word_embeddings"]:
            yield "lm_head.weight", (VOCABULARY, HIDDEN)

    def bytes_per_block(self, tokens: int) -> int:
        """Of a device block: keys and values of so many tokens, in float32."""
        return self.cache_tensors * tokens * 2 * KV_HEADS * HEAD * 4

    def write(self, folder: Path, seed: int = 0) -> Path:
        """Make `folder` a model that vLLM can load, the same for the same seed; return it."""
        generator = np.random.default_rng(seed)
        weights = {}
        for name, shape in self.shapes():
            if len(shape) == 1:
                weights[name] = np.full(shape, self.neutral_norm, np.float32)
                continue
            # Keeps the size of what passes through; queries and keys larger, to attend sharply.
            sharpness = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            scale = np.float32(sharpness / shape[1] ** 0.5)
            weights[name] = generator.standard_normal(shape, np.float32) * scale
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        _write_safetensors(weights, folder / "model.safetensors")
        return folder


def _write_safetensors(weights: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """A header that says where each tensor is, then the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, weight in weights.items():
        span = [offset, offset + weight.nbytes]
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": span}
        offset += weight.nbytes
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for weight in weights.values():
            file.write(weight.tobytes())


LLAMA = TinyModel(
    config=_COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    layer_norms=("input_layernorm", "post_attention_layernorm"),
    neutral_norm=1.0,
    cache_tensors=4,
)
"""One KV-cache group; computing 2,048 tokens takes a core the better part of a second."""

GEMMA3_HYBRID = TinyModel(
    config=_COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2,
        "sliding_window": 128,
        "query_pre_attn_scalar": HEAD,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    layer_norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
    ),
    neutral_norm=0.0,
    cache_tensors=2,
)
"""Full and sliding-window attention: three KV-cache groups over two shared tensors."""
