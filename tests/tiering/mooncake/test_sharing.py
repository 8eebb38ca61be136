"""Engines in several processes share the blocks of one pool. Each compares every token that it
serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.tiering.mooncake.namespaces import BLOCK_NAME
from tests.tiering.mooncake.harness import SEGMENT_BYTES, mooncake_harness
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.mooncake.serving import TOKENS, EngineProcess, Start, engines, tier_on
from tests.tiering.networks import Namespace
from tests.tiering.patience import wait_until
from tests.tiering.reference import BLOCKS_PER_PROMPT

NUM_PROMPTS = 6
SOON_DISCARDED = ("-put_start_discard_timeout_sec=2", "-put_start_release_timeout_sec=4")
"""How long the master waits for a client that has begun to store a block."""
NUM_BLOCKS = NUM_PROMPTS * BLOCKS_PER_PROMPT


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    directory = tmp_path_factory.mktemp("master")
    with (
        mooncake_master(directory, network, *SOON_DISCARDED) as running,
        segment(running, SEGMENT_BYTES, network),
    ):
        yield running


def starts(count: int, master: Master, network: Namespace, namespace: str) -> list[Start]:
    return [Start(network, tier_on(master), options={"namespace": namespace})] * count


def blocks_in(master: Master) -> dict[str, int]:
    """How many blocks of each namespace are in the pool."""
    found: dict[str, int] = {}
    for name in master.keys():  # noqa: SIM118
        if block := BLOCK_NAME.fullmatch(name):
            found[block["namespace"]] = found.get(block["namespace"], 0) + 1
    return found


def serve_all(*some: EngineProcess) -> list[int]:
    """Let engines serve all prompts at once. Returns how many tokens each has loaded."""
    for engine in some:
        engine.begin(NUM_PROMPTS)
    return [sum(engine.result().loaded) for engine in some]


def test_engines_with_other_weights_find_nothing(master: Master, network: Namespace) -> None:
    ours, theirs = (starts(1, master, network, name)[0] for name in ("ours", "theirs"))
    with engines(ours, theirs) as (one, other):
        assert serve_all(one) == [0]
        assert serve_all(other) == [0]
        assert sorted(blocks_in(master).values()) == [NUM_BLOCKS, NUM_BLOCKS]
        assert serve_all(one, other) == [NUM_PROMPTS * TOKENS] * 2


@pytest.mark.parametrize(
    "rounds", [pytest.param(1, id="once"), pytest.param(10, id="often", marks=pytest.mark.soak)]
)
def test_eight_engines_store_the_same_blocks_at_once(
    master: Master, network: Namespace, rounds: int
) -> None:
    """Each block is stored once, and none is lost."""
    for number in range(rounds):
        namespace = f"eight {rounds} {number}"
        before = blocks_in(master)
        with engines(*starts(8, master, network, namespace)) as started:
            serve_all(*started)
            (new,) = set(blocks_in(master)) - set(before)
            wait_until(lambda name=new: blocks_in(master)[name] == NUM_BLOCKS, "all are stored")  # type: ignore[misc]
            assert serve_all(*started) == [NUM_PROMPTS * TOKENS] * 8
        with engines(*starts(1, master, network, namespace)) as (alone,):
            assert serve_all(alone) == [NUM_PROMPTS * TOKENS]


def test_an_engine_that_is_killed_while_it_stores(master: Master, network: Namespace) -> None:
    """The next one loads what is whole, and stores the rest."""
    namespace = "killed"
    before = blocks_in(master)
    with engines(*starts(2, master, network, namespace)) as (one, other):
        one.begin(50, start=1000)
        wait_until(lambda: blocks_in(master) != before, "blocks are stored")
        one.kill()
        other.serve_until_loaded(50, start=1000)


def test_after_a_reset_blocks_are_private(master: Master, network: Namespace) -> None:
    with network.entered(), mooncake_harness(master) as one, mooncake_harness(master) as other:
        old, new = one.keys(8), one.keys(8, start=8)
        one.wait_for(one.store(old))
        one.begin_epoch(bytes(range(16)))
        one.wait_for(one.store(new))
        assert one.hits(old + new) == set(new)
        assert other.hits(old + new) == set(old)
        assert one.wait_for(one.load(new))[0].result.success
        assert other.wait_for(other.load(old))[0].result.success
