"""Tidies up an fs root: dead engines, a wrong ledger, namespaces that nobody uses any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.cli.store.amounts import as_age
from kvtier.cli.store.fs_namespaces import matching
from kvtier.cli.store.fs_removal import Removal, remove_namespaces, seat_at
from kvtier.cli.store.refusal import StoreRefused
from kvtier.tiering.fs.reader import SeenNamespace, Survey, read_seats

__all__ = ["INTERRUPTED", "Candidate", "Tidied", "find_candidates", "remove_orphans", "tidy_up"]

INTERRUPTED = "ended by Ctrl-C before all of it was removed"
_NOT_WHOLE = "blocks came meanwhile, or other things are in it, which are not removed"
_PATIENCE_S = 30.0
"""For engines, and other commands, to let go of the ledger."""


@dataclass(slots=True)
class Candidate:
    """A namespace, and whether it is to be removed."""

    space: SeenNamespace
    is_orphan: bool
    """Whether no live engine uses it."""
    kept_because: str | None
    """None: it is to be removed, if the user agrees, or was removed."""
    is_chosen: bool = field(init=False)
    """Whether the options say that it is to be removed."""

    def __post_init__(self) -> None:
        self.is_chosen = self.kept_because is None


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was wrong, and is right now."""

    num_reclaimed: int
    """Dead engines whose files and reservations were taken back."""
    added_blocks: int
    """So many more blocks than the ledger said there are; negative: fewer."""
    added_bytes: int


def find_candidates(seen: Survey, wanted: Sequence[str], older_than_s: int) -> list[Candidate]:
    """All namespaces, those that were used last first. To be removed are those that no live engine
    uses and that are in `wanted`, the starts of fingerprints, or all if there are none; and of
    these the ones that were not used for so long. Raises `StoreRefused` if something is wanted
    that a live engine uses."""
    shared = [space for space in seen.namespaces if space.owner is None]
    meant: set[str] = set()
    for start in wanted:
        names = [space.name for space in matching(shared, start)]
        unused = {name for name in names if not seen.live_users(name)}
        if not unused:
            raise StoreRefused(
                f"{names[0]} is used by a live engine, {_first_user(seen, names[0])}: end it "
                "first, or empty the namespace with `kvtier store clear --namespace`"
            )
        meant |= unused
    now_ns = time.time_ns()

    def reason_to_keep(space: SeenNamespace) -> str | None:
        if space.owner is not None:
            return "only one live engine finds it, after a reset of its cache"
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
        Candidate(
            space,
            space.owner is None and not seen.live_users(space.name),
            reason_to_keep(space),
        )
        for space in spaces
    ]


def _first_user(seen: Survey, name: str) -> str:
    user = seen.live_users(name)[0].occupant
    if user is None:
        return "one that has not said its name"
    return f"{user.engine_id} (process {user.pid} on {user.host})"


def tidy_up(path: Path) -> Tidied:
    """Take back what dead engines have left, and count again. Raises `StoreRefused` or
    `NotDone`."""
    with seat_at(path, _PATIENCE_S) as books:
        num_reclaimed = books.reclaim()
        added_bytes, added_blocks = books.count_again()
    return Tidied(num_reclaimed, added_blocks, added_bytes)


def remove_orphans(
    path: Path,
    chosen: Sequence[Candidate],
    is_stopping: Callable[[], bool],
    on_progress: Callable[[int, int], None],
) -> list[Removal]:
    """Remove these, unless an engine has begun to use them, and note why one was kept. Raises
    `StoreRefused` or `NotDone`."""
    with seat_at(path, _PATIENCE_S) as books:
        now = Survey(None, read_seats(path))
        for each in chosen:
            if now.live_users(each.space.name):
                user = _first_user(now, each.space.name)
                each.kept_because = f"used by a live engine since this began, {user}"
        spaces = [each.space for each in chosen if each.kept_because is None]
        removals = remove_namespaces(books, spaces, is_stopping, on_progress)
    whole = {removal.space.name for removal in removals if removal.is_whole}
    for each in chosen:
        if each.kept_because is None and each.space.name not in whole:
            each.kept_because = INTERRUPTED if is_stopping() else _NOT_WHOLE
    return removals
