"""What the next engine finds in a slab: which blocks, in which order of eviction, and which events
it emits."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvtier.tiering.disk.flusher
from kvtier import seal
from kvtier.base import OffloadKey, make_offload_key
from kvtier.seal import SealFailure
from kvtier.testing import TierHarness, payload_of
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.index import write_index
from kvtier.tiering.disk.layout import SUPERBLOCK_OFFSETS, encode_stamp, write_slot_header
from kvtier.tiering.disk.reader import SlabReader
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.io.page import PAGE_BYTES
from tests.tiering.disk.crash.image import Image, write
from tests.tiering.disk.harness import bytes_for, disk_harness, disk_of, du
from tests.tiering.patience import PATIENCE_S, wait_until

ROW_BYTES = 4096


def harness_of(path: Path, num_blocks: int, **options: Any) -> TierHarness:
    return disk_harness(path, num_blocks, row_bytes=ROW_BYTES, **options)


def store(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    [report] = harness.wait_for(harness.store(keys))
    assert report.result.success


def loaded(harness: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """The keys that can be loaded."""
    [report] = harness.wait_for(harness.load(keys))
    return report.moved


def use(harness: TierHarness, keys: Sequence[OffloadKey]) -> None:
    request = harness.new_request()
    harness.call("touch", keys, request)
    harness.call("on_request_finished", request)


def long_key(number: int) -> OffloadKey:
    return make_offload_key(b"block-%026d" % number * 2, 0)


def evicted_in_turn(harness: TierHarness, count: int) -> list[OffloadKey]:
    """The order in which blocks are evicted for new ones."""
    harness.step()  # blocks evicted before they were announced have no event
    del harness.events[:]
    for key in harness.keys(count, start=1_000_000):
        store(harness, [key])
    harness.step()
    return [key for event in harness.events if event.removed for key in event.keys]


def killed(harness: TierHarness, path: Path) -> Path:
    """A copy of the slab, as if the engine were killed right after it wrote its index."""
    tier = disk_of(harness)
    copy = path.with_suffix(".killed")
    index, flusher = tier._slab.index, tier._flusher

    def is_written() -> bool:
        if flusher._uses:
            return False
        shutil.copy(path, copy)
        page = memoryview(bytearray(PAGE_BYTES))
        in_file = Image(copy).regions["index"]
        for page_no, start in enumerate(in_file[::PAGE_BYTES]):
            index.copy_page(page_no, page)
            if Image(copy).content[start : start + PAGE_BYTES] != page:
                return False
        return True

    wait_until(is_written, "the index is in the file")
    return copy


# --- recency ------------------------------------------------------------------------------------


def _stores(harness: TierHarness, keys: list[OffloadKey]) -> None:
    for key in keys:
        store(harness, [key])


def _prompts(harness: TierHarness, keys: list[OffloadKey]) -> None:
    for start in range(0, len(keys), 4):
        store(harness, keys[start : start + 4])


def _stores_and_uses(harness: TierHarness, keys: list[OffloadKey]) -> None:
    random = Random(5)
    _stores(harness, keys)
    for _ in range(30):
        use(harness, [random.choice(keys)])


def _uses_of_prompts(harness: TierHarness, keys: list[OffloadKey]) -> None:
    _prompts(harness, keys)
    use(harness, keys[4:8])
    use(harness, keys[0:2])


def _loads(harness: TierHarness, keys: list[OffloadKey]) -> None:
    _prompts(harness, keys)
    assert loaded(harness, keys[4:7]) == set(keys[4:7])
    assert loaded(harness, keys[1:2]) == set(keys[1:2])


def _continued_prompts(harness: TierHarness, keys: list[OffloadKey]) -> None:
    store(harness, keys[0:2])
    store(harness, keys[6:9])
    store(harness, keys[0:6])  # the head is there, and must not leave before its tail
    store(harness, keys[6:12])


def _uses_before_stores(harness: TierHarness, keys: list[OffloadKey]) -> None:
    """A block is looked up, missed, computed, and stored later than others."""
    use(harness, keys)
    _stores(harness, keys)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
@pytest.mark.parametrize(
    "history",
    [
        _stores,
        _prompts,
        _stores_and_uses,
        _uses_of_prompts,
        _loads,
        _continued_prompts,
        _uses_before_stores,
    ],
)
def test_blocks_leave_in_the_same_order_after_a_restart(
    tmp_path: Path, history: Any, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.tiering.disk.flusher, "_NOTE_USES_EVERY_S", 0.0)
    path = tmp_path / "kv.slab"
    keys = TierHarness.keys(12)
    left = path
    with harness_of(path, len(keys)) as harness:
        history(harness, keys)
        if is_killed:
            left = killed(harness, path)
    with harness_of(tmp_path / "twin.slab", len(keys)) as twin:
        history(twin, keys)
        expected = evicted_in_turn(twin, len(keys))
    with harness_of(left, len(keys)) as harness:
        assert harness.hits(keys) == set(keys)
        assert evicted_in_turn(harness, len(keys)) == expected


# --- another size -------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [1, 3, 64, 200])
def test_growing_keeps_everything(tmp_path: Path, more: int) -> None:
    path = tmp_path / "kv.slab"
    keys = [*TierHarness.keys(36), *(long_key(n) for n in range(4))]
    with harness_of(path, len(keys)) as harness:
        store(harness, keys)
    with harness_of(path, len(keys) + more) as harness:
        assert loaded(harness, keys) == set(keys)
        new = harness.keys(min(more, 60), start=500)
        store(harness, new)
        assert harness.hits(keys) == set(keys)  # there was room
        assert path.stat().st_size == Image(path).geometry.file_bytes
        assert du(path) <= bytes_for(len(keys) + more, ROW_BYTES)
    with harness_of(path, len(keys) + more) as harness:
        assert loaded(harness, keys) == set(keys)
        assert loaded(harness, new) == set(new)


@pytest.mark.parametrize("fewer", [1, 2, 37, 69])
def test_shrinking_keeps_what_was_used_last(tmp_path: Path, fewer: int) -> None:
    path = tmp_path / "kv.slab"
    keys = [
        long_key(number) if number % 9 == 0 else key
        for number, key in enumerate(TierHarness.keys(70))
    ]
    with harness_of(path, len(keys), num_rows=80) as harness:
        _stores(harness, keys)
        order = Random(fewer).sample(keys, len(keys))
        for key in order:
            use(harness, [key])
    num_left = len(keys) - fewer
    with harness_of(path, num_left, num_rows=80) as harness:
        staying = set(order[-num_left:])
        assert harness.hits(keys) == staying
        assert loaded(harness, keys) == staying
        assert not harness.tier.take_seal_failures()
        assert path.stat().st_size == Image(path).geometry.file_bytes
        assert du(path) <= bytes_for(num_left, ROW_BYTES)
    with harness_of(path, len(keys), num_rows=80) as harness:
        assert loaded(harness, keys) == staying


def test_a_shrunken_slab_has_no_holes(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path, 40) as harness:
        store(harness, harness.keys(40))
    with open(path, "r+b") as file:
        file.truncate(Image(path).geometry.slot_offset(10))
    with harness_of(path, 30) as harness:
        assert loaded(harness, harness.keys(40)) == set(harness.keys(10))
        assert du(path) >= path.stat().st_size == Image(path).geometry.file_bytes


# --- without an index ---------------------------------------------------------------------------


def _zeroes(image: Image) -> None:
    index = image.regions["index"]
    write(image.path, index.start, bytes(len(index)))


def _one_page(image: Image) -> None:
    write(image.path, image.geometry.index_offset + 100, b"?")


def _noise(image: Image) -> None:
    index = image.regions["index"]
    write(image.path, index.start, Random(1).randbytes(len(index)))


@pytest.mark.parametrize("spoil", [_zeroes, _one_page, _noise])
def test_the_index_is_rebuilt(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "kv.slab"
    keys = [*TierHarness.keys(66), *(long_key(n) for n in range(4))]
    with harness_of(path, len(keys), num_rows=80) as harness:
        _stores(harness, keys)
    spoil(Image(path))
    with harness_of(path, len(keys), num_rows=80) as harness:
        assert loaded(harness, keys) == set(keys)
    with harness_of(path, len(keys), num_rows=80) as harness:
        assert not disk_of(harness)._slab.index.damaged_pages
        assert harness.hits(keys) == set(keys)
        # Uses are forgotten, but not the order in which blocks were stored.
    spoil(Image(path))
    with harness_of(path, len(keys), num_rows=80) as harness:
        assert evicted_in_turn(harness, 5) == keys[:5]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_reset_has_cut_off_stays_away(tmp_path: Path, is_damaged: bool) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path, 20) as harness:
        store(harness, harness.keys(10))
        harness.begin_epoch(harness.fingerprint)  # of the same name, so that only the cut tells
        store(harness, harness.keys(5, start=20))
    if is_damaged:
        _zeroes(Image(path))
    with harness_of(path, 20) as harness:
        assert harness.hits(harness.keys(30)) == set(harness.keys(5, start=20))


def test_blocks_stored_right_after_a_reset_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the flusher takes a while to write the cut."""
    path = tmp_path / "kv.slab"
    has_stored = threading.Event()
    real = Slab.save_superblock

    def save_superblock(slab: Slab, **changes: Any) -> None:
        has_stored.wait()
        real(slab, **changes)

    with harness_of(path, 20) as harness:
        store(harness, harness.keys(10))
        with monkeypatch.context() as slowly:
            slowly.setattr(Slab, "save_superblock", save_superblock)
            harness.begin_epoch(harness.fingerprint)
            store(harness, harness.keys(5, start=20))
            has_stored.set()
    with harness_of(path, 20) as harness:
        assert loaded(harness, harness.keys(30)) == set(harness.keys(5, start=20))


class _Died(Exception):
    """A crash in the middle of a write."""


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_superblock_is_mended_first(
    tmp_path: Path, damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one copy is damaged, an interrupted write of the other would lose everything."""
    path = tmp_path / "kv.slab"
    with harness_of(path, 20) as harness:
        store(harness, harness.keys(10))
    write(path, SUPERBLOCK_OFFSETS[damaged] + 30, b"????")
    real = SlabFile.write

    def write_half(file: SlabFile, offset: int, data: bytes) -> None:
        if offset in SUPERBLOCK_OFFSETS:
            write(path, offset, data[: PAGE_BYTES // 2])
            raise _Died
        real(file, offset, data)

    with monkeypatch.context() as dying:
        dying.setattr(SlabFile, "write", write_half)
        with pytest.raises(_Died):
            harness_of(path, 20)
    with harness_of(path, 20) as harness:
        assert loaded(harness, harness.keys(10)) == set(harness.keys(10))


# --- writes that a power cut has lost ------------------------------------------------------------


def _is_past(slab: Slab, revision: int) -> bool:
    return slab.superblock.revision > revision


@pytest.mark.parametrize("lost", [0, 1], ids=["first copy", "second copy"])
def test_a_lost_copy_of_the_superblock_does_not_bring_a_former_slab_back(
    tmp_path: Path, lost: int
) -> None:
    """A slab that was emptied for blocks of another size and then reset, with one copy of its
    superblock from before: the former blocks must not be found, and the new ones must not be
    lost."""
    path = tmp_path / "kv.slab"
    with harness_of(path, 20) as harness:
        old = harness.keys(10)
        store(harness, old)
        slab = disk_of(harness)._slab
        while slab.superblock.revision < 10:
            revision = slab.superblock.revision
            harness.begin_epoch(harness.fingerprint)
            wait_until(partial(_is_past, slab, revision), "the cut is in the file")
            store(harness, old)
    before = path.read_bytes()
    with disk_harness(path, 20, row_bytes=2 * ROW_BYTES) as harness:
        new = harness.keys(2, start=50)
        harness.begin_epoch(harness.fingerprint)
        store(harness, new)
    at = SUPERBLOCK_OFFSETS[lost]
    write(path, at, before[at : at + PAGE_BYTES])
    copy = shutil.copy(path, tmp_path / "copy.slab")
    with disk_harness(path, 20, row_bytes=2 * ROW_BYTES) as harness:
        assert loaded(harness, new) == set(new)
    with harness_of(Path(copy), 20) as harness:
        assert not loaded(harness, old)


@pytest.mark.parametrize("number", [1, 7], ids=["short key", "long key"])
def test_an_older_copy_of_a_block_counts_where_the_newer_one_and_its_entry_are_lost(
    tmp_path: Path, number: int
) -> None:
    """A block was evicted and stored again in the same slot; that write is lost, and the index page
    is torn. The older copy is of the same block, so its bytes are right."""
    path = tmp_path / "kv.slab"
    key = long_key(number) if number == 7 else TierHarness.keys(1)[0]
    with harness_of(path, 1) as harness:
        store(harness, [key])
        old = Image(path)
        store(harness, harness.keys(1, start=100))  # the only slot is another block's now
        store(harness, [key])
        assert Image(path).header(0) != old.header(0)
    image = Image(path)
    image.write_slot(0, old.slot_bytes(0))
    with_index = Path(shutil.copy(path, tmp_path / "with_index.slab"))
    _zeroes(image)
    with harness_of(path, 1) as harness:
        assert loaded(harness, [key]) == {key}
    with harness_of(with_index, 1) as harness:  # the index knows of the newer one
        assert not loaded(harness, [key])


# --- other namespaces, and blocks that are there twice ------------------------------------------


def test_another_namespace_is_kept_until_it_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    ours, theirs = TierHarness.keys(10), TierHarness.keys(10, start=100)
    with harness_of(path, 14) as harness:
        store(harness, ours)
    with harness_of(path, 14, namespace="others") as harness:
        assert not harness.hits(ours)
        store(harness, theirs[:4])
    with harness_of(path, 14) as harness:
        assert loaded(harness, ours) == set(ours)
    with harness_of(path, 14, namespace="others") as harness:
        assert loaded(harness, theirs) == set(theirs[:4])
        store(harness, theirs[4:7])  # three of ours have to go
        assert loaded(harness, theirs) == set(theirs[:7])
    with harness_of(path, 14) as harness:
        left = harness.hits(ours)
        assert len(left) == 7
        assert loaded(harness, ours) == left


@pytest.mark.parametrize("key", [*TierHarness.keys(1), long_key(1)], ids=["short", "long"])
@pytest.mark.parametrize("is_older", [True, False])
def test_of_two_slots_with_one_block_the_newer_counts(
    tmp_path: Path, key: OffloadKey, is_older: bool
) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path, 10) as harness:
        store(harness, [key])
        fingerprint = harness.fingerprint
    image = Image(path)
    slot = image.slot_of(key)
    other = (slot + 5) % 10
    payload = payload_of(key, ROW_BYTES)
    if is_older:
        payload = payload[::-1]  # whole, and not to be served
    else:
        write(path, image.geometry.slot_offset(slot) + PAGE_BYTES, payload[:100][::-1])
    stamped = int.from_bytes(image.header(slot)[seal.SEAL_BYTES + 24 :][:8], "little")
    page = bytearray(PAGE_BYTES)
    stamp = encode_stamp(image.superblock.uuid, other, stamped - 1 if is_older else stamped + 1)
    write_slot_header(page, seal.make(key, payload, fingerprint, "twin"), stamp)
    image.write_slot(other, bytes(page) + payload)
    _zeroes(image)
    with harness_of(path, 10) as harness:
        assert loaded(harness, [key]) == {key}
        assert not harness.tier.take_seal_failures()


# --- long keys ----------------------------------------------------------------------------------


def test_long_keys_survive(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    keys = [make_offload_key(bytes([length]) * length, 1) for length in (1, 38, 39, 100, 124)]
    with harness_of(path, 10) as harness:
        store(harness, keys)
        left = killed(harness, path)
    for slab in (path, left):
        with harness_of(slab, 10) as harness:
            assert loaded(harness, keys) == set(keys)


def test_a_long_key_that_cannot_be_read_any_more_is_no_block(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    keys = [long_key(1), long_key(2)]
    with harness_of(path, 10) as harness:
        store(harness, keys)
    image = Image(path)
    write(path, image.geometry.slot_offset(image.slot_of(keys[0])) + 150, b"?")
    with harness_of(path, 10) as harness:
        harness.step()
        assert [event.keys for event in harness.events] == [[keys[1]]]
        assert loaded(harness, keys) == {keys[1]}


# --- what is told -------------------------------------------------------------------------------


def told(harness: TierHarness, removed: bool) -> list[OffloadKey]:
    return [key for event in harness.events if event.removed is removed for key in event.keys]


def test_blocks_of_an_earlier_engine_are_announced_once(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    num_blocks = 1500  # more than are announced at once
    with harness_of(path, num_blocks) as harness:
        keys = harness.keys(num_blocks)
        for start in range(0, num_blocks, 60):
            store(harness, keys[start : start + 60])
    with harness_of(path, num_blocks) as harness:
        for _ in range(8):
            harness.step()
        assert sorted(told(harness, removed=False)) == sorted(keys)
        assert not told(harness, removed=True)


def test_what_leaves_before_it_was_announced_is_not_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    keys = TierHarness.keys(10)
    with harness_of(path, 10) as harness:
        _stores(harness, keys)
    with harness_of(path, 10) as harness:
        new = harness.keys(2, start=50)
        harness.wait_for(harness.store(new))
        harness.step()
        assert not told(harness, removed=True)
        assert sorted(told(harness, removed=False)) == sorted([*keys[2:], *new])


def test_a_damaged_block_is_announced_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    keys = TierHarness.keys(10)
    with harness_of(path, 10) as harness:
        store(harness, keys)
    image = Image(path)
    write(path, image.geometry.slot_offset(image.slot_of(keys[3])) + PAGE_BYTES, b"?????")
    with harness_of(path, 10) as harness:
        harness.step()
        assert loaded(harness, keys) == set(keys) - {keys[3]}
        assert harness.tier.take_seal_failures() == {SealFailure.DIGEST: 1}
        harness.step()
        assert told(harness, removed=True) == [keys[3]]
        assert sorted(told(harness, removed=False)) == sorted(keys)


def test_an_engine_has_work_until_the_index_names_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may be killed as soon as it reports no pending work."""
    may_write = threading.Event()

    def write_later(*args: Any) -> None:
        assert may_write.wait(PATIENCE_S)
        write_index(*args)

    path = tmp_path / "kv.slab"
    with disk_harness(path) as harness:
        wait_until(lambda: not harness.tier.has_pending_work(), "the index is in the file")
        monkeypatch.setattr(kvtier.tiering.disk.flusher, "write_index", write_later)
        harness.wait_for(harness.store(harness.keys(4)))
        assert harness.tier.has_pending_work()
        may_write.set()
        wait_until(lambda: not harness.tier.has_pending_work(), "the index is in the file")
        with SlabReader(path) as reader:
            assert len(reader.snapshot().live_slots()) == 4
