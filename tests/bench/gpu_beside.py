"""A model's matrix products beside copies, and the copies beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
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
_LOOP_S = 0.08
_NUM_ROUNDS = 9


def beside(
    device: Any,
    shape: tuple[int, int, int],
    layout: tuple[int, int],
    path: Path,
    is_store: bool,
) -> dict[str, float]:
    """Rounds alone, beside copies, and beside plain copies of one piece, in turns: the device's
    clock changes with its heat, and with what the bus takes of the power there is."""
    rows, columns, depth = shape
    a = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
    b = torch.randn(depth, columns, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    compute = torch.cuda.Stream(device)

    def products(count: int) -> float:
        """Milliseconds of one."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            began.record()
            for _ in range(count):
                torch.mm(a, b, out=out)
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / count

    copy_plainly = _plain_copies(device, is_store)
    page_bytes, num_tensors = layout
    with open_rig(
        device,
        page_bytes,
        num_tensors,
        _JOB_BYTES // (page_bytes * num_tensors),
        partial(open_pinned, choose=lambda _: path),
    ) as rig:
        products(3)
        count = max(3, int(_LOOP_S * 1e3 / products(10)))
        alone_rate = _JOB_BYTES / median(rig.finish([_job(rig, is_store)]) for _ in range(5)) / 1e9
        per_loop = int(_LOOP_S * 1.6 * alone_rate * 1e9 / _JOB_BYTES) + 2
        alone: list[float] = []
        together: list[float] = []
        beside_plain: list[float] = []
        rates: list[float] = []
        while len(together) < _NUM_ROUNDS:
            by_itself = products(count)
            jobs = [_job(rig, is_store) for _ in range(per_loop)]
            time.sleep(0.002)  # the copies are under way
            took = products(count)
            copied = rig.worker.get_finished()
            rig.worker.wait(jobs)
            rig.worker.get_finished()
            torch.cuda.synchronize(device)
            if len(copied) == len(jobs):
                per_loop *= 2  # they ended before the matrix products: again, with more of them
                continue
            alone.append(by_itself)
            together.append(took)
            copy_plainly(per_loop)
            time.sleep(0.002)
            beside_plain.append(products(count))
            torch.cuda.synchronize(device)
            if copied:
                seconds = sum(result.transfer_time or 0.0 for result in copied)
                rates.append(len(copied) * _JOB_BYTES / seconds / 1e9)
    return {
        "alone_ms": median(alone),
        "beside_ms": median(together),
        "slowdown": median(t / a for t, a in zip(together, alone, strict=True)),
        "plain_slowdown": median(p / a for p, a in zip(beside_plain, alone, strict=True)),
        "to_plain": median(t / p for t, p in zip(together, beside_plain, strict=True)),
        "copy_gb_s": median(rates) if rates else 0.0,
        "copy_alone_gb_s": alone_rate,
    }


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
