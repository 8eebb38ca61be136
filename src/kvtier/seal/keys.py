"""Secret keys of a fleet. With them, seals prove that an engine of the fleet has made a block.

Without keys, a seal detects damage, but whoever may write to a tier can forge one. With keys, a
seal also has a message authentication code (MAC) of the block: GMAC with AES-256, whose key is
derived from the fleet's key and the seal's own fields. The fields name the block, its writer, the
time and a digest of the payload, so no two blocks use one derived key, and no nonce is needed.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvtier.config.errors import ConfigError, Problem, describe

if TYPE_CHECKING:
    Buffer: TypeAlias = bytes | bytearray | memoryview

__all__ = ["SIGNATURE_BYTES", "SealKeys", "read_keys"]

logger = logging.getLogger(__name__)

_ID_BYTES, _MAC_BYTES = 8, 16
SIGNATURE_BYTES = _ID_BYTES + _MAC_BYTES
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_LARGEST_FILE = 64 << 10
_ONE_MESSAGE = bytes(12)
"""The nonce. Each derived key is used for one block."""
_OPTION = "seal_key_file"
_MAKE_ONE = "openssl rand -hex 32"


class SealKeys:
    """The keys of one engine. Any thread."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """`keys`: 32 bytes each. The first signs; all of them are accepted. Raises `ImportError`
        without the library that computes the MAC."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._cipher, self._aes, self._gcm = Cipher, algorithms.AES, modes.GCM
        self._keys = {_id_of(key): key for key in keys}
        self._first = next(iter(self._keys))

    @classmethod
    def load(cls, path: Path) -> SealKeys:
        """Read a file of keys: one on each line, in 64 hexadecimal digits; the first one signs.
        Empty lines and lines that begin with # are ignored. Raises `ConfigError`."""
        keys = read_keys(path, _OPTION)
        try:
            found = cls(keys)
        except ImportError:
            raise _refusal(
                _OPTION,
                path,
                "a file of keys, with the Python package cryptography installed",
                "Install it: pip install 'kvtier[keyed]'",
            ) from None
        ids = ", ".join(name.hex() for name in found._keys)
        logger.info("%s: blocks are sealed with a key; keys accepted: %s", path, ids)
        return found

    def sign(self, fields: bytes, payload: Buffer) -> bytes:
        """The signature of a block. `fields`: the packed fields of its seal."""
        return self._first + self._mac(self._keys[self._first], fields, payload)

    def knows(self, signature: bytes) -> bool:
        """True if the signature was made with one of the keys, by what it says."""
        return signature[:_ID_BYTES] in self._keys

    def is_genuine(self, signature: bytes, fields: bytes, payload: Buffer) -> bool:
        """True if one of the keys has signed this block."""
        key = self._keys.get(signature[:_ID_BYTES])
        if key is None:
            return False
        return hmac.compare_digest(signature[_ID_BYTES:], self._mac(key, fields, payload))

    def _mac(self, key: bytes, fields: bytes, payload: Buffer) -> bytes:
        derived = hmac.digest(key, fields, "sha256")
        context = self._cipher(self._aes(derived), self._gcm(_ONE_MESSAGE)).encryptor()
        context.authenticate_additional_data(payload)
        context.finalize()
        return bytes(context.tag)


def _id_of(key: bytes) -> bytes:
    """Names a key in seals and log lines, without telling it."""
    return blake2b(key, digest_size=_ID_BYTES, person=b"kvtier").digest()


def read_keys(path: Path, option: str) -> list[bytes]:
    """Read the keys in a file: one on each line, in 64 hexadecimal digits. Empty lines and lines
    that begin with # are ignored. Raises `ConfigError`. `option`: the user's key with the path."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_LARGEST_FILE).decode("ascii", "replace")
    except OSError as error:
        raise _refusal(
            option,
            path,
            f"a file that this user can read ({error.strerror})",
            f"Make one: {_MAKE_ONE}",
        ) from None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(
            option,
            path,
            "a file that only its owner may write",
            "Make new keys, and chmod 600 the file",
        )
    if status.st_mode & stat.S_IROTH:
        logger.warning("%s: every user of this machine can read the keys: chmod 600 it", path)
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    wrong = next((n for n, line in enumerate(keys, start=1) if not _KEY.fullmatch(line)), None)
    if wrong is not None or not keys:
        what = f"key {wrong} is not one" if wrong is not None else "it has no key"
        raise _refusal(
            option,
            path,
            f"a file with a key of 64 hexadecimal digits on each line ({what})",
            f"Make a key: {_MAKE_ONE}",
        )
    return [bytes.fromhex(line) for line in keys]


def _refusal(option: str, path: Path, allowed: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(option, describe(str(path)), allowed, remedy))
