"""What the worker moves while the engine's thread is busy in Python, as it is between steps."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.cpu.cuda.rig import Rig, open_rig

LAYOUTS = ((16, 1), (16, 32), (64, 32), (1024, 1))
"""KiB of a page, tensors."""
_JOB_BYTES = 1 << 30
_NUM_JOBS = 5


class Rates(NamedTuple):
    """GB/s of one job, from its submission until it is reported. Medians."""

    waiting: float
    """The engine's thread does nothing else."""
    busy: float
    """It never lets go of the interpreter, but when it has to."""


def rates(device: Any, page_bytes: int, num_tensors: int, is_store: bool) -> Rates:
    num_blocks = _JOB_BYTES // (page_bytes * num_tensors)
    order = np.random.default_rng(0)
    with open_rig(device, page_bytes, num_tensors, num_blocks) as rig:
        blocks, slots = (order.permutation(num_blocks) for _ in range(2))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for is_busy in [False, True] * (_NUM_JOBS + 1):
            submit = rig.ready(is_store, blocks, slots)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            job = submit()
            if is_busy:
                _compute_until_done(rig)
            else:
                rig.finish([job])
            seconds[is_busy].append(time.perf_counter() - began)
    return Rates(*(_JOB_BYTES / median(seconds[is_busy][1:]) / 1e9 for is_busy in (False, True)))


def _compute_until_done(rig: Rig) -> None:
    """Half a millisecond of Python between two questions."""
    while not (results := rig.worker.get_finished()):
        sum(range(30_000))
    if not all(result.success for result in results):
        raise RuntimeError("a job failed: see the log")
