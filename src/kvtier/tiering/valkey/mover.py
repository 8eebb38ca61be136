"""Moves blocks between rows and the server, for the lanes of the valkey tier; and asks the server
which blocks it has.

A block is one string: the seal, then the payload. A unit's commands are sent together, so it costs
one round trip, or two for a store: the first asks what is there already.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kvtier.base import OffloadKey
from kvtier.seal import SEAL_BYTES, SealFailure, check
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import BlockMover, RemoteTransfer
from kvtier.tiering.remote.manager import BlockServer, namespace_of
from kvtier.tiering.valkey.servers import Node, Servers, block_key, failure_of
from kvtier.tiering.valkey.wire import Refusal, TooLong, Wire, command

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = ["ValkeyServer", "Wires"]

T = TypeVar("T")

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
        self._is_closed = False

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
            if self._is_closed:
                raise ServerFailure(FailureKind.UNREACHABLE, "the tier is closed")
            wire = self._wires[node] = self._servers.connect(node)
            if self._is_closed:  # meanwhile, so `interrupt` has not seen this connection
                wire.interrupt()
        wire.expect_answers()
        return wire

    def close(self) -> None:
        """Close all connections."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()

    def recover(self, failure: ServerFailure) -> None:
        """A server has failed. Close all connections, because answers may still be under way in
        them, and look again where the servers are."""
        self.close()
        if failure.kind in (FailureKind.SILENT, FailureKind.UNREACHABLE):
            self._breaks.count += 1
        if not self._is_closed:
            with suppress(ServerFailure):
                self._servers.refresh()

    def interrupt(self) -> None:
        """Let calls that wait fail, and make no more connections. Any thread."""
        self._is_closed = True
        for wire in list(self._wires.values()):
            wire.interrupt()


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
        self._is_interrupted = False
        self._lock = threading.Lock()
        """Protects these two."""

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
        with self._lock:
            self._opened.append(wires)
            if self._is_interrupted:
                wires.interrupt()
        return wires

    @property
    def _own(self) -> Wires:
        """The connections of this thread."""
        wires: Wires | None = getattr(self._local, "wires", None)
        if wires is None:
            wires = self._local.wires = self._open()
        return wires

    def interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            for wires in self._opened:
                wires.interrupt()

    def close(self) -> None:
        for wires in self._opened:
            wires.close()

    def look(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterable[bool]:
        try:
            lengths = self._ask(namespace, keys, lambda key: command(b"STRLEN", key))
        except ServerFailure as failure:
            self.errors.note(failure)
            return [False] * len(keys)
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
        try:
            by_node = wires.by_node(keys, lambda key: block_key(namespace, key))
            for node, some in by_node.items():
                commands = [words(block_key(namespace, key)) for key in some]
                answers = _answers_to(wires.to(node), commands)
                for key, answer in zip(some, answers, strict=True):
                    found[key] = _number_in(answer)
        except ServerFailure as failure:
            wires.recover(failure)
            raise
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
        self._header = memoryview(bytearray(SEAL_BYTES))
        self._damaged: list[bytes] = []
        """Keys of blocks to remove."""

    # --- load ----------------------------------------------------------------------------------

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        done: list[Piece[OffloadKey]] = []
        try:
            for node, some in self._by_node(transfer, pieces).items():
                left = deque(some)
                while left:
                    try:
                        self._load_from(self._wires.to(node), transfer, left, done)
                    except TooLong:
                        self._refuse(transfer, left.popleft()[1], SealFailure.LENGTH)
                        self._wires.close()
            self._remove_damaged()
        except ServerFailure as failure:
            self._wires.recover(failure)
            raise
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
        while left:
            row, key = left[0]
            payload = self._tier.rows[row]
            try:
                length = wire.read_into(self._header, payload)
            except Refusal as refusal:
                if refusal.code != _WRONG_TYPE:
                    raise failure_of(refusal) from None
                self._refuse(transfer, key, SealFailure.NOT_SEALED)
            else:
                if length is None:
                    transfer.gone.append(key)
                elif failure := self._failure_of(transfer, key, payload, length):
                    self._refuse(transfer, key, failure)
                else:
                    done.append((row, key))
            left.popleft()

    def _failure_of(
        self, transfer: RemoteTransfer, key: OffloadKey, payload: memoryview, length: int
    ) -> SealFailure | None:
        if length != SEAL_BYTES + len(payload):
            return SealFailure.LENGTH
        return check(self._header, payload, key, transfer.job.fingerprint, self._tier.seal_keys)

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
        try:
            done: list[Piece[OffloadKey]] = []
            for node, some in self._by_node(transfer, pieces).items():
                done += self._store_to(self._wires.to(node), transfer, some)
        except ServerFailure as failure:
            self._wires.recover(failure)
            raise
        return done

    def _store_to(
        self, wire: Wire, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        new = self._not_there(wire, transfer, pieces)
        if not new:
            return list(pieces)
        parts: list[bytes | memoryview] = []
        for row, key in new:
            parts += self._set_command(transfer, key, self._tier.rows[row])
        wire.send(parts)
        wire.expect_answers()
        refusals: list[Refusal] = []
        failed: set[OffloadKey] = set()
        for _, key in new:
            try:
                if wire.read() is not None:  # nil: another engine was faster
                    transfer.stored.append(key)
            except Refusal as refusal:
                refusals.append(refusal)
                failed.add(key)
        self._explain(transfer, failed, refusals)
        return [piece for piece in pieces if piece[1] not in failed]

    def _not_there(
        self, wire: Wire, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        """The blocks that the server does not have. Other values under their keys are removed."""
        keys = [block_key(transfer.namespace, key) for _, key in pieces]
        lengths = map(_number_in, _answers_to(wire, [command(b"STRLEN", key) for key in keys]))
        new, foreign = [], []
        for piece, key, length in zip(pieces, keys, lengths, strict=True):
            if length == SEAL_BYTES + len(self._tier.rows[piece[0]]):
                continue
            new.append(piece)
            if length != 0:
                foreign.append(key)
                self._tier.refuse_block(
                    SealFailure.NOT_SEALED if length is None else SealFailure.LENGTH
                )
        if foreign:
            _answers_to(wire, [command(b"UNLINK", key) for key in foreign])
        return new

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
