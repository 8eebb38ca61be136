"""One digest of all weights: whatever they compute with counts, where they lie does not."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.integrations.vllm import weight_files
from kvtier.integrations.vllm.weight_files import (
    DigestMemory,
    UnknownWeightsError,
    digest_of_files,
    model_files,
)

NOTHING_KEPT = DigestMemory(None)


@pytest.fixture
def old_enough() -> Iterator[None]:
    """Files that were just written count as settled: the time of a change cannot be set."""
    with patch.object(weight_files, "_RACY_NS", -(10**12)):
        yield


def write_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in {"model.safetensors": b"weights" * 1000, **files}.items():
        (folder / name).write_bytes(content)
    return folder


def digest(folder: Path, memory: DigestMemory = NOTHING_KEPT) -> str:
    return digest_of_files(model_files(folder), memory)


def kept_in(path: Path) -> dict[str, str]:
    kept: dict[str, str] = json.loads(path.read_text())["digests"]
    return kept


# What counts


def test_a_copy_elsewhere_is_the_same(tmp_path: Path) -> None:
    model = write_model(tmp_path / "here", **{"config.json": b"{}"})
    copy = shutil.copytree(model, tmp_path / "far" / "away")
    assert digest(copy) == digest(model)
    assert re.fullmatch("[0-9a-f]{32}", digest(model))


def test_the_order_in_which_files_are_found_does_not_matter(tmp_path: Path) -> None:
    files = model_files(write_model(tmp_path / "model", **{"a.bin": b"1", "b.bin": b"2"}))
    backwards = dict(reversed(files.items()))
    assert digest_of_files(backwards, NOTHING_KEPT) == digest_of_files(files, NOTHING_KEPT)


def test_files_in_a_hub_cache_are_links(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(model / "model.safetensors")
    assert digest(linked) == digest(model)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "quantize_config.json",
        "preprocessor_config.json",
        "modeling_mine.py",
        "model-00002-of-00002.safetensors",
        "whisper/model.safetensors",
        "sparse_linear.pt",
    ],
)
def test_what_a_model_computes_with_counts(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model")
    digests = [digest(model)]
    for content in (b"one", b"two"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(content)
        digests.append(digest(model))
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "training_args.bin",
        "optimizer.pt",
        ".hidden.json",
        ".git/objects/x.bin",
        "checkpoint-500/model.safetensors",
        "original/consolidated.00.pth",
        "onnx/config.json",
    ],
)
def test_what_stands_beside_it_does_not(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model")
    before = digest(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"anything")
    assert digest(model) == before


def test_a_name_need_not_be_text(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    before = digest(model)
    Path(os.fsdecode(os.fsencode(model) + b"/\xff.bin")).write_bytes(b"more weights")
    assert digest(model) != before


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    before = digest(model)
    (model / "again").symlink_to(model)
    assert digest(model) == before


def test_a_folder_without_weights_is_nothing_to_go_by(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnknownWeightsError, match="has no weight files"):
        model_files(folder)


CONTENTS = st.dictionaries(
    st.sampled_from(["a.bin", "b.bin", "c.safetensors"]), st.binary(max_size=300), min_size=1
)


def digest_of_contents(contents: dict[str, bytes]) -> str:
    # Small pieces, so that small files have many, and a last one that is cut short.
    with (
        tempfile.TemporaryDirectory() as name,
        patch.multiple(weight_files, _SEGMENT=64, _READ=24),
    ):
        files = {}
        for file, content in contents.items():
            files[file] = Path(name, file)
            files[file].write_bytes(content)
        return digest_of_files(files, NOTHING_KEPT)


@given(CONTENTS, CONTENTS)
def test_digests_are_the_same_exactly_if_the_files_are(
    some: dict[str, bytes], others: dict[str, bytes]
) -> None:
    assert (digest_of_contents(some) == digest_of_contents(others)) == (some == others)


@given(CONTENTS.filter(lambda contents: any(contents.values())), st.data())
def test_one_flipped_bit_changes_it(contents: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(name for name in contents if contents[name])))
    flipped = bytearray(contents[name])
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of_contents(contents | {name: bytes(flipped)}) != digest_of_contents(contents)


def test_a_file_of_several_segments_is_read_in_full(tmp_path: Path) -> None:
    """With the real sizes: the last byte of a sparse file that does not end with a segment."""
    digests = []
    for byte in (b"\0", b"\1"):
        with (tmp_path / "model.bin").open("wb") as file:
            file.seek(2 * weight_files._SEGMENT + 4096)
            file.write(byte)
        digests.append(digest(tmp_path))
    assert digests[0] != digests[1]


# What is remembered


@pytest.mark.usefixtures("old_enough")
def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    model, notes = write_model(tmp_path / "model"), tmp_path / "cache" / "weights.json"
    first = digest(model, DigestMemory(notes))
    assert digest(model, DigestMemory(notes)) == first
    # Nobody could know this digest but from the notes.
    notes.write_text(json.dumps({"digests": dict.fromkeys(kept_in(notes), "0" * 32)}))
    assert digest(model, DigestMemory(notes)) != first


@pytest.mark.usefixtures("old_enough")
def test_an_edit_that_leaves_size_and_time_is_noticed(tmp_path: Path) -> None:
    model, notes = write_model(tmp_path / "model"), tmp_path / "weights.json"
    weights = model / "model.safetensors"
    first, stat = digest(model, DigestMemory(notes)), weights.stat()
    # Time stamps of a file system may be some milliseconds apart.
    while weights.stat().st_ctime_ns == stat.st_ctime_ns:
        weights.write_bytes(b"WEIGHTS" * 1000)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    assert digest(model, DigestMemory(notes)) != first


def test_a_file_that_has_just_been_written_is_not_remembered(tmp_path: Path) -> None:
    model, notes = write_model(tmp_path / "model"), tmp_path / "weights.json"
    with patch.object(weight_files, "_RACY_NS", 3600 * 10**9):  # however slow this machine is
        digest(model, DigestMemory(notes))
    assert not notes.exists()


@pytest.mark.usefixtures("old_enough")
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[",
        b"[]",
        b"null",
        b'{"digests": 3}',
        b'{"digests": {"a": 3}}',
        b'{"digests": {"a": "short"}}',
        b"[" * 100_000,
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_damaged_notes_only_cost_time(tmp_path: Path, damage: bytes) -> None:
    model, notes = write_model(tmp_path / "model"), tmp_path / "weights.json"
    notes.write_bytes(damage)
    assert digest(model, DigestMemory(notes)) == digest(model)
    assert len(kept_in(notes)) == 1


@pytest.mark.usefixtures("old_enough")
def test_a_place_that_cannot_be_written_to_only_costs_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = write_model(tmp_path / "model")
    (tmp_path / "file").write_text("not a folder")
    memory = DigestMemory(tmp_path / "file" / "weights.json")
    assert digest(model, memory) == digest(model)
    assert "could not be saved" in caplog.text


@pytest.mark.usefixtures("old_enough")
def test_two_engines_at_once_keep_each_others_notes(tmp_path: Path) -> None:
    notes = tmp_path / "weights.json"
    one, other = DigestMemory(notes), DigestMemory(notes)
    digest(write_model(tmp_path / "a"), one)
    digest(write_model(tmp_path / "b"), other)
    assert len(kept_in(notes)) == 2
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "weights.json"]


@pytest.mark.usefixtures("old_enough")
def test_notes_do_not_grow_without_end(tmp_path: Path) -> None:
    notes = tmp_path / "weights.json"
    for index in range(5):
        digest(write_model(tmp_path / f"model{index}"), DigestMemory(notes, max_entries=3))
    kept = kept_in(notes)
    assert [re.findall(r"model\d", key) for key in kept] == [["model2"], ["model3"], ["model4"]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/somewhere", "/somewhere/kvtier/weights.json"),
        ("", "/home/me/.cache/kvtier/weights.json"),
        ("relative", "/home/me/.cache/kvtier/weights.json"),
    ],
)
def test_where_notes_are_kept(monkeypatch: pytest.MonkeyPatch, given: str, expected: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", "/home/me")
    assert DigestMemory.of_the_user().path == Path(expected)


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    memory = DigestMemory.of_the_user()
    assert memory.path is None
    model = write_model(tmp_path / "model")
    assert digest(model, memory) == digest(model)


# What cannot be told


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = write_model(tmp_path / "model"), os.preadv

    def read_and_change(*args: Any) -> int:
        count = read(*args)
        with (model / "model.safetensors").open("ab") as file:
            file.write(b"more")
        return count

    monkeypatch.setattr(os, "preadv", read_and_change)
    with pytest.raises(UnknownWeightsError, match=r"model\.safetensors changed while it was read"):
        digest(model)


def test_a_file_that_is_cut_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = write_model(tmp_path / "model"), os.preadv

    def cut_and_read(*args: Any) -> int:
        os.truncate(model / "model.safetensors", 0)
        return read(*args)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    with pytest.raises(UnknownWeightsError, match="became shorter while it was read"):
        digest(model)


def test_a_file_that_is_gone_is_said_by_name(tmp_path: Path) -> None:
    files = {"model.bin": tmp_path / "model.bin"}
    with pytest.raises(UnknownWeightsError, match=r"model\.bin cannot be read: No such file"):
        digest_of_files(files, NOTHING_KEPT)


def test_a_file_that_changed_since_may_not_be_what_was_loaded(tmp_path: Path) -> None:
    before = time.time() - 60
    files = model_files(write_model(tmp_path / "model"))
    with pytest.raises(UnknownWeightsError, match="changed after this engine had started"):
        digest_of_files(files, NOTHING_KEPT, unchanged_since=before)
    known = digest_of_files(files, NOTHING_KEPT, unchanged_since=time.time() + 60)
    assert known == digest_of_files(files, NOTHING_KEPT)


# What is said


@pytest.mark.usefixtures("old_enough")
def test_the_operator_is_told_once_what_takes_so_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, notes = write_model(tmp_path / "model"), tmp_path / "weights.json"
    for _ in range(2):
        digest(model, DigestMemory(notes))
    before, after = (record.getMessage() for record in caplog.records)
    assert before == (
        "reading 6.83 KiB of weights once, to identify them; the digest is saved in "
        f"{notes}. Set cache_namespace to skip this"
    )
    assert re.fullmatch(r"read 6\.83 KiB of weights in \d+\.\d s", after)
