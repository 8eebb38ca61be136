"""Text becomes bytes, and bytes become text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.tokenizer import BOS, EOS, VOCABULARY, decode, encode


@given(st.text())
def test_text_comes_back(text: str) -> None:
    token_ids = encode(text)
    assert token_ids[0] == BOS
    assert all(0 <= token < VOCABULARY for token in token_ids)
    assert decode([*token_ids, EOS]) == text


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert decode([104, 105, 0xC3]) == "hi\ufffd"
