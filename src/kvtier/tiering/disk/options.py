"""What the user may set for the disk tier, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import ConfigError, OffloadingParallelConfig, Problem
from kvtier.config.kinds import SIZE, Kind, Unfit, whole_number
from kvtier.config.redaction import describe

__all__ = ["DiskOptions"]

_MOST_IO_THREADS = 64


def _path(value: object) -> Path:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise Unfit('Write the path of the slab file in quotes, such as "/mnt/nvme/kv.slab"')
    path = Path(value)
    if not path.is_absolute():
        raise Unfit("Write the whole path, from / on: engines start in all kinds of directories")
    if not path.name or value.endswith("/"):
        raise Unfit(f'Name a file, such as "{path / "kv.slab"}"')
    return path


def _io_threads(value: object) -> int:
    number = whole_number(1).parse(value)
    if number > _MOST_IO_THREADS:
        raise Unfit(f"Write at most {_MOST_IO_THREADS}; four are enough for most disks")
    return number


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


_KINDS: dict[str, Kind[Any]] = {
    "path": Kind("the path of a file", _path),
    "max_bytes": SIZE,
    "eviction_policy": Kind("the name of an eviction policy", _policy),
    "io_threads": Kind(f"a whole number from 1 to {_MOST_IO_THREADS}", _io_threads),
    "use_o_direct": Kind('true, false or "auto"', _use_o_direct),
}


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The checked keys of a disk tier."""

    path: Path
    max_bytes: int | None
    eviction_policy: str
    io_threads: int | None
    use_o_direct: bool | None

    @classmethod
    def parse(cls, given: Mapping[str, object], parallel: OffloadingParallelConfig) -> DiskOptions:
        """Raises `ConfigError` with all that is wrong. What is None was not given."""
        present = {k: value for k, value in given.items() if value is not None or k == "path"}
        refusals = [_KINDS[key].refusal(key, value) for key, value in present.items()]
        problems = [problem for problem in refusals if problem is not None]
        if problems:
            raise ConfigError(*problems)
        parsed = {key: _KINDS[key].parse(value) for key, value in present.items()}
        path = _own_path(parsed["path"], parallel)
        if not path.parent.is_dir():
            raise ConfigError(
                Problem(
                    "path",
                    describe(str(path)),
                    "a file in a directory that exists",
                    f"Make the directory {path.parent}, or mount the disk first",
                )
            )
        return cls(
            path,
            parsed.get("max_bytes"),
            parsed.get("eviction_policy", "lru"),
            parsed.get("io_threads"),
            parsed.get("use_o_direct"),
        )


def _own_path(path: Path, parallel: OffloadingParallelConfig) -> Path:
    """Data-parallel replicas are all given one path, and each needs a file of its own. Some engines
    tell a replica that it is one of one, but keep its index."""
    if parallel.data_parallel_size <= 1 and parallel.data_parallel_index == 0:
        return path
    return path.with_name(f"{path.stem}-dp{parallel.data_parallel_index}{path.suffix}")
