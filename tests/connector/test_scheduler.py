"""The scheduler half of the connector: loads, stores, fences, resets, and what it forgets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrefixLookup,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    make_offload_key,
)
from kvtier.config import AttentionKind, OffloadingGroupConfig
from kvtier.connector.common import (
    NO_DEVICE_BLOCK,
    ComputedTokens,
    PrefixMatch,
    ScheduledRequest,
    WorkerOutput,
)
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.misuse import STRICT_ENV, ContractViolation
from tests.connector.driven_connector import DrivenConnector, Request, slots

FULL = OffloadingGroupConfig(4, ("full",))
WINDOW = OffloadingGroupConfig(
    8, ("window",), group_id=1, kind=AttentionKind.SLIDING_WINDOW, window_tokens=20
)
STATE = OffloadingGroupConfig(4, ("state",), group_id=2, kind=AttentionKind.STATE_SPACE)

NOTHING = PrefixMatch(0, is_pending=False)


def test_what_was_stored_is_matched_up_to_the_last_token() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    match = rig.connector.get_num_new_matched_tokens(rig.request("b", 17), 0)
    assert match == PrefixMatch(16, is_pending=False)
    match = rig.connector.get_num_new_matched_tokens(rig.request("c", 16), 0)
    assert match == PrefixMatch(12, is_pending=False), "one token is left to be computed"
    match = rig.connector.get_num_new_matched_tokens(rig.request("d", 17), 8)
    assert match == PrefixMatch(8, is_pending=False)
    assert rig.connector.get_num_new_matched_tokens(rig.request("e", 17), 16) == NOTHING
    other = rig.request("f", 17, first=3)
    assert rig.connector.get_num_new_matched_tokens(other, 0) == NOTHING


def test_a_load_goes_into_the_blocks_behind_the_computed_ones() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    request = rig.request("b", 17)
    tables = rig.table(17)
    rig.connector.get_num_new_matched_tokens(request, 4)
    rig.connector.update_state_after_alloc(request, tables, 4, 12)
    metadata = rig.run()
    (order,) = metadata.loads
    assert order.device.block_ids.tolist() == tables[0][1:4]
    assert order.device.block_indices == (1,)
    assert len(slots(order.offloaded)) == 3
    assert rig.end(metadata) == [("b", 16)]


def test_chunks_of_several_device_blocks_may_be_loaded_in_part() -> None:
    rig = DrivenConnector(blocks_per_chunk=3)
    rig.serve(rig.request("a", 30))
    request = rig.request("b", 30)
    assert rig.connector.get_num_new_matched_tokens(request, 8) == PrefixMatch(16, False)
    tables = rig.table(30)
    rig.connector.update_state_after_alloc(request, tables, 8, 16)
    (order,) = rig.run().loads
    assert order.device.block_ids.tolist() == tables[0][2:6]
    assert order.device.block_indices == (2,)
    assert len(slots(order.offloaded)) == 2


def test_a_chunk_is_stored_when_all_of_it_is_computed_and_once() -> None:
    rig = DrivenConnector(blocks_per_chunk=2)
    request = rig.request("a", 20)
    tables = rig.table(20)
    stored = []
    for computed in (0, 4, 7, 8, 12, 16, 20, 20):
        metadata = rig.run(ScheduledRequest("a", tables, computed))
        stored.append([order.device.block_ids.tolist() for order in metadata.stores])
        rig.end(metadata)
    assert stored == [[], [], [], [tables[0][:2]], [], [tables[0][2:4]], [], []]
    assert request.num_tokens == 20


def test_blocks_of_the_answer_are_stored_only_if_asked_for() -> None:
    for prompt_only, expected in ((True, 2), (False, 4)):
        rig = DrivenConnector(offload_prompt_only=prompt_only)
        request = rig.request("a", 10)
        request.token_ids = [*request.token_ids, *range(6)]
        metadata = rig.run(ScheduledRequest("a", rig.table(16), 16))
        assert len(metadata.stores[0].device.block_ids) == expected


def test_the_last_step_is_stored_if_the_engine_says_what_there_is() -> None:
    rig = DrivenConnector()
    rig.request("a", 8)
    tables = rig.table(8)
    rig.run(ScheduledRequest("a", tables, 0))
    rig.connector.request_finished("a", ScheduledRequest("a", tables, 8))
    metadata = rig.run(allocated=(tables[0][1:],))
    (order,) = metadata.stores
    assert metadata.wait_for == [order.job_id], "its blocks were given away at once"
    rig.end(metadata)
    assert rig.connector.get_num_new_matched_tokens(rig.request("b", 9), 0) == PrefixMatch(8, False)


@pytest.mark.parametrize(
    ("params", "stored", "matched"),
    [
        ({"skip": True}, 0, 0),
        ({"max_offload_tokens": 9}, 2, 16),
        ({"max_offload_tokens": 0}, 0, 16),
        ({"kv_load_tiers": [{"medium": "STORAGE"}]}, 4, 16),
        (["skip"], 4, 16),
        ({"skip": "yes", "max_offload_tokens": -1, "kv_load_tiers": 3}, 4, 16),
    ],
    ids=str,
)
def test_requests_may_ask_for_less(params: Any, stored: int, matched: int) -> None:
    rig = DrivenConnector()
    request = rig.request("a", 17)
    request.kv_transfer_params = params
    rig.connector.on_new_request(request)
    metadata = rig.run(ScheduledRequest("a", rig.table(17), 16))
    assert sum(len(order.device.block_ids) for order in metadata.stores) == stored
    rig.end(metadata)
    rig.serve(rig.request("b", 17))
    assert rig.connector.get_num_new_matched_tokens(request, 0).num_tokens == matched


def test_a_store_is_waited_for_before_its_blocks_are_reused() -> None:
    rig = DrivenConnector()
    rig.request("a", 8)
    tables = rig.table(8)
    (order,) = rig.run(ScheduledRequest("a", tables, 8)).stores
    rig.connector.request_finished("a")
    assert rig.run(allocated=([999],)).wait_for == []
    assert rig.run(allocated=(tables[0][1:],)).wait_for == [order.job_id]
    rig.connector.update_connector_output([WorkerOutput(0, [TransferResult(order.job_id, True)])])
    assert rig.run(allocated=(tables[0][1:],)).wait_for == []


def test_a_job_is_done_when_every_rank_has_said_so() -> None:
    rig = DrivenConnector(world_size=3)
    rig.request("a", 8)
    (order,) = rig.run(ScheduledRequest("a", rig.table(8), 8)).stores
    waiting = rig.request("b", 9)
    for rank in (2, 0, 0):
        result = TransferResult(order.job_id, True)
        rig.connector.update_connector_output([WorkerOutput(rank, [result])])
        assert rig.connector.get_num_new_matched_tokens(waiting, 0).is_pending
        rig.run()
    rig.connector.update_connector_output([WorkerOutput(1, [TransferResult(order.job_id, True)])])
    assert rig.connector.get_num_new_matched_tokens(waiting, 0) == PrefixMatch(8, False)


def test_one_failed_rank_fails_a_store() -> None:
    rig = DrivenConnector(world_size=2)
    rig.request("a", 8)
    (order,) = rig.run(ScheduledRequest("a", rig.table(8), 8)).stores
    rig.connector.update_connector_output(
        [
            WorkerOutput(0, [TransferResult(order.job_id, False)]),
            WorkerOutput(1, [TransferResult(order.job_id, True)]),
        ]
    )
    assert rig.connector.get_num_new_matched_tokens(rig.request("b", 9), 0) == NOTHING


def test_a_failed_load_leaves_the_request_with_what_it_had() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    request = rig.request("b", 17)
    rig.connector.get_num_new_matched_tokens(request, 4)
    rig.connector.update_state_after_alloc(request, rig.table(17), 4, 12)
    assert rig.end(rig.run(), success=False) == [("b", 4)]
    assert rig.connector.get_num_new_matched_tokens(request, 4) == NOTHING, "it computes now"
    rig.run(preempted_req_ids=["b"])
    assert rig.connector.get_num_new_matched_tokens(request, 0) == PrefixMatch(16, False)


def test_a_prefix_that_is_being_loaded_is_not_loaded_twice() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    first, second = rig.request("b", 17), rig.request("c", 13)
    rig.connector.get_num_new_matched_tokens(first, 0)
    rig.connector.update_state_after_alloc(first, rig.table(17), 0, 16)
    assert rig.connector.get_num_new_matched_tokens(second, 0) == PrefixMatch(0, True)
    rig.end(rig.run())
    assert rig.connector.get_num_new_matched_tokens(second, 0) == PrefixMatch(12, False)


def test_a_refused_store_is_offered_again() -> None:
    rig = DrivenConnector(num_blocks=3)
    rig.request("a", 8)
    first = rig.run(ScheduledRequest("a", rig.table(8), 8))
    rig.request("b", 8, first=50)
    tables = rig.table(8)
    assert rig.run(ScheduledRequest("b", tables, 8)).stores == []
    rig.end(first)
    (order,) = rig.run(ScheduledRequest("b", tables, 8)).stores
    assert order.device.block_ids.tolist() == tables[0]


def test_after_a_preemption_everything_is_offered_again() -> None:
    rig = DrivenConnector()
    rig.request("a", 8)
    rig.end(rig.run(ScheduledRequest("a", rig.table(8), 8)), success=False)
    metadata = rig.run(ScheduledRequest("a", rig.table(8), 4), preempted_req_ids=["a"])
    (order,) = metadata.stores
    assert len(order.device.block_ids) == 1


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    rig = DrivenConnector()
    for number in range(5):
        rig.serve(rig.request(f"r{number}", 12, first=number * 20))
    connector = rig.connector
    assert not connector._states
    assert not connector._jobs
    assert not connector._readers
    assert not connector._loading
    assert not connector.has_pending_push_work()
    manager = connector.manager
    assert isinstance(manager, CPUOffloadingManager)
    assert not manager.uses, "the manager was told of every end"


def test_a_block_given_to_another_group_is_waited_for_too() -> None:
    rig = DrivenConnector((FULL, WINDOW))
    rig.request("a", 16)
    tables = rig.table(16)
    (order,) = rig.run(ScheduledRequest("a", tables, 16)).stores
    assert rig.run(allocated=([], tables[0][:1])).wait_for == [order.job_id]


def test_what_was_loaded_is_not_offered_again_but_device_hits_are() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 16))
    request = rig.request("b", 24)
    tables = rig.table(24)
    assert rig.connector.get_num_new_matched_tokens(request, 4) == PrefixMatch(12, False)
    rig.connector.update_state_after_alloc(request, tables, 4, 12)
    rig.end(rig.run())
    offered: list[OffloadKey] = []
    manager = rig.connector.manager
    prepare_store = manager.prepare_store

    def watch(keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered.extend(keys)
        return prepare_store(keys, req_context)

    manager.prepare_store = watch  # type: ignore[method-assign]
    rig.run(ScheduledRequest("b", tables, 24))
    hashes = request.block_hashes
    assert offered == [make_offload_key(hashes[i], 0) for i in (0, 4, 5)]


def test_what_a_failed_load_did_not_bring_is_offered() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 16))
    request = rig.request("b", 17)
    tables = rig.table(17)
    rig.connector.get_num_new_matched_tokens(request, 4)
    rig.connector.update_state_after_alloc(request, tables, 4, 12)
    rig.end(rig.run(), success=False)
    (group,) = rig.connector._states["b"].group_states
    assert not group.loaded


def test_a_prefix_that_the_device_keeps_having_stays_in_host_memory() -> None:
    rig = DrivenConnector(num_blocks=9)
    for number in range(6):
        request = rig.request(f"r{number}", 20)
        request.token_ids = [*request.token_ids[:16], *[100 + number] * 4]
        tables = rig.table(20)
        rig.connector.update_state_after_alloc(request, tables, 16 if number else 0, 0)
        rig.end(rig.run(ScheduledRequest(request.request_id, tables, 20)))
        rig.connector.request_finished(request.request_id)
    late = rig.request("late", 17)
    assert rig.connector.get_num_new_matched_tokens(late, 0) == PrefixMatch(16, False)


def test_an_id_is_not_used_again_before_its_load_was_reported() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    request = rig.request("b", 17)
    rig.connector.get_num_new_matched_tokens(request, 0)
    rig.connector.update_state_after_alloc(request, rig.table(17), 0, 16)
    metadata = rig.run()
    rig.connector.request_finished("b")
    with pytest.raises(ValueError, match="use another id"):
        rig.request("b", 9)
    rig.end(metadata)
    rig.request("b", 9)


def test_there_is_work_until_the_last_rank_has_reported() -> None:
    rig = DrivenConnector(world_size=2)
    rig.request("a", 8)
    tables = rig.table(8)
    assert not rig.connector.has_pending_push_work()
    rig.connector.request_finished("a", ScheduledRequest("a", tables, 8))
    assert rig.connector.has_pending_push_work(), "not even sent"
    (order,) = rig.run().stores
    for rank in range(2):
        assert rig.connector.has_pending_push_work()
        result = TransferResult(order.job_id, True)
        rig.connector.update_connector_output([WorkerOutput(rank, [result])])
    assert not rig.connector.has_pending_push_work()


# --- resets -------------------------------------------------------------------------------------


def test_a_reset_in_mid_flight() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    sent, unsent = rig.request("b", 17), rig.request("c", 9)
    for request in (sent, unsent):
        rig.connector.get_num_new_matched_tokens(request, 0)
    rig.connector.update_state_after_alloc(sent, rig.table(17), 0, 16)
    metadata = rig.run()
    storing = rig.request("d", 8, first=90)
    metadata_of_store = rig.run(ScheduledRequest(storing.request_id, rig.table(8), 8))
    rig.connector.update_state_after_alloc(unsent, rig.table(9), 0, 8)
    rig.connector.reset_cache()
    under_way = {order.job_id for order in (*metadata.loads, *metadata_of_store.stores)}
    after = rig.run()
    assert set(after.flush) == under_way
    assert after.loads == after.stores == []
    assert rig.connector.has_pending_push_work()
    assert rig.connector.update_connector_output([]) == [("c", 0)], "it never began"
    assert rig.end(metadata) == [("b", 0)], "what it brought is not valid"
    rig.end(metadata_of_store)
    assert not rig.connector._loading
    assert rig.connector.get_num_new_matched_tokens(rig.request("e", 17), 0) == NOTHING
    assert rig.connector.get_num_new_matched_tokens(rig.request("f", 9, first=90), 0) == NOTHING
    assert not rig.connector._readers


def test_a_request_that_waited_at_a_reset_stores_what_it_computes_later() -> None:
    rig = DrivenConnector()
    waiting = rig.request("b", 33)
    rig.connector.reset_cache()
    rig.run()
    rig.serve(rig.request("a", 17))
    assert rig.connector.get_num_new_matched_tokens(waiting, 0) == PrefixMatch(16, False)
    tables = rig.table(33)
    rig.connector.update_state_after_alloc(waiting, tables, 0, 16)
    rig.end(rig.run())
    (order,) = rig.run(ScheduledRequest("b", tables, 32)).stores
    assert order.device.block_ids.tolist() == tables[0][4:8]


def test_what_a_running_request_has_from_before_a_reset_is_not_stored() -> None:
    rig = DrivenConnector()
    rig.request("a", 16)
    tables = rig.table(16)
    rig.end(rig.run(ScheduledRequest("a", tables, 0), new_req_ids=["a"]))
    rig.connector.reset_cache()
    assert rig.run(ScheduledRequest("a", tables, 16)).stores == []
    assert rig.run(ScheduledRequest("a", tables, 16)).stores == []
    rig.run(preempted_req_ids=["a"])
    (order,) = rig.run(ScheduledRequest("a", tables, 16), new_req_ids=["a"]).stores
    assert len(order.device.block_ids) == 4, "computed anew"


# --- groups -------------------------------------------------------------------------------------


def test_groups_of_different_block_sizes_are_stored_head_first() -> None:
    rig = DrivenConnector((FULL, WINDOW))
    rig.request("a", 32)
    (order,) = rig.run(ScheduledRequest("a", rig.table(32), 32)).stores
    assert order.device.group_sizes == (8, 4)
    assert len(slots(order.offloaded)) == 12


def test_blocks_that_left_the_window_are_not_stored() -> None:
    rig = DrivenConnector((FULL, WINDOW))
    rig.request("a", 32)
    full, window = rig.table(32)
    window[:2] = [NO_DEVICE_BLOCK] * 2
    (order,) = rig.run(ScheduledRequest("a", (full, window), 32)).stores
    assert order.device.group_sizes == (8, 2)
    assert order.device.block_ids.tolist() == [*full, *window[2:]]


def test_a_windowed_group_loads_its_window_only() -> None:
    rig = DrivenConnector((FULL, WINDOW, STATE))
    rig.serve(rig.request("a", 65))
    request = rig.request("b", 65)
    assert rig.connector.get_num_new_matched_tokens(request, 0) == PrefixMatch(64, False)
    tables = rig.table(65)
    rig.connector.update_state_after_alloc(request, tables, 0, 64)
    (order,) = rig.run().loads
    assert order.device.group_sizes == (16, 3, 1), "45 to 63 are in the window of the next token"
    assert order.device.block_indices == (0, 5, 15)


class AllKnown(CPUOffloadingManager):
    """A manager that has exactly the given keys."""

    there: set[OffloadKey]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.there else LookupResult.MISS

    def lookup_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> PrefixLookup:
        return OffloadingManager.lookup_prefix(self, keys, req_context)


@given(
    present=st.lists(st.booleans(), min_size=20, max_size=20),
    full_hits=st.integers(0, 20),
    computed=st.integers(0, 10),
    window=st.integers(1, 60),
    kind=st.sampled_from(
        [AttentionKind.SLIDING_WINDOW, AttentionKind.STATE_SPACE, AttentionKind.CHUNKED_LOCAL]
    ),
)
def test_a_match_is_the_longest_for_which_every_group_has_what_it_needs(
    present: list[bool], full_hits: int, computed: int, window: int, kind: AttentionKind
) -> None:
    windowed = OffloadingGroupConfig(
        4,
        ("w",),
        group_id=1,
        kind=kind,
        window_tokens=None if kind is AttentionKind.STATE_SPACE else window,
    )
    manager = AllKnown(1)
    rig = DrivenConnector((FULL, windowed), manager=manager)
    request = rig.request("a", 81)
    hashes = request.block_hashes
    manager.there = {make_offload_key(hashes[i], 0) for i in range(full_hits)}
    manager.there |= {make_offload_key(hashes[i], 1) for i in range(20) if present[i]}

    def fits(end: int) -> bool:
        """The longest match by definition, token by token."""
        if kind is AttentionKind.STATE_SPACE:
            needed = {end - 1}
        elif kind is AttentionKind.SLIDING_WINDOW:
            needed = set(range(max(0, end - window + 1), end))
        else:
            needed = set(range(end // window * window, end))
        return end // 4 <= full_hits and all(
            present[token // 4] for token in needed if token >= computed * 4
        )

    longest = max((end for end in range(0, 81, 4) if end > computed * 4 and fits(end)), default=0)
    matched = rig.connector.get_num_new_matched_tokens(request, computed * 4)
    assert matched == PrefixMatch(max(0, longest - computed * 4), False)


def test_what_is_not_known_and_cannot_matter_is_not_waited_for() -> None:
    class PartlyKnown(AllKnown):
        unknown: OffloadKey

        def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
            return LookupResult.RETRY if key == self.unknown else super().lookup(key, req_context)

    manager = PartlyKnown(1)
    windowed = OffloadingGroupConfig(
        4, ("w",), group_id=1, kind=AttentionKind.SLIDING_WINDOW, window_tokens=8
    )
    rig = DrivenConnector((FULL, windowed), manager=manager)
    request = rig.request("a", 25)
    hashes = request.block_hashes
    manager.there = {make_offload_key(block_hash, 0) for block_hash in hashes}
    manager.there |= {make_offload_key(block_hash, 1) for block_hash in hashes[:4]}
    manager.unknown = make_offload_key(hashes[5], 1)  # after one that is missing
    assert rig.connector.get_num_new_matched_tokens(request, 0) == PrefixMatch(16, False)
    manager.unknown = make_offload_key(hashes[5], 0)  # after the end that the window allows
    assert rig.connector.get_num_new_matched_tokens(request, 0) == PrefixMatch(16, False)
    manager.unknown = make_offload_key(hashes[3], 1)
    assert rig.connector.get_num_new_matched_tokens(request, 0) == PrefixMatch(0, True)


def test_a_manager_knows_how_long_a_prompt_is() -> None:
    class Measuring(CPUOffloadingManager):
        def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
            lengths.append(req_context.num_prompt_tokens)
            return super().on_new_request(req_context)

    lengths: list[int | None] = []
    DrivenConnector(manager=Measuring(8)).request("a", 25)
    assert lengths == [25]


class _Listener(CPUOffloadingManager):
    """A manager that records the cost of prefill."""

    def __init__(self) -> None:
        super().__init__(64)
        self.prefills: list[tuple[int, float, float]] = []

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        self.prefills.append((num_tokens, mean_position, seconds))


@pytest.mark.parametrize(
    ("computed", "prefill"),
    [
        ([(0, 512)], (512, 256.0)),
        ([(512, 512), (0, 1), (9, 1)], (512, 768.0)),
        ([(0, 100), (300, 100)], (200, 200.0)),
        ([(0, 64)], None),
        ([(7, 1)] * 300, None),
        ([(7, 2)] * 63, None),
        ([], None),
    ],
)
def test_the_manager_hears_what_prefill_costs(
    computed: list[tuple[int, int]], prefill: tuple[int, float] | None
) -> None:
    listener = _Listener()
    rig = DrivenConnector(manager=listener)
    rig.connector.note_model_run([ComputedTokens(*tokens) for tokens in computed], 0.25)
    assert listener.prefills == ([] if prefill is None else [(*prefill, 0.25)])


def _forgotten() -> Request:
    return Request("forgotten", list(range(17)), 17)


def test_a_forgotten_on_new_request_is_named_with_the_remedy() -> None:
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    for call in (
        lambda: rig.connector.get_num_new_matched_tokens(_forgotten(), 0),
        lambda: rig.connector.update_state_after_alloc(_forgotten(), rig.table(17), 0, 16),
    ):
        with pytest.raises(ContractViolation) as refused:
            call()
        assert str(refused.value) == (
            "connector: a call for a request that was not announced (request 'forgotten'): call "
            "on_new_request when it arrives, before any other call for it. Until then nothing is "
            "loaded or stored for it"
        )


def test_a_forgotten_on_new_request_loads_nothing_and_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STRICT_ENV, "0")
    rig = DrivenConnector()
    rig.serve(rig.request("a", 17))
    forgotten, tables = _forgotten(), rig.table(17)
    for _ in range(3):
        assert rig.connector.get_num_new_matched_tokens(forgotten, 0) == NOTHING
    rig.connector.update_state_after_alloc(forgotten, tables, 4, 8)
    metadata = rig.run(ScheduledRequest("forgotten", tables, 16))
    assert (metadata.loads, metadata.stores) == ([], [])
    assert rig.end(metadata) == [("forgotten", 4)], "no more than it had"
    rig.connector.request_finished("forgotten")
    assert not rig.connector.has_pending_push_work()
    (line,) = caplog.messages
    assert "call on_new_request" in line
