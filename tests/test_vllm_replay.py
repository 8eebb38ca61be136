"""The replay of vLLM's calls notices a manager that does wrong; its file format loses nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from tests import vllm_calls
from tests.vllm_replay import Replay, SlotLedger

NUM_BLOCKS = 24


class _ReadsTooEarly(CPUOffloadingManager):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result = super().lookup(key, req_context)
        return LookupResult.HIT if result is LookupResult.HIT_PENDING else result


class _HandsOutTheSameSlotTwice(CPUOffloadingManager):
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            output.store_spec = CPULoadStoreSpec([0] * len(output.keys_to_store))
        return output


class _LoadsFromTheNextSlot(CPUOffloadingManager):
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        assert isinstance(spec, CPULoadStoreSpec)
        return CPULoadStoreSpec(spec.block_ids + 1)


class _SwapsTheOrder(CPUOffloadingManager):
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            output.keys_to_store = output.keys_to_store[::-1]
        return output


class _ForgetsEvents(CPUOffloadingManager):
    def take_events(self) -> Iterable[OffloadingEvent]:
        return [event for event in super().take_events() if not event.removed]


class _KeepsQuietAboutEvictions(CPUOffloadingManager):
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            output.evicted_keys = []
        return output


@pytest.mark.parametrize(
    "wrong",
    [
        _ReadsTooEarly,
        _HandsOutTheSameSlotTwice,
        _LoadsFromTheNextSlot,
        _SwapsTheOrder,
        _ForgetsEvents,
        _KeepsQuietAboutEvictions,
    ],
)
def test_a_wrong_manager_is_noticed(wrong: type[CPUOffloadingManager]) -> None:
    noticed = 0
    for path in vllm_calls.recordings().values():
        manager = wrong(NUM_BLOCKS, enable_events=True, strict=True)
        try:
            Replay(vllm_calls.load(path), manager, SlotLedger(NUM_BLOCKS)).run()
        except AssertionError:
            noticed += 1
    assert noticed > 0


@given(st.lists(st.integers(0, 300)))
def test_runs_of_numbers_lose_nothing(numbers: list[int]) -> None:
    assert list(vllm_calls.parse_runs(vllm_calls.format_runs(numbers))) == numbers


def test_runs_are_short() -> None:
    assert vllm_calls.format_runs([0, 1, 2, 3, 9, 7, 6, 5]) == "0-3,9,7-5"


@pytest.mark.parametrize("scenario", vllm_calls.recordings())
def test_a_recording_survives_being_written(scenario: str, tmp_path: Path) -> None:
    path = vllm_calls.recordings()[scenario]
    again = vllm_calls.save(vllm_calls.load(path), tmp_path)
    assert again.name == path.name
    assert again.read_bytes() == path.read_bytes()


def test_large_recordings_are_compressed(tmp_path: Path) -> None:
    recording = vllm_calls.load(vllm_calls.recordings()["plain"])
    recording.calls *= 40
    path = vllm_calls.save(recording, tmp_path)
    assert path.suffix == ".gz"
    assert vllm_calls.load(path) == recording
