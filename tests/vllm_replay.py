"""Drives any kvtier manager with recorded calls of vLLM, and checks its answers.

The manager under test may hold more or less than the recorded one, so its answers may differ.
Transfers follow the manager under test: a store completes the keys that it accepted, and blocks are
loaded only if it has them; otherwise they are offered for storing, as vLLM does after computing
them. While blocks are on their way, they are looked up again at every step until the request ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from tests.vllm_calls import LETTERS, Call, Recording, parse_runs

_STEPS_UNTIL_DONE = 2
"""Steps of a transfer that is not in the recording."""


class SlotLedger:
    """What the slots of a tier must hold, derived from the manager's answers alone."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ready: dict[OffloadKey, int] = {}
        self.writing: dict[OffloadKey, int] = {}
        self.pins: Counter[OffloadKey] = Counter()
        self.quarantined: set[int] = set()
        self.num_steps_since_reset = 0
        self.announced: set[OffloadKey] = set()
        """Keys that can be read, according to events alone."""

    def expected(self, key: OffloadKey) -> LookupResult:
        """The expected answer of a lookup."""
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.writing else LookupResult.MISS

    def store_prepared(self, offered: Sequence[OffloadKey], output: PrepareStoreOutput) -> None:
        """Check and record an answer of `prepare_store`."""
        for key in output.evicted_keys:
            assert key not in offered, "a store evicted a block of its own"
            assert not self.pins[key], "a block was evicted while it was being read"
            del self.ready[key]
        accepted = set(output.keys_to_store)
        assert output.keys_to_store == [key for key in offered if key in accepted]
        assert not accepted & (self.ready.keys() | self.writing.keys()), "stored twice"
        slots = _slots(output.store_spec)
        assert len(slots) == len(accepted)
        in_use = {*self.ready.values(), *self.writing.values(), *self.quarantined}
        assert len(in_use) == len(self.ready) + len(self.writing) + len(self.quarantined)
        for key, slot in zip(output.keys_to_store, slots, strict=True):
            assert 0 <= slot < self.num_blocks
            assert slot not in in_use, f"slot {slot} was handed out while in use"
            in_use.add(slot)
            self.writing[key] = slot

    def store_completed(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these blocks can be read, and that transfers from before a reset have
        ended."""
        for key in keys:
            self.ready[key] = self.writing.pop(key)
        self.quarantined.clear()

    def load_prepared(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Check and record an answer of `prepare_load`."""
        assert slots == [self.ready[key] for key in keys], "a load was sent to the wrong slots"
        self.pins.update(keys)

    def load_completed(self, keys: Sequence[OffloadKey]) -> None:
        """Record that this transfer no longer reads these blocks."""
        self.pins.subtract(keys)
        self.quarantined.clear()

    def reset(self) -> None:
        """Record a reset: no block can be read, and slots of transfers under way stay unused."""
        self.quarantined |= set(self.writing.values())
        self.quarantined |= {slot for key, slot in self.ready.items() if self.pins[key]}
        self.ready.clear()
        self.writing.clear()
        self.pins.clear()
        self.num_steps_since_reset = 0

    def step_ended(self) -> None:
        """Record the end of a step. At the second one after a reset, the engine has flushed
        transfers."""
        self.num_steps_since_reset += 1
        if self.num_steps_since_reset > 1:
            self.quarantined.clear()

    def take_events(self, manager: OffloadingManager) -> None:
        """Check that the events, in order, lead to the blocks that can be read now."""
        for event in manager.take_events():
            for key in event.keys:
                assert (key in self.announced) == event.removed, "announced twice, or not at all"
                (self.announced.remove if event.removed else self.announced.add)(key)
        assert self.announced == self.ready.keys()


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer that the manager under test has prepared."""

    request: int
    keys: list[OffloadKey]
    slots: list[int]
    is_store: bool
    recorded: frozenset[int]
    """The keys whose recorded completion completes this one; empty if none was recorded."""
    due: int
    """If none was recorded: the step after which it has ended."""


class Worker(Protocol):
    """Carries out the transfers; its time passes with the steps."""

    def begin(self, transfer: Transfer) -> None:
        """The manager has prepared a transfer."""

    def end(self, transfer: Transfer) -> None:
        """The transfer is about to be completed."""

    def end_step(self) -> None:
        """A step has ended."""

    def reset(self) -> None:
        """The manager is about to be reset; transfers under way are not completed."""


@dataclass(slots=True)
class Replay:
    """Replays one recording against one manager. `ledger`, if given, checks every answer."""

    recording: Recording
    manager: OffloadingManager
    ledger: SlotLedger | None = None
    worker: Worker | None = None
    seed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Number of lookup results by name, and of transfers by kind."""
    surprises: list[str] = field(default_factory=list)
    """Answers that differ from the recorded ones."""
    _contexts: dict[int, ReqContext] = field(default_factory=dict)
    _transfers: list[Transfer] = field(default_factory=list)
    _computed: list[tuple[int, list[OffloadKey]]] = field(default_factory=list)
    """Blocks that could not be loaded, to be offered for storing."""
    _awaited: list[Call] = field(default_factory=list)
    """Loads of blocks that are on their way."""
    _step: int = 0
    _random: random.Random = field(default_factory=random.Random)

    def run(self) -> Replay:
        """Make every call, then end all open transfers and requests."""
        self._random.seed(self.seed)
        for call in self.recording.calls:
            getattr(self, f"_{call.method}")(call)
        for transfer in list(self._transfers):
            self._complete(transfer)
        for context in self._contexts.values():
            self.manager.on_request_finished(context)
        self._contexts.clear()
        if self.ledger is not None:
            self.ledger.take_events(self.manager)
        return self

    def key(self, number: int) -> OffloadKey:
        """The key that stands for a number of the recording."""
        return make_offload_key(number.to_bytes(32, "big"), self.recording.key_groups[number])

    # --- one method for each method of the contract ------------------------------------------

    def _on_new_request(self, call: Call) -> None:
        request = _request(call)
        self._contexts[request] = ReqContext(f"request-{request}")
        self.manager.on_new_request(self._contexts[request])

    def _lookup(self, call: Call) -> None:
        letters = ""
        for key in map(self.key, call.keys):
            result = self.manager.lookup(key, self._contexts[_request(call)])
            self.answers[result.name] += 1
            letters += LETTERS[result.name]
            if self.ledger is not None:
                assert result is self.ledger.expected(key)
        self._compare(call, letters, call.result)

    def _prepare_load(self, call: Call) -> None:
        self._load(call, recorded=call.keys)

    def _load(self, call: Call, recorded: Sequence[int]) -> None:
        keys = [self.key(number) for number in call.keys]
        context = self._contexts[_request(call)]
        results = {self.manager.lookup(key, context) for key in keys}
        if LookupResult.MISS in results:
            self._computed.append((_request(call), keys))
            return
        if results != {LookupResult.HIT}:
            self._awaited.append(call)
            return
        slots = _slots(self.manager.prepare_load(keys, context))
        if self.ledger is not None:
            self.ledger.load_prepared(keys, slots)
        self._begin(call, keys, slots, is_store=False, recorded=recorded)

    def _prepare_store(self, call: Call) -> None:
        stored = list(parse_runs(call.result["stored"])) if call.result else []
        output = self._offer(call, [self.key(number) for number in call.keys], stored)
        accepted = None if output is None else output.keys_to_store
        recorded = None if call.result is None else [self.key(number) for number in stored]
        self._compare(call, accepted, recorded)

    def _complete_load(self, call: Call) -> None:
        self._complete_recorded(call, is_store=False)

    def _complete_store(self, call: Call) -> None:
        self._complete_recorded(call, is_store=True)

    def _touch(self, call: Call) -> None:
        keys = [self.key(number) for number in call.keys]
        self.manager.touch(keys, self._contexts[_request(call)])

    def _on_request_finished(self, call: Call) -> None:
        self._awaited = [other for other in self._awaited if other.request != call.request]
        self.manager.on_request_finished(self._contexts[_request(call)])

    def _on_schedule_end(self, call: Call) -> None:
        self._step += 1
        awaited, self._awaited = self._awaited, []
        for load in awaited:
            self._load(load, recorded=())
        if self.ledger is not None:
            self.ledger.step_ended()
        self.manager.on_schedule_end(
            ScheduleEndContext(
                [f"request-{request}" for request in call.new_requests],
                {f"request-{request}" for request in call.preempted_requests},
            )
        )
        if self.worker is not None:
            self.worker.end_step()
        for transfer in list(self._transfers):
            if not transfer.recorded and transfer.due <= self._step:
                self._complete(transfer)
        computed, self._computed = self._computed, []
        for request, keys in computed:
            self._offer(Call("prepare_store", request), keys, [])

    def _has_pending_work(self, call: Call) -> None:
        self.manager.has_pending_work()

    def _take_events(self, call: Call) -> None:
        if self.ledger is not None:
            self.ledger.take_events(self.manager)
        else:
            list(self.manager.take_events())

    def _get_stats(self, call: Call) -> None:
        self.manager.get_stats()

    def _reset_cache(self, call: Call) -> None:
        # vLLM never delivers completions from before a reset.
        self._transfers.clear()
        self._computed.clear()
        self._awaited.clear()
        if self.worker is not None:
            self.worker.reset()
        self.manager.reset_cache()
        if self.ledger is not None:
            self.ledger.reset()

    def _shutdown(self, call: Call) -> None:
        """Does nothing: the caller shuts the manager down, after looking at it."""

    # --- transfers ---------------------------------------------------------------------------

    def _offer(
        self, call: Call, keys: list[OffloadKey], recorded: Sequence[int]
    ) -> PrepareStoreOutput | None:
        output = self.manager.prepare_store(keys, self._contexts[_request(call)])
        if output is None:
            self.answers["refused"] += 1
            return None
        if self.ledger is not None:
            self.ledger.store_prepared(keys, output)
        self.answers["evicted"] += len(output.evicted_keys)
        if output.keys_to_store:
            slots = _slots(output.store_spec)
            self._begin(call, output.keys_to_store, slots, is_store=True, recorded=recorded)
        return output

    def _begin(
        self,
        call: Call,
        keys: list[OffloadKey],
        slots: list[int],
        is_store: bool,
        recorded: Sequence[int],
    ) -> None:
        self.answers["stores" if is_store else "loads"] += 1
        due = self._step + _STEPS_UNTIL_DONE
        transfer = Transfer(_request(call), keys, slots, is_store, frozenset(recorded), due)
        self._transfers.append(transfer)
        if self.worker is not None:
            self.worker.begin(transfer)

    def _complete_recorded(self, call: Call, is_store: bool) -> None:
        wanted = (_request(call), is_store, frozenset(call.keys))
        for transfer in self._transfers:
            if (transfer.request, transfer.is_store, transfer.recorded) == wanted:
                self._complete(transfer)
                return

    def _complete(self, transfer: Transfer) -> None:
        self._transfers.remove(transfer)
        if self.worker is not None:
            self.worker.end(transfer)
        context = self._contexts[transfer.request]
        # vLLM gives a set, so the order must not matter.
        shuffled = self._random.sample(transfer.keys, len(transfer.keys))
        if transfer.is_store:
            self.manager.complete_store(dict.fromkeys(shuffled).keys(), context)
        else:
            self.manager.complete_load(dict.fromkeys(shuffled).keys(), context)
        if self.ledger is not None and transfer.is_store:
            self.ledger.store_completed(transfer.keys)
        elif self.ledger is not None:
            self.ledger.load_completed(transfer.keys)

    def _compare(self, call: Call, answer: object, recorded: object) -> None:
        if answer != recorded:
            self.surprises.append(f"{call.method}: {answer} instead of {recorded}")


def _request(call: Call) -> int:
    assert call.request is not None
    return call.request


def _slots(spec: object) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]
