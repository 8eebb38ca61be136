"""The changes that `kvtier store` makes to an fs root, while engines may use it.

The command registers in the root as an engine does. So engines and other commands count what it
reserves, and reclaim what it leaves if it is killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiering.fs.access import RootRefused, refusal_for
from kvtier.tiering.fs.eviction import remove_namespace
from kvtier.tiering.fs.ledger import LedgerBusy, LedgerLost
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import PresenceLost, RootSession, open_root
from kvtier.tiering.fs.survey import SeenNamespace, disk_usage
from kvtier.tiering.inspection import InspectionRefused, InspectionTimedOut, Progress

__all__ = ["Removal", "opened_root", "remove_namespaces"]

_OUR_NAME = "kvtier store"
"""The engine id that others see while the command runs."""


@contextmanager
def opened_root(path: Path, patience_s: float) -> Iterator[RootSession]:
    """Open a root as an engine does, and close it at the end. `patience_s`: how long to wait for
    the ledger's lock, in seconds. Raises `InspectionRefused` or `InspectionTimedOut`, also in place
    of errors raised inside the context."""
    try:
        with _as_owner_of(path):
            # An absolute path, because the owner may not be allowed to enter the working directory.
            session = open_root(
                path.absolute(), EngineInfo.here(_OUR_NAME, namespace=""), patience_s
            )
            try:
                yield session
            finally:
                session.close()
    except RootRefused as problem:
        if isinstance(problem.__cause__, LedgerBusy):
            raise InspectionTimedOut(str(problem)) from None
        raise InspectionRefused(str(problem)) from None
    except (PresenceLost, LedgerLost):
        raise InspectionRefused(
            f"{path} was emptied, or something else was put in its place, while this ran: run it "
            "again"
        ) from None
    except LedgerBusy as error:
        raise InspectionTimedOut(str(refusal_for(path, error))) from None
    except OSError as error:
        raise InspectionRefused(str(refusal_for(path, error))) from None


@contextmanager
def _as_owner_of(path: Path) -> Iterator[None]:
    """If the command runs as the user root, act as the user who owns the directory. New files then
    belong to that user, and links made by that user give the command no access that the user does
    not have. Raises `InspectionRefused` or `OSError`."""
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
        raise InspectionRefused(
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
    """How much of a namespace was removed."""

    space: SeenNamespace
    num_blocks: int
    freed_bytes: int
    """As `du` counts them, directories included."""
    is_whole: bool
    """True if nothing is left of the namespace."""


def remove_namespaces(
    session: RootSession,
    spaces: Sequence[SeenNamespace],
    is_stopping: Callable[[], bool],
    on_progress: Progress,
) -> list[Removal]:
    """Remove all blocks of these namespaces. Ends early once `is_stopping` returns True. Raises
    `OSError` or `PresenceLost`."""
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
        namespace = space.path.absolute()  # the paths of a session are absolute
        num_blocks = remove_namespace(session, namespace, is_stopping, count)
        left_bytes = disk_usage(session.tree, namespace)
        freed_bytes = max(0, space.num_bytes - left_bytes)
        removals.append(Removal(space, num_blocks, freed_bytes, is_whole=not left_bytes))
    return removals
