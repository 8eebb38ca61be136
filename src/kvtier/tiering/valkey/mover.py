"""Moves blocks between rows and the server, for the lanes of the valkey tier; and asks the server
which blocks it has.

A block is one string: the seal, then the payload. A unit's commands are sent together, so it costs
one round trip, or two for a store: the first asks what is there already.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES, SealFailure, check
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import BlockMover, RemoteTransfer
from kvtier.tiering.remote.manager import BlockServer, namespace_of
from kvtier.tiering.valkey.namespaces import ValkeyNamespaces
from kvtier.tiering.valkey.servers import Node, Servers, block_key, failure_of
from kvtier.tiering.valkey.wire import Refusal, TooLong, Wire, command

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["ValkeyServer", "Wires"]

T = TypeVar("T")

_LARGE_ROW = 1 << 20
"""Rows of this size are received one by one."""
_MOST_AT_ONCE = 64
"""Small blocks that are received together, at most."""

_PRIVATE_TTL_MS = 3_600_000
"""Blocks that only this engine reads expire an hour after they were stored or used, because nobody
removes them."""
_WRONG_TYPE = "WRONGTYPE"
"""The value under a key is something else than a string, for example a list."""


class Breaks:
    """How often a connection of the tier broke or hung. What has ended one has often ended the
    others, which would find out one after the other."""

    def __init__(self) -> None:
        self.count = 0


class Wires:
    """Connections of one thread, by server. They are made when they are needed. After a failure,
    all are closed; after one of another thread that may concern these, too."""

    def __init__(self, servers: Servers, breaks: Breaks) -> None:
        """`breaks`: those of all threads."""
        self._servers = servers
        self._breaks = breaks
        self._breaks_seen = breaks.count
        self._wires: dict[Node, Wire] = {}

    def by_node(self, items: Iterable[T], key_of: Callable[[T], bytes]) -> dict[Node, list[T]]:
        """Group items by the server of their keys."""
        found: dict[Node, list[T]] = defaultdict(list)
        for item in items:
            found[self._servers.node_of(key_of(item))].append(item)
        return found

    def to(self, node: Node) -> Wire:
        """The connection to a server. Raises `ServerFailure`."""
        if self._breaks_seen != self._breaks.count:
            self.close()
            self._breaks_seen = self._breaks.count
        wire = self._wires.get(node)
        if wire is None:
            wire = self._wires[node] = self._servers.connect(node)
        wire.expect_answers()
        return wire

    def close(self) -> None:
        """Close all connections."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around calls of servers. If one fails, close all connections, because answers may still
        be under way in them, and look again where the servers are."""
        try:
            yield
        except ServerFailure as failure:
            self.close()
            if failure.kind in (FailureKind.SILENT, FailureKind.UNREACHABLE):
                self._breaks.count += 1
            with suppress(ServerFailure):
                self._servers.refresh()
            raise
        except BaseException:
            self.close()
            raise


def _number_in(answer: int | bytes | Refusal | None) -> int | None:
    """The number that was answered; None for a value of another type. Raises `ServerFailure` if
    the server refuses more than this key."""
    if isinstance(answer, Refusal) and answer.code != _WRONG_TYPE:
        raise failure_of(answer)
    return answer if isinstance(answer, int) else None


def _answers_to(wire: Wire, commands: Sequence[bytes]) -> list[int | bytes | Refusal | None]:
    """Send commands, and return an answer for each."""
    wire.send([b"".join(commands)])
    answers: list[int | bytes | Refusal | None] = []
    for _ in commands:
        try:
            answers.append(wire.read())
        except Refusal as refusal:
            answers.append(refusal)
    return answers


class ValkeyServer(BlockServer):
    """The servers of one tier, for its threads."""

    def __init__(
        self, servers: Servers, errors: ServerErrors, row_bytes: int, ttl_s: int | None
    ) -> None:
        self.errors = errors
        self._servers = servers
        self._breaks = Breaks()
        self._block_bytes = SEAL_BYTES + row_bytes
        self._ttl_ms = None if ttl_s is None else ttl_s * 1000
        self._local = threading.local()
        self._shared_namespace: str | None = None
        self._opened: list[Wires] = []
        self.namespaces = ValkeyNamespaces(servers, self._open(), self._ttl_ms)

    def open_mover(self, tier: SecondaryTierManager) -> BlockMover:
        self._shared_namespace = namespace_of(tier.fingerprint)
        return _ValkeyMover(tier, self._open(), self.errors, self._ttl_for)

    def _ttl_for(self, namespace: str) -> int | None:
        """Milliseconds after which blocks of a namespace expire."""
        if namespace == self._shared_namespace:
            return self._ttl_ms
        return min(self._ttl_ms or _PRIVATE_TTL_MS, _PRIVATE_TTL_MS)

    def _open(self) -> Wires:
        wires = Wires(self._servers, self._breaks)
        self._opened.append(wires)
        return wires

    @property
    def _own(self) -> Wires:
        """The connections of this thread."""
        wires: Wires | None = getattr(self._local, "wires", None)
        if wires is None:
            wires = self._local.wires = self._open()
        return wires

    def interrupt(self) -> None:
        super().interrupt()
        self._servers.interrupt()

    def close(self) -> None:
        for wires in self._opened:
            wires.close()

    def find(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterable[bool]:
        lengths = self._ask(namespace, keys, lambda key: command(b"STRLEN", key))
        # Something else than a block, however large, is not one of ours.
        return [lengths[key] == self._block_bytes for key in keys]

    def touch(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        ttl = self._ttl_for(namespace)

        def words(key: bytes) -> bytes:
            if ttl is None:
                return command(b"TOUCH", key)
            return command(b"PEXPIRE", key, b"%d" % ttl)

        counts = self._ask(namespace, keys, words)
        return [key for key in keys if counts[key] == 0]

    def _ask(
        self, namespace: str, keys: Sequence[OffloadKey], words: Callable[[bytes], bytes]
    ) -> dict[OffloadKey, int | None]:
        """Send a command for each key. Returns the numbers that were answered; None for a value of
        another type."""
        wires = self._own
        found: dict[OffloadKey, int | None] = {}
        with wires.recovering():
            by_node = wires.by_node(keys, lambda key: block_key(namespace, key))
            for node, some in by_node.items():
                commands = [words(block_key(namespace, key)) for key in some]
                answers = _answers_to(wires.to(node), commands)
                for key, answer in zip(some, answers, strict=True):
                    found[key] = _number_in(answer)
        return found


class _ValkeyMover(BlockMover):
    def __init__(
        self,
        tier: SecondaryTierManager,
        wires: Wires,
        errors: ServerErrors,
        ttl_for: Callable[[str], int | None],
    ) -> None:
        self._tier = tier
        self._wires = wires
        self._errors = errors
        self._ttl_for = ttl_for
        self._block_bytes = SEAL_BYTES + tier.rows.row_bytes
        headers = memoryview(bytearray(_MOST_AT_ONCE * SEAL_BYTES))
        self._headers = [
            headers[start : start + SEAL_BYTES] for start in range(0, len(headers), SEAL_BYTES)
        ]
        self._damaged: list[bytes] = []
        """Keys of blocks to remove."""

    # --- load ----------------------------------------------------------------------------------

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        done: list[Piece[OffloadKey]] = []
        with self._wires.recovering():
            for node, some in self._by_node(transfer, pieces).items():
                left = deque(some)
                while left:
                    try:
                        self._load_from(self._wires.to(node), transfer, left, done)
                    except TooLong:
                        self._refuse(transfer, left.popleft()[1], SealFailure.LENGTH)
                        self._wires.close()
            self._remove_damaged()
        return done

    def _by_node(
        self, transfer: RemoteTransfer, pieces: Iterable[Piece[OffloadKey]]
    ) -> dict[Node, list[Piece[OffloadKey]]]:
        return self._wires.by_node(pieces, lambda piece: block_key(transfer.namespace, piece[1]))

    def _load_from(
        self,
        wire: Wire,
        transfer: RemoteTransfer,
        left: deque[Piece[OffloadKey]],
        done: list[Piece[OffloadKey]],
    ) -> None:
        """Load all pieces of `left`, and remove each when its answer was read."""
        keys = [block_key(transfer.namespace, key) for _, key in left]
        ttl = self._ttl_for(transfer.namespace)
        if ttl is None:
            wire.send([b"".join(command(b"GET", key) for key in keys)])
        else:
            age = b"%d" % ttl
            wire.send([b"".join(command(b"GETEX", key, b"PX", age) for key in keys)])
        if self._tier.rows.row_bytes < _LARGE_ROW:
            some = list(zip(self._headers, left, strict=False))
            count = wire.read_expected(
                [(header, self._tier.rows[row]) for header, (row, _) in some]
            )
            for header, piece in some[:count]:
                left.popleft()
                self._accept(transfer, piece, header, self._block_bytes, done)
        while left:
            self._load_any(wire, transfer, left, done)

    def _load_any(
        self,
        wire: Wire,
        transfer: RemoteTransfer,
        left: deque[Piece[OffloadKey]],
        done: list[Piece[OffloadKey]],
    ) -> None:
        """Receive one answer, whatever it is, and remove its piece from `left`."""
        row, key = left[0]
        header = self._headers[0]
        try:
            length = wire.read_into(header, self._tier.rows[row])
        except Refusal as refusal:
            if refusal.code != _WRONG_TYPE:
                raise failure_of(refusal) from None
            self._refuse(transfer, key, SealFailure.NOT_SEALED)
        else:
            if length is None:
                transfer.gone.append(key)
            else:
                self._accept(transfer, (row, key), header, length, done)
        left.popleft()

    def _accept(
        self,
        transfer: RemoteTransfer,
        piece: Piece[OffloadKey],
        header: memoryview,
        length: int,
        done: list[Piece[OffloadKey]],
    ) -> None:
        """A block has been received. Check it."""
        row, key = piece
        payload = self._tier.rows[row]
        failure: SealFailure | None = SealFailure.LENGTH
        if length == self._block_bytes:
            fingerprint = transfer.job.fingerprint
            failure = check(header, payload, key, fingerprint, self._tier.seal_keys)
        if failure is None:
            done.append(piece)
        else:
            self._refuse(transfer, key, failure)

    def _refuse(self, transfer: RemoteTransfer, key: OffloadKey, failure: SealFailure) -> None:
        """Count a damaged block, and have it removed, so that it can be stored again. What a newer
        release has written is left to it."""
        self._tier.refuse_block(failure)
        if failure is not SealFailure.FORMAT:
            self._damaged.append(block_key(transfer.namespace, key))

    def _remove_damaged(self) -> None:
        """Remove what loads have refused. Between two units, when no answers are under way."""
        while self._damaged:
            server_key = self._damaged.pop()
            for node in self._wires.by_node([server_key], lambda one: one):
                _answers_to(self._wires.to(node), [command(b"UNLINK", server_key)])

    # --- store ---------------------------------------------------------------------------------

    def store(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        done: list[Piece[OffloadKey]] = []
        with self._wires.recovering():
            for node, some in self._by_node(transfer, pieces).items():
                done += self._store_to(self._wires.to(node), transfer, some)
        return done

    def _store_to(
        self, wire: Wire, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        refused, there = self._set_all(wire, transfer, pieces)
        if there:
            foreign = self._remove_foreign(wire, transfer, there)
            if foreign:
                refused |= self._set_all(wire, transfer, foreign)[0]
        return [piece for piece in pieces if piece[1] not in refused]

    def _set_all(
        self, wire: Wire, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> tuple[set[OffloadKey], list[Piece[OffloadKey]]]:
        """Send blocks. Returns those that the server refused, and the pieces whose keys it has
        already. A lookup has just missed these blocks, so it does not pay to ask first."""
        parts: list[bytes | memoryview] = []
        for row, key in pieces:
            parts += self._set_command(transfer, key, self._tier.rows[row])
        wire.send(parts)
        wire.expect_answers()
        refusals: list[Refusal] = []
        refused: set[OffloadKey] = set()
        there: list[Piece[OffloadKey]] = []
        for piece in pieces:
            try:
                if wire.read() is None:
                    there.append(piece)
                else:
                    transfer.stored.append(piece[1])
            except Refusal as refusal:
                refusals.append(refusal)
                refused.add(piece[1])
        self._explain(transfer, refused, refusals)
        return refused, there

    def _remove_foreign(
        self, wire: Wire, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        """Remove values under the keys of blocks that cannot be blocks. Returns their pieces."""
        keys = [block_key(transfer.namespace, key) for _, key in pieces]
        lengths = map(_number_in, _answers_to(wire, [command(b"STRLEN", key) for key in keys]))
        found, foreign = [], []
        for piece, key, length in zip(pieces, keys, lengths, strict=True):
            if length != self._block_bytes:
                found.append(piece)
                foreign.append(key)
                self._tier.refuse_block(
                    SealFailure.NOT_SEALED if length is None else SealFailure.LENGTH
                )
        if foreign:
            _answers_to(wire, [command(b"UNLINK", key) for key in foreign])
        return found

    def _set_command(
        self, transfer: RemoteTransfer, key: OffloadKey, payload: memoryview
    ) -> tuple[bytes | memoryview, ...]:
        seal = self._tier.seal_block(transfer.job, key, payload)
        ttl = self._ttl_for(transfer.namespace)
        server_key = block_key(transfer.namespace, key)
        num_words = 4 if ttl is None else 6
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            num_words,
            len(server_key),
            server_key,
            len(seal) + len(payload),
        )
        tail = b"\r\n$2\r\nNX\r\n"
        if ttl is not None:
            age = b"%d" % ttl
            tail += b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(age), age)
        return head + seal, payload, tail

    def _explain(
        self, transfer: RemoteTransfer, failed: Iterable[OffloadKey], refusals: Sequence[Refusal]
    ) -> None:
        """Count and log why blocks were not stored."""
        if not refusals:
            return
        first = refusals[0]
        if first.code == "OOM":
            transfer.refused += failed
            reason = (
                "the server is full and evicts nothing: set its maxmemory-policy to allkeys-lru, "
                "or give it more memory"
            )
            self._errors.note(ServerFailure(FailureKind.FULL, reason))
            return
        raise failure_of(first)
