"""The CPU manager with calls recorded from stock vLLM, in tiers of several sizes."""

from __future__ import annotations

import pytest

from kvtier.base import ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import SlotState
from tests import vllm_calls
from tests.vllm_replay import Replay, SlotLedger

RECORDINGS = vllm_calls.recordings()
CAPACITIES = {"one slot": 1, "tiny": 5, "small": 24, "large": 4096}


def _manager(num_blocks: int, policy: str) -> CPUOffloadingManager:
    return CPUOffloadingManager(num_blocks, cache_policy=policy, enable_events=True, strict=True)


def _assert_all_can_be_replaced(manager: CPUOffloadingManager, ledger: SlotLedger) -> None:
    """One more prompt, as large as the tier takes: no earlier transfer is in its way."""
    context = ReqContext("afterwards")
    manager.on_new_request(context)
    keys = [
        make_offload_key(b"afterwards" + number.to_bytes(4, "big"), 0)
        for number in range(manager.num_blocks - manager.reserve)
    ]
    output = manager.prepare_store(keys, context)
    assert output is not None
    assert output.keys_to_store == keys
    ledger.store_prepared(keys, output)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("num_blocks", CAPACITIES.values(), ids=CAPACITIES)
@pytest.mark.parametrize("scenario", RECORDINGS)
def test_holds_under_vllms_calls(scenario: str, num_blocks: int, policy: str) -> None:
    recording = vllm_calls.load(RECORDINGS[scenario])
    manager = _manager(num_blocks, policy)
    ledger = SlotLedger(num_blocks)

    replay = Replay(recording, manager, ledger).run()

    assert replay.answers["stores"] > 0
    assert not ledger.writing
    assert not +ledger.pins
    assert set(manager.resident_keys()) == ledger.ready.keys()
    states = manager.slots.states()
    assert states[SlotState.READY] == len(ledger.ready)
    assert states[SlotState.WRITING] == 0
    assert states[SlotState.QUARANTINED] == len(ledger.quarantined)
    assert states.total() == num_blocks
    assert manager.misuse.total == 0
    assert manager.get_stats().gauges["kvtier_cpu_pinned_blocks"] == 0
    if not ledger.quarantined:
        _assert_all_can_be_replaced(manager, ledger)


def _evicted_nothing(scenario: str) -> bool:
    calls = vllm_calls.load(RECORDINGS[scenario]).calls
    return not any(
        call.result["evicted"] for call in calls if call.method == "prepare_store" and call.result
    )


# After an eviction, the answers depend on the policy.
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("scenario", [name for name in RECORDINGS if _evicted_nothing(name)])
def test_answers_as_recorded_where_nothing_was_evicted(scenario: str, policy: str) -> None:
    recording = vllm_calls.load(RECORDINGS[scenario])

    replay = Replay(recording, _manager(recording.num_blocks, policy)).run()

    assert replay.surprises == []
    assert replay.answers["evicted"] == 0


def test_a_large_tier_serves_every_recorded_hit() -> None:
    loads = Replay(vllm_calls.load(RECORDINGS["plain"]), _manager(4096, "lru")).run().answers
    assert loads["loads"] == 5
    assert loads["evicted"] == 0


def test_a_tiny_tier_evicts() -> None:
    answers = Replay(vllm_calls.load(RECORDINGS["plain"]), _manager(5, "lru")).run().answers
    assert answers["evicted"] > 0
