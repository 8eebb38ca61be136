"""The verdict on a slot: no damage passes, and an engine's own rules decide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier import seal
from kvtier.seal import SealFailure
from kvtier.testing import TierHarness
from kvtier.tiering.disk.index import namespace_tag
from kvtier.tiering.disk.layout import Geometry, Superblock, encode_stamp, write_slot_header
from kvtier.tiering.disk.reader import Entry, check_slot
from kvtier.tiering.io.page import PAGE_BYTES

KEYS = TierHarness.keys(80)


VICTIM = KEYS[11]


SUPERBLOCK = Superblock(b"u" * 16, Geometry(PAGE_BYTES, 9), cut=5)


FINGERPRINT = b"f" * 16


ENTRY = Entry(seq=7, tag=namespace_tag(FINGERPRINT), key=VICTIM)


def written(seq: int, slot: int = 3) -> bytearray:
    payload = bytes(range(256)) * (PAGE_BYTES // 256)
    block = bytearray(PAGE_BYTES) + payload
    with memoryview(block) as view:
        block_seal = seal.make(VICTIM, payload, FINGERPRINT, "engine")
        stamp = encode_stamp(SUPERBLOCK.uuid, slot, seq)
        write_slot_header(view[:PAGE_BYTES], block_seal, stamp)
    return block


@given(bit=st.integers(0, 8 * 2 * PAGE_BYTES - 1))
def test_no_bit_can_be_flipped(bit: int) -> None:
    block = written(seq=7)
    assert check_slot(memoryview(block), SUPERBLOCK, 3, ENTRY).failure is None
    block[bit // 8] ^= 1 << bit % 8
    assert check_slot(memoryview(block), SUPERBLOCK, 3, ENTRY).failure is not None


@given(junk=st.binary(max_size=400), at=st.integers(0, 2 * PAGE_BYTES - 1))
def test_junk_is_refused_or_nothing(junk: bytes, at: int) -> None:
    block = bytearray(2 * PAGE_BYTES)
    block[at : at + len(junk)] = junk[: len(block) - at]
    assert check_slot(memoryview(block), SUPERBLOCK, 3, ENTRY).failure is not None
    assert check_slot(memoryview(block), SUPERBLOCK, 3, None).key is None


def test_what_is_known_of_a_slot_decides() -> None:
    def failure(block: bytearray, slot: int, expected: Entry | None) -> SealFailure | None:
        return check_slot(memoryview(block), SUPERBLOCK, slot, expected).failure

    assert failure(written(seq=6), 3, ENTRY) is SealFailure.STALE
    assert failure(written(seq=8), 3, ENTRY) is None
    assert failure(written(seq=8, slot=4), 3, ENTRY) is SealFailure.STALE
    assert failure(written(seq=7), 3, Entry(7, ENTRY.tag, KEYS[0])) is SealFailure.KEY
    assert failure(written(seq=7), 3, Entry(7, ENTRY.tag, None)) is None
    assert failure(written(seq=7), 3, Entry(7, 1, VICTIM)) is SealFailure.FINGERPRINT
    dead = check_slot(memoryview(written(seq=4)), SUPERBLOCK, 3, None)
    assert (dead.key, dead.failure) == (None, None)
    elsewhere = check_slot(memoryview(written(seq=7, slot=4)), SUPERBLOCK, 3, None)
    assert (elsewhere.key, elsewhere.failure) == (None, None)
