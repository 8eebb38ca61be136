"""Lives of engines, forked from one process in which everything is imported and no thread runs.

That process, the server, reads orders, one line each. Each life has a guardian process, which kills
it when its time has come and reports how it ended. All of them write their reports, in whole lines,
into one pipe.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["EngineProcesses", "LifeOrders", "Report", "Wrong"]

Report = list[Any]
"""The number of a life, what happened, and details."""

PATIENCE_S = 30.0


class Wrong(Exception):
    """Raised in a life that has seen the tier do something that it must not do."""


class LifeOrders(Protocol):
    """What the kit uses of a life's orders, which are a dataclass."""

    @property
    def number(self) -> int:
        """Of the life in its run."""

    @property
    def kill_after_s(self) -> float | None:
        """Seconds after which the life is killed from outside."""


class EngineProcesses:
    """The test's side. A context manager; starts lives, kills them, and collects reports."""

    def __init__(self, child_module: str) -> None:
        """`child_module`: has the class `Orders` and the function `live(orders, report)`,
        which is called in a process of its own and may raise."""
        self._child_module = child_module

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as kit; kit.serve({self._child_module!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # numpy's own threads would not survive the fork.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "KVTIER_STRICT": "1"},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._half_line = b""
        self._pidfds: dict[int, int] = {}
        """By number of a life that has begun and not ended."""
        self._pids: dict[int, int] = {}
        self._expected: set[int] = set()
        """Lives that were started and have not ended."""
        self._unread: list[Report] = []
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

    def start(self, orders: LifeOrders) -> None:
        """Start one life. Its reports carry its number."""
        assert self._process.stdin is not None
        self._expected.add(orders.number)
        self._process.stdin.write(json.dumps(asdict(orders)) + "\n")  # type: ignore[call-overload]
        self._process.stdin.flush()

    def live(self, orders: LifeOrders) -> Iterator[Report]:
        """Start one life while no other runs, and yield its reports until it has ended. The last
        one is `[number, "ended", status]`, with a negative status if a signal ended it."""
        self.start(orders)
        while self._expected:
            yield from self.reports(PATIENCE_S)

    @property
    def running(self) -> set[int]:
        """Lives whose end was not reported yet."""
        return set(self._expected)

    def kill(self, number: int) -> None:
        """Send SIGKILL. The life has ended when that is reported."""
        self._await_starts()
        self._signal(number, signal.SIGKILL)

    def reports(self, wait_s: float) -> list[Report]:
        """The reports since the last call. Waits up to `wait_s` for the first."""
        early, self._unread = self._unread, []
        return early + self._read(0 if early else wait_s)

    def end_all(self) -> None:
        """Kill all lives that are left, and drop their reports."""
        while self._expected:
            for number in list(self._pidfds):
                self._signal(number, signal.SIGKILL)
            self._read(0.1)
        self._unread = []

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop all lives meanwhile. I/O that is already with the kernel goes on."""
        self._await_starts()
        stopped = list(self._pidfds)
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

    def _await_starts(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._expected - self._pidfds.keys():
            assert time.monotonic() < deadline, "a life has not begun"
            self._unread += self._read(0.01)

    def _signal(self, number: int, what: signal.Signals) -> None:
        if number in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[number], what)

    def _await_stop(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_stopped(self._pids[number]):
            assert time.monotonic() < deadline, "a process does not stop"
            time.sleep(0.0005)

    def _read(self, wait_s: float) -> list[Report]:
        found: list[Report] = []
        while select.select([self._out], [], [], 0 if found else wait_s)[0]:
            some = os.read(self._out, 1 << 16)
            if not some:
                raise RuntimeError("the process that lives are forked from has ended")
            *lines, self._half_line = (self._half_line + some).split(b"\n")
            for line in lines:
                report = json.loads(line)
                self._note(report)
                found.append(report)
        return found

    def _note(self, report: Report) -> None:
        match report:
            case [number, "started", pid]:
                with suppress(ProcessLookupError):
                    self._pidfds[number] = os.pidfd_open(pid)
                    self._pids[number] = pid
            case [number, "ended", _]:
                self._expected.discard(number)
                if number in self._pidfds:
                    os.close(self._pidfds.pop(number))
                    del self._pids[number]


def _is_stopped(pid: int) -> bool:
    """True if no thread of a process runs, or will run without a signal."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(") ")[2][0]
            if state not in "TtZX":
                return False
    return True


# --- in the server, the guardians and the lives ---------------------------------------------------


def serve(child_module: str) -> None:
    """The main function of the server."""
    child = import_module(child_module)
    for line in sys.stdin:
        orders = child.Orders(**json.loads(line))
        if os.fork() == 0:
            _guard(orders, child.live)
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _guard(orders: LifeOrders, live: Callable[[Any, Callable[..., None]], None]) -> None:
    """Run a life in a child process, kill it if it is time, and report its end."""

    def report(*what: Any) -> None:
        """One write, so that a line is in the pipe completely or not at all."""
        os.write(1, json.dumps([orders.number, *what]).encode() + b"\n")

    child = os.fork()
    if child == 0:
        logging.disable()
        try:
            live(orders, report)
        except Wrong as wrong:
            report("wrong", str(wrong))
        except BaseException:
            report("wrong", traceback.format_exc()[-3000:])
        os._exit(0)
    report("started", child)
    if orders.kill_after_s is not None:
        time.sleep(orders.kill_after_s)
        os.kill(child, signal.SIGKILL)  # also works on a zombie
    _, status = os.waitpid(child, 0)
    report("ended", os.waitstatus_to_exitcode(status))
