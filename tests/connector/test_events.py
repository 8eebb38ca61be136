"""The KV-cache events of offloaded blocks."""

from __future__ import annotations

from kvtier.base import Medium
from kvtier.config import AttentionKind, OffloadingGroupConfig
from kvtier.connector.common import ScheduledRequest
from kvtier.connector.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.connector.driven_connector import DrivenConnector

FULL = OffloadingGroupConfig(4, ("full",))
WINDOW = OffloadingGroupConfig(
    8, ("window",), group_id=1, kind=AttentionKind.SLIDING_WINDOW, window_tokens=20
)


def test_blocks_of_several_groups_share_an_event_without_block_size() -> None:
    rig = DrivenConnector((FULL, WINDOW), self_describing_kv_events=False)
    request = rig.request("a", 16)
    rig.serve(request)
    (event,) = rig.connector.take_events()
    assert isinstance(event, BlockStored)
    blocks = list(zip(event.block_hashes, event.group_indices, strict=True))
    hashes = request.block_hashes
    assert sorted(blocks) == sorted([(h, 0) for h in hashes] + [(hashes[1], 1), (hashes[3], 1)])
    assert event.block_size == 0
    assert event.token_ids == []
    assert event.medium is Medium.CPU


def test_events_that_describe_themselves() -> None:
    rig = DrivenConnector((FULL, WINDOW))
    request = rig.request("a", 16)
    rig.serve(request)
    hashes = request.block_hashes
    found = {}
    for event in rig.connector.take_events():
        assert isinstance(event, BlockStored)
        parent, size = event.parent_block_hash, event.block_size
        for n, (block_hash, group) in enumerate(
            zip(event.block_hashes, event.group_indices, strict=True)
        ):
            tokens = event.token_ids[n * size : (n + 1) * size]
            found[block_hash, group] = (parent, tokens, size, event.group_kind)
            parent = block_hash
    for i in range(4):
        parent = hashes[i - 1] if i else None
        tokens = list(request.token_ids[4 * i : 4 * i + 4])
        assert found.pop((hashes[i], 0)) == (parent, tokens, 4, AttentionKind.FULL)
    for i in range(2):
        parent = hashes[1] if i else None
        tokens = list(request.token_ids[8 * i : 8 * i + 8])
        expected = (parent, tokens, 8, AttentionKind.SLIDING_WINDOW)
        assert found.pop((hashes[2 * i + 1], 1)) == expected
    assert not found


def test_what_leaves_is_told_before_what_takes_its_place() -> None:
    rig = DrivenConnector(num_blocks=3, self_describing_kv_events=False)
    first = rig.request("a", 8)
    rig.serve(first)
    rig.connector.take_events()
    rig.serve(rig.request("b", 8, first=50))
    removed, stored = rig.connector.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == first.block_hashes[1:]
    assert isinstance(stored, BlockStored)


def test_a_reset_clears_everything_in_its_place_in_the_stream() -> None:
    rig = DrivenConnector(self_describing_kv_events=False)
    rig.serve(rig.request("a", 8))
    rig.connector.reset_cache()
    rig.run()
    rig.request("b", 8)
    rig.end(rig.run(ScheduledRequest("b", rig.table(8), 8), new_req_ids=["b"]))
    rig.connector.request_finished("b")
    kinds = [type(event) for event in rig.connector.take_events()]
    assert kinds == [BlockStored, BlockRemoved, AllBlocksCleared, BlockStored]


def test_a_reset_of_host_memory_alone_clears_nothing_else() -> None:
    rig = DrivenConnector(reset_scope="primary", self_describing_kv_events=False)
    rig.serve(rig.request("a", 8))
    rig.connector.reset_cache()
    kinds = [type(event) for event in rig.connector.take_events()]
    assert kinds == [BlockStored, BlockRemoved]
