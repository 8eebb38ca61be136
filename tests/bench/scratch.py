"""Where benchmarks may write a lot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.report import RESULTS


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """On the disk to be measured: that of this checkout, or the one KVTIER_BENCH_DIR names. All
    that is in it is removed in the end."""
    parent = Path(os.environ.get("KVTIER_BENCH_DIR", RESULTS)).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"{parent} is to hold what is measured: {error}. KVTIER_BENCH_DIR names another folder"
        ) from error
    with TemporaryDirectory(prefix="scratch-", dir=parent) as directory:
        yield Path(directory)
