"""Stock vLLM with a cache on a server: engines find each other's blocks; and while the server is
killed, stands still or comes back empty, requests go on with right answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvtier.testing.vllm.in_process import Answer
from kvtier.testing.vllm.tiny_model import LLAMA, random_prompts
from tests.e2e.vllm.lasting_tiers import figure_of, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject
from tests.tiering.obj.server import seaweed
from tests.tiering.valkey.server import valkey_server

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS = 16, 512
PROMPTS = random_prompts(4, TOKENS, "shared through a server")
PATIENCE_S = 60.0
DEADLINES = {"lookup_timeout_ms": 1000, "load_timeout_ms": 2000, "store_timeout_ms": 4000}


class Server(Protocol):
    def stop(self) -> None:
        """Let it stand still."""

    def go_on(self) -> None: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...


@dataclass
class Shared:
    """A server, and the entry of a tier that uses it."""

    kind: str
    tier: dict[str, Any]
    server: Server
    start_empty: Callable[[], None]


@pytest.fixture(scope="module", params=["valkey", "obj"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "valkey":
        with valkey_server(directory) as server:
            tier = {"type": "valkey", "url": server.url} | DEADLINES
            yield Shared("valkey", tier, server, server.start)
    else:
        with seaweed(directory) as s3:
            tier = {"type": "obj"} | s3.keys | DEADLINES
            yield Shared("obj", tier, s3, s3.start_empty)


def loaded(engine: RemoteEngine, shared: Shared) -> float:
    return engine.figures().get(figure_of(f"0:{shared.kind}", "loaded_blocks"), 0)


def generate_until(
    engine: RemoteEngine, is_over: Callable[[], bool]
) -> tuple[list[list[int]], list[Answer]]:
    """Run all prompts repeatedly, with an empty device cache."""
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    deadline = time.monotonic() + PATIENCE_S
    while not is_over():
        assert time.monotonic() < deadline, engine.figures()
        engine.reset_device_cache()
        answers += engine.generate(*PROMPTS)
        prompts += PROMPTS
    return prompts, answers


def test_engines_share_a_server_and_survive_it(
    vllm: VLLM, llama: Path, llama_alone: Reference, shared: Shared
) -> None:
    # Host memory for a prompt and a half: the others come from the server, or are computed.
    subject = Subject(LLAMA, llama, llama_alone)
    options = over(shared.tier, subject, slots=BLOCKS * 3 // 2)

    def start() -> RemoteEngine:
        common = with_common_hashes(vllm)
        return RemoteEngine(common, llama, options, device_blocks=64, max_model_len=1024)

    with start() as first:
        llama_alone.check(PROMPTS, first.generate(*PROMPTS))

    with start() as second:
        answers = second.generate(*PROMPTS)
        assert [answer.cached_tokens for answer in answers] == [TOKENS] * len(PROMPTS)
        assert loaded(second, shared) == BLOCKS * len(PROMPTS)
        llama_alone.check(PROMPTS, answers)

        shared.server.kill()
        began = time.monotonic()
        second.reset_device_cache()
        during = second.generate(*PROMPTS)
        # Each of them waits for its deadlines at most; the engine of these tests is slow itself.
        assert time.monotonic() - began < PATIENCE_S
        llama_alone.check(PROMPTS, during, exact=False)

        shared.start_empty()
        before = loaded(second, shared)
        asked, after = generate_until(second, lambda: loaded(second, shared) >= before + BLOCKS)
        llama_alone.check(asked, after, exact=False)

        shared.server.stop()
        try:
            second.reset_device_cache()
            silent = second.generate(*PROMPTS)
        finally:
            shared.server.go_on()
        llama_alone.check(PROMPTS, silent, exact=False)
        before = loaded(second, shared)
        asked, after = generate_until(second, lambda: loaded(second, shared) >= before + BLOCKS)
        llama_alone.check(asked, after, exact=False)
