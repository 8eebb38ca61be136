"""File names encode the keys of blocks, and never lead out of the namespace."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey
from kvtier.tiering.fs.layout import (
    LONGEST_KEY,
    SHARDS,
    block_name,
    block_path,
    is_engine_name,
    is_namespace_name,
    key_of,
    namespace_path,
)

keys = st.binary(min_size=1, max_size=LONGEST_KEY).map(OffloadKey)


@given(keys)
def test_a_name_says_which_block_it_is(key: OffloadKey) -> None:
    assert key_of(block_name(key)) == key


@given(st.text(max_size=260) | st.text("0123456789abcdefABCDEF_-=. /", max_size=260))
def test_no_two_names_are_of_one_block(name: str) -> None:
    key = key_of(name)
    assert key is None or block_name(key) == name


@given(st.binary(min_size=121, max_size=LONGEST_KEY).map(OffloadKey))
def test_other_spellings_of_long_keys_are_none_of_ours(key: OffloadKey) -> None:
    assert key_of(key.hex()) is None
    assert key_of(block_name(key) + "\n") is None
    assert key_of(block_name(key).rstrip("=") + "====") is None


@given(keys)
def test_a_name_is_one_that_any_file_system_takes(key: OffloadKey) -> None:
    name = block_name(key)
    assert 0 < len(os.fsencode(name)) <= 255
    assert not set(name) & {"/", "\0", "."}
    assert name.isascii()


@given(keys)
def test_a_block_stays_below_its_namespace(key: OffloadKey) -> None:
    namespace = "/root/blocks/" + "ab" * 16
    path = os.path.normpath(block_path(namespace, key))
    shard, name = PurePosixPath(path).relative_to(namespace).parts
    assert shard in SHARDS
    assert name == block_name(key)
    assert path == block_path(namespace, key)


def test_blocks_are_spread_over_all_directories() -> None:
    paths = (block_path("n", OffloadKey(b"%d" % number)) for number in range(5000))
    assert {PurePosixPath(path).parent.name for path in paths} == set(SHARDS)


@given(st.binary(min_size=16, max_size=16))
def test_a_namespace_is_named_after_its_fingerprint(fingerprint: bytes) -> None:
    path = namespace_path(Path("/root/blocks"), fingerprint)
    assert path.parent == Path("/root/blocks")
    assert is_namespace_name(path.name)
    assert is_engine_name(fingerprint.hex())


def test_what_is_no_namespace() -> None:
    good = "0123456789abcdef" * 2
    assert is_namespace_name(good)
    for name in ("", good[1:], good + "0", good.upper(), good + "\n", "..", good[:-1] + "/"):
        assert not is_namespace_name(name)
        assert not is_engine_name(name)
