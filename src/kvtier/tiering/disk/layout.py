"""The slab file's format: where everything lies, and the pages that describe it.

    page 0, 1   superblock, two copies
    page 2      who has the file open, and a note for the next one to open it
    page 3      a request to forget everything, written by `kvtier store clear`
    then        equal slots: a header page, and the payload
    at the end  the index: a table with one entry per slot

Every page that is not payload ends with a checksum of itself. The slot is the truth about what is
in it; the index is a hint that saves reading all headers at the start. All functions are pure, and
trust nothing they decode: the one exception they raise is `SlabFormatError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvtier import seal
from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES, Buffer, close_page, is_intact

__all__ = [
    "CONTROL_OFFSET",
    "HOLDER_OFFSET",
    "SLOTS_OFFSET",
    "SUPERBLOCK_OFFSETS",
    "Geometry",
    "Holder",
    "SlabFormatError",
    "SlabVersionError",
    "SlotStamp",
    "Superblock",
    "decode_clear_request",
    "decode_note",
    "encode_clear_request",
    "encode_stamp",
    "has_stamp",
    "is_slab_page",
    "read_stamp",
    "write_slot_header",
]

SUPERBLOCK_OFFSETS = (0, PAGE_BYTES)
HOLDER_OFFSET = 2 * PAGE_BYTES
CONTROL_OFFSET = 3 * PAGE_BYTES
SLOTS_OFFSET = 4 * PAGE_BYTES

ENTRIES_PER_PAGE = 63
"""Entries of the index in one of its pages; see `kvtier.tiering.disk.index`."""

# A file system keeps its own record of where a file's bytes are, and `du` counts it. ext4: 340
# extents in a page, and at worst two extents per slot, one that was written and one that was not.
_EXTENT_BYTES_PER_SLOT = 32
_EXTENT_BYTES = 2 * PAGE_BYTES

_SLAB_MAGIC = b"KVTSLAB\x00"
_HOLDER_MAGIC = b"KVTHOLD\x00"
_CLEAR_MAGIC = b"KVTCLEAR"
_VERSION = 1

# magic, version, uuid, payload bytes, slots, clock, cut, revision, created, last clear, max_bytes
_SUPERBLOCK = struct.Struct("<8sHxxxxxx16sQQQQQQ16sQ")
_CLEAR = struct.Struct("<8s16s")
_TEXT = struct.Struct("<8sI")
_STAMP = struct.Struct("<16sQQ")
# At the end of the holder's page, which a holder with a long name may need all of.
_NOTE = struct.Struct("<4sI")
_NOTE_MAGIC = b"NOTE"
_MOST_NOTE = 1024
_NOTE_AT = BODY_BYTES - _NOTE.size - _MOST_NOTE
STAMP_AT = seal.SEAL_BYTES
_STAMP_END = STAMP_AT + _STAMP.size
_PADDING = bytes(BODY_BYTES - _STAMP_END)
_MOST_NAME = 128  # letters of a name, which may take 12 bytes each in JSON
_MOST_NUMBER = 2**63
_MOST_SLOTS = 2**40
_MOST_PAYLOAD = 2**40


class SlabFormatError(Exception):
    """What was read is not what should stand there."""


class SlabVersionError(SlabFormatError):
    """A slab that another version of kvtier has made."""


# --- pages -------------------------------------------------------------------------------------


def _page_of(body: bytes) -> bytes:
    page = bytearray(PAGE_BYTES)
    page[: len(body)] = body
    close_page(page)
    return bytes(page)


def _require_intact(page: Buffer, magic: bytes, what: str) -> None:
    if not is_intact(page) or page[: len(magic)] != magic:
        raise SlabFormatError(f"there is no {what}, or it is damaged")


# --- where things lie --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and places, which all follow from the size and the number of blocks."""

    payload_bytes: int
    """Of one block: whole pages."""
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        return PAGE_BYTES + self.payload_bytes

    @property
    def index_offset(self) -> int:
        return SLOTS_OFFSET + self.num_slots * self.slot_bytes

    @property
    def num_index_pages(self) -> int:
        return -(-self.num_slots // ENTRIES_PER_PAGE)

    @property
    def file_bytes(self) -> int:
        return self.index_offset + self.num_index_pages * PAGE_BYTES

    @property
    def needed_bytes(self) -> int:
        """The most that the file will ever take, with what the file system adds to it."""
        return self.needed_with(0)

    def needed_with(self, extent_bytes: int) -> int:
        """The same, if the file system needs so much for the file when nothing is written yet."""
        extent_bytes = max(extent_bytes, _EXTENT_BYTES)
        return self.file_bytes + extent_bytes + _EXTENT_BYTES_PER_SLOT * self.num_slots

    def slot_offset(self, slot: int) -> int:
        return SLOTS_OFFSET + slot * self.slot_bytes

    @classmethod
    def within(cls, max_bytes: int, payload_bytes: int) -> Geometry:
        """The most slots that fit; there may be none."""
        one = cls(payload_bytes, 1)
        num_slots = max(0, (max_bytes - SLOTS_OFFSET) // one.slot_bytes)
        geometry = cls(payload_bytes, num_slots)
        while geometry.num_slots and geometry.needed_bytes > max_bytes:
            excess = geometry.needed_bytes - max_bytes
            num_slots = max(0, num_slots - max(1, excess // one.needed_bytes))
            geometry = cls(payload_bytes, num_slots)
        return geometry


# --- what describes the file -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Superblock:
    """What holds for the whole file."""

    uuid: bytes
    """Of this file; new when it is formatted."""
    geometry: Geometry
    clock: int = 0
    """A number that sequence numbers have passed, or will soon: see `Slab.first_seq`."""
    cut: int = 0
    """Blocks with a smaller sequence number are gone for good, whatever slots and index say."""
    revision: int = 0
    """Of two intact copies, the one with the larger number holds."""
    created_ns: int = 0
    last_clear: bytes = bytes(16)
    """The last request to clear that was obeyed."""
    max_bytes: int = 0
    """What the file was given its size for. 0: not known."""

    def encode(self) -> bytes:
        return _page_of(
            _SUPERBLOCK.pack(
                _SLAB_MAGIC,
                _VERSION,
                self.uuid,
                self.geometry.payload_bytes,
                self.geometry.num_slots,
                self.clock,
                self.cut,
                self.revision,
                self.created_ns,
                self.last_clear,
                self.max_bytes,
            )
        )

    @classmethod
    def decode(cls, page: Buffer) -> Superblock:
        """Raises `SlabFormatError`."""
        _require_intact(page, _SLAB_MAGIC, "superblock")
        fields = _SUPERBLOCK.unpack_from(page)
        _, version, uuid, payload_bytes, num_slots, clock, cut, revision, created = fields[:9]
        last_clear, max_bytes = fields[9:]
        if version != _VERSION:
            raise SlabVersionError(f"a slab of version {version}; this kvtier reads {_VERSION}")
        is_whole = payload_bytes % PAGE_BYTES == 0
        if (
            not is_whole
            or not 0 < payload_bytes <= _MOST_PAYLOAD
            or not 0 < num_slots <= _MOST_SLOTS
        ):
            raise SlabFormatError(f"{num_slots} slots for {payload_bytes} bytes are impossible")
        if max(clock, cut, revision) >= _MOST_NUMBER:
            raise SlabFormatError("its numbers cannot grow any more")
        geometry = Geometry(payload_bytes, num_slots)
        return cls(uuid, geometry, clock, cut, revision, created, last_clear, max_bytes)


def is_slab_page(page: Buffer) -> bool:
    """Whether a page was a superblock once: damaged or of another version, but ours."""
    return bytes(page[: len(_SLAB_MAGIC)]) == _SLAB_MAGIC


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a slab open, for whoever is refused to be told."""

    engine_id: str
    pid: int
    host: str
    since_ns: int
    parent_pid: int = 0
    """The process that started it, as it was when the slab was opened; 0: not known. An engine
    whose server was killed has another parent afterwards."""
    pid_namespace: int = 0
    """Inode of the namespace that `pid` is a number in; 0: not known. Containers have one each,
    and may share a host name."""
    started_ticks: int = 0
    """Clock ticks from boot to the start of the process; 0: not known. A later process that is
    given the same `pid` has another."""

    def encode(self, note: bytes = b"") -> bytes:
        """The page. `note`: see `decode_note`; left out where there is no room for it."""
        fields = [
            self.engine_id[:_MOST_NAME],
            self.pid,
            self.host[:_MOST_NAME],
            self.since_ns,
            self.parent_pid,
            self.pid_namespace,
            self.started_ticks,
        ]
        text = json.dumps(fields).encode()
        body = _TEXT.pack(_HOLDER_MAGIC, len(text)) + text
        if note and len(note) <= _MOST_NOTE and len(body) <= _NOTE_AT:
            body = body.ljust(_NOTE_AT, b"\0") + _NOTE.pack(_NOTE_MAGIC, len(note)) + note
        return _page_of(body)

    @classmethod
    def decode(cls, page: Buffer) -> Holder:
        """Raises `SlabFormatError`."""
        _require_intact(page, _HOLDER_MAGIC, "record of a holder")
        _, length = _TEXT.unpack_from(page)
        text = bytes(page[_TEXT.size : BODY_BYTES])[:length]
        try:
            # Earlier releases wrote the first four or five of these.
            engine_id, pid, host, since_ns, *rest = [*json.loads(text), 0, 0, 0][:7]
            parent_pid, pid_namespace, started_ticks = rest
        except (ValueError, TypeError, RecursionError):
            raise SlabFormatError("the record of a holder makes no sense") from None
        fields_fit = (
            isinstance(engine_id, str)
            and isinstance(host, str)
            and all(
                type(number) is int and 0 <= number < _MOST_NUMBER
                for number in (pid, since_ns, parent_pid, pid_namespace, started_ticks)
            )
        )
        if not fields_fit:
            raise SlabFormatError("the record of a holder makes no sense")
        return cls(engine_id, pid, host, since_ns, parent_pid, pid_namespace, started_ticks)


def decode_note(page: Buffer) -> bytes:
    """What the orchestrator has learnt of this slab, in the holder's page; b"": nothing."""
    if not is_intact(page) or page[: len(_HOLDER_MAGIC)] != _HOLDER_MAGIC:
        return b""
    magic, length = _NOTE.unpack_from(page, _NOTE_AT)
    start = _NOTE_AT + _NOTE.size
    return bytes(page[start : start + min(length, _MOST_NOTE)]) if magic == _NOTE_MAGIC else b""


def encode_clear_request(request_id: bytes) -> bytes:
    """The control page that asks the engine to forget everything."""
    return _page_of(_CLEAR.pack(_CLEAR_MAGIC, request_id))


def decode_clear_request(page: Buffer) -> bytes:
    """The id of the request, 16 bytes. Raises `SlabFormatError` if there is none."""
    _require_intact(page, _CLEAR_MAGIC, "request to clear")
    request_id: bytes = _CLEAR.unpack_from(page)[1]
    return request_id


# --- the header of a slot ----------------------------------------------------------------------


class SlotStamp(NamedTuple):
    """Where and when a slot was written. Beside the seal, which says what is in it."""

    uuid: bytes
    slot: int
    seq: int


def encode_stamp(uuid: bytes, slot: int, seq: int) -> bytes:
    """The stamp as it stands in the header page, from `STAMP_AT` on."""
    return _STAMP.pack(uuid, slot, seq)


def write_slot_header(page: bytearray | memoryview, block_seal: bytes, stamp: bytes) -> None:
    """Fill the header page of a slot. What the page held before does not matter."""
    page[:BODY_BYTES] = block_seal + stamp + _PADDING
    close_page(page)


def has_stamp(page: Buffer, stamp: bytes) -> bool:
    """Whether the header page of a slot says this."""
    return page[STAMP_AT:_STAMP_END] == stamp


def read_stamp(page: Buffer) -> SlotStamp:
    """The stamp in the header page of a slot. Raises `SlabFormatError`."""
    if not is_intact(page):
        raise SlabFormatError("the header of a slot is damaged, or there is none")
    return SlotStamp._make(_STAMP.unpack_from(page, STAMP_AT))
