"""Tiers on disk to be measured, kvtier's and vLLM's own, behind one interface.

Each function imports what it needs: this module runs in two environments, and only one has vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SPARE_BYTES = 1 << 30
"""Files of blocks are removed in batches of this size."""


@dataclass(frozen=True)
class Case:
    """The tier to make."""

    directory: str
    """Where the tier may write; nothing else is in it."""
    region: str
    """Name of the memory that stands for the primary tier. Tiers that are compared share one, since
    all I/O is slower into memory that is fragmented."""
    block_bytes: int
    num_blocks: int
    """Blocks that the tier keeps."""
    job_blocks: int
    """Blocks of one job. One job stored them, too, unless they are scattered."""
    jobs_at_once: int
    scattered: bool = False
    """The blocks of a job lie all over the tier instead of side by side."""
    server: str = ""
    """For tiers on a server: their keys, as JSON."""
    grows: bool = False
    """The tier has room for more blocks, so it evicts nothing. The benchmark removes the oldest
    blocks between rounds."""


@dataclass(frozen=True)
class Round:
    """Loads or stores for a while."""

    is_load: bool
    seconds: float
    is_alone: bool = False
    """One large job at a time, with all the blocks that are otherwise under way together: a single
    request that comes back, or ends."""
    most_bytes: int | None = None
    """The round ends when so much has been moved."""


@dataclass(frozen=True)
class Watch:
    """How to watch the scheduler's thread for a while."""

    seconds: float
    is_busy: bool
    """Loads and stores are under way all the time."""


@dataclass(frozen=True)
class LookUp:
    """How to look up blocks."""

    is_present: bool
    is_prompt: bool
    """All keys in one call, in prompt order, instead of one call for each key."""


def nothing_to_do(_: Sequence[Any]) -> None:
    return


@dataclass
class DiskSubject:
    """A tier to be measured, and how to call it."""

    tier: Any
    make_key: Callable[[bytes, int], Any]
    make_job: Callable[[int, Sequence[Any], Any, bool], Any]
    """Arguments: number, keys, rows, and whether it is a load."""
    make_context: Callable[[str], Any]
    schedule_end: Any
    look_up: Callable[[Sequence[Any], Any], Sequence[Any]]
    forget: Callable[[list[Any]], None] = nothing_to_do
    """Remove blocks that a tier without a limit would keep. Not timed."""
    cool: Callable[[list[Any]], None] = nothing_to_do
    """Drop blocks from the page cache, so that they are read from the disk. Not timed."""
    about: dict[str, Any] = field(default_factory=dict)


class BlockFiles:
    """What benchmarks do between rounds with the files of a tier that has one for each block."""

    def __init__(self, path_of: Callable[[Any], str], block_bytes: int, is_direct: bool) -> None:
        """`is_direct`: the tier bypasses the page cache."""
        self._path_of = path_of
        self._block_bytes = block_bytes
        self._is_direct = is_direct
        self._doomed: list[Any] = []

    def forget(self, keys: list[Any]) -> None:
        """Remove blocks, once they are 1 GiB together. Their directories stay, as they would in a
        store that has been in use for a while."""
        self._doomed.extend(keys)
        if len(self._doomed) * self._block_bytes > SPARE_BYTES:
            for key in self._doomed:
                os.unlink(self._path_of(key))
            self._doomed.clear()
            os.sync()  # otherwise the next measurement would wait for it

    def cool(self, keys: list[Any]) -> None:
        """Drop the files of these blocks from the page cache."""
        if self._is_direct:  # then nothing was ever in the page cache
            return
        for key in keys:
            fd = os.open(self._path_of(key), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def kvtier_disk_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.kvtier_disk_subjects import make_disk_subject

    return make_disk_subject(case, view)


def kvtier_fs_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.kvtier_disk_subjects import make_fs_subject

    return make_fs_subject(case, view)


def vllm_subject(case: Case, view: memoryview) -> DiskSubject:
    from tests.bench.vllm_fs_tier import make_subject

    return make_subject(case, view)


def _on_server(name: str) -> Callable[[Case, memoryview], DiskSubject]:
    def make(case: Case, view: memoryview) -> DiskSubject:
        from tests.bench.server_subjects import MAKERS

        return MAKERS[name](case, view)

    return make


DISK, FS, VLLM_FS = "kvtier-disk", "kvtier-fs", "vllm-fs"
VALKEY, RAW_RESP, VALKEY_PY, GLIDE = "kvtier-valkey", "raw-resp", "valkey-py", "glide"
OBJ, OBSTORE, RAW_HTTP = "kvtier-obj", "obstore", "raw-http"
MOONCAKE, RAW_MOONCAKE, RAW_PARTS = "kvtier-mooncake", "mooncake-calls", "mooncake-calls-in-parts"
LMCACHE = "lmcache-mooncake"


def _in_pool(name: str) -> Callable[[Case, memoryview], DiskSubject]:
    def make(case: Case, view: memoryview) -> DiskSubject:
        from tests.bench.mooncake_subjects import MAKERS

        return MAKERS[name](case, view)

    return make


SUBJECTS: dict[str, Callable[[Case, memoryview], DiskSubject]] = {
    DISK: kvtier_disk_subject,
    FS: kvtier_fs_subject,
    VLLM_FS: vllm_subject,
    **{
        name: _on_server(name)
        for name in (VALKEY, RAW_RESP, VALKEY_PY, GLIDE, OBJ, OBSTORE, RAW_HTTP)
    },
    **{name: _in_pool(name) for name in (MOONCAKE, RAW_MOONCAKE, RAW_PARTS, LMCACHE)},
}
