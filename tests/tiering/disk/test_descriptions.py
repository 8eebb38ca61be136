"""What the namespaces in a slab are made of: kept in the superblock, and logged at a cold start."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import NamespaceDescription
from kvtier.tiering.disk.inspector import SlabInspector
from kvtier.tiering.disk.layout import SUPERBLOCK_OFFSETS, Geometry, Superblock
from kvtier.tiering.io.page import PAGE_BYTES, close_page
from tests.config.sample import make_config
from tests.tiering.cold_starts import (
    DIFFERENCES,
    KEYS,
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
from tests.tiering.disk.harness import bytes_for, disk_harness, disk_of, du
from tests.tiering.patience import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def fill(path: Path, change: Change = served, num_blocks: int = 5) -> str:
    """Store blocks. Returns the name of their namespace."""
    with engines(change), disk_harness(path) as harness:
        if num_blocks:
            store(harness, KEYS[:num_blocks])
        return harness.fingerprint.hex()


def described(path: Path) -> dict[str, NamespaceDescription]:
    with SlabInspector(path) as inspector:
        return dict(inspector.descriptions())


def without_descriptions(path: Path) -> None:
    """Make the slab one of an earlier release, which wrote zeros there."""
    with path.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset)
            page = bytearray(file.read(PAGE_BYTES))
            page[256:] = bytes(PAGE_BYTES - 256)
            close_page(page)
            file.seek(offset)
            file.write(page)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_cold_start_names_what_differs(
    what: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    change, text = DIFFERENCES[what]
    line = line_of_a_start(lambda: disk_harness(path), change, caplog)
    assert line.startswith(f"{path} holds 5 blocks of another namespace of the model org/llama: ")
    assert text in line
    assert levels(caplog) == [logging.WARNING]


def test_blocks_of_another_size_are_lost_and_it_is_said_whose_they_were(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    with engines(), disk_harness(path, row_bytes=16384):
        pass
    (line,) = [text for text in caplog.messages if "the slab is emptied" in text]
    assert "They were of the model org/llama; row_bytes: 8192, now 16384; worker_kv_bytes" in line


def test_the_closest_of_several_namespaces_is_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for change in (other_model, served, DIFFERENCES["dtype"][0]):
        fill(path, change)
    line = line_of_a_start(lambda: disk_harness(path), DIFFERENCES["length"][0], caplog)
    assert line.endswith("It differs in max_model_len: 4096, now 2048")
    assert len(described(path)) == 4


def test_another_model_is_no_reason_to_warn(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path)
    line = line_of_a_start(lambda: disk_harness(path), other_model, caplog)
    assert "holds 5 blocks of the model org/llama, and this engine runs org/qwen" in line
    assert levels(caplog) == [logging.INFO]


def test_a_warm_and_an_empty_start_say_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fill(path, num_blocks=0)
        fill(path, DIFFERENCES["length"][0])
        fill(path, DIFFERENCES["length"][0])
    assert lines(caplog) == []


def test_an_earlier_slab_is_warm_and_described_from_then_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(path)
    without_descriptions(path)
    assert described(path) == {}
    line = line_of_a_start(lambda: disk_harness(path), other_model, caplog)
    assert f"another namespace, {name[:8]}, and none of this engine's. There is no desc" in line
    assert levels(caplog) == [logging.WARNING]
    with engines(), disk_harness(path) as harness:
        assert harness.hits(KEYS) == set(KEYS)
    assert described(path)[name].model == "org/llama"


def test_other_hash_roots_are_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, with_root("1a2b (sha256, the seed in PYTHONHASHSEED)"))
    line = line_of_a_start(lambda: disk_harness(path), with_root("3c4d (sha256)"), caplog)
    assert "5 blocks of this engine's namespace" in line
    assert "1a2b (sha256, the seed in PYTHONHASHSEED), now 3c4d (sha256)" in line
    assert "PYTHONHASHSEED" in line.partition("now 3c4d")[2]


def test_a_namespace_after_a_reset_is_described(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engines(), disk_harness(path) as harness:
        store(harness)
        fingerprint = harness.spec.config.fingerprint(b"epoch")
        harness.begin_epoch(fingerprint)
        store(harness)
    assert described(path)[fingerprint.hex()].ingredients["after_reset"] is not None
    line = line_of_a_start(lambda: disk_harness(path), served, caplog)
    assert line.endswith(f"It differs in after_reset: {fingerprint.hex()[:8]}, now none")


def test_a_description_goes_with_the_last_block_of_its_namespace(path: Path) -> None:
    first = fill(path)
    with engines(other_model), disk_harness(path) as harness:
        for start in range(0, 32, 8):
            store(harness, harness.keys(8, start=start))
        own = harness.fingerprint.hex()
    with engines(other_model), disk_harness(path):
        pass
    assert described(path).keys() == {own}
    assert first != own


def test_the_file_is_no_larger_for_its_descriptions(path: Path) -> None:
    fill(path)
    assert path.stat().st_size == Geometry(8192, 32).file_bytes
    assert du(path) <= bytes_for(32)


def test_more_descriptions_than_fit_leave_out_the_last(path: Path) -> None:
    settings = tuple((f"config.field {number}", os.urandom(30).hex()) for number in range(60))
    sample = make_config().describe()
    many = tuple(
        replace(
            sample, namespace=f"{number:032x}", ingredients={**sample.ingredients, **dict(settings)}
        )
        for number in range(100)
    )
    noise = tuple(
        replace(each, ingredients={f"x{n}": os.urandom(30).hex() for n in range(40)})
        for each in many[:10]
    )
    for descriptions in (many, noise):
        superblock = Superblock(bytes(16), Geometry(8192, 5), descriptions=descriptions)
        found = Superblock.decode(superblock.encode())
        assert replace(found, descriptions=()) == replace(superblock, descriptions=())
        names = [each.namespace for each in found.descriptions]
        assert names == [each.namespace for each in descriptions[: len(names)]]
        assert names


@pytest.mark.parametrize("damage", [b"MADE\xff\xff\xff\xff", b"MADE\x40\x00\x00\x00junk", b"ELSE"])
def test_descriptions_that_cannot_be_read_take_no_block_with_them(
    path: Path, damage: bytes
) -> None:
    fill(path)
    with path.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset)
            page = bytearray(file.read(PAGE_BYTES))
            page[256 : 256 + len(damage)] = damage
            close_page(page)
            file.seek(offset)
            file.write(page)
    assert described(path) == {}
    with engines(), disk_harness(path) as harness:
        assert harness.hits(KEYS) == set(KEYS)


@pytest.mark.parametrize("num_copies", [0, 1])
def test_an_engine_killed_while_it_writes_a_description(path: Path, num_copies: int) -> None:
    """Nothing, or only the first copy of the superblock, has been written."""
    fill(path)
    before = path.with_name("before")
    shutil.copyfile(path, before)
    with engines(other_model), disk_harness(path):
        written = path.read_bytes()[: len(SUPERBLOCK_OFFSETS) * PAGE_BYTES]
    with before.open("r+b") as file:
        file.write(written[: num_copies * PAGE_BYTES])
    assert len(described(before)) == 1 + num_copies
    with engines(), disk_harness(before) as harness:
        assert harness.hits(KEYS) == set(KEYS)


_DIES = """
import os, signal, sys
from pathlib import Path
from tests.tiering.cold_starts import engines, served, store
from tests.tiering.disk.harness import disk_harness, disk_of
with engines(served), disk_harness(Path(sys.argv[1])) as harness:
    store(harness)
    disk_of(harness)._flusher.stop()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_engine_has_left_its_description(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    died = subprocess.run([sys.executable, "-c", _DIES, str(path)], check=False, timeout=120)
    assert died.returncode == -9
    line = line_of_a_start(lambda: disk_harness(path), DIFFERENCES["length"][0], caplog)
    assert "holds 5 blocks of another namespace of the model org/llama" in line


def test_clearing_keeps_only_what_is_used(path: Path) -> None:
    fill(path)
    with engines(other_model), disk_harness(path) as harness:
        with SlabInspector(path) as inspector:
            inspector.clear(None, 30.0, lambda _done, _total: None)
        wait_until(lambda: not disk_of(harness)._flusher.is_behind, "it is cleared")
        own = harness.fingerprint.hex()
    with engines(other_model), disk_harness(path):
        pass
    assert described(path).keys() == {own}
