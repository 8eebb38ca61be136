"""A model's matrix products beside copies, and the copies beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from kvtier.cpu.cuda.copies import LOAD_PRIORITY, STORE_PRIORITY, CopyPath
from kvtier.cpu.cuda.trial import Trial, open_trial
from kvtier.cpu.gpu_worker import open_pinned

SHAPES = ((8192, 8192, 8192), (2048, 14336, 4096), (256, 4096, 4096))
"""Matrix shapes: large ones, to which the limit applies; the MLP of an 8B model with 2,048 tokens,
and with 256."""
PATHS = {
    "copy engines": (1 << 20, 1, CopyPath.ENGINES),
    "kernel and engines": (64 << 10, 32, CopyPath.STAGED),
    "kernel alone": (64 << 10, 1, CopyPath.KERNEL),
}
"""Page size, tensors, and copy path."""
_JOB_BYTES = 256 << 20
_LOOP_S = 0.04


def beside(
    device: Any,
    shape: tuple[int, int, int],
    layout: tuple[int, int],
    path: CopyPath,
    is_store: bool,
    num_rounds: int,
) -> dict[str, float]:
    """Measure rounds alone, beside the worker's copies, and beside plain copies of one piece, in
    turns.

    The device's clock follows its power: it is higher for a while after a pause. So nothing is
    measured after a pause, and each kind of round follows each of the others equally often.
    """
    products = _products(device, shape)
    page_bytes, num_tensors = layout
    num_blocks = _JOB_BYTES // (page_bytes * num_tensors)
    with open_trial(
        device, page_bytes, num_tensors, num_blocks, partial(open_pinned, choose=lambda _: path)
    ) as trial:
        products()
        copies = _Jobs(trial, is_store)
        alone_rate = copies.rate()
        conditions: dict[str, _Copies] = {
            "alone": _Copies(),
            "beside": copies,
            "plain": _PlainCopies(device, is_store),
        }
        took: dict[str, list[float]] = {what: [] for what in conditions}
        rates: list[float] = []
        for round_number in range(num_rounds):
            # Each kind is first, second and third equally often.
            for turn in range(3):
                what = list(conditions)[(round_number + turn) % 3]
                took[what].append(_beside(conditions[what], products, rates))
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
    """Run matrix products for about `_LOOP_S`, and return the milliseconds of one. They run as a
    CUDA graph, so that work of the host does not show."""
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

    milliseconds(lambda: torch.mm(a, b, out=out))  # initializes the libraries
    few = make(10)
    milliseconds(few)
    count = max(3, int(_LOOP_S * 1e4 / milliseconds(few)))
    many = make(count)
    return lambda: milliseconds(many) / count


class _Copies:
    """Copies that run beside the products. This base class copies nothing."""

    num_enough = int(2 * _LOOP_S * 2 * 60e9 / _JOB_BYTES) + 2
    """Number of jobs that lasts for two loops, with a bus of 60 GB/s and products that take twice
    as long as alone."""

    def begin(self) -> None:
        """Submit enough copies."""

    def end(self, rates: list[float]) -> bool:
        """Wait for all copies and record their speed. True if they outlasted the products."""
        return True


def _beside(copies: _Copies, products: Callable[[], float], rates: list[float]) -> float:
    """Milliseconds of a product. Raises `RuntimeError` if the measurement is not usable."""
    for _ in range(5):
        copies.begin()
        products()  # levels out the effect of the pause on the clock
        took = products()
        if copies.end(rates):
            return took
        copies.num_enough *= 2
    raise RuntimeError("the copies always ended before the products")


class _Jobs(_Copies):
    """Copies by the worker."""

    def __init__(self, trial: Trial, is_store: bool) -> None:
        self._trial = trial
        self._is_store = is_store
        self._jobs: set[int] = set()
        self._seconds: list[float] = []

    def rate(self) -> float:
        """GB/s with one job at a time."""
        return _JOB_BYTES / median(self._trial.finish([self._submit()]) for _ in range(5)) / 1e9

    def begin(self) -> None:
        self._jobs = {self._submit() for _ in range(self.num_enough)}

    def end(self, rates: list[float]) -> bool:
        self._collect()
        is_enough = bool(self._jobs)
        num_beside = max(1, len(self._seconds))
        self._trial.worker.wait(self._jobs)
        self._collect()
        if is_enough:
            rates.append(_JOB_BYTES / median(self._seconds[:num_beside]) / 1e9)
        self._seconds.clear()
        return is_enough

    def _submit(self) -> int:
        order = np.random.default_rng(1)
        blocks, slots = (order.permutation(self._trial.num_blocks) for _ in range(2))
        return self._trial.submit(self._is_store, blocks, slots)

    def _collect(self) -> None:
        for result in self._trial.worker.get_finished():
            self._jobs.remove(result.job_id)
            self._seconds.append(result.transfer_time or 0.0)


class _PlainCopies(_Copies):
    """Plain copies of memory in one piece: the least that any worker has to do."""

    def __init__(self, device: Any, is_store: bool) -> None:
        host = torch.empty(_JOB_BYTES, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(_JOB_BYTES, dtype=torch.uint8, device=device)
        self._source, self._target = (on_device, host) if is_store else (host, on_device)
        priority = STORE_PRIORITY if is_store else LOAD_PRIORITY
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._end: Any = None

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(self.num_enough):
                self._target.copy_(self._source, non_blocking=True)
            self._end = self._stream.record_event()

    def end(self, rates: list[float]) -> bool:
        is_enough = not self._end.query()
        self._stream.synchronize()
        return is_enough
