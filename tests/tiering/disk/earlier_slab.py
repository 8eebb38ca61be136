"""Writes the slab that later releases must find warm, with any release of kvtier:

    python tests/tiering/disk/earlier_slab.py DIRECTORY

It imports only public names, so that it also runs with the code of earlier releases.
`tests/data/earlier_slab.tar.xz` was written by commit 17d2745.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import copyfile

import numpy as np

from kvtier.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.disk.manager import DiskSecondaryTierManager

ROW_BYTES = 8192
NUM_ROWS = 16
MAX_BYTES = 256 << 10
NOTE = b"a note for the next engine"
PATIENCE_S = 60.0

PROMPT = [make_offload_key(b"block-%026d" % number, 0) for number in range(8)]
GROUP_1 = [make_offload_key(b"block-%026d" % number, 1) for number in range(3)]
LONG_KEYS = [make_offload_key(b"long-%091d" % number, 0) for number in range(2)]
"""Keys that do not fit into the index."""
KEYS = [*PROMPT, *GROUP_1, *LONG_KEYS]
FOREIGN = [make_offload_key(b"other-%026d" % number, 0) for number in range(2)]
"""Stored under another fingerprint."""
USED_LAST = PROMPT[:3]


def payload_of(key: OffloadKey) -> bytes:
    """Bytes that differ for every key and compress well."""
    return (key * ROW_BYTES)[:ROW_BYTES]


class _Spec(OffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError


def config_of(namespace: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(16, (f"layer.{group_id}",), group_id) for group_id in range(2)
        ),
        worker_kv_bytes_per_block=ROW_BYTES,
        engine_id="an-earlier-engine",
        model=OffloadingModelConfig(name="a model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(),
        extra_config={"cpu_bytes_to_use": ROW_BYTES * NUM_ROWS, "cache_namespace": namespace},
    )


class Engine:
    """A disk tier with rows of host memory, and jobs that are waited for."""

    def __init__(self, path: Path, namespace: str, max_bytes: int | None = MAX_BYTES) -> None:
        self._region = SharedOffloadRegion(
            f"earlier-slab-{time.time_ns()}", NUM_ROWS, 0, ROW_BYTES, ROW_BYTES
        )
        self._view = self._region.create_kv_memoryview()
        spec = _Spec(config_of(namespace))
        self.tier = DiskSecondaryTierManager(
            spec, self._view, "disk", path=str(path), max_bytes=max_bytes
        )
        self._job_ids = count(1)

    def store(self, keys: Sequence[OffloadKey]) -> JobResult:
        for row, key in enumerate(keys):
            self._row(row)[:] = payload_of(key)
        job = self._job(keys, is_promotion=False)
        self.tier.submit_store(job)
        return self._result()

    def load(self, keys: Sequence[OffloadKey]) -> tuple[JobResult, list[bytes]]:
        """The result, and what is in the rows afterwards."""
        job = self._job(keys, is_promotion=True)
        self.tier.submit_load(job)
        return self._result(), [bytes(self._row(row)) for row in range(len(keys))]

    def _row(self, row: int) -> memoryview:
        return self._view.cast("B")[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def _job(self, keys: Sequence[OffloadKey], is_promotion: bool) -> TransferJob:
        number = next(self._job_ids)
        return TransferJob(
            job_id=number,
            keys=list(keys),
            block_ids=np.arange(len(keys), dtype=np.int64),
            is_promotion=is_promotion,
            req_context=ReqContext(f"request {number}"),
            fingerprint=self.tier.fingerprint,
        )

    def _result(self) -> JobResult:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for result in self.tier.get_finished_jobs():
                return result
            time.sleep(0.001)
        raise TimeoutError("a job does not end")

    def flush(self) -> None:
        """Wait until the index is in the file."""
        deadline = time.monotonic() + PATIENCE_S
        while self.tier.has_pending_work():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.tier.shutdown()
        del self._view
        self._region.cleanup()


@contextmanager
def engine(path: Path, namespace: str, max_bytes: int | None = MAX_BYTES) -> Iterator[Engine]:
    running = Engine(path, namespace, max_bytes)
    try:
        yield running
    finally:
        running.close()


def write(directory: Path) -> None:
    """`clean.slab`: after a shutdown. `killed.slab`: the same file as a killed engine leaves it."""
    path = directory / "clean.slab"
    with engine(path, "other weights") as other:
        assert other.store(FOREIGN).success
    with engine(path, "our weights") as ours:
        for keys in (PROMPT[:5], PROMPT[4:], GROUP_1, LONG_KEYS):
            assert ours.store(keys).success
        ours.tier.touch(USED_LAST, ReqContext("the last use"))
        ours.tier.keep_note(NOTE)
        ours.flush()
        copyfile(path, directory / "killed.slab")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
