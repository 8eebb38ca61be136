"""Nobody waits for ever: not for a ledger that another has, nor for blocks that do not leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiering.fs import clerk as clerk_module
from kvtier.tiering.fs.books import Books
from kvtier.tiering.fs.lease import Lease, Shut
from kvtier.tiering.fs.seat import Occupant
from tests.tiering.fs.accounts import store_some, wait_until_stored
from tests.tiering.fs.pauses import shorten_pauses
from tests.tiering.fs.rig import block_files, fs_harness, fs_of
from tests.tiering.patience import PATIENCE_S, wait_until

FOR_EVER_S = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def other(root: Path) -> Iterator[Books]:
    books = Books(root, Occupant.here("other", ""), PATIENCE_S)
    yield books
    books.close()


def is_refused(lease: Lease, times: int) -> Callable[[], bool]:
    """Whether so many who came one after the other were all refused by now. They have a thread,
    which ends with the lease."""
    refused: list[Shut] = []

    def take() -> None:
        for _ in range(times):
            try:
                lease.take()
            except Shut as refusal:
                refused.append(refusal)

    threading.Thread(target=take, daemon=True).start()
    return lambda: len(refused) == times


def fill(root: Path, harness: Any) -> None:
    """Store until blocks leave."""
    start = 0
    while not fs_of(harness)._clerk.num_evicted:
        store_some(harness, harness.keys(8, start))
        start += 8
    assert block_files(root)


def test_who_comes_while_another_has_the_ledger_does_not_wait_as_well(
    root: Path, other: Books
) -> None:
    """One has waited in vain. As many as there are blocks would wait for hours, one by one."""
    with fs_harness(root) as harness:
        tier = fs_of(harness)
        lease = tier._clerk.lease
        patience_s, tier._books._patience_s = tier._books._patience_s, 0.05
        with other.transaction():
            wait_until(is_refused(lease, 1), "the first is refused")
            tier._books._patience_s = FOR_EVER_S
            wait_until(is_refused(lease, 200), "nobody else waits")
            tier._books._patience_s = patience_s
        wait_until_stored(harness, harness.keys(4))


def test_all_that_is_queued_ends_while_another_has_the_ledger(root: Path, other: Books) -> None:
    with fs_harness(root, num_rows=200) as harness:
        fs_of(harness)._books._patience_s = 0.5
        with other.transaction():
            job = harness.store(harness.keys(200))
            harness.drain()
        assert harness.ledger.reports[job.job_id].moved == set()


def test_blocks_that_all_refuse_to_leave_are_not_waited_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone has made a backup by hard links. Nobody can tell it from blocks that are being
    published, for a minute."""
    monkeypatch.setattr(clerk_module, "_PATIENCE_S", 0.3)
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
    """The sweeper hangs in it, and says nothing at all."""
    monkeypatch.setattr(clerk_module, "_PATIENCE_S", 0.3)
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
