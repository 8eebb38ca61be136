"""Requests in the engine's queue: the connector names the blocks that they will look up."""

from __future__ import annotations

from typing import Any

from kvtier.base import Medium, OffloadKey, make_offload_key
from kvtier.connector.events import BlockStored
from kvtier.tiering.manager import GroupShape
from tests.connector.driven_connector import DrivenConnector, Request
from tests.tiering.driven_manager import DrivenManager

TOKENS = 4
"""Of a block."""


class Queue:
    """A connector over hand-driven tiers, with a prompt of eight blocks in the tier."""

    def __init__(self, **kwargs: Any) -> None:
        self.tiers = DrivenManager(64, groups={0: GroupShape(TOKENS)})
        self.rig = DrivenConnector(manager=self.tiers.manager, **kwargs)

    def announce(self, num_cached: int | None, **kwargs: Any) -> list[OffloadKey]:
        """A request arrives. Returns the keys of its blocks."""
        request = Request("queued", list(range(8 * TOKENS + 1)), 8 * TOKENS + 1, **kwargs)
        keys = [make_offload_key(each, 0) for each in request.block_hashes]
        self.tiers.keep_below(keys)
        count = None if num_cached is None else lambda: num_cached
        self.rig.connector.on_new_request(request, count)
        self.rig.run()
        return keys

    def loading(self) -> list[OffloadKey]:
        assert self.tiers.tier is not None
        return [key for job in self.tiers.tier.loads() for key in job.keys]


def test_the_blocks_that_the_device_lacks_come_up() -> None:
    queue = Queue()
    keys = queue.announce(num_cached=3 * TOKENS)
    assert queue.loading() == keys[3:]


def test_nothing_comes_up_if_the_engine_does_not_count_or_the_request_skips() -> None:
    for num_cached, hints in ((None, None), (0, {"skip": True})):
        queue = Queue()
        queue.announce(num_cached, kv_transfer_params=hints)
        assert queue.loading() == []


def test_a_prefetch_is_known_as_one() -> None:
    for hints, is_prefetch in (({"prefetch": True}, True), ({"prefetch": "yes"}, False)):
        queue = Queue()
        queue.announce(0, kv_transfer_params=hints)
        assert queue.tiers.tier is not None
        (job,) = queue.tiers.tier.loads()
        assert job.req_context.is_prefetch == is_prefetch


def test_events_of_blocks_that_came_up_ahead_describe_themselves() -> None:
    queue = Queue(self_describing_kv_events=True)
    queue.announce(num_cached=0)
    assert queue.tiers.tier is not None
    queue.tiers.tier.finish()
    queue.rig.run()
    events = [
        event
        for event in queue.rig.connector.take_events()
        if isinstance(event, BlockStored) and event.medium is Medium.CPU
    ]
    assert [event.block_size for event in events] == [TOKENS]
    assert [len(event.block_hashes) for event in events] == [8]
