"""How late the scheduler is while the fs tier works at full rate, beside vLLM's own tier."""

from __future__ import annotations

from tests.bench.disk_jitter import FIGURES, compare_jitter
from tests.bench.disk_subjects import FS
from tests.bench.report import run_alone


def run() -> None:
    compare_jitter("fs_jitter", FS, judged=FIGURES)


if __name__ == "__main__":
    run_alone(run, __doc__)
