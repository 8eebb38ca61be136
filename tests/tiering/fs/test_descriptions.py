"""What the namespaces in a root are made of: kept in a file of each, and logged at a cold start."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import NamespaceDescription
from kvtier.tiering.fs.inspector import FsInspector
from kvtier.tiering.fs.layout import DESCRIPTION_FILE
from kvtier.tiering.fs.survey import survey
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
from tests.tiering.fs.accounts import wait_until_the_gauge_is_right
from tests.tiering.fs.hardship import failing_calls
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness, fs_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def fill(root: Path, change: Change = served) -> str:
    """Store blocks. Returns the name of their namespace."""
    with engines(change), fs_harness(root) as harness:
        store(harness)
        wait_until_the_gauge_is_right(harness, root)
        return harness.fingerprint.hex()


def file_of(root: Path, name: str) -> Path:
    return root / "blocks" / name / DESCRIPTION_FILE


def described(root: Path) -> dict[str, NamespaceDescription]:
    return dict(FsInspector(root).descriptions())


def assert_the_ledger_is_right(root: Path) -> None:
    seen = survey(root)
    assert seen.ledger_error == 0
    assert seen.strays == []
    assert seen.balance is not None
    assert seen.balance.total == du(root)


@pytest.mark.parametrize("what", ["length", "weights", "ranks"])
def test_a_cold_start_names_what_differs(
    what: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(root)
    assert described(root)[name].model == "org/llama"
    assert_the_ledger_is_right(root)
    change, text = DIFFERENCES[what]
    line = line_of_a_start(lambda: fs_harness(root), change, caplog)
    assert line.startswith(f"{root} holds 5 blocks of another namespace of the model org/llama: ")
    assert text in line
    assert levels(caplog) == [logging.WARNING]


def test_the_closest_of_several_namespaces_with_blocks_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for change in (other_model, DIFFERENCES["dtype"][0]):
        fill(root, change)
    emptied = fill(root)
    for path in block_files(root):
        if path.parent.parent.name == emptied:
            path.unlink()
    line = line_of_a_start(lambda: fs_harness(root), DIFFERENCES["length"][0], caplog)
    assert "dtype: fp8_e4m3, now bfloat16" in line


def test_a_warm_and_an_empty_start_say_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fill(root, DIFFERENCES["length"][0])
    assert lines(caplog) == []


def test_other_hash_roots_are_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = fill(root, with_root("1a2b (sha256)"))
    line = line_of_a_start(lambda: fs_harness(root), with_root("3c4d (sha256)"), caplog)
    assert "5 blocks of this engine's namespace" in line
    assert "1a2b (sha256), now 3c4d (sha256)" in line
    with engines(with_root("3c4d (sha256)")), fs_harness(root) as harness:
        store(harness, harness.keys(1, start=50))
    assert described(root)[name].hash_root == "3c4d (sha256)"
    assert_the_ledger_is_right(root)


def test_an_earlier_root_is_described_by_the_next_store(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = fill(root)
    file_of(root, name).unlink()
    line = line_of_a_start(lambda: fs_harness(root), other_model, caplog)
    assert f"another namespace, {name[:8]}, and none of this engine's. There is no desc" in line
    with engines(), fs_harness(root) as harness:
        assert harness.hits(KEYS) == set(KEYS)
        store(harness, harness.keys(1, start=50))
        wait_until_the_gauge_is_right(harness, root)
    assert described(root)[name].model == "org/llama"
    assert_the_ledger_is_right(root)


def test_a_description_goes_with_its_namespace_and_comes_with_the_next_block(root: Path) -> None:
    name = fill(root)
    with engines(), fs_harness(root) as harness:
        harness.hits(KEYS)
        FsInspector(root).clear(None, 30.0, lambda _done, _total: None)
        assert not (root / "blocks" / name).exists()
        store(harness, harness.keys(1, start=50))
        wait_until_the_gauge_is_right(harness, root)
    assert described(root).keys() == {name}
    assert_the_ledger_is_right(root)


def test_gc_names_the_model_and_removes_its_description(root: Path) -> None:
    name = fill(root)
    garbage = FsInspector(root).find_garbage([], 0)
    assert any(
        f"{name}  5 blocks" in text and "org/llama" in text for text in garbage.report().text()
    )
    garbage.tidy_up()
    garbage.remove(lambda _done, _total: None)
    (orphan,) = garbage.report().document["orphaned"]
    assert (orphan["model"], orphan["removed"]) == ("org/llama", True)
    assert not (root / "blocks" / name).exists()
    assert_the_ledger_is_right(root)


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 10_000, json.dumps([1]).encode()])
def test_damage_is_ignored_and_replaced(root: Path, content: bytes) -> None:
    name = fill(root)
    file_of(root, name).write_bytes(content)
    assert described(root) == {}
    with engines(), fs_harness(root) as harness:
        assert harness.hits(KEYS) == set(KEYS)
        store(harness, harness.keys(1, start=50))
    assert described(root).keys() == {name}


def test_a_link_or_a_directory_in_its_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    name = fill(root)
    file = file_of(root, name)
    stolen = tmp_path / "stolen"
    stolen.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(stolen)
    assert described(root) == {}
    file.unlink()
    file.mkdir()
    assert described(root) == {}
    with engines(), fs_harness(root) as harness:
        store(harness, harness.keys(1, start=50))
        assert harness.hits(KEYS) == set(KEYS)


def test_a_description_that_cannot_be_written_costs_no_block(root: Path) -> None:
    def is_description(path: object) -> bool:
        return str(path).endswith(DESCRIPTION_FILE)

    with engines(), fs_harness(root) as harness:
        presence = fs_of(harness)._session.presence
        with failing_calls(errno.EIO, is_description, "open"):
            store(harness)
        assert fs_of(harness)._session.presence is presence
        wait_until_the_gauge_is_right(harness, root)
    assert_the_ledger_is_right(root)


def test_a_full_root_is_not_exceeded_for_a_description(root: Path) -> None:
    with engines(), fs_harness(root, 8) as harness:
        for start in range(0, 200, 20):
            harness.wait_for(harness.store(harness.keys(20, start=start)))
            assert du(root) <= bytes_for(8)
        name = harness.fingerprint.hex()
    file_of(root, name).unlink()
    with engines(), fs_harness(root, 8) as harness:
        for start in range(200, 500, 20):
            harness.wait_for(harness.store(harness.keys(20, start=start)))
            assert du(root) <= bytes_for(8)
    assert described(root).keys() == {name}


_DIES = """
import os, signal, sys
from pathlib import Path
from kvtier.tiering.fs import transaction
from kvtier.tiering.fs.access import NoFollowTree
from tests.tiering.cold_starts import KEYS, engines, served
from tests.tiering.fs.harness import fs_harness

real = NoFollowTree.rename
def rename(self, path, new_path):
    if str(new_path).endswith(".made-of.json"):
        if sys.argv[2] == "after":
            real(self, path, new_path)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, path, new_path)
NoFollowTree.rename = rename
with engines(served), fs_harness(Path(sys.argv[1])) as harness:
    harness.wait_for(harness.store(KEYS))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_engine_killed_while_it_writes_a_description(root: Path, moment: str) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _DIES, str(root), moment],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=120,
    )
    assert died.returncode == -signal.SIGKILL
    assert len(described(root)) == (moment == "after")
    name = fill(root)
    assert described(root).keys() == {name}
    assert_the_ledger_is_right(root)
