"""Prints the results of `tests.bench.gpu_ttft`: medians, ratios, verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from tests.bench.gpu_ttft_rounds import FIGURES
from tests.bench.gpu_ttft_samples import (
    DEVICE,
    DISK,
    EMPTIED,
    HOST,
    RECOMPUTED,
    PhaseSamples,
    Reference,
    Spread,
    quartiles,
)
from tests.bench.gpu_ttft_settings import (
    FP8,
    GUARD_OFF,
    GUARD_ON,
    LARGER,
    PLAIN,
    VLLM,
    Settings,
)
from tests.bench.report import missed, print_table, verdict

MAX_TO_IDEAL = 1.15
MAX_TO_RECOMPUTED = 1.05
MAX_WHERE_DISK_PAYS = 1.0


class Ratio(NamedTuple):
    """Ratio of two medians, with its limit if there is one."""

    what: str
    value: float | None
    limit: float | None

    def document(self) -> dict[str, object]:
        return {"what": self.what, "ratio": self.value, "at_most": self.limit}


def show(phases: list[PhaseSamples], settings: Settings) -> None:
    """Print tables, then ratios and verdicts."""
    for samples in phases:
        if samples.num_rounds:
            _show_phase(samples)
    print()
    for samples in phases:
        for ratio in ratios(samples):
            print("  " + (_told(ratio) if settings.is_judged else _shown(ratio)))
        _show_checks(samples, settings)


def _show_phase(samples: PhaseSamples) -> None:
    rows = [
        [
            engine,
            figure,
            *_cells(samples.spread(engine, figure)),
            f"{median(run.cached_tokens for run in runs):,.0f}",
            f"{sum(not run.is_in_place for run in runs)}",
        ]
        for (engine, figure), runs in samples.by_figure.items()
    ]
    rows += [
        ["machine", "bus", *_cells(samples.bus), "", ""],
        ["machine", "raw disk", *_cells(samples.raw_disk), "", ""],
    ]
    print_table(
        f"Prompts of {samples.phase.length:,} tokens, {samples.num_bytes / 1e6:,.1f} MB of blocks: "
        "milliseconds to the first token",
        ["engine", "from", "median", "quartiles", "spread", "runs", "tokens", "elsewhere"],
        rows,
    )


def _cells(spread: Spread) -> list[str]:
    values = spread.values
    if not values:
        return ["", "", "", "0"]
    low, high = quartiles(values)
    return [
        f"{median(values) * 1e3:.1f}",
        f"{low * 1e3:.1f} to {high * 1e3:.1f}",
        f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
        f"{len(values)}",
    ]


def ratios(samples: PhaseSamples) -> Iterator[Ratio]:
    """The ratios that are shown for a phase."""
    tokens = f"{samples.phase.length:,} tokens"
    get = samples.median
    if GUARD_OFF in samples.phase.engines:
        device = get(GUARD_OFF, DEVICE)
        for figure, raw, name in (
            (HOST, samples.bus, "bus"),
            (DISK, samples.raw_disk, "raw disk"),
        ):
            ideal = _sum(device, median(raw.values) if raw.values else None)
            what = f"{figure}, guard off, to device hit + {name}"
            yield Ratio(f"{tokens}: {what}", _ratio(get(GUARD_OFF, figure), ideal), MAX_TO_IDEAL)
        yield Ratio(
            f"{tokens}: host emptied, guard on, to recomputed",
            _ratio(get(GUARD_ON, EMPTIED), get(PLAIN, RECOMPUTED)),
            MAX_TO_RECOMPUTED,
        )
        for figure in (DEVICE, HOST, DISK):
            value = _ratio(get(GUARD_OFF, figure), get(VLLM, figure))
            yield Ratio(f"{tokens}: {figure}, kvtier to vLLM", value, None)
        for engine in (VLLM, GUARD_OFF):
            value = _ratio(get(engine, DISK), get(PLAIN, RECOMPUTED))
            yield Ratio(f"{tokens}: disk hit, {engine}, to recomputed", value, None)
    else:
        engines = [engine for engine in (FP8, LARGER) if samples.samples(engine, DISK)]
        for engine in engines or [FP8]:
            yield Ratio(
                f"{tokens}, {engine}: disk hit to recomputed",
                _ratio(get(engine, DISK), get(engine, RECOMPUTED)),
                MAX_WHERE_DISK_PAYS,
            )


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _shown(ratio: Ratio) -> str:
    return f"{ratio.what}: " + ("not measured" if ratio.value is None else f"{ratio.value:.2f}")


def _told(ratio: Ratio) -> str:
    if ratio.limit is None:
        return _shown(ratio)
    if ratio.value is None:
        missed.append(f"gpu_ttft, {ratio.what}")
        return _shown(ratio)
    return verdict(f"gpu_ttft, {ratio.what}", ratio.value, ratio.limit)


def _show_checks(samples: PhaseSamples, settings: Settings) -> None:
    """Print unexpected results, and the decisions of the guard."""
    tokens = f"{samples.phase.length:,} tokens"
    for (engine, figure), runs in samples.by_figure.items():
        what = f"{tokens}, {engine}, {figure}"
        of_round = sum(each == figure for each, _ in FIGURES[engine])
        if len(runs) < (expected := of_round * samples.phase.rounds):
            print(f"  {what}: {len(runs)} runs, not {expected}")
        if figure == EMPTIED:
            loaded = sum(run.cached_tokens > samples.phase.length / 2 for run in runs)
            print(f"  {what}: loaded {loaded} times, computed {len(runs) - loaded} times")
        elsewhere = sum(not run.is_in_place for run in runs)
        if elsewhere:
            print(f"  {what}: {elsewhere} of {len(runs)} runs did not come from there")
            missed.append(f"gpu_ttft, {what}: runs that came from elsewhere")
        # Larger steps round differently, which may change a token.
        loads = [
            run for run in runs if run.cached_tokens == settings.served_tokens(samples.phase.length)
        ]
        other_tokens = sum(not run.has_same_tokens for run in loads)
        other_logprobs = sum(run.logprob_difference > 0 for run in loads)
        if other_logprobs:
            print(
                f"  {what}: {other_tokens} of {len(loads)} answers have other tokens, "
                f"{other_logprobs} other logprobs, than from the device"
            )
            missed.append(f"gpu_ttft, {what}: other answers than from the device")


def show_references(references: dict[tuple[str, int, int], Reference]) -> None:
    """Print whether engines with the same model and cache give the same answers, with and without
    tiers."""
    compared = differing = 0
    for (engine, length, number), reference in references.items():
        plain = references.get((PLAIN, length, number))
        if engine in {VLLM, GUARD_OFF, GUARD_ON} and plain is not None:
            compared += 1
            differing += reference != plain
    print(
        f"  device hits of engines with tiers: {compared - differing} of {compared} answers, "
        "tokens and logprobs, are those of the plain engine"
    )
