"""A real `vllm serve` on loopback, as its clients and its operator see it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import pytest

from kvtier.base import metric_series
from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import WORDS
from tests.e2e.vllm.processes import REPO, VLLM, End
from tests.e2e.vllm.scenarios import command

DEVICE_BLOCKS = 64
"""Blocks in the device cache of every server."""
_HOST = "127.0.0.1"
_PATIENCE_S = 300.0
"""Seconds for a start, an answer, a metric or an end. A start takes 30 s on an idle machine."""
_HASH_SEED = "0"
"""Without it, some releases of vLLM draw a random root of block hashes."""


def random_words(count: int, seed: object) -> list[str]:
    """Words that are one token each."""
    source = Random(f"words {seed}")
    return [WORDS[source.randrange(3, len(WORDS))] for _ in range(count)]


def kvtier_flag(options: Mapping[str, Any]) -> str:
    """The value of `--kv-transfer-config`, as an operator writes it."""
    return json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(options),
        }
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer that a client gets."""

    text: str
    logprobs: list[float]
    cached_tokens: int
    """Prompt tokens that were not computed, from any cache."""
    request_id: str = field(default="", compare=False)

    def is_as(self, other: Completion) -> bool:
        """True if text and logprobs agree. Logprobs may differ by rounding, which depends on the
        batch."""
        return self.text == other.text and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@dataclass(frozen=True, slots=True)
class Stop:
    """How a server ended after a signal."""

    end: End
    seconds: float


class Server:
    """A server. Use it as a context manager, which kills what is left at its end."""

    def __init__(
        self,
        vllm: VLLM,
        model: Path,
        kvtier: Mapping[str, Any] | None = None,
        *flags: str,
        fresh: bool = False,
    ) -> None:
        """Start the server without waiting. `kvtier`: its extra config; None for stock vLLM alone.

        `fresh`: run the command itself, with a process for every part; otherwise with as few
        processes as possible, the first of them forked from one that has imported vLLM.
        """
        # Bound but not listening: reserves the port for the server.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((_HOST, 0))
        self._number: int = self._port.getsockname()[1]
        self._connections: set[http.client.HTTPConnection] = set()
        flag = () if kvtier is None else ("--kv-transfer-config", kvtier_flag(kvtier))
        arguments = [
            *("serve", str(model), "--served-model-name", "tiny"),
            *("--host", _HOST, "--port", str(self._number)),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-model-len", "1024"),
            *("--max-num-seqs", "8", "--enable-prompt-tokens-details"),
            *flag,
            *flags,
        ]
        package = _package_metadata(vllm)
        contained = vllm.but(
            environment={
                "PYTHONPATH": f"{REPO / 'src'}:{REPO}:{package}",
                "PYTHONHASHSEED": _HASH_SEED,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # On the CPU, this setting gives a rank a process of its own.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if fresh else "0",
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
            },
            patience=_PATIENCE_S,
        )
        self.process = (
            contained.command(vllm.python.parent / "vllm", *arguments)
            if fresh
            else contained.start(command.run, str(package), *arguments)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_value is not None and self.process.is_there:
            exc_value.add_note(self.process.stderr[-6000:])
        self.process.kill()
        self._port.close()

    # --- its clients ----------------------------------------------------------------------------

    def wait_until_up(self) -> None:
        """Wait until the server answers."""
        self.wait_until(self._is_up)

    def _is_up(self) -> bool:
        try:
            return self._ask("GET", "/health")[0] == http.client.OK
        except ConnectionError:
            if not Path(f"/proc/{self.process.pid}").exists():
                raise AssertionError("the server has ended instead of starting") from None
            return False

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_true():
            assert time.monotonic() < deadline, f"not so after {_PATIENCE_S} s"
            time.sleep(0.1)

    def complete(
        self, words: Sequence[str], max_tokens: int = 4, *, replica: int | None = None
    ) -> Completion:
        """Send one prompt; to a certain replica, if the server has several."""
        status, body = self._ask(
            "POST",
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": " ".join(words),
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
            },
            {} if replica is None else {"X-data-parallel-rank": str(replica)},
        )
        assert status == http.client.OK, body
        answer = json.loads(body)
        [choice] = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"]
        assert answer["usage"]["prompt_tokens"] == len(words)
        return Completion(
            choice["text"],
            choice["logprobs"]["token_logprobs"],
            0 if details is None else details["cached_tokens"],
            answer["id"],
        )

    def complete_together(
        self, prompts: Sequence[Sequence[str]], max_tokens: int = 4
    ) -> list[Completion]:
        """Send all prompts at once, each by a client of its own."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(lambda words: self.complete(words, max_tokens), prompts))

    def post(self, path: str) -> None:
        """Send a command whose answer does not matter."""
        status, body = self._ask("POST", path)
        assert status == http.client.OK, body

    def metrics(self) -> dict[str, float]:
        """The metrics: values by name, summed over their labels; kvtier's by series
        (`metric_series`), summed over the labels that vLLM adds."""
        status, body = self._ask("GET", "/metrics")
        assert status == http.client.OK
        values: dict[str, float] = {}
        for line in body.splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                if name.startswith("vllm:kvtier_"):
                    name = metric_series(name, _own_labels(labels))
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def figures(self) -> dict[str, float]:
        """kvtier's metrics, such as `cpu_loaded_blocks`."""
        return kvtiers_figures(self.metrics())

    def figure(self, name: str) -> float:
        """One metric of kvtier's; 0 for a counter that does not exist yet."""
        return self.figures().get(name, 0.0)

    def _ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(_HOST, self._number, timeout=_PATIENCE_S)
        self._connections.add(connection)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            self._connections.discard(connection)
            connection.close()

    # --- its operator ---------------------------------------------------------------------------

    def stop(self, signal_number: int = signal.SIGTERM, *, clients_stay: bool = True) -> Stop:
        """Send the signal to the process that was started, and wait until it has ended."""
        began = time.monotonic()
        os.kill(self.process.pid, signal_number)
        if not clients_stay:
            self.hang_up()
        end = self.process.wait()
        return Stop(end, time.monotonic() - began)

    def hang_up(self) -> None:
        """Disconnect all clients."""
        for connection in list(self._connections):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    def kill_all(self) -> None:
        """Send SIGKILL to all of its processes at once."""
        self.process.kill()


def _package_metadata(vllm: VLLM) -> Path:
    """A folder with metadata of a package `vllm`.

    The command reads the version of that package, and fails if vLLM was installed as `vllm-cpu`.
    The version also selects the platform.
    """
    folder = vllm.zygote.folder / "package"
    metadata = folder / f"vllm-{vllm.zygote.vllm_version}+cpu.dist-info" / "METADATA"
    if not metadata.exists():
        metadata.parent.mkdir(parents=True)
        metadata.write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.zygote.vllm_version}+cpu\n"
        )
    return folder


def kvtiers_figures(metrics: dict[str, float]) -> dict[str, float]:
    """kvtier's metrics under its own names, such as `cpu_loaded_blocks`."""
    return {
        re.sub(r"_total(?={|$)", "", name.removeprefix("vllm:kvtier_")): value
        for name, value in metrics.items()
        if name.startswith("vllm:kvtier_")
    }


def _own_labels(labels: str) -> dict[str, str]:
    """The labels between the braces of a series, in kvtier's order: without those that vLLM adds to
    each, and without the bound of a histogram's bucket."""
    found: dict[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    own = [name for name in found if name not in {"engine", "model_name", "le"}]
    return {name: found[name] for name in sorted(own, key=lambda name: (name != "tier", name))}
