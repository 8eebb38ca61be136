"""Text to token ids and back: every byte of UTF-8 is a token."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BOS", "EOS", "VOCABULARY", "decode", "encode"]

BOS = 256
EOS = 257
VOCABULARY = 258


def encode(text: str) -> list[int]:
    """The ids of a text, after the id that begins every text."""
    return [BOS, *text.encode()]


def decode(token_ids: Iterable[int]) -> str:
    """The text of some ids. Special ids are left out; bytes that are no text become U+FFFD."""
    return bytes(token for token in token_ids if token < BOS).decode(errors="replace")
