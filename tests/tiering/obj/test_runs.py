"""Small blocks share objects, and every engine finds them: by following the runs of a prompt."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore
from xxhash import xxh3_64_intdigest

from kvtier.base import LookupResult, OffloadingSpec, OffloadKey, make_offload_key
from kvtier.config.engine import AttentionKind, OffloadingGroupConfig
from kvtier.seal import SealFailure
from kvtier.testing import TierHarness
from kvtier.testing.harness import sample_spec
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from kvtier.tiering.obj.runs import Run, blocks_per_run, header_of, read_header
from tests.tiering.obj.backing import ObjBacking
from tests.tiering.patience import PATIENCE_S

NAMESPACE = "these weights"
ROW_BYTES = 8192
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def engine_at(root: Path, num_slots: int = 96, row_bytes: int = ROW_BYTES) -> TierHarness:
    """An engine that knows nothing yet of what others have stored below a directory."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ObjSecondaryTierManager(spec, view, "obj", url=f"file://{root}", concurrency=2)

    return TierHarness(
        make_tier,
        num_slots=num_slots,
        row_bytes=row_bytes,
        patience_s=PATIENCE_S,
        namespace=NAMESPACE,
    )


def path_keys(path: Sequence[int]) -> list[OffloadKey]:
    """The keys of a prompt: each depends on all blocks before, as an engine's hashes do."""
    return [
        make_offload_key(sha256(bytes(path[: end + 1])).digest(), 0) for end in range(len(path))
    ]


def objects_below(root: Path) -> list[Path]:
    """The objects with blocks."""
    found = (path for path in root.rglob("*") if path.is_file())
    return [path for path in found if path.parent.name != "made-of"]


def num_found(engine: TierHarness, keys: Sequence[OffloadKey]) -> int:
    """Blocks of a prompt that are found without a gap."""
    answers = engine.look_up_batch(keys)
    return next((at for at, answer in enumerate(answers) if answer is not HIT), len(answers))


def store(engine: TierHarness, keys: Sequence[OffloadKey]) -> None:
    (report,) = engine.wait_for(engine.store(keys))
    assert report.moved == set(keys)


def load(engine: TierHarness, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    (report,) = engine.wait_for(engine.load(keys))
    return report.moved


def serve(engine: TierHarness, keys: Sequence[OffloadKey]) -> int:
    """What an engine does with a prompt: look it up, load what is there, compute and store the
    rest. Returns how many blocks were loaded."""
    count = num_found(engine, keys)
    moved = load(engine, keys[:count]) if count else set()
    missing = [key for key in keys if key not in moved]
    if missing:
        store(engine, missing)
    return len(moved)


def test_blocks_of_a_prompt_share_objects_and_come_back(tmp_path: Path) -> None:
    keys = path_keys(range(130))
    with engine_at(tmp_path, num_slots=140) as writer:
        store(writer, keys)
    assert len(objects_below(tmp_path)) == 3  # 64, 64 and 2 blocks
    with engine_at(tmp_path, num_slots=140) as reader:
        assert num_found(reader, keys) == 130
        assert load(reader, keys) == set(keys)


def test_large_blocks_have_objects_of_their_own(tmp_path: Path) -> None:
    keys = path_keys(range(3))
    with engine_at(tmp_path, num_slots=8, row_bytes=1 << 20) as writer:
        store(writer, keys)
    assert len(objects_below(tmp_path)) == 3


def test_blocks_of_a_window_have_objects_of_their_own() -> None:
    config = sample_spec(ROW_BYTES, 8, NAMESPACE, "engine").config
    assert blocks_per_run(config, ROW_BYTES) == 64
    assert blocks_per_run(config, 1 << 19) == 8
    window = OffloadingGroupConfig(16, ("w",), 2, AttentionKind.SLIDING_WINDOW, 64)
    hybrid = replace(config, groups=(*config.groups, window))
    assert blocks_per_run(hybrid, ROW_BYTES) == 1


def test_prompts_with_a_common_beginning(tmp_path: Path) -> None:
    one = path_keys([*range(20)])
    other = path_keys([*range(10), *range(100, 110)])
    with engine_at(tmp_path) as first:
        assert serve(first, one) == 0
    with engine_at(tmp_path) as second:
        assert serve(second, other) == 10
    with engine_at(tmp_path) as third:
        assert (num_found(third, other), num_found(third, one)) == (20, 20)
        assert load(third, [*one, *other[10:]]) == {*one, *other}
    assert len(objects_below(tmp_path)) == 2


def test_a_store_around_blocks_that_are_there(tmp_path: Path) -> None:
    keys = path_keys(range(13))
    with engine_at(tmp_path) as writer:
        store(writer, keys[:4])
        store(writer, keys[6:10])
        store(writer, keys)
    with engine_at(tmp_path) as reader:
        assert num_found(reader, keys) == 13
        assert load(reader, keys) == set(keys)


def test_a_block_within_a_run_is_found_by_an_engine_that_knows_the_run(tmp_path: Path) -> None:
    keys = path_keys(range(12))
    with engine_at(tmp_path) as writer:
        store(writer, keys)
        assert writer.look_up(keys[5]) is HIT
    with engine_at(tmp_path) as reader:
        assert reader.look_up(keys[5]) is MISS
        assert num_found(reader, keys[:2]) == 2
        assert load(reader, keys[7:9]) == set(keys[7:9])


def test_a_run_that_was_removed_and_written_again_with_other_blocks(tmp_path: Path) -> None:
    keys = path_keys(range(8))
    other = path_keys([*range(3), 77, 78])
    with engine_at(tmp_path) as stale:
        store(stale, keys)
        (path,) = objects_below(tmp_path)
        path.unlink()
        with engine_at(tmp_path) as writer:
            store(writer, other)
        assert load(stale, keys) <= set(keys[:3])
        assert load(stale, keys) == set(keys[:3])  # now it has seen what is there
        assert stale.tier.take_seal_failures() == {}
        assert path.exists()
        store(stale, keys)
    with engine_at(tmp_path) as reader:
        assert (num_found(reader, keys), num_found(reader, other)) == (8, 5)


def test_an_object_that_another_engine_has_written_stays_when_an_older_one_is_damaged(
    tmp_path: Path,
) -> None:
    keys = path_keys(range(8))
    with engine_at(tmp_path) as stale:
        store(stale, keys)
        (old,) = objects_below(tmp_path)
        old.unlink()
        with engine_at(tmp_path) as writer:
            store(writer, keys[3:])
        (new,) = objects_below(tmp_path)
        before = new.stat()
        old.write_bytes(b"somebody else's")
        assert isinstance(stale.tier, ObjSecondaryTierManager)
        stale.tier._lookups.forget(keys)  # as if seconds had passed
        store(stale, keys[3:])
        assert (new.stat().st_ino, new.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert load(stale, keys[3:]) == set(keys[3:])


def test_a_damaged_block_takes_its_object_along_and_all_are_stored_again(tmp_path: Path) -> None:
    keys = path_keys(range(6))
    with engine_at(tmp_path) as engine:
        store(engine, keys)
        assert isinstance(engine.tier, ObjSecondaryTierManager)
        backing = ObjBacking(engine.tier, LocalStore(tmp_path))
        block = bytearray(backing.read(engine.fingerprint, keys[2]))
        block[-1] ^= 1
        backing.write(engine.fingerprint, keys[2], bytes(block))
        assert load(engine, keys) == {*keys} - {keys[2]}
        assert engine.tier.take_seal_failures() == {SealFailure.DIGEST: 1}
        assert objects_below(tmp_path) == []
        store(engine, keys)
        assert load(engine, keys) == set(keys)


@pytest.mark.parametrize("is_header", [True, False], ids=["run", "blocks"])
def test_an_object_of_a_newer_release_is_a_miss_and_stays(tmp_path: Path, is_header: bool) -> None:
    keys = path_keys(range(6))
    with engine_at(tmp_path) as writer:
        store(writer, keys)
    (path,) = objects_below(tmp_path)
    newer = bytearray(path.read_bytes())
    if is_header:
        newer[7] = 2
    else:
        run = read_header(bytes(newer), len(newer))
        assert isinstance(run, Run)
        for position in range(len(keys)):
            newer[run.start_of(position) + 8] = 9
    path.write_bytes(newer)
    with engine_at(tmp_path) as engine:
        assert num_found(engine, keys) == (0 if is_header else 6)
        assert load(engine, keys) == set()
        if is_header:
            assert not engine.wait_for(engine.store(keys))[0].moved
        assert engine.tier.take_seal_failures().keys() <= {SealFailure.FORMAT}
    assert path.read_bytes() == newer


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=7)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["one", "other"]), PROMPT)
    | st.tuples(st.just("remove"), st.integers(0, 100)),
    min_size=1,
    max_size=8,
)


@given(ACTIONS)
def test_what_an_engine_has_served_is_found_by_a_new_one(
    actions: list[tuple[str, list[int] | int]],
) -> None:
    """Two engines serve prompts of one tree, and somebody removes objects. Bytes are compared by
    the harness. A prompt that was served after the last removal is found by a new engine."""
    with TemporaryDirectory() as directory:
        root = Path(directory) / "objects"
        with engine_at(root) as one, engine_at(root) as other:
            engines = {"one": one, "other": other}
            fresh: list[list[OffloadKey]] = []
            for who, what in actions:
                if isinstance(what, int):
                    found = sorted(objects_below(root))
                    if found:
                        found[what % len(found)].unlink()
                    fresh = []
                else:
                    keys = path_keys(what)
                    serve(engines[who], keys)
                    fresh.append(keys)
        with engine_at(root) as reader:
            for keys in fresh:
                assert num_found(reader, keys) == len(keys)
        shutil.rmtree(root)


# --- the header ----------------------------------------------------------------------------------

KEYS = path_keys(range(5))
HEADER = header_of(KEYS, 4352)


def test_a_header_says_what_was_stored() -> None:
    assert read_header(HEADER + b"more", 4096) == Run(tuple(KEYS), 4352, len(HEADER))
    assert read_header(HEADER[:100], 100) == len(HEADER)


@given(st.integers(0, 8 * len(HEADER) - 1))
def test_no_flipped_bit_of_a_header_gets_past(bit: int) -> None:
    damaged = bytearray(HEADER)
    damaged[bit // 8] ^= 1 << bit % 8
    assert isinstance(read_header(bytes(damaged), 4096), SealFailure)


@given(st.binary(max_size=300), st.integers(0, len(HEADER)))
def test_anything_else_is_no_header(tail: bytes, kept: int) -> None:
    content = HEADER[:kept] + tail
    if content[: len(HEADER)] != HEADER:
        assert isinstance(read_header(content, 4096), SealFailure)


def with_checksum(count: int, names: bytes) -> bytes:
    """A header as somebody can make it who does not keep to the format."""
    head = struct.Struct("<7sBIII")
    fields = head.pack(b"KVTRUN\0", 1, 4352, head.size + 8 + len(names), count)
    checksum = xxh3_64_intdigest(fields + bytes(8) + names)
    return fields + struct.pack("<Q", checksum) + names


FORGED = {
    "more blocks than keys": with_checksum(64, b"\x02\x00ab"),
    "a key beyond the end": with_checksum(1, b"\xff\xffab"),
    "half a length": with_checksum(1, b"\x02"),
    "more than the keys": with_checksum(1, b"\x02\x00abc"),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_header_that_somebody_has_forged(forged: bytes, tmp_path: Path) -> None:
    assert read_header(with_checksum(1, b"\x02\x00ab"), 4096) == Run((OffloadKey(b"ab"),), 4352, 32)
    assert read_header(forged, 4096) is SealFailure.HEADER
    keys = path_keys(range(4))
    with engine_at(tmp_path) as writer:
        store(writer, keys)
    (path,) = objects_below(tmp_path)
    path.write_bytes(forged + bytes(5000))
    with engine_at(tmp_path) as engine:
        assert num_found(engine, keys) == 0
        store(engine, keys)
        assert load(engine, keys) == set(keys)


@pytest.mark.parametrize("version", [0, 2])
def test_a_header_of_another_release(version: int) -> None:
    other = bytearray(HEADER)
    other[7] = version
    assert read_header(bytes(other), 4096) is SealFailure.FORMAT
