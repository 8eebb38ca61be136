"""kvtier's disk and fs tiers, made to be measured: seals on, default threads, bounded size."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from kvtier.base import OffloadingSpec, ReqContext, ScheduleEndContext, make_offload_key
from kvtier.testing.harness import sample_spec
from kvtier.tiering.base import SecondaryTierManager, TransferJob
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.fs.layout import block_file_bytes, block_path
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.fs.root import allows_o_direct
from tests.bench.disk_subjects import BlockFiles, Case, DiskSubject

MiB = 1 << 20
DIRECTORY_BYTES = 8 * MiB
"""Reservation in the fs tier's quota for its directories."""
BLOCKS_UNDER_WAY = 256
"""The fs tier reserves room for this many blocks, so that filling it evicts nothing."""
MOST_UNDER_WAY = 192 * MiB
WIDE = 1 << 40
"""A quota that is never reached."""


def make_disk_subject(case: Case, view: memoryview) -> DiskSubject:
    path = os.path.join(case.directory, "scattered.slab" if case.scattered else "kvtier.slab")
    tier = DiskSecondaryTierManager(
        _spec(case.block_bytes, view),
        view,
        "disk",
        path=path,
        # Two slots more than needed: the file system may take some of the room for itself.
        max_bytes=Geometry(case.block_bytes, case.num_blocks + 2).needed_bytes,
    )
    return _subject(tier, {"threads": len(tier._mover.lanes)})


def make_fs_subject(case: Case, view: memoryview) -> DiskSubject:
    file_bytes = block_file_bytes(case.block_bytes)
    under_way = min(BLOCKS_UNDER_WAY * file_bytes, MOST_UNDER_WAY)
    full = case.num_blocks * file_bytes + under_way + DIRECTORY_BYTES
    tier = FsSecondaryTierManager(
        _spec(case.block_bytes, view),
        view,
        "fs",
        root_dir=os.path.join(case.directory, "kvtier-fs"),
        max_bytes=WIDE if case.grows else full,
    )
    is_direct = allows_o_direct(tier._session)
    subject = _subject(tier, {"threads": len(tier._lanes), "o_direct": is_direct})
    files = BlockFiles(partial(block_path, str(tier._namespace)), case.block_bytes, is_direct)
    subject.cool = files.cool
    if case.grows:
        subject.forget = files.forget
    return subject


def _spec(block_bytes: int, view: memoryview) -> OffloadingSpec:
    return sample_spec(block_bytes, len(view), "bench", engine_id=f"bench-{os.getpid()}")


def _subject(tier: SecondaryTierManager, about: dict[str, Any]) -> DiskSubject:
    fingerprint = tier.fingerprint
    tier.enable_kv_events = False  # no benchmark reads events, and vLLM's tier records none

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
