"""A process from which lives are forked: everything is imported, and there is no thread.

It is given orders, one line each, and lets the child write its reports to where it writes itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from tests.tiering.disk.crash.orders import Orders

Report = list[Any]
"""What happened, and figures."""


class Nursery:
    """The parent's side. A context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiering.disk.crash.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # numpy's own threads would not survive the fork.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "KVTIER_STRICT": "1"},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def live(self, orders: Orders) -> Iterator[Report]:
        """Let one life be lived, and say what it reports. The last report is `["ended", status]`,
        with the status negative if a signal was the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orders.to_json() + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            report: Report = json.loads(line)
            yield report
            if report[0] == "ended":
                return
        raise RuntimeError("the process that lives are forked from has ended")


def report(*what: Any) -> None:
    """One write: whole, or not at all."""
    os.write(1, json.dumps(what).encode() + b"\n")


def _serve() -> None:
    from tests.tiering.disk.crash.child import live

    for line in sys.stdin:
        orders = Orders.from_json(line)
        child = os.fork()
        if child == 0:
            live(orders, report)
            os._exit(0)
        if orders.kill_after_s is not None:
            time.sleep(orders.kill_after_s)
            os.kill(child, signal.SIGKILL)  # a zombie is still there to be killed
        _, status = os.waitpid(child, 0)
        report("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
