"""Changes an fs root, where engines may be at work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.store.refusal import NotDone, StoreRefused
from kvtier.tiering.fs.books import Books, SeatLost
from kvtier.tiering.fs.clearing import remove_namespace
from kvtier.tiering.fs.ledger import LedgerBusy, LedgerLost
from kvtier.tiering.fs.reader import SeenNamespace, disk_usage
from kvtier.tiering.fs.refusal import RootRefused, refusal_for
from kvtier.tiering.fs.root import open_root
from kvtier.tiering.fs.seat import Occupant

__all__ = ["Removal", "remove_namespaces", "seat_at"]

_OUR_NAME = "kvtier store"
"""Who sits there, for those who ask meanwhile."""


@contextmanager
def seat_at(path: Path, patience_s: float) -> Iterator[Books]:
    """A seat like that of an engine, to change what is there. It is left at the end. Raises
    `StoreRefused` or `NotDone`, also for what is raised in the context."""
    try:
        with _as_owner_of(path):
            # Whose user may not enter the working directory cannot use a path from there.
            books = open_root(path.absolute(), Occupant.here(_OUR_NAME, namespace=""), patience_s)
            try:
                yield books
            finally:
                books.close()
    except RootRefused as problem:
        if isinstance(problem.__cause__, LedgerBusy):
            raise NotDone(str(problem)) from None
        raise StoreRefused(str(problem)) from None
    except (SeatLost, LedgerLost):
        raise StoreRefused(
            f"{path} was emptied, or something else was put in its place, while this ran: run it "
            "again"
        ) from None
    except LedgerBusy as error:
        raise NotDone(str(refusal_for(path, error))) from None
    except OSError as error:
        raise StoreRefused(str(refusal_for(path, error))) from None


@contextmanager
def _as_owner_of(path: Path) -> Iterator[None]:
    """Root acts as the user a root belongs to: what it makes there belongs to that user, and
    whatever that user puts in its way leads nowhere that the user could not go. Raises
    `StoreRefused` or `OSError`."""
    owner = os.stat(path) if path.exists() else None
    if os.geteuid() != 0 or owner is None or owner.st_uid == 0:
        yield
        return
    gid, groups = os.getegid(), os.getgroups()
    try:
        os.setgroups([])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
    except PermissionError:
        raise StoreRefused(
            f"{path} belongs to uid {owner.st_uid}, and root may not act as that user here: run "
            "this as that user"
        ) from None
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of a namespace that was to be removed."""

    space: SeenNamespace
    num_blocks: int
    freed_bytes: int
    """As `du` counts them, directories included."""
    is_whole: bool
    """Whether nothing is left of it."""


def remove_namespaces(
    books: Books,
    spaces: Sequence[SeenNamespace],
    is_stopping: Callable[[], bool],
    on_progress: Callable[[int, int], None],
) -> list[Removal]:
    """Remove all blocks of these. Ends early when `is_stopping` says so. Raises `OSError` or
    `SeatLost`."""
    removals: list[Removal] = []
    total = sum(space.num_blocks for space in spaces)
    num_done = 0

    def count(num_removed: int) -> None:
        nonlocal num_done
        num_done += num_removed
        on_progress(num_done, max(num_done, total))

    for space in spaces:
        if is_stopping():
            break
        num_blocks = remove_namespace(books, space.path, is_stopping, count)
        left_bytes = disk_usage(books.below, space.path)
        freed_bytes = max(0, space.num_bytes - left_bytes)
        removals.append(Removal(space, num_blocks, freed_bytes, is_whole=not left_bytes))
    return removals
