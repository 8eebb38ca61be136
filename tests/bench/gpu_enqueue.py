"""How long the host takes to hand a job to the device."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.rig import open_rig

CASES = (
    (16, 1, 64),
    (64, 1, 64),
    (256, 1, 64),
    (1024, 1, 64),
    (2048, 1, 64),
    (64, 32, 64),
    (64, 32, 512),
    (2048, 1, 256),
)
"""KiB of a page, tensors, blocks of a job."""
_NUM_JOBS = 40


def enqueue_us(
    device: Any, page_bytes: int, num_tensors: int, num_blocks: int
) -> tuple[float, float]:
    """Of a load and of a store: medians over jobs, each submitted when the one before is done."""
    with open_rig(device, page_bytes, num_tensors, num_blocks) as rig:
        order = np.random.default_rng(0)
        blocks, slots = (order.permutation(num_blocks) for _ in range(2))
        medians = []
        for is_store in (False, True):
            took = []
            for _ in range(_NUM_JOBS):
                submit = rig.ready(is_store, blocks, slots)
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                job = submit()
                took.append(time.perf_counter() - began)
                rig.finish([job])
            medians.append(median(took) * 1e6)
    return medians[0], medians[1]
