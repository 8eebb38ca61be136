"""Damage is what it says, and a seal finds all of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import seal
from kvtier.base import OffloadKey, make_offload_key
from kvtier.testing import Damage, inflict, payload_of

FINGERPRINT = bytes(range(16))
KEY, OTHER = (make_offload_key(bytes([number]) * 32, 0) for number in range(2))
PAYLOAD_BYTES = 512


class Shelf:
    """Blocks in a dictionary."""

    def __init__(self) -> None:
        self.blocks = {(FINGERPRINT, key): whole_block(key) for key in (KEY, OTHER)}

    def read(self, fingerprint: bytes, key: OffloadKey) -> bytes:
        return self.blocks[fingerprint, key]

    def write(self, fingerprint: bytes, key: OffloadKey, block: bytes) -> None:
        self.blocks[fingerprint, key] = block

    def failure_of(self, key: OffloadKey) -> seal.SealFailure | None:
        block = self.read(FINGERPRINT, key)
        payload = memoryview(block)[seal.SEAL_BYTES :]
        return seal.check(block[: seal.SEAL_BYTES], payload, key, FINGERPRINT)


def whole_block(key: OffloadKey) -> bytes:
    payload = payload_of(key, PAYLOAD_BYTES)
    return seal.make(key, memoryview(payload), FINGERPRINT, "writer") + payload


@given(st.sampled_from(Damage), st.integers(0, 2**32))
@settings(max_examples=300)
def test_a_seal_finds_all_damage(how: Damage, seed: int) -> None:
    shelf = Shelf()
    assert shelf.failure_of(KEY) is None
    inflict(shelf, FINGERPRINT, KEY, how, other=OTHER, seed=seed)
    assert shelf.failure_of(KEY) is not None
    assert (shelf.failure_of(OTHER) is not None) == (how is Damage.SWAP)


def test_a_flip_is_one_bit() -> None:
    shelf = Shelf()
    before = shelf.read(FINGERPRINT, KEY)
    inflict(shelf, FINGERPRINT, KEY, Damage.FLIP)
    after = shelf.read(FINGERPRINT, KEY)
    difference = int.from_bytes(before, "big") ^ int.from_bytes(after, "big")
    assert len(after) == len(before)
    assert difference.bit_count() == 1


def test_a_truncated_block_is_a_beginning() -> None:
    shelf = Shelf()
    before = shelf.read(FINGERPRINT, KEY)
    inflict(shelf, FINGERPRINT, KEY, Damage.TRUNCATE)
    after = shelf.read(FINGERPRINT, KEY)
    assert len(after) < len(before)
    assert before.startswith(after)


def test_swapped_blocks_are_whole() -> None:
    shelf = Shelf()
    inflict(shelf, FINGERPRINT, KEY, Damage.SWAP, other=OTHER)
    assert shelf.failure_of(KEY) is seal.SealFailure.KEY
    inflict(shelf, FINGERPRINT, OTHER, Damage.SWAP, other=KEY)
    assert shelf.failure_of(KEY) is None


def test_a_foreign_block_is_whole_and_anothers() -> None:
    shelf = Shelf()
    inflict(shelf, FINGERPRINT, KEY, Damage.FOREIGN)
    assert shelf.failure_of(KEY) is seal.SealFailure.FINGERPRINT
    block = shelf.read(FINGERPRINT, KEY)
    read = seal.read(block)
    payload = memoryview(block)[seal.SEAL_BYTES :]
    assert seal.check(block[: seal.SEAL_BYTES], payload, KEY, read.fingerprint) is None


@pytest.mark.parametrize("other", [None, KEY])
def test_a_swap_needs_two_blocks(other: OffloadKey | None) -> None:
    with pytest.raises(ValueError, match="needs two blocks"):
        inflict(Shelf(), FINGERPRINT, KEY, Damage.SWAP, other=other)


def test_what_is_not_kept_cannot_be_damaged() -> None:
    with pytest.raises(KeyError):
        inflict(Shelf(), bytes(16), KEY, Damage.FLIP)
