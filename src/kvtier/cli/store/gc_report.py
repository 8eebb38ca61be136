"""What `kvtier store gc` has found and done."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.cli.store.amounts import as_size, as_time
from kvtier.cli.store.fs_figures import namespace_line
from kvtier.cli.store.fs_gc import Candidate, Tidied
from kvtier.cli.store.fs_ledger import ledger_remark
from kvtier.cli.store.fs_removal import Removal
from kvtier.tiering.fs.reader import Stray, Survey

__all__ = ["GcReport", "candidate_lines"]

_SHOWN_STRAYS = 20


@dataclass(slots=True)
class GcReport:
    path: Path
    seen: Survey
    """How it was before."""
    candidates: Sequence[Candidate]
    is_complete: bool = True
    tidied: Tidied | None = None
    """None: nothing was done, only looked at."""
    removals: Sequence[Removal] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def chosen(self) -> list[Candidate]:
        """Those that are to be removed."""
        return [each for each in self.candidates if each.is_chosen]

    @property
    def _orphans(self) -> list[Candidate]:
        return [each for each in self.candidates if each.is_orphan]

    @property
    def _num_dead(self) -> int:
        if self.tidied is not None:
            return self.tidied.num_reclaimed
        return sum(not seat.is_alive for seat in self.seen.seats)

    @property
    def _num_removed(self) -> int:
        return sum(removal.num_blocks for removal in self.removals)

    @property
    def _freed_bytes(self) -> int:
        return sum(removal.freed_bytes for removal in self.removals)

    def as_json(self) -> dict[str, Any]:
        removed = {removal.space.name for removal in self.removals if removal.is_whole}
        strays = self.seen.strays
        return {
            "path": str(self.path),
            "dry_run": self.tidied is None,
            "complete": self.is_complete,
            "dead_engines": self._num_dead,
            "ledger_lost": self.seen.balance is None,
            "corrected_blocks": None if self.tidied is None else self.tidied.added_blocks,
            "corrected_bytes": None if self.tidied is None else self.tidied.added_bytes,
            "orphaned": [
                {
                    "namespace": orphan.space.name,
                    "blocks": orphan.space.num_blocks,
                    "bytes": orphan.space.num_bytes,
                    "used_at": as_time(orphan.space.used_ns),
                    "chosen": orphan.is_chosen,
                    "removed": orphan.space.name in removed,
                }
                for orphan in self._orphans
            ],
            "kept": [
                {"namespace": each.space.name, "reason": each.kept_because}
                for each in self.candidates
                if each.kept_because is not None
            ],
            "removed_blocks": self._num_removed,
            "freed_bytes": self._freed_bytes,
            "stray_files": len(strays),
            "stray_bytes": sum(stray.num_bytes for stray in strays),
            "strays": [_relative(stray, self.path) for stray in strays],
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> Iterator[str]:
        yield str(self.path)
        yield from self._tidied_lines()
        if self.tidied is None:
            yield from candidate_lines(self.candidates)
        elif self.removals:
            num_whole = sum(removal.is_whole for removal in self.removals)
            yield (
                f"removed     {num_whole} of {len(self._orphans)} orphaned namespaces: "
                f"{self._num_removed} blocks, {as_size(self._freed_bytes)}"
            )
            yield from _kept_lines(self.candidates, self.removals)
        else:
            yield f"removed     none of {len(self._orphans)} orphaned namespaces"
            yield from _kept_lines(self.candidates)
        if not self.is_complete:
            yield "            ended by Ctrl-C: what is left can be removed later"
        yield from self._stray_lines()

    def _tidied_lines(self) -> Iterator[str]:
        if self.tidied is None:
            yield f"engines     dead, to be reclaimed: {self._num_dead}"
            yield f"ledger      {ledger_remark(self.seen) or 'right, as far as can be said'}"
            return
        yield f"engines     dead, and reclaimed: {self.tidied.num_reclaimed}"
        added_blocks, added_bytes = self.tidied.added_blocks, self.tidied.added_bytes
        if self.seen.balance is None:
            yield "ledger      could not be read, and was counted again"
        elif added_blocks or added_bytes:
            yield f"ledger      corrected by {added_blocks:+d} blocks and {added_bytes:+d} bytes"
        else:
            yield "ledger      counted again, and right"

    def _stray_lines(self) -> Iterator[str]:
        strays = self.seen.strays
        if not strays:
            return
        size = as_size(sum(stray.num_bytes for stray in strays))
        yield f"strays      {len(strays)} files that are no blocks ({size}); remove them by hand"
        for stray in strays[:_SHOWN_STRAYS]:
            yield f"  {_relative(stray, self.path)}"
        if len(strays) > _SHOWN_STRAYS:
            yield f"  and {len(strays) - _SHOWN_STRAYS} more; --json has all of them"


def candidate_lines(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Before anything is removed."""
    chosen = [each.space for each in candidates if each.kept_because is None]
    num_orphans = sum(each.is_orphan for each in candidates)
    yield f"orphaned    {num_orphans} namespaces without a live engine, {len(chosen)} to remove"
    for space in chosen:
        yield f"  remove  {namespace_line(space)}"
    yield from _kept_lines(candidates)


def _kept_lines(candidates: Sequence[Candidate], removals: Sequence[Removal] = ()) -> Iterator[str]:
    """`removals`: what was removed of some of them, which were to be removed as a whole."""
    removed = {removal.space.name: removal for removal in removals}
    for each in candidates:
        if each.kept_because is not None:
            space, part = each.space, removed.get(each.space.name)
            num_blocks, num_bytes = space.num_blocks, space.num_bytes
            if part is not None:
                num_blocks = max(0, num_blocks - part.num_blocks)
                num_bytes = max(0, num_bytes - part.freed_bytes)
            size = f"{num_blocks} blocks, {as_size(num_bytes)}"
            yield f"  keep    {space.name}  {size}: {each.kept_because}"


def _relative(stray: Stray, root: Path) -> str:
    return os.path.relpath(stray.path, root)
