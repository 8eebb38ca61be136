"""The keys of the fs tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtier.config import ConfigError, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import SIZE, SIZE_OR_ZERO, absolute_path, key, whole_number_up_to

__all__ = ["FsOptions"]

_DEFAULT_THREADS = 2
_THREADS = whole_number_up_to(256)
_LEAST_BLOCKS = 8
_DIRECTORY_BYTES = 2 << 20
"""Room for a namespace, its directories and every other file that is not a block."""


@dataclass(frozen=True, slots=True)
class FsOptions(TierOptions):
    """The keys of an entry with `"type": "fs"`."""

    root_dir: Path = key(
        absolute_path(
            "the path of a directory",
            'Write the path of a directory in quotes, such as "/mnt/shared/kv"',
        ),
        "The shared directory.",
        example='"/mnt/shared/kv"',
    )
    max_bytes: int = key(SIZE, "Bytes that all engines together may store there.", example='"2TiB"')
    min_free_bytes: int = key(
        SIZE_OR_ZERO,
        "Bytes of its file system that stay free for others.",
        default=0,
        null_is_default=True,
    )
    n_read_threads: int = key(
        _THREADS, "Threads that load.", default=_DEFAULT_THREADS, null_is_default=True
    )
    n_write_threads: int = key(
        _THREADS, "Threads that store.", default=_DEFAULT_THREADS, null_is_default=True
    )

    not_here: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("path", "dir", "directory", "root", "root_path"), 'Here it is "root_dir"'),
        **dict.fromkeys(
            ("io_threads", "n_threads"), 'Here it is "n_read_threads" and "n_write_threads"'
        ),
        "eviction_policy": "Remove it; the fs tier always evicts the least recently used blocks",
        "use_o_direct": "Remove it; the tier tests for O_DIRECT when it starts",
    }

    def require_place(self) -> None:
        parent = self.root_dir.parent
        if parent.is_dir():
            return
        remedy = f"Make the directory {parent}, or mount the file system first"
        if os.path.lexists(parent):
            remedy = f"Give another path: {parent} is not a directory"
        raise ConfigError(
            Problem(
                "root_dir",
                describe(str(self.root_dir)),
                "a directory, or a new name in one that exists",
                remedy,
            )
        )

    def require_room_for(self, block_bytes: int) -> None:
        """Raise `ConfigError` unless there is room for a few blocks of this size."""
        least = _DIRECTORY_BYTES + _LEAST_BLOCKS * block_bytes
        if self.max_bytes < least:
            raise ConfigError(
                Problem(
                    "max_bytes",
                    self.as_given("max_bytes"),
                    f"at least {least} bytes",
                    f"Give room for {_LEAST_BLOCKS} blocks of {block_bytes} bytes and for "
                    "directories; a useful cache holds many prompts",
                )
            )
