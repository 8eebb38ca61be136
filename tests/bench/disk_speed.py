"""Bytes per second and processor time of the disk tier, beside `fio` and vLLM's own tier."""

from __future__ import annotations

import sys

from tests.bench.disk_rounds import (
    COLD,
    IO_URING,
    KVTIER,
    PSYNC,
    SIZES,
    VLLM,
    Contender,
    KiB,
    MiB,
)
from tests.bench.disk_subjects import DISK, VLLM_FS
from tests.bench.report import run_alone
from tests.bench.speed_tables import Bars, Speeds
from tests.bench.worker import vllm_python

SCATTERED = "scattered"
MIN_TO_VLLM = {64 * KiB: 3.0, 1 * MiB: 1.5}
WHO_IS_COMPARED = """\
All tiers are full.
  kvtier     seals and verifies every block; every store evicts. The blocks of a job lie side by
             side, like those of a prompt that was stored at once. Jobs come in random order.
  scattered  the same, but the blocks of every job lie all over the slab.
  vLLM       its fs tier with its C helper, 32 threads and O_DIRECT; checks nothing, never evicts.
             Its directories exist already; surplus blocks are removed between rounds."""


def run() -> None:
    Speeds(
        name="disk_speed",
        who_is_compared=WHO_IS_COMPARED,
        contenders={
            KVTIER: Contender(sys.executable, DISK),
            SCATTERED: Contender(sys.executable, DISK, scattered=True),
            VLLM: Contender(vllm_python("disk_speed"), VLLM_FS),
        },
        tier_bytes=1536 * MiB,
        sizes_alone=MIN_TO_VLLM,
        bars=Bars(
            to_fio=dict(zip(SIZES, (0.60, 0.75, 0.90, 0.90), strict=True)),
            loads_to_vllm=MIN_TO_VLLM,
            stores_to_vllm=MIN_TO_VLLM,
            cpu_to_vllm=1.0,
        ),
        limits=(PSYNC, IO_URING, COLD),
    ).run()


if __name__ == "__main__":
    run_alone(run, __doc__)
