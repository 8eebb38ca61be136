"""Compares loading a prompt from each tier with computing it, by the length of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.doctor.canary import TriedTier, as_rate
from kvtier.replay.plan import ModelShape, TierPlan
from kvtier.replay.settings import EngineSettings, TierSettings

__all__ = [
    "LENGTHS",
    "Payoff",
    "SLOW_BYTES_PER_S",
    "TierPayoff",
    "estimated_engine",
    "slow_findings",
]

LENGTHS = (512, 2048, 8192, 32_768, 131_072)
"""Tokens of prompts that are compared."""
SLOW_BYTES_PER_S = 300e6
"""A GPU that computes 5,000 prompt tokens of 64 KiB in a second makes this much KV cache. Most make
several times as much."""
_SHARE_OF_PEAK = 0.6
_STILL_USEFUL = 2.0
"""A tier that loads at a half of the speed of computing may still pay on a busy engine."""


@dataclass(frozen=True, slots=True)
class TierPayoff:
    """One tier, or host memory."""

    name: str
    load_s: Sequence[float]
    """Seconds to load a prompt of each of `LENGTHS`."""
    break_even_tokens_per_s: float
    """Loading the longest is faster than computing it below this speed of the engine."""
    pays: Sequence[bool] | None
    """For each of `LENGTHS`, whether loading is faster. None: the engine's speed is not known."""

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.name,
            "load_s": [round(seconds, 6) for seconds in self.load_s],
            "break_even_tokens_per_s": round(self.break_even_tokens_per_s, 1),
            "pays": None if self.pays is None else list(self.pays),
        }


def estimated_engine(shape: ModelShape, flops: float) -> EngineSettings | None:
    """An engine that computes this model on GPUs with this peak in all. None if the model's work is
    not known. Within a fifth of Llama-3-8B on one H200 (docs/benchmarks.md)."""
    if shape.num_weights is None:
        return None
    used = _SHARE_OF_PEAK * flops
    return EngineSettings(
        prefill_tokens_per_s=used / (2 * shape.num_weights),
        attention_s=4 * shape.pair_numbers / used,
    )


@dataclass(frozen=True, slots=True)
class Payoff:
    """What the tiers save a model."""

    bytes_per_token: int
    is_upper_bound: bool
    """True if long prompts need less than this for each token."""
    engine: EngineSettings | None
    """None: how fast it computes is not known."""
    speed_from: str
    """Where its speed comes from: "given", "configured" or "estimated"."""
    shape: ModelShape | None = None
    """The model, to estimate its speed."""

    def of(self, name: str, bytes_per_s: float, latency_s: float) -> TierPayoff:
        """`name`: that of the tier."""
        tier = TierSettings(
            name=name,
            num_bytes=self.bytes_per_token * LENGTHS[-1],
            read_bytes_per_s=bytes_per_s,
            write_bytes_per_s=bytes_per_s,
            latency_s=latency_s,
        )
        plans = [TierPlan.of(tier, self.bytes_per_token, length) for length in LENGTHS]
        load_s = [plan.load_s for plan in plans]
        pays = None
        if self.computed_s is not None:
            pays = [load < compute for load, compute in zip(load_s, self.computed_s, strict=True)]
        return TierPayoff(name, load_s, plans[-1].break_even_tokens_per_s, pays)

    @property
    def computed_s(self) -> list[float] | None:
        """Seconds to compute a prompt of each of `LENGTHS`."""
        if self.engine is None:
            return None
        return [self.engine.prefill_s(0, length) for length in LENGTHS]

    def finding(self, tried: TriedTier) -> Finding | None:
        """Whether a tier pays for this model. None if that is not known."""
        if tried.speed is None or self.computed_s is None:
            return None
        payoff = self.of(tried.at, tried.speed.load_bytes_per_s, tried.speed.latency_s)
        name, loads = f"{tried.at}.pays", as_rate(tried.speed.load_bytes_per_s)
        assert payoff.pays is not None
        needed = self.bytes_per_token * LENGTHS[-1] / self.computed_s[-1]
        if not any(payoff.pays):
            found = (
                f"it is too slow: it loads {loads}, and this model computes {as_rate(needed)} of "
                "KV cache. Loading is slower than computing at every length"
            )
            remedy = f"Leave the tier out, or use storage that reads more than {as_rate(needed)}"
            if self.speed_from == "estimated":
                found += ", if the estimate of its speed is right"
                return Finding(name, Status.WARNING, found, f"{remedy}. --prefill is more exact")
            if tried.speed.load_bytes_per_s > needed / _STILL_USEFUL:
                found += ", but it leaves the GPU to other requests on a busy engine"
                return Finding(name, Status.WARNING, found, remedy)
            return Finding(name, Status.PROBLEM, f"{found}, and engines decline its blocks", remedy)
        first = LENGTHS[payoff.pays.index(True)]
        if all(payoff.pays):
            return Finding(name, Status.OK, f"loading at {loads} is faster than computing")
        return Finding(
            name,
            Status.OK,
            f"loading at {loads} is faster than computing for prompts of {first:,} tokens, not for "
            + " and ".join(
                f"{length:,}" for length, pay in zip(LENGTHS, payoff.pays, strict=True) if not pay
            ),
        )


def slow_findings(tried: TriedTier) -> Iterator[Finding]:
    """Findings about a tier's speed that need no model."""
    speed = tried.speed
    if speed is None:
        return
    found = (
        f"loads {as_rate(speed.load_bytes_per_s)}, stores {as_rate(speed.store_bytes_per_s)}, "
        f"{speed.latency_s * 1e3:.1f} ms before the first byte"
    )
    name = f"{tried.at}.speed"
    if speed.load_bytes_per_s >= SLOW_BYTES_PER_S:
        yield Finding(name, Status.OK, found)
    else:
        yield Finding(
            name,
            Status.WARNING,
            f"it is slow: {found}. Few models compute their KV cache as slowly as that",
            "Use a faster disk or network. --model and --prefill compare it with your model",
        )
