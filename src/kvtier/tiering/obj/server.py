"""The object store of one tier, for its threads: which blocks are there, and who moves them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.obj.janitor import Janitor, JanitorTimes
from kvtier.tiering.obj.mover import BlockPerObjectMover
from kvtier.tiering.obj.namespaces import ObjNamespaces
from kvtier.tiering.obj.objects import BLOCKS, PRIVATE, Objects, object_name
from kvtier.tiering.obj.run_mover import RunMover, RunReader
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import BlockMover
from kvtier.tiering.remote.manager import BlockServer

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["ObjServer"]

_LONGEST_END_S = 2.0
"""How long private blocks are still removed at shutdown."""
_LONGEST_LOOKUP = 8192
"""Blocks of a prompt that are looked up together, if they share objects."""
_WAVES = (1, 16, 128)
"""How many blocks of a prompt are asked for at once: first one, because most prompts are new."""


class ObjServer(BlockServer):
    """The object store of one tier, for its threads."""

    def __init__(
        self,
        objects: Objects,
        errors: ServerErrors,
        row_bytes: int,
        shared: str,
        engine: str,
        max_bytes: int | None,
        times: JanitorTimes,
        blocks_per_run: int = 1,
    ) -> None:
        """`shared`: the namespace that other engines read. `engine`: a name of this engine's own,
        for all other namespaces. `blocks_per_run`: blocks that share an object."""
        self.janitor = None
        if max_bytes is not None:
            self.janitor = Janitor(objects, max_bytes, engine, errors, times)
        self.errors = errors
        self.namespaces = ObjNamespaces(objects)
        self._objects = objects
        self._block_bytes = SEAL_BYTES + row_bytes
        self._shared = shared
        self._engine = engine
        self._has_private = False
        self._reader: RunReader | None = None
        if blocks_per_run > 1:
            self._reader = RunReader(objects, blocks_per_run)
            # A block names the run behind it, so a prompt is looked up from its start, and one
            # prompt after the other.
            self.num_lookup_threads, self.looked_up_at_once = 1, _LONGEST_LOOKUP

    def folder_of(self, namespace: str) -> str:
        """Where the blocks of a namespace are."""
        if namespace == self._shared:
            return f"{BLOCKS}/{namespace}"
        self._has_private = True
        return f"{PRIVATE}/{self._engine}/{namespace}"

    def open_mover(self, tier: SecondaryTierManager) -> BlockMover:
        if self._reader is not None:
            return RunMover(tier, self, self._objects, self._reader)
        return BlockPerObjectMover(tier, self, self._objects)

    def close(self) -> None:
        if self.janitor is not None:
            self.janitor.stop()
        if self._has_private:
            with suppress(ServerFailure):
                self._objects.remove_below(f"{PRIVATE}/{self._engine}", _LONGEST_END_S)
        self._objects.close()

    def find(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterator[bool]:
        folder = self.folder_of(namespace)
        find = self._find_blocks if self._reader is None else self._reader.find
        yield from find(folder, keys)

    def _find_blocks(self, folder: str, keys: Sequence[OffloadKey]) -> Iterator[bool]:
        start = 0
        for size in _WAVES:
            some = keys[start : start + size]
            if some:
                yield from asyncio.run(self._look_at_once(folder, some))
            start += len(some)

    async def _look_at_once(self, folder: str, keys: Sequence[OffloadKey]) -> list[bool]:
        sizes = await asyncio.gather(
            *(self._objects.size_of_async(object_name(folder, key)) for key in keys)
        )
        # Something else than a block, however large, is not one of ours.
        return [size == self._block_bytes for size in sizes]

    def touch(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Remember the uses for the janitor. Asking for each block would cost a request each, so no
        block is found absent."""
        if self.janitor is not None:
            self.janitor.note_used(self._named(namespace, keys))
        return ()

    def _named(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """The blocks that name the objects of these blocks."""
        if self._reader is None:
            return keys
        folder = self.folder_of(namespace)
        return list(dict.fromkeys(self._reader.index.first_of(folder, key) for key in keys))

    def note_written(self, num_bytes: int) -> None:
        """A mover has written an object."""
        if self.janitor is not None:
            self.janitor.note_written(num_bytes)
