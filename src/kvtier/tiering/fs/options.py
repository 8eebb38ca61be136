"""What the user may set for the fs tier, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config import ConfigError, Problem
from kvtier.config.kinds import SIZE, SIZE_OR_ZERO, Kind, Unfit, whole_number
from kvtier.config.redaction import describe

__all__ = ["FsOptions"]

_DEFAULT_THREADS = 2
_MOST_THREADS = 256
_LEAST_BLOCKS = 8
_DIRECTORY_BYTES = 2 << 20
"""For a namespace, its directories and everything that is no block."""


def _root_dir(value: object) -> Path:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise Unfit('Write the path of a directory in quotes, such as "/mnt/shared/kv"')
    path = Path(text)
    if not path.is_absolute():
        raise Unfit("Write the whole path, from / on: engines start in all kinds of directories")
    return path


def _threads(value: object) -> int:
    number = whole_number(1).parse(value)
    if number > _MOST_THREADS:
        raise Unfit(f"Write at most {_MOST_THREADS}")
    return number


_THREADS: Kind[int] = Kind(f"a whole number from 1 to {_MOST_THREADS}", _threads)
_KINDS: dict[str, Kind[Any]] = {
    "root_dir": Kind("the path of a directory", _root_dir),
    "max_bytes": SIZE,
    "min_free_bytes": SIZE_OR_ZERO,
    "n_read_threads": _THREADS,
    "n_write_threads": _THREADS,
}


@dataclass(frozen=True, slots=True)
class FsOptions:
    """The checked keys of an fs tier."""

    root_dir: Path
    max_bytes: int
    min_free_bytes: int
    n_read_threads: int
    n_write_threads: int
    max_bytes_as_given: object = field(default=None, compare=False)
    """As the user has written it."""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> FsOptions:
        """Raises `ConfigError` with all that is wrong. What is None was not given."""
        needed = ("root_dir", "max_bytes")
        present = {key: value for key, value in given.items() if value is not None or key in needed}
        refusals = [_KINDS[key].refusal(key, value) for key, value in present.items()]
        problems = [problem for problem in refusals if problem is not None]
        if problems:
            raise ConfigError(*problems)
        parsed = {key: _KINDS[key].parse(value) for key, value in present.items()}
        options = cls(
            parsed["root_dir"],
            parsed["max_bytes"],
            parsed.get("min_free_bytes", 0),
            parsed.get("n_read_threads", _DEFAULT_THREADS),
            parsed.get("n_write_threads", _DEFAULT_THREADS),
            present["max_bytes"],
        )
        parent = options.root_dir.parent
        if not parent.is_dir():
            remedy = f"Make the directory {parent}, or mount the file system first"
            if os.path.lexists(parent):
                remedy = f"Give another path: {parent} is no directory"
            raise ConfigError(
                Problem(
                    "root_dir",
                    describe(str(options.root_dir)),
                    "a directory, or a new name in one that exists",
                    remedy,
                )
            )
        return options

    def require_room_for(self, block_bytes: int) -> None:
        """Raises `ConfigError` if there is hardly room for blocks of this size."""
        least = _DIRECTORY_BYTES + _LEAST_BLOCKS * block_bytes
        if self.max_bytes < least:
            raise ConfigError(
                Problem(
                    "max_bytes",
                    describe(self.max_bytes_as_given),
                    f"at least {least} bytes",
                    f"Give room for {_LEAST_BLOCKS} blocks of {block_bytes} bytes and for "
                    "directories; a cache that is read again is as large as many prompts",
                )
            )
