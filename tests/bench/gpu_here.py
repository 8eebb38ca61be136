"""Whether there is a GPU to measure."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["why_no_gpu"]


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
