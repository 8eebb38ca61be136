"""Objects under a block's name that are not that block, and blocks that the pool has evicted: what
cannot be used is a miss, is removed, and is stored again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.mooncake.namespaces import block_name
from kvtier.tiering.remote.manager import namespace_of
from tests.tiering.mooncake.harness import (
    ROW_BYTES,
    SEGMENT_BYTES,
    mooncake_harness,
    plain_client,
)
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace
from tests.tiering.patience import wait_until

NUMBERS = count(step=10)
BLOCK_BYTES = ROW_BYTES + 256
OTHERS = {
    "short": b"short",
    "one byte shorter": bytes(BLOCK_BYTES - 1),
    "one byte longer": bytes(BLOCK_BYTES + 1),
    "huge": bytes(4 << 20),
    "noise": bytes(range(256)) * (BLOCK_BYTES // 256),
}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with (
        mooncake_master(tmp_path_factory.mktemp("master"), network) as running,
        segment(running, SEGMENT_BYTES, network),
    ):
        yield running


@pytest.fixture(scope="module")
def client(master: Master, network: Namespace) -> Iterator[Any]:
    with network.entered(), plain_client(master) as connected:
        yield connected


@pytest.fixture(scope="module")
def harness(master: Master, network: Namespace) -> Iterator[TierHarness]:
    with network.entered(), mooncake_harness(master, segment_bytes=0) as driven:
        yield driven


@pytest.fixture
def keys(harness: TierHarness) -> list[OffloadKey]:
    """Blocks of this test alone."""
    return harness.keys(6, start=next(NUMBERS))


def name_of(harness: TierHarness, key: OffloadKey) -> str:
    return block_name(namespace_of(harness.fingerprint), key)


def another_block(client: Any, name: str) -> bytes:
    found = client.get(name)
    assert len(found) == BLOCK_BYTES
    return bytes(found)


CONTENTS: dict[str, Callable[[Any, str], bytes]] = {
    name: lambda client, other, content=content: content for name, content in OTHERS.items()
} | {"another block": another_block}


@pytest.mark.parametrize("name", CONTENTS)
def test_an_object_that_is_put_under_the_name_of_a_stored_block(
    client: Any, harness: TierHarness, keys: list[OffloadKey], name: str
) -> None:
    """The engine takes the block to be there."""
    assert harness.wait_for(harness.store(keys))[0].result.success
    wrong, other = (name_of(harness, key) for key in keys[2:4])
    assert client.upsert(wrong, CONTENTS[name](client, other)) == 0
    (report,) = harness.wait_for(harness.load(keys))
    assert report.moved == {*keys[:2], *keys[3:]}
    assert sum(harness.tier.take_seal_failures().values()) == 1
    assert client.is_exist(wrong) == 0, "it is still there"
    for make_job in (harness.store, harness.load):
        assert harness.wait_for(make_job(keys))[0].result.success


@pytest.mark.parametrize("name", ["short", "noise", "huge"])
def test_an_object_that_is_there_before_the_block(
    client: Any, harness: TierHarness, keys: list[OffloadKey], name: str
) -> None:
    """It is taken for the block until it is read."""
    assert client.put(name_of(harness, keys[2]), OTHERS[name]) == 0

    def is_right() -> bool:
        harness.wait_for(harness.store(keys))
        return harness.wait_for(harness.load(keys))[0].result.success

    wait_until(is_right, "the block is stored instead")
    assert sum(harness.tier.take_seal_failures().values()) == 1


def test_other_objects_of_the_pool_are_left_alone(
    client: Any, harness: TierHarness, keys: list[OffloadKey]
) -> None:
    theirs = {"kvtier": b"1", "kvtier:2:ab:cd": b"newer", "session:1": b"x" * 100}
    for name, content in theirs.items():
        assert client.put(name, content) == 0
    for make_job in (harness.store, harness.load):
        assert harness.wait_for(make_job(keys))[0].result.success
    assert {name: client.get(name) for name in theirs} == theirs


def test_a_block_that_was_evicted_and_is_used_again_outlives_others(
    network: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its use tells that the pool has lost it. It is stored again with a soft pin."""
    row_bytes, capacity = 1 << 16, 16 << 20
    with (
        mooncake_master(tmp_path_factory.mktemp("small"), network) as master,
        segment(master, capacity, network),
        mooncake_harness(master, row_bytes=row_bytes, segment_bytes=0) as harness,
    ):

        def store(count: int, start: int) -> None:
            some = harness.keys(count, start=start)
            wait_until(
                lambda: harness.wait_for(harness.store(some))[0].result.success, "there is room"
            )

        wanted, plain = harness.keys(16), harness.keys(16, start=16)

        def is_missed() -> bool:
            request = harness.new_request()
            harness.call("touch", wanted, request)
            harness.step()
            return len(harness.call("missing", wanted, request)) == len(wanted)

        wait_until(is_missed, "the use of absent blocks is noticed")
        store(16, 0)
        store(16, 16)
        for start in range(100, 100 + 2 * capacity // row_bytes, 32):
            store(32, start)
        assert harness.wait_for(harness.load(wanted))[0].moved == set(wanted)
        assert harness.wait_for(harness.load(plain))[0].moved == set()
