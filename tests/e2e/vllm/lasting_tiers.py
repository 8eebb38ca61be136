"""Tiers that outlive the process, for tests of what a later process finds in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.tiering.metrics import tier_series
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.subject import Subject

PATIENT = {
    # Independent of the speed of this machine.
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "max_pinned_share": 1,
}
"""Keys of a tier that no deadline gives up."""


def disk_in(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder / "kv.slab"), "max_bytes": "32MiB"} | PATIENT


def fs_in(folder: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(folder / "root"), "max_bytes": "32MiB"} | PATIENT


LASTING: dict[str, Callable[[Path], dict[str, Any]]] = {"disk": disk_in, "fs": fs_in}
"""The configuration of a tier in a folder, by type."""


def figure_of(tier: str, name: str) -> str:
    """The name of a tier's figure in `RemoteEngine.figures`. `tier`: its label, such as "0:disk".
    `name`: what the orchestrator counts, such as "stored_blocks"."""
    return tier_series(tier, name).removeprefix("kvtier_")


def over(tier: dict[str, Any], subject: Subject, *, slots: int = 48) -> dict[str, Any]:
    """Host memory for the given number of blocks, and a tier below from which all its blocks are
    loaded, even if computing them is faster."""
    return {
        "cpu_bytes_to_use": slots * subject.slot_bytes(),
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier],
    }


def with_common_hashes(vllm: VLLM) -> VLLM:
    """The same vLLM, with the same block hashes in every process."""
    if vllm.version >= (0, 32):
        return vllm
    return vllm.but(environment={"PYTHONHASHSEED": "0"})
