"""Checks of a disk tier's path, which change nothing there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli.checks import tiers as tier_checks
from kvtier.testing import TierHarness
from kvtier.tiering.io import page
from kvtier.tiering.io.page import allows_o_direct
from tests.cli.store.slabs import GEOMETRY, engine_on, fill, flip
from tests.cli.vllm_config.running import answer_of, finding
from tests.tiering.disk.small_disk import loop_disk, small_tmpfs

AT = "secondary_tiers[0]"
MIB = 2**20


def state_of(directory: Path) -> dict[str, tuple[int, int, int, int]]:
    """The state of the directory, which any change would show in."""
    return {
        str(path): (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in [directory, *directory.rglob("*")]
        for status in [path.lstat()]
    }


def test_a_new_slab_on_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        before = state_of(disk.root)
        path = disk.root / "a b:c.slab"
        code, document = answer_of(capsys, "--disk", f"{path}:8MiB")
        assert state_of(disk.root) == before
        assert (code, document["ok"]) == (0, True)
        assert "the engine makes it when it starts" in finding(document, f"{AT}.path")["found"]
        assert finding(document, f"{AT}.file_system") == {
            "name": f"{AT}.file_system",
            "status": "ok",
            "found": f"ext4, mounted at {disk.root}",
            "remedy": "",
        }
        assert finding(document, f"{AT}.room")["status"] == "ok"
        assert finding(document, f"{AT}.o_direct")["found"] == (
            "reads and writes bypass the page cache"
        )
        assert not path.exists()


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "not mounted" / "kv.slab"
    code, document = answer_of(capsys, "--disk", f"{path}:8MiB")
    assert (code, document["ok"]) == (1, False)
    assert document["flag"]
    found = finding(document, f"{AT}.path")
    assert found["status"] == "problem"
    assert found["remedy"] == f"Make the directory {path.parent}, or mount the disk first"
    assert not path.parent.exists()


def test_a_path_that_cannot_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("n" * 300) / "kv.slab"
    code, document = answer_of(capsys, "--disk", f"{path}:8MiB")
    assert code == 1
    found = finding(document, f"{AT}.path")
    assert found["status"] == "problem"
    assert os.strerror(errno.ENAMETOOLONG) in found["found"]


def test_a_disk_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        code, document = answer_of(capsys, "--disk", f"{disk.root}/kv.slab:1GiB")
        assert code == 1
        found = finding(document, f"{AT}.room")
        assert found["status"] == "problem"
        assert "takes 1 GiB more; its file system has" in found["found"]
        assert "Make room, or give at most" in found["remedy"]


def test_tiers_on_one_disk_share_its_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        each = int(disk.free_bytes * 0.6)
        tiers = [f"--disk={disk.root}/{name}:{each}" for name in ("one", "two")]
        code, document = answer_of(capsys, *tiers)
        assert code == 1
        assert finding(document, "secondary_tiers[0].room")["status"] == "ok"
        second = finding(document, "secondary_tiers[1].room")
        assert second["status"] == "problem"
        assert "for the tiers before it" in second["found"]


def test_a_disk_that_is_mounted_for_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB, read_only=True) as disk:
        code, document = answer_of(capsys, "--disk", f"{disk.root}/kv.slab:8MiB")
        assert code == 1
        found = finding(document, f"{AT}.path")
        assert found["found"] == f"uid {os.geteuid()} cannot write to {disk.root}"
        assert "mounted for writing" in found["remedy"]
        assert finding(document, f"{AT}.o_direct")["found"].startswith("not tried")


def test_memory_is_no_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path, 16 * MIB) as root:
        code, document = answer_of(capsys, "--disk", f"{root}/kv.slab:8MiB")
        assert code == 0
        found = finding(document, f"{AT}.file_system")
        assert found["status"] == "warning"
        assert "that is memory" in found["found"]


# --- a slab that is there ----------------------------------------------------------------------


def test_a_slab_that_nobody_has_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    fill(path, TierHarness.keys(3))
    before, content = state_of(tmp_path), path.read_bytes()
    code, document = answer_of(capsys, "--disk", str(path))
    assert code == 0
    assert finding(document, f"{AT}.path")["found"].endswith("which no engine has open")
    code, document = answer_of(capsys, "--disk", f"{path}:{GEOMETRY.needed_bytes}")
    assert finding(document, f"{AT}.room")["status"] == "ok"
    code, document = answer_of(capsys, "--disk", f"{path}:100KiB")
    assert "the engine shrinks it to 100 KiB" in finding(document, f"{AT}.path")["found"]
    assert (state_of(tmp_path), path.read_bytes()) == (before, content)


def test_what_a_slab_has_need_not_be_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_disk(tmp_path, 32 * MIB) as disk:
        path = disk.root / "kv.slab"
        fill(path, [])
        disk.fill()
        code, document = answer_of(capsys, "--disk", f"{path}:{GEOMETRY.needed_bytes}")
        assert (code, finding(document, f"{AT}.room")["status"]) == (0, "ok")
        code, document = answer_of(capsys, "--disk", f"{path}:{2 * GEOMETRY.needed_bytes}")
        assert (code, finding(document, f"{AT}.room")["status"]) == (1, "problem")


def test_a_slab_that_an_engine_has_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.slab"
    with engine_on(path) as harness:
        code, document = answer_of(capsys, "--disk", f"{path}:1MiB")
        assert code == 1
        found = finding(document, f"{AT}.path")
        assert found["status"] == "problem"
        assert f"(process {os.getpid()} on " in found["found"]
        keys = TierHarness.keys(3)
        assert harness.wait_for(harness.store(keys))[0].result.success  # undisturbed
    code, document = answer_of(capsys, "--disk", f"{path}:1MiB")
    assert (code, finding(document, f"{AT}.path")["status"]) == (0, "ok")


def test_no_size_and_no_slab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer_of(capsys, "--disk", f"{tmp_path}/kv.slab")
    assert code == 1
    assert finding(document, f"{AT}.path")["remedy"] == (
        "Give a size: the engine makes the file when it starts"
    )


def _damaged(path: Path) -> None:
    fill(path, [])
    flip(path, 100)
    flip(path, 4096 + 100)


def _open_to_others(path: Path) -> None:
    fill(path, [])
    path.chmod(0o622)


NO_SLABS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file of others": (lambda path: path.write_bytes(b"mine" * 4096), "is not a slab"),
    "an empty file": (lambda path: path.touch(), "is empty"),
    "a directory": (lambda path: path.mkdir(), "is not a regular file"),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a damaged slab": (_damaged, "both copies of the superblock"),
    "a slab that others may write to": (_open_to_others, "may be written by others"),
    "a link to itself": (lambda path: path.symlink_to(path), "loop"),
    "a link to nowhere": (lambda path: path.symlink_to("/no/where/kv.slab"), "/no/where"),
}


@pytest.mark.parametrize("case", NO_SLABS)
def test_what_is_no_slab(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = NO_SLABS[case]
    path = tmp_path / "kv.slab"
    make(path)
    code, document = answer_of(capsys, "--disk", f"{path}:1MiB")
    assert code == 1
    found = finding(document, f"{AT}.path")
    assert found["status"] == "problem"
    assert words in json.dumps(found)
    assert found["remedy"]


def test_two_tiers_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    tiers = [f"--disk={tmp_path}/kv.slab:1MiB", f"--disk={tmp_path}/link/kv.slab:1MiB"]
    code, document = answer_of(capsys, *tiers)
    assert code == 1
    found = finding(document, "secondary_tiers[1]")
    assert "is also the path of secondary_tiers[0]" in found["found"]


# --- O_DIRECT ----------------------------------------------------------------------------------


def test_where_no_file_can_be_made_it_is_not_tried() -> None:
    assert allows_o_direct(Path("/proc")) is None


@pytest.mark.parametrize(("wanted", "status"), [("auto", "warning"), (True, "problem")])
def test_a_file_system_without_o_direct(
    wanted: object,
    status: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Current kernels have O_DIRECT on every file system with unnamed files.
    monkeypatch.setattr(page, "set_o_direct", lambda fd: False)
    tier = {"type": "disk", "path": f"{tmp_path}/kv.slab", "max_bytes": "1MiB"}
    _, document = answer_of(capsys, "--tier", json.dumps(tier | {"use_o_direct": wanted}))
    found = finding(document, f"{AT}.o_direct")
    assert (found["status"], "page cache" in found["found"]) == (status, True)


def test_o_direct_that_is_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_checks, "allows_o_direct", None)  # must not be called
    tier = {"type": "disk", "path": f"{tmp_path}/kv.slab", "max_bytes": "1MiB"}
    code, document = answer_of(capsys, "--tier", json.dumps(tier | {"use_o_direct": False}))
    assert (code, finding(document, f"{AT}.o_direct")["status"]) == (0, "ok")
