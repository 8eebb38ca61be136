"""A tier of kvtier's, made to be measured."""

from __future__ import annotations

import os
from typing import Any

from kvtier.base import OffloadingSpec, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.testing.sample_spec import sample_spec
from kvtier.tiering.base import SecondaryTierManager, TransferJob
from tests.bench.disk_subjects import DiskSubject


def bench_spec(block_bytes: int, view: memoryview) -> OffloadingSpec:
    return sample_spec(block_bytes, len(view), "bench", engine_id=f"bench-{os.getpid()}")


def as_subject(tier: SecondaryTierManager, about: dict[str, Any]) -> DiskSubject:
    fingerprint = tier.fingerprint
    tier.enable_kv_events = False  # nobody takes them; neither does vLLM's tier record any

    def make_job(job_id: int, keys: Any, rows: Any, is_load: bool) -> TransferJob:
        return TransferJob(job_id, keys, rows, is_load, ReqContext(f"job-{job_id}"), fingerprint)

    return DiskSubject(
        tier=tier,
        make_key=make_offload_key,
        make_job=make_job,
        make_context=ReqContext,
        schedule_end=ScheduleEndContext(),
        look_up=tier.lookup_batch,
        about=about,
    )
