"""Stock vLLM's own tier on disk, made to be measured: one file per block, 32 threads.

Its C helper, where it is built, reads and writes whole jobs outside the interpreter, and bypasses
the page cache where the file system allows that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import ScheduleEndContext, TransferJob
from vllm.v1.kv_offload.tiering.fs import io as fs_io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from tests.bench.disk_subjects import BlockFiles, Case, DiskSubject


class BareSpec(OffloadingSpec):  # type: ignore[misc]
    """A configuration without an engine."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def make_spec(row_bytes: int) -> BareSpec:
    return BareSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer.0",), 0),),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
    )


def make_subject(case: Case, view: memoryview) -> DiskSubject:
    tier = FileSystemTierManager(
        make_spec(case.block_bytes), view, "fs", root_dir=os.path.join(case.directory, "vllm-fs")
    )

    def make_job(job_id: int, keys: Any, rows: Any, is_load: bool) -> TransferJob:
        return TransferJob(job_id, keys, rows, is_load, ReqContext(f"job-{job_id}"))

    def look_up(keys: Sequence[Any], context: Any) -> list[Any]:
        """As vLLM's scheduler does: stop at the first block that is absent."""
        answers = []
        for key in keys:
            answers.append(tier.lookup(key, context))
            if answers[-1] is LookupResult.MISS:
                break
        return answers

    files = BlockFiles(tier.file_mapper.get_file_name, case.block_bytes, tier._use_o_direct)
    return DiskSubject(
        tier=tier,
        make_key=make_offload_key,
        make_job=make_job,
        make_context=ReqContext,
        schedule_end=ScheduleEndContext((), ()),
        look_up=look_up,
        forget=files.forget,
        cool=files.cool,
        about={
            "threads": len(tier._pool._threads),
            "o_direct": tier._use_o_direct,
            "c_helper": fs_io._HAS_FSIO_C,
        },
    )
