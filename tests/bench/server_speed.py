"""Bytes per second, processor time, lookups and scheduler jitter of the tiers on servers, beside
clients that are used directly. The servers run on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from kvtier.config.sizes import as_size
from tests.bench.disk_rounds import (
    KVTIER,
    ROUNDS,
    Measured,
    What,
    in_turns,
    ratios,
    typical,
    with_spread,
)
from tests.bench.disk_subjects import (
    Case,
    LookUp,
    Round,
    Watch,
)
from tests.bench.report import print_table, save, verdict_at_least
from tests.bench.worker import Worker, worker

KiB, MiB = 1 << 10, 1 << 20
SIZES = (64 * KiB, 1 * MiB, 4 * MiB)
JOB_BYTES = 8 * MiB
JOBS_AT_ONCE = 8
SECONDS = 1.0
NUM_KEYS = 2048
WATCH_S = 2.0


@dataclass(frozen=True)
class Comparison:
    """A tier, its peers, and the server for all of them."""

    name: str
    subjects: Mapping[str, str]
    """`SUBJECTS` by the name shown; the tier first."""
    limit: str
    """The peer whose speed is the limit."""
    least: float
    """Least ratio to it."""
    tier_bytes: int
    stores_are_judged: bool
    about: str
    most_stored: int | None = None
    """Bytes that a round of stores writes at most: what there is room for."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The interpreters of those subjects that need another one than this."""
    rounds: int = ROUNDS
    looks_up: bool = True
    """Measure lookups and jitter, too."""


def compare(comparison: Comparison, keys: dict[str, Any]) -> None:
    """Measure, print and save. `keys`: those of the tier."""
    print(f"\n{comparison.about} Server and clients share the processors.")
    with _workers(comparison) as workers:
        speeds = {
            what: measured
            for size in SIZES
            for what, measured in _speeds(comparison, workers, keys, size)
        }
        extra = _lookups_and_jitter(workers[KVTIER], keys) if comparison.looks_up else None
    result = {"speeds": _show(comparison, speeds), "about": comparison.about}
    save(comparison.name, result | (_show_extra(extra) if extra else {}))


@contextmanager
def _workers(comparison: Comparison) -> Iterator[dict[str, Worker]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                worker(
                    comparison.pythons.get(name, sys.executable), "tests.bench.disk_load", subject
                )
            )
            for name, subject in comparison.subjects.items()
        }


def _case(keys: dict[str, Any], block_bytes: int, tier_bytes: int) -> dict[str, Any]:
    return asdict(
        Case(
            directory="",
            region=f"bench-{os.getpid()}",
            block_bytes=block_bytes,
            num_blocks=tier_bytes // block_bytes,
            job_blocks=JOB_BYTES // block_bytes,
            jobs_at_once=JOBS_AT_ONCE,
            server=json.dumps(keys),
        )
    )


def _speeds(
    comparison: Comparison, workers: dict[str, Worker], keys: dict[str, Any], block_bytes: int
) -> Iterator[tuple[What, Measured]]:
    for each in workers.values():
        each.ask({"begin": _case(keys, block_bytes, comparison.tier_bytes)})
    for is_load in (True, False):
        most_bytes = None if is_load else comparison.most_stored
        command = {"move": asdict(Round(is_load, SECONDS, most_bytes=most_bytes))}
        if most_bytes is not None:
            _touch_memory(workers.values(), 2 * most_bytes)
        subjects: dict[str, Callable[[], dict[str, float]]] = {
            name: partial(each.ask, command) for name, each in workers.items()
        }
        yield What(block_bytes, is_load), in_turns(subjects, comparison.rounds)
    for each in workers.values():
        each.ask({"end": 0})


def _touch_memory(workers: Iterable[Worker], num_bytes: int) -> None:
    """Memory that is written to for the first time is slow."""
    for each in workers:
        each.ask({"move": asdict(Round(False, 10 * SECONDS, most_bytes=num_bytes))})


def _lookups_and_jitter(tier: Worker, keys: dict[str, Any]) -> dict[str, Any]:
    """Of kvtier's tier alone, with blocks of 64 KiB."""
    tier.ask({"begin": _case(keys, 64 * KiB, NUM_KEYS * 64 * KiB)})
    jitter = {
        name: tier.ask({"watch": asdict(Watch(WATCH_S, is_busy=is_busy))})
        for name, is_busy in (("idle", False), ("busy", True))
    }
    lookups = {
        name: tier.ask({"look_up": asdict(LookUp(is_present, is_prompt=True))})
        for name, is_present in (("present", True), ("absent", False))
    }
    tier.ask({"end": 0})
    return {"jitter": jitter, "lookups": lookups}


def _show(comparison: Comparison, speeds: dict[What, Measured]) -> dict[str, Any]:
    names = list(comparison.subjects)
    peers = names[1:]
    rows, verdicts, result = [], [], {}
    for what, measured in speeds.items():
        compared = {peer: ratios(measured, KVTIER, peer) for peer in peers}
        rows.append(
            [
                str(what),
                *(f"{typical(measured, name) / 1e9:.2f}" for name in names),
                *(with_spread(values) for values in compared.values()),
                *(f"{typical(measured, name, 'cpu_s_per_gb'):.2f}" for name in names),
            ]
        )
        if what.is_load or comparison.stores_are_judged:
            to_limit = median(compared[comparison.limit])
            subject = f"{what}, kvtier/{comparison.limit}"
            verdicts.append(verdict_at_least(subject, to_limit, comparison.least))
        result[str(what)] = {"rounds": measured, "ratios": compared}
    header = [
        "",
        *(f"{name} GB/s" for name in names),
        *(f"kvtier/{peer}" for peer in peers),
        *(f"{name} CPU s/GB" for name in names),
    ]
    jobs = f"{JOBS_AT_ONCE} jobs of {as_size(JOB_BYTES)} at a time"
    print_table(f"{jobs}: medians of rounds in turns (spread)", header, rows)
    for line in verdicts:
        print(f"  {line}")
    return result


def _show_extra(extra: dict[str, Any]) -> dict[str, Any]:
    lookups = [
        [f"{name}, {which}", f"{1e3 * each['answered_s']:.1f}", f"{1e3 * each['on_thread_s']:.2f}"]
        for name, by_turn in extra["lookups"].items()
        for which, each in by_turn.items()
    ]
    header = ["", "ms until answered", "ms on the scheduler's thread"]
    print_table(f"Lookups of a prompt of {NUM_KEYS:,} blocks", header, lookups)
    points = ("p50", "p99", "max")
    jitter = [
        [
            name,
            *(f"{each[figure][point]:,.0f}" for figure in ("answer", "step") for point in points),
        ]
        for name, each in extra["jitter"].items()
    ]
    columns = [f"{figure} {point}" for figure in ("answer", "step") for point in points]
    print_table("Delay of a scheduler's step of 1 ms, in microseconds", ["", *columns], jitter)
    return extra
