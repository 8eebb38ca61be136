"""Checks of the copies between the first GPU and host memory. Needs torch only where a GPU is."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.host import Machine
from kvtier.cpu.gpu_selftest import check_briefly, why_no_gpu
from kvtier.cpu.host_memory import NotEnoughMemory

__all__ = ["GpuCheck", "check_gpu"]

_NAME = "gpu_copies"
_BYTES = 256 << 20
_LEAST_SHARE = 0.5
_FULL_TEST = "python -m kvtier.cpu.gpu_selftest"


class GpuCheck(NamedTuple):
    finding: Finding
    load_bytes_per_s: float | None = None
    """Copies of scattered pages to the GPU. None: not measured."""
    peak_flops: float | None = None
    """16-bit operations per second. None: not known."""


def check_gpu(machine: Machine) -> GpuCheck:
    """Copy scattered pages to the first GPU and back, and compare all bytes. Takes about 256 MiB of
    /dev/shm and of GPU memory for a few seconds."""
    if not machine.num_nvidia_gpus:
        others = machine.other_accelerators
        what = f"/dev/{others[0]} is none that kvtier can test" if others else "no GPU"
        return GpuCheck(Finding(_NAME, Status.OK, f"not checked: {what}"))
    reason = why_no_gpu(0)
    if reason is not None:
        found, _, remedy = reason.partition(". ")
        remedy = remedy or "Run this in the environment of the engine"
        return GpuCheck(Finding(_NAME, Status.WARNING, f"not checked: {found}", remedy))
    try:
        copies = check_briefly(_BYTES)
    except RuntimeError as error:
        is_short = isinstance(error, NotEnoughMemory) or "out of memory" in str(error).lower()
        return GpuCheck(
            Finding(
                _NAME,
                Status.WARNING if is_short else Status.PROBLEM,
                f"not checked: {str(error).splitlines()[0]}",
                "Run this before the engine takes the GPU's memory" if is_short else _advice(),
            )
        )
    rate = copies.loaded.load * 1e9
    found = (
        f"{copies.device}: {copies.loaded.load:.1f} GB/s to the GPU, {copies.loaded.store:.1f} "
        f"from it; a plain copy of pinned memory {copies.plain.load:.1f} and "
        f"{copies.plain.store:.1f}"
    )
    if not copies.is_exact:
        return GpuCheck(Finding(_NAME, Status.PROBLEM, f"{found}. Bytes were wrong", _advice()))
    if copies.loaded.load < _LEAST_SHARE * copies.plain.load:
        finding = Finding(_NAME, Status.WARNING, found, _advice())
    else:
        finding = Finding(_NAME, Status.OK, f"{found}; all bytes right")
    return GpuCheck(finding, rate, copies.peak_flops)


def _advice() -> str:
    return f"Run {_FULL_TEST}, which tries every way to copy, and report what it prints"
