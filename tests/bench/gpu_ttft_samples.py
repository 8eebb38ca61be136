"""Measurements of single runs, and the statistics over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from statistics import median, quantiles
from typing import Any

from tests.bench.gpu_ttft_settings import KVTIERS_TIERS, Engine, Phase, Settings

RECOMPUTED = "recomputed"
DEVICE = "device hit"
HOST = "host hit"
DISK = "disk hit"
EMPTIED = "host emptied"
"""A prompt on disk, which kvtier loads or lets vLLM compute, as its guard decides."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer of an engine that takes a prompt, which it has computed, from its device cache."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    round: int
    prompt: int
    seconds: float
    cached_tokens: int
    counted: dict[str, float]
    is_in_place: bool
    """True if the prompt came from the expected place."""
    has_same_tokens: bool
    logprob_difference: float
    """Largest difference of a logprob from the reference; infinite if tokens differ or a logprob is
    not a number."""


@dataclass(slots=True)
class Spread:
    """Seconds of one figure."""

    values: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        if not self.values:
            return {"runs": 0}
        low, high = quartiles(self.values)
        return {
            "runs": len(self.values),
            "median_s": median(self.values),
            "lowest_s": min(self.values),
            "quartiles_s": [low, high],
            "highest_s": max(self.values),
            "seconds": self.values,
        }


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


class PhaseSamples:
    """All runs of a phase."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.num_rounds = 0
        self.num_bytes = 0
        """Seconds of the bus and of the raw disk for the bytes of one prompt."""
        self.by_figure: dict[tuple[str, str], list[Sample]] = {}
        """By engine and figure."""
        self.bus = Spread()
        self.raw_disk = Spread()

    def add(self, engine: str, figure: str, sample: Sample) -> None:
        self.by_figure.setdefault((engine, figure), []).append(sample)

    def samples(self, engine: str, figure: str) -> list[Sample]:
        return self.by_figure.get((engine, figure), [])

    def spread(self, engine: str, figure: str) -> Spread:
        """Spread of the runs that came from the expected place."""
        samples = self.samples(engine, figure)
        return Spread([sample.seconds for sample in samples if sample.is_in_place])

    def median(self, engine: str, figure: str) -> float | None:
        values = self.spread(engine, figure).values
        return median(values) if values else None

    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.phase.length,
            "rounds": self.num_rounds,
            "bytes": self.num_bytes,
            "bus": self.bus.document(),
            "raw_disk": self.raw_disk.document(),
            "engines": {
                name: {
                    figure: self.spread(name, figure).document() | _checks(samples)
                    for (engine, figure), samples in self.by_figure.items()
                    if engine == name
                }
                for name in dict.fromkeys(engine for engine, _ in self.by_figure)
            },
        }


def _checks(samples: list[Sample]) -> dict[str, Any]:
    return {
        "from_elsewhere": sum(not sample.is_in_place for sample in samples),
        "other_tokens": sum(not sample.has_same_tokens for sample in samples),
        "other_logprobs": sum(sample.logprob_difference > 0 for sample in samples),
        "cached_tokens": median(sample.cached_tokens for sample in samples),
        "raw": [
            {
                "round": sample.round,
                "prompt": sample.prompt,
                "seconds": sample.seconds,
                "cached_tokens": sample.cached_tokens,
                "counted": sample.counted,
                "in_place": sample.is_in_place,
                "same_tokens": sample.has_same_tokens,
                # JSON has no infinity.
                "logprob_difference": sample.logprob_difference if sample.has_same_tokens else None,
            }
            for sample in samples
        ],
    }


def sample_of(
    answer: dict[str, Any],
    *,
    round_: int,
    prompt: int,
    is_in_place: bool,
    reference: Reference | None,
) -> Sample:
    """Compare a run with the reference."""
    same, difference = False, float("inf")
    if reference is not None:
        same = answer["answer"] == reference.tokens and all(map(isfinite, answer["logprobs"]))
        if same:
            pairs = zip(answer["logprobs"], reference.logprobs, strict=True)
            difference = max(abs(ours - theirs) for ours, theirs in pairs)
    return Sample(
        round_,
        prompt,
        answer["seconds"],
        answer["cached_tokens"],
        answer["counted"],
        is_in_place,
        same,
        difference,
    )


def is_in_place(
    answer: dict[str, Any], figure: str, engine: Engine, settings: Settings, length: int
) -> bool:
    """True if the run was served from where its figure says, as far as the engine reports that."""
    cached, whole = answer["cached_tokens"], settings.served_tokens(length)
    if figure == EMPTIED:
        return True
    if figure == RECOMPUTED:
        return bool(cached == 0)
    if cached != whole:
        return False
    if engine.tiers != KVTIERS_TIERS:
        return True
    blocks = settings.whole_blocks(length)
    loaded = answer["counted"].get("cpu_loaded_blocks", 0)
    promoted = answer["counted"].get("cpu_promoted_blocks", 0)
    expected = {DEVICE: (0, 0), HOST: (blocks, 0), DISK: (blocks, blocks)}[figure]
    return bool((loaded, promoted) == expected)
