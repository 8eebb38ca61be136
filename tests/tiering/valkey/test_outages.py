"""The server ends, hangs or comes back empty, or the network is cut or stalls in the middle of a
transfer. An engine over the tier has the tokens of one without, holds no request past its
deadlines, and uses the tier again when it can."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from random import Random, SystemRandom
from typing import Any

import pytest

from kvtier.tiering.valkey import wire
from tests.tiering.patience import PATIENCE_S, wait_until
from tests.tiering.processes import free_port
from tests.tiering.proxy import Direction, Proxy, proxy_to
from tests.tiering.valkey.harness import valkey_harness
from tests.tiering.valkey.server import ValkeyProcess, block_keys
from tests.tiering.valkey.serving import BLOCKS, LONGEST_S, PROMPTS, TOKENS, Serving, serving


@pytest.fixture
def proxy(server: ValkeyProcess) -> Iterator[Proxy]:
    with proxy_to(server.port) as between:
        yield between


@pytest.fixture
def warm(server: ValkeyProcess, proxy: Proxy) -> Iterator[Serving]:
    """An engine whose prompts are all in the tier."""
    with serving(f"valkey://127.0.0.1:{proxy.port}") as engine:
        engine.serve_until_loaded()
        yield engine


def test_prompts_come_from_the_server(server: ValkeyProcess, warm: Serving) -> None:
    with server.client() as client:
        assert len(block_keys(client)) == len(PROMPTS) * BLOCKS
    assert warm.serve_all() == [TOKENS] * len(PROMPTS)


def test_a_killed_server(server: ValkeyProcess, warm: Serving) -> None:
    server.kill()
    try:
        assert warm.serve_all() == [0] * len(PROMPTS)
        assert warm.counted("failures_unreachable") > 0
    finally:
        server.start()
    warm.serve_until_loaded()


def test_a_server_that_stands_still(server: ValkeyProcess, warm: Serving) -> None:
    with server.standing_still():
        for _ in range(2):
            assert warm.serve_all() == [0] * len(PROMPTS)
    warm.serve_until_loaded()


def test_a_server_that_comes_back_empty(server: ValkeyProcess, warm: Serving) -> None:
    """The engine still takes the blocks to be there."""
    server.kill()
    server.start()
    assert warm.serve_all() == [0] * len(PROMPTS)
    warm.serve_until_loaded()


def test_a_server_that_was_emptied(server: ValkeyProcess, warm: Serving) -> None:
    """Blocks that the engine takes to be there are misses, and not failures."""
    with server.client() as client:
        client.flushall()
    assert warm.serve_all() == [0] * len(PROMPTS)
    assert warm.counted("vanished_blocks") > 0
    assert warm.counted("forgotten_blocks") == 0
    warm.serve_until_loaded()
    assert warm.counted("failures_unreachable") == 0


@pytest.mark.parametrize("after", [0, 20_000], ids=["at_once", "in_a_payload"])
@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
def test_the_network_fails_in_a_load(proxy: Proxy, warm: Serving, stalls: bool, after: int) -> None:
    """The blocks of a prompt are 52,000 bytes in one answer."""
    (proxy.stall if stalls else proxy.cut)(Direction.FROM_SERVER, after)
    assert warm.serve(PROMPTS[0]) < TOKENS
    assert proxy.is_holding
    assert warm.serve(PROMPTS[1]) < TOKENS
    proxy.heal()
    warm.serve_until_loaded()


@pytest.mark.parametrize("after", [0, 20_000], ids=["at_once", "in_a_payload"])
@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
def test_the_network_fails_in_a_store(
    server: ValkeyProcess, proxy: Proxy, stalls: bool, after: int
) -> None:
    with serving(f"valkey://127.0.0.1:{proxy.port}") as engine:
        (proxy.stall if stalls else proxy.cut)(Direction.TO_SERVER, after)
        assert engine.serve(PROMPTS[0]) == 0
        wait_until(lambda: proxy.is_holding, "the network has failed")
        assert engine.serve_all()[1:] == [0] * (len(PROMPTS) - 1)
        proxy.heal()
        engine.serve_until_loaded()
    with server.client() as client:
        assert len(block_keys(client)) == len(PROMPTS) * BLOCKS


@pytest.mark.soak  # over TLS, it is tested always
def test_connections_that_the_network_has_forgotten(proxy: Proxy, warm: Serving) -> None:
    """They bring nothing any more, and do not end by themselves."""
    proxy.forget_connections()
    assert warm.serve(PROMPTS[0]) < TOKENS
    warm.serve_until_loaded()


def test_the_first_forgotten_connection_that_is_found_counts_for_all(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others would find out one after the other, and lose a unit each."""
    monkeypatch.setattr(wire, "TIMEOUT_S", 0.5)
    with valkey_harness(f"valkey://127.0.0.1:{proxy.port}", connections=1) as harness:
        old, new = harness.keys(8), harness.keys(8, start=8)
        harness.wait_for(harness.store(old))
        harness.wait_for(harness.load(old))
        proxy.forget_connections()
        (failed,) = harness.wait_for(harness.load(old))
        (stored,) = harness.wait_for(harness.store(new))
        assert (failed.moved, stored.moved) == (set(), set(new))


def test_a_server_killed_in_a_load(server: ValkeyProcess, proxy: Proxy, warm: Serving) -> None:
    proxy.stall(Direction.FROM_SERVER, 20_000)
    assert warm.serve(PROMPTS[0]) < TOKENS
    server.kill()
    proxy.heal()
    try:
        assert warm.serve(PROMPTS[1]) == 0
    finally:
        server.start()
    warm.serve_until_loaded()


def test_an_engine_that_starts_before_its_server(server: ValkeyProcess) -> None:
    server.kill()
    try:
        with serving(server.url) as engine:
            assert engine.serve(PROMPTS[0]) == 0
            server.start()
            engine.serve_until_loaded()
    finally:
        server.kill()
        server.start()


def test_an_engine_ends_while_its_server_stands_still(server: ValkeyProcess, proxy: Proxy) -> None:
    with serving(f"valkey://127.0.0.1:{proxy.port}") as engine:
        engine.serve_until_loaded()
        with server.standing_still():
            engine.serve_all()
            began = time.monotonic()
            engine.engine.shutdown()
            assert time.monotonic() - began < LONGEST_S, "it has waited for the server"


@pytest.mark.parametrize("keys", [{"cluster": True}, {"password": "a word"}], ids=str)
def test_an_engine_ends_at_once_while_a_server_says_nothing(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads log in, or ask for the cluster's servers, one after the other."""
    monkeypatch.setattr(wire, "TIMEOUT_S", 2 * PATIENCE_S)
    port = free_port()
    with (
        valkey_harness(f"valkey://127.0.0.1:{port}", connections=8, **keys) as harness,
        socket.create_server(("127.0.0.1", port), backlog=64) as listener,
    ):
        blocks = harness.keys(64)
        harness.tier.lookup_batch(blocks, harness.new_request())
        for block in blocks:
            harness.store([block])
        with listener.accept()[0]:
            caplog.clear()
            harness.shut_down()
        harness.step()
    assert "Meanwhile" not in caplog.text


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(6, id="seconds"), pytest.param(300, id="minutes", marks=pytest.mark.soak)],
)
def test_one_failure_after_the_other(
    server: ValkeyProcess, proxy: Proxy, warm: Serving, seconds: int
) -> None:
    seed = SystemRandom().randrange(10**9) if seconds > 60 else 0
    print("seed", seed)
    chance = Random(seed)

    def restart() -> None:
        server.kill()
        server.start()

    failures: list[Callable[[], None]] = [
        server.stop,
        restart,
        lambda: proxy.cut(chance.choice(list(Direction)), chance.randrange(60_000)),
        lambda: proxy.stall(chance.choice(list(Direction)), chance.randrange(60_000)),
    ]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice(failures)()
        for _ in range(chance.randrange(1, 4)):
            warm.serve(chance.choice(PROMPTS))
        server.go_on()
        proxy.heal()
        for _ in range(chance.randrange(3)):
            warm.serve(chance.choice(PROMPTS))
    warm.serve_until_loaded()
