"""kvtier's tier on disk, made to be measured, with seals on and its own choice of threads."""

from __future__ import annotations

import os

from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.bench.disk_subjects import Case, DiskSubject
from tests.bench.kvtier_tier_subject import as_subject, bench_spec


def make_tier(
    path: str, num_slots: int, block_bytes: int, view: memoryview
) -> DiskSecondaryTierManager:
    # A little more: the file system may need some of it for itself.
    max_bytes = Geometry(block_bytes, num_slots + 2).needed_bytes
    return DiskSecondaryTierManager(
        bench_spec(block_bytes, view), view, "disk", path=path, max_bytes=max_bytes
    )


def make_subject(case: Case, view: memoryview) -> DiskSubject:
    path = os.path.join(case.directory, "scattered.slab" if case.scattered else "kvtier.slab")
    tier = make_tier(path, case.num_blocks, case.block_bytes, view)
    return as_subject(tier, {"threads": len(tier._io.lanes)})
