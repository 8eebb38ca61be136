"""The processes of one engine, and their shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_DELETED = " (deleted)"


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [further for child in children for further in descendants(child)]


def regions_of(pid: int) -> dict[Path, bool]:
    """kvtier's regions that the process has mapped, and whether they still have a name."""
    regions = {}
    for line in _maps_of(pid):
        path = Path(line[line.index(str(SHARED_MEMORY)) :].removesuffix(_DELETED))
        if _is_ours(path):
            regions[path] = not line.endswith(_DELETED)
    return regions


def regions_below(pid: int) -> dict[Path, bool]:
    """The regions of the process and all its descendants."""
    regions: dict[Path, bool] = {}
    for member in [pid, *descendants(pid)]:
        regions |= regions_of(member)
    return regions


@contextmanager
def vllms_own_removed(*pids: int) -> Iterator[None]:
    """Remove the shared memory that vLLM and Python leave behind when processes are killed inside
    this context. kvtier leaves none."""
    # Compared by inode: the C library opens a semaphore under one name and then renames it.
    inodes = {
        int(line.split()[4])
        for pid in pids
        for member in [pid, *descendants(pid)]
        for line in _maps_of(member)
    }
    theirs = [
        path
        for path in SHARED_MEMORY.iterdir()
        if path.stat().st_ino in inodes and not _is_ours(path)
    ]
    yield
    for path in theirs:
        path.unlink(missing_ok=True)


def _maps_of(pid: int) -> list[str]:
    """Mappings of shared memory, as lines."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if f" {SHARED_MEMORY}/" in line]


def _is_ours(path: Path) -> bool:
    return path.name.startswith("kvtier-")
