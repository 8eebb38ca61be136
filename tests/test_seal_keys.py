"""Signed seals: only who has a key of the fleet can make a block that an engine with keys uses."""

from __future__ import annotations

import logging
import os
import secrets
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtier import seal
from kvtier.base import make_offload_key
from kvtier.config import ConfigError
from kvtier.seal import SEAL_BYTES, SealFailure
from kvtier.seal.keys import SealKeys

FINGERPRINT = bytes(range(16))
KEY = make_offload_key(b"0123456789abcdef" * 2, 3)
OTHER_KEY = make_offload_key(b"fedcba9876543210" * 2, 3)
PAYLOAD = bytes(i * 7 % 251 for i in range(4096))
OLD, NEW, FOREIGN = bytes(range(32)), bytes(range(1, 33)), bytes(range(2, 34))
KEYS = SealKeys([OLD])

VERSION, DIGEST, CHECKSUM = slice(8, 10), slice(48, 64), slice(224, 232)
KEY_ID, MAC = slice(232, 240), slice(240, 256)


def make(keys: SealKeys | None = KEYS, payload: bytes = PAYLOAD) -> bytes:
    return seal.make(KEY, payload, FINGERPRINT, "engine-0", keys)


def check(header: bytes, payload: bytes = PAYLOAD, keys: SealKeys = KEYS) -> SealFailure | None:
    return seal.check(header, payload, KEY, FINGERPRINT, keys)


def with_fitting_checksum(header: bytearray) -> bytes:
    """What a forger without the key can do."""
    header[CHECKSUM] = struct.pack("<Q", xxh3_64_intdigest(bytes(header[: CHECKSUM.start])))
    return bytes(header)


SIGNED = make()


def test_a_signed_block_is_accepted_and_names_its_key() -> None:
    assert check(SIGNED) is None
    assert len(SIGNED) == SEAL_BYTES
    assert seal.read(SIGNED).key == KEY
    assert SIGNED[KEY_ID] == make(payload=b"another")[KEY_ID]


def test_a_signature_covers_the_payload_and_not_only_its_digest() -> None:
    """Whoever finds another payload with this digest, which has no secret, cannot use it."""
    signature, fields = SIGNED[KEY_ID.start :], SIGNED[: CHECKSUM.start]
    assert KEYS.is_genuine(signature, fields, PAYLOAD)
    for other in (PAYLOAD[:-1] + b"x", PAYLOAD[:-1], b""):
        assert not KEYS.is_genuine(signature, fields, other)


def test_a_reader_without_keys_still_checks_the_digest() -> None:
    assert seal.check(SIGNED, PAYLOAD, KEY, FINGERPRINT) is None
    assert seal.check(SIGNED, PAYLOAD[:-1] + b"x", KEY, FINGERPRINT) is SealFailure.DIGEST


def test_releases_that_know_no_signatures_find_a_format_they_leave_alone() -> None:
    assert SIGNED[VERSION] == struct.pack("<H", 2)
    assert make(None)[VERSION] == struct.pack("<H", 1)


def test_a_block_of_a_newer_release_is_refused_as_one() -> None:
    header = bytearray(SIGNED)
    header[VERSION] = struct.pack("<H", 3)
    assert check(with_fitting_checksum(header)) is SealFailure.FORMAT


@given(st.integers(0, 8 * (SEAL_BYTES + len(PAYLOAD)) - 1))
def test_no_flipped_bit_gets_past_it(bit: int) -> None:
    block = bytearray(SIGNED + PAYLOAD)
    block[bit // 8] ^= 1 << bit % 8
    assert check(bytes(block[:SEAL_BYTES]), bytes(block[SEAL_BYTES:])) is not None


@given(at=st.integers(0, CHECKSUM.start - 1), bits=st.integers(1, 255))
def test_no_changed_field_gets_past_it_with_a_fitting_checksum(at: int, bits: int) -> None:
    header = bytearray(SIGNED)
    header[at] ^= bits
    assert check(with_fitting_checksum(header)) is not None


def test_another_payload_with_a_fitting_digest_is_forged() -> None:
    theirs = bytes(reversed(PAYLOAD))
    header = bytearray(SIGNED)
    header[DIGEST] = xxh3_128_digest(theirs)
    assert seal.check(with_fitting_checksum(header), theirs, KEY, FINGERPRINT) is None
    assert check(with_fitting_checksum(header), theirs) is SealFailure.FORGED


def test_the_signature_of_another_block_is_forged() -> None:
    other = seal.make(OTHER_KEY, PAYLOAD, FINGERPRINT, "engine-0", KEYS)
    assert check(SIGNED[: KEY_ID.start] + other[KEY_ID.start :]) is SealFailure.FORGED


def test_a_block_without_a_signature_is_refused() -> None:
    assert check(make(None)) is SealFailure.UNSIGNED
    relabelled = bytearray(make(None))
    relabelled[VERSION] = struct.pack("<H", 2)
    assert check(with_fitting_checksum(relabelled)) is SealFailure.UNSIGNED


def test_another_fleets_signature_is_refused() -> None:
    theirs = make(SealKeys([FOREIGN]))
    assert check(theirs) is SealFailure.UNSIGNED
    relabelled = theirs[: KEY_ID.start] + SIGNED[KEY_ID] + theirs[MAC]
    assert check(relabelled) is SealFailure.FORGED


def test_rotation_loses_no_block() -> None:
    prepared, switched, done = SealKeys([OLD, NEW]), SealKeys([NEW, OLD]), SealKeys([NEW])
    engines = [KEYS, prepared, switched]
    for writer in engines[:2]:
        assert all(check(make(writer), keys=reader) is None for reader in engines)
    for writer in (switched, done):
        assert all(
            check(make(writer), keys=reader) is None for reader in (prepared, switched, done)
        )
    assert check(make(KEYS), keys=done) is SealFailure.UNSIGNED


def test_memoryviews_are_signed_like_bytes() -> None:
    view = memoryview(bytearray(PAYLOAD))
    header = seal.make(KEY, view, FINGERPRINT, "engine-0", KEYS)
    assert seal.check(memoryview(bytearray(header)), view, KEY, FINGERPRINT, KEYS) is None


# --- the file ------------------------------------------------------------------------------------


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        SealKeys.load(path)
    return str(refused.value)


def test_a_file_of_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", f"# since May\n{NEW.hex()}\n\n  {OLD.hex().upper()}  \n")
    with caplog.at_level(logging.INFO):
        found = SealKeys.load(path)
    assert check(make(SealKeys([OLD])), keys=found) is None
    assert make(found)[KEY_ID] == make(SealKeys([NEW]))[KEY_ID]
    (record,) = caplog.records
    assert make(found)[KEY_ID].hex() in record.message
    assert NEW.hex() not in record.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it has no key"),
        ("# only a comment\n", "it has no key"),
        (OLD.hex() + "\n" + NEW.hex()[:-1], "key 2 is not one"),
        (OLD.hex()[:-1] + "g", "key 1 is not one"),
        (OLD.hex() + NEW.hex(), "key 1 is not one"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(write(tmp_path / "keys", text))
    assert expected in message
    assert "openssl rand -hex 32" in message
    for line in text.split():
        assert line == "#" or len(line) < 16 or line not in message


def test_the_command_in_the_message_makes_a_key(tmp_path: Path) -> None:
    made = subprocess.run(
        ["openssl", "rand", "-hex", "32"], capture_output=True, text=True, check=True
    )
    SealKeys.load(write(tmp_path / "keys", made.stdout))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    message = refusal(tmp_path / "keys")
    assert "No such file or directory" in message
    assert "seal_key_file" in message


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    for mode in (0o620, 0o602):
        assert "only its owner may write" in refusal(write(tmp_path / "keys", OLD.hex(), mode))


def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SealKeys.load(write(tmp_path / "keys", OLD.hex(), 0o604))
    assert "every user of this machine can read the keys" in caplog.text


def test_without_the_library_the_remedy_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", secrets.token_hex(32))
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from pathlib import Path; from kvtier.seal.keys import SealKeys\n"
        f"SealKeys.load(Path({str(path)!r}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert ended.returncode == 1
    assert "pip install 'kvtier[keyed]'" in ended.stderr
