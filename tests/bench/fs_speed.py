"""Bytes per second and processor time of the fs tier, beside `fio` and vLLM's own tier."""

from __future__ import annotations

import sys

from tests.bench.disk_rounds import KVTIER, SIZES, VLLM, Contender, MiB
from tests.bench.disk_subjects import FS, VLLM_FS
from tests.bench.report import run_alone
from tests.bench.speed_tables import Bars, Speeds
from tests.bench.worker import vllm_python

NEW_FILES = "new files"
WHO_IS_COMPARED = """\
  kvtier     seals and verifies every block. Its quota is full: a store evicts a block and
             overwrites its file. Jobs come in random order.
  new files  the same with room to spare: a store makes new files. Its loads are kvtier's.
  vLLM       its fs tier with its C helper, 32 threads and O_DIRECT; checks nothing, never evicts:
             a store makes new files. Its directories exist already. Surplus blocks are removed
             between rounds, also those of `new files`."""


def run() -> None:
    Speeds(
        name="fs_speed",
        who_is_compared=WHO_IS_COMPARED,
        contenders={
            KVTIER: Contender(sys.executable, FS),
            NEW_FILES: Contender(sys.executable, FS, grows=True, is_read=False),
            VLLM: Contender(vllm_python("fs_speed"), VLLM_FS),
        },
        tier_bytes=768 * MiB,
        sizes_alone=SIZES,
        bars=Bars(
            loads_to_vllm=dict.fromkeys(SIZES, 1.2), stores_to_vllm=dict.fromkeys(SIZES, 0.8)
        ),
    ).run()


if __name__ == "__main__":
    run_alone(run, __doc__)
