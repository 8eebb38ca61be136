"""Reading traces: both forms, what is dropped, and what is said about wrong files."""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.replay.trace import Request, TraceError, open_trace
from tests.trace_replay import key_of
from tests.traces import CODING_AGENTS

LINE: dict[str, Any] = {
    "timestamp": 1500,
    "input_length": 1100,
    "output_length": 7,
    "hash_ids": [4, 9, 2],
}
TREE: dict[str, Any] = {
    "ts": np.array([0.5, 2.0]),
    "tin": np.array([1600, 1030]),
    "tout": np.array([3, 0]),
    "leaf": np.array([2, 3]),
    "dparent": np.array([0, 1, 1, 3]),
    "bs": np.array(512),
}
"""Blocks 0, 1, 2 in a row, and block 3 after block 0."""


def read(path: Path, block_tokens: int | None = None) -> list[Request]:
    with open_trace(str(path), block_tokens) as trace:
        return list(trace.requests())


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tree_bytes(**changes: Any) -> bytes:
    content = io.BytesIO()
    arrays = {name: array for name, array in (TREE | changes).items() if array is not None}
    np.savez(content, **arrays)
    return content.getvalue()


# --- both forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compressed", [False, True])
def test_json_lines(tmp_path: Path, is_compressed: bool) -> None:
    text = json.dumps(LINE) + "\n\n" + json.dumps(LINE | {"timestamp": 1500.5}) + "\n"
    content = lzma.compress(text.encode()) if is_compressed else text.encode()
    first, second = read(written(tmp_path / "a", content))
    # The third block has only 76 tokens: it is dropped, and its tokens still count.
    assert first == Request(1.5, 1100, 7, [key_of(4), key_of(9)])
    assert second.arrives_s == 1.5005
    assert first.keys[0] is second.keys[0]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_tree_of_blocks(tmp_path: Path, is_compressed: bool) -> None:
    content = lzma.compress(tree_bytes()) if is_compressed else tree_bytes()
    path = written(tmp_path / "a", content)
    assert read(path) == read(path, 512)
    assert read(path) == [
        Request(0.5, 1600, 3, [key_of(0), key_of(1), key_of(2)]),
        Request(2.0, 1030, 0, [key_of(0), key_of(3)]),
    ]


def test_a_real_tree_is_walked_as_a_plain_loop_walks_it() -> None:
    with lzma.open(CODING_AGENTS) as archive:
        arrays = np.load(io.BytesIO(archive.read()))
    leaf, to_parent = arrays["leaf"].tolist(), arrays["dparent"].tolist()
    with open_trace(str(CODING_AGENTS)) as trace:
        for number, request in enumerate(islice(trace.requests(), 500)):
            block, blocks = leaf[number], [leaf[number]]
            while to_parent[block]:
                block -= to_parent[block]
                blocks.append(block)
            assert request.keys == [key_of(block) for block in reversed(blocks)], number
        assert trace.progress() == (500, 44_766)


@pytest.mark.parametrize(
    ("tokens", "size", "ids", "num_kept"),
    [
        (1024, 512, [1, 2], 2),
        (1025, 512, [1, 2], 2),  # the partial block has no id
        (1025, 512, [1, 2, 3], 2),
        (511, 512, [1], 0),
        (0, 512, [], 0),
        (64, 16, [1, 2, 3, 4], 4),
    ],
)
def test_only_whole_blocks_are_kept(
    tmp_path: Path, tokens: int, size: int, ids: list[int], num_kept: int
) -> None:
    line = LINE | {"input_length": tokens, "hash_ids": ids}
    (request,) = read(written(tmp_path / "a", json.dumps(line)), size)
    assert request.keys == [key_of(block) for block in ids[:num_kept]]
    assert request.prompt_tokens == tokens


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    with open_trace(str(written(tmp_path / "a", json.dumps(LINE)))) as trace:
        assert trace.progress()[0] < trace.progress()[1]
        list(trace.requests())
        done, total = trace.progress()
        assert done == total > 0


# --- wrong files -------------------------------------------------------------------------------

WRONG_LINES: dict[str, tuple[object, str]] = {
    "not JSON": ("hello", "not JSON"),
    "cut off": ('{"timestamp": 1', "not JSON"),
    "nested too deeply": ("[" * 100_000, "not JSON"),
    "not UTF-8": (b"\xff\xfe{}", "not JSON"),
    "not an object": ("[1, 2]", "not a JSON object"),
    "no timestamp": ({"timestamp": None}, "timestamp is null"),
    "a word as a time": ({"timestamp": "soon"}, 'timestamp is "soon"'),
    "endless time": ('{"timestamp": NaN}', "timestamp is NaN"),
    "endless digits": ('{"timestamp": 1' + 400 * "0" + "}", "timestamp is 1000"),
    "a time that no clock has": ('{"timestamp": 1e300}', "from 0 to 1e15"),
    "more tokens than there are": (
        '{"timestamp": 1500, "input_length": 1' + 400 * "0" + "}",
        "input_length is 1000",
    ),
    "time runs backwards": ({"timestamp": 3}, "sort the lines by timestamp"),
    "negative tokens": ({"input_length": -1}, "input_length is -1: write a whole number"),
    "half a token": ({"output_length": 1.5}, "output_length is 1.5: write a whole number"),
    "true as a number": ({"input_length": True}, "input_length is true"),
    "no blocks": ({"hash_ids": None}, "must be a list of whole numbers"),
    "words as blocks": ({"hash_ids": [1, "2", 3]}, "must be a list of whole numbers"),
    "true as a block": ({"hash_ids": [1, True, 3]}, "must be a list of whole numbers"),
    "a negative block": ({"hash_ids": [1, -2, 3]}, "ids are from 0"),
    "a block too large": ({"hash_ids": [1, 2**64, 3]}, "ids are from 0"),
    "one block twice": ({"hash_ids": [1, 1, 3]}, "has an id twice"),
    "too few blocks": ({"hash_ids": [1]}, "1 hash_ids for 1100 tokens"),
    "too many blocks": ({"hash_ids": [1, 2, 3, 4]}, "--block-tokens"),
}


@pytest.mark.parametrize("case", WRONG_LINES)
def test_a_wrong_line_is_named(case: str, tmp_path: Path) -> None:
    wrong, said = WRONG_LINES[case]
    if isinstance(wrong, dict):
        wrong = json.dumps(LINE | wrong)
    wrong = wrong if isinstance(wrong, bytes) else str(wrong).encode()
    path = written(tmp_path / "a", json.dumps(LINE).encode() + b"\n" + wrong + b"\n")
    with open_trace(str(path)) as trace:
        requests = trace.requests()
        assert next(requests).prompt_tokens == 1100
        with pytest.raises(TraceError) as refused:
            next(requests)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert said in str(refused.value)


@pytest.mark.parametrize("field", LINE)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    line = {name: value for name, value in LINE.items() if name != field}
    with pytest.raises(TraceError, match=f"line 1: {field}"):
        read(written(tmp_path / "a", json.dumps(line)))


def test_a_line_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.replay.trace._LONGEST_LINE", 100)
    with pytest.raises(TraceError, match="line 1 is longer than"):
        read(written(tmp_path / "a", json.dumps(LINE) + " " * 100))


def damaged_deflate() -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **TREE)
    data = bytearray(content.getvalue())
    name_size, extra_size = data[26], data[28]  # of the first array, in its header
    first = 30 + name_size + extra_size
    data[first : first + 4] = b"\xff" * 4
    return bytes(data)


def unknown_method() -> bytes:
    data = bytearray(tree_bytes())
    entry = data.index(b"PK\x01\x02")
    for method in (8, entry + 10):
        data[method] = 99
    return bytes(data)


def too_large() -> bytes:
    array, content = io.BytesIO(), io.BytesIO()
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(array, header)
    with zipfile.ZipFile(content, "w") as archive:
        for name in TREE:
            archive.writestr(f"{name}.npy", array.getvalue())
    return content.getvalue()


WRONG_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "only line ends": (b"\n \n", "has no requests"),
    "empty inside xz": (lzma.compress(b""), "has no requests"),
    "xz cut off": (lzma.compress(json.dumps(LINE).encode() * 99)[:-20], "damaged or cut off"),
    "npz in xz cut off": (lzma.compress(tree_bytes())[:-20], "damaged or cut off"),
    "npz cut off": (tree_bytes()[:-30], "cannot be read as an npz archive"),
    "npz with damaged compression": (damaged_deflate(), "cannot be read as an npz archive"),
    "npz with unknown compression": (unknown_method(), "cannot be read as an npz archive"),
    "npz larger than memory": (too_large(), "cannot be read as an npz archive"),
    "npz without leaf": (tree_bytes(leaf=None), "no array leaf"),
    "npz of objects": (tree_bytes(ts=np.array([{}, {}])), "cannot be read as an npz archive"),
    "npz with words": (tree_bytes(tin=np.array(["a", "b"])), "array tin"),
    "npz with fractions": (tree_bytes(leaf=np.array([0.5, 1.0])), "array leaf"),
    "npz in two dimensions": (tree_bytes(ts=np.zeros((2, 2))), "array ts"),
    "npz without requests": (
        tree_bytes(**{name: TREE[name][:0] for name in ("ts", "tin", "tout", "leaf")}),
        "has no requests",
    ),
    "npz of unequal lengths": (tree_bytes(tin=np.array([1600])), "one entry for each request"),
    "npz without block size": (tree_bytes(bs=np.array(0)), "array bs"),
    "npz with times backwards": (tree_bytes(ts=np.array([2.0, 0.5])), "sort the requests"),
    "npz with endless times": (tree_bytes(ts=np.array([0, np.inf])), "array ts"),
    "npz with a leaf too large": (tree_bytes(leaf=np.array([2, 4])), "array leaf"),
    "npz with a negative leaf": (tree_bytes(leaf=np.array([2, -1])), "array leaf"),
    "npz with a later parent": (tree_bytes(dparent=np.array([0, 2, 1, 3])), "array dparent"),
    "npz with negative tokens": (tree_bytes(tout=np.array([-1, 0])), "array tout"),
    "npz with too few tokens": (tree_bytes(tin=np.array([1600, 1000])), "request 1: 2 blocks"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused(case: str, tmp_path: Path) -> None:
    content, said = WRONG_FILES[case]
    path = written(tmp_path / "a", content)
    with pytest.raises(TraceError) as refused:
        read(path)
    assert str(refused.value).startswith(str(path))
    assert said in str(refused.value)


def test_a_tree_has_its_own_block_size(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="leave --block-tokens out"):
        read(written(tmp_path / "a", tree_bytes()), 16)
