"""The seal: a header that identifies a block outside host memory and proves that it is intact.

A seal is `SEAL_BYTES` bytes in front of a block's payload, or beside it. It names the block and
holds a digest of the payload and a checksum of itself. The reader calls `check` with the expected
key and fingerprint. `check` refuses any other block and any damaged block, and returns the reason.
With keys (`kvtier.seal.keys`), a seal also has a signature, and `check` refuses forged blocks.

Seals are made and checked on a tier's I/O threads, never on the scheduler's, because the digest
reads every byte. The functions share no state, so any thread may call them.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtier.seal.keys import SIGNATURE_BYTES

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.seal.keys import SealKeys

    Buffer: TypeAlias = bytes | bytearray | memoryview

__all__ = ["SEAL_BYTES", "Seal", "SealError", "SealFailure", "check", "make", "read"]

SEAL_BYTES = 256
"""Length of every seal. It is part of the stored format, like the constants below."""

_MAGIC = b"KVTSEAL\x00"
_VERSION, _SIGNED_VERSION = 1, 2
"""Seals without and with a signature. Releases that know only the first leave the second alone."""
_MAX_KEY_BYTES = 128
_MAX_WRITER_BYTES = 32

# magic, version, key length, writer length, payload length, time, fingerprint, digest, writer, key
_FIELDS = struct.Struct("<8sHHHxxQQ16s16s32s128s")
_CHECKSUM = struct.Struct("<Q")
_FINGERPRINT_BYTES = 16
_UNSIGNED = bytes(SIGNATURE_BYTES)
"""Stands in the place of a signature. Fields, checksum and signature fill a seal."""


class SealFailure(StrEnum):
    """Why a block was refused. `check` finds all but `STALE`, and looks for them in this order."""

    NOT_SEALED = "not_sealed"
    """There is no seal here: nothing was written, or something that is not a sealed block."""
    FORMAT = "format"
    """A seal of another version."""
    HEADER = "header"
    """The seal itself is damaged."""
    FINGERPRINT = "fingerprint"
    """A block of another model, layout or epoch."""
    KEY = "key"
    """The seal of another block: its key is not the one that was asked for."""
    LENGTH = "length"
    """The payload is longer or shorter than the payload that was sealed."""
    DIGEST = "digest"
    """The payload differs from the payload that was sealed."""
    UNSIGNED = "unsigned"
    """There are keys, and the seal has no signature, or one of another key."""
    FORGED = "forged"
    """The signature is not that of this block."""
    STALE = "stale"
    """The right block, but older than the one last stored in this place. Found by the disk tier."""


class SealError(Exception):
    """A block that must not be used."""

    def __init__(self, failure: SealFailure) -> None:
        super().__init__(f"the block was refused: {failure}")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of a seal."""

    fingerprint: bytes
    """The result of `OffloadingConfig.fingerprint` in the engine that wrote the block."""
    key: OffloadKey
    payload_bytes: int
    digest: bytes
    writer: str
    """The id of the engine that wrote the block, cut to 32 bytes."""
    time_ns: int
    """When the seal was made, in nanoseconds since 1970."""


def make(
    key: OffloadKey,
    payload: Buffer,
    fingerprint: bytes,
    writer: str,
    keys: SealKeys | None = None,
) -> bytes:
    """Return the seal of a block. `payload` is contiguous. With `keys`, the seal is signed.

    Raises `ValueError` for a key or fingerprint that does not fit the format.
    """
    if len(key) > _MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: at most {_MAX_KEY_BYTES} fit into a seal")
    if len(fingerprint) != _FINGERPRINT_BYTES:
        raise ValueError(
            f"a fingerprint of {len(fingerprint)} bytes: give the {_FINGERPRINT_BYTES} bytes that "
            "OffloadingConfig.fingerprint() returns"
        )
    name = writer.encode("utf-8", "replace")[:_MAX_WRITER_BYTES]
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION if keys is None else _SIGNED_VERSION,
        len(key),
        len(name),
        memoryview(payload).nbytes,
        time.time_ns(),
        fingerprint,
        xxh3_128_digest(payload),
        name,
        key,
    )
    signature = _UNSIGNED if keys is None else keys.sign(fields, payload)
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields)) + signature


def read(header: bytes | bytearray | memoryview) -> Seal:
    """Return the content of a seal, or raise `SealError`. Checks the seal, not the payload."""
    _, _, key_len, name_len, size, when, fingerprint, digest, name, key = _fields_of(header)
    return Seal(
        fingerprint=fingerprint,
        key=key[:key_len],
        payload_bytes=size,
        digest=digest,
        writer=name[:name_len].decode("utf-8", "replace"),
        time_ns=when,
    )


def check(
    header: bytes | bytearray | memoryview,
    payload: Buffer,
    key: OffloadKey,
    fingerprint: bytes,
    keys: SealKeys | None = None,
) -> SealFailure | None:
    """Return why `payload` is not the block of `key` under `fingerprint`; None if it is. Without
    `keys`, signatures are not looked at."""
    try:
        _, _, key_len, _, size, _, sealed_for, digest, _, sealed_key = _fields_of(header)
    except SealError as error:
        return error.failure
    if sealed_for != fingerprint:
        return SealFailure.FINGERPRINT
    if sealed_key[:key_len] != key:
        return SealFailure.KEY
    if size != memoryview(payload).nbytes:
        return SealFailure.LENGTH
    if digest != xxh3_128_digest(payload):
        return SealFailure.DIGEST
    return None if keys is None else _failure_of_signature(header, payload, keys)


def _failure_of_signature(
    header: bytes | bytearray | memoryview, payload: Buffer, keys: SealKeys
) -> SealFailure | None:
    fields = bytes(header[: _FIELDS.size])
    signature = bytes(header[_FIELDS.size + _CHECKSUM.size : SEAL_BYTES])
    if not keys.knows(signature):
        return SealFailure.UNSIGNED
    return None if keys.is_genuine(signature, fields, payload) else SealFailure.FORGED


def _fields_of(header: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    """Return the fields in packed order, or raise `SealError`."""
    if len(header) < SEAL_BYTES:
        raise SealError(SealFailure.NOT_SEALED)
    header = bytes(header[:SEAL_BYTES])
    packed = header[: _FIELDS.size]
    fields = _FIELDS.unpack(packed)
    magic, version, key_len, name_len = fields[:4]
    if magic != _MAGIC:
        raise SealError(SealFailure.NOT_SEALED)
    if version not in (_VERSION, _SIGNED_VERSION):
        raise SealError(SealFailure.FORMAT)
    checksum = header[_FIELDS.size : -SIGNATURE_BYTES]
    if checksum != _CHECKSUM.pack(xxh3_64_intdigest(packed)):
        raise SealError(SealFailure.HEADER)
    if version == _VERSION and header[-SIGNATURE_BYTES:] != _UNSIGNED:
        raise SealError(SealFailure.HEADER)
    if key_len > _MAX_KEY_BYTES or name_len > _MAX_WRITER_BYTES:
        raise SealError(SealFailure.HEADER)
    return fields
