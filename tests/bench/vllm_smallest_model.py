"""A model so small that vLLM's engine steps are short even where prompts are long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.integrations.vllm.tiny_model import LLAMA, VOCABULARY, TinyModel

_HIDDEN = 64
_HEAD = 32


@dataclass(frozen=True, slots=True)
class SmallestModel(TinyModel):
    """One layer with one narrow head."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        inner = self.config["intermediate_size"]
        layer = "model.layers.0"
        yield "model.embed_tokens.weight", (VOCABULARY, _HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.self_attn.{name}.weight", (_HEAD, _HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (_HIDDEN, _HEAD)
        yield f"{layer}.mlp.gate_proj.weight", (inner, _HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (inner, _HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (_HIDDEN, inner)
        for norm in self.layer_norms:
            yield f"{layer}.{norm}.weight", (_HIDDEN,)
        yield "model.norm.weight", (_HIDDEN,)
        yield "lm_head.weight", (VOCABULARY, _HIDDEN)

    def bytes_per_block(self, tokens: int) -> int:
        return tokens * 2 * _HEAD * 4


SMALLEST = SmallestModel(
    config=LLAMA.config
    | {
        "max_position_embeddings": 1 << 15,
        "hidden_size": _HIDDEN,
        "head_dim": _HEAD,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    },
    layer_norms=LLAMA.layer_norms,
    neutral_norm=1.0,
    cache_tensors=1,
)
