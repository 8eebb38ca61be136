"""kvtier's tier on disk, made to be measured, with seals on and its own choice of threads."""

from __future__ import annotations

import os
from typing import Any

from kvtier.base import ReqContext, ScheduleEndContext, make_offload_key
from kvtier.testing.sample_spec import sample_spec
from kvtier.tiering.base import TransferJob
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.bench.disk_subjects import Case, DiskSubject


def make_tier(
    path: str, num_slots: int, block_bytes: int, view: memoryview
) -> DiskSecondaryTierManager:
    spec = sample_spec(block_bytes, len(view), "bench", engine_id=f"bench-{os.getpid()}")
    # A little more: the file system may need some of it for itself.
    max_bytes = Geometry(block_bytes, num_slots + 2).needed_bytes
    return DiskSecondaryTierManager(spec, view, "disk", path=path, max_bytes=max_bytes)


def make_subject(case: Case, view: memoryview) -> DiskSubject:
    path = os.path.join(case.directory, "scattered.slab" if case.scattered else "kvtier.slab")
    tier = make_tier(path, case.num_blocks, case.block_bytes, view)
    fingerprint = tier.fingerprint

    def make_job(job_id: int, keys: Any, rows: Any, is_load: bool) -> TransferJob:
        return TransferJob(job_id, keys, rows, is_load, ReqContext(f"job-{job_id}"), fingerprint)

    return DiskSubject(
        tier=tier,
        make_key=make_offload_key,
        make_job=make_job,
        make_context=ReqContext,
        schedule_end=ScheduleEndContext(),
        look_up=tier.lookup_batch,
        about={"threads": len(tier._io.lanes)},
    )
