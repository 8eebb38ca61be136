"""The keys of the disk tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kvtier.config import ConfigError, OffloadingParallelConfig, Problem, TierOptions
from kvtier.config.errors import describe
from kvtier.config.fields import SIZE, Kind, Unfit, absolute_path, key, whole_number_up_to

__all__ = ["DiskOptions"]

_ANY_PATH = absolute_path(
    "the path of a file",
    'Write the path of the slab file in quotes, such as "/mnt/nvme/kv.slab"',
)


def _file_path(value: object) -> Path:
    path = _ANY_PATH.parse(value)
    if not path.name or str(value).endswith("/"):
        raise Unfit(f'Name a file, such as "{path / "kv.slab"}"')
    return path


def _use_o_direct(value: object) -> bool | None:
    if value == "auto":
        return None
    if isinstance(value, bool):
        return value
    raise Unfit('Write true or false without quotes, or "auto"')


def _policy(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise Unfit('Write the name of a policy in quotes, such as "lru"')
    return value


@dataclass(frozen=True, slots=True)
class DiskOptions(TierOptions):
    """The keys of an entry with `"type": "disk"`."""

    path: Path = key(
        Kind(_ANY_PATH.allowed, _file_path), "The slab file.", example='"/mnt/nvme/kv.slab"'
    )
    max_bytes: int | None = key(
        SIZE,
        "Size of the slab. Required for a new slab; without it, an existing slab keeps its size.",
        default=None,
        example='"500GiB"',
    )
    eviction_policy: str = key(
        Kind("the name of an eviction policy", _policy),
        "Which block leaves the slab first.",
        default="lru",
        null_is_default=True,
    )
    io_threads: int | None = key(
        whole_number_up_to(64, "; four are enough for most disks"),
        "I/O threads; with two or more, one stores and the others only load. Default: 4 for blocks "
        "of 512 KiB or more, otherwise 2.",
        default=None,
    )
    use_o_direct: bool | None = key(
        Kind('true, false or "auto"', _use_o_direct),
        'Bypass the page cache; `"auto"` and `null`: where the file system can.',
        default=None,
    )

    not_here: ClassVar[Mapping[str, str]] = {
        "root_dir": 'Here it is "path", which names a file',
        "n_read_threads": 'Here it is "io_threads"',
        "n_write_threads": 'Here it is "io_threads"',
        "min_free_bytes": "Remove it; a slab takes all of its room at the start",
    }

    def for_replica(self, parallel: OffloadingParallelConfig) -> DiskOptions:
        """Return the options with a path of this replica's own, because all data-parallel replicas
        are configured with the same path. The index is tested too, because some engines tell every
        replica that the data-parallel size is 1."""
        if parallel.data_parallel_size <= 1 and parallel.data_parallel_index == 0:
            return self
        name = f"{self.path.stem}-dp{parallel.data_parallel_index}{self.path.suffix}"
        return replace(self, path=self.path.with_name(name))

    def require_place(self) -> None:
        """Raise `ConfigError` if the directory of the slab does not exist."""
        if not self.path.parent.is_dir():
            raise ConfigError(
                Problem(
                    "path",
                    describe(str(self.path)),
                    "a file in a directory that exists",
                    f"Make the directory {self.path.parent}, or mount the disk first",
                )
            )
