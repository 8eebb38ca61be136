"""Dynamo's standalone index of KV caches, as a process: a consumer of events that is not ours."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

__all__ = ["DynamoRouter", "Overlap"]

_MODEL = "a-model"
_PATIENCE_S = 30.0


class Overlap(NamedTuple):
    """How many tokens of a prompt one worker has: on the device, and then further below."""

    device: int
    host: int
    """On the device or, from there on, in host memory."""
    disk: int
    """In either, or, from there on, on disk."""


class DynamoRouter:
    """Use it as a context manager."""

    def __init__(self, block_tokens: int, log: Path) -> None:
        self._block_tokens = block_tokens
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = log.open("w")
        words = ["--port", str(port), "--block-size", str(block_tokens), "--threads", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", *words],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": str(log.parent)},
        )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                self._call("/workers")
                return self
            assert self._process.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _call(self, path: str, document: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            None if document is None else json.dumps(document).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def register(self, endpoint: str, replay_endpoint: str) -> None:
        """Subscribe to the events of worker 1."""
        self._call(
            "/register",
            {
                "instance_id": 1,
                "endpoint": endpoint,
                "replay_endpoint": replay_endpoint,
                "model_name": _MODEL,
                "block_size": self._block_tokens,
            },
        )

    def unregister(self) -> None:
        self._call("/unregister", {"instance_id": 1, "model_name": _MODEL})

    def overlap(self, prompt: Sequence[int]) -> Overlap:
        """How much of a prompt worker 1 has."""
        found = self._call("/query", {"token_ids": list(prompt), "model_name": _MODEL})
        worker = found["instances"].get("1", {"gpu": 0, "cpu": 0, "disk": 0})
        return Overlap(worker["gpu"], worker["cpu"], worker["disk"])

    def expect(
        self,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Overlap],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until the router knows exactly this. `meanwhile`: called between two attempts."""
        deadline = time.monotonic() + _PATIENCE_S
        while (found := [self.overlap(prompt) for prompt in prompts]) != list(expected):
            assert time.monotonic() < deadline, f"{found} instead of {expected}"
            meanwhile()
            time.sleep(0.05)
