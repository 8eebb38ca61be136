"""Whatever the names of keys, models and engines: no file is made outside the root, and other users
cannot read any file in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.base import LookupResult, OffloadingSpec, OffloadKey
from kvtier.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.testing import TierHarness
from kvtier.testing.harness import SampleSpec
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import LONGEST_KEY
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.fs.presence import peers_in
from tests.tiering.fs.accounts import load_all, load_some, store_all, store_some
from tests.tiering.fs.harness import ROW_BYTES, block_files, bytes_for, fs_harness
from tests.tiering.patience import wait_until

HOSTILE = [
    b"../../../../../etc/passwd",
    b"..",
    b".",
    b"/",
    b"/etc/passwd",
    b"\0",
    b"a\0b",
    b"a/../../b",
    b"\n",
    b"ledger",
    b"~",
    b"$(touch x)",
    b"%s%n{}",
    b"\xff" * 36,
    b"\xf0\x9f\x92\xa9",
    bytes(36),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "root"


@pytest.fixture(autouse=True)
def _nothing_is_made_outside(root: Path) -> Iterator[None]:
    root.parent.mkdir()
    (root.parent / "neighbour").write_bytes(b"mine")
    yield
    assert set(os.listdir(root.parent)) <= {"root", "neighbour"}
    assert (root.parent / "neighbour").read_bytes() == b"mine"
    assert os.listdir(root.parent.parent) == ["parent"]
    demand_private(root)


def demand_private(root: Path) -> None:
    """Check that the root holds only files and directories that only our user can read."""
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            mode = os.lstat(f"{directory}/{name}").st_mode
            wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
            assert stat.S_ISDIR(mode) or stat.S_ISREG(mode), name
            assert stat.S_IMODE(mode) == wanted, (name, oct(mode))


# --- keys --------------------------------------------------------------------------------------


def test_hostile_keys_are_keys_like_others(root: Path) -> None:
    keys = [OffloadKey(key) for key in HOSTILE]
    with fs_harness(root) as harness:
        assert not harness.hits(keys)
        store_all(harness, keys)
        load_all(harness, keys)
        demand_private(root)
    assert len(block_files(root)) == len(keys)
    with fs_harness(root) as harness:
        assert harness.hits(keys) == set(keys)
        load_all(harness, keys)


def test_keys_of_every_length(root: Path) -> None:
    """Including keys whose hex digits are too long for a file name."""
    keys = [OffloadKey(bytes(range(length))) for length in range(1, LONGEST_KEY + 1)]
    with fs_harness(root, 512, num_rows=128) as harness:
        store_all(harness, keys)
        load_all(harness, keys)
    with fs_harness(root, 512, num_rows=128) as harness:
        assert harness.hits(keys) == set(keys)
        load_all(harness, keys)


@pytest.mark.parametrize("length", [LONGEST_KEY + 1, 255, 256, 4096, 100_000])
def test_keys_that_are_too_long_are_a_miss_and_not_stored(root: Path, length: int) -> None:
    key = OffloadKey(b"k" * length)
    (neighbour,) = TierHarness.keys(1)
    with fs_harness(root) as harness:
        assert store_some(harness, [neighbour, key]) == {neighbour}
        assert harness.look_up(key) is LookupResult.MISS
        assert load_some(harness, [key, neighbour]) == {neighbour}
        harness.call("touch", [key, neighbour], harness.new_request())


def test_a_key_without_a_byte_is_kept_or_refused(root: Path) -> None:
    key = OffloadKey(b"")
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
        assert harness.look_up(key) is LookupResult.MISS
        stored = store_some(harness, [key])
        assert load_some(harness, [key]) == stored
        assert (harness.look_up(key) is LookupResult.HIT) == bool(stored)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierHarness]:
    with fs_harness(tmp_path_factory.mktemp("names") / "root", 512) as harness:
        yield harness


@settings(max_examples=40)
@given(st.sets(st.binary(min_size=1, max_size=LONGEST_KEY), min_size=1, max_size=20))
def test_any_keys(running: TierHarness, keys: set[bytes]) -> None:
    some = [OffloadKey(key) for key in keys]
    store_all(running, some)
    load_all(running, some)


# --- models and engines ------------------------------------------------------------------------

NAMES = [
    "../../../../etc",
    "..",
    "/",
    "/etc/passwd",
    "a\nb\r\n",
    "x" * 10_000,
    "\U0001f4a9" * 200,
    "a\0b",
    "\ud800",
    "%s {} $(touch x)",
    "",
]


def named_harness(root: Path, model: str, engine_id: str, namespace: str) -> TierHarness:
    """An engine with these names. Raises the errors of the configuration or the tier."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer.0",)),),
            worker_kv_bytes_per_block=ROW_BYTES,
            engine_id=engine_id,
            model=OffloadingModelConfig(name=model, dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16),
            parallel=OffloadingParallelConfig(),
            extra_config={"cpu_bytes_to_use": 64 * ROW_BYTES, "cache_namespace": namespace},
        )
        return FsSecondaryTierManager(
            SampleSpec(config), view, "fs", root_dir=str(root), max_bytes=bytes_for(64)
        )

    harness = TierHarness(make_tier, num_slots=64, row_bytes=ROW_BYTES)
    harness.fingerprint = harness.tier.fingerprint
    return harness


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("what", ["model", "engine_id", "namespace"])
def test_hostile_names_of_models_and_engines(root: Path, what: str, name: str) -> None:
    names = {"model": "model", "engine_id": "engine", "namespace": "weights", what: name}
    try:
        harness = named_harness(root, **names)
    except ValueError:
        return  # the configuration refuses it
    with harness:
        keys = harness.keys(4)
        store_all(harness, keys)
        load_all(harness, keys)
        demand_private(root)
        (info,) = [peer.info for peer in peers_in(NoFollowTree(root), root / "engines", None)]
        assert info is not None
        assert info.engine_id == names["engine_id"][:128]
    with named_harness(root, **names) as harness:
        load_all(harness, keys)


# --- modes -------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o027])
def test_modes_do_not_depend_on_the_umask(root: Path, mask: int) -> None:
    with umask(mask), fs_harness(root, 40) as harness:
        for start in range(0, 200, 20):  # some are evicted
            store_all(harness, harness.keys(20, start))
        harness.begin_epoch(b"\1" * 16)
        store_all(harness, harness.keys(8))
        demand_private(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_root_that_others_may_enter_is_warned_of(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir(mode=0o755)
    with fs_harness(root) as harness:
        store_all(harness, harness.keys(4))
        wait_until(lambda: len(block_files(root)) == 4, "stored")
    assert any("chmod 700" in message for message in caplog.messages)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755, "the administrator's choice"
