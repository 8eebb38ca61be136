"""Whatever happens to the bytes of a slab, a damaged block is noticed, counted and forgotten, every
other block is served, and no wrong byte is. The harness compares every load with the block's
payload."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import seal
from kvtier.base import OffloadKey, make_offload_key
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engine import Engine, EngineConfig, RequestResult, make_connector, offloading_config
from kvtier.seal import SealFailure
from kvtier.testing import TierHarness
from kvtier.tiering.disk.ownership import SlabRefused
from kvtier.tiering.io.page import PAGE_BYTES
from kvtier.tiering.manager import TieringOffloadingManager
from tests.engine.models import FULL, random_tokens
from tests.engine.oracle import assert_same
from tests.tiering.disk.crash.image import Image, write
from tests.tiering.disk.harness import bytes_for, disk_harness, du
from tests.tiering.ways import demand_rows_hold_whole_blocks_or_nothing

NUM_BLOCKS = 70
"""More than fit on one page of the index."""
AT_ONCE = 35
ROW_BYTES = 4096
KEYS = [
    # Every seventh key is too long for the index.
    make_offload_key(b"block-%026d" % n * (2 if n % 7 == 0 else 1), 0)
    for n in range(NUM_BLOCKS)
]
SOME = settings(max_examples=12)


def harness_of(path: Path, **options: Any) -> TierHarness:
    return disk_harness(path, NUM_BLOCKS, row_bytes=ROW_BYTES, num_rows=AT_ONCE, **options)


def store_all(harness: TierHarness, keys: Sequence[OffloadKey] = KEYS) -> None:
    for start in range(0, len(keys), AT_ONCE):
        [report] = harness.wait_for(harness.store(keys[start : start + AT_ONCE]))
        assert report.result.success


def load_all(
    harness: TierHarness, keys: Sequence[OffloadKey] = KEYS
) -> tuple[set[OffloadKey], Counter[SealFailure]]:
    """The blocks that were served, and the number refused, by reason."""
    served: set[OffloadKey] = set()
    for start in range(0, len(keys), AT_ONCE):
        [report] = harness.wait_for(harness.load(keys[start : start + AT_ONCE]))
        served |= report.moved
    return served, harness.tier.take_seal_failures()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full slab that no engine has open."""
    path = tmp_path_factory.mktemp("pristine") / "kv.slab"
    with harness_of(path) as harness:
        store_all(harness)
    return path


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path for a damaged copy."""
    return tmp_path_factory.mktemp("spoilt") / "kv.slab"


@contextmanager
def opened_copy(pristine: Path, spoilt: Path, spoil: Callable[[Image], None]) -> Iterator[Any]:
    """An engine that opens the damaged slab."""
    shutil.copy(pristine, spoilt)
    spoil(Image(spoilt))
    with harness_of(spoilt) as harness:
        yield harness


def key_in(image: Image, slot: int) -> OffloadKey:
    return seal.read(image.header(slot)[: seal.SEAL_BYTES]).key


def demand_exactly_lost(harness: TierHarness, lost: set[OffloadKey]) -> None:
    """Check that exactly these blocks are refused, counted and forgotten."""
    hits = harness.hits(KEYS)
    served, refused = load_all(harness)
    assert served == set(KEYS) - lost
    assert refused.total() == len(hits & lost)
    assert harness.hits(KEYS) == served
    assert not load_all(harness)[1]


# --- bits ---------------------------------------------------------------------------------------


def flip(image: Image, offset: int, bit: int) -> None:
    write(image.path, offset, bytes([image.content[offset] ^ 1 << bit]))


PLACES = st.tuples(st.integers(0, 2**20), st.integers(0, 7))
"""An offset in a part of the file, and a bit."""


@SOME
@given(st.dictionaries(st.integers(0, NUM_BLOCKS - 1), PLACES, min_size=1), st.booleans())
def test_any_bit_of_slots(
    pristine: Path, spoilt: Path, flips: dict[int, tuple[int, int]], in_header: bool
) -> None:
    image = Image(pristine)
    size = PAGE_BYTES if in_header else image.geometry.slot_bytes

    def spoil(copy: Image) -> None:
        for slot, (place, bit) in flips.items():
            flip(copy, copy.geometry.slot_offset(slot) + place % size, bit)

    with opened_copy(pristine, spoilt, spoil) as harness:
        demand_exactly_lost(harness, {key_in(image, slot) for slot in flips})


def test_a_damaged_block_does_not_reach_its_row(pristine: Path, spoilt: Path) -> None:
    image = Image(pristine)
    offset = image.geometry.slot_offset(3) + image.geometry.slot_bytes - 1
    with opened_copy(pristine, spoilt, lambda copy: flip(copy, offset, 0)) as harness:
        demand_rows_hold_whole_blocks_or_nothing(harness, key_in(image, 4), key_in(image, 3))


@SOME
@given(st.sampled_from(["superblock 0", "superblock 1"]), st.lists(PLACES, min_size=1))
def test_any_bit_of_anything_else(
    pristine: Path, spoilt: Path, superblock: str, flips: list[tuple[int, int]]
) -> None:
    """All regions but both superblocks: two copies survive one failure, not two."""

    def spoil(copy: Image) -> None:
        for region in (superblock, "holder", "control", "index"):
            pages = copy.regions[region]
            for place, bit in flips:
                flip(copy, pages[place % len(pages)], bit)

    with opened_copy(pristine, spoilt, spoil) as harness:
        demand_exactly_lost(harness, set())


def test_any_bit_while_the_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path) as harness:
        store_all(harness)
        image = Image(path)
        step = image.geometry.file_bytes // 100 | 1  # not a multiple of anything in the file
        for offset in range(3, image.geometry.file_bytes, step):
            lost = [key_in(image, slot) for slot in image.slots_in(range(offset, offset + 1))]
            flip(image, offset, offset % 8)
            near = list(dict.fromkeys([*lost, *KEYS[:3]]))
            served, refused = load_all(harness, near)
            assert served == set(near).difference(lost)
            assert refused.total() == len(lost)
            assert not harness.hits(lost)
            if lost:
                store_all(harness, lost)
                image = Image(path)
            else:
                write(path, offset, image.content[offset : offset + 1])
        assert load_all(harness) == (set(KEYS), Counter())


# --- ranges -------------------------------------------------------------------------------------


@SOME
@given(st.integers(0, 2**30), st.integers(1, 200_000))
def test_zeroes_anywhere(pristine: Path, spoilt: Path, place: int, length: int) -> None:
    image = Image(pristine)
    start = place % image.geometry.file_bytes
    zeroed = range(start, min(start + length, image.geometry.file_bytes))
    lost = {key_in(image, slot) for slot in image.slots_in(zeroed)}

    def spoil(copy: Image) -> None:
        write(copy.path, zeroed.start, bytes(len(zeroed)))

    if zeroed.start < PAGE_BYTES and zeroed.stop > PAGE_BYTES:
        lost = set(KEYS)  # both copies of the superblock
        if zeroed.start < 8:
            with (
                pytest.raises(SlabRefused, match="not a slab"),
                opened_copy(pristine, spoilt, spoil),
            ):
                pass
            return
    with opened_copy(pristine, spoilt, spoil) as harness:
        served, refused = load_all(harness)
        # If the end of the page was zero before, nothing has changed.
        assert served >= set(KEYS) - lost
        assert refused.total() <= len(lost)
        assert harness.hits(KEYS) == served


@SOME
@given(st.integers(0, 2**30))
def test_cut_off_anywhere(pristine: Path, spoilt: Path, place: int) -> None:
    image = Image(pristine)
    length = place % image.geometry.file_bytes
    whole = [
        slot
        for slot in range(NUM_BLOCKS)
        if image.geometry.slot_offset(slot) + image.geometry.slot_bytes <= length
    ]

    def spoil(copy: Image) -> None:
        with open(copy.path, "r+b") as file:
            file.truncate(length)

    if length < 8:
        with pytest.raises(SlabRefused, match="not a slab"), opened_copy(pristine, spoilt, spoil):
            pass
        return
    with opened_copy(pristine, spoilt, spoil) as harness:
        served, _ = load_all(harness)
        assert served == {key_in(image, slot) for slot in whole}
        assert spoilt.stat().st_size == image.geometry.file_bytes
        assert image.geometry.file_bytes <= du(spoilt) <= bytes_for(NUM_BLOCKS, ROW_BYTES)


def test_cut_off_while_the_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path) as harness:
        store_all(harness)
        image = Image(path)
        middle = image.geometry.slot_offset(NUM_BLOCKS // 2) + 100
        with open(path, "r+b") as file:
            file.truncate(middle)
        served, _ = load_all(harness)
        assert served == {key_in(image, slot) for slot in range(NUM_BLOCKS // 2)}
        assert harness.hits(KEYS) == served
    with harness_of(path) as harness:
        assert load_all(harness)[0] == served


# --- slots in the wrong place -------------------------------------------------------------------


def swap(image: Image, one: int, other: int) -> None:
    image.write_slot(one, image.slot_bytes(other))
    image.write_slot(other, image.slot_bytes(one))


@pytest.mark.parametrize("step", [1, 9, 64])
def test_slots_swapped(pristine: Path, spoilt: Path, step: int) -> None:
    pairs = list(pairwise(range(0, NUM_BLOCKS, step)))[::2]
    lost = {key_in(Image(pristine), slot) for pair in pairs for slot in pair}

    def spoil(copy: Image) -> None:
        for one, other in pairs:
            swap(copy, one, other)

    with opened_copy(pristine, spoilt, spoil) as harness:
        demand_exactly_lost(harness, lost)


def test_slots_swapped_while_the_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with harness_of(path) as harness:
        store_all(harness)
        image = Image(path)
        swap(image, 3, 40)
        demand_exactly_lost(harness, {key_in(image, 3), key_in(image, 40)})


@pytest.mark.parametrize(
    ("namespace", "failure"),
    [("these weights", SealFailure.STALE), ("other weights", SealFailure.FINGERPRINT)],
)
@pytest.mark.parametrize("is_running", [False, True])
def test_slots_of_another_slab(
    pristine: Path, tmp_path: Path, namespace: str, failure: SealFailure, is_running: bool
) -> None:
    """Two slabs with the same geometry, keys and slots."""
    theirs = tmp_path / "theirs.slab"
    with harness_of(theirs, namespace=namespace) as harness:
        store_all(harness)
    foreign = Image(theirs)
    slots = [0, 1, 2, 33, 69]
    path = tmp_path / "kv.slab"
    shutil.copy(pristine, path)
    image = Image(path)

    def transplant() -> None:
        for slot in slots:
            assert key_in(foreign, slot) == key_in(image, slot)
            image.write_slot(slot, foreign.slot_bytes(slot))

    if not is_running:
        transplant()
    with harness_of(path) as harness:
        if is_running:
            transplant()
        hits = harness.hits(KEYS)
        served, refused = load_all(harness)
        lost = {key_in(image, slot) for slot in slots}
        assert served == set(KEYS) - lost
        assert refused == Counter({failure: len(hits & lost)})


@pytest.mark.parametrize("namespace", ["these weights", "other weights"])
def test_the_index_of_another_slab(pristine: Path, tmp_path: Path, namespace: str) -> None:
    theirs = tmp_path / "theirs.slab"
    with harness_of(theirs, namespace=namespace) as harness:
        store_all(harness, KEYS[::-1])
    foreign = Image(theirs)

    def spoil(copy: Image) -> None:
        start = copy.geometry.index_offset
        write(copy.path, start, foreign.content[start : copy.geometry.file_bytes])

    with opened_copy(pristine, tmp_path / "kv.slab", spoil) as harness:
        demand_exactly_lost(harness, set())


# --- an older generation ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 7], ids=["short key", "long key"])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_older_generation_of_the_same_slot(
    tmp_path: Path, number: int, is_running: bool
) -> None:
    path = tmp_path / "kv.slab"
    key = KEYS[number]
    harness = harness_of(path)
    with harness:
        store_all(harness)
        old = Image(path)
        slot = old.slot_of(key)
        flip(old, old.geometry.slot_offset(slot) + 5000 % old.geometry.slot_bytes, 0)
        assert load_all(harness, [key])[0] == set()  # so that it is stored again
        store_all(harness, [key])
        new = Image(path)
        assert new.slot_of(key) == slot
        assert new.header(slot) != old.header(slot)
        if is_running:
            new.write_slot(slot, old.slot_bytes(slot))
            assert load_all(harness, [key]) == (set(), Counter({SealFailure.STALE: 1}))
            return
    new.write_slot(slot, old.slot_bytes(slot))
    with harness_of(path) as harness:
        hits = harness.hits([key])
        served, refused = load_all(harness, [key])
        assert not served
        assert refused == Counter({SealFailure.STALE: len(hits)})
        assert load_all(harness)[0] == set(KEYS) - {key}


# --- the engine above ---------------------------------------------------------------------------

PROMPTS = [random_tokens(seed, 100) for seed in range(4)]
ENGINE = EngineConfig(block_tokens=(8,), num_blocks=(64,), token_budget=80)


def serve(path: Path, spoil: Callable[[], None]) -> tuple[list[RequestResult], Counter[str]]:
    """The answers and counters of a new engine on this slab. `spoil`: damages the slab during the
    run."""
    options = {
        "cpu_bytes_to_use": "2MiB",
        "prefill_tokens_per_s": 0,  # or a busy machine makes loading look slow
        "secondary_tiers": [
            {"type": "disk", "path": str(path), "max_bytes": "8MiB", "load_timeout_ms": 60_000}
        ],
    }
    config = offloading_config(FULL, ENGINE, options, f"test-{uuid.uuid4().hex}")
    connector = make_connector(config)
    scheduler = connector.scheduler
    assert isinstance(scheduler, OffloadingConnectorScheduler)
    assert isinstance(scheduler.manager, TieringOffloadingManager)
    engine = Engine(FULL, ENGINE, connector)
    try:
        results = engine.generate(PROMPTS[:2], 6, keep_logits=True)
        spoil()
        results += engine.generate(PROMPTS[2:], 6, keep_logits=True)
        assert engine.drain()
        stats = scheduler.get_stats()
        assert stats is not None
        return results, Counter({name: int(value) for name, value in stats.counters.items()})
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def served_slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "kv.slab"
    serve(path, lambda: None)
    return path


def _every_other_payload(image: Image) -> None:
    for slot in range(0, image.geometry.num_slots, 2):
        flip(image, image.geometry.slot_offset(slot) + PAGE_BYTES + 17 * slot, 3)


def _every_header(image: Image) -> None:
    for slot in range(image.geometry.num_slots):
        flip(image, image.geometry.slot_offset(slot) + 300, 3)


def _neighbours_swapped(image: Image) -> None:
    for slot in range(0, image.geometry.num_slots - 1, 2):
        swap(image, slot, slot + 1)


def _no_index(image: Image) -> None:
    index = image.regions["index"]
    write(image.path, index.start, bytes(len(index)))


def _half_the_file(image: Image) -> None:
    with open(image.path, "r+b") as file:
        file.truncate(image.geometry.slot_offset(20) + 50)


def _nothing(image: Image) -> None:
    return


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize(
    ("spoil", "is_refused"),
    [
        (_nothing, False),
        (_every_other_payload, True),
        (_every_header, True),
        (_neighbours_swapped, True),
        (_no_index, False),
        (_half_the_file, False),
    ],
)
def test_the_tokens_stay_the_same(
    served_slab: Path,
    tmp_path: Path,
    spoil: Callable[[Image], None],
    is_refused: bool,
    is_running: bool,
) -> None:
    path = tmp_path / "kv.slab"
    shutil.copy(served_slab, path)
    if not is_running:
        spoil(Image(path))
    results, counters = serve(path, lambda: spoil(Image(path)) if is_running else None)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert_same(result, FULL, prompt)
    failures = sum(count for name, count in counters.items() if "kvtier_tier_seal_failures" in name)
    assert (failures > 0) == is_refused, counters
    if spoil in (_nothing, _no_index):
        assert all(result.num_loaded_tokens for result in results)
