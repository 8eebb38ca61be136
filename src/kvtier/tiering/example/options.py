"""What the user may set for the example tier, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvtier.config import ConfigError, Problem
from kvtier.config.kinds import BOOLEAN, Kind, Unfit, whole_number
from kvtier.config.numbers import as_int
from kvtier.config.redaction import describe

__all__ = ["require_possible"]


def _number_between(lowest: float, highest: float, allowed: str) -> Kind[float]:
    def parse(value: object) -> float:
        number = value if isinstance(value, float) else as_int(value)
        if number is None or not math.isfinite(number) or not lowest <= number <= highest:
            raise Unfit(f"Write {allowed}, without quotes")
        return float(number)

    return Kind(allowed, parse)


_KINDS: dict[str, Kind[Any]] = {
    "max_blocks": whole_number(1),
    "simulate_async": BOOLEAN,
    "latency_ms": _number_between(0, 3_600_000, "a number of milliseconds from 0 to 3600000"),
    "loss": _number_between(0, 1, "a number from 0 (no block is lost) to 1 (every block is)"),
    "seed": whole_number(0),
}


def require_possible(options: Mapping[str, object]) -> None:
    """Raise `ConfigError` with all that is wrong."""
    refusals = [kind.refusal(key, options[key]) for key, kind in _KINDS.items()]
    problems = [problem for problem in refusals if problem is not None]
    if not problems and options["latency_ms"] and not options["simulate_async"]:
        problems = [
            Problem(
                "latency_ms",
                describe(options["latency_ms"]),
                "0 while simulate_async is false, for then the scheduler itself would wait",
                "Set simulate_async to true, or leave latency_ms out",
            )
        ]
    if problems:
        raise ConfigError(*problems)
