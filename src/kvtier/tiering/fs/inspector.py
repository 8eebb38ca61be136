"""`kvtier store` on the directory of an fs tier: stat, ls, verify, clear, gc and init.

Engines may use the directory meanwhile. stat, ls and verify never wait for a lock and write
nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.config import NamespaceDescription
from kvtier.config.sizes import as_size
from kvtier.tiering.fs.access import NoFollowTree, is_root
from kvtier.tiering.fs.garbage import FsGarbageCollection, matching, namespace_line
from kvtier.tiering.fs.layout import BlockFile, key_of, namespaces_in, read_description
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.maintenance import opened_root, remove_namespaces
from kvtier.tiering.fs.scrub import FsScrubber
from kvtier.tiering.fs.survey import (
    SeenEngine,
    SeenNamespace,
    Survey,
    ledger_remark,
    read_balance,
    read_engines,
    survey,
)
from kvtier.tiering.inspection import (
    WHAT_TO_GIVE,
    InspectionRefused,
    Listing,
    Order,
    Progress,
    Report,
    Scrub,
    StoredBlock,
    TierInspector,
    as_time,
    deferred_interrupts,
)
from kvtier.tiering.io.page import PAGE_BYTES, is_intact

__all__ = ["FsInspector", "init_root"]

_INIT_PATIENCE_S = 30.0
_NAME_DIGITS = 8
_SHOWN_STRAYS = 20


class FsInspector(TierInspector):
    """The root directory of an fs tier."""

    kind = "fs"
    place_name = "file"
    is_place_short = False

    def __init__(self, path: Path) -> None:
        """Raises `InspectionRefused` or `OSError`."""
        self.location = str(path)
        self._path = path
        self._tree = NoFollowTree(path)
        if not is_root(path):
            raise _not_a_root(path)

    def _survey(self, *, keep_blocks: bool = False) -> Survey:
        """Look at every file. `keep_blocks`: keep a list of all blocks. Raises `InspectionRefused`
        or `OSError`."""
        try:
            return survey(self._path, keep_blocks=keep_blocks)
        except LedgerVersion as problem:
            raise InspectionRefused(
                f"{self._path} cannot be read: {problem}. Use the kvtier that made it"
            ) from None

    # --- stat ----------------------------------------------------------------------------------

    def figures(self) -> Report:
        seen = self._survey()
        return Report(self._figures(seen), [self.location, *_figure_lines(seen)])

    def _figures(self, seen: Survey) -> dict[str, Any]:
        balance = seen.balance
        return {
            "path": self.location,
            "kind": self.kind,
            "allocated_bytes": seen.num_bytes,
            "ledger_bytes": None if balance is None else balance.total,
            "reserved_bytes": None if balance is None else balance.reserved,
            "remark": ledger_remark(seen),
            "blocks": seen.num_blocks,
            "namespaces": [
                {
                    "namespace": space.name,
                    "blocks": space.num_blocks,
                    "bytes": space.num_bytes,
                    "used_at": as_time(space.used_ns),
                    "in_use": space.owner is not None or bool(seen.live_users(space.name)),
                    "private": space.owner is not None,
                }
                for space in _by_size(seen)
            ],
            "engines": [_engine_json(engine) for engine in seen.engines],
            "stray_files": len(seen.strays),
            "stray_bytes": _stray_bytes(seen),
        }

    # --- ls ------------------------------------------------------------------------------------

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        spaces = self._survey(keep_blocks=True).namespaces
        wanted = {space.path for space in matching(spaces, namespace)}
        found = [(block, space) for space in spaces for block in space.blocks]
        found.sort(key=lambda each: (-each[0].used_ns, each[0].path))
        ranked = [
            (rank, block, space)
            for rank, (block, space) in enumerate(found, start=1)
            if space.path in wanted
        ]
        if order is Order.OLDEST:
            ranked.reverse()
        elif order is Order.PLACE:
            ranked.sort(key=lambda each: each[1].path)
        return Listing(len(ranked), self._read(ranked[:limit]))

    def keys(self, namespace: str | None) -> Iterator[tuple[str, OffloadKey]]:
        for space in self._survey(keep_blocks=True).namespaces:
            if space.owner is None and space.name.startswith((namespace or "").lower()):
                for block in space.blocks:
                    key = key_of(block.name)
                    if key is not None:
                        yield space.name, key

    def _read(
        self, ranked: Sequence[tuple[int, BlockFile, SeenNamespace]]
    ) -> Iterator[StoredBlock]:
        tree = NoFollowTree(self._path)
        for rank, block, space in ranked:
            key = key_of(block.name)
            assert key is not None
            try:
                stored_ns = _stored_ns(tree, block.path)
            except FileNotFoundError:
                continue
            place = os.path.relpath(block.path, self._path)
            payload_bytes = max(0, block.size - PAGE_BYTES)
            yield StoredBlock(key, space.name, place, payload_bytes, stored_ns, rank, block.used_ns)

    def descriptions(self) -> Mapping[str, NamespaceDescription]:
        paths = namespaces_in(self._tree, self._path / "blocks")
        found = ((path.name, read_description(self._tree, path)) for path in paths)
        return {name: description for name, description in found if description is not None}

    # --- verify --------------------------------------------------------------------------------

    def verify(self, namespace: str | None, max_rate: int | None, on_progress: Progress) -> Scrub:
        seen = self._survey(keep_blocks=True)
        scrubber = FsScrubber(self._path, max_rate, on_progress)
        scrub = scrubber.run(matching(seen.namespaces, namespace))
        if namespace is None:
            scrub.remarks += self._remarks(seen)
        return scrub

    def _remarks(self, seen: Survey) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong with the root itself, rather than with a
        block."""
        for stray in seen.strays[:_SHOWN_STRAYS]:
            where = os.path.relpath(stray.path, self._path)
            yield f"{where} does not belong there: remove it"
        if len(seen.strays) > _SHOWN_STRAYS:
            yield f"{len(seen.strays) - _SHOWN_STRAYS} more such files"
        if not seen.engines and (remark := ledger_remark(seen)) is not None:
            yield remark

    # --- clear ---------------------------------------------------------------------------------

    def count_engines(self) -> int:
        return sum(engine.is_alive for engine in read_engines(self._path))

    def count(self, namespace: str | None) -> int:
        return sum(space.num_blocks for space in _shared(self._survey(), namespace))

    def clear(self, namespace: str | None, patience_s: float, on_progress: Progress) -> Report:
        """Remove the files of blocks. Blocks that an engine stored for itself alone, after a reset,
        stay: the engine removes them when it ends."""
        seen = self._survey()
        spaces = _shared(seen, namespace)
        private = [space for space in seen.namespaces if space.owner is not None]
        num_left = sum(space.num_blocks for space in private) if namespace is None else 0
        started = time.monotonic()
        with deferred_interrupts() as is_stopping:
            with opened_root(self._path, patience_s) as session:
                session.reclaim()
                removals = remove_namespaces(session, spaces, is_stopping, on_progress)
            is_complete = not is_stopping()
        num_blocks = sum(removal.num_blocks for removal in removals)
        freed_bytes = sum(removal.freed_bytes for removal in removals)
        document = {
            "path": self.location,
            "complete": is_complete,
            "cleared_blocks": num_blocks,
            "freed_bytes": freed_bytes,
            "left_blocks": num_left,
            "seconds": round(time.monotonic() - started, 3),
        }
        lines = [f"{self.location}: {num_blocks} blocks were removed, {as_size(freed_bytes)}."]
        if not is_complete:
            lines.append("It was ended by Ctrl-C: the other blocks are still there.")
        if num_left:
            lines.append(
                f"{num_left} blocks were left alone: engines stored them for themselves after a "
                "reset of their cache, and remove them when they end."
            )
        return Report(document, lines, is_complete)

    # --- gc ------------------------------------------------------------------------------------

    def find_garbage(self, namespaces: Sequence[str], older_than_s: int) -> FsGarbageCollection:
        started = time.monotonic()
        seen = self._survey()
        return FsGarbageCollection(self._path, seen, namespaces, older_than_s, started)


# --- init --------------------------------------------------------------------------------------


def init_root(path: Path) -> Report:
    """Make a directory the root of an fs tier. The directory may be new, may have been emptied, or
    may be a root already. Raises `InspectionRefused`, `InspectionTimedOut` or `OSError`."""
    if not path.absolute().parent.is_dir():
        raise InspectionRefused(
            f"there is no {path.absolute().parent}: make it, or mount the file system first"
        )
    was_there = path.is_dir() and is_root(path) and read_balance(path) is not None
    with opened_root(path, _INIT_PATIENCE_S) as session:
        num_blocks = session.ledger.read().num_blocks
    uid = os.stat(path).st_uid
    if was_there:
        first_line = f"{path} was the root of an fs tier already, with {num_blocks} blocks."
    else:
        first_line = (
            f"{path} is the root of an fs tier now, with {num_blocks} blocks. "
            "Running engines that had lost it use it again within seconds."
        )
    return Report(
        {"path": str(path), "made": not was_there, "blocks": num_blocks, "uid": uid},
        (first_line, f"It belongs to uid {uid}: engines have to run as that user."),
    )


# --- names and texts ---------------------------------------------------------------------------


def _not_a_root(path: Path) -> InspectionRefused:
    root_around = None
    with suppress(OSError):
        root_around = next((outer for outer in path.absolute().parents if is_root(outer)), None)
    if root_around is not None:
        return InspectionRefused(f"{path} is inside the root of an fs tier: give {root_around}")
    return InspectionRefused(f"{path} is a directory, but no root of an fs tier: {WHAT_TO_GIVE}")


def _shared(seen: Survey, namespace: str | None) -> list[SeenNamespace]:
    """The matching namespaces that are not private to one engine."""
    return matching([space for space in seen.namespaces if space.owner is None], namespace)


def _stored_ns(tree: NoFollowTree, path: str) -> int | None:
    """When a block was stored; None if its header cannot be read. Raises `FileNotFoundError`."""
    try:
        fd = tree.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead past the header
            page = os.pread(fd, PAGE_BYTES, 0)
        finally:
            os.close(fd)
        return seal.read(page).time_ns if is_intact(page) else None
    except FileNotFoundError:
        raise
    except (OSError, seal.SealError):
        return None


def _by_size(seen: Survey) -> list[SeenNamespace]:
    return sorted(seen.namespaces, key=lambda space: (-space.num_blocks, space.name))


def _stray_bytes(seen: Survey) -> int:
    return sum(stray.num_bytes for stray in seen.strays)


def _figure_lines(seen: Survey) -> Iterator[str]:
    yield f"on disk     {as_size(seen.num_bytes)} ({seen.num_bytes} bytes)"
    if seen.balance is not None:
        reserved = f", {as_size(seen.balance.reserved)} of it reserved"
        yield (
            f"ledger      {as_size(seen.balance.total)} ({seen.balance.total} bytes)"
            f"{reserved if seen.balance.reserved else ''}"
        )
    remark = ledger_remark(seen)
    if remark is not None:
        yield f"            {remark}"
    yield f"blocks      {seen.num_blocks}"
    for space in _by_size(seen):
        yield f"  {namespace_line(space)}, {_users(seen, space)}"
    yield f"engines     {sum(engine.is_alive for engine in seen.engines)}"
    for engine in seen.engines:
        yield f"  {_who(engine)}"
    if seen.strays:
        yield (
            f"strays      {len(seen.strays)} files that are no blocks "
            f"({as_size(_stray_bytes(seen))}); `kvtier store gc --dry-run` names them"
        )


def _users(seen: Survey, space: SeenNamespace) -> str:
    if space.owner is not None:
        return "private to one engine after a reset of its cache"
    num_users = len(seen.live_users(space.name))
    if not num_users:
        return "used by no live engine"
    return f"used by {num_users} engine{'s' if num_users > 1 else ''}"


def _engine_json(engine: SeenEngine) -> dict[str, Any]:
    who = engine.info
    return {
        "engine_id": None if who is None else who.engine_id,
        "pid": None if who is None else who.pid,
        "host": None if who is None else who.host,
        "since": None if who is None else as_time(who.since_ns),
        "namespace": None if who is None else who.namespace,
        "alive": engine.is_alive,
    }


def _who(engine: SeenEngine) -> str:
    who = engine.info
    name = f"unnamed ({engine.name})"
    if who is not None:
        name = f"{who.engine_id} (process {who.pid} on {who.host}, since {as_time(who.since_ns)})"
    if not engine.is_alive:
        return f"dead: {name}; engines, or `kvtier store gc`, remove what it left"
    return f"{name}, namespace {who.namespace[:_NAME_DIGITS]}" if who and who.namespace else name
