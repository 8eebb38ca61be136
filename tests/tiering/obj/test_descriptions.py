"""What the namespaces in a bucket are made of, and what an engine says that finds nothing there."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore

from kvtier.base import OffloadingSpec
from kvtier.config import NamespaceDescription
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj.janitor import Janitor, JanitorTimes
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.obj.objects import BLOCKS, Objects, description_name
from kvtier.tiering.remote.errors import ServerErrors
from tests.tiering.cold_starts import (
    DIFFERENCES,
    Change,
    engines,
    levels,
    line_of_a_start,
    lines,
    other_model,
    served,
    store,
    with_root,
)
from tests.tiering.obj.server import SeaweedProcess
from tests.tiering.patience import PATIENCE_S, wait_until


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """The keys of a tier with a directory as a bucket."""
    return {"url": f"file://{tmp_path}/bucket"}


def opening(keys: dict[str, Any]) -> Callable[[], TierHarness]:
    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ObjSecondaryTierManager(spec, view, "obj", **keys)

    return lambda: TierHarness(make_tier, patience_s=PATIENCE_S, namespace="these weights")


def described(keys: dict[str, Any]) -> dict[str, NamespaceDescription]:
    inspector = ObjSecondaryTierManager.open_inspector(keys["url"])
    assert inspector is not None
    with inspector:
        inspector.figures()
        return dict(inspector.descriptions())


def fill(keys: dict[str, Any], client: Any, change: Change = served) -> str:
    """Store blocks, and wait for the description. Returns the name of the namespace."""
    with engines(change), opening(keys)() as harness:
        store(harness)
        name = harness.fingerprint.hex()
        content = harness.tier.describe_namespace().encode()

        def is_written() -> bool:
            try:
                return bytes(obstore.get(client, description_name(name)).bytes()) == content
            except FileNotFoundError:
                return False

        wait_until(is_written, "the namespace is described")
        return name


@pytest.fixture
def bucket(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "bucket", mkdir=True)


def test_a_cold_start_names_what_differs_on_a_server(
    server: SeaweedProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server.keys, server.store(), other_model)
    fill(server.keys, server.store())
    change, text = DIFFERENCES["length"]
    line = line_of_a_start(opening(server.keys), change, caplog)
    assert "of another namespace of the model org/llama: " in line
    assert text in line
    assert levels(caplog) == [logging.WARNING]


@pytest.mark.parametrize("what", ["weights", "ranks"])
def test_a_cold_start_names_what_differs(
    what: str, keys: dict[str, Any], bucket: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(keys, bucket)
    assert described(keys)[name].model == "org/llama"
    change, text = DIFFERENCES[what]
    assert text in line_of_a_start(opening(keys), change, caplog)


def test_a_warm_start_says_nothing_but_other_hash_roots_are_named(
    keys: dict[str, Any], bucket: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(keys, bucket, with_root("1a2b (sha256)"))
    fill(keys, bucket, with_root("1a2b (sha256)"))
    assert lines(caplog) == []
    line = line_of_a_start(opening(keys), with_root("3c4d (sha256)"), caplog)
    assert "1a2b (sha256), now 3c4d (sha256)" in line


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 100_000])
def test_damage_is_ignored_and_replaced(
    keys: dict[str, Any], bucket: LocalStore, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(keys, bucket)
    obstore.put(bucket, description_name(name), content)
    assert described(keys) == {}
    line = line_of_a_start(opening(keys), other_model, caplog)
    assert f"another namespace, {name[:8]}, and none of this engine's. There is no desc" in line
    assert fill(keys, bucket) == name


def test_it_leaves_with_the_blocks_that_are_cleared(
    keys: dict[str, Any], bucket: LocalStore
) -> None:
    name, other = fill(keys, bucket), fill(keys, bucket, other_model)
    inspector = ObjSecondaryTierManager.open_inspector(keys["url"])
    assert inspector is not None
    with inspector:
        inspector.clear(name, 10.0, lambda _done, _total: None)
    left = [item["path"] for page in obstore.list(bucket, f"{BLOCKS}/made-of") for item in page]
    assert left == [description_name(other)]


def test_the_leader_removes_descriptions_without_blocks(
    keys: dict[str, Any], bucket: LocalStore, tmp_path: Path
) -> None:
    kept, emptied = fill(keys, bucket), fill(keys, bucket, other_model)
    new = "ab" * 16
    obstore.put(bucket, description_name(new), b"{}")
    for page in obstore.list(bucket, f"{BLOCKS}/{emptied}"):
        obstore.delete(bucket, [item["path"] for item in page])
    two_hours_ago = time.time() - 7200
    for name in (kept, emptied):
        path = tmp_path / "bucket" / description_name(name)
        os.utime(path, (two_hours_ago, two_hours_ago))
    janitor = Janitor(Objects(bucket), 10**9, "a1", ServerErrors("file://"), JanitorTimes())
    janitor.sweep()
    left = {item["path"] for page in obstore.list(bucket, f"{BLOCKS}/made-of") for item in page}
    assert left == {description_name(kept), description_name(new)}
