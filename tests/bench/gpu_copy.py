"""The CUDA worker: bandwidth, cost on the engine's thread, and cost for the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.cpu.cuda.copies import choose_path
from tests.bench.gpu_here import gpu_for
from tests.bench.report import RESULTS, print_table, run_alone, save, verdict, verdict_at_least

KIB = 1 << 10
NUM_BYTES = 1 << 30
MIN_SHARE = {16: 0.90, 64: 0.90, 256: 0.85, 1024: 0.90, 2048: 0.90}
"""Least share of one plain pinned copy, by KiB of a page, in each direction."""
LAYERED = ((16, 32), (64, 32))
"""KiB of a page, and tensors: engines with a tensor for each layer."""
MAX_SLOWDOWN = {"copy engines": 1.03, "kernel and engines": 1.06, "kernel alone": 1.06}
MAX_ENQUEUE_US_PER_PAGE = 1.0
MAX_ENQUEUE_US = 100.0


def run(results: Path = RESULTS) -> None:
    if (device := gpu_for("gpu_copy")) is None:
        return
    import torch

    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device)}
    for name, part in (
        ("bandwidth", bandwidth),
        ("enqueue", enqueue),
        ("busy_engine", busy_engine),
        ("beside_gemm", beside_gemm),
    ):
        document[name] = part(device)
        save("gpu_copy", document, results)  # after each part, in case a later one fails


def bandwidth(device: Any) -> dict[str, Any]:
    from kvtier.cpu.cuda.trial import measure, measure_plain_copy

    peak = measure_plain_copy(device, NUM_BYTES)
    rows = [["one plain copy", *(f"{rate:.1f}" for rate in peak), "", "", "", ""]]
    result: dict[str, Any] = {"plain": peak._asdict()}
    lines = []
    layouts = [(kib, 1) for kib in MIN_SHARE] + list(LAYERED)
    for kib, num_tensors in layouts:
        got = measure(device, kib * KIB, num_tensors, NUM_BYTES)
        pages_of_a_job = NUM_BYTES // (4 * kib * KIB)
        path = choose_path(kib * KIB, pages_of_a_job, num_tensors * kib * KIB).words
        shares = [rate / of for rate, of in zip(got, peak, strict=True)]
        name = f"{kib} KiB" if num_tensors == 1 else f"{kib} KiB, {num_tensors} layers"
        result[name] = got._asdict() | {
            "path": path,
            "shares": dict(zip(got._fields, shares, strict=True)),
        }
        rows.append([name, *(f"{r:.1f}" for r in got), *(f"{s:.3f}" for s in shares), path])
        if num_tensors == 1:
            for direction, share in zip(("to the GPU", "from the GPU"), shares, strict=False):
                what = f"gpu_copy, {name} pages {direction}, share of the pinned peak"
                lines.append(verdict_at_least(what, share, MIN_SHARE[kib]))
    print_table(
        f"GB/s with {NUM_BYTES >> 20} MiB of scattered pages, shares of one plain pinned copy",
        ["page", "load", "store", "both", "of peak", "of peak", "of both", "copied by"],
        rows,
    )
    print("\n".join(f"  {line}" for line in lines), flush=True)
    return result


def enqueue(device: Any) -> dict[str, Any]:
    from tests.bench.gpu_engine_thread import SUBMITTED, submit_us

    rows, lines, result = [], [], {}
    for kib, num_tensors, num_blocks in SUBMITTED:
        pages = num_tensors * num_blocks
        name = f"{num_blocks} blocks of {num_tensors} x {kib} KiB"
        loads, stores = submit_us(device, kib * KIB, num_tensors, num_blocks)
        result[name] = {"pages": pages, "load_us": loads, "store_us": stores}
        worst = max(loads, stores)
        rows.append([name, f"{loads:.1f}", f"{stores:.1f}", f"{worst * 1e3 / pages:.0f}"])
        if pages == 64:
            lines.append(verdict(f"gpu_copy, us to submit {name}", worst, MAX_ENQUEUE_US))
        else:
            what = f"gpu_copy, us per page of {name}"
            lines.append(verdict(what, worst / pages, MAX_ENQUEUE_US_PER_PAGE))
    print_table(
        "microseconds of the host to submit a job, medians",
        ["job", "load", "store", "ns per page"],
        rows,
    )
    print("\n".join(f"  {line}" for line in lines), flush=True)
    return result


def busy_engine(device: Any) -> dict[str, Any]:
    from tests.bench.gpu_engine_thread import LAYOUTS, rates

    rows, result = [], {}
    for kib, num_tensors in LAYOUTS:
        for is_store in (False, True):
            found = rates(device, kib * KIB, num_tensors, is_store)
            name = f"{kib} KiB, {num_tensors} layers, {'store' if is_store else 'load'}"
            result[name] = found._asdict()
            share = found.busy / found.waiting
            rows.append([name, f"{found.waiting:.1f}", f"{found.busy:.1f}", f"{share:.2f}"])
    print_table(
        "GB/s of one job of 1 GiB, while the engine's thread waits and while it is busy in Python",
        ["pages", "waiting", "busy", "ratio"],
        rows,
    )
    return result


def beside_gemm(device: Any) -> dict[str, Any]:
    from tests.bench.gpu_beside import PATHS, SHAPES, beside

    rows, lines, result = [], [], {}
    for way, (page_bytes, num_tensors, path) in PATHS.items():
        for is_store in (False, True):
            for shape in SHAPES:
                num_rounds = 15 if shape == SHAPES[0] else 6
                found = beside(device, shape, (page_bytes, num_tensors), path, is_store, num_rounds)
                direction = "store" if is_store else "load"
                name = f"{way}, {direction}, {'x'.join(map(str, shape))}"
                result[name] = found
                rows.append(
                    [
                        name,
                        f"{found['alone_ms']:.3f}",
                        f"{found['beside_ms']:.3f}",
                        f"{found['slowdown']:.3f}",
                        f"{found['plain_slowdown']:.3f}",
                        f"{found['to_plain']:.3f}",
                        f"{found['copy_gb_s']:.1f}",
                        f"{found['copy_alone_gb_s']:.1f}",
                    ]
                )
                if shape == SHAPES[0]:
                    what = f"gpu_copy, GEMM beside the {way}, {direction}"
                    lines.append(verdict(what, found["slowdown"], MAX_SLOWDOWN[way]))
    print_table(
        "a loop of bf16 matrix products, alone and beside copies that never pause, medians\n"
        "  (plain: beside copies of memory in one piece)",
        [
            "beside, shape",
            "alone ms",
            "beside ms",
            "ratio",
            "plain",
            "to plain",
            "copies GB/s",
            "alone GB/s",
        ],
        rows,
    )
    print("\n".join(f"  {line}" for line in lines), flush=True)
    return result


if __name__ == "__main__":
    run_alone(run, __doc__)
