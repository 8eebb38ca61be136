"""A directory that others empty, damage, forbid, unmount or lock: errors are counted, nothing
hangs, no wrong byte is served, and the tier resumes by itself where that is possible."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.base import LookupResult
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.ledger import Ledger
from kvtier.tiering.io import lookups
from tests.tiering.descriptors import no_more_descriptors
from tests.tiering.disk.small_disk import loop_disk, small_tmpfs
from tests.tiering.fs.accounts import (
    Figures,
    load_all,
    load_some,
    store_all,
    store_some,
    wait_until_stored,
    wait_until_the_gauge_is_right,
)
from tests.tiering.fs.hardship import (
    directory_for_everybody,
    failing_calls,
    somebody_else,
    stopped_holder,
)
from tests.tiering.fs.harness import fs_harness, fs_of, silent_files
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import wait_until

KEYS = TierHarness.keys(8)
LATER = TierHarness.keys(8, start=100)
_COPY_BYTES = 16_384


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def new_keys() -> Iterator[int]:
    yield from range(1000, 10_000, 10)


def store_new_until(harness: TierHarness, is_so: Callable[[set[bytes]], bool], what: str) -> None:
    """Store new blocks until the result is as expected."""
    starts = new_keys()
    wait_until(lambda: is_so(set(store_some(harness, harness.keys(4, next(starts))))), what)


# --- forbidden ---------------------------------------------------------------------------------


def test_permission_lost_and_found() -> None:
    with directory_for_everybody() as directory:
        root = directory / "root"
        with fs_harness(root) as harness:
            figures = Figures(harness)
            store_all(harness, KEYS)
            root.chmod(0)
            with somebody_else():
                assert not load_some(harness, KEYS)
                assert not harness.hits(LATER)
                assert not store_some(harness, LATER)
                wait_until(lambda: figures.errors("EACCES") > 0, "it is counted")
            root.chmod(0o700)
            wait_until_stored(harness, LATER)
            wait_until(lambda: harness.hits(KEYS) == set(KEYS), "what was there is found again")
            load_all(harness, KEYS)
            wait_until_the_gauge_is_right(harness, root)


def test_an_engine_whose_permission_is_lost_can_be_shut_down() -> None:
    with directory_for_everybody() as directory:
        root = directory / "root"
        with fs_harness(root) as harness:
            store_all(harness, KEYS)
            root.chmod(0)
            with somebody_else():
                harness.store(LATER)
                harness.drain()
                harness.shut_down()
        root.chmod(0o700)
        with fs_harness(root) as harness:
            load_all(harness, KEYS)
            wait_until(lambda: len(os.listdir(root / "engines")) == 2, "its presence is reclaimed")
            wait_until_the_gauge_is_right(harness, root)


# --- no descriptors ----------------------------------------------------------------------------


def test_no_descriptors_for_a_while(root: Path) -> None:
    with fs_harness(root) as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        with no_more_descriptors():
            assert not load_some(harness, KEYS)
            assert not store_some(harness, LATER)
            assert figures.errors("EMFILE") > 0
        wait_until_stored(harness, LATER)
        wait_until(lambda: load_some(harness, KEYS) == set(KEYS), "loads work again")
        wait_until_the_gauge_is_right(harness, root)


# --- a disk that fails -------------------------------------------------------------------------


def test_a_disk_that_fails_for_a_while(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 64 << 20) as disk, fs_harness(disk.root / "root") as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        with disk.broken():
            for _ in range(3):
                load_some(harness, KEYS)  # the harness has compared its bytes
                store_some(harness, LATER)
            wait_until(lambda: figures.errors("EIO") > 0, "it is counted")


def test_a_file_system_that_becomes_read_only(tmp_path: Path) -> None:
    """Stores fail and are counted by error, nothing raises, and stored blocks may still be
    loaded."""
    with loop_disk(tmp_path, 64 << 20) as disk, fs_harness(disk.root / "root") as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        disk.become_read_only()
        store_new_until(harness, lambda stored: not stored, "stores fail")
        wait_until(lambda: figures.errors("EROFS") > 0, "it is counted")
        load_some(harness, KEYS)  # the harness has compared its bytes
        assert not store_some(harness, LATER)
        harness.drain()
        harness.shut_down()


# --- a mount that vanishes ---------------------------------------------------------------------


@pytest.mark.parametrize("is_mount_point", [True, False])
def test_a_mount_that_vanishes_and_comes_back(tmp_path: Path, is_mount_point: bool) -> None:
    with loop_disk(tmp_path, 64 << 20) as disk:
        (disk.root / "lost+found").rmdir()  # `du` would count it
        root = disk.root if is_mount_point else disk.root / "root"
        with fs_harness(root) as harness:
            figures = Figures(harness)
            store_all(harness, KEYS)
            harness.store(harness.keys(8, start=50))
            device = mounted_device(disk.root)
            run("umount", "--lazy", str(disk.root))
            try:
                store_new_until(harness, lambda stored: not stored, "stores fail")
                assert not load_some(harness, KEYS)
                assert not harness.hits(LATER)
                wait_until(lambda: figures.errors("ENOENT") > 0, "it is counted")
                assert os.listdir(disk.root) == [], "written to the disk below"
            finally:
                run("mount", device, str(disk.root))
            wait_until_stored(harness, LATER)
            wait_until(lambda: harness.hits(KEYS) == set(KEYS), "what was there is found again")
            load_all(harness, KEYS)
            wait_until(
                lambda: len(os.listdir(root / "engines")) == 2, "our old presence is reclaimed"
            )
            wait_until_the_gauge_is_right(harness, root)


def mounted_device(mount_point: Path) -> str:
    mounts = map(str.split, Path("/proc/mounts").read_text().splitlines())
    (device,) = [source for source, target, *_ in mounts if target == str(mount_point)]
    return device


def test_what_is_written_when_the_mount_vanishes_is_not_published_below(tmp_path: Path) -> None:
    """The first blocks of a namespace, before its directories exist."""
    with loop_disk(tmp_path, 64 << 20) as disk, fs_harness(disk.root) as harness:
        device = mounted_device(disk.root)
        with silent_files(harness.tier):
            job = harness.store(KEYS)
            lanes = fs_of(harness)._lanes
            wait_until(lambda: any(lane._num_stores for lane in lanes), "being written")
            run("umount", "--lazy", str(disk.root))
        try:
            (report,) = harness.wait_for(job)
            assert not report.moved
            assert not store_some(harness, LATER)
            assert os.listdir(disk.root) == [], "written to the disk below"
        finally:
            run("mount", device, str(disk.root))
        wait_until_stored(harness, KEYS)


def test_an_engine_whose_mount_is_gone_can_be_shut_down(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 64 << 20) as disk:
        with fs_harness(disk.root / "root") as harness:
            store_all(harness, KEYS)
            run("umount", "--lazy", str(disk.root))
            harness.store(LATER)
            harness.drain()
            harness.shut_down()
        is_clean = os.listdir(disk.root) == []
        run("mount", "-o", "loop", str(disk.image), str(disk.root))
        assert is_clean, "written to the disk below"
        with fs_harness(disk.root / "root") as harness:
            load_all(harness, KEYS)


def test_another_root_in_the_place_of_ours(tmp_path: Path) -> None:
    """The tier goes on in the new one; the next engine that opens the old one cleans it up."""
    root, other = tmp_path / "root", tmp_path / "other"
    with fs_harness(other) as harness:
        store_all(harness, LATER)
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        root.rename(tmp_path / "aside")
        other.rename(root)
        wait_until(lambda: harness.hits(LATER) == set(LATER), "the blocks of the new one")
        load_all(harness, LATER)
        wait_until_stored(harness, harness.keys(4, start=500))
        wait_until_the_gauge_is_right(harness, root)
    with fs_harness(tmp_path / "aside") as harness:
        load_all(harness, KEYS)
        wait_until(lambda: len(os.listdir(tmp_path / "aside" / "engines")) == 2, "reclaimed")


# --- a stale handle ----------------------------------------------------------------------------


def is_below(root: Path) -> Callable[[object], bool]:
    prefix = f"{root}/"
    return lambda target: isinstance(target, (str, Path)) and str(target).startswith(prefix)


def test_stale_handles_for_a_while(root: Path) -> None:
    with fs_harness(root) as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        with failing_calls(errno.ESTALE, is_below(root), "open", "stat", "lstat", "link"):
            assert not load_some(harness, KEYS)
            assert not harness.hits(LATER)
            assert not store_some(harness, LATER)
            assert figures.errors("ESTALE") > 0
        wait_until_stored(harness, LATER)
        wait_until(lambda: load_some(harness, KEYS) == set(KEYS), "loads work again")
        wait_until_the_gauge_is_right(harness, root)


def test_a_ledger_whose_handle_stays_stale_is_opened_again(root: Path) -> None:
    """As on NFS after the server has lost the file and restored it: old handles fail, new ones
    work."""
    with fs_harness(root) as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        old = fs_of(harness)._session.ledger._fd
        spare = os.dup(old)  # so that its number is not given to another file
        concerned = {old}
        try:
            with failing_calls(
                errno.ESTALE, lambda target: target in concerned, "pread", "pwrite", "fstat"
            ):
                store_new_until(harness, lambda stored: not stored, "stores fail")
                assert figures.errors("ESTALE") + figures.errors("ENOENT") > 0
                load_all(harness, KEYS)

                def is_opened_again() -> bool:
                    if fs_of(harness)._session.ledger._fd != old:
                        return True
                    store_some(harness, LATER)
                    return False

                wait_until(is_opened_again, "the ledger is opened again", 10.0)
                concerned.clear()
        finally:
            os.close(spare)
        wait_until_stored(harness, LATER)


# --- others at the root ------------------------------------------------------------------------


def empty(root: Path) -> None:
    """rm -rf ROOT/*, while engines may write there."""
    while names := os.listdir(root):
        for name in names:
            path = root / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def test_a_root_that_is_emptied(root: Path) -> None:
    """No block is found or stored until the root is made again."""
    with fs_harness(root) as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        harness.store(LATER)
        empty(root)
        store_new_until(harness, lambda stored: not stored, "stores fail")
        wait_until(lambda: figures.errors("ENOENT") > 0, "it is counted")
        # Some of the later blocks may have been stored before the root was emptied.
        assert not load_some(harness, [*KEYS, *LATER])
        wait_until(lambda: harness.look_up(KEYS[0]) is LookupResult.MISS, "it is known to be gone")
        with fs_harness(root) as other:
            store_all(other, KEYS)
            wait_until_stored(harness, LATER)
            load_all(harness, KEYS)
            load_all(other, LATER)
            wait_until_the_gauge_is_right(harness, root)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_root_that_is_gone_is_made_again_by_a_command(
    root: Path,
    is_removed: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log says so, the gauge goes to 0, and no store is refused for lack of space."""
    monkeypatch.setattr(lookups, "_PRESENT_FOR_S", 0.5)  # a block that was found is a hit for 30 s
    with fs_harness(root) as harness, caplog.at_level(logging.WARNING):
        figures = Figures(harness)
        store_all(harness, KEYS)
        wait_until_the_gauge_is_right(harness, root)
        empty(root)
        if is_removed:
            root.rmdir()
        store_new_until(harness, lambda stored: not stored, "stores fail")
        wait_until(lambda: harness.look_up(KEYS[0]) is LookupResult.MISS, "it is known to be gone")

        def gauges() -> tuple[float, float]:
            told = fs_of(harness).get_stats().gauges
            return told[manager.USED_BYTES], told[manager.BLOCKS]

        wait_until(lambda: gauges() == (0, 0), "there is nothing")
        assert not store_some(harness, LATER)
        assert figures[manager.REFUSED] == 0
        assert figures[manager.FAILED] > 0
        [told] = [message for message in caplog.messages if "ENOENT" in message]
        assert str(root) in told
        assert f"`kvtier store init {root}`" in told
        assert main(["store", "init", str(root)]) == 0
        wait_until_stored(harness, LATER)
        load_all(harness, LATER)
        wait_until_the_gauge_is_right(harness, root)
        assert gauges() > (0, 0)


def test_an_engine_whose_root_was_emptied_can_be_shut_down(root: Path) -> None:
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        harness.store(LATER)
        empty(root)
        harness.drain()
        harness.shut_down()
    shutil.rmtree(root)
    with fs_harness(root) as harness:
        store_all(harness, KEYS)


def delete(ledger: Path) -> None:
    ledger.unlink()


def truncate(ledger: Path) -> None:
    os.truncate(ledger, 0)


def flip_both(ledger: Path) -> None:
    for start in (0, _COPY_BYTES):
        flip(ledger, start + 40)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("spoil", [truncate, flip_both])
def test_a_ledger_that_is_lost_is_made_anew_while_engines_run(
    root: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with fs_harness(root) as one, fs_harness(root) as two:
        store_all(one, KEYS)
        store_all(two, LATER)
        spoil(root / "ledger")
        wait_until_stored(one, one.keys(4, start=500))
        wait_until_stored(two, two.keys(4, start=600))
        load_all(one, LATER)
        load_all(two, KEYS)
        wait_until(lambda: len(os.listdir(root / "engines")) == 4, "old presences are reclaimed")
        wait_until_the_gauge_is_right(one, root)
        wait_until_the_gauge_is_right(two, root)
    assert not [record for record in caplog.records if record.exc_info], "a bug, by its log"


@pytest.mark.parametrize("spoil", [delete, truncate, flip_both])
def test_a_ledger_that_is_lost_while_nobody_runs_is_made_anew(
    root: Path, spoil: Callable[[Path], None]
) -> None:
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
    spoil(root / "ledger")
    with fs_harness(root) as harness:
        load_all(harness, KEYS)
        store_all(harness, LATER)
        wait_until_the_gauge_is_right(harness, root)
        assert harness.call("get_stats").gauges[manager.BLOCKS] == 16


def test_a_ledger_that_is_deleted_while_engines_run(root: Path) -> None:
    """No engine stores until another one starts and creates it; loads go on."""
    with fs_harness(root) as harness:
        figures = Figures(harness)
        store_all(harness, KEYS)
        (root / "ledger").unlink()
        store_new_until(harness, lambda stored: not stored, "stores fail")
        wait_until(lambda: figures.errors("ENOENT") > 0, "it is counted")
        load_all(harness, KEYS)
        with fs_harness(root) as other:
            load_all(other, KEYS)
            wait_until_stored(harness, LATER)
            wait_until_the_gauge_is_right(other, root)


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("is_running", [False, True])
def test_one_damaged_copy_of_the_ledger(root: Path, is_newer: bool, is_running: bool) -> None:
    """The other copy is used, or the blocks are counted again."""

    def flip_copy() -> None:
        ledger = Ledger(root / "ledger")
        newer = ledger.read().revision % 2
        ledger.close()
        flip(root / "ledger", (newer if is_newer else 1 - newer) * _COPY_BYTES + 40)

    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        if is_running:
            flip_copy()
            wait_until_stored(harness, LATER)
            wait_until_the_gauge_is_right(harness, root)
    if not is_running:
        flip_copy()
    with fs_harness(root) as harness:
        load_all(harness, KEYS)
        wait_until_stored(harness, LATER)
        wait_until_the_gauge_is_right(harness, root)


def test_the_sign_of_life_of_a_running_engine_is_deleted(root: Path) -> None:
    """Others take it for dead. It joins again, and no block is lost or counted twice."""
    with fs_harness(root) as one:
        store_all(one, KEYS)
        (alive,) = (root / "engines").glob("*.alive")
        alive.unlink()
        with fs_harness(root) as two:
            wait_until(lambda: not (root / "engines" / alive.stem).exists(), "it is reclaimed")
            wait_until_stored(one, LATER)
            load_all(two, KEYS)
            load_all(two, LATER)
            wait_until_the_gauge_is_right(one, root)
            wait_until_the_gauge_is_right(two, root)


# --- a lock that nobody gives up ---------------------------------------------------------------


def be_impatient(harness: TierHarness) -> None:
    """A shorter patience for the ledger than engines have."""
    fs_of(harness)._session._patience_s = 0.2


def test_a_stopped_process_that_has_the_ledger_locked(root: Path) -> None:
    with fs_harness(root) as harness:
        be_impatient(harness)
        figures = Figures(harness)
        store_all(harness, KEYS)
        with stopped_holder(root):
            store_new_until(harness, lambda stored: not stored, "stores fail")
            load_all(harness, KEYS)
            wait_until(lambda: figures.errors("ETIMEDOUT") > 0, "it is counted")
            assert not store_some(harness, LATER)
            load_all(harness, KEYS)
        wait_until_stored(harness, LATER)
        wait_until_the_gauge_is_right(harness, root)


def test_an_engine_ends_though_the_ledger_stays_locked(root: Path) -> None:
    with fs_harness(root) as harness:
        store_all(harness, KEYS)
        with stopped_holder(root):
            harness.store(LATER)
            harness.shut_down()  # within the harness's patience
            harness.step()
            assert not harness.ledger.unreported
    with fs_harness(root) as harness:
        load_all(harness, KEYS)
        wait_until(lambda: len(os.listdir(root / "engines")) == 2, "its presence is reclaimed")
        wait_until_the_gauge_is_right(harness, root)


# --- where there is no O_DIRECT ----------------------------------------------------------------


def test_a_root_in_memory(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 32 << 20) as mounted, fs_harness(mounted / "root") as harness:
        for start in range(0, 400, 40):
            store_all(harness, harness.keys(40, start))
        load_all(harness, harness.keys(40, start=360))
        wait_until_the_gauge_is_right(harness, mounted / "root")
