"""A process from which engines are forked, several at once: everything is imported, and there is no
thread.

It is given orders, one line each. Each engine has a guardian, which kills it when its time has come
and says how it ended. All write their reports, whole lines, into one pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.tiering.fs.crash.orders import Orders

Report = list[Any]
"""The number of a life, what happened, and figures."""

PATIENCE_S = 30.0


class Nursery:
    """The parent's side. A context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiering.fs.crash.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # numpy's own threads would not survive the fork.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "KVTIER_STRICT": "1"},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._half_line = b""
        self._running: dict[int, int] = {}
        """By number of a life that has begun and not ended, what it can be killed by."""
        self._pids: dict[int, int] = {}
        self._expected: set[int] = set()
        """Lives that were started and have not ended."""
        self._unheard: list[Report] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    # --- lives ---------------------------------------------------------------------------------

    def start(self, orders: Orders) -> None:
        """Let one life begin. It reports by its number."""
        assert self._process.stdin is not None
        self._expected.add(orders.number)
        self._process.stdin.write(orders.to_json() + "\n")
        self._process.stdin.flush()

    @property
    def running(self) -> set[int]:
        """Lives that have not ended, as far as is known."""
        return set(self._expected)

    def kill(self, number: int) -> None:
        """With -9. It has ended when that is reported."""
        self._await_births()
        self._signal(number, signal.SIGKILL)

    def reports(self, wait_s: float) -> list[Report]:
        """What was reported since the last call; waits so long for something."""
        early, self._unheard = self._unheard, []
        return early + self._read(0 if early else wait_s)

    def end_all(self) -> None:
        """Kill whoever is left, and listen to nobody."""
        while self._expected:
            for number in list(self._running):
                self._signal(number, signal.SIGKILL)
            self._read(0.1)
        self._unheard = []

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Nobody does anything meanwhile. What is under way at the kernel goes on."""
        self._await_births()
        stopped = list(self._running)
        for number in stopped:
            self._signal(number, signal.SIGSTOP)
        try:
            for number in stopped:
                self._await_stop(number)
            yield
        finally:
            for number in stopped:
                self._signal(number, signal.SIGCONT)

    # --- inside --------------------------------------------------------------------------------

    def _await_births(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._expected - self._running.keys():
            assert time.monotonic() < deadline, "a life has not begun"
            self._unheard += self._read(0.01)

    def _signal(self, number: int, what: signal.Signals) -> None:
        if number in self._running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._running[number], what)

    def _await_stop(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_still(self._pids[number]):
            assert time.monotonic() < deadline, "a process does not stop"
            time.sleep(0.0005)

    def _read(self, wait_s: float) -> list[Report]:
        found: list[Report] = []
        while select.select([self._out], [], [], 0 if found else wait_s)[0]:
            some = os.read(self._out, 1 << 16)
            if not some:
                raise RuntimeError("the process that engines are forked from has ended")
            *lines, self._half_line = (self._half_line + some).split(b"\n")
            for line in lines:
                report = json.loads(line)
                self._note(report)
                found.append(report)
        return found

    def _note(self, report: Report) -> None:
        match report:
            case [number, "born", pid]:
                with suppress(ProcessLookupError):
                    self._running[number] = os.pidfd_open(pid)
                    self._pids[number] = pid
            case [number, "ended", _]:
                self._expected.discard(number)
                if number in self._running:
                    os.close(self._running.pop(number))
                    del self._pids[number]


def _is_still(pid: int) -> bool:
    """Whether no thread of a process runs, or will run of its own accord."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(") ")[2][0]
            if state not in "TtZX":
                return False
    return True


# --- in the process, its guardians and its engines -----------------------------------------------


def _serve() -> None:
    from tests.tiering.fs.crash.child import live

    for line in sys.stdin:
        orders = Orders.from_json(line)
        if os.fork() == 0:
            guard(orders, live)
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def guard(orders: Orders, live: Any) -> None:
    """Let an engine live in a child, and see to its end."""

    def report(*what: Any) -> None:
        """One write: whole, or not at all."""
        os.write(1, json.dumps([orders.number, *what]).encode() + b"\n")

    child = os.fork()
    if child == 0:
        live(orders, report)
        os._exit(0)
    report("born", child)
    if orders.kill_after_s is not None:
        time.sleep(orders.kill_after_s)
        os.kill(child, signal.SIGKILL)  # a zombie is still there to be killed
    _, status = os.waitpid(child, 0)
    report("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
