"""Presences: all engines see who is alive, and find the files of dead engines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import block_path
from kvtier.tiering.fs.presence import EngineInfo, Presence, StagedFile, peers_in, staged_files

ME = EngineInfo.here("engine-1", "ab" * 16)


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def presence(engines: Path) -> Iterator[Presence]:
    made = Presence(NoFollowTree(engines), engines, ME)
    yield made
    made.abandon()


def living(engines: Path, own: Presence | None = None) -> dict[bytes, bool]:
    return {peer.engine: not peer.is_dead for peer in peers_in(NoFollowTree(engines), engines, own)}


# --- who sits there ----------------------------------------------------------------------------


@given(st.text(max_size=300), st.text(max_size=300))
def test_an_occupant_is_read_as_it_was_written(engine_id: str, namespace: str) -> None:
    info = EngineInfo.here(engine_id, namespace)
    assert EngineInfo.decode(info.encode()) == info
    assert len(EngineInfo.here(engine_id, "ab" * 16).encode()) < 4096, "it is read at once"


@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    ).map(lambda value: json.dumps(value).encode())
)
def test_nonsense_is_nobody(text: bytes) -> None:
    assert EngineInfo.decode(text) is None


@pytest.mark.parametrize(
    "fields",
    [
        [1, 2, "host", 3, "ns"],
        ["e", True, "host", 3, "ns"],
        ["e", 2, None, 3, "ns"],
        ["e", 2, "host", 3.5, "ns"],
        ["e", 2, "host", 3],
    ],
)
def test_fields_of_the_wrong_kind_are_nobodys(fields: list[object]) -> None:
    assert EngineInfo.decode(json.dumps(fields).encode()) is None


def test_others_see_who_sits_there(engines: Path, presence: Presence) -> None:
    (seen,) = (other.info for other in peers_in(NoFollowTree(engines), engines, None))
    assert seen == ME
    assert (ME.pid, ME.engine_id) == (os.getpid(), "engine-1")


# --- alive or dead -----------------------------------------------------------------------------


def test_who_lives_is_alive_until_it_ends(engines: Path, presence: Presence) -> None:
    assert living(engines) == {presence.engine: True}
    assert living(engines) == {presence.engine: True}, "to look at it does it no harm"
    presence.abandon()
    presence.abandon()
    assert living(engines) == {presence.engine: False}


def test_an_engine_whose_file_nobody_can_lock_counts_as_alive(
    engines: Path, presence: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS without its lock service."""

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    presence.abandon()
    monkeypatch.setattr(fcntl, "flock", no_lock)
    living(engines)
    before = len(os.listdir("/proc/self/fd"))
    assert living(engines) == {presence.engine: True}
    assert len(os.listdir("/proc/self/fd")) == before


def test_ones_own_is_no_other(engines: Path, presence: Presence) -> None:
    other = Presence(NoFollowTree(engines), engines, ME)
    assert living(engines, presence) == {other.engine: True}
    other.remove()
    assert living(engines, presence) == {}


def test_a_seat_is_removed_without_a_trace(engines: Path, presence: Presence) -> None:
    Path(presence.incoming()).write_bytes(b"block")
    block = Path(block_path(str(presence.blocks / ("ab" * 16)), OffloadKey(b"key")))
    block.parent.mkdir(parents=True)
    block.write_bytes(b"block")
    presence.remove()
    assert not list(engines.iterdir())


@pytest.mark.parametrize("is_mine", [True, False])
def test_what_an_engine_has_not_put_into_its_seat_stays(
    engines: Path, presence: Presence, is_mine: bool
) -> None:
    outside = engines / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    namespace = presence.blocks / ("ab" * 16)
    namespace.mkdir(parents=True)
    (namespace / "07").symlink_to(outside)
    (presence.blocks / ("cd" * 16)).symlink_to(outside)
    (presence.directory / "w7").mkdir()
    (presence.directory / "thesis.tex").touch()
    Path(presence.incoming()).write_bytes(b"block")
    if is_mine:
        presence.remove()
    else:
        presence.abandon()
        for other in peers_in(NoFollowTree(engines), engines, None):
            other.remove()
    assert sorted(os.listdir(presence.directory)) == ["blocks", "thesis.tex", "w7"]
    assert os.listdir(outside) == ["precious"]
    assert not staged_files(NoFollowTree(engines), presence.directory)


def test_what_is_left_of_a_seat_and_is_not_ours_is_no_seat(
    engines: Path, presence: Presence
) -> None:
    (presence.directory / "thesis.tex").touch()
    presence.remove()
    assert living(engines) == {}


NO_SEATS: dict[str, Callable[[Path], None]] = {
    "a pipe that says that it lives": lambda path: os.mkfifo(f"{path}.alive"),
    "a directory that says so": lambda path: os.mkdir(f"{path}.alive"),
    "a link that says so": lambda path: os.symlink("/etc/passwd", f"{path}.alive"),
    "a link to nothing": lambda path: os.symlink("/nowhere", f"{path}.alive"),
    "a file as directory": lambda path: path.touch(),
    "a link as directory": lambda path: path.symlink_to("/"),
}


@pytest.mark.parametrize("put", NO_SEATS.values(), ids=NO_SEATS)
def test_what_has_the_name_of_a_seat_and_is_none_hides_no_other(
    engines: Path, presence: Presence, put: Callable[[Path], None]
) -> None:
    for name in ("00" * 16, "ff" * 16):
        put(engines / name)
    before = sorted(os.listdir(engines))
    assert living(engines) == {presence.engine: True}
    assert sorted(os.listdir(engines)) == before


def test_a_dead_seat_is_looked_at_by_one_at_a_time(engines: Path, presence: Presence) -> None:
    """Meanwhile it does not seem dead to others, since the one who opened it may be removing it."""
    presence.abandon()
    for mine in peers_in(NoFollowTree(engines), engines, None):
        assert mine.is_dead
        assert living(engines) == {presence.engine: True}
    assert living(engines) == {presence.engine: False}


@pytest.mark.parametrize("left", ["directory", "alive"])
def test_half_a_seat_is_a_dead_one(engines: Path, presence: Presence, left: str) -> None:
    presence.abandon()
    if left == "directory":
        (engines / f"{presence.engine.hex()}.alive").unlink()
    else:
        shutil.rmtree(engines / presence.engine.hex())
    for other in peers_in(NoFollowTree(engines), engines, None):
        assert other.is_dead
        assert other.files() == []
        other.remove()
    assert not list(engines.iterdir())


def test_what_is_no_seat_is_left_alone(engines: Path, presence: Presence) -> None:
    (engines / "notes.alive").touch()
    (engines / "lost+found").mkdir()
    assert living(engines) == {presence.engine: True}


def test_a_seat_that_cannot_be_made_leaves_nothing(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(os, "mkdir", no_room)
    with pytest.raises(OSError, match="full"):
        Presence(NoFollowTree(engines), engines, ME)
    assert not list(engines.iterdir())


SIT = """
import sys
from pathlib import Path
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.presence import EngineInfo, Presence
engines = Path(sys.argv[1])
presence = Presence(NoFollowTree(engines), engines, EngineInfo.here("other", ""))
Path(presence.incoming()).write_bytes(b"half a block")
print("sits", flush=True)
sys.stdin.read()
"""


def test_who_was_killed_is_dead(engines: Path) -> None:
    command = [sys.executable, "-c", SIT, str(engines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"sits\n"
        assert list(living(engines).values()) == [True]
        (info,) = (peer.info for peer in peers_in(NoFollowTree(engines), engines, None))
        assert info is not None
        assert info.pid == other.pid
        other.send_signal(signal.SIGKILL)
        other.wait()
        for peer in peers_in(NoFollowTree(engines), engines, None):
            assert peer.is_dead
            assert [Path(file.path).name for file in peer.files()] == ["w1"]


def test_a_forked_child_does_not_keep_the_seat(engines: Path, presence: Presence) -> None:
    ready, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end[1])
        os.write(ready[1], b"!")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert living(engines) == {presence.engine: True}
        presence.abandon()
        assert living(engines) == {presence.engine: False}
    finally:
        for fd in (*ready, *end):
            os.close(fd)
        os.waitpid(pid, 0)


# --- what is in it -----------------------------------------------------------------------------


def test_names_are_never_given_twice(presence: Presence) -> None:
    names = [presence.incoming() for _ in range(100)]
    names += [presence.outgoing(batch, number) for batch in (1, 2) for number in range(10)]
    assert len(set(names)) == 120
    assert all(presence.contains(name) for name in names)
    assert not presence.contains(str(presence.blocks.parent) + "-of-another/w1")
    assert not presence.contains("/elsewhere/w1")


def test_files_are_told_apart_by_their_names(presence: Presence) -> None:
    written, named, gone = presence.incoming(), presence.incoming(), presence.outgoing(12, 3)
    for path in (written, named, gone):
        Path(path).write_bytes(bytes(5000))
    directory = presence.directory
    presence.blocks.mkdir()
    os.link(named, presence.blocks / "published")
    for strange in ("x1", "w", "e1", "w1.d", "e1-", "we1-1"):
        (directory / strange).write_bytes(b"?")
    num_bytes = os.stat(written).st_blocks * 512
    assert num_bytes >= 5000
    assert {
        Path(file.path).name: file
        for file in staged_files(NoFollowTree(directory.parent), directory)
    } == {
        "w1": StagedFile(written, num_bytes, is_linked=False, batch=None),
        "w2": StagedFile(named, num_bytes, is_linked=True, batch=None),
        "e12-3": StagedFile(gone, num_bytes, is_linked=False, batch=12),
    }


def test_a_directory_that_is_gone_has_no_files(engines: Path) -> None:
    assert staged_files(NoFollowTree(engines), engines / "gone") == []
