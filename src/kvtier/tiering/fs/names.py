"""Where things lie in the root directory of the fs tier. No name in it comes from outside.

ledger                        what the blocks take, and who may write how much: see `ledger`
engines/<engine>.alive        locked by an engine for as long as it lives
engines/<engine>/             its seat: see `seat`
blocks/<fingerprint>/<00 to ff>/<key>       the blocks
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtier.base import OffloadKey

__all__ = [
    "LONGEST_KEY",
    "SHARDS",
    "block_name",
    "block_path",
    "is_engine_name",
    "is_namespace_name",
    "key_at",
    "key_of",
    "namespace_path",
]

SHARDS = tuple(f"{number:02x}" for number in range(256))
LONGEST_KEY = 128
"""Longer keys do not fit into a seal."""
_LONGEST_AS_HEX = 120
_LONG_MARK = "_"  # no hex digit
_HEX_16 = re.compile("[0-9a-f]{32}")


def namespace_path(blocks: Path, fingerprint: bytes) -> Path:
    """The directory of a namespace's blocks, in the root's or a seat's `blocks`."""
    return blocks / fingerprint.hex()


def block_path(namespace: str, key: OffloadKey) -> str:
    """The file of a block in the directory of its namespace."""
    return f"{namespace}/{SHARDS[xxh3_64_intdigest(key) % len(SHARDS)]}/{block_name(key)}"


def block_name(key: OffloadKey) -> str:
    if 0 < len(key) <= _LONGEST_AS_HEX:
        return key.hex()
    # File names end at 255 letters, and have one at least.
    return _LONG_MARK + base64.urlsafe_b64encode(key).decode()


def key_of(name: str) -> OffloadKey | None:
    """The key of the block in a file of this name; None: no file of ours."""
    try:
        if name.startswith(_LONG_MARK):
            key = OffloadKey(base64.b64decode(name[1:], altchars=b"-_", validate=True))
        else:
            key = OffloadKey(bytes.fromhex(name))
    except (ValueError, binascii.Error):
        return None
    return key if block_name(key) == name else None


def key_at(shard: str, name: str) -> OffloadKey | None:
    """The key of the block in a file of this name, in this directory; None: no file of ours, for
    no engine looks for it there."""
    key = key_of(name)
    if key is None or SHARDS[xxh3_64_intdigest(key) % len(SHARDS)] != shard:
        return None
    return key


def is_namespace_name(name: str) -> bool:
    return _HEX_16.fullmatch(name) is not None


def is_engine_name(name: str) -> bool:
    return _HEX_16.fullmatch(name) is not None
