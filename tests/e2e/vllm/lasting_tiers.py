"""Tiers that outlive the process, for tests of what a later one finds in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.subject import Subject

PATIENT = {
    # Nothing is to depend on how fast this machine is.
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}
"""Keys of a tier that is never given up."""


def disk_in(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder / "kv.slab"), "max_bytes": "32MiB"} | PATIENT


def fs_in(folder: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(folder / "root"), "max_bytes": "32MiB"} | PATIENT


LASTING: dict[str, Callable[[Path], dict[str, Any]]] = {"disk": disk_in, "fs": fs_in}
"""By type, what a tier of that type in a folder is configured with."""


def over(tier: dict[str, Any], subject: Subject, *, slots: int = 48) -> dict[str, Any]:
    """Host memory for so many offloaded blocks, with a tier below from which everything that is
    there is loaded, however fast it could be computed."""
    return {
        "cpu_bytes_to_use": slots * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier],
    }


def with_common_hashes(vllm: VLLM) -> VLLM:
    """The same vLLM, in which every process gives a block the same hash."""
    if vllm.version >= (0, 32):
        return vllm
    return vllm.but(environment={"PYTHONHASHSEED": "0"})
