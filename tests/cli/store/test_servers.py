"""`kvtier store` on servers: a Valkey server, an S3 server, and a directory of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, ObjectStore

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from tests.cli.store.slabs import run_store
from tests.tiering.obj.server import ACCESS_KEY, BUCKET, SECRET, seaweed
from tests.tiering.patience import PATIENCE_S
from tests.tiering.valkey.server import valkey_server

ROW_BYTES = 8192
KEYS = TierHarness.keys(6)
HASHES = {key[:-4].hex() for key in KEYS}


@dataclass
class Place:
    """A server with a tier's keys, and the location that the command gets."""

    kind: str
    tier_cls: type[SecondaryTierManager]
    location: str
    keys: dict[str, Any]
    damage: Callable[[str], None]
    """Damages the block of this name."""
    environment: dict[str, str] = field(default_factory=dict)

    def fill(self, keys: list[OffloadKey], namespace: str = "these weights") -> str:
        """Store these blocks. Returns the name of the namespace."""

        def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
            return self.tier_cls(spec, view, self.kind, **self.keys)

        with TierHarness(
            make_tier,
            num_slots=32,
            row_bytes=ROW_BYTES,
            patience_s=PATIENCE_S,
            namespace=namespace,
        ) as harness:
            assert harness.wait_for(harness.store(keys))[0].result.success
            return harness.fingerprint.hex()


def damage_object(store: ObjectStore, name: str) -> None:
    """Blocks of this size share objects."""
    name, _, start = name.partition("@")
    content = bytearray(bytes(obstore.get(store, name).bytes()))
    content[int(start) + 300 : int(start) + 306] = b"damage"
    obstore.put(store, name, bytes(content))


@pytest.fixture(params=["valkey", "s3", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "valkey":
        with valkey_server(tmp_path / "server") as server, server.client() as client:
            yield Place(
                "valkey",
                ValkeySecondaryTierManager,
                server.url,
                {"url": server.url},
                lambda name: client.setrange(
                    name.rpartition(":")[0].encode()
                    + b":"
                    + bytes.fromhex(name.rpartition(":")[2]),
                    3000,
                    b"damage",
                ),
            )
    elif request.param == "s3":
        with seaweed(tmp_path / "server") as s3:
            yield Place(
                "obj",
                ObjSecondaryTierManager,
                f"s3://{BUCKET}/cache",
                s3.keys,
                lambda name: damage_object(s3.store(), name),
                {
                    "AWS_ENDPOINT_URL": s3.endpoint,
                    "AWS_REGION": "us-east-1",
                    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                    "AWS_SECRET_ACCESS_KEY": SECRET,
                },
            )
    else:
        url = f"file://{tmp_path}/objects"
        store = LocalStore(tmp_path / "objects", mkdir=True)
        yield Place(
            "obj",
            ObjSecondaryTierManager,
            url,
            {"url": url},
            lambda name: damage_object(store, name),
        )


@pytest.fixture(autouse=True)
def _environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)


def test_blocks_are_counted_listed_verified_and_cleared(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    one = place.fill(KEYS[:4])
    other = place.fill(KEYS[4:], namespace="other weights")
    code, stat = run_store(capsys, "stat", place.location)
    assert code == 0
    assert (stat["kind"], stat["blocks"]) == (place.kind, 6)
    assert stat["bytes"] == 6 * (ROW_BYTES + 256)
    assert {space["namespace"]: space["blocks"] for space in stat["namespaces"]} == {
        one: 4,
        other: 2,
    }

    code, listed = run_store(capsys, "ls", place.location)
    assert {block["block_hash"] for block in listed["blocks"]} == HASHES
    assert all(block["bytes"] == ROW_BYTES for block in listed["blocks"])

    code, verified = run_store(capsys, "verify", place.location)
    assert (code, verified["good"]) == (0, 6)
    place.damage(listed["blocks"][0]["name"])
    code, verified = run_store(capsys, "verify", place.location)
    assert (code, verified["good"]) == (1, 5)

    code, cleared = run_store(capsys, "clear", place.location, "--namespace", other[:8], "--yes")
    assert (code, cleared["cleared_blocks"]) == (0, 2)
    code, cleared = run_store(capsys, "clear", place.location, "--yes")
    assert (code, cleared["cleared_blocks"]) == (0, 4)
    assert run_store(capsys, "stat", place.location)[1]["blocks"] == 0


def test_an_empty_place_has_no_blocks(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_store(capsys, "stat", place.location)[1]["blocks"] == 0
    assert run_store(capsys, "ls", place.location)[1]["total"] == 0


def test_text_is_for_people(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.fill(KEYS)
    assert main(["store", "stat", place.location]) == 0
    printed = capsys.readouterr().out
    assert place.location in printed
    assert "6, 49.5 KiB" in printed
    assert main(["store", "ls", place.location]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(KEYS)
