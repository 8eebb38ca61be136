"""With `seal_key_file`, no tier serves a block that somebody without the key has put there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from obstore.store import LocalStore
from xxhash import xxh3_128_digest

from kvtier import seal
from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.seal import SealFailure
from kvtier.seal.keys import SealKeys
from kvtier.testing import BackingBytes, TierHarness
from kvtier.testing.damage import ExampleBacking
from kvtier.testing.harness import SampleSpec, sample_spec
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from tests.tiering.disk.backing import DiskBacking
from tests.tiering.fs.backing import FsBacking
from tests.tiering.obj.backing import ObjBacking
from tests.tiering.valkey.backing import ValkeyBacking
from tests.tiering.valkey.server import ValkeyProcess, valkey_server

ROW_BYTES = 8192
KEYS = SealKeys([bytes(range(32))])
THEIR_KEYS = SealKeys([bytes(range(1, 33))])

KINDS: dict[str, type[SecondaryTierManager]] = {
    "example": ExampleSecondaryTierManager,
    "disk": DiskSecondaryTierManager,
    "fs": FsSecondaryTierManager,
    "obj": ObjSecondaryTierManager,
    "valkey": ValkeySecondaryTierManager,
}


@dataclass
class Place:
    """Where a tier of one type keeps its blocks."""

    kind: str
    directory: Path
    server: ValkeyProcess | None

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        keys: dict[str, dict[str, object]] = {
            "disk": {
                "path": str(self.directory / "kv.slab"),
                "max_bytes": Geometry(ROW_BYTES, 64).needed_bytes,
            },
            "fs": {"root_dir": str(self.directory / "root"), "max_bytes": 64 << 20},
            "obj": {"url": f"file://{self.directory / 'objects'}"},
            "valkey": {"url": self.server.url if self.server else ""},
        }
        return KINDS[self.kind](spec, view, self.kind, **keys.get(self.kind, {}))

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        """Reads and writes the tier's bytes behind its back."""
        if isinstance(tier, ExampleSecondaryTierManager):
            return ExampleBacking(tier)
        if isinstance(tier, DiskSecondaryTierManager):
            return DiskBacking(tier)
        if isinstance(tier, FsSecondaryTierManager):
            return FsBacking(tier)
        if isinstance(tier, ObjSecondaryTierManager):
            return ObjBacking(tier, LocalStore(self.directory / "objects"))
        assert self.server is not None
        return ValkeyBacking(self.server.client)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param != "valkey":
        yield Place(request.param, tmp_path, None)
        return
    with valkey_server(tmp_path) as server:
        yield Place(request.param, tmp_path, server)


class Forger:
    """Has written to the tier's storage, knows the format, and has no key of the fleet."""

    def __init__(self, backing: BackingBytes, fingerprint: bytes) -> None:
        self._backing = backing
        self._fingerprint = fingerprint

    def replace_payload(self, key: OffloadKey) -> None:
        """Keep the seal, with the digest and the checksum of another payload."""
        block = self._backing.read(self._fingerprint, key)
        signature = block[seal.SEAL_BYTES - 24 : seal.SEAL_BYTES]
        payload = self._other_payload(block)
        theirs = seal.make(key, payload, self._fingerprint, "forger", THEIR_KEYS)
        assert xxh3_128_digest(payload) in theirs
        self._write(key, theirs[:-24] + signature, payload)

    def seal_without_key(self, key: OffloadKey) -> None:
        payload = self._other_payload(self._backing.read(self._fingerprint, key))
        self._write(key, seal.make(key, payload, self._fingerprint, "forger"), payload)

    def seal_with_own_key(self, key: OffloadKey) -> None:
        payload = self._other_payload(self._backing.read(self._fingerprint, key))
        self._write(key, seal.make(key, payload, self._fingerprint, "forger", THEIR_KEYS), payload)

    def _other_payload(self, block: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in block[seal.SEAL_BYTES :])

    def _write(self, key: OffloadKey, header: bytes, payload: bytes) -> None:
        assert seal.check(header, payload, key, self._fingerprint) is None  # without keys
        self._backing.write(self._fingerprint, key, header + payload)


def test_what_somebody_else_has_put_there_is_refused(place: Place) -> None:
    def make_signing(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        tier = place.make_tier(spec, view)
        tier.seal_keys = KEYS
        return tier

    with TierHarness(make_signing, row_bytes=ROW_BYTES) as harness:
        keys = harness.keys(4)
        harness.wait_for(harness.store(keys))
        tier = harness.tier
        forger = Forger(place.backing(tier), harness.fingerprint)
        forger.replace_payload(keys[0])
        forger.seal_without_key(keys[1])
        forger.seal_with_own_key(keys[2])
        (report,) = harness.wait_for(harness.load(keys))
        assert report.moved == {keys[3]}
        assert tier.take_seal_failures() == {SealFailure.FORGED: 1, SealFailure.UNSIGNED: 2}


def test_engines_with_and_without_keys_do_not_find_each_others_blocks(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text(bytes(range(32)).hex())
    key_file.chmod(0o600)
    plain = sample_spec(ROW_BYTES, 8, "shared", "engine")
    extra = {**plain.config.extra_config, "seal_key_file": str(key_file)}
    signing = SampleSpec(replace(plain.config, extra_config=extra))
    assert plain.config.fingerprint() != signing.config.fingerprint()
    view = memoryview(bytearray(8 * ROW_BYTES)).cast("B", (8, ROW_BYTES))
    tier = ExampleSecondaryTierManager(signing, view, "example")
    assert tier.seal_keys is not None
    tier.shutdown()
