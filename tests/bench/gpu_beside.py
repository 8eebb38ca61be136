"""A model's matrix products beside copies, and the copies beside them."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copy_paths import Path
from kvtier.cpu.cuda.rig import Rig, open_rig
from kvtier.cpu.gpu_worker import open_pinned

SHAPES = ((8192, 8192, 8192), (2048, 14336, 4096), (256, 4096, 4096))
"""Large ones, which the limit is for; the MLP of an 8B model with 2,048 tokens, and with 256."""
PATHS = {"copy engines": (1 << 20, Path.ENGINES), "kernel": (64 << 10, Path.KERNEL)}
_JOB_BYTES = 256 << 20
_LOOP_S = 0.08
_NUM_ROUNDS = 5


def beside(
    device: Any, shape: tuple[int, int, int], page_bytes: int, path: Path, is_store: bool
) -> dict[str, float]:
    """Rounds alone and beside copies in turns, since the device's clock changes with its heat."""
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

    with open_rig(
        device,
        page_bytes,
        1,
        _JOB_BYTES // page_bytes,
        partial(open_pinned, choose=lambda *_: path),
    ) as rig:
        products(3)
        count = max(3, int(_LOOP_S * 1e3 / products(10)))
        alone_rate = _JOB_BYTES / median(rig.finish([_job(rig, is_store)]) for _ in range(5)) / 1e9
        per_loop = int(_LOOP_S * 1.6 * alone_rate * 1e9 / _JOB_BYTES) + 2
        alone, together, rates = [], [], []
        for _ in range(_NUM_ROUNDS):
            alone.append(products(count))
            jobs = [_job(rig, is_store) for _ in range(per_loop)]
            time.sleep(0.002)  # the copies are under way
            together.append(products(count))
            copied = len(rig.worker.get_finished())
            if copied == len(jobs):
                raise RuntimeError("the copies ended before the matrix products")
            rates.append(copied * _JOB_BYTES / (together[-1] * count / 1e3 + 0.002) / 1e9)
            rig.worker.wait(jobs)
            rig.worker.get_finished()
            torch.cuda.synchronize(device)
    return {
        "alone_ms": median(alone),
        "beside_ms": median(together),
        "slowdown": median(together) / median(alone),
        "copy_gb_s": median(rates),
        "copy_alone_gb_s": alone_rate,
    }


def _job(rig: Rig, is_store: bool) -> int:
    order = np.random.default_rng(1)
    return rig.submit(is_store, *(order.permutation(rig.num_blocks) for _ in range(2)))
