"""`kvtier store ls` and `stat` on a slab that no engine has open."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier.base import make_offload_key
from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.disk.layout import CONTROL_OFFSET, encode_clear_request
from kvtier.tiering.io.page import PAGE_BYTES
from tests.cli.store.slabs import (
    GEOMETRY,
    NUM_SLOTS,
    ROW_BYTES,
    engine_on,
    fill,
    flip,
    overwrite,
    run_store,
    slot_of,
)

KEYS = TierHarness.keys(5)
HASHES = [key[:-4].hex() for key in KEYS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def test_blocks_are_listed_by_last_use(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, KEYS)
    with engine_on(path) as harness:
        harness.wait_for(harness.load([KEYS[1]]))
    code, document = run_store(capsys, "ls", path)
    assert code == 0
    assert document["total"] == 5
    # The head of a prompt is evicted last.
    recent = [HASHES[n] for n in (1, 0, 2, 3, 4)]
    assert [block["block_hash"] for block in document["blocks"]] == recent
    assert [block["rank"] for block in document["blocks"]] == [1, 2, 3, 4, 5]
    _, oldest = run_store(capsys, "ls", path, "--sort", "oldest", "--limit", "2")
    assert [block["block_hash"] for block in oldest["blocks"]] == [HASHES[4], HASHES[3]]
    assert [block["rank"] for block in oldest["blocks"]] == [5, 4]
    assert oldest["total"] == 5
    _, placed = run_store(capsys, "ls", path, "--sort", "place")
    slots = [block["slot"] for block in placed["blocks"]]
    assert slots == sorted(slots) == sorted(slot_of(path, key) for key in KEYS)


def test_a_block_is_described_in_full(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now(UTC)
    key = make_offload_key(bytes(range(32)), 7)
    fingerprint = fill(path, [key])
    [block] = run_store(capsys, "ls", path)[1]["blocks"]
    assert block["block_hash"] == bytes(range(32)).hex()
    assert block["group"] == 7
    assert block["namespace"] == fingerprint.hex()
    assert block["bytes"] == ROW_BYTES
    assert block["slot"] == slot_of(path, key)
    stored = datetime.fromisoformat(block["stored_at"])
    assert before.timestamp() - 1 <= stored.timestamp() <= datetime.now(UTC).timestamp() + 1


def test_a_key_that_is_too_long_for_the_index_is_listed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(path, [make_offload_key(b"h" * 64, 3)])
    [block] = run_store(capsys, "ls", path)[1]["blocks"]
    assert (block["block_hash"], block["group"]) == ((b"h" * 64).hex(), 3)


def test_only_one_namespace(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = fill(path, KEYS[:2], "one").hex()
    two = fill(path, KEYS[2:], "two").hex()
    assert run_store(capsys, "ls", path)[1]["total"] == 5
    for name, hashes in ((one, HASHES[:2]), (two, HASHES[2:])):
        for start in (name, name[:8], name[:1].upper() if name[0] != one[0] else name[:20]):
            document = run_store(capsys, "ls", path, "--namespace", start)[1]
            assert {block["block_hash"] for block in document["blocks"]} == set(hashes)
            assert {block["namespace"] for block in document["blocks"]} == {name}
    figures = run_store(capsys, "stat", path)[1]
    assert figures["namespaces"] == [
        {"namespace": two, "blocks": 3, "bytes": 3 * ROW_BYTES},
        {"namespace": one, "blocks": 2, "bytes": 2 * ROW_BYTES},
    ]
    other = "f" * 32
    assert main(["store", "ls", str(path), "--namespace", other]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert one in printed.err
    assert two in printed.err


def test_a_header_that_is_damaged_leaves_what_the_index_knows(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = fill(path, KEYS)
    slot = slot_of(path, KEYS[2])
    flip(path, GEOMETRY.slot_offset(slot) + 300)
    blocks = run_store(capsys, "ls", path)[1]["blocks"]
    assert len(blocks) == 5
    [damaged] = [block for block in blocks if block["slot"] == slot]
    assert damaged["block_hash"] == HASHES[2]
    assert damaged["stored_at"] is None
    assert fingerprint.hex().startswith(damaged["namespace"])


def test_the_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint = fill(path, KEYS)
    assert main(["store", "ls", str(path), "--limit", "2"]) == 0
    printed = capsys.readouterr()
    head, *rows = printed.out.splitlines()
    assert head.split() == [
        "rank",
        "stored",
        "slot",
        "size",
        "group",
        "namespace",
        "block",
        "hash",
        "model",
    ]
    assert len(rows) == 2
    shown = rf"^ +1 +\d+ s +\d+ +8 KiB +0 +{fingerprint.hex()[:8]} +{HASHES[0]} +sample$"
    assert re.match(shown, rows[0])
    assert "2 of 5 blocks; --limit 0 for all" in printed.err
    assert main(["store", "ls", str(path), "--limit", "0"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 6
    assert printed.err == ""


def test_an_empty_slab(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, [])
    assert run_store(capsys, "ls", path)[1] == {
        "path": str(path),
        "kind": "slab",
        "total": 0,
        "blocks": [],
    }
    assert run_store(capsys, "stat", path)[1]["blocks"] == 0
    assert run_store(capsys, "verify", path)[0] == 0


def test_the_figures_of_a_slab(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint = fill(path, KEYS)
    code, figures = run_store(capsys, "stat", path)
    assert code == 0
    status = path.stat()
    assert figures["allocated_bytes"] == status.st_blocks * 512
    assert figures["file_bytes"] == figures["expected_file_bytes"] == status.st_size
    assert figures["slots"] == NUM_SLOTS
    assert figures["block_bytes"] == ROW_BYTES
    assert figures["blocks"] == 5
    assert figures["dead_blocks"] == 0
    assert figures["version"] == 1
    assert not figures["held"]
    assert figures["holder"]["pid"] == os.getpid()
    assert (figures["index_pages"], figures["damaged_index_pages"]) == (2, 0)
    assert figures["intact_superblocks"] == 2
    assert not figures["clear_pending"]
    assert main(["store", "stat", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  {fingerprint.hex()}  5$", text, re.MULTILINE)
    assert re.search(rf"^in use +no; last by .*process {os.getpid()} ", text, re.MULTILINE)
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / os.fsdecode(b"kv\xff.slab")
    fill(path, KEYS)
    for command in ("ls", "stat", "verify"):
        assert main(["store", command, str(path)]) == 0
    assert "kv\\udcff.slab" in capsys.readouterr().out


def test_the_figures_of_a_damaged_slab(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, KEYS)
    flip(path, PAGE_BYTES + 20)
    flip(path, GEOMETRY.index_offset + PAGE_BYTES + 30)
    overwrite(path, CONTROL_OFFSET, encode_clear_request(b"someone's wish.."))
    figures = run_store(capsys, "stat", path)[1]
    assert figures["intact_superblocks"] == 1
    assert figures["damaged_index_pages"] == 1
    assert figures["blocks"] == 5  # those of the intact page
    assert figures["clear_pending"]
    assert main(["store", "stat", str(path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "superblock  one of two",
        "index       2 pages, 1 damaged",
        "clear       requested",
    ):
        assert line in text
