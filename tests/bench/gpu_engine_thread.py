"""What copies cost the engine's thread, and what a busy engine's thread costs the copies."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.cpu.cuda.trial import Trial, open_trial

SUBMITTED = (
    (16, 1, 64),
    (64, 1, 64),
    (256, 1, 64),
    (1024, 1, 64),
    (2048, 1, 64),
    (64, 32, 64),
    (64, 32, 512),
    (2048, 1, 256),
)
"""Jobs for `submit_us`: KiB of a page, tensors, blocks of a job."""
LAYOUTS = ((16, 1), (16, 32), (64, 32), (1024, 1))
"""Jobs for `rates`: KiB of a page, tensors."""
_SUBMITTED_JOBS = 40
_JOB_BYTES = 1 << 30
_TIMED_JOBS = 5


def submit_us(
    device: Any, page_bytes: int, num_tensors: int, num_blocks: int
) -> tuple[float, float]:
    """Microseconds of the host to submit a load and a store. Medians over jobs, each submitted when
    the one before has ended."""
    with open_trial(device, page_bytes, num_tensors, num_blocks) as trial:
        order = np.random.default_rng(0)
        blocks, slots = (order.permutation(num_blocks) for _ in range(2))
        medians = []
        for is_store in (False, True):
            took = []
            for _ in range(_SUBMITTED_JOBS):
                submit = trial.ready(is_store, blocks, slots)
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                job = submit()
                took.append(time.perf_counter() - began)
                trial.finish([job])
            medians.append(median(took) * 1e6)
    return medians[0], medians[1]


class Rates(NamedTuple):
    """GB/s of one job, from its submission until it is reported. Medians."""

    waiting: float
    """The engine's thread only waits."""
    busy: float
    """The engine's thread computes in Python all the time."""


def rates(device: Any, page_bytes: int, num_tensors: int, is_store: bool) -> Rates:
    num_blocks = _JOB_BYTES // (page_bytes * num_tensors)
    order = np.random.default_rng(0)
    with open_trial(device, page_bytes, num_tensors, num_blocks) as trial:
        blocks, slots = (order.permutation(num_blocks) for _ in range(2))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for is_busy in [False, True] * (_TIMED_JOBS + 1):
            submit = trial.ready(is_store, blocks, slots)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            job = submit()
            if is_busy:
                _compute_until_done(trial)
            else:
                trial.finish([job])
            seconds[is_busy].append(time.perf_counter() - began)
    return Rates(*(_JOB_BYTES / median(seconds[is_busy][1:]) / 1e9 for is_busy in (False, True)))


def _compute_until_done(trial: Trial) -> None:
    """Poll for the job, with half a millisecond of Python between two polls."""
    while not (results := trial.worker.get_finished()):
        sum(range(30_000))
    if not all(result.success for result in results):
        raise RuntimeError("a job failed: see the log")
