"""An engine that is driven by calls; `tests.e2e.vllm.remote_engine` is the other side."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.in_process import Answer, InProcessEngine

_CLONE_NEWNET = 0x40000000
_OTHERS_THREADS = {"tqdm_monitor"}
"""Threads of the progress bars that vLLM shows while it loads weights."""


class _Told(logging.Handler):
    """Keeps kvtier's log lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _enter(network: str) -> None:
    """Move this thread, and those that it starts, into a network for good."""
    opened = os.open(network, os.O_RDONLY)
    failed = ctypes.CDLL(None).setns(opened, _CLONE_NEWNET)
    os.close(opened)
    assert not failed, network


class Engine:
    """`InProcessEngine`, called from another process."""

    def __init__(
        self,
        model: str,
        kvtier: dict[str, Any] | None,
        network: str | None = None,
        **engine_args: Any,
    ) -> None:
        """`network`: a network namespace for the engine, such as /proc/4711/ns/net."""
        if network is not None:
            _enter(network)
        self._told = _Told()
        said = logging.getLogger("kvtier")
        said.setLevel(logging.INFO)
        said.addHandler(self._told)
        self._threads = set(threading.enumerate())
        self._engine = InProcessEngine(Path(model), kvtier, **engine_args)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self._engine.add(name, prompt, max_tokens)

    def abort(self, *names: str) -> None:
        self._engine.abort(*names)

    def step(self, count: int) -> None:
        for _ in range(count):
            self._engine.step()

    def run(self) -> None:
        self._engine.run()

    def settle(self) -> None:
        self._engine.settle()

    def rest(self) -> None:
        while self._engine._scheduler.has_requests():
            self._engine.step()

    def answer(self, name: str) -> Answer:
        return self._engine.answer(name)

    def reset_device_cache(self) -> None:
        self._engine.reset_device_cache()

    def reset_all(self, *, running: bool) -> bool:
        return self._engine.reset_all(running=running)

    def figures(self) -> dict[str, float]:
        return self._engine.figures()

    def metrics(self) -> list[dict[str, Any]]:
        return [
            {"name": metric.name, "labels": metric.labels, "value": metric.value}
            for metric in self._engine.metrics()
            if hasattr(metric, "value")
        ]

    def told(self) -> list[tuple[str, str]]:
        return self._told.lines

    def close(self) -> list[str]:
        """Stop the engine. Returns what it left in this process: threads, shared memory."""
        self._engine.close()
        threads = {thread.name for thread in set(threading.enumerate()) - self._threads}
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [*threads - _OTHERS_THREADS, *(line for line in maps if "kvtier-" in line)]
