"""Text becomes bytes and back, and hashes name the same prefixes everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.config import VOCABULARY
from kvtier.engine.request import (
    BOS,
    EOS,
    HASH_BYTES,
    decode,
    encode,
    extend_chain,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def chain_of(tokens: list[int], tokens_per_hash: int) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, tokens_per_hash)
    return chain


def test_the_chain_is_what_it_always_was() -> None:
    """Tiers that outlive the process hold blocks under these names."""
    chain = chain_of(encode("Four promises, each with a test that can fail."), 16)
    assert [block_hash.hex() for block_hash in chain] == [
        "d3e37a5923b918b82b3ade7e64ee2aa3",
        "116f6e822de9dc506bfa10ad61247e1b",
    ]


def test_another_process_makes_the_same_chain() -> None:
    program = (
        "from kvtier.engine.request import extend_chain\n"
        "chain = []\n"
        "extend_chain(chain, list(range(100)), 8)\n"
        "print(chain[-1].hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == chain_of(list(range(100)), 8)[-1].hex()


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 40)))
def test_a_chain_grows_as_if_made_at_once(tokens: list[int], size: int, cuts: list[int]) -> None:
    chain: list[bytes] = []
    for cut in sorted(cuts):
        extend_chain(chain, tokens[:cut], size)
    extend_chain(chain, tokens, size)
    assert chain == chain_of(tokens, size)
    assert len(chain) == len(tokens) // size
    assert all(len(block_hash) == HASH_BYTES for block_hash in chain)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int], size: int) -> None:
    for index, (one, other) in enumerate(zip(chain_of(a, size), chain_of(b, size), strict=False)):
        end = (index + 1) * size
        assert (one == other) == (a[:end] == b[:end])


@given(st.text())
def test_text_comes_back(text: str) -> None:
    token_ids = encode(text)
    assert token_ids[0] == BOS
    assert all(0 <= token < VOCABULARY for token in token_ids)
    assert decode([*token_ids, EOS]) == text


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert decode([104, 105, 0xC3]) == "hi\ufffd"
