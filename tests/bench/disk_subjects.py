"""Tiers on disk to be measured: kvtier's, and vLLM's own, behind one face.

Each function imports what it needs: this runs in two environments, of which one has vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What to measure."""

    directory: str
    """Where the tier may write; nobody else does."""
    region: str
    """Name of the memory that stands for the primary tier. Tiers to be compared are given the same
    one: in memory that lies in pieces, all I/O is slower."""
    block_bytes: int
    num_blocks: int
    """So many are kept."""
    job_blocks: int
    """Blocks of one job, which were stored by one job, too, unless they are scattered."""
    jobs_at_once: int
    scattered: bool = False
    """Whether the blocks of a job lie all over the tier, instead of side by side."""
    grows: bool = False
    """Whether there is room for more: then nothing is evicted, and too much is removed between the
    rounds."""


@dataclass(frozen=True)
class Round:
    """What to do with it for a while."""

    is_load: bool
    seconds: float
    is_alone: bool = False
    """One large job at a time, of as many blocks as are otherwise under way in all: a single
    request that comes back, or ends."""


@dataclass(frozen=True)
class Watch:
    """How to watch the scheduler's thread for a while."""

    seconds: float
    is_busy: bool
    """Whether loads and stores are under way all the time."""


@dataclass(frozen=True)
class LookUp:
    """How to ask a tier for blocks."""

    is_present: bool
    is_prompt: bool
    """Together, in prompt order, instead of one by one."""


def nothing_to_do(_: Sequence[Any]) -> None:
    return


@dataclass
class DiskSubject:
    """A tier to be measured, and how to talk to it."""

    tier: Any
    make_key: Callable[[bytes, int], Any]
    make_job: Callable[[int, Sequence[Any], Any, bool], Any]
    """Of a number, keys, rows, and whether it is a load."""
    make_context: Callable[[str], Any]
    schedule_end: Any
    look_up: Callable[[Sequence[Any], Any], Sequence[Any]]
    forget: Callable[[list[Any]], None] = nothing_to_do
    """Remove blocks that a tier without a limit would keep. Not timed."""
    cool: Callable[[list[Any]], None] = nothing_to_do
    """See to it that blocks are read from the disk and not from the page cache. Not timed."""
    about: dict[str, Any] = field(default_factory=dict)


def kvtier_disk_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.kvtier_disk_tier import make_subject

    return make_subject(case, view)


def kvtier_fs_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.kvtier_fs_tier import make_subject

    return make_subject(case, view)


def vllm_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.vllm_fs_tier import make_subject

    return make_subject(case, view)


DISK, FS, VLLM_FS = "kvtier-disk", "kvtier-fs", "vllm-fs"
SUBJECTS = {DISK: kvtier_disk_subject, FS: kvtier_fs_subject, VLLM_FS: vllm_subject}
