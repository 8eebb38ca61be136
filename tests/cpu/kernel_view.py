"""The kernel's view of a process's files, mappings and locks."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path


def open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the one that listed them
    return found


def mapped(path: str) -> list[str]:
    """The lines of /proc/self/maps about this file, under its name or after losing it."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if path in line]


def resident_kib(path: str) -> int:
    """How many bytes of a mapped file are in this process's page tables."""
    found = re.search(
        rf"{re.escape(path)}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
    )
    assert found
    return int(found[1])


def wait_until_blocked(pid: int) -> None:
    """Return when the process waits for a lock."""
    deadline = time.monotonic() + 60
    while not re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()):
        assert time.monotonic() < deadline, f"process {pid} does not wait for a lock"
        time.sleep(0.001)


def wait_until_dead(pid: int) -> None:
    """Return when a killed process has ended. It may be a child of any process."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and _state(pid) not in "ZX":
        assert time.monotonic() < deadline, f"process {pid} does not die"
        time.sleep(0.001)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def assert_nothing_left(directory: str, before: dict[str, str]) -> None:
    """No file or mapping in `directory`, and only the descriptors that were there `before`."""
    gc.collect()
    assert os.listdir(directory) == []
    assert open_files() == before
    assert not mapped(directory)
