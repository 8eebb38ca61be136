"""How late the scheduler is while the disk tier works at full rate, beside vLLM's own tier."""

from __future__ import annotations

from tests.bench.disk_subjects import DISK
from tests.bench.jitter import compare_jitter
from tests.bench.report import run_alone


def run() -> None:
    compare_jitter("disk_jitter", DISK, judged=("answer", "step"))


if __name__ == "__main__":
    run_alone(run, __doc__)
