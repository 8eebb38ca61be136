"""A server on another host, which is a network namespace: the guard loads what the link brings
sooner than the engine computes it, and computes the rest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.two_hosts import LINK_PORT
from tests.tiering.valkey.server import valkey_binary

REPO = Path(__file__).resolve().parents[2]
SERVER_ADDRESS, ENGINE_ADDRESS = "10.77.0.1", "10.77.0.2"
SERVER_PORT = 6379
SLOW_LINK = {"delay_s": 0.0, "bytes_per_s": 0.5e6}
"""A prompt has 48 KiB: it takes 0.1 s."""
FAR_AWAY = {"delay_s": 0.06, "bytes_per_s": 1e9}
"""A round trip takes 0.12 s."""
SLOW_GPU, FAST_GPU = 100.0, 20_000.0
"""Tokens a second: a prompt of 96 tokens takes 1 s, or 5 ms."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Host:
    """A network namespace with one address."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def python(self, *words: str) -> list[str]:
        return self.command(sys.executable, "-m", "tests.tiering.two_hosts", *words)


@contextmanager
def running(command: list[str], ready: bytes) -> Iterator[None]:
    """A process that has said that it is ready, and is killed at the end."""
    environment = os.environ | {"PYTHONPATH": f"{REPO / 'src'}:{REPO}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if ready in line:
                    break
            else:
                raise AssertionError(f"{command} has ended")
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """The server's and the engine's host, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: iproute2)")
    server, engine = (Host(f"kvtier-{os.getpid()}-{name}") for name in ("server", "engine"))
    with ExitStack() as stack:
        for host in (server, engine):
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot make network namespaces here: {error.stderr.decode()}")
            stack.callback(ip, "netns", "del", host.name)
        ends = [f"kvt{os.getpid()}{end}" for end in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end, address in zip(
            (server, engine), ends, (SERVER_ADDRESS, ENGINE_ADDRESS), strict=True
        ):
            ip("link", "set", end, "netns", host.name)
            ip("-n", host.name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", host.name, "link", "set", end, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        valkey = server.command(
            *(str(valkey_binary()), "--bind", "127.0.0.1", "--port", str(SERVER_PORT)),
            *("--save", "", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"),
        )
        stack.enter_context(running(valkey, b"Ready to accept connections"))
        yield server, engine


def serve(hosts: tuple[Host, Host], link: dict[str, float], prefill: float) -> dict[str, Any]:
    server, engine = hosts
    words = (str(SERVER_PORT), str(link["delay_s"]), str(link["bytes_per_s"]))
    with running(server.python("link", *words), b"ready"):
        ended = subprocess.run(
            engine.python("engine", f"valkey://{SERVER_ADDRESS}:{LINK_PORT}", str(prefill)),
            env=os.environ | {"PYTHONPATH": f"{REPO / 'src'}:{REPO}"},
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def share_loaded(answer: dict[str, Any]) -> float:
    loaded: list[int] = answer["loaded"]
    return sum(loaded) / (len(loaded) * int(answer["tokens"]))


@pytest.mark.parametrize("link", [SLOW_LINK, FAR_AWAY], ids=["slow link", "far away"])
def test_the_link_brings_blocks_sooner_than_a_slow_gpu(
    hosts: tuple[Host, Host], link: dict[str, float]
) -> None:
    answer = serve(hosts, link, SLOW_GPU)
    # A trial computes a prompt now and then, and host memory is small.
    assert share_loaded(answer) >= 0.7, answer


@pytest.mark.parametrize("link", [SLOW_LINK, FAR_AWAY], ids=["slow link", "far away"])
def test_a_fast_gpu_does_not_wait_for_the_link(
    hosts: tuple[Host, Host], link: dict[str, float]
) -> None:
    answer = serve(hosts, link, FAST_GPU)
    # The first loads measure the link.
    assert share_loaded(answer) <= 0.3, answer
    assert answer["figures"]['kvtier_tier_declined_blocks{tier="0:valkey",reason="slower"}'] > 0
