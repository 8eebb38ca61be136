"""Tidies up an fs root: dead engines, a wrong ledger, namespaces that nobody uses any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.store.fs_namespaces import matching
from kvtier.cli.store.fs_removal import Removal, remove_namespaces, seat_at
from kvtier.cli.store.refusal import StoreRefused
from kvtier.tiering.fs.reader import SeenNamespace, Survey, read_seats

__all__ = ["Orphan", "Tidied", "find_orphans", "remove_orphans", "tidy_up"]

_PATIENCE_S = 30.0
"""For engines, and other commands, to let go of the ledger."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A namespace that no live engine uses."""

    space: SeenNamespace
    is_chosen: bool
    """Whether it is to be removed, if the user agrees."""


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was wrong, and is right now."""

    num_reclaimed: int
    """Dead engines whose files and reservations were taken back."""
    added_blocks: int
    """So many more blocks than the ledger said there are; negative: fewer."""
    added_bytes: int


def find_orphans(seen: Survey, wanted: Sequence[str], older_than_s: int | None) -> list[Orphan]:
    """All orphans, those that were used last first. Chosen are those in `wanted`, the starts of
    fingerprints, or all if there are none; and of these the ones that were not used for so long.
    Raises `StoreRefused` if something is wanted that is no orphan."""
    shared = [space for space in seen.namespaces if space.owner is None]
    orphans = [space for space in shared if not seen.live_users(space.name)]
    chosen: set[str] = set() if wanted else {space.name for space in orphans}
    for start in wanted:
        meant = [space.name for space in matching(shared, start)]
        unused = {space.name for space in orphans}.intersection(meant)
        if not unused:
            raise _in_use(seen, meant[0])
        chosen |= unused
    if older_than_s is not None:
        latest_ns = time.time_ns() - older_than_s * 10**9
        chosen &= {space.name for space in orphans if space.used_ns <= latest_ns}
    orphans.sort(key=lambda space: -space.used_ns)
    return [Orphan(space, space.name in chosen) for space in orphans]


def _in_use(seen: Survey, name: str) -> StoreRefused:
    user = seen.live_users(name)[0].occupant
    who = "one that has not said its name"
    if user is not None:
        who = f"{user.engine_id} (process {user.pid} on {user.host})"
    return StoreRefused(
        f"{name} is used by a live engine, {who}: end it first, or empty the namespace with "
        "`kvtier store clear --namespace`"
    )


def tidy_up(path: Path) -> Tidied:
    """Take back what dead engines have left, and count again. Raises `StoreRefused` or
    `NotDone`."""
    with seat_at(path, _PATIENCE_S) as books:
        num_reclaimed = books.reclaim()
        added_bytes, added_blocks = books.count_again()
    return Tidied(num_reclaimed, added_blocks, added_bytes)


def remove_orphans(
    path: Path,
    orphans: Sequence[Orphan],
    is_stopping: Callable[[], bool],
    on_progress: Callable[[int, int], None],
) -> list[Removal]:
    """Remove those that are chosen, unless an engine has begun to use them. Raises `StoreRefused`
    or `NotDone`."""
    with seat_at(path, _PATIENCE_S) as books:
        now = Survey(None, read_seats(path))
        spaces = [
            orphan.space
            for orphan in orphans
            if orphan.is_chosen and not now.live_users(orphan.space.name)
        ]
        return remove_namespaces(books, spaces, is_stopping, on_progress)
