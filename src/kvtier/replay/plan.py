"""What tiers of given sizes and speeds hold for a model, when loading beats computing, and what the
hits over a trace are at each size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import inf
from typing import Any

from kvtier.base import OffloadKey
from kvtier.replay.engine import Counting, TimedEngine
from kvtier.replay.figures import Figures
from kvtier.replay.settings import MOST_BLOCKS, ReplaySettings, TierSettings
from kvtier.replay.trace import open_trace

__all__ = [
    "ModelError",
    "ModelShape",
    "Point",
    "Sizes",
    "Sweep",
    "Target",
    "TierPlan",
    "most_hits",
    "read_model",
    "sizes_around",
]

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number of the KV cache, by the name of its type."""
_LARGEST_CONFIG = 16 << 20
_DAY_S, _YEAR_S = 86_400.0, 365.25 * 86_400


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
    num_weights: int | None = None
    """Weights that one token is multiplied with, without those of the output. None: not known."""
    pair_numbers: int = 0
    """Products of numbers of a query and of a key, and as many with those of a value, for each pair
    of tokens."""

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
    num_weights, pair_numbers = _work_of(config, num_layers)
    return ModelShape(
        num_layers, numbers, NUMBER_BYTES[dtype], has_windows, num_weights, pair_numbers
    )


def _work_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, int]:
    """See `ModelShape.num_weights` and `pair_numbers`. Unknown for models with latent attention,
    and if a number is missing."""

    def number(name: str, otherwise: int = 0) -> int:
        value = config.get(name)
        return value if type(value) is int and value > 0 else otherwise

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    wide = number("intermediate_size")
    if active := number("num_experts_per_tok"):  # a token is multiplied with these experts only
        wide = active * number("moe_intermediate_size", wide)
    if config.get("kv_lora_rank") or not (hidden and heads and wide):
        return None, 0
    head_dim = number("head_dim", hidden // heads)
    kv_heads = number("num_key_value_heads", heads)
    of_layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * wide
    return num_layers * of_layer, num_layers * heads * head_dim


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


# --- with a trace ---------------------------------------------------------------------------------

Sizes = tuple[int, ...]
"""Bytes of host memory, then of each tier."""


@dataclass(frozen=True, slots=True)
class Point:
    """The trace with one eviction policy of host memory, and one size of each place."""

    policy: str
    sizes: Sizes
    figures: Figures

    def written_per_day(self, place: int) -> float | None:
        """The bytes written to a place in a day, at the trace's rate; None if the trace is too
        short to tell. Place 0 is host memory."""
        figures = self.figures
        if figures.trace_s <= 0:
            return None
        num_bytes = figures.places[place].written_blocks * figures.block_bytes
        return num_bytes / figures.trace_s * _DAY_S

    def life_years(self, place: int, endurance: int) -> float | None:
        """The years after which `endurance` bytes are written to a place. Infinite if nothing is
        written."""
        per_day = self.written_per_day(place)
        if per_day is None:
            return None
        return endurance / per_day * _DAY_S / _YEAR_S if per_day else inf


@dataclass(frozen=True, slots=True)
class Target:
    """What sizes are to reach."""

    hit_percent: float | None = None
    ttft_s: float | None = None
    """For nine of ten requests."""

    def is_met_by(self, figures: Figures) -> bool:
        if self.hit_percent is not None and figures.hit_percent < self.hit_percent:
            return False
        if self.ttft_s is None:
            return True
        assert figures.timing is not None
        return figures.timing.p90_s <= self.ttft_s


@dataclass(slots=True)
class Sweep:
    """Replays of one trace. Each pair of policy and sizes is replayed once."""

    path: str
    settings: ReplaySettings
    block_tokens: int
    limit: int | None = None
    note_replay: Callable[[], None] = lambda: None
    """Called before each replay."""
    _points: dict[tuple[str, Sizes], Point] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """Those given."""
        settings = self.settings
        return (settings.host.num_bytes, *(tier.num_bytes for tier in settings.tiers))

    def curve(self, policy: str, place: int) -> list[Point]:
        """Replays with sizes of one place from an eighth to eight times of the one given. The other
        places keep theirs. Place 0 is host memory."""
        given = self.sizes
        return [
            self.point(policy, (*given[:place], size, *given[place + 1 :]))
            for size in self.sizes_of(place)
        ]

    def sizes_of(self, place: int) -> list[int]:
        """The sizes that are tried, in ascending order."""
        return list(sizes_around(self.sizes[place], self.settings.block_bytes(self.block_tokens)))

    def point(self, policy: str, sizes: Sizes) -> Point:
        """The replay with these sizes."""
        known = self._points.get((policy, sizes))
        if known is None:
            self.note_replay()
            known = Point(policy, sizes, self._replayed(policy, sizes))
            self._points[policy, sizes] = known
        return known

    def _replayed(self, policy: str, sizes: Sizes) -> Figures:
        settings = self.settings
        host = replace(settings.host, num_bytes=sizes[0], policy=policy)
        tiers = [
            replace(tier, num_bytes=size)
            for tier, size in zip(settings.tiers, sizes[1:], strict=True)
        ]
        chosen = replace(settings, host=host, tiers=tuple(tiers))
        kind = TimedEngine if chosen.is_timed else Counting
        run = kind(chosen, self.block_tokens)
        with open_trace(self.path, self.block_tokens) as trace:
            for _ in run.serve(islice(trace.requests(), self.limit)):
                pass
        return run.end()

    def cheapest(
        self, policies: Sequence[str], target: Target, cost: Callable[[Sizes], tuple[float, ...]]
    ) -> Point | None:
        """The cheapest point found that meets a target; None if there is none. Those of the curves
        so far are among them.

        Among the other combinations of the sizes tried, takes more memory to do no worse. So if the
        last place needs some size, it needs at least that size when the other places are smaller,
        and smaller ones are not replayed.
        """
        reaching = (
            point
            for point in self._points.values()
            if point.policy in policies and target.is_met_by(point.figures)
        )
        best = min(reaching, key=lambda point: cost(point.sizes), default=None)
        *others, last = (self.sizes_of(place) for place in range(len(self.sizes)))
        for policy in policies:
            least: dict[Sizes, int] = {}
            # The largest come first.
            for chosen in product(*(sizes[::-1] for sizes in others)):
                start = max(
                    (n for larger, n in least.items() if _covers(larger, chosen)), default=0
                )
                least[chosen] = start
                for size in last[start:]:
                    if best is not None and cost((*chosen, size)) >= cost(best.sizes):
                        break
                    point = self.point(policy, (*chosen, size))
                    if target.is_met_by(point.figures):
                        best = point
                        break
                    least[chosen] += 1
        return best


def _covers(larger: Sizes, smaller: Sizes) -> bool:
    return all(one >= other for one, other in zip(larger, smaller, strict=True))


def sizes_around(num_bytes: int, block_bytes: int) -> Iterator[int]:
    """Sizes to try: from an eighth of the given one to eight times as much, those that hold a
    block."""
    for exponent in range(-3, 4):
        size = int(num_bytes * 2.0**exponent)
        if block_bytes <= size <= MOST_BLOCKS * block_bytes:
            yield size


def most_hits(path: str, block_tokens: int, limit: int | None = None) -> float:
    """The percentage of blocks that are hits if nothing is ever evicted."""
    seen: set[OffloadKey] = set()
    num_hits = num_references = 0
    with open_trace(path, block_tokens) as trace:
        for request in islice(trace.requests(), limit):
            num_references += len(request.keys)
            num_hits += next(
                (n for n, key in enumerate(request.keys) if key not in seen), len(request.keys)
            )
            seen.update(request.keys)
    return 100 * num_hits / num_references if num_references else 0.0
