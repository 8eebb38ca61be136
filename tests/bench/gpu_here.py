"""Whether there is a GPU to measure."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = ["gpu_for", "why_no_gpu"]


def why_no_gpu() -> str | None:
    """What is missing, if anything is, and the remedy."""
    if find_spec("torch") is None:
        return "this Python has no torch: `make bench-gpu PYTHON=...` names another"
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} of this Python finds no CUDA device: "
            "`make bench-gpu PYTHON=...` names another"
        )
    return None


def gpu_for(benchmark: str) -> Any | None:
    """The first GPU, which is the current one from now on. None: there is none, and it has been
    said what is missing."""
    if (missing := why_no_gpu()) is not None:
        print(f"\n{benchmark}: not measured, {missing}")
        return None
    import torch

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
