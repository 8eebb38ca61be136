"""The statistics of a tier. `tests/tiering/simulation` compares them with what has happened."""

from __future__ import annotations

import tracemalloc

from kvtier.base import OffloadKey, make_offload_key
from kvtier.tiering.metrics import ReadBack


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(n.to_bytes(32, "big"), 0) for n in numbers]


def test_a_block_is_read_back_once_until_it_is_stored_again() -> None:
    marks = ReadBack()
    assert marks.loaded(keys(*range(50))) == 50
    assert marks.loaded(keys(*range(40, 60), 40)) == 10
    marks.stored(keys(*range(20)))
    assert marks.loaded(keys(*range(60))) == 20


def test_the_newest_blocks_are_told_apart_and_memory_is_bounded() -> None:
    marks = ReadBack()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for start in range(0, 200_000, 100):
            assert marks.loaded(keys(*range(start, start + 100))) == 100
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 6 << 20
    assert marks.loaded(keys(*range(200_000 - 16_000, 200_000))) == 0
    marks.stored(keys(*range(200_000 - 16_000, 200_000)))
    assert marks.loaded(keys(*range(200_000 - 16_000, 200_000))) == 16_000
