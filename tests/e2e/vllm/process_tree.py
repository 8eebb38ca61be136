"""The processes of one engine, and the shared memory that they have."""

from __future__ import annotations

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_DELETED = " (deleted)"


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [further for child in children for further in descendants(child)]


def regions_of(pid: int) -> dict[Path, bool]:
    """kvtier's regions that the process has mapped, and whether they still have a name."""
    regions = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, prefix, rest = line.partition(f"{SHARED_MEMORY}/kvtier-")
        if prefix:
            regions[Path(prefix + rest.removesuffix(_DELETED))] = not rest.endswith(_DELETED)
    return regions


def regions_below(pid: int) -> dict[Path, bool]:
    """The same of the process and all its descendants."""
    regions: dict[Path, bool] = {}
    for member in [pid, *descendants(pid)]:
        regions |= regions_of(member)
    return regions
