"""A router that is not ours knows what the reference engine has, and what it no longer has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.engine.request import extend_chain
from tests.observe.dynamo_router import DynamoRouter, Overlap
from tests.observe.event_engine import BLOCK_TOKENS, EventEngine, as_int, event_engine

BLOCKS = 6


def prompts(first: int, number: int) -> list[list[int]]:
    return [[n, *([n] * (BLOCKS * BLOCK_TOKENS))] for n in range(first, first + number)]


def overlap_in(engine: EventEngine, prompt: Sequence[int]) -> Overlap:
    """What a router should answer."""
    chain: list[bytes] = []
    extend_chain(chain, prompt, BLOCK_TOKENS)
    truth = engine.truth()
    reached, found = 0, []
    for medium in ("GPU", "CPU", "STORAGE"):
        while reached < len(chain) and as_int(chain[reached]) in truth[medium]:
            reached += 1
        found.append(reached * BLOCK_TOKENS)
    return Overlap(*found)


def test_a_router_knows_every_level_of_the_reference_engine(tmp_path: Path) -> None:
    whole = BLOCKS * BLOCK_TOKENS
    parts: dict[bytes, list[bytes]] = {}
    sizes: dict[str, Any] = {
        "device_blocks": 10,
        "host_blocks": 3 * BLOCKS,
        "disk_blocks": 6 * BLOCKS,
    }
    slab = tmp_path / "slab"
    with DynamoRouter(BLOCK_TOKENS, tmp_path / "log") as router:
        with event_engine(slab, parts=parts, **sizes) as engine:
            endpoint, replay_endpoint = engine.endpoints()
            router.register(endpoint, replay_endpoint)
            ours = prompts(0, 4)
            for prompt in ours:
                engine.serve(prompt)
            expected = [overlap_in(engine, prompt) for prompt in ours]
            assert expected[0] == (0, 0, whole), "only the disk has the oldest one"
            assert expected[-1] == (whole, whole, whole)
            router.expect(ours, expected)

            later = prompts(10, 6)
            for prompt in later:
                engine.serve(prompt)
            expected = [overlap_in(engine, prompt) for prompt in ours]
            assert expected[0] == (0, 0, 0), "evicted from everywhere"
            router.expect(ours + later, [overlap_in(engine, prompt) for prompt in ours + later])
        # A restart with the same address: the router is told nothing.
        with event_engine(
            slab, parts=parts, endpoint=endpoint, replay_endpoint=replay_endpoint, **sizes
        ) as engine:
            engine.step_until_idle()
            expected = [overlap_in(engine, prompt) for prompt in later]
            assert expected[-1] == (0, 0, whole)
            router.expect(later, expected)
            engine.serve(later[-1])
            router.expect(later, [overlap_in(engine, prompt) for prompt in later])
            assert router.overlap(later[-1]) == (whole, whole, whole)


def test_a_router_that_joins_late_knows_all(tmp_path: Path) -> None:
    with event_engine(tmp_path / "slab", buffer_batches=2) as engine:
        ours = prompts(0, 5)
        for prompt in ours:
            engine.serve(prompt)
        with DynamoRouter(BLOCK_TOKENS, tmp_path / "log") as router:
            router.register(*engine.endpoints())
            router.expect(ours, [overlap_in(engine, prompt) for prompt in ours])
        assert engine.publisher.figures().num_snapshots > 0
