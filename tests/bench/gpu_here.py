"""Whether there is a GPU to measure."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvtier.cpu.cuda.driver import CudaUnavailable, cuda_driver
from tests.bench.report import not_measured

__all__ = ["gpu_for", "why_no_gpu"]


def why_no_gpu() -> str | None:
    """What is missing, if anything is, and the remedy."""
    if find_spec("torch") is None:
        return "this Python has no torch: `make bench-gpu PYTHON=...` names another"
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} of this Python finds no CUDA device: "
            "`make bench-gpu PYTHON=...` names another Python, whose torch may. Otherwise "
            "`python -m kvtier.cpu.gpu_selftest` says what to look at"
        )
    try:
        cuda_driver()
    except CudaUnavailable as error:
        return str(error)
    return None


def gpu_for(benchmark: str) -> Any | None:
    """The first GPU, which is the current one from now on. None: there is none, and it has been
    said what is missing."""
    if (missing := why_no_gpu()) is not None:
        not_measured(benchmark, missing)
        return None
    import torch

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
