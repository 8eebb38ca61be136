"""Consumers of events end with the exact index, whatever they miss."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtier.base import Medium
from kvtier.observe.kv_events import BlockStored
from kvtier.observe.published_index import PublishedIndex
from kvtier.observe.publisher import EventPublisher
from tests.observe.event_consumer import EventConsumer
from tests.observe.event_engine import BLOCK_TOKENS, EventEngine, as_int, event_engine

MEDIA = ("GPU", "CPU", "STORAGE")


def prompt_of(chance: Random) -> list[int]:
    """Prompts with common beginnings."""
    tokens: list[int] = []
    for _ in range(chance.randrange(1, 5)):
        branch = chance.randrange(3)
        tokens += [(branch * 50 + n) % 251 for n in range(BLOCK_TOKENS * chance.randrange(1, 4))]
    return [*tokens, chance.randrange(251)]


def assert_exact(consumer: EventConsumer, engine: EventEngine) -> None:
    """Read everything that was published, and compare. Heartbeats reveal what was missed at the
    end."""
    engine.step_until_idle()
    last = consumer.status()["next_seq"]
    consumer.read_until(lambda: consumer.last_seq > last)
    truth = engine.truth()
    assert {medium: consumer.hashes(medium) for medium in MEDIA} == truth
    for here in consumer.index.values():
        for block in here.values():
            assert len(block["tokens"]) == BLOCK_TOKENS
            assert block["kind"] == "full_attention"


@pytest.mark.parametrize(("seed", "blocks_per_chunk"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_consumers_that_miss_batches_join_late_or_see_restarts_are_exact(
    seed: int, blocks_per_chunk: int, tmp_path: Path
) -> None:
    chance = Random(seed)
    parts: dict[bytes, list[bytes]] = {}
    consumers: list[EventConsumer] = []
    endpoints = ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    num_on_disk = 0
    try:
        for life in range(3):
            with event_engine(
                tmp_path / "slab",
                host_blocks=24 // blocks_per_chunk,
                disk_blocks=40 // blocks_per_chunk,
                blocks_per_chunk=blocks_per_chunk,
                parts=parts,
                endpoint=endpoints[0],
                replay_endpoint=endpoints[1],
                buffer_batches=chance.choice((1, 8, 40)),
            ) as engine:
                endpoints = engine.endpoints()
                for number in range(30):
                    if number % 10 == 3 * life:
                        lossy = Random(number)
                        consumers.append(
                            EventConsumer(*endpoints, lambda lossy=lossy: lossy.random() < 0.3)  # type: ignore[misc]
                        )
                    engine.serve(prompt_of(chance))
                    for consumer in consumers:
                        if chance.random() < 0.5:
                            consumer.read()
                    if chance.random() < 0.05:
                        engine.engine.drop_device_cache()
                    if chance.random() < 0.05:
                        engine.engine.reset_cache()
                for consumer in consumers:
                    assert_exact(consumer, engine)
                num_on_disk += len(engine.truth()["STORAGE"])
        assert num_on_disk > 0
        assert sum(consumer.num_replays for consumer in consumers) > len(consumers)
    finally:
        for consumer in consumers:
            consumer.close()


def test_the_bytes_kept_for_replays_are_limited_and_a_replay_is_complete(tmp_path: Path) -> None:
    with event_engine(tmp_path / "slab", buffer_bytes=4096) as engine:
        for number in range(20):
            engine.serve([number, *range(3 * BLOCK_TOKENS)])
        late = EventConsumer(*engine.endpoints())
        try:
            assert_exact(late, engine)
            assert engine.publisher.figures().num_snapshots > 0
            assert sum(len(payload) for _, payload in engine.publisher._buffer) <= 4096
        finally:
            late.close()


def test_after_a_restart_nothing_of_the_earlier_engine_is_left(tmp_path: Path) -> None:
    """All batches of the new engine are still kept, so the consumer gets no snapshot."""
    with event_engine(tmp_path / "slab") as engine:
        endpoints = engine.endpoints()
        consumer = EventConsumer(*endpoints)
        engine.serve(list(range(4 * BLOCK_TOKENS)))
        assert_exact(consumer, engine)
    with event_engine(
        tmp_path / "another", endpoint=endpoints[0], replay_endpoint=endpoints[1]
    ) as engine:
        engine.serve(list(range(100, 100 + 2 * BLOCK_TOKENS)))
        assert_exact(consumer, engine)
        assert engine.publisher.figures().num_snapshots == 0
    consumer.close()


def test_a_restart_announces_what_the_disk_has_without_a_request(tmp_path: Path) -> None:
    parts: dict[bytes, list[bytes]] = {}
    prompts = [[start, *range(3 * BLOCK_TOKENS)] for start in range(8)]
    with event_engine(tmp_path / "slab", disk_blocks=64, parts=parts) as engine:
        for prompt in prompts:
            engine.serve(prompt)
        before = engine.truth()["STORAGE"]
        assert len(before) == 24
    with event_engine(tmp_path / "slab", disk_blocks=64, parts=parts) as engine:
        consumer = EventConsumer(*engine.endpoints())
        engine.step_until_idle()
        assert_exact(consumer, engine)
        assert consumer.hashes("STORAGE") == before
        assert not consumer.hashes("CPU")
        (here,) = (blocks for blocks in consumer.index.values() if blocks)
        for prompt in prompts:
            parent = None
            for start in range(0, 3 * BLOCK_TOKENS, BLOCK_TOKENS):
                (block,) = (
                    block_hash
                    for block_hash, its in here.items()
                    if its["parent"] == parent
                    and its["tokens"] == prompt[start : start + BLOCK_TOKENS]
                )
                parent = block
        consumer.close()


def test_a_publisher_that_cannot_keep_up_leaves_nobody_with_what_is_gone(tmp_path: Path) -> None:
    with event_engine(tmp_path / "slab", max_queued=4) as engine:
        consumer = EventConsumer(*engine.endpoints())
        for number in range(6):
            engine.serve([number, *range(6 * BLOCK_TOKENS)])
        last = consumer.status()["next_seq"]
        consumer.read_until(lambda: consumer.last_seq > last)
        assert engine.publisher.figures().num_lost > 0
        truth = engine.truth()
        for medium in MEDIA:
            assert consumer.hashes(medium) <= truth[medium]
        consumer.close()


def test_a_snapshot_has_parents_first_though_they_were_stored_again_later() -> None:
    def stored(name: int, parent: int | None) -> dict[str, Any]:
        tokens = list(range(BLOCK_TOKENS))
        return {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": BLOCK_TOKENS,
            "medium": "CPU",
        }

    index = PublishedIndex(100)
    index.apply([stored(1, None), stored(2, 1), stored(3, 2)])
    index.apply([{"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "CPU"}])
    index.apply([stored(2, 1), stored(1, None)])
    clear, *blocks = [event for batch in index.snapshot(2) for event in batch]
    assert clear == {"type": "AllBlocksCleared"}
    assert [its["block_hashes"] for its in blocks] == [[1], [2], [3]]


def test_events_that_cannot_be_published_do_not_end_the_publisher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with event_engine(tmp_path / "slab") as engine:
        consumer = EventConsumer(*engine.endpoints())
        engine.serve(list(range(2 * BLOCK_TOKENS)))
        engine.publisher.publish([BlockStored([b"a hash", b"another"], [0], Medium.CPU)])
        engine.publisher.publish(
            [BlockStored([b"a hash"], [0], Medium.CPU, extra_keys=[[object()]])]
        )
        engine.publisher.publish([BlockStored([b"a hash"], [0], Medium.CPU)])
        consumer.read_until(lambda: consumer.hashes("CPU") == {as_int(b"a hash")})
        consumer.close()
    assert caplog.text.count("a batch of events is lost") == 2


def test_what_waits_is_published_before_the_end() -> None:
    for _ in range(20):
        publisher = EventPublisher("tcp://127.0.0.1:0")
        for number in range(5):
            publisher.publish([BlockStored([b"%d" % number], [0], Medium.CPU)])
        publisher.close()
        assert publisher.figures().num_events == 1 + 5, "a clear, and these"


def test_hashes_are_published_as_vllm_does() -> None:
    assert as_int(bytes(range(32))) == int.from_bytes(bytes(range(32)), "big") & (1 << 64) - 1
