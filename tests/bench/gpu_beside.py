"""A model's matrix products beside copies, and the copies beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY
from kvtier.cpu.cuda.copy_paths import Path
from kvtier.cpu.cuda.rig import Rig, open_rig
from kvtier.cpu.gpu_worker import open_pinned

SHAPES = ((8192, 8192, 8192), (2048, 14336, 4096), (256, 4096, 4096))
"""Large ones, which the limit is for; the MLP of an 8B model with 2,048 tokens, and with 256."""
PATHS = {
    "copy engines": (1 << 20, 1, Path.ENGINES),
    "kernel and engines": (64 << 10, 32, Path.STAGED),
    "kernel alone": (64 << 10, 1, Path.KERNEL),
}
"""Page size, tensors, and how they are copied."""
_JOB_BYTES = 256 << 20
_LOOP_S = 0.06


def beside(
    device: Any,
    shape: tuple[int, int, int],
    layout: tuple[int, int],
    path: Path,
    is_store: bool,
    num_rounds: int,
) -> dict[str, float]:
    """Rounds alone, beside copies, and beside plain copies of one piece, in turns.

    The device's clock follows its power: after a pause it is higher for a while, whatever is done
    then. So nothing is measured after a pause, and each comes after each of the others."""
    products = _products(device, shape)
    page_bytes, num_tensors = layout
    num_blocks = _JOB_BYTES // (page_bytes * num_tensors)
    copy_plainly = _plain_copies(device, is_store)
    with open_rig(
        device, page_bytes, num_tensors, num_blocks, partial(open_pinned, choose=lambda _: path)
    ) as rig:
        products()
        alone_rate = _JOB_BYTES / median(rig.finish([_job(rig, is_store)]) for _ in range(5)) / 1e9
        per_loop = int(_LOOP_S * 3.5 * alone_rate * 1e9 / _JOB_BYTES) + 2
        took: dict[str, list[float]] = {"alone": [], "beside": [], "plain": []}
        rates: list[float] = []
        for round_number in range(num_rounds):
            # Each is the first, the second and the third as often as the others.
            for turn in range(3):
                what = list(took)[(round_number + turn) % 3]
                jobs = []
                if what == "beside":
                    jobs = [_job(rig, is_store) for _ in range(per_loop)]
                elif what == "plain":
                    copy_plainly(per_loop)
                products()  # what it was like before does not matter any more
                took[what].append(products())
                if jobs:
                    rates.append(_rate_of(rig, jobs))
                torch.cuda.synchronize(device)
    slowdowns = {
        what: [t / a for t, a in zip(took[what], took["alone"], strict=True)]
        for what in ("beside", "plain")
    }
    return {
        "alone_ms": median(took["alone"]),
        "beside_ms": median(took["beside"]),
        "slowdown": median(slowdowns["beside"]),
        "plain_slowdown": median(slowdowns["plain"]),
        "to_plain": median(b / p for b, p in zip(took["beside"], took["plain"], strict=True)),
        "copy_gb_s": median(rates),
        "copy_alone_gb_s": alone_rate,
    }


def _products(device: Any, shape: tuple[int, int, int]) -> Callable[[], float]:
    """Makes matrix products for about `_LOOP_S`; milliseconds of one. As a graph: what the host
    does meanwhile is not to be seen in it."""
    rows, columns, depth = shape
    a = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
    b = torch.randn(depth, columns, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device)

    def milliseconds(work: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            work()
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    def make(count: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                torch.mm(a, b, out=out)

        def replay() -> None:
            graph.replay()

        return replay

    milliseconds(lambda: torch.mm(a, b, out=out))  # the libraries get ready
    few = make(10)
    milliseconds(few)
    count = max(3, int(_LOOP_S * 1e4 / milliseconds(few)))
    many = make(count)
    return lambda: milliseconds(many) / count


def _rate_of(rig: Rig, jobs: Sequence[int]) -> float:
    """GB/s of those that are done, and then of all, for nothing is to be left under way.

    Raises `RuntimeError` if they all were done before the matrix products.
    """
    copied = rig.worker.get_finished()
    if len(copied) == len(jobs):
        raise RuntimeError("the copies ended too early: nothing can be said")
    rig.worker.wait(jobs)
    results = copied or rig.worker.get_finished()
    rig.worker.get_finished()
    seconds = sum(result.transfer_time or 0.0 for result in results)
    return len(results) * _JOB_BYTES / seconds / 1e9


def _plain_copies(device: Any, is_store: bool) -> Callable[[int], None]:
    """Starts so many copies of a job's bytes, in one piece: the least that anyone can do."""
    host = torch.empty(_JOB_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_JOB_BYTES, dtype=torch.uint8, device=device)
    source, target = (on_device, host) if is_store else (host, on_device)
    stream = torch.cuda.Stream(device, priority=STORE_PRIORITY if is_store else LOAD_PRIORITY)

    def copy(count: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(count):
                target.copy_(source, non_blocking=True)

    return copy


def _job(rig: Rig, is_store: bool) -> int:
    order = np.random.default_rng(1)
    return rig.submit(is_store, *(order.permutation(rig.num_blocks) for _ in range(2)))
