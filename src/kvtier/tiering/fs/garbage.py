"""`kvtier store gc` on an fs root: reclaims what dead engines left, corrects the ledger, and
removes namespaces that no live engine uses.

The ledger is the file that says how many blocks and bytes are stored, and how many bytes each
engine has reserved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config.sizes import as_size
from kvtier.tiering.fs.maintenance import Removal, opened_root, remove_namespaces
from kvtier.tiering.fs.survey import SeenNamespace, Survey, ledger_remark, read_engines
from kvtier.tiering.inspection import (
    GarbageCollection,
    InspectionRefused,
    Progress,
    Report,
    as_age,
    as_time,
    deferred_interrupts,
    matching_namespaces,
)

__all__ = ["FsGarbageCollection", "matching", "namespace_line"]

_PATIENCE_S = 30.0
"""How long to wait for engines and other commands to unlock the ledger."""
_SHOWN_STRAYS = 20
_INTERRUPTED = "ended by Ctrl-C before all of it was removed"
_NOT_WHOLE = "it holds blocks stored meanwhile, or foreign files, which are not removed"


def matching(namespaces: Sequence[SeenNamespace], wanted: str | None) -> list[SeenNamespace]:
    """The namespaces whose fingerprints begin with `wanted`; all namespaces if `wanted` is None.
    Raises `InspectionRefused` if `wanted` is given and matches none of them."""
    if wanted is None:
        return list(namespaces)
    names = matching_namespaces([space.name for space in namespaces], wanted)
    return [space for space in namespaces if space.name in names]


def namespace_line(space: SeenNamespace) -> str:
    """One line about a namespace: name, number and size of its blocks, time since the last use."""
    age = as_age((time.time_ns() - space.used_ns) / 1e9)
    return (
        f"{space.name}  {space.num_blocks} blocks, {as_size(space.num_bytes)}, last used {age} ago"
    )


def _candidate_line(space: SeenNamespace) -> str:
    """The same with the model, which a user knows better than the name."""
    found = space.description
    return namespace_line(space) if found is None else f"{namespace_line(space)}: {found.summary()}"


def _model_of(space: SeenNamespace) -> str | None:
    return None if space.description is None else space.description.model


@dataclass(slots=True)
class _Candidate:
    """A namespace, and whether gc removes it."""

    space: SeenNamespace
    is_orphan: bool
    """True if no live engine uses it."""
    kept_because: str | None
    """Shown to the user. None if gc is going to remove the namespace, or has removed it."""
    is_chosen: bool = field(init=False)
    """True if the options of the command select it for removal. Does not change later."""

    def __post_init__(self) -> None:
        self.is_chosen = self.kept_because is None


@dataclass(frozen=True, slots=True)
class _Tidied:
    """What `tidy_up` repaired."""

    num_reclaimed: int
    """Dead engines whose files and reservations were reclaimed."""
    added_blocks: int
    """Blocks added to the ledger's number; negative if the root held fewer than the ledger said."""
    added_bytes: int


class FsGarbageCollection(GarbageCollection):
    """Reclaims what dead engines left, counts all blocks again, and removes namespaces that no live
    engine uses."""

    def __init__(
        self, path: Path, seen: Survey, wanted: Sequence[str], older_than_s: int, started: float
    ) -> None:
        """`seen`: the root before gc changes anything. `wanted`, `older_than_s`: as for
        `_find_candidates`. `started`: when the survey began, in seconds on the monotonic clock.
        Raises `InspectionRefused`."""
        self._path = path
        self._seen = seen
        self._candidates = _find_candidates(seen, wanted, older_than_s)
        self._started = started
        self._tidied: _Tidied | None = None
        self._removals: Sequence[Removal] = ()
        if chosen := self._chosen():
            num_blocks = sum(each.space.num_blocks for each in chosen)
            size = as_size(sum(each.space.num_bytes for each in chosen))
            self.question = f"Remove {len(chosen)} of them, with {num_blocks} blocks, {size}?"

    def _chosen(self) -> list[_Candidate]:
        return [each for each in self._candidates if each.is_chosen]

    def _orphans(self) -> list[_Candidate]:
        return [each for each in self._candidates if each.is_orphan]

    def tidy_up(self) -> None:
        with deferred_interrupts() as is_stopping:
            with opened_root(self._path, _PATIENCE_S) as session:
                num_reclaimed = session.reclaim()
                added_bytes, added_blocks = session.count_again()
            self._tidied = _Tidied(num_reclaimed, added_blocks, added_bytes)
            is_interrupted = is_stopping()
        if is_interrupted:
            self.keep(is_interrupted=True)

    def keep(self, *, is_interrupted: bool) -> None:
        for each in self._chosen():
            each.kept_because = _INTERRUPTED if is_interrupted else "not confirmed"
        self.is_complete = not is_interrupted

    def remove(self, on_progress: Progress) -> None:
        """Keeps namespaces that an engine has begun to use since the survey."""
        with deferred_interrupts() as is_stopping:
            with opened_root(self._path, _PATIENCE_S) as session:
                now = Survey(None, read_engines(self._path))
                for each in self._chosen():
                    if now.live_users(each.space.name):
                        user = _first_user(now, each.space.name)
                        each.kept_because = f"a live engine began to use it during gc: {user}"
                spaces = [each.space for each in self._chosen() if each.kept_because is None]
                self._removals = remove_namespaces(session, spaces, is_stopping, on_progress)
            self.is_complete = not is_stopping()
        whole = {removal.space.name for removal in self._removals if removal.is_whole}
        for each in self._chosen():
            if each.kept_because is None and each.space.name not in whole:
                each.kept_because = _NOT_WHOLE if self.is_complete else _INTERRUPTED

    # --- report --------------------------------------------------------------------------------

    def report(self) -> Report:
        return Report(self._document(), list(self._lines()), self.is_complete)

    def _num_dead(self) -> int:
        if self._tidied is not None:
            return self._tidied.num_reclaimed
        return sum(not engine.is_alive for engine in self._seen.engines)

    def _document(self) -> dict[str, Any]:
        removed = {removal.space.name for removal in self._removals if removal.is_whole}
        strays, tidied = self._seen.strays, self._tidied
        return {
            "path": str(self._path),
            "dry_run": tidied is None,
            "complete": self.is_complete,
            "dead_engines": self._num_dead(),
            "ledger_lost": self._seen.balance is None,
            "corrected_blocks": None if tidied is None else tidied.added_blocks,
            "corrected_bytes": None if tidied is None else tidied.added_bytes,
            "orphaned": [
                {
                    "namespace": orphan.space.name,
                    "model": _model_of(orphan.space),
                    "blocks": orphan.space.num_blocks,
                    "bytes": orphan.space.num_bytes,
                    "used_at": as_time(orphan.space.used_ns),
                    "chosen": orphan.is_chosen,
                    "removed": orphan.space.name in removed,
                }
                for orphan in self._orphans()
            ],
            "kept": [
                {
                    "namespace": each.space.name,
                    "model": _model_of(each.space),
                    "reason": each.kept_because,
                }
                for each in self._candidates
                if each.kept_because is not None
            ],
            "removed_blocks": sum(removal.num_blocks for removal in self._removals),
            "freed_bytes": sum(removal.freed_bytes for removal in self._removals),
            "stray_files": len(strays),
            "stray_bytes": sum(stray.num_bytes for stray in strays),
            "strays": [os.path.relpath(stray.path, self._path) for stray in strays],
            "seconds": round(time.monotonic() - self._started, 3),
        }

    def _lines(self) -> Iterator[str]:
        yield str(self._path)
        yield from self._tidied_lines()
        num_orphans = len(self._orphans())
        if self._tidied is None:
            yield from self.candidate_lines()
        elif self._removals:
            num_whole = sum(removal.is_whole for removal in self._removals)
            num_blocks = sum(removal.num_blocks for removal in self._removals)
            size = as_size(sum(removal.freed_bytes for removal in self._removals))
            yield (
                f"removed     {num_whole} of {num_orphans} orphaned namespaces: "
                f"{num_blocks} blocks, {size}"
            )
            yield from self._kept_lines()
        else:
            yield f"removed     none of {num_orphans} orphaned namespaces"
            yield from self._kept_lines()
        if not self.is_complete:
            yield "            ended by Ctrl-C: what is left can be removed later"
        yield from self._stray_lines()

    def _tidied_lines(self) -> Iterator[str]:
        if self._tidied is None:
            yield f"engines     dead, to be reclaimed: {self._num_dead()}"
            yield f"ledger      {ledger_remark(self._seen) or 'no error found'}"
            return
        yield f"engines     dead, and reclaimed: {self._tidied.num_reclaimed}"
        added_blocks, added_bytes = self._tidied.added_blocks, self._tidied.added_bytes
        if self._seen.balance is None:
            yield "ledger      could not be read, and was counted again"
        elif added_blocks or added_bytes:
            yield f"ledger      corrected by {added_blocks:+d} blocks and {added_bytes:+d} bytes"
        else:
            yield "ledger      counted again: no error found"

    def candidate_lines(self) -> Iterator[str]:
        chosen = [each.space for each in self._candidates if each.kept_because is None]
        yield (
            f"orphaned    {len(self._orphans())} namespaces without a live engine, "
            f"{len(chosen)} to remove"
        )
        for space in chosen:
            yield f"  remove  {_candidate_line(space)}"
        yield from self._kept_lines()

    def _kept_lines(self) -> Iterator[str]:
        """One line for each namespace that stays. If a part of it was removed, the line has the
        size of the rest."""
        removed = {removal.space.name: removal for removal in self._removals}
        for each in self._candidates:
            if each.kept_because is not None:
                space, part = each.space, removed.get(each.space.name)
                num_blocks, num_bytes = space.num_blocks, space.num_bytes
                if part is not None:
                    num_blocks = max(0, num_blocks - part.num_blocks)
                    num_bytes = max(0, num_bytes - part.freed_bytes)
                size = f"{num_blocks} blocks, {as_size(num_bytes)}"
                model = _model_of(space)
                of = "" if model is None else f" of {model}"
                yield f"  keep    {space.name}  {size}{of}: {each.kept_because}"

    def _stray_lines(self) -> Iterator[str]:
        strays = self._seen.strays
        if not strays:
            return
        size = as_size(sum(stray.num_bytes for stray in strays))
        yield f"strays      {len(strays)} files that are no blocks ({size}); remove them by hand"
        for stray in strays[:_SHOWN_STRAYS]:
            yield f"  {os.path.relpath(stray.path, self._path)}"
        if len(strays) > _SHOWN_STRAYS:
            yield f"  and {len(strays) - _SHOWN_STRAYS} more; --json has all of them"


def _find_candidates(seen: Survey, wanted: Sequence[str], older_than_s: int) -> list[_Candidate]:
    """Return all namespaces, most recently used first. gc removes those that no live engine uses,
    whose names begin with one of `wanted` (any name if `wanted` is empty), and that were not used
    for `older_than_s` seconds. Raises `InspectionRefused` if an entry of `wanted` matches only
    namespaces that live engines use."""
    shared = [space for space in seen.namespaces if space.owner is None]
    meant: set[str] = set()
    for start in wanted:
        names = [space.name for space in matching(shared, start)]
        unused = {name for name in names if not seen.live_users(name)}
        if not unused:
            raise InspectionRefused(
                f"{names[0]} is used by a live engine, {_first_user(seen, names[0])}: end it "
                "first, or empty the namespace with `kvtier store clear --namespace`"
            )
        meant |= unused
    now_ns = time.time_ns()

    def reason_to_keep(space: SeenNamespace) -> str | None:
        if space.owner is not None:
            return "private to one live engine after a reset of its cache"
        if seen.live_users(space.name):
            return f"used by a live engine, {_first_user(seen, space.name)}"
        if wanted and space.name not in meant:
            return "not among those given with --namespace"
        age_s = (now_ns - space.used_ns) / 1e9
        if age_s < older_than_s:
            return f"last used {as_age(age_s)} ago, and --older-than is {as_age(older_than_s)}"
        return None

    spaces = sorted(seen.namespaces, key=lambda space: -space.used_ns)
    return [
        _Candidate(
            space,
            space.owner is None and not seen.live_users(space.name),
            reason_to_keep(space),
        )
        for space in spaces
    ]


def _first_user(seen: Survey, name: str) -> str:
    user = seen.live_users(name)[0].info
    if user is None:
        return "one that has not registered its name yet"
    return f"{user.engine_id} (process {user.pid} on {user.host})"
