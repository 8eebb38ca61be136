"""The write budget of a disk tier is kept across restarts and kills."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.tiering.disk.budgeted_engine import BLOCKS_PER_S, BUSY, FORGETFUL, IDLE
from tests.tiering.disk.engine import configured_engine

SLACK_S = 0.5
"""What an engine may earn before it is heard of."""
SAVED_S = 4.0


class Life:
    """One engine process, from its first line to its end. It is killed if it has not ended."""

    def __init__(self, path: Path, mode: str) -> None:
        command = [sys.executable, "-m", "tests.tiering.disk.budgeted_engine", str(path), mode]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.num_written = 0
        self._listen()
        self._began = time.monotonic()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self.num_written = int(self._process.stdout.readline())

    def go_on(self, seconds: float) -> None:
        while time.monotonic() < self._began + seconds:
            self._listen()

    @property
    def earned(self) -> float:
        """The blocks that the budget has allowed for this life so far."""
        return BLOCKS_PER_S * (time.monotonic() - self._began + SLACK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def end(self) -> None:
        """Shut down as an engine does that is not killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        assert self._process.wait() == 0


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    slab = tmp_path / "kv.slab"
    yield slab
    with configured_engine(slab):
        pass  # an engine that starts removes what killed ones have left in shared memory


def lives_after_a_thrifty_one(path: Path, mode: str, how_many: int) -> tuple[list[int], float]:
    """An engine saves up and ends; others write what they may, and are killed. Returns what each of
    these has written, and what the budget has allowed in all."""
    with Life(path, IDLE) as thrifty:
        thrifty.go_on(SAVED_S)
        allowed = thrifty.earned
        thrifty.end()
    written = []
    for _ in range(how_many):
        with Life(path, mode) as life:
            life.go_on(1.5)
            allowed += life.earned
        written.append(life.num_written)
    return written, allowed


def test_what_was_saved_up_is_spent_once_though_engines_are_killed(path: Path) -> None:
    written, allowed = lives_after_a_thrifty_one(path, BUSY, 3)
    assert sum(written) <= allowed
    assert written[0] > written[1] + BLOCKS_PER_S * SAVED_S / 3, "the first one has inherited"


def test_an_engine_that_does_not_note_what_it_takes_is_seen(path: Path) -> None:
    written, allowed = lives_after_a_thrifty_one(path, FORGETFUL, 3)
    assert sum(written) > allowed


@pytest.mark.parametrize("is_killed", [True, False])
def test_many_short_lives_write_no_more_than_a_long_one(path: Path, is_killed: bool) -> None:
    written, allowed = 0, 0.0
    for _ in range(4):
        with Life(path, BUSY) as life:
            life.go_on(0.8)
            allowed += life.earned
            written += life.num_written
            if not is_killed:
                life.end()
    assert 0 < written <= allowed
