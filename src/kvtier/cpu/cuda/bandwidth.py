"""How much the worker moves per second, and how much one plain copy does."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.cpu.cuda.rig import OpenCopies, Rig, open_rig

__all__ = ["Bandwidth", "measure", "measure_plain_copy"]

_NUM_JOBS = 4
_NUM_ROUNDS = 5


class Bandwidth(NamedTuple):
    """GB/s, seen from outside: from the first call until the last byte is there. Medians."""

    load: float
    """To the device."""
    store: float
    """From the device."""
    both: float
    """At the same time, added up."""


def measure(
    device: Any,
    page_bytes: int,
    num_tensors: int,
    num_bytes: int,
    open_copies: OpenCopies | None = None,
) -> Bandwidth:
    """Of the worker, with scattered pages of that size, as many as whole blocks of them have so
    many bytes, and a few jobs under way. `open_copies`: as for the worker."""
    num_blocks = num_bytes // (page_bytes * num_tensors)
    num_bytes = num_blocks * page_bytes * num_tensors
    with open_rig(device, page_bytes, num_tensors, num_blocks, open_copies) as rig:
        loads, stores = (_jobs(rig, is_store) for is_store in (False, True))

        def handed_over(jobs: list[int]) -> list[int]:
            rig.worker.flush()
            return jobs

        return Bandwidth(
            _rate(lambda: handed_over(loads()), num_bytes, device, rig.finish),
            _rate(lambda: handed_over(stores()), num_bytes, device, rig.finish),
            _rate(lambda: handed_over(loads(2) + stores(2)), 4 * num_bytes, device, rig.finish),
        )


def measure_plain_copy(device: Any, num_bytes: int) -> Bandwidth:
    """Of torch, with pinned memory in one piece: what the bus can do."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def load() -> None:
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(host, non_blocking=True)

    def store() -> None:
        with torch.cuda.stream(streams[1]):
            other.copy_(on_device[1], non_blocking=True)

    def both() -> None:
        for _ in range(2):
            load()
            store()

    return Bandwidth(
        _rate(load, num_bytes, device),
        _rate(store, num_bytes, device),
        _rate(both, 4 * num_bytes, device),
    )


def _jobs(rig: Rig, is_store: bool) -> Callable[..., list[int]]:
    """Submits jobs that together copy every block once, or several times; their ids."""
    order = np.random.default_rng(0)
    shares, slots = (np.array_split(order.permutation(rig.num_blocks), _NUM_JOBS) for _ in range(2))

    def submit(times: int = 1) -> list[int]:
        return [
            rig.submit(is_store, share, part)
            for _ in range(times)
            for share, part in zip(shares, slots, strict=True)
        ]

    return submit


def _rate(
    start: Callable[[], Any],
    num_bytes: int,
    device: Any,
    finish: Callable[[Any], object] = lambda _: None,
) -> float:
    """`start`: returns when the device has all that is measured. `finish`: is told what that said,
    when it is over and its time known."""
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        started = start()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        finish(started)
    return num_bytes / median(seconds[1:]) / 1e9
