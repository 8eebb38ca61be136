"""Where benchmarks write: tables and verdicts, results as JSON, and a scratch directory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RESULTS = Path("build/bench")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is aligned left, the others right."""
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
"""Figures of this run that missed their limit."""


unmeasured: list[str] = []
"""Benchmarks that could not run on this machine."""


def not_measured(benchmark: str, why: str) -> None:
    """Report that a benchmark cannot run here. `why` says what is missing, and the remedy."""
    print(f"\n{benchmark}: not measured, {why}")
    unmeasured.append(benchmark)


def verdict_of_all() -> str:
    """The message a failed run exits with."""
    parts = {"missed": missed, "not measured": unmeasured}
    return "; ".join(f"{what}: {'; '.join(which)}" for what, which in parts.items() if which)


def run_alone(run: Callable[[], None], about: str | None) -> None:
    """The command `python -m tests.bench.NAME`: the same as `python -m tests.bench NAME`."""
    argparse.ArgumentParser(description=about).parse_args()
    run()
    if missed or unmeasured:
        raise SystemExit(verdict_of_all())


def verdict(what: str, value: float, limit: float) -> str:
    """One line that says whether `value` is at most `limit`. If not, the run fails at its end."""
    if value <= limit:
        return f"{what}: ok ({value:.3g}, at most {limit:.4g})"
    missed.append(what)
    return f"{what}: MISSED ({value:.3g}, at most {limit:.4g})"


def verdict_at_least(what: str, value: float, limit: float) -> str:
    """One line that says whether `value` is at least `limit`. If not, the run fails at its end."""
    if value >= limit:
        return f"{what}: ok ({value:.3g}, at least {limit:.4g})"
    missed.append(what)
    return f"{what}: MISSED ({value:.3g}, at least {limit:.4g})"


def save(name: str, result: dict[str, Any], folder: Path = RESULTS) -> None:
    """Save a result as JSON, with the time and the machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"The results cannot be saved in {folder}: {error}") from error
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


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory on the disk to be measured: under this checkout, or under KVTIER_BENCH_DIR. It
    is removed at the end."""
    parent = Path(os.environ.get("KVTIER_BENCH_DIR", RESULTS)).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"Benchmarks cannot write in {parent}: {error}. Set KVTIER_BENCH_DIR to another folder"
        ) from error
    with TemporaryDirectory(prefix="scratch-", dir=parent) as directory:
        yield Path(directory)
