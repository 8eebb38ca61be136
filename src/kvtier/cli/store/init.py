"""`kvtier store init`: makes a directory the root of an fs tier, or makes an emptied one a root
again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli.store.answers import write_result
from kvtier.cli.store.fs_removal import seat_at
from kvtier.cli.store.refusal import StoreRefused
from kvtier.tiering.fs.reader import read_balance
from kvtier.tiering.fs.root import is_root

__all__ = ["init_root"]

_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Made:
    path: Path
    was_there: bool
    num_blocks: int
    uid: int

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "made": not self.was_there,
            "blocks": self.num_blocks,
            "uid": self.uid,
        }

    def lines(self) -> Iterator[str]:
        if self.was_there:
            yield f"{self.path} was the root of an fs tier already, with {self.num_blocks} blocks."
        else:
            yield (
                f"{self.path} is the root of an fs tier now, with {self.num_blocks} blocks. "
                "Running engines that had lost it take it again within seconds."
            )
        yield f"It belongs to uid {self.uid}: engines have to run as that user."


def init_root(path: Path, *, as_json: bool) -> int:
    """Raises `StoreRefused`, `NotDone` or `OSError`."""
    if not path.absolute().parent.is_dir():
        raise StoreRefused(
            f"there is no {path.absolute().parent}: make it, or mount the file system first"
        )
    was_there = path.is_dir() and is_root(path) and read_balance(path) is not None
    with seat_at(path, _PATIENCE_S) as books:
        num_blocks = books.ledger.read().num_blocks
    made = _Made(path, was_there, num_blocks, os.stat(path).st_uid)
    write_result(made, as_json=as_json)
    return 0
