"""How a benchmark shows and keeps what it measured."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("build/bench")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be, the first one to the left."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    print(f"\n{title}")
    for row in table:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join([first, *others]).rstrip())


missed: list[str] = []
"""Figures of this run that are not what they should be."""


unmeasured: list[str] = []
"""Benchmarks of this run that could not be run here."""


def not_measured(benchmark: str, why: str) -> None:
    """Say that a benchmark cannot be run here, and the remedy."""
    print(f"\n{benchmark}: not measured, {why}")
    unmeasured.append(benchmark)


def verdict_of_all() -> str:
    """What the run has come to, if not all is well."""
    parts = {"missed": missed, "not measured": unmeasured}
    return "; ".join(f"{what}: {'; '.join(which)}" for what, which in parts.items() if which)


def run_alone(run: Callable[[], None], about: str | None) -> None:
    """What `python -m tests.bench.NAME` does: that benchmark, as `python -m tests.bench NAME`."""
    argparse.ArgumentParser(description=about).parse_args()
    run()
    if missed or unmeasured:
        raise SystemExit(verdict_of_all())


def verdict(what: str, value: float, limit: float) -> str:
    """Whether a figure that should be small is small enough. If not, the run fails in the end."""
    if value <= limit:
        return f"{what}: ok ({value:.2f}, at most {limit:.4g})"
    missed.append(what)
    return f"{what}: MISSED ({value:.2f}, at most {limit:.4g})"


def verdict_at_least(what: str, value: float, limit: float) -> str:
    """The same for a figure that should be large."""
    if value >= limit:
        return f"{what}: ok ({value:.2f}, at least {limit:.4g})"
    missed.append(what)
    return f"{what}: MISSED ({value:.2f}, at least {limit:.4g})"


def save(name: str, result: dict[str, Any], folder: Path = RESULTS) -> None:
    """Keep a result as JSON, with when and where it was measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"the results cannot be saved in {folder}: {error}") from error
    document = {
        "benchmark": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "result": result,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"  saved in {path}")
