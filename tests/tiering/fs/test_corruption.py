"""A damaged block file is refused, counted, removed and a miss from then on, and a new store
restores the block. Every other block is served, and never a wrong byte. The harness compares every
load with the block's payload."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.base import LookupResult, OffloadKey
from kvtier.seal import SEAL_BYTES, SealFailure
from kvtier.testing import TierHarness
from kvtier.tiering.fs.layout import block_path, write_header
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.io.page import BODY_BYTES, PAGE_BYTES
from tests.tiering.fs.accounts import load_some, store_all, wait_until_the_gauge_is_right
from tests.tiering.fs.harness import ROW_BYTES, block_files, fs_harness, fs_of
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import PATIENCE_S, wait_until
from tests.tiering.ways import demand_rows_hold_whole_blocks_or_nothing

FILE_BYTES = PAGE_BYTES + ROW_BYTES
KEYS = TierHarness.keys(8)
VICTIM, OTHER = KEYS[2], KEYS[5]
SOME = settings(max_examples=60)


def path_of(harness: TierHarness, key: OffloadKey) -> Path:
    return Path(block_path(str(fs_of(harness)._namespace), key))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierHarness]:
    """One engine for many examples: each example restores all blocks at its end."""
    with fs_harness(tmp_path_factory.mktemp("corrupt") / "root") as harness:
        store_all(harness, KEYS)
        yield harness


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def harness(root: Path) -> Iterator[TierHarness]:
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        yield harness


def demand_refused(harness: TierHarness, *keys: OffloadKey) -> Counter[SealFailure]:
    """Check that these damaged blocks are refused and removed, that the others are served, and that
    a new store restores them. Returns the reasons."""
    harness.tier.take_seal_failures()
    lost = set(keys)
    assert load_some(harness, KEYS) == set(KEYS) - lost
    reasons = harness.tier.take_seal_failures()
    assert harness.hits(KEYS) == set(KEYS) - lost
    wait_until(lambda: not any(os.path.lexists(path_of(harness, key)) for key in keys), "gone")
    store_all(harness, sorted(lost))
    assert load_some(harness, KEYS) == set(KEYS)
    assert not harness.tier.take_seal_failures()
    return reasons


def change(path: Path, content: bytes, offset: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


# --- bits and lengths --------------------------------------------------------------------------


def expected_for_bit(offset: int) -> set[SealFailure]:
    if offset >= PAGE_BYTES:
        return {SealFailure.DIGEST}
    if offset < 8:
        return {SealFailure.NOT_SEALED}
    if offset < 10:
        return {SealFailure.FORMAT}
    return {SealFailure.HEADER}


def flip(path: Path, offset: int, bit: int) -> None:
    content = path.read_bytes()
    change(path, bytes([content[offset] ^ 1 << bit]), offset)


@SOME
@given(
    st.one_of(
        st.integers(0, SEAL_BYTES - 1),
        st.integers(SEAL_BYTES, BODY_BYTES - 1),
        st.integers(BODY_BYTES, PAGE_BYTES - 1),
        st.integers(PAGE_BYTES, FILE_BYTES - 1),
    ),
    st.integers(0, 7),
)
def test_any_bit(running: TierHarness, offset: int, bit: int) -> None:
    flip(path_of(running, VICTIM), offset, bit)
    (reason,) = demand_refused(running, VICTIM)
    assert reason in expected_for_bit(offset)


def test_a_damaged_block_does_not_reach_its_row(harness: TierHarness) -> None:
    flip(path_of(harness, VICTIM), FILE_BYTES - 1, 0)
    demand_rows_hold_whole_blocks_or_nothing(harness, OTHER, VICTIM)


def test_a_block_is_stored_again_before_its_damaged_file_is_removed(
    harness: TierHarness, root: Path
) -> None:
    """The ledger is locked, so the damaged file is still in place when the block is stored. It does
    not count as the stored block, which would be lost with it."""
    flip(path_of(harness, VICTIM), FILE_BYTES - 1, 0)
    with closing(RootSession(root, EngineInfo.here("other", ""), PATIENCE_S)) as other:
        with other.transaction():
            assert load_some(harness, [VICTIM]) == set()
            job = harness.store([VICTIM])
            for _ in range(20):
                harness.step()
                time.sleep(0.01)
            assert path_of(harness, VICTIM).exists(), "nobody else can remove it now"
        (report,) = harness.wait_for(job)
    assert report.moved == {VICTIM}
    assert load_some(harness, KEYS) == set(KEYS)


def test_a_bit_in_each_part_of_every_block_at_once(harness: TierHarness) -> None:
    for number, key in enumerate(KEYS):
        flip(path_of(harness, key), number * FILE_BYTES // len(KEYS) + 3, number)
    assert demand_refused(harness, *KEYS).total() == len(KEYS)


@SOME
@given(st.integers(0, FILE_BYTES - 1))
def test_cut_off_anywhere(running: TierHarness, length: int) -> None:
    os.truncate(path_of(running, VICTIM), length)
    assert demand_refused(running, VICTIM) == {SealFailure.LENGTH: 1}


@pytest.mark.parametrize("length", [0, 1, SEAL_BYTES, PAGE_BYTES, FILE_BYTES - 1])
def test_cut_off_at_an_edge(harness: TierHarness, length: int) -> None:
    os.truncate(path_of(harness, VICTIM), length)
    assert demand_refused(harness, VICTIM) == {SealFailure.LENGTH: 1}


@pytest.mark.parametrize("excess", [1, 512, PAGE_BYTES, 1 << 20])
def test_a_file_that_is_too_long(harness: TierHarness, excess: int) -> None:
    with path_of(harness, VICTIM).open("ab") as file:
        file.write(b"x" * excess)
    assert load_some(harness, KEYS) == set(KEYS)  # the block is complete, and its seal proves it


@SOME
@given(st.integers(0, FILE_BYTES // 512 - 1), st.integers(1, FILE_BYTES // 512))
def test_zeroes_anywhere(running: TierHarness, first: int, count: int) -> None:
    """Sectors that were never written, as after a crash of the server."""
    path = path_of(running, VICTIM)
    before = path.read_bytes()
    change(path, bytes(512 * min(count, FILE_BYTES // 512 - first)), 512 * first)
    if path.read_bytes() == before:
        assert load_some(running, KEYS) == set(KEYS)  # padding is zero anyway
    else:
        assert demand_refused(running, VICTIM).total() == 1


def test_a_hole(harness: TierHarness) -> None:
    path = path_of(harness, VICTIM)
    os.truncate(path, 0)
    os.truncate(path, FILE_BYTES)
    assert path.stat().st_blocks == 0
    assert demand_refused(harness, VICTIM) == {SealFailure.NOT_SEALED: 1}


# --- files in the wrong place ------------------------------------------------------------------


def test_two_files_swapped(harness: TierHarness, tmp_path: Path) -> None:
    one, other = path_of(harness, VICTIM), path_of(harness, OTHER)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert demand_refused(harness, VICTIM, OTHER) == {SealFailure.KEY: 2}


def test_a_copy_of_another_block(harness: TierHarness) -> None:
    shutil.copy(path_of(harness, OTHER), path_of(harness, VICTIM))
    assert demand_refused(harness, VICTIM) == {SealFailure.KEY: 1}


def test_another_block_under_a_second_name_keeps_its_bytes(harness: TierHarness) -> None:
    """Other evicted files are overwritten by the next block; this one must not be."""
    one, other = path_of(harness, VICTIM), path_of(harness, OTHER)
    one.unlink()
    os.link(other, one)
    assert load_some(harness, KEYS) == set(KEYS) - {VICTIM}
    assert harness.tier.take_seal_failures() == {SealFailure.KEY: 1}
    store_all(harness, harness.keys(8, start=100))
    assert load_some(harness, KEYS) == set(KEYS) - {VICTIM}


def test_the_same_block_of_another_model(harness: TierHarness, root: Path) -> None:
    with fs_harness(root, namespace="other weights") as theirs:
        store_all(theirs, [VICTIM])
        shutil.copy(path_of(theirs, VICTIM), path_of(harness, VICTIM))
        assert load_some(theirs, [VICTIM]) == {VICTIM}
    assert demand_refused(harness, VICTIM) == {SealFailure.FINGERPRINT: 1}


def test_a_block_of_another_size(harness: TierHarness, tmp_path: Path) -> None:
    """Sealed for this key and these weights, by an engine with smaller rows."""
    page = bytearray(PAGE_BYTES)
    payload = bytes(PAGE_BYTES)
    job = harness.load(KEYS[:1])  # any job of this namespace
    harness.wait_for(job)
    write_header(memoryview(page), harness.tier.seal_block(job, VICTIM, memoryview(payload)))
    path_of(harness, VICTIM).write_bytes(bytes(page) + payload + bytes(FILE_BYTES - 2 * PAGE_BYTES))
    assert demand_refused(harness, VICTIM) == {SealFailure.LENGTH: 1}


# --- no file at all ----------------------------------------------------------------------------


def _directory(path: Path) -> None:
    path.mkdir()


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"of someone")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    os.mknod(path, 0o140600)


def _symlink_to_nothing(path: Path) -> None:
    path.symlink_to("/nonexistent/block")


def _symlink_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _symlink_to_a_good_block(path: Path) -> None:
    good = path.parent.parent.parent.parent / "aside"
    good.write_bytes(b"")
    path.symlink_to(good)


def _symlink_to_the_other_block(path: Path) -> None:
    (other,) = path.parent.parent.glob(f"*/{OTHER.hex()}")
    path.symlink_to(other)


@contextmanager
def somebody_opens_what_waits(path: Path) -> Iterator[None]:
    """A thread that opens a FIFO without O_NONBLOCK would wait for ever."""
    try:
        yield
    finally:
        for found in path.parent.glob("*"):
            if found.is_fifo():
                os.close(os.open(found, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize(
    "put",
    [
        _directory,
        _full_directory,
        _fifo,
        _socket,
        _symlink_to_nothing,
        _symlink_to_itself,
        _symlink_to_a_good_block,
        _symlink_to_the_other_block,
    ],
)
def test_something_else_in_the_place_of_a_block(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    """It is soon a miss; the target of a link is not touched, and a store either restores the block
    or fails."""
    root = tmp_path / "root"
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        path = path_of(harness, VICTIM)
        path.unlink()
        put(path)
        others = set(KEYS) - {VICTIM}
        with somebody_opens_what_waits(path):
            assert load_some(harness, KEYS) == others
            assert harness.look_up(VICTIM) is LookupResult.MISS
            stored = harness.wait_for(harness.store(KEYS))[0].moved
            assert stored >= others
            assert load_some(harness, KEYS) == stored
            assert harness.hits(KEYS) == stored
            harness.drain()
            harness.shut_down()
    aside = root / "aside"
    assert not aside.exists() or aside.read_bytes() == b""


# --- strangers among the blocks ----------------------------------------------------------------


def test_strange_files_among_the_blocks_do_not_matter(tmp_path: Path) -> None:
    root = tmp_path / "root"
    numbers = count()
    with fs_harness(root, 40) as harness:
        store_all(harness, KEYS)
        for place in (root, root / "blocks", root / "engines", *(root / "blocks").glob("*/0*")):
            (place / f".nfs{next(numbers)}").write_bytes(b"x")
            (place / f"strange-{next(numbers)}").mkdir()
        assert load_some(harness, KEYS) == set(KEYS)
        for start in range(100, 300, 20):
            store_all(harness, harness.keys(20, start))
    with fs_harness(root, 40) as harness:
        store_all(harness, KEYS)
        assert load_some(harness, KEYS) == set(KEYS)


def test_damage_found_after_a_restart_is_counted_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
    for path in block_files(root):
        flip(path, 5000, 1)
    with fs_harness(root) as harness:
        assert harness.hits(KEYS) == set(KEYS)
        assert not load_some(harness, KEYS)
        assert harness.tier.take_seal_failures() == {SealFailure.DIGEST: len(KEYS)}
        wait_until(lambda: not block_files(root), "damaged blocks are removed")
        wait_until_the_gauge_is_right(harness, root)
        store_all(harness, KEYS)
        assert load_some(harness, KEYS) == set(KEYS)
