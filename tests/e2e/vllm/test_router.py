"""A router that is not ours knows what stock vLLM has on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import random_prompts
from tests.e2e.vllm.lasting_tiers import disk_in, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.routed import RoutedEngine
from tests.e2e.vllm.subject import Subject
from tests.observe.dynamo_router import DynamoRouter, Overlap

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("subject", ["llama"], indirect=True),
]

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(8, TOKENS, "routed")
ENGINE: dict[str, Any] = {"device_blocks": 2 * BLOCKS + 4, "max_model_len": 512}
NOWHERE = Overlap(0, 0, 0)
ON_DISK = Overlap(0, 0, TOKENS)
EVERYWHERE = Overlap(TOKENS, TOKENS, TOKENS)


class RoutedRemoteEngine(RemoteEngine):
    """An engine whose events a router subscribes to."""

    def __init__(self, vllm: VLLM, model: Path, options: dict[str, Any], folder: Path) -> None:
        self.process = vllm.start(
            RoutedEngine, str(model), options, *endpoints_in(folder), **ENGINE
        )
        self._numbers = count()


def endpoints_in(folder: Path) -> tuple[str, str]:
    return f"ipc://{folder}/events", f"ipc://{folder}/replay"


@contextmanager
def routed(
    vllm: VLLM, subject: Subject, folder: Path, router: DynamoRouter
) -> Iterator[RemoteEngine]:
    """An engine with room for two prompts in host memory, and for four on disk."""
    options = over(disk_in(folder), subject, slots=2 * BLOCKS + 1)
    (tier,) = options["secondary_tiers"]
    slot = subject.slot_bytes() + 4096
    tier["max_bytes"] = (4 * BLOCKS + 2) * slot + 64 * 1024
    with RoutedRemoteEngine(with_common_hashes(vllm), subject.path, options, folder) as engine:
        # vLLM numbers its batches from 0 after each start. A router has to be told of that.
        router.register(*endpoints_in(folder))
        try:
            yield engine
        finally:
            router.unregister()


def test_a_router_knows_every_level(vllm: VLLM, subject: Subject, tmp_path: Path) -> None:
    if vllm.version < (0, 28):
        pytest.skip("vLLM 0.26 calls storage FS, a word that this router does not know")
    with DynamoRouter(BLOCK_TOKENS, tmp_path / "log") as router:
        with routed(vllm, subject, tmp_path, router) as engine:
            engine.generate(*PROMPTS[:4])
            engine.rest()
            router.expect([PROMPTS[0], PROMPTS[3]], [ON_DISK, EVERYWHERE])
            engine.generate(*PROMPTS[4:])
            engine.rest()
            router.expect([PROMPTS[0], PROMPTS[4], PROMPTS[7]], [NOWHERE, ON_DISK, EVERYWHERE])
        with routed(vllm, subject, tmp_path, router) as engine:
            engine.rest()  # no request yet
            router.expect([PROMPTS[0], PROMPTS[5], PROMPTS[7]], [NOWHERE, ON_DISK, ON_DISK])
            engine.generate(PROMPTS[7])
            engine.rest()
            router.expect([PROMPTS[7]], [EVERYWHERE])
