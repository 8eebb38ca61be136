"""Used blocks stay on disk, even if host memory served them, and after a restart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.testing import TierHarness
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from tests.tiering.disk.engine import configured_engine
from tests.tiering.disk.hot_engine import HOT
from tests.tiering.patience import wait_until

NUM_BLOCKS = 64


def cold(count: int, number: int = 0) -> list[OffloadKey]:
    """A new prompt."""
    return TierHarness.keys(count, start=100_000 + 1000 * number)


def num_hits_after_pressure(path: Path, num_blocks: int, num_left: int) -> int:
    """Number of hot blocks that a new engine still has on disk, after a cold prompt has left slots
    for `num_left` older blocks."""
    with configured_engine(path, num_rows=128, num_blocks=num_blocks) as engine:
        engine.serve(cold(num_blocks - num_left, number=9))
        engine.settle()
        return engine.serve(HOT)


def test_the_hottest_prompt_is_the_youngest_on_disk_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(path, num_rows=128, num_blocks=NUM_BLOCKS) as engine:
        engine.serve(HOT)
        for number in range(6):
            engine.serve(cold(8, number))
            assert engine.serve(HOT) == 8
        assert (
            'kvtier_tier_blocks{tier="0:disk",direction="load"}' not in engine.figures()
        )  # from host memory
        engine.settle()
    assert num_hits_after_pressure(path, NUM_BLOCKS, 8) == 8


def test_the_hottest_prompt_is_the_youngest_on_disk_after_a_kill(tmp_path: Path) -> None:
    """Kill the engine after its uses have been written, which takes some seconds."""
    path, copy = tmp_path / "kv.slab", tmp_path / "copy.slab"
    command = [sys.executable, "-m", "tests.tiering.disk.hot_engine", str(path), str(NUM_BLOCKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "served\n"

            def is_written() -> bool:
                shutil.copy(path, copy)
                with configured_engine(copy, num_blocks=NUM_BLOCKS) as engine:
                    if engine.figures()['kvtier_disk_resident_blocks{tier="0:disk"}'] < 56:
                        return False
                return num_hits_after_pressure(copy, NUM_BLOCKS, 8) == 8

            wait_until(is_written, "the uses are in the file")
        finally:
            process.kill()
    assert num_hits_after_pressure(path, NUM_BLOCKS, 8) == 8


def test_a_hot_prompt_that_has_left_the_disk_is_stored_again(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(path, num_rows=128, num_blocks=32) as engine:
        engine.serve(HOT)
        engine.settle()
        engine.serve(cold(32))
        engine.settle()
        assert engine.serve(HOT) == 8
        engine.settle()
        figures = engine.figures()
        assert figures['kvtier_tier_offered_again_blocks{tier="0:disk"}'] == 8
        assert 'kvtier_tier_blocks{tier="0:disk",direction="load"}' not in figures
    with configured_engine(path, num_rows=128, num_blocks=32) as engine:
        assert engine.serve(HOT) == 8


def test_the_head_of_a_prompt_outlives_the_tail_that_was_stored_again(tmp_path: Path) -> None:
    """The tail of a prompt is useless without its head."""
    path = tmp_path / "kv.slab"
    with configured_engine(path, num_rows=128, num_blocks=32) as engine:
        engine.serve(HOT)
        engine.settle()
        engine.serve(cold(28))  # evicts the tail of the hot prompt
        engine.settle()
        assert engine.serve(HOT) == 8
        engine.settle()
        assert engine.figures()['kvtier_tier_offered_again_blocks{tier="0:disk"}'] == 4
        engine.serve(cold(28, 1))
        engine.settle()
        request = ReqContext("looks")
        assert list(engine.tier.lookup_batch(HOT[:4], request)) == [LookupResult.HIT] * 4


def test_the_head_of_a_prompt_outlives_its_tail_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(path, num_rows=128, num_blocks=32) as engine:
        engine.serve(HOT)
        engine.settle()
        engine.serve(cold(28))
        engine.settle()
        assert engine.serve(HOT) == 8
        engine.settle()
    assert num_hits_after_pressure(path, 32, 4) == 4


def test_the_head_of_a_prompt_that_was_stored_in_parts_outlives_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    with configured_engine(path, num_rows=128, num_blocks=32) as engine:
        engine.serve(HOT[:4])
        assert engine.serve(HOT) == 4
        engine.settle()
    assert num_hits_after_pressure(path, 32, 4) == 4


LONG = TierHarness.keys(1024)
ROOM_FOR_LONG = 1040


def serve_long(path: Path) -> int:
    """Store a prompt in many parts, most of them after its request has ended. Returns the number of
    touches of single blocks."""
    num_touched = 0
    with configured_engine(
        path, num_rows=ROOM_FOR_LONG, num_blocks=ROOM_FOR_LONG, max_pinned_share=1 / 16
    ) as engine:
        tier = engine.tier
        assert isinstance(tier, DiskSecondaryTierManager)
        touch = tier._table.touch

        def counted(keys: Collection[OffloadKey], req_context: ReqContext) -> int:
            nonlocal num_touched
            num_touched += len(keys)
            return touch(keys, req_context)

        tier._table.touch = counted  # type: ignore[method-assign]
        engine.serve(LONG, then_step=False)
        assert engine.figures()['kvtier_tier_waiting_blocks{tier="0:disk"}'] >= len(LONG) * 7 / 8
        engine.settle()
        assert engine.figures()['kvtier_disk_resident_blocks{tier="0:disk"}'] == len(LONG)
    return num_touched


def test_a_long_prompt_that_is_stored_in_parts_is_not_touched_with_each(tmp_path: Path) -> None:
    """Otherwise the cost would be quadratic in its length, on the scheduler thread."""
    assert serve_long(tmp_path / "kv.slab") <= 2 * len(LONG)


def test_the_head_of_a_prompt_that_waited_to_be_stored_outlives_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "kv.slab"
    serve_long(path)
    with configured_engine(path, num_rows=4096, num_blocks=ROOM_FOR_LONG) as engine:
        assert engine.tier.capacity_blocks is not None
        engine.serve(cold(engine.tier.capacity_blocks - 4))
        engine.settle()
        assert engine.serve(LONG) == 4
