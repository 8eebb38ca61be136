"""The slots, their expected content, and their users."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import cast

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, SlotState
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from tests.tiering.simulation.violation import Witness

SMALL_ROW = 64
"""Bytes of a slot, unless whole pages are needed."""


class Truth:
    """The right bytes of each block under each version of the weights."""

    def __init__(self, row_bytes: int) -> None:
        self._repeats = row_bytes // SMALL_ROW
        self._known: dict[tuple[OffloadKey, int], bytes] = {}

    def payload(self, key: OffloadKey, version: int) -> bytes:
        """The bytes of a block computed with these weights."""
        known = self._known.get((key, version))
        if known is None:
            source = key + version.to_bytes(4, "big")
            known = blake2b(source, digest_size=SMALL_ROW).digest() * self._repeats
            self._known[key, version] = known
        return known


class Memory:
    """The rows as the device sees them."""

    def __init__(self, region: SharedOffloadRegion, num_blocks: int, row_bytes: int) -> None:
        """`region` is for the primary tier, which will clean it up."""
        self.region = region
        self.num_blocks = num_blocks
        self.row_bytes = row_bytes
        self._bytes = region.create_kv_memoryview().cast("B")

    def row(self, slot: int) -> bytes:
        """A copy of a slot."""
        return bytes(self._bytes[slot * self.row_bytes : (slot + 1) * self.row_bytes])

    def write_half(self, slot: int, payload: bytes, second: bool) -> None:
        """Write one half of a slot, as a slow copy does."""
        half = self.row_bytes // 2
        start = slot * self.row_bytes + half * second
        self._bytes[start : start + half] = payload[half:] if second else payload[:half]

    def release(self) -> None:
        """The device releases its view."""
        self._bytes.release()


class _PlainRegion:
    """Stands in for the shared region: small rows, in the memory of one process."""

    def __init__(self, num_blocks: int) -> None:
        self._shape = (num_blocks, SMALL_ROW)
        self._data = bytearray(num_blocks * SMALL_ROW)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._data).cast("B", self._shape)

    def cleanup(self) -> None:
        pass


def plain_memory(num_blocks: int) -> Memory:
    """Slots in plain memory."""
    region = cast(SharedOffloadRegion, _PlainRegion(num_blocks))
    return Memory(region, num_blocks, SMALL_ROW)


@dataclass(slots=True, eq=False)
class Use:
    """A reader or writer of slots, from the time it gets them until it gives them back."""

    who: str
    slots: list[int]
    writes: bool


class SlotUses:
    """The users of each slot, recorded independently of the manager."""

    def __init__(self, num_blocks: int, witness: Witness) -> None:
        self._witness = witness
        self._users: list[list[Use]] = [[] for _ in range(num_blocks)]

    def begin(self, use: Use) -> None:
        """Slots were handed out. A writer must be alone; readers may be many."""
        for slot in use.slots:
            users = self._users[slot]
            for other in users:
                if use.writes or other.writes:
                    raise self._witness.saw(
                        f"slot {slot} was given to {use.who}, but {other.who} uses it"
                    )
            users.append(use)

    def end(self, use: Use) -> None:
        """Slots were given back."""
        for slot in use.slots:
            self._users[slot].remove(use)

    def check(self, slots: list[BlockStatus]) -> None:
        """Every slot in use is pinned, being written or quarantined, according to its use."""
        for block in slots:
            users = self._users[block.block_id]
            if not users or block.state is SlotState.QUARANTINED:
                continue
            if users[0].writes:
                if block.state is not SlotState.WRITING:
                    raise self._witness.saw(f"{block} is {block.state}; {users[0].who} writes it")
            elif block.ref_cnt < len(users):
                names = ", ".join(use.who for use in users)
                raise self._witness.saw(f"{block} has too few pins, or is free; read by {names}")

    def in_use(self) -> list[str]:
        """The users that have not given back all slots."""
        return sorted({use.who for users in self._users for use in users})
