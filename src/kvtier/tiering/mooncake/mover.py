"""Moves blocks between slots and the pool, for the lanes of the mooncake tier; and asks the pool
which blocks it has.

A block is one object of two parts, the seal and the payload. The client moves both in one call
that covers all blocks of a unit, straight between the pool and the slots.

Over TCP, each part is a request of its own, which costs as much as the payload of a small block. So
small blocks are copied: seal and payload lie side by side in memory of this tier, and travel as one
part.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.base import OffloadKey
from kvtier.hints import hints_of
from kvtier.seal import SEAL_BYTES, SealFailure, check
from kvtier.tiering.io.queue import Piece
from kvtier.tiering.mooncake.namespaces import MooncakeNamespaces, block_names
from kvtier.tiering.mooncake.options import Protocol
from kvtier.tiering.mooncake.pool import Client, Membership, Pool
from kvtier.tiering.remote.errors import FailureKind, ServerErrors, ServerFailure
from kvtier.tiering.remote.lane import BlockMover, RemoteTransfer
from kvtier.tiering.remote.manager import BlockServer

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

__all__ = [
    "GONE",
    "MOST_PIECES",
    "MOST_STUCK",
    "MooncakeServer",
    "copied_bytes_of",
    "require_answers",
    "stored_sizes",
]

MOST_PIECES = 64
"""Blocks that one call moves."""
MOST_STUCK = 8
"""Calls that may hang, beside those of the lanes."""
_LARGEST_COPIED = 256 << 10
"""Payloads that are copied. Beyond, a copy costs more than a request."""
_LOOKED_UP_AT_ONCE = 2048
_MOST_WANTED = 65_536
_ROOM_AFTER_S = 0.02
"""The master makes room in the background when it has refused a block."""

# Numbers of errors (`ErrorCode` in Mooncake's types.h).
_NO_ROOM = -200
_NO_SUCH_SIZE = -600
GONE = (-703, -704, -712)
"""Not stored yet, not there, or no replica of it is left."""
_LEASE_HAS_ENDED = -707
"""The block arrived, but it may have been evicted while it was read. Its seal tells."""
_TRANSFER_FAILED = -800
_NO_MASTER = {-1: "an internal error", -900: "no connection", -901: "no answer in time"}


class _Area(NamedTuple):
    """Memory of one call: a seal for each block, and for small blocks the payload beside it."""

    memory: memoryview
    address: int
    payload_bytes: int
    """0: payloads stay in their slots."""

    @property
    def _step(self) -> int:
        return SEAL_BYTES + self.payload_bytes

    def seal(self, number: int) -> memoryview:
        start = number * self._step
        return self.memory[start : start + SEAL_BYTES]

    def payload(self, number: int) -> memoryview:
        start = number * self._step + SEAL_BYTES
        return self.memory[start : start + self.payload_bytes]

    def address_of(self, number: int) -> int:
        return self.address + number * self._step


class MooncakeServer(BlockServer):
    """The pool, for the threads of one tier."""

    looked_up_at_once = _LOOKED_UP_AT_ONCE
    most_stuck_calls = MOST_STUCK

    def __init__(
        self,
        pool: Pool,
        errors: ServerErrors,
        num_lanes: int,
        config: Callable[[], Any],
        copied_bytes: int = 0,
    ) -> None:
        """`config`: makes the settings of a store, for this engine. `copied_bytes`: the size of a
        payload if payloads are copied (see `copied_bytes_of`)."""
        self.errors = errors
        self.namespaces = MooncakeNamespaces(pool, config)
        self._pool = pool
        self._config = config
        self.copies = bool(copied_bytes)
        # Memory that no call has used takes no room: it is never touched.
        area_bytes = MOST_PIECES * (SEAL_BYTES + copied_bytes)
        memory = bytearray((num_lanes + MOST_STUCK) * area_bytes)
        address = pool.share(memory)
        self._areas = [
            _Area(memoryview(memory)[start : start + area_bytes], address + start, copied_bytes)
            for start in range(0, len(memory), area_bytes)
        ]
        """Those that no call uses."""
        self._wanted: OrderedDict[OffloadKey, None] = OrderedDict()

    def open_mover(self, tier: SecondaryTierManager) -> BlockMover:
        return _MooncakeMover(tier, self)

    def find(self, namespace: str, keys: Sequence[OffloadKey]) -> Iterable[bool]:
        names = block_names(namespace, keys)
        codes = self._pool.ask(lambda client: client.batch_is_exist(names))
        if len(codes) != len(keys) or min(codes, default=0) < 0:
            raise _failure_of(min(codes, default=0))
        return map(bool, codes)

    def touch(self, namespace: str, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        # A block that is looked up has a new lease, and the master evicts the oldest leases first.
        return [
            key
            for key, is_there in zip(keys, self.find(namespace, keys), strict=True)
            if not is_there
        ]

    def note_wanted(self, keys: Iterable[OffloadKey]) -> None:
        """The pool has evicted these blocks, and requests have used them again. When they are
        stored again, they are pinned softly: the master evicts others first. Scheduler thread."""
        self._wanted.update(dict.fromkeys(keys))
        while len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)

    def is_wanted(self, key: OffloadKey) -> bool:
        """True once after `note_wanted`. A lane's thread."""
        return self._wanted.pop(key, self) is None

    @contextmanager
    def area(self) -> Iterator[_Area]:
        """Memory for one call. There is enough for all lanes and all calls that hang."""
        area = self._areas.pop()
        try:
            yield area
        finally:
            self._areas.append(area)

    @property
    def pool(self) -> Pool:
        return self._pool

    def config_for(
        self, membership: Membership, transfer: RemoteTransfer, count: int, is_pinned: bool
    ) -> Any:
        """The settings of a store of some blocks."""
        config = self._config()
        # The blocks that a request adds are evicted together: none is of use without those before.
        group = blake2b(transfer.job.req_context.req_id.encode(), digest_size=8).hexdigest()
        config.group_ids = [f"{transfer.namespace}:{group}"] * count
        config.preferred_segment = membership.hostname
        retain_s = hints_of(transfer.job.req_context).retain_s
        if is_pinned or retain_s:
            config.soft_pin_action = type(config.soft_pin_action).ENABLE
        if retain_s and not is_pinned:
            config.soft_pin_ttl_ms = int(retain_s * 1000)
        return config

    def interrupt(self) -> None:
        super().interrupt()
        self._pool.interrupt()

    def close(self) -> None:
        self._pool.close()


def copied_bytes_of(row_bytes: int, protocol: Protocol) -> int:
    """`row_bytes` if payloads of this size are to be copied, and 0 if not."""
    return row_bytes if protocol is Protocol.TCP and row_bytes <= _LARGEST_COPIED else 0


def require_answers(codes: Iterable[int]) -> None:
    """Raise `ServerFailure` if the results of a call say that the master could not be asked."""
    for code in codes:
        if code in _NO_MASTER:
            raise _failure_of(code)


def stored_sizes(client: Client, names: Sequence[str]) -> dict[str, list[int]]:
    """How long objects are, replica by replica, of those that are in somebody's memory."""
    found: dict[str, list[int]] = {}
    for name, replicas in client.batch_get_replica_desc(names).items():
        sizes = [
            each.get_memory_descriptor().buffer_descriptor.size
            for each in replicas
            if each.is_memory_replica()
        ]
        if sizes:
            found[name] = sizes
    return found


def _failure_of(code: int) -> ServerFailure:
    what = _NO_MASTER.get(code, f"error {code}")
    kind = FailureKind.SILENT if code == -901 else FailureKind.UNREACHABLE
    return ServerFailure(kind, f"the master cannot be asked: {what}")


class _MooncakeMover(BlockMover):
    def __init__(self, tier: SecondaryTierManager, server: MooncakeServer) -> None:
        self._tier = tier
        self._server = server
        self._pool = server.pool
        self._row_bytes = tier.rows.row_bytes
        self._block_bytes = SEAL_BYTES + tier.rows.row_bytes
        self._sizes: Sequence[int] = (SEAL_BYTES, self._row_bytes)
        if server.copies:
            self._sizes = (self._block_bytes,)

    def _parts(self, area: _Area, pieces: Sequence[Piece[OffloadKey]]) -> list[list[int]]:
        """For each block, where its parts are."""
        if self._server.copies:
            return [[area.address_of(number)] for number in range(len(pieces))]
        base, row_bytes = self._pool.address, self._row_bytes
        return [
            [area.address_of(number), base + row * row_bytes]
            for number, (row, _) in enumerate(pieces)
        ]

    def _call(
        self,
        names: Sequence[str],
        move: Callable[[Membership, Sequence[Sequence[int]]], list[int]],
    ) -> list[int]:
        """Let the client move blocks. Returns a result for each, when all transfers have ended."""
        began = time.monotonic()
        with self._pool.use() as membership:
            codes = move(membership, [self._sizes] * len(names))
        is_whole = len(codes) == len(names)
        if not is_whole or min(codes) < 0:
            self._pool.replace_if_in_doubt(membership, time.monotonic() - began)
        if not is_whole:
            raise ServerFailure(FailureKind.GARBAGE, "the client has answered nothing")
        require_answers(codes)
        return codes

    def _note_failures(self, codes: Iterable[int], expected: Collection[int]) -> None:
        """`expected`: numbers of errors that are counted and explained elsewhere."""
        others = {code for code in codes if code < 0}.difference(expected)
        if _TRANSFER_FAILED in others:
            self._server.errors.note(
                ServerFailure(
                    FailureKind.UNREACHABLE,
                    "a host that lends memory to the pool does not answer: its blocks count as "
                    "absent",
                )
            )
            others.discard(_TRANSFER_FAILED)
        if others:
            reason = f"the pool does not take or give some blocks (error {min(others)})"
            self._server.errors.note(ServerFailure(FailureKind.REFUSED, reason))

    # --- load ----------------------------------------------------------------------------------

    def load(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        names = block_names(transfer.namespace, (key for _, key in pieces))
        with self._server.area() as area:
            parts = self._parts(area, pieces)
            codes = self._call(
                names,
                lambda membership, sizes: membership.client.batch_get_into_multi_buffers(
                    names, parts, sizes
                ),
            )
            done = self._accepted(transfer, pieces, codes, area)
        self._note_failures(codes, (*GONE, _LEASE_HAS_ENDED, _NO_SUCH_SIZE))
        return done

    def _accepted(
        self,
        transfer: RemoteTransfer,
        pieces: Sequence[Piece[OffloadKey]],
        codes: Sequence[int],
        area: _Area,
    ) -> list[Piece[OffloadKey]]:
        """The blocks that are right. Removes those that are damaged."""
        done: list[Piece[OffloadKey]] = []
        damaged: list[OffloadKey] = []
        unread: list[OffloadKey] = []
        for number, (piece, code) in enumerate(zip(pieces, codes, strict=True)):
            row, key = piece
            if code in (self._block_bytes, _LEASE_HAS_ENDED):
                if self._server.copies:
                    self._tier.rows[row][:] = area.payload(number)
                failure = check(
                    area.seal(number),
                    self._tier.rows[row],
                    key,
                    transfer.job.fingerprint,
                    self._tier.seal_keys,
                )
                if failure is None:
                    done.append(piece)
                elif code == _LEASE_HAS_ENDED:
                    transfer.gone.append(key)
                elif self._refused(failure):
                    damaged.append(key)
            elif code in GONE:
                transfer.gone.append(key)
            elif code >= 0 or code in (_TRANSFER_FAILED, _NO_SUCH_SIZE):
                unread.append(key)
        damaged += self._of_another_size(transfer, unread)
        if damaged:
            names = block_names(transfer.namespace, damaged)
            self._pool.ask(lambda client: client.batch_remove(names, True))
        return done

    def _refused(self, failure: SealFailure) -> bool:
        """Count a damaged block. True if it may be removed, so that it can be stored again: what a
        newer release has written is left to it."""
        self._tier.refuse_block(failure)
        return failure is not SealFailure.FORMAT

    def _of_another_size(
        self, transfer: RemoteTransfer, keys: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        """Those that are not as long as a block. The client says of them only that they could not
        be read."""
        if not keys:
            return []
        names = dict(zip(block_names(transfer.namespace, keys), keys, strict=True))
        sizes = self._pool.ask(lambda client: stored_sizes(client, list(names)))
        found = []
        for name, key in names.items():
            if name in sizes and set(sizes[name]) != {self._block_bytes}:
                self._tier.refuse_block(SealFailure.LENGTH)
                found.append(key)
        return found

    # --- store ---------------------------------------------------------------------------------

    def store(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]]
    ) -> list[Piece[OffloadKey]]:
        pinned = {key for _, key in pieces if self._server.is_wanted(key)}
        done: list[Piece[OffloadKey]] = []
        for is_pinned in (False, True):
            some = [piece for piece in pieces if (piece[1] in pinned) is is_pinned]
            if some:
                done += self._stored(transfer, some, is_pinned)
        return done

    def _stored(
        self, transfer: RemoteTransfer, pieces: Sequence[Piece[OffloadKey]], is_pinned: bool
    ) -> list[Piece[OffloadKey]]:
        with self._server.area() as area:
            for number, (row, key) in enumerate(pieces):
                payload = self._tier.rows[row]
                if self._server.copies:
                    area.payload(number)[:] = payload
                    payload = area.payload(number)
                area.seal(number)[:] = self._tier.seal_block(transfer.job, key, payload)
            parts = self._parts(area, pieces)
            codes = self._put(transfer, pieces, parts, is_pinned)
            full = [number for number, code in enumerate(codes) if code == _NO_ROOM]
            if full and not self._server.is_closed:
                time.sleep(_ROOM_AFTER_S)
                again = self._put(
                    transfer,
                    [pieces[number] for number in full],
                    [parts[number] for number in full],
                    is_pinned,
                )
                for number, code in zip(full, again, strict=True):
                    codes[number] = code
        self._note_failures(codes, (_NO_ROOM,))
        return self._kept(transfer, pieces, codes)

    def _put(
        self,
        transfer: RemoteTransfer,
        pieces: Sequence[Piece[OffloadKey]],
        parts: Sequence[Sequence[int]],
        is_pinned: bool,
    ) -> list[int]:
        names = block_names(transfer.namespace, (key for _, key in pieces))

        def move(membership: Membership, sizes: Sequence[Sequence[int]]) -> list[int]:
            config = self._server.config_for(membership, transfer, len(names), is_pinned)
            client: Client = membership.client
            return client.batch_put_from_multi_buffers(names, parts, sizes, config)

        return self._call(names, move)

    def _kept(
        self,
        transfer: RemoteTransfer,
        pieces: Sequence[Piece[OffloadKey]],
        codes: Sequence[int],
    ) -> list[Piece[OffloadKey]]:
        """The blocks that the pool has now. The client does not say which it had before."""
        done = [piece for piece, code in zip(pieces, codes, strict=True) if code == 0]
        transfer.stored += [key for _, key in done]
        refused = [key for (_, key), code in zip(pieces, codes, strict=True) if code == _NO_ROOM]
        if refused:
            transfer.refused += refused
            reason = (
                "the pool is full, and nothing can be evicted right now. Let hosts lend more "
                "(segment_bytes), or lower the master's -default_kv_lease_ttl"
            )
            self._server.errors.note(ServerFailure(FailureKind.FULL, reason))
        return done
