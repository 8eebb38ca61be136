"""Settings of `tests.bench.gpu_ttft`: for the H200, and small ones for any CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_GIB = 1 << 30
_MIB = 1 << 20

PLAIN = "plain"
VLLM = "vllm"
GUARD_OFF = "kvtier, guard off"
GUARD_ON = "kvtier, guard on"
FP8 = "kvtier, fp8"
LARGER = "kvtier, larger model"
"""Replaces the fp8 engine if that one does not start."""

NO_TIERS = "none"
VLLMS_TIERS = "vllm"
KVTIERS_TIERS = "kvtier"

_PATIENT = {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000, "lookup_timeout_ms": 60_000}
"""Timeouts for engines without the guard: they measure how long a load takes, so no load may time
out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of Llama's architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    max_positions: int

    def model_config(self) -> dict[str, Any]:
        """The contents of its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_positions,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }

    def bytes_per_token(self, value_bytes: int) -> int:
        """Bytes of keys and values."""
        return self.layers * 2 * self.kv_heads * self.head * value_bytes


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its model, its tiers, and their sizes."""

    name: str
    shape: Shape
    tiers: str
    lengths: tuple[int, ...]
    """Prompts to store on its disk before measuring."""
    device_bytes: int
    """Size of its KV cache. With this given, vLLM measures no free memory, so other engines do not
    matter."""
    host_bytes: int = 0
    disk_bytes: int = 0
    has_guard: bool = False
    cache_dtype: str = "auto"
    value_bytes: int = 2
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    tier_keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys for kvtier's tier."""

    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token(self.value_bytes)

    def order(self, settings: Settings, folder: Path, engine_id: str) -> dict[str, Any]:
        """The description that `tests.bench.gpu_ttft_engine` starts, as JSON."""
        engine_args = {
            **settings.engine_args,
            "kv_cache_dtype": self.cache_dtype,
            "kv_cache_memory_bytes": self.device_bytes,
            **self.engine_args,
        }
        if self.tiers == VLLMS_TIERS:
            engine_args["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": engine_id,
                "kv_connector_extra_config": {
                    **settings.vllm_spec,
                    "cpu_bytes_to_use": self.host_bytes,
                    "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "tier")}],
                },
            }
        return {
            "name": self.name,
            "folder": str(folder),
            "model_config": self.shape.model_config(),
            "engine_args": engine_args,
            "kvtier": self._kvtier_keys(folder) if self.tiers == KVTIERS_TIERS else None,
            "counts_files": self.tiers == VLLMS_TIERS,
            "warm_up_tokens": min(settings.lengths),
            "vocabulary": self.shape.vocabulary,
            "answer_tokens": settings.answer_tokens,
        }

    def _kvtier_keys(self, folder: Path) -> dict[str, Any]:
        tier = {
            "type": "disk",
            "path": str(folder / "tier" / "kv.slab"),
            "max_bytes": self.disk_bytes,
            # Prompts are stored one by one, and each must be on disk completely.
            "max_pinned_share": 1,
        }
        keys: dict[str, Any] = {
            "cpu_bytes_to_use": self.host_bytes,
            # Dummy weights cannot be identified by files.
            "cache_namespace": "gpu_ttft",
            # A reset empties host memory and leaves the blocks on disk.
            "reset_scope": "primary",
        }
        if not self.has_guard:
            keys["prefill_tokens_per_s"] = 0
            tier |= _PATIENT
        return keys | {"secondary_tiers": [tier | dict(self.tier_keys)]}


@dataclass(frozen=True, slots=True)
class Phase:
    """A sequence of rounds of one kind."""

    length: int
    engines: tuple[str, ...]
    """Engines that a round measures."""
    seconds: float
    """Estimated seconds of all its rounds; earlier phases leave this much if time is short."""
    rounds: int = 15


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration of the whole benchmark."""

    name: str
    device: str
    """Target of the bus copies, in torch's notation."""
    lengths: tuple[int, ...]
    engines: tuple[Engine, ...]
    instead: Mapping[str, Engine]
    """Replacements for engines that do not start."""
    phases: tuple[Phase, ...]
    engine_args: Mapping[str, Any]
    block_tokens: int
    vllm_spec: Mapping[str, Any]
    """Spec of vLLM's own tiering."""
    prompts: int = 2
    """Prompts of each length, used in turns."""
    answer_tokens: int = 4
    deadline_s: float = 780.0
    """Seconds since the start after which no round is begun."""
    start_limit_s: float = 240.0
    """Seconds since the start within which an engine must be ready; later ones are left out."""
    is_judged: bool = True
    """True if ratios are compared with their limits."""
    raw_chunk: int = 2 * _MIB
    raw_threads: tuple[int, ...] = (4, 8)
    raw_trial_bytes: int = _GIB
    bus_buffer: int = _GIB

    def prompt_tokens(self, length: int) -> int:
        """Tokens of a prompt: one fewer than `length`, which is a multiple of the block. A prompt
        that ends with a block would be computed from its last block on if it was on the device, and
        from its last token on if it was loaded, which gives different logprobs."""
        return length - 1

    def whole_blocks(self, length: int) -> int:
        """Whole blocks of a prompt; the rest is always computed."""
        return self.prompt_tokens(length) // self.block_tokens

    def served_tokens(self, length: int) -> int:
        return self.whole_blocks(length) * self.block_tokens

    def served_bytes(self, engine: Engine, length: int) -> int:
        return self.served_tokens(length) * engine.bytes_per_token()

    def stored_blocks(self, engine: Engine) -> int:
        """Blocks on disk once all prompts are stored."""
        return self.prompts * sum(self.whole_blocks(length) for length in engine.lengths)

    def disk_bytes(self) -> int:
        """Bytes that all engines write together, and the file for the raw disk."""
        files = sum(
            self.stored_blocks(engine) * self.block_tokens * engine.bytes_per_token()
            for engine in self.engines
            if engine.tiers == VLLMS_TIERS
        )
        return files + sum(engine.disk_bytes for engine in self.engines) + self.raw_bytes()

    def raw_bytes(self) -> int:
        """Size of the file for the raw disk."""
        largest = max(
            self.served_bytes(engine, phase.length)
            for phase in self.phases
            for engine in self.engines_of(phase)
        )
        return -(-largest // self.raw_chunk) * self.raw_chunk

    def engines_of(self, phase: Phase) -> Iterator[Engine]:
        return (engine for engine in self.engines if engine.name in phase.engines)

    def document(self) -> dict[str, Any]:
        """The settings, for the results."""
        return asdict(self)


_MAIN = (PLAIN, VLLM, GUARD_OFF, GUARD_ON)

_LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256, 131072)
_SHAPE_14B = Shape(5120, 17408, 40, 40, 8, 128, 128256, 131072)
_LENGTHS = (32_768, 8_192, 2_048)
_LENGTHS_FP8 = (32_768, 2_048)
"""Short lengths serve only for the guard's measurements."""

H200 = Settings(
    name="H200",
    device="cuda",
    lengths=_LENGTHS,
    engines=(
        Engine(PLAIN, _LLAMA_8B, NO_TIERS, (), 11 * _GIB // 2),
        Engine(VLLM, _LLAMA_8B, VLLMS_TIERS, _LENGTHS, 11 * _GIB // 2, 12 * _GIB),
        Engine(GUARD_OFF, _LLAMA_8B, KVTIERS_TIERS, _LENGTHS, 11 * _GIB // 2, 12 * _GIB, 12 * _GIB),
        Engine(
            GUARD_ON,
            _LLAMA_8B,
            KVTIERS_TIERS,
            _LENGTHS,
            11 * _GIB // 2,
            12 * _GIB,
            12 * _GIB,
            has_guard=True,
        ),
        Engine(
            FP8,
            _LLAMA_8B,
            KVTIERS_TIERS,
            _LENGTHS_FP8,
            3 * _GIB,
            11 * _GIB // 2,
            5 * _GIB,
            has_guard=True,
            cache_dtype="fp8",
            value_bytes=1,
        ),
    ),
    instead={
        FP8: Engine(
            LARGER,
            _SHAPE_14B,
            KVTIERS_TIERS,
            _LENGTHS_FP8,
            13 * _GIB // 2,
            12 * _GIB,
            12 * _GIB,
            has_guard=True,
        )
    },
    phases=(
        Phase(32_768, _MAIN, 220),
        Phase(8_192, _MAIN, 95),
        # The disk works only briefly, so that one slow answer shows.
        Phase(2_048, _MAIN, 105, rounds=20),
        Phase(32_768, (FP8, LARGER), 80),
    ),
    engine_args={
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": 16,
        "max_model_len": 40_000,
        "max_num_batched_tokens": 8_192,
        # With the KV cache's size given, vLLM only checks that this much is free at the start.
        "gpu_memory_utilization": 0.1,
        "distributed_executor_backend": "uni",
        # Asynchronous scheduling would launch the step of the second token before the first is
        # returned. That takes as long as a whole device hit.
        "async_scheduling": False,
    },
    block_tokens=16,
    vllm_spec={"spec_name": "TieringOffloadingSpec"},
)

_TINY = Shape(256, 1024, 4, 4, 2, 64, 1024, 8192)
_SMALL = Shape(320, 1024, 5, 4, 2, 80, 1024, 8192)
_TINY_LENGTHS = (2_048, 512, 256)
_TINY_LENGTHS_FP8 = (2_048, 256)

REHEARSAL = Settings(
    name="rehearsal",
    device="cpu",
    lengths=_TINY_LENGTHS,
    engines=(
        Engine(PLAIN, _TINY, NO_TIERS, (), 8 * _MIB),
        Engine(VLLM, _TINY, VLLMS_TIERS, _TINY_LENGTHS, 8 * _MIB, 16 * _MIB),
        Engine(GUARD_OFF, _TINY, KVTIERS_TIERS, _TINY_LENGTHS, 8 * _MIB, 16 * _MIB, 20 * _MIB),
        Engine(
            GUARD_ON,
            _TINY,
            KVTIERS_TIERS,
            _TINY_LENGTHS,
            8 * _MIB,
            16 * _MIB,
            20 * _MIB,
            has_guard=True,
        ),
        Engine(
            FP8,
            _TINY,
            KVTIERS_TIERS,
            _TINY_LENGTHS_FP8,
            4 * _MIB,
            8 * _MIB,
            12 * _MIB,
            has_guard=True,
            cache_dtype="fp8",
            value_bytes=1,
        ),
    ),
    instead={
        FP8: Engine(
            LARGER,
            _SMALL,
            KVTIERS_TIERS,
            _TINY_LENGTHS_FP8,
            16 * _MIB,
            32 * _MIB,
            40 * _MIB,
            has_guard=True,
        )
    },
    phases=(
        Phase(2_048, _MAIN, 30, rounds=3),
        Phase(512, _MAIN, 10, rounds=3),
        Phase(256, _MAIN, 10, rounds=3),
        Phase(2_048, (FP8, LARGER), 10, rounds=3),
    ),
    engine_args={
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 2_500,
        "max_num_batched_tokens": 512,
    },
    block_tokens=32,
    vllm_spec={
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.bench.gpu_ttft_host_spec",
    },
    is_judged=False,
    raw_chunk=1 << 18,
    raw_trial_bytes=4 * _MIB,
    bus_buffer=4 * _MIB,
)
