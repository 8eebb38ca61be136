"""Engines in several processes share the blocks of one server. Each compares every byte that it
loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest

from tests.tiering.engine import engine_with
from tests.tiering.patience import PATIENCE_S
from tests.tiering.valkey.server import ValkeyProcess, block_keys
from tests.tiering.valkey.sharing_engine import BLOCKS, NUM_BLOCKS, NUM_ROWS, PROMPTS

NAMESPACES = (f"sharing-{number}" for number in count())


class EngineProcess:
    def __init__(self, url: str, namespace: str) -> None:
        command = [sys.executable, "-m", "tests.tiering.valkey.sharing_engine", url, namespace]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, int]:
        printed, _ = self.process.communicate(timeout=2 * PATIENCE_S)
        assert self.process.returncode == 0
        found = json.loads(printed)
        assert isinstance(found, dict)
        return found


@contextmanager
def engines(number: int, url: str, namespace: str) -> Iterator[list[EngineProcess]]:
    """Engines that have started. They end with the context."""
    with ExitStack() as undo:
        started = [EngineProcess(url, namespace) for _ in range(number)]
        for engine in started:
            undo.enter_context(engine.process)
            undo.callback(engine.process.kill)
        for engine in started:
            engine.wait_until_ready()
        yield started


def serve_in_a_process(url: str, namespace: str) -> dict[str, int]:
    with engines(1, url, namespace) as (engine,):
        engine.go()
        return engine.result()


def test_the_second_engine_loads_what_the_first_has_stored(server: ValkeyProcess) -> None:
    namespace = next(NAMESPACES)
    assert serve_in_a_process(server.url, namespace) == {"loaded": 0, "stored": NUM_BLOCKS}
    assert serve_in_a_process(server.unix_url, namespace) == {"loaded": NUM_BLOCKS, "stored": 0}


def test_an_engine_with_other_weights_finds_nothing(server: ValkeyProcess) -> None:
    nothing = {"loaded": 0, "stored": NUM_BLOCKS}
    assert serve_in_a_process(server.url, next(NAMESPACES)) == nothing
    assert serve_in_a_process(server.url, next(NAMESPACES)) == nothing


@pytest.mark.parametrize(
    "rounds", [pytest.param(1, id="once"), pytest.param(20, id="often", marks=pytest.mark.soak)]
)
def test_eight_engines_store_the_same_blocks_at_once(server: ValkeyProcess, rounds: int) -> None:
    """Each block is stored once, and none is lost."""
    for _ in range(rounds):
        namespace = next(NAMESPACES)
        with server.client() as client:
            client.flushall()
        with engines(8, server.url, namespace) as started:
            for engine in started:
                engine.go()
            assert sum(engine.result()["stored"] for engine in started) == NUM_BLOCKS
        with server.client() as client:
            assert len(block_keys(client)) == NUM_BLOCKS
        entry = {"type": "valkey", "url": server.url}
        with engine_with(entry, num_rows=NUM_ROWS, namespace=namespace) as last:
            assert [last.serve(prompt) for prompt in PROMPTS] == [BLOCKS] * len(PROMPTS)


def test_an_engine_that_is_killed_while_it_stores(server: ValkeyProcess) -> None:
    """No half a block is left: the next engine stores what is missing."""
    namespace = next(NAMESPACES)
    with engines(1, server.url, namespace) as (engine,):
        engine.go()
        with server.client() as client:
            while not block_keys(client):
                assert engine.process.poll() is None
        engine.process.kill()
    with server.client() as client:
        before = len(block_keys(client))
    found = serve_in_a_process(server.url, namespace)
    assert found["stored"] == NUM_BLOCKS - before
    with server.client() as client:
        assert len(block_keys(client)) == NUM_BLOCKS
