"""The seal: it proves what a block is, and nothing that is wrong with one gets past it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier import seal
from kvtier.base import OffloadKey, make_offload_key
from kvtier.seal import SEAL_BYTES, Seal, SealError, SealFailure

FINGERPRINT = bytes(range(16))
KEY = make_offload_key(b"0123456789abcdef" * 2, 3)
PAYLOAD = bytes(i * 7 % 251 for i in range(4096))

# The format, written down a second time: whoever changes it without a new version fails here.
MAGIC = slice(0, 8)
VERSION = slice(8, 10)
KEY_LENGTH = slice(10, 12)
WRITER_LENGTH = slice(12, 14)
RESERVED = slice(14, 16)
PAYLOAD_LENGTH = slice(16, 24)
TIME = slice(24, 32)
FINGERPRINT_FIELD = slice(32, 48)
DIGEST = slice(48, 64)
WRITER_FIELD = slice(64, 96)
KEY_FIELD = slice(96, 224)
CHECKSUM = slice(224, 232)
PADDING = slice(232, 256)


def make(
    key: OffloadKey = KEY,
    payload: bytes = PAYLOAD,
    fingerprint: bytes = FINGERPRINT,
    writer: str = "engine-0",
) -> bytes:
    return seal.make(key, memoryview(payload), fingerprint, writer)


def check(
    header: bytes | bytearray | memoryview,
    payload: bytes | bytearray = PAYLOAD,
    key: OffloadKey = KEY,
    fingerprint: bytes = FINGERPRINT,
) -> SealFailure | None:
    return seal.check(header, memoryview(payload), key, fingerprint)


def refusal(header: bytes) -> SealFailure:
    with pytest.raises(SealError) as refused:
        seal.read(header)
    return refused.value.failure


def with_bit_flipped(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def with_field(header: bytes, field: slice, value: bytes) -> bytes:
    """The header with another field and the checksum that fits: made so, not damaged."""
    forged = bytearray(header)
    assert len(value) == field.stop - field.start
    forged[field] = value
    forged[CHECKSUM] = struct.pack("<Q", xxh3_64_intdigest(bytes(forged[: CHECKSUM.start])))
    return bytes(forged)


SEALED = make()


# --- what a seal says ---------------------------------------------------------------------------


def test_a_seal_says_what_was_sealed() -> None:
    before = time.time_ns()
    header = make()
    assert len(header) == SEAL_BYTES
    read = seal.read(header)
    assert read.key == KEY
    assert read.fingerprint == FINGERPRINT
    assert read.payload_bytes == len(PAYLOAD)
    assert read.writer == "engine-0"
    assert before <= read.time_ns <= time.time_ns()
    assert check(header) is None


@given(
    block_hash=st.binary(max_size=124),
    group=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=2000),
    fingerprint=st.binary(min_size=16, max_size=16),
    writer=st.text(max_size=40),
)
@example(block_hash=b"", group=0, payload=b"", fingerprint=bytes(16), writer="")
@example(block_hash=b"h" * 124, group=0, payload=b"p", fingerprint=b"f" * 16, writer="w" * 32)
def test_whatever_is_sealed_is_recognised(
    block_hash: bytes, group: int, payload: bytes, fingerprint: bytes, writer: str
) -> None:
    key = make_offload_key(block_hash, group)
    header = make(key, payload, fingerprint, writer)
    assert len(header) == SEAL_BYTES
    assert check(header, payload, key, fingerprint) is None
    assert seal.read(header).key == key


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_headers_come_in_any_kind_of_buffer(
    kind: Callable[[bytes], bytes | bytearray | memoryview],
) -> None:
    header = make()
    assert check(kind(header)) is None
    # A tier may have read header and payload with one read.
    assert check(kind(header + PAYLOAD)) is None


def test_a_key_that_ends_in_zeros_is_not_cut() -> None:
    key = make_offload_key(b"hash" + bytes(8), 0)
    header = make(key)
    assert seal.read(header).key == key
    assert check(header, key=OffloadKey(key[:-1])) is SealFailure.KEY
    assert check(header, key=OffloadKey(key + b"\0")) is SealFailure.KEY


@pytest.mark.parametrize(
    ("writer", "read"),
    [
        ("", ""),
        ("motor-\u00fc", "motor-\u00fc"),
        ("x" * 33, "x" * 32),
        ("x" * 100_000, "x" * 32),
        ("\u5f15" * 11, "\u5f15" * 10 + "\ufffd"),  # 33 bytes: the last sign is cut in two
        ("lone \ud800", "lone ?"),  # a file name that is no text, for one
    ],
)
def test_writers_of_any_name_can_seal(writer: str, read: str) -> None:
    header = make(writer=writer)
    assert len(header) == SEAL_BYTES
    assert check(header) is None
    assert seal.read(header).writer == read


@pytest.mark.parametrize("length", [129, 4096])
def test_a_key_that_does_not_fit_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=rf"a key of {length} bytes: at most 128 fit"):
        make(key=OffloadKey(b"k" * length))


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_fingerprint_of_another_length_is_an_error(length: int) -> None:
    with pytest.raises(
        ValueError, match=rf"a fingerprint of {length} bytes: give the 16 bytes that"
    ):
        make(fingerprint=b"f" * length)


def test_the_format_does_not_change_unnoticed() -> None:
    header = make()
    assert header[MAGIC] == b"KVTSEAL\0"
    assert header[VERSION] == struct.pack("<H", 1)
    assert header[KEY_LENGTH] == struct.pack("<H", len(KEY))
    assert header[WRITER_LENGTH] == struct.pack("<H", len("engine-0"))
    assert header[RESERVED] == bytes(2)
    assert header[PAYLOAD_LENGTH] == struct.pack("<Q", len(PAYLOAD))
    assert header[TIME] == struct.pack("<Q", seal.read(header).time_ns)
    assert header[FINGERPRINT_FIELD] == FINGERPRINT
    # XXH3-128 of nothing, as its authors publish it.
    assert make(payload=b"")[DIGEST].hex() == "99aa06d3014798d86001c324468d497f"
    assert header[WRITER_FIELD] == b"engine-0".ljust(32, b"\0")
    assert header[KEY_FIELD] == KEY.ljust(128, b"\0")
    assert header[CHECKSUM] == struct.pack("<Q", xxh3_64_intdigest(header[: CHECKSUM.start]))
    assert header[PADDING] == bytes(24)


# --- damage -------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_header_is_found() -> None:
    header = make()
    reasons: dict[SealFailure | None, set[int]] = {}
    for bit in range(SEAL_BYTES * 8):
        damaged = with_bit_flipped(header, bit)
        reason = check(damaged)
        reasons.setdefault(reason, set()).add(bit // 8)
        assert refusal(damaged) is reason
    assert reasons == {
        SealFailure.NOT_SEALED: set(range(8)),
        SealFailure.FORMAT: {8, 9},
        SealFailure.HEADER: set(range(10, SEAL_BYTES)),
    }


@given(bit=st.integers(0, len(PAYLOAD) * 8 - 1))
@example(bit=0)
@example(bit=len(PAYLOAD) * 8 - 1)
def test_a_flipped_bit_of_a_payload_is_found(bit: int) -> None:
    assert check(SEALED, with_bit_flipped(PAYLOAD, bit)) is SealFailure.DIGEST


def test_every_flipped_bit_of_a_small_payload_is_found() -> None:
    payload = PAYLOAD[:64]
    header = make(payload=payload)
    for bit in range(len(payload) * 8):
        assert check(header, with_bit_flipped(payload, bit)) is SealFailure.DIGEST


@pytest.mark.parametrize("length", [0, 1, 7, 8, 10, 224, 232, 255])
def test_a_truncated_header_is_no_seal(length: int) -> None:
    assert check(make()[:length]) is SealFailure.NOT_SEALED
    assert refusal(make()[:length]) is SealFailure.NOT_SEALED


@pytest.mark.parametrize(
    "payload", [b"", PAYLOAD[:1], PAYLOAD[:-1], PAYLOAD + b"\0", PAYLOAD + PAYLOAD]
)
def test_a_payload_of_another_length_is_found(payload: bytes) -> None:
    assert check(make(), payload) is SealFailure.LENGTH


def test_a_write_that_stopped_half_way_is_found() -> None:
    whole = make() + PAYLOAD
    for written in range(0, len(whole), 97):
        torn = whole[:written].ljust(len(whole), b"\0")
        assert check(torn[:SEAL_BYTES], torn[SEAL_BYTES:]) is not None


@pytest.mark.parametrize("filling", [b"\x00", b"\xff"])
def test_memory_that_was_never_written_is_no_seal(filling: bytes) -> None:
    assert check(filling * SEAL_BYTES, filling * len(PAYLOAD)) is SealFailure.NOT_SEALED


def test_zeros_under_a_sound_header_are_found() -> None:
    assert check(make(), bytes(len(PAYLOAD))) is SealFailure.DIGEST


# --- other blocks -------------------------------------------------------------------------------


def test_swapped_blocks_are_found() -> None:
    other_key = make_offload_key(b"another hash", 3)
    other_payload = PAYLOAD[::-1]
    header, other_header = make(), make(other_key, other_payload)
    assert check(other_header, other_payload) is SealFailure.KEY
    assert check(header, PAYLOAD, key=other_key) is SealFailure.KEY
    # Header and payload of two blocks.
    assert check(header, other_payload) is SealFailure.DIGEST
    assert check(other_header, PAYLOAD, key=other_key) is SealFailure.DIGEST


def test_the_same_hash_in_another_group_is_another_block() -> None:
    other_group = make_offload_key(b"0123456789abcdef" * 2, 4)
    assert check(make(other_group)) is SealFailure.KEY


def test_a_block_of_another_model_or_epoch_is_refused() -> None:
    other = with_bit_flipped(FINGERPRINT, 127)
    assert check(make(fingerprint=other)) is SealFailure.FINGERPRINT
    assert check(make(), fingerprint=other) is SealFailure.FINGERPRINT


@pytest.mark.parametrize("version", [0, 3, 256, 65535])
def test_another_version_is_refused_though_its_checksum_fits(version: int) -> None:
    header = with_field(make(), VERSION, struct.pack("<H", version))
    assert check(header) is SealFailure.FORMAT


def test_of_several_reasons_the_most_telling_is_given() -> None:
    foreign = make(make_offload_key(b"another hash", 0), PAYLOAD[:-1], b"f" * 16)
    assert check(foreign) is SealFailure.FINGERPRINT
    assert check(foreign, fingerprint=b"f" * 16) is SealFailure.KEY


def test_the_reason_is_in_the_message() -> None:
    with pytest.raises(SealError, match="not_sealed"):
        seal.read(b"")


# --- headers that someone has made up -----------------------------------------------------------


@pytest.mark.parametrize("length", [129, 1000, 65535])
def test_a_key_length_beyond_the_field_is_refused_though_the_checksum_fits(length: int) -> None:
    header = with_field(make(), KEY_LENGTH, struct.pack("<H", length))
    assert refusal(header) is SealFailure.HEADER
    assert check(header) is SealFailure.HEADER


@pytest.mark.parametrize("length", [33, 65535])
def test_a_writer_length_beyond_the_field_is_refused_though_the_checksum_fits(length: int) -> None:
    header = with_field(make(), WRITER_LENGTH, struct.pack("<H", length))
    assert refusal(header) is SealFailure.HEADER
    assert check(header) is SealFailure.HEADER


@pytest.mark.parametrize("length", [0, len(PAYLOAD) - 1, 2**63, 2**64 - 1])
def test_a_payload_length_is_compared_and_never_allocated(length: int) -> None:
    header = with_field(make(), PAYLOAD_LENGTH, struct.pack("<Q", length))
    assert seal.read(header).payload_bytes == length
    assert check(header) is SealFailure.LENGTH


def test_a_writer_that_is_no_text_can_be_read() -> None:
    header = with_field(make(), WRITER_FIELD, b"\xff" * 32)
    assert seal.read(header).writer == "\ufffd" * 8
    assert check(header) is None


def read_or_reason(header: bytes) -> Seal | SealFailure:
    try:
        return seal.read(header)
    except SealError as error:
        return error.failure


def assert_refused_or_sound(header: bytes) -> None:
    """Reading and checking agree, and whatever `read` lets through is within bounds."""
    read, verdict = read_or_reason(header), check(header)
    if isinstance(read, SealFailure):
        assert verdict is read
        assert read in {SealFailure.NOT_SEALED, SealFailure.FORMAT, SealFailure.HEADER}
        return
    assert len(read.key) <= 128
    assert len(read.writer) <= 32
    if verdict is None:
        assert (read.key, read.fingerprint) == (KEY, FINGERPRINT)
        assert read.payload_bytes == len(PAYLOAD)


@given(header=st.binary(max_size=2 * SEAL_BYTES))
def test_random_bytes_are_never_a_seal(header: bytes) -> None:
    assert check(header) is not None
    assert_refused_or_sound(header)


@given(rest=st.binary(min_size=SEAL_BYTES, max_size=SEAL_BYTES))
def test_random_bytes_behind_the_magic_are_never_a_seal(rest: bytes) -> None:
    header = SEALED[: VERSION.stop] + rest[VERSION.stop :]
    assert check(header) is SealFailure.HEADER
    assert_refused_or_sound(header)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, SEAL_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=8
    ),
    length=st.one_of(st.just(SEAL_BYTES), st.integers(0, SEAL_BYTES)),
)
def test_mutated_headers_are_found(changes: list[tuple[int, int]], length: int) -> None:
    header = bytearray(SEALED)
    for position, value in changes:
        header[position] = value
    mutated = bytes(header[:length])
    assert (check(mutated) is None) == (mutated == SEALED)
    assert_refused_or_sound(mutated)


@given(
    fields=st.binary(min_size=CHECKSUM.start - VERSION.stop, max_size=CHECKSUM.start - VERSION.stop)
)
def test_made_up_headers_with_a_fitting_checksum_do_no_harm(fields: bytes) -> None:
    header = with_field(SEALED, slice(VERSION.stop, CHECKSUM.start), fields)
    assert check(header) is not None
    assert_refused_or_sound(header)


@given(
    field=st.sampled_from(
        [KEY_LENGTH, WRITER_LENGTH, RESERVED, PAYLOAD_LENGTH, TIME, WRITER_FIELD, KEY_FIELD]
    ),
    data=st.data(),
)
def test_one_made_up_field_with_a_fitting_checksum_does_no_harm(
    field: slice, data: st.DataObject
) -> None:
    size = field.stop - field.start
    header = with_field(SEALED, field, data.draw(st.binary(min_size=size, max_size=size)))
    assert_refused_or_sound(header)
