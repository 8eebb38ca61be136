"""One block in one file: a header page with its seal, then its payload."""

from __future__ import annotations

from kvtier import seal
from kvtier.base import OffloadKey
from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES, close_page, is_intact

__all__ = ["block_file_bytes", "check_block", "write_header"]

_PADDING = bytes(BODY_BYTES - seal.SEAL_BYTES)


def block_file_bytes(payload_bytes: int) -> int:
    """The length of a block's file."""
    return PAGE_BYTES + payload_bytes


def write_header(page: memoryview, block_seal: bytes) -> None:
    """Fill the header page of a block. What the page held before does not matter."""
    page[:BODY_BYTES] = block_seal + _PADDING
    close_page(page)


def check_block(
    page: memoryview, payload: memoryview, key: OffloadKey, fingerprint: bytes
) -> seal.SealFailure | None:
    """Why this is not the block of `key` under `fingerprint`; None if it is."""
    failure = seal.check(page, payload, key, fingerprint)
    if failure is None and not is_intact(page):
        return seal.SealFailure.HEADER
    return failure
