"""Moves small blocks, which share objects: see `kvtier.tiering.obj.runs`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey, get_offload_group_idx
from kvtier.seal import SealFailure
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.obj.mover import ObjectMover
from kvtier.tiering.obj.objects import Objects, object_name
from kvtier.tiering.obj.runs import FIRST_READ_BYTES, Run, RunIndex, header_of, read_header
from kvtier.tiering.remote.lane import RemoteTransfer

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.obj.server import ObjServer

__all__ = ["RunMover", "RunReader"]

_WAVES = (1, 16, 32)
"""Headers that are read at once. The first wave has one, because most prompts are new; the last one
is repeated."""


class RunReader:
    """Reads the headers of runs, and remembers them. Any thread."""

    def __init__(self, objects: Objects, blocks_per_run: int) -> None:
        self.index = RunIndex()
        self._objects = objects
        self._blocks_per_run = blocks_per_run

    def find(self, folder: str, keys: Sequence[OffloadKey]) -> Iterator[bool]:
        """Tell for each of these blocks of a prompt if it is there, up to the first that is not.
        May raise `ServerFailure`."""
        position = num_waves = 0
        while position < len(keys):
            size = _WAVES[min(num_waves, len(_WAVES) - 1)]
            firsts = self._likely_firsts(folder, keys, position, size)
            runs = asyncio.run(self._read_all(folder, firsts))
            num_waves += 1
            while position < len(keys):
                first = self.index.first_of(folder, keys[position])
                if first not in runs:
                    break  # for the next wave
                run = runs[first]
                count = 0 if run is None else run.num_matching(keys[position:])
                if not count:
                    yield False
                    return
                yield from [True] * count
                position += count

    def _likely_firsts(
        self, folder: str, keys: Sequence[OffloadKey], position: int, most: int
    ) -> list[OffloadKey]:
        """The names of the runs that this part of a prompt is probably in. The first is certain."""
        ahead = range(position, len(keys), self._blocks_per_run)[:most]
        return list(dict.fromkeys(self.index.first_of(folder, keys[at]) for at in ahead))

    async def _read_all(
        self, folder: str, firsts: Sequence[OffloadKey]
    ) -> dict[OffloadKey, Run | None]:
        found = await asyncio.gather(*(self._read_async(folder, first) for first in firsts))
        return dict(zip(firsts, found, strict=True))

    async def _read_async(self, folder: str, first: OffloadKey) -> Run | None:
        name = object_name(folder, first)
        found: Run | int | SealFailure = FIRST_READ_BYTES
        while isinstance(found, int):
            content = await self._objects.read_range_async(name, 0, found)
            found = read_header(bytes(content or b""), found)
        return self._noted(folder, first, found)

    def read(self, folder: str, first: OffloadKey) -> Run | SealFailure | None:
        """The run of this name; why it is none; or None if there is no such object."""
        name = object_name(folder, first)
        found: Run | int | SealFailure = FIRST_READ_BYTES
        while isinstance(found, int):
            content = self._objects.read_range(name, 0, found)
            if content is None:
                self.index.forget(folder, first)
                return None
            found = read_header(bytes(content), found)
        wrong = SealFailure.KEY if isinstance(found, Run) else found
        return self._noted(folder, first, found) or wrong

    def _noted(self, folder: str, first: OffloadKey, found: Run | SealFailure) -> Run | None:
        if isinstance(found, Run) and found.first == first:
            self.index.learn(folder, found)
            return found
        self.index.forget(folder, first)
        return None


class RunMover(ObjectMover):
    """Moves blocks for one lane."""

    def __init__(
        self, tier: SecondaryTierManager, server: ObjServer, objects: Objects, reader: RunReader
    ) -> None:
        super().__init__(tier, server, objects)
        self._reader = reader

    # --- load ----------------------------------------------------------------------------------

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        folder = self._server.folder_of(transfer.namespace)
        done: list[Piece[OffloadKey]] = []
        left = list(pieces)
        while left:
            self._require_open()
            key = left[0][1]
            run = self._reader.index.run_of(folder, key) or self._reader.read(folder, key)
            count = run.num_matching([key for _, key in left]) if isinstance(run, Run) else 0
            some, left = left[: max(count, 1)], left[max(count, 1) :]
            if isinstance(run, Run) and count and run.block_bytes == self._block_bytes:
                done += self._load_from(run, folder, transfer, some)
            else:
                transfer.gone.append(key)
        return done

    def _load_from(
        self,
        run: Run,
        folder: str,
        transfer: RemoteTransfer,
        pieces: Sequence[Piece[OffloadKey]],
    ) -> list[Piece[OffloadKey]]:
        """Load adjacent blocks of a run."""
        name = object_name(folder, run.first)
        start = run.start_of(run.keys.index(pieces[0][1]))
        content = self._objects.read_range(name, start, len(pieces) * self._block_bytes)
        if content is None:
            self._reader.index.forget(folder, run.first)
            transfer.gone += [key for _, key in pieces]
            return []
        done: list[Piece[OffloadKey]] = []
        failures: dict[OffloadKey, SealFailure] = {}
        with memoryview(content) as blocks:
            for number, piece in enumerate(pieces):
                at = number * self._block_bytes
                failure = self._take_over(blocks[at : at + self._block_bytes], transfer, piece)
                if failure is None:
                    done.append(piece)
                else:
                    failures[piece[1]] = failure
        if failures:
            self._judge(run, folder, transfer, failures)
        return done

    def _judge(
        self,
        run: Run,
        folder: str,
        transfer: RemoteTransfer,
        failures: dict[OffloadKey, SealFailure],
    ) -> None:
        """Some blocks were not where the header had them when it was read."""
        now = self._reader.read(folder, run.first)
        if now != run:  # removed meanwhile, and perhaps written again with other blocks
            transfer.gone += failures
            return
        for failure in failures.values():
            self._tier.refuse_block(failure)
        if any(failure is not SealFailure.FORMAT for failure in failures.values()):
            self._remove(folder, run.first)
            transfer.lost += run.keys

    def _remove(self, folder: str, first: OffloadKey) -> None:
        """Remove a damaged object, so that its blocks can be stored again."""
        self._objects.remove([object_name(folder, first)])
        self._reader.index.forget(folder, first)

    # --- store ---------------------------------------------------------------------------------

    def store(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        folder = self._server.folder_of(transfer.namespace)
        done: list[Piece[OffloadKey]] = []
        for some in _adjacent(transfer, pieces):
            left = some
            while left:
                self._require_open()
                count = self._store_some(folder, transfer, left)
                done += left[:count]
                if not count:
                    break
                left = left[count:]
        return done

    def _store_some(
        self, folder: str, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> int:
        """Store adjacent blocks. Returns how many of them are there now, from the first on."""
        keys = [key for _, key in pieces]
        known = self._reader.index.first_of(folder, keys[0])
        if known != keys[0] and (count := self._num_in(folder, known, keys)):
            return count
        found = self._reader.read(folder, keys[0])
        if isinstance(found, Run):
            if found.block_bytes == self._block_bytes:
                return found.num_matching(keys)
            found = SealFailure.LENGTH
        if found is SealFailure.FORMAT:  # a newer release has written it
            return 0
        if found is not None:
            self._tier.refuse_block(found)
            self._remove(folder, keys[0])
        header = header_of(keys, self._block_bytes)
        if self._create(transfer, object_name(folder, keys[0]), pieces, header):
            run = Run(tuple(keys), self._block_bytes, len(header))
            self._reader.index.learn(folder, run)
            return len(pieces)
        # Another engine has just written an object of this name, perhaps with other blocks.
        return self._num_in(folder, keys[0], keys)

    def _num_in(self, folder: str, first: OffloadKey, keys: Sequence[OffloadKey]) -> int:
        """How many of `keys` are in an object, from the first one on."""
        run = self._reader.read(folder, first)
        if not isinstance(run, Run) or run.block_bytes != self._block_bytes:
            return 0
        return run.num_matching(keys)


def _adjacent(
    transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
) -> Iterator[list[Piece[OffloadKey]]]:
    """Split blocks of a store where they do not follow each other in the prompt: between groups,
    and where the job has blocks that are there already."""
    places = {key: place for place, key in enumerate(transfer.job.keys)}
    start = 0
    for at, ((_, before), (_, key)) in enumerate(pairwise(pieces), start=1):
        is_next = places[key] == places[before] + 1
        if not is_next or get_offload_group_idx(key) != get_offload_group_idx(before):
            yield list(pieces[start:at])
            start = at
    yield list(pieces[start:])
