"""A life whose journal is compared with the truth: what was in host memory when, and where the
blocks of each request came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any

from kvtier.base import OffloadKey, TierFilter
from kvtier.observe import journal as journals
from kvtier.observe.explanation import Explainer, Place
from kvtier.observe.journal import HOST_PLACE, RequestRecord, What
from tests.tiering.simulation.life import Life
from tests.tiering.simulation.request import TOKENS_PER_CHUNK, Phase, Request

_TICK_S = 1e-7
"""Virtual seconds between two calls, so that no two things happen at the same time."""
_ARRIVALS = {What.STORED, What.PROMOTED}


@dataclass
class Stay:
    """A time for which a block was readable in host memory."""

    came: float
    left: float = inf


class ExplainedLife(Life):
    """Checks the journal after each step, and the explanation of each request when it starts."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.reasons: Counter[str] = Counter()
        self.num_events = 0
        self._stays: dict[OffloadKey, list[Stay]] = {}
        journal = self.manager.journal
        journal.keep()
        # Small rings are searched sooner, and no life fills them.
        journal.seen = journals._KeyRing(1 << 13, 1 << 12)
        journal.moved = journals._KeyRing(1 << 14, 1 << 13)
        self._labels = ["host", *(tier.label for tier in self.manager._tiers)]
        places = [Place(label, "through") for label in self._labels]
        tokens = {its.index: TOKENS_PER_CHUNK * its.chunks_per_block for its in self._groups}
        self._explainer = Explainer(journal, places, tokens, 0)
        self.calls._after_call = self._after_call
        self._try_to_load = self.engine._try_to_load
        self.engine._try_to_load = self._start  # type: ignore[method-assign]

    # --- the truth ------------------------------------------------------------------------------

    def _after_call(self, what: str) -> None:
        self.inspector.after_call(what)
        now = self.world.time.now
        there = set(self.primary.resident_keys())
        for key in there:
            stays = self._stays.setdefault(key, [])
            if not stays or stays[-1].left < inf:
                stays.append(Stay(now))
        for key, stays in self._stays.items():
            if key not in there and stays[-1].left == inf:
                stays[-1].left = now
        self.world.time.advance(_TICK_S)

    def step(self) -> None:
        super().step()
        self._check_places()

    def _check_places(self) -> None:
        """The journal has every block in host memory, and no other."""
        journal = self.manager.journal
        journal.take_over()
        assert not journal.num_lost
        for key, stays in self._stays.items():
            events = [
                event
                for event in journal.history(key)
                if event.what is What.PROMOTED or event.place == HOST_PLACE
            ]
            moves = [e for e in events if e.what in _ARRIVALS or e.what is What.EVICTED]
            last = moves[-1] if moves else None
            is_there = last is not None and last.what in _ARRIVALS
            if last is not None and journal.reset_between(HOST_PLACE, last.when, inf) is not None:
                is_there = False
            if is_there is not (stays[-1].left == inf):
                raise self.inspector.broken(f"the journal is wrong about {key!r}: {events}")
            arrivals = [event.when for event in moves if event.what in _ARRIVALS]
            if len(arrivals) != len(stays):
                raise self.inspector.broken(f"{key!r} came {len(stays)} times: {events}")
            self.num_events += len(events)

    # --- requests -------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        """Start a request if it need not wait, and say so, as engines do."""
        self._try_to_load(request)
        if request.phase is Phase.WAITING:
            return
        loaded = request.num_computed * TOKENS_PER_CHUNK
        # With several groups, the last chunk is not looked up.
        num_chunks = len(request.chunks) - (len(request.groups) > 1)
        num_tokens = num_chunks * TOKENS_PER_CHUNK + 1
        journal = self.manager.journal
        record = journal.of(request.context)
        if record is None:
            return  # it was not announced, or starts again
        self.manager.note_start(request.context, num_tokens, 0, loaded)
        journal.take_over()
        answer = self._explainer._request(record)
        tokens = answer["tokens"]
        if loaded + tokens["computed"] != num_tokens or sum(tokens["loaded"].values()) != loaded:
            raise self.inspector.broken(f"{tokens} do not add up to {num_tokens}")
        self._check_sources(tokens["loaded"], request)
        key = self._explainer._decisive(record)
        for reason in answer["why"]:
            self.reasons[reason["reason"]] += 1
            self._check_reason(reason, key, request, record)

    def _check_sources(self, loaded: dict[str, int], request: Request) -> None:
        """Only tiers that have promoted blocks of this prompt are named."""
        events = [
            event for key in request.all_keys() for event in self.manager.journal.history(key)
        ]
        promoting = {event.place for event in events if event.what is What.PROMOTED}
        named = {self._labels.index(label) for label in loaded if label != "host"}
        if not named <= promoting:
            raise self.inspector.broken(f"{loaded}, but blocks came from {promoting}")

    def _check_reason(
        self,
        reason: dict[str, Any],
        key: OffloadKey | None,
        request: Request,
        record: RequestRecord,
    ) -> None:
        name = reason["reason"]
        stays = self._stays.get(key, []) if key is not None else []
        stays = [stay for stay in stays if stay.came <= record.looked_up]
        is_here = bool(stays) and stays[-1].left > record.looked_up
        wrong = False
        if name == "evicted":
            wrong = not stays or is_here
        elif name in {"first_block_new", "differs", "being_computed", "never_stored"}:
            wrong = bool(stays)
            if name == "being_computed":
                wrong |= not self._is_computed_by_another(key, request)
        elif name == "reset":
            wrong = not self.world.num_resets or is_here
        elif name == "hint":
            wrong = request.context.load_tier_filter is TierFilter.ALL
        elif name == "cut_off":
            wrong = "since" not in reason["text"]
        elif name == "declined_slower":
            load_s, compute_s = reason["numbers"]["load_s"], reason["numbers"]["compute_s"]
            wrong = load_s is None or compute_s is None or load_s <= 0
        elif name == "all_found":
            wrong = record.loaded_tokens < record.num_tokens - 1
        if wrong:
            raise self.inspector.broken(
                f"{reason} for {key!r} of {request.context.req_id}: {stays}, it is "
                f"{self.world.time.now}"
            )

    def _is_computed_by_another(self, key: OffloadKey | None, request: Request) -> bool:
        others = (each for each in self.engine.requests if each is not request)
        return any(key in other.all_keys() for other in others)
