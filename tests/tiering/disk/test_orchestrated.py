"""The disk tier below host memory, made from a user's configuration."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import Medium, OffloadKey, ReqContext
from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.testing import FaultSchedule, TierHarness
from kvtier.tiering.disk.manager import DiskSecondaryTierManager
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.metrics import tier_label, tier_series
from tests.tiering.disk.engine import configured_engine, engine_with_faults
from tests.tiering.disk.harness import bytes_for, disk_harness, du, is_mapped, silent_disk
from tests.tiering.engine import Engine
from tests.tiering.patience import wait_until

PROMPTS = [TierHarness.keys(6, start=10 * number) for number in range(12)]


def serve_all(engine: Engine) -> list[int]:
    hits = []
    for prompt in PROMPTS:
        hits.append(engine.serve(prompt))
        engine.settle()
    return hits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.slab"


def test_what_host_memory_has_given_up_comes_back(path: Path) -> None:
    """16 rows for 72 blocks, so that nearly all of them are promoted from the disk."""
    with configured_engine(path) as engine:
        assert serve_all(engine) == [0] * 12
        assert serve_all(engine) == [6] * 12
        assert serve_all(engine) == [6] * 12


def test_a_restarted_engine_is_warm(path: Path) -> None:
    with configured_engine(path) as engine:
        serve_all(engine)
    with configured_engine(path) as engine:
        assert engine.figures()['kvtier_disk_resident_blocks{tier="0:disk"}'] == 72
        assert serve_all(engine) == [6] * 12


def test_another_model_finds_nothing_and_the_first_still_does(path: Path) -> None:
    with configured_engine(path) as engine:
        serve_all(engine)
    with configured_engine(path, namespace="other weights") as engine:
        assert engine.serve(PROMPTS[0]) == 0
        engine.settle()
    with configured_engine(path) as engine:
        assert engine.serve(PROMPTS[0]) == 6
        engine.settle()


def test_after_a_reset_nothing_is_found_now_or_after_a_restart(path: Path) -> None:
    with configured_engine(path) as engine:
        serve_all(engine)
        engine.manager.reset_cache()
        engine.settle()
        assert serve_all(engine) == [0] * 12
        engine.manager.reset_cache()
        engine.settle()
    with configured_engine(path) as engine:
        assert serve_all(engine) == [0] * 12
        assert serve_all(engine) == [6] * 12


def test_with_too_little_disk_it_is_a_smaller_cache(path: Path) -> None:
    with configured_engine(path, num_blocks=20) as engine:
        for _ in range(4):
            serve_all(engine)
            assert engine.figures()['kvtier_disk_resident_blocks{tier="0:disk"}'] <= 20
        assert du(path) <= bytes_for(20)
        last = PROMPTS[-1]
        assert engine.serve(last) == 6


def test_what_the_eviction_policy_declines_is_no_failure_of_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_fill(policy: object, keys: list[OffloadKey], num_free: int, _: object) -> int:
        return min(len(keys), num_free)

    monkeypatch.setattr(DensityCachePolicy, "num_admitted", only_fill)
    with configured_engine(path, num_blocks=20, eviction_policy="density") as engine:
        for _ in range(3):
            serve_all(engine)
        figures = engine.figures()
        assert figures['kvtier_disk_resident_blocks{tier="0:disk"}'] == 20
        assert figures['kvtier_disk_declined_blocks{tier="0:disk"}'] >= 52
        assert figures['kvtier_disk_refused_blocks{tier="0:disk"}'] == 0
        disk = tier_label(0, "disk")
        assert figures.get(tier_series(disk, "failed_stores"), 0) == 0
        assert figures[tier_series(disk, "store_breaker_state")] == 0
        assert engine.serve(PROMPTS[0]) == 6, "what came first is still there"


def test_a_slab_that_has_grown_keeps_its_blocks(path: Path) -> None:
    with configured_engine(path, num_blocks=80) as engine:
        serve_all(engine)
    with configured_engine(path, num_blocks=300) as engine:
        assert serve_all(engine) == [6] * 12


def test_events_tell_what_is_where(path: Path) -> None:
    with configured_engine(path, num_blocks=30) as engine:
        there: set[bytes] = set()
        for _ in range(2):
            serve_all(engine)
            for event in engine.manager.take_events():
                if event.medium is not Medium.STORAGE:
                    continue
                if event.removed:
                    assert there.issuperset(event.keys), "removed, but never stored"
                    there.difference_update(event.keys)
                else:
                    there.update(event.keys)
        assert len(there) == engine.figures()['kvtier_disk_resident_blocks{tier="0:disk"}'] == 30


def test_an_engine_ends_though_its_disk_does_not_answer(path: Path) -> None:
    """The engine abandons the tier. Memory that the disk may still write into stays mapped until
    then."""
    threads = set(threading.enumerate())
    engine, faulty = engine_with_faults(path, FaultSchedule(), num_rows=8, shutdown_timeout_s=0.2)
    disk = faulty.tier
    assert isinstance(disk, DiskSecondaryTierManager)
    for prompt in PROMPTS[:3]:
        engine.serve(prompt)
        engine.settle()
    with silent_disk(disk):
        request = ReqContext("waiting")
        engine.manager.on_new_request(request)
        engine.manager.lookup_prefix(PROMPTS[0], request)
        engine.step()
        wait_until(
            lambda: any(lane._num_in_flight for lane in disk._mover.lanes), "a load is under way"
        )
        address = disk._mover.rows_address
        engine.manager.shutdown()
        assert is_mapped(address), "the disk writes into memory that may be someone else's"
    wait_until(lambda: set(threading.enumerate()) <= threads, "the tier has ended")
    with configured_engine(path) as after:
        assert after.serve(PROMPTS[0]) == 6


def test_a_refused_tier_leaves_nothing_behind(path: Path) -> None:
    threads = set(threading.enumerate())
    with configured_engine(path) as engine:
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierStartError, match="is in use by the engine"):
            configured_engine(path)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert engine.serve(PROMPTS[0]) == 0
    assert set(threading.enumerate()) <= threads


def test_a_start_that_fails_says_which_tier(tmp_path: Path) -> None:
    with pytest.raises(TierStartError, match=r"secondary_tiers\[0\].*max_bytes"):
        configured_engine(tmp_path / "kv.slab", max_bytes="64TiB")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("row_bytes", "told", "num_threads"),
    [(4096, {}, 2), ((512 << 10) - 4096, {}, 2), (512 << 10, {}, 4), (4096, {"io_threads": 3}, 3)],
)
def test_large_blocks_have_more_threads_unless_told(
    tmp_path: Path, row_bytes: int, told: dict[str, Any], num_threads: int
) -> None:
    with disk_harness(tmp_path / "kv.slab", 4, row_bytes=row_bytes, num_rows=2, **told):
        names = {thread.name for thread in threading.enumerate()}
    assert {name for name in names if name.removeprefix("kvtier-disk-").isdigit()} == {
        f"kvtier-disk-{number}" for number in range(num_threads)
    }
