"""Fs tiers for tests, driven by the harness of the conformance kit."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvtier.base import OffloadingSpec
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.patience import PATIENCE_S, silent_queues

ROW_BYTES = 8192
DIRECTORIES = 3 << 20
"""Upper bound for the bytes of a root with one namespace, without blocks."""


def bytes_for(num_blocks: int, row_bytes: int = ROW_BYTES) -> int:
    """A `max_bytes` with space for about `num_blocks` blocks."""
    return DIRECTORIES + num_blocks * (row_bytes + 3 * PAGE_BYTES)


def fs_harness(
    root: Path,
    num_blocks: int = 256,
    *,
    row_bytes: int = ROW_BYTES,
    num_rows: int = 64,
    namespace: str = "these weights",
    **options: Any,
) -> TierHarness:
    """An engine with an fs tier that has space for about `num_blocks` blocks. Raises the errors of
    the tier's constructor."""
    options.setdefault("max_bytes", bytes_for(num_blocks, row_bytes))

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return FsSecondaryTierManager(spec, view, "fs", root_dir=str(root), **options)

    return TierHarness(
        make_tier,
        num_slots=num_rows,
        row_bytes=row_bytes,
        patience_s=PATIENCE_S,
        namespace=namespace,
    )


def fs_of(harness: TierHarness) -> FsSecondaryTierManager:
    assert isinstance(harness.tier, FsSecondaryTierManager)
    return harness.tier


def du(root: Path) -> int:
    """Bytes as `du -s -B1` counts them: every file once, and directories. Files that disappear
    meanwhile are skipped, so it works while engines run."""
    total = os.lstat(root).st_blocks * 512
    seen: set[int] = set()
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            try:
                status = os.lstat(f"{directory}/{name}")
            except FileNotFoundError:
                continue
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return total


def block_files(root: Path) -> list[Path]:
    """The files of all published blocks. Works while blocks are being removed."""
    found = (
        Path(directory, name)
        for directory, _, names in os.walk(root / "blocks")
        for name in names
        if len(Path(directory).relative_to(root / "blocks").parts) == 2
    )
    return sorted(path for path in found if path.is_file())


def silent_files(tier: SecondaryTierManager) -> AbstractContextManager[None]:
    """Reads and writes reach the disk, but none of them completes before the end of the context."""
    assert isinstance(tier, FsSecondaryTierManager)
    return silent_queues(lane._queue for lane in tier._lanes)
