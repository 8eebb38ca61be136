"""The pages that describe a slab: valid pages are decoded, and everything else is refused.

Anyone who can write to the file can also compute a checksum. So pages are damaged in both ways:
with the former checksum, and with a valid one.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.disk import ownership
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    HOLDER_OFFSET,
    MOST_DESCRIPTION_BYTES,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlotStamp,
    Superblock,
    decode_clear_request,
    decode_note,
    encode_clear_request,
    encode_stamp,
    has_stamp,
    is_slab_page,
    read_description,
    read_stamp,
    write_slot_header,
)
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.disk.recovery import found_in
from kvtier.tiering.io.page import PAGE_BYTES, close_page, is_intact
from tests.tiering.disk.harness import disk_harness

UUID = bytes(range(16))
numbers = st.integers(0, 2**64 - 1)
growing = st.integers(0, 2**63 - 1)
ids = st.binary(min_size=16, max_size=16)
pages = st.integers(0, 2**64).map(lambda seed: Random(seed).randbytes(PAGE_BYTES))
geometries = st.builds(
    Geometry,
    payload_bytes=st.integers(1, 2**28).map(lambda pages: pages * PAGE_BYTES),
    num_slots=st.integers(1, 2**40),
)
superblocks = st.builds(
    Superblock,
    uuid=ids,
    geometry=geometries,
    clock=growing,
    cut=growing,
    revision=growing,
    created_ns=numbers,
    last_clear=ids,
)
holders = st.builds(
    Holder,
    engine_id=st.text(max_size=300),
    pid=st.integers(0, 2**31),
    host=st.text(max_size=300),
    since_ns=growing,
    parent_pid=st.integers(0, 2**31),
    pid_namespace=growing,
    started_ticks=growing,
)


def slot_header(key: bytes = b"key", slot: int = 3, seq: int = 7) -> bytes:
    page = bytearray(os.urandom(PAGE_BYTES))
    block_seal = seal.make(OffloadKey(key), memoryview(b"payload"), bytes(16), "writer")
    write_slot_header(page, block_seal, encode_stamp(UUID, slot, seq))
    return bytes(page)


def closed(page: bytes) -> bytes:
    """The page with a valid checksum."""
    copy = bytearray(page)
    close_page(copy)
    return bytes(copy)


# --- what is written is read -------------------------------------------------------------------


@given(superblock=superblocks)
def test_a_superblock_comes_back(superblock: Superblock) -> None:
    page = superblock.encode()
    assert len(page) == PAGE_BYTES
    assert Superblock.decode(page) == superblock
    assert is_slab_page(page)


@given(holder=holders)
@example(holder=Holder("\N{GRINNING FACE}" * 300, 1, "\N{GRINNING FACE}" * 300, 1))
@example(holder=Holder("\x00" * 300, 1, "\ud800" * 300, 1))
def test_a_holder_comes_back(holder: Holder) -> None:
    """Long names are shortened, so that the record always fits on one page."""
    page = holder.encode()
    assert len(page) == PAGE_BYTES
    found = Holder.decode(page)
    assert holder.engine_id.startswith(found.engine_id)
    assert holder.host.startswith(found.host)
    assert (found.pid, found.since_ns) == (holder.pid, holder.since_ns)
    if max(len(holder.engine_id), len(holder.host)) <= 64:
        assert found == holder


@pytest.mark.parametrize(
    ("text", "parent_pid"), [('["engine", 4711, "host", 12345]', 0), ('["e", 4711, "h", 1, 9]', 9)]
)
def test_a_holder_of_an_earlier_release_is_read(text: str, parent_pid: int) -> None:
    page = closed((struct.pack("<8sI", b"KVTHOLD\0", len(text)) + text.encode()).ljust(PAGE_BYTES))
    found = Holder.decode(page)
    assert (found.pid, found.parent_pid) == (4711, parent_pid)
    assert found.pid_namespace == found.started_ticks == 0


@given(note=st.binary(max_size=1024), name=st.text(max_size=128))
def test_a_note_comes_back_beside_the_holder(note: bytes, name: str) -> None:
    holder = Holder(name, 4711, "host", 12345)
    page = holder.encode(note)
    assert Holder.decode(page) == holder
    assert decode_note(page) == note
    assert decode_note(holder.encode()) == b""


def test_a_note_that_has_no_room_is_left_out() -> None:
    holder = Holder("\N{GRINNING FACE}" * 128, 1, "\N{GRINNING FACE}" * 128, 1)
    page = holder.encode(b"note")
    assert Holder.decode(page) == holder
    assert decode_note(page) == b""
    assert decode_note(Holder("engine", 1, "host", 1).encode(bytes(1025))) == b""


@given(at=st.integers(0, PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_a_note_with_a_flipped_bit_is_none(at: int, bit: int) -> None:
    page = bytearray(Holder("engine", 1, "host", 1).encode(b"note"))
    page[at] ^= 1 << bit
    assert decode_note(page) == b""
    assert decode_note(page[:at]) == b""


@given(request_id=ids)
def test_a_request_to_clear_comes_back(request_id: bytes) -> None:
    page = encode_clear_request(request_id)
    assert len(page) == PAGE_BYTES
    assert decode_clear_request(page) == request_id


@given(slot=numbers, seq=numbers, key=st.binary(min_size=1, max_size=128))
def test_a_slots_header_comes_back(slot: int, seq: int, key: bytes) -> None:
    page = slot_header(key, slot, seq)
    assert read_stamp(page) == SlotStamp(UUID, slot, seq)
    assert has_stamp(page, encode_stamp(UUID, slot, seq))
    assert not has_stamp(page, encode_stamp(UUID, slot, seq ^ 1))
    assert seal.read(page).key == key
    found = found_in(page, slot, UUID)
    assert found is not None
    assert (found.slot, found.seq, found.key) == (slot, seq, key)
    assert found_in(page, slot ^ 1, UUID) is None
    assert found_in(page, slot, bytes(16)) is None


def test_a_header_holds_nothing_of_what_was_there_before() -> None:
    first, second = bytearray(PAGE_BYTES), bytearray(b"\xff" * PAGE_BYTES)
    block_seal = seal.make(OffloadKey(b"key"), memoryview(b"payload"), bytes(16), "writer")
    for page in (first, second):
        write_slot_header(page, block_seal, encode_stamp(UUID, 1, 2))
    assert first == second


# --- whatever else is read is refused ----------------------------------------------------------

DECODERS = {
    "superblock": (Superblock.decode, Superblock(UUID, Geometry(8192, 5)).encode()),
    "holder": (Holder.decode, Holder("engine", 4711, "host", 12345).encode()),
    "control": (decode_clear_request, encode_clear_request(UUID)),
    "header": (read_stamp, slot_header()),
}
each_page = pytest.mark.parametrize("what", DECODERS)


@each_page
@given(page=st.binary(max_size=2 * PAGE_BYTES) | pages)
def test_random_bytes_are_refused(what: str, page: bytes) -> None:
    decode, _ = DECODERS[what]
    with pytest.raises(SlabFormatError):
        decode(page)


@each_page
@given(at=st.integers(0, PAGE_BYTES * 8 - 1))
def test_every_flipped_bit_is_found(what: str, at: int) -> None:
    decode, page = DECODERS[what]
    damaged = bytearray(page)
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(SlabFormatError):
        decode(bytes(damaged))


@each_page
@given(length=st.integers(0, PAGE_BYTES - 1), surplus=st.integers(1, 64))
def test_a_page_of_another_length_is_refused(what: str, length: int, surplus: int) -> None:
    decode, page = DECODERS[what]
    for wrong in (page[:length], page + bytes(surplus)):
        with pytest.raises(SlabFormatError):
            decode(wrong)


@each_page
@given(data=st.data())
def test_a_page_with_a_checksum_that_fits_is_read_or_refused(
    what: str, data: st.DataObject
) -> None:
    """With any content behind the magic number, only the declared exception is raised."""
    decode, page = DECODERS[what]
    start = data.draw(st.integers(0, 360), label="start")
    content = data.draw(st.binary(min_size=1, max_size=64), label="content")
    damaged = closed(page[:start] + content + page[start + len(content) :])
    assert is_intact(damaged)
    with suppress(SlabFormatError):
        decode(damaged)


@given(page=pages, slot=numbers)
def test_noise_with_a_checksum_that_fits_is_no_block(page: bytes, slot: int) -> None:
    assert found_in(closed(page), slot, UUID) is None


@given(at=st.integers(0, seal.SEAL_BYTES - 1), value=st.integers(1, 255))
def test_a_seal_in_a_page_that_fits_is_checked_by_itself(at: int, value: int) -> None:
    damaged = bytearray(slot_header())
    damaged[at] ^= value
    page = closed(bytes(damaged))
    assert read_stamp(page) == SlotStamp(UUID, 3, 7)
    with pytest.raises(seal.SealError):
        seal.read(page)
    assert found_in(page, 3, UUID) is None


@given(
    text=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    length=st.none() | st.integers(0, 2**32 - 1),
)
def test_a_holder_that_says_anything_is_read_or_refused(text: bytes, length: int | None) -> None:
    text = text[:4000]
    size = len(text) if length is None else length
    page = closed((struct.pack("<8sI", b"KVTHOLD\0", size) + text).ljust(PAGE_BYTES, b"\0"))
    try:
        holder = Holder.decode(page)
    except SlabFormatError:
        return
    assert isinstance(holder.engine_id, str)
    assert isinstance(holder.host, str)
    assert type(holder.pid) is type(holder.since_ns) is int


@pytest.mark.parametrize("text", [b"[" * 4000, b'["a",1,"h",' + b"9" * 3900 + b"]", b"{" * 4000])
def test_a_holder_cannot_be_made_expensive(text: bytes) -> None:
    page = closed((struct.pack("<8sI", b"KVTHOLD\0", len(text)) + text).ljust(PAGE_BYTES, b"\0"))
    with suppress(SlabFormatError):
        Holder.decode(page)


# --- a file whose pages say what cannot be -----------------------------------------------------

ABSURD = [
    pytest.param(Superblock(UUID, Geometry(8192, 2**40)), id="slots"),
    pytest.param(Superblock(UUID, Geometry(2**40, 2**40)), id="slots and payload"),
    pytest.param(Superblock(UUID, Geometry(2**40, 1)), id="payload"),
    pytest.param(Superblock(UUID, Geometry(8192, 10_000_000)), id="more than the file"),
    pytest.param(Superblock(UUID, Geometry(8192, 32), clock=2**64 - 1), id="clock"),
    pytest.param(Superblock(UUID, Geometry(8192, 32), cut=2**64 - 1), id="cut"),
    pytest.param(Superblock(UUID, Geometry(8192, 32), revision=2**64 - 1), id="revision"),
]


@pytest.mark.parametrize("superblock", ABSURD)
@pytest.mark.parametrize("max_bytes", [None, "1MiB"])
def test_an_absurd_superblock_is_refused_or_replaced(
    tmp_path: Path, superblock: Superblock, max_bytes: str | None
) -> None:
    """The checksum is valid, but the content would take terabytes of memory, or impossible numbers.
    Nothing is allocated for it: the tier is refused, or starts empty and works."""
    path = tmp_path / "kv.slab"
    with disk_harness(path, max_bytes="1MiB") as harness:
        harness.wait_for(harness.store(harness.keys(4)))
    with path.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            os.pwrite(file.fileno(), superblock.encode(), offset)
    try:
        harness = disk_harness(path, max_bytes=max_bytes)
    except SlabRefused:
        return
    with harness:
        harness.wait_for(harness.load(harness.keys(4)))  # and what it brings was checked
        (report,) = harness.wait_for(harness.store(harness.keys(4, start=50)))
        assert report.result.success
        (report,) = harness.wait_for(harness.load(harness.keys(4, start=50)))
        assert report.result.success
    assert path.stat().st_size <= 1 << 20


@pytest.mark.parametrize("digits", [20, 30, 400])
def test_a_holder_of_an_absurd_time_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: int
) -> None:
    monkeypatch.setattr(ownership, "_LOCK_PATIENCE_S", 0.0)
    path = tmp_path / "kv.slab"
    page = Holder('an "engine"\n', 4711, "host", 10**digits).encode()
    with disk_harness(path), path.open("r+b") as file:
        os.pwrite(file.fileno(), page, HOLDER_OFFSET)
        os.fsync(file.fileno())
        with pytest.raises(SlabRefused, match="in use by"):
            disk_harness(path)


# --- where things lie --------------------------------------------------------------------------


@given(payload_pages=st.integers(1, 4096), num_slots=st.integers(1, 10**7))
def test_nothing_overlaps(payload_pages: int, num_slots: int) -> None:
    geometry = Geometry(payload_pages * PAGE_BYTES, num_slots)
    assert max(SUPERBLOCK_OFFSETS) < HOLDER_OFFSET < CONTROL_OFFSET < SLOTS_OFFSET
    assert geometry.slot_offset(0) == SLOTS_OFFSET
    assert geometry.slot_offset(num_slots) == geometry.index_offset
    assert geometry.file_bytes % PAGE_BYTES == 0
    assert geometry.num_index_pages * 63 >= num_slots
    assert geometry.file_bytes <= geometry.needed_bytes


@given(max_bytes=st.integers(0, 2**45), payload_pages=st.integers(1, 4096))
def test_as_many_slots_as_fit(max_bytes: int, payload_pages: int) -> None:
    payload_bytes = payload_pages * PAGE_BYTES
    geometry = Geometry.within(max_bytes, payload_bytes)
    if geometry.num_slots:
        assert geometry.needed_bytes <= max_bytes
    assert Geometry(payload_bytes, geometry.num_slots + 1).needed_bytes > max_bytes


@given(payload_pages=st.integers(1, 4096), num_slots=st.integers(1, 10**7))
def test_what_it_needs_is_enough_for_it(payload_pages: int, num_slots: int) -> None:
    geometry = Geometry(payload_pages * PAGE_BYTES, num_slots)
    assert Geometry.within(geometry.needed_bytes, geometry.payload_bytes) == geometry


def test_a_description_is_read_from_the_header_page() -> None:
    page = bytearray(PAGE_BYTES)
    stamp = encode_stamp(UUID, 3, 4)
    for description in (b"x", bytes(range(256)) * 14, bytes(MOST_DESCRIPTION_BYTES)):
        write_slot_header(page, bytes(seal.SEAL_BYTES), stamp, description)
        assert is_intact(page)
        assert has_stamp(page, stamp)
        assert read_description(page) == description
    # None, or too long; and pages of earlier releases have zeros there.
    for absent in (None, b"", bytes(MOST_DESCRIPTION_BYTES + 1)):
        write_slot_header(page, bytes(seal.SEAL_BYTES), stamp, absent)
        assert is_intact(page)
        assert read_description(page) is None
