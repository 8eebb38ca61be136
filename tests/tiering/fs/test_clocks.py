"""The order of eviction follows the files' time stamps, whichever host wrote them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.fs import eviction as module
from kvtier.tiering.fs.eviction import Sweeper
from kvtier.tiering.fs.layout import SHARDS, block_path, namespace_path
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import RootSession
from tests.tiering.fs.harness import block_files, fs_harness
from tests.tiering.patience import PATIENCE_S

MINUTE_NS = 60 * 10**9


class ShiftedClock:
    """The clock of a host whose time is wrong."""

    def __init__(self, shift_ns: int) -> None:
        self._shift_ns = shift_ns

    def time_ns(self) -> int:
        return time.time_ns() + self._shift_ns

    def time(self) -> float:
        return self.time_ns() / 1e9

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[RootSession]:
    made = RootSession(tmp_path / "root", EngineInfo.here("sweeper", ""), PATIENCE_S)
    yield made
    made.close()


def first_to_leave(session: RootSession, namespace: Path, count: int) -> list[str]:
    found = threading.Event()
    errors: list[OSError] = []
    sweeper = Sweeper(session, found.set, errors.append)
    sweeper.use((namespace,), None)
    sweeper.take(count)
    sweeper.start()
    try:
        assert found.wait(PATIENCE_S)
    finally:
        sweeper.stop()
    assert not errors
    return [block.path for block in sweeper.take(count)]


@pytest.mark.parametrize("shift_min", [-120, -2, 0, 2])
def test_what_others_have_just_used_does_not_leave_where_a_clock_is_wrong(
    session: RootSession, monkeypatch: pytest.MonkeyPatch, shift_min: int
) -> None:
    namespace = namespace_path(session.blocks, bytes(16))
    for shard in SHARDS:
        (namespace / shard).mkdir(parents=True)
    now = time.time_ns()
    old: list[str] = []
    for number in range(60):
        path = block_path(str(namespace), OffloadKey(b"key %06d" % number))
        Path(path).touch()
        used_ns = now - number
        if number >= 30:
            used_ns = now - 60 * MINUTE_NS + number
            old.append(path)
        os.utime(path, ns=(used_ns, used_ns))
    monkeypatch.setattr(module, "time", ShiftedClock(shift_min * MINUTE_NS))
    assert first_to_leave(session, namespace, 20) == old[:20]


def test_of_what_is_stored_the_head_of_the_prompt_is_the_last_to_leave(tmp_path: Path) -> None:
    """In any order in which the disk completes the writes."""
    prompts = [TierHarness.keys(64, start) for start in range(0, 640, 64)]
    with fs_harness(tmp_path / "root", 1024, num_rows=640) as harness:
        jobs = [harness.store(prompt) for prompt in prompts]
        assert all(report.result.success for report in harness.wait_for(*jobs))
        stamps = {path.name: path.stat().st_mtime_ns for path in block_files(tmp_path / "root")}
    for prompt in prompts:
        used = [stamps[key.hex()] for key in prompt]
        assert used == sorted(used, reverse=True)
        assert len(set(used)) == len(used)
