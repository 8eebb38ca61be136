"""Finds the GPU to measure."""

from __future__ import annotations

from typing import Any

from kvtier.cpu import gpu_selftest
from tests.bench.report import not_measured

__all__ = ["gpu_for", "why_no_gpu"]


def why_no_gpu() -> str | None:
    """What is missing and the remedy, or None if there is a usable GPU."""
    missing = gpu_selftest.why_no_gpu(0)
    if missing is None:
        return None
    return f"{missing}. `make bench-gpu PYTHON=...` names another Python"


def gpu_for(benchmark: str) -> Any | None:
    """The first GPU, made the current device; or None, after reporting what is missing."""
    if (missing := why_no_gpu()) is not None:
        not_measured(benchmark, missing)
        return None
    import torch

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
