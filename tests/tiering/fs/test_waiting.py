"""No thread waits for ever: not for a locked ledger, nor for blocks that cannot be evicted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiering.fs import publisher as publisher_module
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.quota import ReservationPool, StoresSuspended
from kvtier.tiering.fs.root import RootSession
from tests.tiering.fs.accounts import store_some, wait_until_stored
from tests.tiering.fs.harness import block_files, fs_harness, fs_of
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.patience import PATIENCE_S, wait_until

FOR_EVER_S = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def other(root: Path) -> Iterator[RootSession]:
    session = RootSession(root, EngineInfo.here("other", ""), PATIENCE_S)
    yield session
    session.close()


def is_refused(pool: ReservationPool, times: int) -> Callable[[], bool]:
    """True once `times` calls of `take`, one after the other, were all refused. They run on a
    thread that ends with the pool."""
    refused: list[StoresSuspended] = []

    def take() -> None:
        for _ in range(times):
            try:
                pool.take()
            except StoresSuspended as refusal:
                refused.append(refusal)

    threading.Thread(target=take, daemon=True).start()
    return lambda: len(refused) == times


def fill(root: Path, harness: Any) -> None:
    """Store until blocks are evicted."""
    start = 0
    while not fs_of(harness)._publisher.num_evicted:
        store_some(harness, harness.keys(8, start))
        start += 8
    assert block_files(root)


def test_who_comes_while_another_has_the_ledger_does_not_wait_as_well(
    root: Path, other: RootSession
) -> None:
    """One store has waited in vain. If each block waited as long in turn, it would take hours."""
    with fs_harness(root) as harness:
        tier = fs_of(harness)
        pool = tier._publisher.pool
        patience_s, tier._session._patience_s = tier._session._patience_s, 0.05
        with other.transaction():
            wait_until(is_refused(pool, 1), "the first is refused")
            tier._session._patience_s = FOR_EVER_S
            wait_until(is_refused(pool, 200), "nobody else waits")
            tier._session._patience_s = patience_s
        wait_until_stored(harness, harness.keys(4))


def test_all_that_is_queued_ends_while_another_has_the_ledger(
    root: Path, other: RootSession
) -> None:
    with fs_harness(root, num_rows=200) as harness:
        fs_of(harness)._session._patience_s = 0.5
        with other.transaction():
            job = harness.store(harness.keys(200))
            harness.drain()
        assert harness.ledger.reports[job.job_id].moved == set()


def test_blocks_that_all_refuse_to_leave_are_not_waited_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup by hard links looks for a minute like blocks that are being published."""
    monkeypatch.setattr(publisher_module, "_PATIENCE_S", 0.3)
    with fs_harness(root, 20) as harness:
        fill(root, harness)
        for number, path in enumerate(block_files(root)):
            os.link(path, tmp_path / f"backup-{number}")
        there = set(block_files(root))
        job = harness.store(harness.keys(64, start=10_000))
        harness.drain()
        assert len(harness.ledger.reports[job.job_id].moved) < 64
        assert there <= set(block_files(root))


def test_a_directory_that_does_not_answer_is_not_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper hangs in it, and reports nothing."""
    monkeypatch.setattr(publisher_module, "_PATIENCE_S", 0.3)
    answers = threading.Event()
    real = os.scandir

    def hang(path: Any = ".") -> Any:
        if threading.current_thread().name == "kvtier-fs-sweeper":
            answers.wait()
        return real(path)

    try:
        with fs_harness(root, 20) as harness:
            monkeypatch.setattr(os, "scandir", hang)
            jobs = [harness.store(harness.keys(64, start)) for start in range(0, 256, 64)]
            assert sum(len(report.moved) for report in harness.wait_for(*jobs)) < 256
            answers.set()
            wait_until_stored(harness, harness.keys(4, start=5000))
    finally:
        answers.set()
