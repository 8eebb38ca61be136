"""Measures, prints and saves the speed of tiers on disk, beside `fio` and vLLM's own tier."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvtier.config.sizes import as_size
from tests.bench import fio
from tests.bench.disk_rounds import (
    COLD,
    FIO_DEPTH,
    IO_URING,
    JOB_BYTES,
    JOBS_AT_ONCE,
    PSYNC,
    ROUNDS,
    SIZES,
    VLLM,
    Contender,
    Measured,
    What,
    disk_rounds,
    ratios,
    typical,
    with_spread,
)
from tests.bench.report import print_table, save, scratch_directory, verdict, verdict_at_least

ABSENT = "-"
"""Cell without a figure."""


@dataclass(frozen=True)
class Bars:
    """Limits by block size. A size without a limit is not judged."""

    to_fio: Mapping[int, float] = field(default_factory=dict)
    """Least ratio to the faster of psync and io_uring, under full load."""
    loads_to_vllm: Mapping[int, float] = field(default_factory=dict)
    """Least ratio of read speeds to vLLM's."""
    stores_to_vllm: Mapping[int, float] = field(default_factory=dict)
    cpu_to_vllm: float | None = None
    """Largest ratio of processor times to vLLM's."""

    def to_vllm(self, what: What) -> float | None:
        bars = self.loads_to_vllm if what.is_load else self.stores_to_vllm
        return bars.get(what.block_bytes)


@dataclass(frozen=True)
class Speeds:
    """A benchmark of tiers on disk."""

    name: str
    who_is_compared: str
    """Explains the contenders in the output."""
    contenders: Mapping[str, Contender]
    tier_bytes: int
    sizes_alone: Container[int]
    """Block sizes for which one request at a time is measured, too."""
    bars: Bars
    limits: Sequence[str] = (PSYNC, IO_URING)
    """Runs of fio to measure; `COLD` may be added."""

    def run(self) -> None:
        fio.require_fio()
        figures: dict[What, Measured] = {}
        with (
            scratch_directory() as directory,
            disk_rounds(directory, self.tier_bytes, self.contenders) as rounds,
        ):
            for block_bytes in SIZES:
                alone = block_bytes in self.sizes_alone
                figures |= rounds.measure(block_bytes, alone, self.limits)
            about = rounds.about
        self._describe()
        print(f"About the tiers: {about}")
        ours = [each for each in self.contenders if each != VLLM]
        tables = _Tables(ours, self.limits, self.bars)
        full_load = {what: measured for what, measured in figures.items() if not what.is_alone}
        one_request = {what: measured for what, measured in figures.items() if what.is_alone}
        result = {
            "about": about,
            "full_load": tables.show_full_load(full_load),
            "processor_time": tables.show_processor_time(full_load),
            "one_request": tables.show_one_request(one_request),
        }
        save(self.name, result)

    def _describe(self) -> None:
        print(f"""
Tiers of {as_size(self.tier_bytes)}, on one file system, in turns, {ROUNDS} rounds of each.
Figures and ratios are medians over the rounds; in parentheses, the lowest and the highest.
{self.who_is_compared}
  fio        blocks at random places of one file that was written before, O_DIRECT; psync with as
             many threads as kvtier has, and io_uring at depth {FIO_DEPTH}. The better one counts.
             These use a few buffers again and again, which stay in the processor's caches. `cold`,
             where it is shown, is io_uring with as many buffers as the tiers have rows.
Full load: {JOBS_AT_ONCE} jobs of {as_size(JOB_BYTES)} at a time.
One request: one job of {as_size(JOBS_AT_ONCE * JOB_BYTES)} at a time.""")


def _megabytes(measured: Measured, names: Sequence[str]) -> list[str]:
    return [
        f"{typical(measured, name) / 1e6:,.0f}" if name in measured else ABSENT for name in names
    ]


class _Tables:
    def __init__(self, ours: Sequence[str], limits: Sequence[str], bars: Bars) -> None:
        self._ours = ours
        self._limits = limits
        self._bars = bars

    def show_full_load(self, figures: dict[What, Measured]) -> dict[str, Any]:
        columns = [*self._ours, *self._limits, VLLM]
        others = [COLD, VLLM] if COLD in self._limits else [VLLM]
        result: dict[str, Any] = {}
        speeds = []
        compared = []
        verdicts = []
        for what, measured in figures.items():
            better = max(PSYNC, IO_URING, key=lambda name: typical(measured, name))
            to_fio = self._ratios(measured, better)
            to_others = {other: self._ratios(measured, other) for other in others}
            to_vllm = to_others[VLLM]
            vllm_to_fio = ratios(measured, VLLM, better)
            speeds.append([str(what), *_megabytes(measured, columns)])
            cells = (self._cells(values) for values in (to_fio, *to_others.values()))
            compared.append(
                [str(what), *(cell for row in cells for cell in row), with_spread(vllm_to_fio)]
            )
            limit = self._bars.to_fio.get(what.block_bytes)
            if limit is not None:
                verdicts += [
                    verdict_at_least(f"{what}, {name}/fio", median(values), limit)
                    for name, values in to_fio.items()
                ]
            verdicts += self._verdicts_on_vllm(what, to_vllm, "full load")
            result[str(what)] = {
                "rounds": measured,
                "to_fio": to_fio,
                "to_others": to_others,
                "vllm_to_fio": vllm_to_fio,
            }
        print_table("Full load: MB/s", ["", *columns], speeds)
        print_table(
            "Full load: ratios",
            [
                "",
                *(f"{name}/{other}" for other in ("fio", *others) for name in self._ours),
                f"{VLLM}/fio",
            ],
            compared,
        )
        print_lines(verdicts)
        return result

    def show_one_request(self, figures: dict[What, Measured]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        rows = []
        verdicts = []
        for what, measured in figures.items():
            to_vllm = self._ratios(measured, VLLM)
            speeds = _megabytes(measured, [*self._ours, VLLM])
            rows.append([str(what), *speeds, *self._cells(to_vllm)])
            verdicts += self._verdicts_on_vllm(what, to_vllm, "one request")
            result[str(what)] = {"rounds": measured, "to_vllm": to_vllm}
        print_table("One request at a time: MB/s, and ratios", self._header(), rows)
        print_lines(verdicts)
        return result

    def show_processor_time(self, figures: dict[What, Measured]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        rows = []
        verdicts = []
        for what, measured in figures.items():
            field = "cpu_s_per_gb"
            names = [name for name in (*self._ours, VLLM) if name in measured]
            seconds = {name: typical(measured, name, field) for name in names}
            to_vllm = self._ratios(measured, VLLM, field)
            cells = [
                f"{seconds[name]:.3f}" if name in seconds else ABSENT
                for name in (*self._ours, VLLM)
            ]
            rows.append([str(what), *cells, *self._cells(to_vllm)])
            if self._bars.cpu_to_vllm is not None:
                verdicts += [
                    verdict(
                        f"{what}, processor time, {name}/vLLM",
                        median(values),
                        self._bars.cpu_to_vllm,
                    )
                    for name, values in to_vllm.items()
                ]
            result[str(what)] = {"s_per_gb": seconds, "to_vllm": to_vllm}
        print_table(
            "Full load: processor seconds per GB, of all threads, and of whoever submits and polls",
            self._header(),
            rows,
        )
        print_lines(verdicts)
        return result

    def _header(self) -> list[str]:
        return ["", *self._ours, VLLM, *(f"{name}/vLLM" for name in self._ours)]

    def _ratios(
        self, measured: Measured, to: str, field: str = "bytes_per_s"
    ) -> dict[str, list[float]]:
        return {name: ratios(measured, name, to, field) for name in self._ours if name in measured}

    def _cells(self, values: dict[str, list[float]]) -> list[str]:
        return [with_spread(values[name]) if name in values else ABSENT for name in self._ours]

    def _verdicts_on_vllm(
        self, what: What, to_vllm: dict[str, list[float]], load: str
    ) -> list[str]:
        limit = self._bars.to_vllm(what)
        if limit is None:
            return []
        return [
            verdict_at_least(f"{what}, {load}, {name}/vLLM", median(values), limit)
            for name, values in to_vllm.items()
        ]


def print_lines(lines: list[str]) -> None:
    for line in lines:
        print("  " + line)
