"""The root of an fs tier behind the commands of `kvtier store`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvtier import seal
from kvtier.cli.store.fs_clearing import FsClearing, clear_namespaces
from kvtier.cli.store.fs_figures import FsFigures
from kvtier.cli.store.fs_namespaces import matching
from kvtier.cli.store.fs_scrub import FsScrubber
from kvtier.cli.store.refusal import StoreRefused, not_a_root
from kvtier.cli.store.store import Listing, Order, Scrub, StoredBlock
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.names import key_of
from kvtier.tiering.fs.reader import SeenNamespace, Survey, read_seats, survey
from kvtier.tiering.fs.root import is_root
from kvtier.tiering.fs.tree import BlockFile
from kvtier.tiering.io.page import PAGE_BYTES, is_intact

__all__ = ["FsStore"]


class FsStore:
    """`Store` over the directory of an fs tier."""

    kind = "fs"
    place_name = "file"
    is_place_short = False

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_root(path):
            raise not_a_root(path, _root_around(path))

    def survey(self, *, keep_blocks: bool = False) -> Survey:
        """Look at everything. Raises `StoreRefused` or `OSError`."""
        try:
            return survey(self.path, keep_blocks=keep_blocks)
        except LedgerVersion as problem:
            raise StoreRefused(
                f"{self.path} cannot be read: {problem}. Use the kvtier that made it"
            ) from None

    def figures(self) -> FsFigures:
        return FsFigures(self.path, self.survey())

    # --- blocks --------------------------------------------------------------------------------

    def blocks(self, namespace: str | None, order: Order, limit: int | None) -> Listing:
        spaces = self.survey(keep_blocks=True).namespaces
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

    def _read(
        self, ranked: Sequence[tuple[int, BlockFile, SeenNamespace]]
    ) -> Iterator[StoredBlock]:
        below = Below(self.path)
        for rank, block, space in ranked:
            key = key_of(block.name)
            assert key is not None
            try:
                stored_ns = _stored_ns(below, block.path)
            except FileNotFoundError:
                continue
            place = os.path.relpath(block.path, self.path)
            payload_bytes = max(0, block.size - PAGE_BYTES)
            yield StoredBlock(key, space.name, place, payload_bytes, stored_ns, rank, block.used_ns)

    # --- all of it -----------------------------------------------------------------------------

    def verify(
        self,
        namespace: str | None,
        max_rate: int | None,
        on_progress: Callable[[int, int], None],
    ) -> Scrub:
        seen = self.survey(keep_blocks=True)
        scrubber = FsScrubber(self.path, max_rate, on_progress)
        scrub = scrubber.run(matching(seen.namespaces, namespace))
        if namespace is None:
            scrubber.remark(seen)
        return scrub

    def count_engines(self) -> int:
        return sum(seat.is_alive for seat in read_seats(self.path))

    def count(self, namespace: str | None) -> int:
        return sum(space.num_blocks for space in self._shared(self.survey(), namespace))

    def clear(
        self,
        namespace: str | None,
        patience_s: float,
        on_progress: Callable[[int, int], None],
    ) -> FsClearing:
        seen = self.survey()
        spaces = self._shared(seen, namespace)
        private = [space for space in seen.namespaces if space.owner is not None]
        num_left = sum(space.num_blocks for space in private) if namespace is None else 0
        return clear_namespaces(self.path, spaces, num_left, patience_s, on_progress)

    @staticmethod
    def _shared(seen: Survey, namespace: str | None) -> list[SeenNamespace]:
        """Those of one engine alone go with it."""
        return matching([space for space in seen.namespaces if space.owner is None], namespace)


def _root_around(path: Path) -> Path | None:
    with suppress(OSError):
        return next((outer for outer in path.absolute().parents if is_root(outer)), None)
    return None


def _stored_ns(below: Below, path: str) -> int | None:
    """When a block was stored; None: its header cannot be read. Raises `FileNotFoundError`."""
    try:
        fd = below.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the header, and no more
            page = os.pread(fd, PAGE_BYTES, 0)
        finally:
            os.close(fd)
        return seal.read(page).time_ns if is_intact(page) else None
    except FileNotFoundError:
        raise
    except (OSError, seal.SealError):
        return None
