"""The slab file's format: offsets, and the encoding of every page except the index.

    page 0, 1   superblock, two copies; behind its fields, what the namespaces are made of
    page 2      the holder (the process that has the file open), and a note for the next one
    page 3      a request to clear the slab, written by `kvtier store clear`
    then        equal slots: a header page, then the payload
    at the end  the index: a table with one entry per slot

Every page that is not payload ends with a checksum of itself. A slot's header decides which block
the slot holds; the index is a hint that saves reading all headers when an engine starts. Nothing
here does I/O. Decoding validates everything, and raises only `SlabFormatError`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier import seal
from kvtier.config.namespace import DESCRIPTION_BYTES, NamespaceDescription
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
    "read_description",
    "read_owner",
    "read_stamp",
    "write_slot_header",
]

SUPERBLOCK_OFFSETS = (0, PAGE_BYTES)
HOLDER_OFFSET = 2 * PAGE_BYTES
CONTROL_OFFSET = 3 * PAGE_BYTES
SLOTS_OFFSET = 4 * PAGE_BYTES

OWNER_BYTES = 6
"""Bytes of the tag of a tenant, `kvtier.cpu.policies.tenants.tenant_tag`."""

ENTRIES_PER_PAGE = 63
"""Entries in one page of the index; see `kvtier.tiering.disk.index`."""

# `du` also counts the pages in which the file system records a file's extents. ext4 fits 340
# extents into a page, and needs at most two for each slot: a written and an unwritten one.
_EXTENT_BYTES_PER_SLOT = 32
_EXTENT_BYTES = 2 * PAGE_BYTES

_SLAB_MAGIC = b"KVTSLAB\x00"
_HOLDER_MAGIC = b"KVTHOLD\x00"
_CLEAR_MAGIC = b"KVTCLEAR"
_VERSION = 1

# magic, version, uuid, payload bytes, slots, clock, cut, revision, created, last clear, max_bytes
_SUPERBLOCK = struct.Struct("<8sHxxxxxx16sQQQQQQ16sQ")
# What namespaces are made of, behind the superblock's fields, where earlier releases wrote zeros
# and read nothing. Compressed, because namespaces in one slab often differ in a few words.
_MADE_OF = struct.Struct("<4sI")
_MADE_OF_MAGIC = b"MADE"
_MADE_OF_AT = 256
_MOST_PACKED = BODY_BYTES - _MADE_OF_AT - _MADE_OF.size
_MOST_NAMESPACES = 64
_CLEAR = struct.Struct("<8s16s")
_TEXT = struct.Struct("<8sI")
_STAMP = struct.Struct("<16sQQ")
# The note is at the end of the holder's page. It is left out if the holder's record is too long.
_NOTE = struct.Struct("<4sI")
_NOTE_MAGIC = b"NOTE"
_MOST_NOTE = 1024
_NOTE_AT = BODY_BYTES - _NOTE.size - _MOST_NOTE
STAMP_AT = seal.SEAL_BYTES
_STAMP_END = STAMP_AT + _STAMP.size
_PADDING = bytes(BODY_BYTES - _STAMP_END)
# The description of the block follows the stamp. Earlier releases have zeros there, and do not read
# it: both directions of an upgrade keep all blocks.
_DESCRIPTION = struct.Struct("<4sI")
_DESCRIPTION_MAGIC = b"DESC"
_DESCRIPTION_AT = _STAMP_END + _DESCRIPTION.size
_ZEROS = memoryview(bytes(BODY_BYTES))
MOST_DESCRIPTION_BYTES = BODY_BYTES - _DESCRIPTION_AT
# The tenant that is charged for the block is at the end. Earlier releases have zeros or the end of
# a description there, and do not read it.
_OWNER = struct.Struct(f"<4s{OWNER_BYTES}s")
_OWNER_MAGIC = b"OWNR"
_OWNER_AT = BODY_BYTES - _OWNER.size
_MOST_NAME = 128  # characters; one takes up to 12 bytes in JSON
_MOST_NUMBER = 2**63
_MOST_SLOTS = 2**40
_MOST_PAYLOAD = 2**40


class SlabFormatError(Exception):
    """A page is missing, damaged or inconsistent."""


class SlabVersionError(SlabFormatError):
    """The slab has the format of another version of kvtier."""


# --- pages -------------------------------------------------------------------------------------


def _page_of(body: bytes) -> bytes:
    page = bytearray(PAGE_BYTES)
    page[: len(body)] = body
    close_page(page)
    return bytes(page)


def _require_intact(page: Buffer, magic: bytes, what: str) -> None:
    if not is_intact(page) or page[: len(magic)] != magic:
        raise SlabFormatError(f"there is no {what}, or it is damaged")


# --- geometry ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and offsets in the file. All follow from the size of a block and the number of
    slots."""

    payload_bytes: int
    """Bytes of one block, a multiple of `PAGE_BYTES`."""
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
        """Upper limit of the file's disk usage in bytes, including the file system's records of its
        extents."""
        return self.needed_with(0)

    def needed_with(self, extent_bytes: int) -> int:
        """Like `needed_bytes`, if the file system's records of the newly allocated file take
        `extent_bytes`."""
        extent_bytes = max(extent_bytes, _EXTENT_BYTES)
        return self.file_bytes + extent_bytes + _EXTENT_BYTES_PER_SLOT * self.num_slots

    def slot_offset(self, slot: int) -> int:
        return SLOTS_OFFSET + slot * self.slot_bytes

    @classmethod
    def within(cls, max_bytes: int, payload_bytes: int) -> Geometry:
        """The geometry with the most slots whose `needed_bytes` fit into `max_bytes`; it may have
        no slots."""
        one = cls(payload_bytes, 1)
        num_slots = max(0, (max_bytes - SLOTS_OFFSET) // one.slot_bytes)
        geometry = cls(payload_bytes, num_slots)
        while geometry.num_slots and geometry.needed_bytes > max_bytes:
            excess = geometry.needed_bytes - max_bytes
            num_slots = max(0, num_slots - max(1, excess // one.needed_bytes))
            geometry = cls(payload_bytes, num_slots)
        return geometry


# --- superblock, holder, note, clear request ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Superblock:
    """Describes the whole file."""

    uuid: bytes
    """Identifies the slab. Formatting the slab changes its uuid."""
    geometry: Geometry
    clock: int = 0
    """The first sequence number of the engine that opened the slab last (`Slab.first_seq`). Stored
    blocks and their uses are numbered in sequence. While the engine runs, it raises the clock
    (`Slab.keep_clock`), so that the numbers of the next engine are larger than its own."""
    cut: int = 0
    """Blocks with a smaller sequence number are invalid, even if slot and index have them."""
    revision: int = 0
    """Of two intact copies, the one with the larger revision is valid."""
    created_ns: int = 0
    last_clear: bytes = bytes(16)
    """Id of the last clear request that was carried out."""
    max_bytes: int = 0
    """The `max_bytes` from which the size was computed. 0: unknown."""
    descriptions: tuple[NamespaceDescription, ...] = ()
    """What namespaces are made of. If they do not all fit into the page, the last ones are not
    written."""

    def encode(self) -> bytes:
        body = _SUPERBLOCK.pack(
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
        return _page_of(body.ljust(_MADE_OF_AT, b"\0") + _packed(self.descriptions))

    @classmethod
    def decode(cls, page: Buffer) -> Superblock:
        """Read the superblock from its page. Raises `SlabFormatError`."""
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
            raise SlabFormatError(f"it cannot have {num_slots} slots of {payload_bytes} bytes")
        if max(clock, cut, revision) >= _MOST_NUMBER:
            raise SlabFormatError("its clock, cut or revision is out of range")
        geometry = Geometry(payload_bytes, num_slots)
        return cls(
            *(uuid, geometry, clock, cut, revision, created, last_clear, max_bytes),
            descriptions=_unpacked(page),
        )


def _packed(descriptions: Sequence[NamespaceDescription]) -> bytes:
    """As many of the descriptions as fit, the first ones first."""
    lines = [description.encode() for description in descriptions[:_MOST_NAMESPACES]]
    while lines:
        packed = zlib.compress(b"\n".join(lines))
        if len(packed) <= _MOST_PACKED:
            return _MADE_OF.pack(_MADE_OF_MAGIC, len(packed)) + packed
        lines.pop()
    return b""


def _unpacked(page: Buffer) -> tuple[NamespaceDescription, ...]:
    """The descriptions in the page of a superblock. Leaves out what is none."""
    magic, length = _MADE_OF.unpack_from(page, _MADE_OF_AT)
    if magic != _MADE_OF_MAGIC or length > _MOST_PACKED:
        return ()
    start = _MADE_OF_AT + _MADE_OF.size
    most = _MOST_NAMESPACES * (DESCRIPTION_BYTES + 1)
    try:
        text = zlib.decompressobj().decompress(bytes(page[start : start + length]), most)
    except zlib.error:
        return ()
    found = map(NamespaceDescription.decode, text.split(b"\n")[:_MOST_NAMESPACES])
    return tuple(description for description in found if description is not None)


def is_slab_page(page: Buffer) -> bool:
    """True if the page begins as a superblock does. It may be damaged, or of another version."""
    return bytes(page[: len(_SLAB_MAGIC)]) == _SLAB_MAGIC


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that opened a slab last. While it has the slab open, an engine that is refused
    names it in the error message."""

    engine_id: str
    pid: int
    host: str
    since_ns: int
    parent_pid: int = 0
    """Pid of the parent process when the slab was opened; 0: unknown. If the parent was killed, the
    process has another parent now."""
    pid_namespace: int = 0
    """Inode of the pid namespace of `pid`; 0: unknown. Each container has its own, and containers
    may share a host name."""
    started_ticks: int = 0
    """Clock ticks from boot to the start of the process; 0: unknown. They distinguish the process
    from a later one with the same `pid`."""

    def encode(self, note: bytes = b"") -> bytes:
        """The holder's page. `note`: see `decode_note`; it is left out if it does not fit."""
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
        """Read the holder from its page. Raises `SlabFormatError`."""
        _require_intact(page, _HOLDER_MAGIC, "record of a holder")
        _, length = _TEXT.unpack_from(page)
        text = bytes(page[_TEXT.size : BODY_BYTES])[:length]
        try:
            # Earlier releases wrote only the first four or five fields.
            engine_id, pid, host, since_ns, *rest = [*json.loads(text), 0, 0, 0][:7]
            parent_pid, pid_namespace, started_ticks = rest
        except (ValueError, TypeError, RecursionError):
            raise SlabFormatError("the record of the holder is invalid") from None
        fields_fit = (
            isinstance(engine_id, str)
            and isinstance(host, str)
            and all(
                type(number) is int and 0 <= number < _MOST_NUMBER
                for number in (pid, since_ns, parent_pid, pid_namespace, started_ticks)
            )
        )
        if not fields_fit:
            raise SlabFormatError("the record of the holder is invalid")
        return cls(engine_id, pid, host, since_ns, parent_pid, pid_namespace, started_ticks)


def decode_note(page: Buffer) -> bytes:
    """Read the note for the next engine (`SecondaryTierManager.keep_note`) from the holder's page.
    Returns b"" if there is none."""
    if not is_intact(page) or page[: len(_HOLDER_MAGIC)] != _HOLDER_MAGIC:
        return b""
    magic, length = _NOTE.unpack_from(page, _NOTE_AT)
    start = _NOTE_AT + _NOTE.size
    return bytes(page[start : start + min(length, _MOST_NOTE)]) if magic == _NOTE_MAGIC else b""


def encode_clear_request(request_id: bytes) -> bytes:
    """The page at `CONTROL_OFFSET`, with a request to clear the slab."""
    return _page_of(_CLEAR.pack(_CLEAR_MAGIC, request_id))


def decode_clear_request(page: Buffer) -> bytes:
    """The id of the request, 16 bytes. Raises `SlabFormatError` if there is none."""
    _require_intact(page, _CLEAR_MAGIC, "request to clear")
    request_id: bytes = _CLEAR.unpack_from(page)[1]
    return request_id


# --- the header of a slot ----------------------------------------------------------------------


class SlotStamp(NamedTuple):
    """The part of a slot's header that names its slab, its slot, and the block's sequence number.
    It follows the seal, which identifies the block."""

    uuid: bytes
    slot: int
    seq: int


def encode_stamp(uuid: bytes, slot: int, seq: int) -> bytes:
    """The bytes of a stamp. In the header page they begin at `STAMP_AT`."""
    return _STAMP.pack(uuid, slot, seq)


def write_slot_header(
    page: bytearray | memoryview,
    block_seal: bytes,
    stamp: bytes,
    description: bytes | None = None,
    owner: int = 0,
) -> None:
    """Fill the header page of a slot, and overwrite all of its former content. A description that
    does not fit is left out. `owner`: tag of the tenant that is charged for the block; 0 for
    "default"."""
    most = MOST_DESCRIPTION_BYTES - (_OWNER.size if owner else 0)
    if description and len(description) <= most:
        length = _DESCRIPTION.pack(_DESCRIPTION_MAGIC, len(description))
        body = b"".join((block_seal, stamp, length, description))
        page[: len(body)] = body
        page[len(body) : BODY_BYTES] = _ZEROS[len(body) :]
    else:
        page[:BODY_BYTES] = block_seal + stamp + _PADDING
    if owner:
        tag = owner.to_bytes(OWNER_BYTES, "little")
        _OWNER.pack_into(page, _OWNER_AT, _OWNER_MAGIC, tag)
    close_page(page)


def read_owner(page: Buffer) -> int:
    """The tag of the tenant in the header page of a slot, which must be intact. 0: "default", or a
    header of an earlier release."""
    description = read_description(page)
    if description is not None and _DESCRIPTION_AT + len(description) > _OWNER_AT:
        return 0
    magic, tag = _OWNER.unpack_from(page, _OWNER_AT)
    return int.from_bytes(tag, "little") if magic == _OWNER_MAGIC else 0


def read_description(page: Buffer) -> bytes | None:
    """The description in the header page of a slot, which must be intact. None if it has none."""
    magic, length = _DESCRIPTION.unpack_from(page, _STAMP_END)
    if magic != _DESCRIPTION_MAGIC or length > MOST_DESCRIPTION_BYTES:
        return None
    return bytes(page[_DESCRIPTION_AT : _DESCRIPTION_AT + length])


def has_stamp(page: Buffer, stamp: bytes) -> bool:
    """True if the header page of a slot has this stamp."""
    return page[STAMP_AT:_STAMP_END] == stamp


def read_stamp(page: Buffer) -> SlotStamp:
    """The stamp in the header page of a slot. Raises `SlabFormatError`."""
    if not is_intact(page):
        raise SlabFormatError("the header of a slot is damaged, or there is none")
    return SlotStamp._make(_STAMP.unpack_from(page, STAMP_AT))
