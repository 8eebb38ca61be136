"""Small models with random weights, and prompts for them, to run real vLLM on any machine in
seconds.

    python -m kvtier.testing.vllm.tiny_model DIR

vLLM can make random weights itself (`load_format="dummy"`), but those are so close to zero that
attention hardly changes the result, and a wrong KV cache would go unnoticed. The weights here are
about as large as trained ones, and attention is sharp: one wrong block changes the logprobs, and in
most cases the tokens.

The vocabulary consists of made-up words, one token each, so a server can take a prompt as text.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.testing.vllm.in_process import BLOCK_TOKENS

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

_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"
_TAIL_TOKENS = 8

WORDS = (_UNKNOWN, _BEGIN, _END, *(f"w{number}" for number in range(3, VOCABULARY)))
"""The text of every token, by token number. The tokenizer reads any other word as `<unk>`."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One architecture: its configuration and the names of its norms."""

    config: dict[str, Any]
    layer_norms: tuple[str, ...]
    neutral_norm: float
    """The weight that leaves a normalised value unchanged."""
    cache_tensors: int
    """Number of tensors that hold the device cache. Each has a part of every device block. The
    KV-cache groups share them."""

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
        """Size of a device block of `tokens` tokens: keys and values in float32."""
        return self.cache_tensors * tokens * 2 * KV_HEADS * HEAD * 4

    def write(self, folder: Path, seed: int = 0) -> Path:
        """Write a model for vLLM into `folder`, which must not exist, and return `folder`. The same
        seed gives the same bytes."""
        generator = np.random.default_rng(seed)
        weights = {}
        for name, shape in self.shapes():
            if len(shape) == 1:
                weights[name] = np.full(shape, self.neutral_norm, np.float32)
                continue
            # With this scale, activations keep their size from layer to layer. Weights of queries
            # and keys are larger, so that attention is sharp.
            sharpness = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            scale = np.float32(sharpness / shape[1] ** 0.5)
            weights[name] = generator.standard_normal(shape, np.float32) * scale
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        _write_safetensors(weights, folder / "model.safetensors")
        _write_tokenizer(folder)
        return folder


def _write_safetensors(weights: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """Write a header with the place of each tensor, then the tensors one after the other."""
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


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that splits at white space, one token per word, and adds nothing."""
    special = [
        {
            "id": number,
            "content": WORDS[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number in range(3)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "unk_token": _UNKNOWN,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _UNKNOWN,
        "bos_token": _BEGIN,
        "eos_token": _END,
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


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
"""Full attention: one KV-cache group. Computing 2,048 tokens takes longer than loading them."""

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


def random_prompts(
    count: int, tokens: int, seed: object, blocks_per_chunk: int = 1
) -> list[list[int]]:
    """Return prompts without a common prefix, each of at least `tokens` tokens.

    Each prompt ends a few tokens after the end of an offloaded block. So the device cache and host
    memory serve the same part of the prompt, and the engine computes the same rest.
    """
    chunk = BLOCK_TOKENS * blocks_per_chunk
    length = -(-tokens // chunk) * chunk + _TAIL_TOKENS
    # The seed is a text, because the numbers 1 and -1 would give the same prompts.
    source = random.Random(f"prompts {seed}")
    return [[source.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write a model, print what it is, and return the exit code."""
    arguments = _parse(argv)
    folder: Path = arguments.folder
    model = GEMMA3_HYBRID if arguments.hybrid else LLAMA
    try:
        model.write(folder, arguments.seed)
    except FileExistsError:
        print(
            f"{folder} exists already, and nothing was written: name a folder that does not exist, "
            "or remove this one first",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"{folder} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    print(
        f"{folder}: {model.config['architectures'][0]} with random weights. "
        f"It knows {len(WORDS) - 3} words, such as {', '.join(WORDS[3:6])} and {WORDS[-1]}."
    )
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.testing.vllm.tiny_model",
        description="Make a small model with random weights, which vLLM serves on any machine.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder to create; it must not exist"
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="with full and sliding-window attention (Gemma 3) instead of full alone (Llama)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of the weights (default: 0)"
    )
    return parser.parse_args(argv)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
