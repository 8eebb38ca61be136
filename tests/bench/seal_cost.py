"""What a seal costs a tier's I/O thread, with and without keys, beside the bare digest and a copy
of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from kvtier import seal
from kvtier.base import make_offload_key
from kvtier.seal.keys import SealKeys
from tests.bench.report import print_table, run_alone, save

KiB = 1024
SIZES = (4 * KiB, 64 * KiB, 256 * KiB, 1024 * KiB, 4096 * KiB)
BYTES = 1 << 27
"""Bytes used in each round: more than the processor's caches hold, as in a tier."""
ROUNDS = 7
OPERATIONS = ("copy", "digest", "seal", "verify", "sign", "verify signed")
COMPARED = [(what, to) for what in OPERATIONS[2:] for to in ("digest", "copy")]
FINGERPRINT = bytes(range(16))
WRITER = "bench"


def nanoseconds_each(call: Callable[[int], object], num_blocks: int) -> float:
    start = time.perf_counter_ns()
    for block in range(num_blocks):
        call(block)
    return (time.perf_counter_ns() - start) / num_blocks


def measure(size: int) -> dict[str, list[float]]:
    """Nanoseconds per block, one figure for each round."""
    num_blocks = BYTES // size
    source = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8).data
    target = memoryview(bytearray(BYTES))
    rows = [source[i * size : (i + 1) * size] for i in range(num_blocks)]
    places = [target[i * size : (i + 1) * size] for i in range(num_blocks)]
    keys = [make_offload_key(i.to_bytes(8, "big") * 4, 0) for i in range(num_blocks)]
    seals = [seal.make(*block, FINGERPRINT, WRITER) for block in zip(keys, rows, strict=True)]

    def copy(block: int) -> None:
        places[block][:] = rows[block]

    def digest(block: int) -> None:
        xxh3_128_digest(rows[block])

    def make(block: int) -> None:
        seal.make(keys[block], rows[block], FINGERPRINT, WRITER)

    def check(block: int) -> None:
        assert seal.check(seals[block], rows[block], keys[block], FINGERPRINT) is None

    signers = SealKeys([bytes(range(32))])
    signed = [
        seal.make(*block, FINGERPRINT, WRITER, signers) for block in zip(keys, rows, strict=True)
    ]

    def sign(block: int) -> None:
        seal.make(keys[block], rows[block], FINGERPRINT, WRITER, signers)

    def check_signed(block: int) -> None:
        assert seal.check(signed[block], rows[block], keys[block], FINGERPRINT, signers) is None

    calls = dict(zip(OPERATIONS, (copy, digest, make, check, sign, check_signed), strict=True))
    spent: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(ROUNDS):
        for what, call in calls.items():
            spent[what].append(nanoseconds_each(call, num_blocks))
    return spent


def ratios(spent: dict[str, list[float]], what: str, to: str) -> list[float]:
    """Ratios within each round, so that a busy moment of the machine affects both."""
    return [ours / bare for ours, bare in zip(spent[what], spent[to], strict=True)]


def with_spread(figures: Sequence[float]) -> str:
    return f"{median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def run() -> None:
    result: dict[str, Any] = {}
    speeds = []
    compared = []
    for size in SIZES:
        spent = measure(size)
        name = f"{size // KiB} KiB"
        typical = {what: median(figures) for what, figures in spent.items()}
        speeds.append(
            [
                name,
                *(f"{size / typical[what]:.1f}" for what in typical),
                *(f"{typical[what]:,.0f}" for what in ("digest", "seal", "verify")),
            ]
        )
        ratio = {f"{what}_to_{to}": ratios(spent, what, to) for what, to in COMPARED}
        compared.append([name, *(with_spread(figures) for figures in ratio.values())])
        result[name] = {
            "ns_per_block": typical,
            "ratio": {which: median(figures) for which, figures in ratio.items()},
            "rounds_ns": spent,
        }
    print_table(
        "Seals, one thread, blocks not in the caches: GB/s, and ns per block",
        ["block", *OPERATIONS, "digest ns", "seal ns", "verify ns"],
        speeds,
    )
    print_table(
        f"Seals against the bare digest (xxh3-128) and a copy: median of {ROUNDS} rounds (spread)",
        ["block", *(f"{what}/{to}" for what, to in COMPARED)],
        compared,
    )
    save("seal_cost", result)


if __name__ == "__main__":
    run_alone(run, __doc__)
