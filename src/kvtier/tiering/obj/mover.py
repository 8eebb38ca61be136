"""Moves blocks between rows and objects, for the lanes of the obj tier.

Each block of 1 MiB or more is an object of its own: it can be read, and removed, without the others
of its prompt. Smaller ones share objects (`kvtier.tiering.obj.run_mover`). A load copies a block
twice: the client library joins what it has received, and the lane copies that into the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES, SealFailure, check
from kvtier.tiering.io.buffers import copy_bytes
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.obj.objects import Objects, object_name
from kvtier.tiering.remote.errors import FailureKind, ServerFailure
from kvtier.tiering.remote.lane import BlockMover, RemoteTransfer

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.obj.server import ObjServer

__all__ = ["BlockPerObjectMover", "ObjectMover"]


class ObjectMover(BlockMover):
    """What the movers have in common."""

    def __init__(self, tier: SecondaryTierManager, server: ObjServer, objects: Objects) -> None:
        self._tier = tier
        self._server = server
        self._objects = objects
        self._block_bytes = SEAL_BYTES + tier.rows.row_bytes

    def _require_open(self) -> None:
        if self._server.is_closed:
            raise ServerFailure(FailureKind.UNREACHABLE, "the tier is closed")

    def _create(
        self,
        transfer: RemoteTransfer,
        name: str,
        pieces: Sequence[Piece[OffloadKey]],
        header: bytes = b"",
    ) -> bool:
        """Write an object with these blocks, behind `header`. Returns False if another engine has
        just written one of this name."""
        parts: list[bytes | memoryview] = [header] if header else []
        for row, key in pieces:
            payload = self._tier.rows[row]
            parts += [self._tier.seal_block(transfer.job, key, payload), payload]
        keys = [key for _, key in pieces]
        try:
            is_new = self._objects.create(name, parts)
        except ServerFailure as failure:
            if failure.kind is FailureKind.FULL:
                transfer.refused += keys
            raise
        if is_new:
            transfer.stored += keys
            self._server.note_written(sum(map(len, parts)))
        return is_new

    def _take_over(
        self, block: memoryview, transfer: RemoteTransfer, piece: Piece[OffloadKey]
    ) -> SealFailure | None:
        """Copy a block into its row, and check it there. Returns why it is refused."""
        row, key = piece
        if len(block) != self._block_bytes:
            return SealFailure.LENGTH
        payload = self._tier.rows[row]
        copy_bytes(payload, block[SEAL_BYTES:])
        keys = self._tier.seal_keys
        return check(block[:SEAL_BYTES], payload, key, transfer.job.fingerprint, keys)


class BlockPerObjectMover(ObjectMover):
    """Each block is an object of its own."""

    def _names(
        self, transfer: RemoteTransfer, pieces: Iterable[Piece[OffloadKey]]
    ) -> Iterator[tuple[Piece[OffloadKey], str]]:
        folder = self._server.folder_of(transfer.namespace)
        for piece in pieces:
            self._require_open()
            yield piece, object_name(folder, piece[1])

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        done: list[Piece[OffloadKey]] = []
        for piece, name in self._names(transfer, pieces):
            content = self._objects.read(name, self._block_bytes)
            if content is None:
                transfer.gone.append(piece[1])
                continue
            with memoryview(content) as block:
                failure = self._take_over(block, transfer, piece)
            if failure is None:
                done.append(piece)
            else:
                self._refuse(name, failure)
        return done

    def _refuse(self, name: str, failure: SealFailure) -> None:
        """Count a damaged block, and remove it, so that it can be stored again. What a newer
        release has written is left to it."""
        self._tier.refuse_block(failure)
        if failure is not SealFailure.FORMAT:
            self._objects.remove([name])

    def store(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        done: list[Piece[OffloadKey]] = []
        for piece, name in self._names(transfer, pieces):
            size = self._objects.size_of(name)
            if size not in (None, self._block_bytes):
                self._refuse(name, SealFailure.LENGTH)
                size = None
            if size is None:
                self._create(transfer, name, [piece])
            done.append(piece)
        return done
