"""A root is verified while its files change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.testing import TierHarness
from kvtier.tiering.fs.inspector import FsInspector
from kvtier.tiering.io.page import PAGE_BYTES
from tests.cli.store.roots import file_of, fill_root
from tests.cli.store.slabs import flip
from tests.tiering.fs.harness import ROW_BYTES

KEYS = TierHarness.keys(40)
VICTIM = KEYS[11]


FILE_BYTES = PAGE_BYTES + ROW_BYTES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@settings(max_examples=60)
@given(bit=st.integers(0, 8 * FILE_BYTES - 1))
def test_no_bit_can_be_flipped(bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "one-block"
    if not root.exists():
        fill_root(root, [VICTIM])
    [file] = (root / "blocks").glob("*/*/*")
    flip(file, bit // 8, 1 << bit % 8)
    try:
        scrub = FsInspector(root).verify(None, None, lambda _done, _total: None)
        assert len(scrub.damaged) == 1
    finally:
        flip(file, bit // 8, 1 << bit % 8)


def verify_while(root: Path, at_start: Callable[[], object]) -> tuple[int, int, int]:
    """Do something after all files were found, and before the first one is read."""
    pending = [at_start]

    def on_progress(_done: int, _total: int) -> None:
        if pending:
            pending.pop()()

    scrub = FsInspector(root).verify(None, None, on_progress)
    assert not pending
    return scrub.num_good, scrub.num_gone, len(scrub.damaged)


def test_a_block_that_has_left_is_gone(root: Path) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    assert verify_while(root, file.unlink) == (len(KEYS) - 1, 1, 0)


def test_a_block_that_is_there_again_is_good(root: Path) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)

    def replace() -> None:
        copy = root / "engines" / "copy"
        copy.write_bytes(file.read_bytes())
        copy.rename(file)

    assert verify_while(root, replace) == (len(KEYS), 0, 0)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_file_that_is_overwritten_while_it_is_read(
    comes_back: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block leaves, its file is used for another one, and with luck gets its old name again."""
    name = fill_root(root, KEYS)
    file, elsewhere = file_of(root, name, VICTIM), root / "engines" / "recycled"
    content, status = file.read_bytes(), file.stat()
    reads, pending = os.preadv, [True]

    def read_while_it_leaves(fd: int, buffers: list[memoryview], offset: int) -> int:
        if pending and os.path.samestat(os.fstat(fd), status):
            pending.pop()
            file.rename(elsewhere)
            elsewhere.write_bytes(bytes(FILE_BYTES))
            num_read = reads(fd, buffers, offset)
            if comes_back:
                elsewhere.write_bytes(content)
                elsewhere.rename(file)
            return num_read
        return reads(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_while_it_leaves)
    found = verify_while(root, lambda: None)
    assert found == ((len(KEYS), 0, 0) if comes_back else (len(KEYS) - 1, 1, 0))


def test_damage_is_found_though_the_block_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fill_root(root, KEYS)
    file = file_of(root, name, VICTIM)
    flip(file, PAGE_BYTES)
    reads = os.preadv

    def read_and_use(fd: int, buffers: list[memoryview], offset: int) -> int:
        num_read = reads(fd, buffers, offset)
        os.utime(file)
        return num_read

    monkeypatch.setattr(os, "preadv", read_and_use)
    assert verify_while(root, lambda: None) == (len(KEYS) - 1, 0, 1)


def test_without_o_direct(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_root(root, KEYS)
    opens = os.open

    def refusing(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return opens(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert verify_while(root, lambda: None) == (len(KEYS), 0, 0)
