"""Measures the disk with `fio`, as a reference for tiers on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """How fio reads and writes."""

    name: str
    threads: int
    depth: int
    """Requests that each thread has under way. It has as many buffers, and reuses them."""


def psync(threads: int) -> Engine:
    return Engine("psync", threads, 1)


def io_uring(depth: int) -> Engine:
    return Engine("io_uring", 1, depth)


def require_fio() -> None:
    if shutil.which("fio") is None:
        sys.exit("fio is not installed. It measures the disk; `make bench` installs it.")


def lay_out(path: Path, num_bytes: int) -> None:
    """Write all bytes of a file once, since the first write is slower than later ones."""
    _run(path, num_bytes, 1 << 20, "write", io_uring(8))


def bytes_per_second(
    path: Path, num_bytes: int, block_bytes: int, engine: Engine, *, write: bool, seconds: float
) -> float:
    """Read or write blocks at random places of the file for `seconds`, bypassing the page cache."""
    what = "write" if write else "read"
    report = _run(
        path,
        num_bytes,
        block_bytes,
        f"rand{what}",
        engine,
        "--time_based",
        f"--runtime={round(seconds * 1000)}ms",
        "--norandommap",
        "--randrepeat=0",
    )
    return float(report[what]["bw_bytes"])


def _run(
    path: Path, num_bytes: int, block_bytes: int, what: str, engine: Engine, *options: str
) -> Any:
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--size={num_bytes}",
        f"--bs={block_bytes}",
        f"--rw={what}",
        f"--ioengine={engine.name}",
        f"--numjobs={engine.threads}",
        f"--iodepth={engine.depth}",
        "--thread",
        "--group_reporting",
        "--direct=1",
        "--scramble_buffers=0",  # the same bytes every time, so that only the disk is measured
        "--output-format=json",
        *options,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode:
        sys.exit(f"fio failed ({' '.join(command)}): {ended.stderr or ended.stdout}")
    return json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]
