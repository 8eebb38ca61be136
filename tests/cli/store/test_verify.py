"""`kvtier store verify` on a slab finds and names every kind of damage, and nothing else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering import scrubber
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.inspection import as_age
from kvtier.tiering.io.page import PAGE_BYTES
from tests.cli.store.slabs import (
    GEOMETRY,
    SLOT_BYTES,
    engine_on,
    fill,
    flip,
    overwrite,
    read,
    run_store,
    slot_of,
)
from tests.tiering.test_scrubber import VirtualTime

KEYS = TierHarness.keys(80)
VICTIM = KEYS[11]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def test_a_sound_slab(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, KEYS)
    code, document = run_store(capsys, "verify", path)
    assert code == 0
    assert document["ok"]
    assert document["good"] == len(KEYS)
    assert document["bytes"] == len(KEYS) * SLOT_BYTES
    assert document["damaged"] == document["gone"] == 0
    assert document["reasons"] == {}
    assert document["blocks"] == document["problems"] == []


def _place(path: Path, key: OffloadKey = VICTIM) -> int:
    return GEOMETRY.slot_offset(slot_of(path, key))


def _swap(path: Path) -> None:
    one, other = _place(path), _place(path, KEYS[12])
    first, second = read(path, one, SLOT_BYTES), read(path, other, SLOT_BYTES)
    overwrite(path, one, second)
    overwrite(path, other, first)


def _transplant(path: Path) -> None:
    donor = path.with_name("donor.slab")
    fill(donor, [VICTIM], "another model")
    overwrite(path, _place(path), read(donor, _place(donor), SLOT_BYTES))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "payload": (lambda path: flip(path, _place(path) + PAGE_BYTES + 5000), "digest"),
    "last byte": (lambda path: flip(path, _place(path) + SLOT_BYTES - 1, 0x80), "digest"),
    "seal": (lambda path: flip(path, _place(path) + 40), "header"),
    "stamp": (lambda path: flip(path, _place(path) + 290), "header"),
    "padding": (lambda path: flip(path, _place(path) + 3000), "header"),
    "zeros": (lambda path: overwrite(path, _place(path), bytes(SLOT_BYTES)), "not_sealed"),
    "swapped": (_swap, "key"),
    "transplanted": (_transplant, "fingerprint"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_found_and_named(
    case: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = DAMAGES[case]
    fill(path, KEYS)
    victim = slot_of(path, VICTIM)
    damage(path)
    num_damaged = 2 if case == "swapped" else 1
    code, document = run_store(capsys, "verify", path)
    assert code == 1
    assert not document["ok"]
    assert document["reasons"] == {reason: num_damaged}
    assert document["good"] == len(KEYS) - num_damaged
    found = {block["slot"]: block for block in document["blocks"]}
    assert found[victim]["block_hash"] == VICTIM[:-4].hex()
    assert found[victim]["reason"] == reason
    assert main(["store", "verify", str(path)]) == 1
    text = capsys.readouterr().out
    assert f"DAMAGED  slot {victim}: {reason}, block {VICTIM[:-4].hex()}\n" in text


def test_an_older_generation_of_the_same_block(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    geometry = Geometry(GEOMETRY.payload_bytes, 1)
    fill(path, [VICTIM], geometry=geometry)
    older = read(path, geometry.slot_offset(0), SLOT_BYTES)
    fill(path, [KEYS[0]], geometry=geometry)
    fill(path, [VICTIM], geometry=geometry)
    overwrite(path, geometry.slot_offset(0), older)
    code, document = run_store(capsys, "verify", path)
    assert (code, document["reasons"]) == (1, {"stale": 1})


def test_a_file_that_was_cut_off(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, KEYS)
    with path.open("r+b") as file:
        file.truncate(GEOMETRY.slot_offset(50) + 100)
    code, document = run_store(capsys, "verify", path)
    assert code == 1
    assert document["good"] == 50  # found in the slots: the index is lost
    assert set(document["reasons"]) == {"unreadable"}
    assert any("truncated" in problem for problem in document["problems"])
    assert run_store(capsys, "stat", path)[1]["damaged_index_pages"] == 2


def test_blocks_behind_a_damaged_index_are_verified(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(path, KEYS)
    flip(path, GEOMETRY.index_offset + 1000)
    code, document = run_store(capsys, "verify", path)
    assert code == 1
    assert document["good"] == len(KEYS)
    assert document["damaged"] == 0
    assert ["index" in problem for problem in document["problems"]] == [True]
    flip(path, _place(path) + PAGE_BYTES)
    document = run_store(capsys, "verify", path)[1]
    assert document["reasons"] == {"digest": 1}


def test_only_one_namespace_is_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill(path, KEYS[:30], "one").hex()
    two = fill(path, KEYS[30:40], "two").hex()
    flip(path, _place(path) + PAGE_BYTES)
    assert run_store(capsys, "verify", path, "--namespace", two)[1]["good"] == 10
    code, document = run_store(capsys, "verify", path, "--namespace", one)
    assert (code, document["good"], document["damaged"]) == (1, 29, 1)


def test_a_slot_that_was_written_after_the_index(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a crash: the newer block is good, and the index is behind."""
    geometry = Geometry(GEOMETRY.payload_bytes, 1)
    fill(path, [KEYS[0]], geometry=geometry)
    index = read(path, geometry.index_offset, PAGE_BYTES)
    fill(path, [KEYS[1]], geometry=geometry)
    overwrite(path, geometry.index_offset, index)
    code, document = run_store(capsys, "verify", path)
    assert (code, document["good"], document["damaged"]) == (0, 1, 0)
    assert run_store(capsys, "ls", path)[1]["blocks"] == []


def test_an_engine_finds_what_verify_calls_good(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(path, KEYS)
    for key in KEYS[::7]:
        flip(path, _place(path, key) + PAGE_BYTES + 77)
    good = run_store(capsys, "verify", path)[1]["good"]
    with engine_on(path) as harness:
        reports = harness.wait_for(*(harness.load([key]) for key in KEYS))
    assert sum(report.result.success for report in reports) == good


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_to_those_who_watch(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, KEYS)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["store", "verify", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert "KiB" in terminal.getvalue()


def test_no_more_than_the_rate(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, KEYS)
    document = run_store(capsys, "verify", path, "--max-rate", "4MB/s")[1]
    assert document["seconds"] >= document["bytes"] / 4e6


def test_a_rate_that_takes_long_is_said_at_once(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, KEYS)
    monkeypatch.setattr(scrubber, "time", VirtualTime())
    assert main(["store", "verify", str(path), "--max-rate", "200"]) == 0
    seconds = len(KEYS) * SLOT_BYTES / 200
    assert f"at most 200 B per s: that takes about {as_age(seconds)}\n" in capsys.readouterr().err
    assert main(["store", "verify", str(path), "--max-rate", "1GB"]) == 0
    assert capsys.readouterr().err == ""
