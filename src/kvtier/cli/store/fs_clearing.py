"""Empties an fs root, or some of its namespaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli.store.amounts import as_size
from kvtier.cli.store.fs_removal import remove_namespaces, seat_at
from kvtier.cli.store.interrupts import noted_interrupts
from kvtier.tiering.fs.reader import SeenNamespace

__all__ = ["FsClearing", "clear_namespaces"]


@dataclass(frozen=True, slots=True)
class FsClearing:
    """`Clearing` of an fs root."""

    path: str
    num_blocks: int
    freed_bytes: int
    num_left: int
    """Blocks of namespaces that are one engine's alone. They go when it ends."""
    is_complete: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "complete": self.is_complete,
            "cleared_blocks": self.num_blocks,
            "freed_bytes": self.freed_bytes,
            "left_blocks": self.num_left,
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.path}: {self.num_blocks} blocks were removed, {as_size(self.freed_bytes)}."
        if not self.is_complete:
            yield "It was ended by Ctrl-C: the other blocks are still there."
        if self.num_left:
            yield (
                f"{self.num_left} blocks were left alone: only the engines that stored them, after "
                "a reset of their cache, find them, and remove them when they end."
            )


def clear_namespaces(
    path: Path,
    spaces: Sequence[SeenNamespace],
    num_left: int,
    patience_s: float,
    on_progress: Callable[[int, int], None],
) -> FsClearing:
    """Raises `StoreRefused` or `NotDone`."""
    started = time.monotonic()
    with noted_interrupts() as is_stopping:
        with seat_at(path, patience_s) as books:
            books.reclaim()
            removals = remove_namespaces(books, spaces, is_stopping, on_progress)
        is_complete = not is_stopping()
    return FsClearing(
        str(path),
        sum(removal.num_blocks for removal in removals),
        sum(removal.freed_bytes for removal in removals),
        num_left,
        is_complete,
        time.monotonic() - started,
    )
