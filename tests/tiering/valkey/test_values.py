"""Values under a block's key that are not that block, a server that is full, and one that evicts:
what cannot be used is a miss, is removed, and is stored again."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import valkey

from kvtier.cli import main
from kvtier.testing import TierHarness
from kvtier.tiering.io import lookups
from kvtier.tiering.valkey import wire
from tests.engine.models import random_tokens
from tests.tiering.patience import wait_until
from tests.tiering.valkey.harness import ROW_BYTES, little_memory, server_keys, valkey_harness
from tests.tiering.valkey.server import ValkeyProcess, block_keys, valkey_server
from tests.tiering.valkey.serving import BLOCKS, PROMPTS, TOKENS, serving

HUGE_BYTES = 400 << 20

Client: TypeAlias = "valkey.Valkey"
KEYS = TierHarness.keys(6)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    arguments = ["--maxmemory", str(2 << 30)]
    with valkey_server(tmp_path_factory.mktemp("roomy"), *arguments) as server:
        yield server


def put_list(client: Client, key: bytes, other: bytes) -> None:
    client.delete(key)
    client.rpush(key, b"one", b"two")


def put_short(client: Client, key: bytes, other: bytes) -> None:
    client.set(key, b"short")


def put_nothing(client: Client, key: bytes, other: bytes) -> None:
    client.set(key, b"")


def put_huge(client: Client, key: bytes, other: bytes) -> None:
    client.delete(key)
    client.setrange(key, HUGE_BYTES - 1, b"x")


def put_longer(client: Client, key: bytes, other: bytes) -> None:
    client.append(key, b"x")


def put_another_block(client: Client, key: bytes, other: bytes) -> None:
    client.copy(other, key, replace=True)


def put_noise(client: Client, key: bytes, other: bytes) -> None:
    client.set(key, b"\r\n$-1\r\n" * ((ROW_BYTES + 256) // 8))


OF_WRONG_LENGTH = [put_list, put_short, put_huge, put_longer]
OTHERS = [put_nothing, put_another_block, put_noise]


@pytest.mark.parametrize("put", OF_WRONG_LENGTH + OTHERS)
def test_a_value_that_is_put_under_the_key_of_a_stored_block(
    roomy: ValkeyProcess, put: Callable[[Client, bytes, bytes], None]
) -> None:
    """The engine takes the block to be there."""
    with roomy.client() as client, valkey_harness(roomy.url) as harness:
        client.flushall()
        (report,) = harness.wait_for(harness.store(KEYS))
        assert report.result.success
        wrong, other = server_keys(harness, KEYS[2:4])
        put(client, wrong, other)
        with little_memory():
            (report,) = harness.wait_for(harness.load(KEYS))
        assert set(report.result.successful_keys or ()) == {*KEYS[:2], *KEYS[3:]}
        assert sum(harness.tier.take_seal_failures().values()) == 1
        assert not client.exists(wrong), "it is still there"
        for make_job in (harness.store, harness.load):
            (report,) = harness.wait_for(make_job(KEYS))
            assert report.result.success


@pytest.mark.parametrize("put", OF_WRONG_LENGTH)
def test_a_value_that_is_there_before_the_block(
    roomy: ValkeyProcess, put: Callable[[Client, bytes, bytes], None]
) -> None:
    with roomy.client() as client, valkey_harness(roomy.url) as harness:
        client.flushall()
        wrong, other = server_keys(harness, KEYS[2:4])
        put(client, wrong, other)
        with little_memory():
            assert not harness.hits(KEYS[2:3])
            for make_job in (harness.store, harness.load):
                (report,) = harness.wait_for(make_job(KEYS))
                assert report.result.success


def test_an_empty_value_that_is_there_before_the_block(roomy: ValkeyProcess) -> None:
    with roomy.client() as client, valkey_harness(roomy.url) as harness:
        client.flushall()
        client.set(server_keys(harness, KEYS[2:3])[0], b"")
        for make_job in (harness.store, harness.load):
            (report,) = harness.wait_for(make_job(KEYS))
            assert report.result.success


def test_the_command_on_a_huge_value(
    roomy: ValkeyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with roomy.client() as client:
        client.flushall()
        with valkey_harness(roomy.url) as harness:
            harness.wait_for(harness.store(KEYS))
            (wrong,) = server_keys(harness, KEYS[:1])
        put_huge(client, wrong, b"")
        client.rpush(b"kvtier:1:" + b"ab" * 16 + b":key", "item")
        with little_memory():
            assert main(["store", "verify", roomy.url, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["good"], found["damaged"]) == (len(KEYS) - 1, 1)
        assert main(["store", "clear", roomy.url, "--yes"]) == 0
        assert client.dbsize() == 1, "the list is no block"


def test_other_keys_of_the_server_are_left_alone(server: ValkeyProcess) -> None:
    with server.client() as client:
        theirs = {b"kvtier": b"1", b"kvtier:2:ab:cd": b"newer", b"session:1": b"x"}
        client.mset(theirs)
        client.rpush("jobs", "one")
        with serving(server.url) as engine:
            engine.serve_until_loaded()
            engine.engine.reset_cache()
            engine.serve_until_loaded()
        assert {key: client.get(key) for key in theirs} == theirs
        assert client.lrange("jobs", 0, -1) == [b"one"]
        ours = set(client.scan_iter()).difference(theirs, [b"jobs"])
        assert ours
        assert all(key.startswith(b"kvtier:1:") for key in ours)


def test_a_full_server_that_evicts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loads go on, the engine counts what was refused, and stores go on when there is room."""
    with (
        valkey_server(tmp_path, "--maxmemory-policy", "noeviction") as server,
        server.client() as client,
        serving(server.url) as engine,
    ):
        assert "evicts nothing" in caplog.text
        first, second, *others = PROMPTS
        engine.serve(first)
        engine.serve(second)
        wait_until(lambda: engine.serve(first) == TOKENS, "the first prompt is stored")
        client.config_set("maxmemory", 1 << 20)
        for prompt in others:
            assert engine.serve(prompt) == 0
            assert engine.serve(first) == TOKENS
        assert [engine.serve(prompt) for prompt in others] == [0] * len(others)
        assert engine.serve(first) == TOKENS
        assert engine.counted("refused_blocks") > 0
        assert engine.counted("failures_full") > 0
        assert engine.counted("failed_blocks") == 0
        assert caplog.text.count("the server is full and evicts nothing") == 1
        client.config_set("maxmemory", 256 << 20)
        engine.serve_until_loaded()


def test_a_missing_block_costs_no_memory_for_those_behind_it(server: ValkeyProcess) -> None:
    """Their answers have come with it, and are read again from a copy. It does not stay."""
    with valkey_harness(server.url, connections=1) as harness, server.client() as client:
        first, *others = harness.keys(64)
        harness.wait_for(harness.store([first, *others]))
        client.delete(*server_keys(harness, [first]))
        tracemalloc.start()
        try:
            for blocks in ([first, *others], others):
                (report,) = harness.wait_for(harness.load(blocks))
                assert report.moved == set(others)
            kept = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(inclusive=True, filename_pattern=wire.__file__)]
            )
        finally:
            tracemalloc.stop()
        assert sum(trace.size for trace in kept.traces) < 10 * ROW_BYTES


def test_blocks_that_are_used_from_host_memory_are_stored_again(
    server: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their uses find that the server has lost them."""
    monkeypatch.setattr(lookups, "_SURELY_FOR_S", 0.1)
    with serving(server.url) as engine, server.client() as client:

        def is_there() -> bool:
            loaded = engine.serve(PROMPTS[0])
            assert loaded == TOKENS, "from host memory"
            return len(block_keys(client)) == BLOCKS

        engine.serve(PROMPTS[0])
        wait_until(is_there, "the prompt is stored")
        client.flushall()
        wait_until(is_there, "the prompt is stored again")
        assert engine.counted("vanished_blocks") == 0


def test_a_server_that_evicts(tmp_path: Path) -> None:
    """What it has evicted is a miss, and no failure."""
    with valkey_server(tmp_path) as server, server.client() as client:
        with serving(server.url) as engine:
            used_bytes = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used_bytes + (512 << 10))
            prompts = [random_tokens(seed, TOKENS + 1) for seed in range(100, 124)]
            loaded = [engine.serve(prompt) for _ in range(3) for prompt in prompts]
            assert sum(loaded) < len(loaded) * TOKENS / 2
            wait_until(
                lambda: [engine.serve(prompt) for prompt in prompts[:2]] == [TOKENS] * 2,
                "what fits is loaded",
            )
            for kind in ("unreachable", "silent", "refused", "full", "garbage"):
                assert engine.counted(f"failures_{kind}") == 0
        assert client.info("stats")["evicted_keys"] > 0
