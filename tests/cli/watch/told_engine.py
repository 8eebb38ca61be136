"""A status socket with the code of an engine, that answers what a test tells it to. For states that
a real engine is seldom in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.observe.status_socket import StatusSocket

__all__ = ["BLOCK_BYTES", "ToldEngine", "of_tier"]

BLOCK_BYTES = 1 << 20
HOST = {
    "tier": "host",
    "type": "cpu",
    "medium": "CPU",
    "locality": "LOCAL",
    "capacity_blocks": 100,
}
DISK = {
    "tier": "0:disk",
    "type": "disk",
    "medium": "STORAGE",
    "locality": "LOCAL",
    "capacity_blocks": 1000,
    "write": "through",
    "options": {},
}
FS = {
    "tier": "1:fs",
    "type": "fs",
    "medium": "STORAGE",
    "locality": "REMOTE",
    "capacity_blocks": 5000,
    "write": "through",
    "options": {"root_dir": "/mnt/kv"},
}


def of_tier(metric: str, tier: str, label: str = "", value: str = "") -> str:
    more = f',{label}="{value}"' if label else ""
    return f'kvtier_tier_{metric}{{tier="{tier}"{more}}}'


class ToldEngine:
    """A context manager that listens while it is open."""

    def __init__(self, path: Path | None = None, *, model: str = "Llama-3-8B") -> None:
        self.now_s = time.time()
        self.counters: dict[str, float] = {"kvtier_cpu_stored_blocks": 1}
        self.gauges: dict[str, float] = {}
        self.histograms: dict[str, Any] = {}
        self.idle_s = 0.0
        self.tiers: list[Mapping[str, Any]] = [HOST, DISK, FS]
        self.switches: dict[str, Any] = {"loads_off": [], "stores_off": [], "share": 100.0}
        self.requests: list[dict[str, Any]] | None = None
        self.history: list[tuple[float, dict[str, float]]] = []
        self.started_s = self.now_s - 100
        self._model = model
        self._socket = StatusSocket(path)
        self.path = self._socket.path
        self._socket.answer("status", self._status)
        self._socket.answer("history", self._history)
        self._socket.answer("explain", self._explain)
        self._socket.start()

    def _status(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "engine": {
                "engine_id": "told",
                "pid": 4711,
                "started_s": self.started_s,
                "model": self._model,
                "dtype": "bfloat16",
            },
            "block_bytes": BLOCK_BYTES,
            "tiers": self.tiers,
            "config": {},
            "switches": self.switches,
            "now_s": self.now_s,
            "collected_s": self.now_s - self.idle_s,
            "counters": self.counters,
            "gauges": self.gauges,
            "histograms": self.histograms,
        }

    def _history(self, question: Mapping[str, Any]) -> dict[str, Any]:
        new = self.history[question["after"] :]
        names = {name for _, values in new for name in values}
        return {
            "times": [when for when, _ in new],
            "series": {name: [values.get(name) for _, values in new] for name in names},
            "after": len(self.history),
            "has_more": False,
        }

    def _explain(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self.requests is None:
            raise ValueError("not a question")
        return {"requests": self.requests[: question["last"]]}

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
