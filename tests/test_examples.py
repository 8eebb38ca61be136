"""Property tests draw the same examples at every run, whatever was run before them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[list[int]]:
    examples: list[list[int]] = []

    @given(st.lists(st.integers(), min_size=5))
    def draw(numbers: list[int]) -> None:
        examples.append(numbers)

    draw()
    return examples


def test_a_module_that_was_loaded_does_not_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    file = tmp_path / "full_of_numbers.py"
    file.write_text(f"NUMBERS = {list(range(1_000_000, 1_001_000))}\n")
    spec = importlib.util.spec_from_file_location("full_of_numbers", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, spec.name, importlib.util.module_from_spec(spec))
    assert drawn() == before
