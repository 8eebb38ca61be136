"""The journal: what became of requests and blocks of late, so that an operator can ask why.

The scheduler's thread notes what happens: a few fields for each request, and one `note` for each
batch of blocks, which only keeps a reference to the keys. The thread of the status socket takes
these notes over about once in a second (`take_over`), and writes the blocks into rings of fixed
size, with 8 bytes for each. `kvtier.observe.explanation` reads the rings. Neither thread waits for
the other. The journal takes at most 16 MiB; under a higher load it reaches less far back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, auto
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.hints import hints_of

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

__all__ = [
    "HOST_PLACE",
    "Asked",
    "BreakerNote",
    "Declined",
    "Event",
    "Journal",
    "RequestRecord",
    "TierLoad",
    "What",
]

HOST_PLACE = 0
"""The number of host memory as a place of blocks. Tier N has number N + 1."""

_MAX_ENDED, _MAX_OPEN = 1024, 1024
"""Requests that are remembered: those that have ended, and those that have not."""
_MAX_ID = 200
"""Longer request ids are cut: a client may choose them."""
_MAX_LOADS = 4
"""The newest loads of tiers that are kept for one request."""
_MAX_BREAKER_NOTES, _MAX_RESETS = 256, 64
_SEEN_KEYS, _SEEN_BATCHES = 1 << 18, 1 << 13
_MOVED_KEYS, _MOVED_BATCHES = 1 << 19, 1 << 15
"""Sizes of the two rings: blocks that requests have looked up, and what became of blocks."""
_MAX_WAITING = 1 << 15
"""The most keys in notes that wait to be taken over; a note counts as four more."""
_NOTE_WEIGHT = 4
_AT_ONCE = 256
"""Keys that the socket's thread reads before it offers Python's lock to the scheduler's thread."""
_NOBODY = 0


class What(IntEnum):
    """What has happened to blocks at a place."""

    LOOKED_UP = auto()
    """A request has looked them up. The place is host memory."""
    STORED = auto()
    """The place has them now."""
    PROMOTED = auto()
    """Host memory has them now, from this tier."""
    EVICTED = auto()
    """They have left host memory, to make room for the request."""
    REMOVED = auto()
    """The tier has reported that it does not have them any more."""
    LOST = auto()
    """The tier answered that it has them, and then could not load them."""

    # Not stored in host memory.
    FILTERED = auto()
    UNWANTED = auto()
    TOO_MANY = auto()
    REFUSED = auto()
    STALE = auto()
    COPY_FAILED = auto()

    # Not stored in a tier.
    SHED = auto()
    OVER_BUDGET = auto()
    DROPPED = auto()
    KEPT_OUT = auto()
    LEFT_OUT = auto()
    UNWRITTEN = auto()
    STORE_FAILED = auto()
    SWITCHED_OFF = auto()
    """The operator has switched stores to the tier off."""


class Event(NamedTuple):
    """Something that has happened to a block."""

    when: float
    """On the journal's clock."""
    what: What
    place: int
    request: int
    """The number of the request; 0: none, or one that is not recorded."""


class Declined(NamedTuple):
    """The guard has decided that a request computes blocks that a tier has."""

    first_key: OffloadKey
    num_blocks: int
    why: str
    """The objection: `slower`, `late`, `unmeasured`, `trial`."""
    load_s: float | None
    """Estimate of the time to load them. None: not known."""
    compute_s: float | None
    """Estimate of the time to compute them. None: not known."""
    num_held_up: int
    """Other requests that would wait while these are computed."""
    load_timeout_s: float


class Asked(NamedTuple):
    """A tier and its part in the lookup that decided."""

    answer: str
    """`no`; or why it was not asked: `hint`, `rule`, `declined`, `gave up`, `cut off`, `switched
    off`."""
    seconds: float | None = None
    """How long it took to answer."""


class TierLoad(NamedTuple):
    """A load from a tier for one request, maybe for others, too."""

    place: int
    num_blocks: int
    num_moved: int
    seconds: float
    is_late: bool


class BreakerNote(NamedTuple):
    """A breaker has cut a tier off, or the tier is in use again."""

    when: float
    place: int
    is_for_stores: bool
    """Of the stores alone; otherwise of the whole tier."""
    is_cut_off: bool
    text: str


class Reset(NamedTuple):
    """The cache was reset: no block of before is used any more."""

    when: float
    of_tiers: bool
    """False: only host memory was emptied."""


class RequestRecord:
    """What is recorded of one request. The scheduler's thread writes it; other threads only read,
    and may see a request in the middle of a change."""

    __slots__ = (
        "arrived",
        "asked",
        "declined",
        "device_tokens",
        "ended",
        "gave_up",
        "has_looked_up",
        "is_prefetch",
        "is_private",
        "is_refused",
        "key",
        "left",
        "load_failed",
        "loaded_blocks",
        "loaded_tokens",
        "loads",
        "looked_up",
        "may_load",
        "missed",
        "no_room",
        "num_hits",
        "num_tokens",
        "number",
        "prompt_tokens",
        "req_id",
        "skips",
        "started",
        "tenant",
    )

    def __init__(self, number: int, context: ReqContext, now: float) -> None:
        self.number = number
        self.req_id = context.req_id[:_MAX_ID]
        self.arrived = now
        self.prompt_tokens = context.num_prompt_tokens
        self.is_prefetch = context.is_prefetch
        hints = hints_of(context)
        self.tenant = hints.tenant.name
        self.is_private = hints.namespace is not None
        """True if the keys of its blocks are the tenant's own."""
        self.skips = hints.skip
        """True if the request's hints keep it from loading and storing."""
        self.may_load = context.may_load
        """False if an operator does not let it load anything."""
        self.has_looked_up = False
        self.looked_up = 0.0
        """When its last lookup was answered."""
        self.num_hits = 0
        """The hits of its last lookup of a prefix, in blocks."""
        self.missed: OffloadKey | None = None
        """The first block of the last lookup that is not a hit."""
        self.asked: Sequence[Asked | float] = ()
        """What each tier answered for the block in `key`. Only the seconds, if every tier was asked
        and answered no."""
        self.key: OffloadKey | None = None
        """The last block that no tier had, so that nothing behind it was looked up."""
        self.started: float | None = None
        """When the engine started it."""
        self.num_tokens = 0
        self.device_tokens = 0
        self.loaded_tokens = 0
        """Tokens of the request at its start; those that the device had, and those loaded."""
        self.loaded_blocks: Mapping[str, int] = {}
        """Loaded blocks, by the label of the place that they came from."""
        self.loads: list[TierLoad] = []
        self.declined: dict[int, Declined] = {}
        """By place: the last decision to compute what it has."""
        self.no_room: OffloadKey | None = None
        """The first block that host memory had no room for."""
        self.left: tuple[OffloadKey, float, float] | None = None
        """The first block that it computed instead of waiting for the load of another request; the
        seconds that this would have taken, and the seconds to compute."""
        self.gave_up: tuple[str, int | None, float] | None = None
        """It waits no more: `load` or `lookup` of a place was late, or the `wait` took too long in
        total; and after how many seconds."""
        self.load_failed = False
        """The copy from host memory to the device has failed."""
        self.is_refused = False
        """True while host memory has no room for what it stores."""
        self.ended: float | None = None

    def note_answer(self, keys: Sequence[OffloadKey], num_hits: int, now: float) -> None:
        """A lookup of a prefix was answered."""
        if num_hits < len(keys):
            self.missed = keys[num_hits]
        elif num_hits != self.num_hits:  # otherwise only what was found is looked up again
            self.missed = None
        self.looked_up = now
        self.num_hits = num_hits

    def answers(self) -> list[Asked]:
        """What each tier answered for the block in `key`."""
        return [each if isinstance(each, Asked) else Asked("no", each) for each in self.asked]

    def note_load(self, load: TierLoad) -> None:
        """A load from a tier has ended, or is late."""
        if len(self.loads) >= _MAX_LOADS:
            del self.loads[0]
        self.loads.append(load)


_Note = tuple[What, int, float, int, "Sequence[OffloadKey]"]


class Journal:
    """Records of requests, and what has happened to blocks. `kvtier.observe.observer` begins to
    keep it if other processes can ask. Until then, nothing is recorded.

    The methods in the first part are for the scheduler's thread, and take constant time. The others
    are for the socket's thread.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, resets_tiers: bool = True
    ) -> None:
        """`resets_tiers`: no block of the tiers is valid after a reset."""
        self._clock = clock
        self.is_kept = False
        """True if anything is recorded."""
        self._resets_tiers = resets_tiers
        self.began = clock()
        self._wall_offset = time.time() - self.began
        self._open: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=_MAX_ENDED)
        self._num_requests = 0
        self.breakers: deque[BreakerNote] = deque(maxlen=_MAX_BREAKER_NOTES)
        self.num_lost = 0
        """Keys in notes that came too fast to be recorded."""
        self._notes: deque[_Note] = deque()
        self._num_noted = self._num_taken = 0
        """Weights of all notes. Each is written by one thread; the difference waits."""
        self.seen = _KeyRing(0, 0)
        self.moved = _KeyRing(0, 0)
        self.resets: deque[Reset] = deque(maxlen=_MAX_RESETS)

    def keep(self) -> None:
        """Record from now on. Called before the first request."""
        self.is_kept = True
        self.began = self._clock()
        self._wall_offset = time.time() - self.began
        self.seen = _KeyRing(_SEEN_KEYS, _SEEN_BATCHES)
        self.moved = _KeyRing(_MOVED_KEYS, _MOVED_BATCHES)

    # --- the scheduler's thread -----------------------------------------------------------------

    def now(self) -> float:
        """The time, on the journal's clock."""
        return self._clock()

    def of(self, context: ReqContext) -> RequestRecord | None:
        """The record of a request that has not started; None if it has none."""
        record = self._open.get(context.req_id)
        return None if record is None or record.started is not None else record

    def begin(self, context: ReqContext) -> None:
        """A request has arrived."""
        if not self.is_kept:
            return
        former = self._open.pop(context.req_id, None)
        if former is not None:  # the id is used again
            self._ended.append(former)
        if len(self._open) < _MAX_OPEN:
            self._num_requests += 1
            self._open[context.req_id] = RequestRecord(self._num_requests, context, self._clock())

    def note_start(
        self,
        context: ReqContext,
        num_prompt: int,
        num_device: int,
        num_loaded: int,
        blocks: Mapping[str, int],
    ) -> None:
        """The engine starts a request, with what the device has and what is loaded. `blocks`: those
        that are loaded, by the label of the place that they came from."""
        record = self.of(context)
        if record is not None:
            record.started = self._clock()
            record.num_tokens = num_prompt
            record.device_tokens = min(num_device, num_prompt)
            record.loaded_tokens = min(num_loaded, num_prompt - record.device_tokens)
            record.loaded_blocks = blocks

    def note_failed_load(self, context: ReqContext) -> None:
        """A load of a request has failed."""
        record = self._open.get(context.req_id)
        if record is not None:
            record.load_failed = True

    def end(self, context: ReqContext) -> None:
        """A request has ended."""
        record = self._open.pop(context.req_id, None)
        if record is not None:
            record.ended = self._clock()
            self._ended.append(record)

    def note_wanted(self, keys: Sequence[OffloadKey], record: RequestRecord) -> None:
        """A request looks up these blocks, which follow one another in its prompt, for the first
        time. `keys` must not be changed later."""
        record.has_looked_up = True
        self._note(What.LOOKED_UP, HOST_PLACE, keys, record.number)

    def note(
        self,
        what: What,
        place: int,
        keys: Sequence[OffloadKey],
        context: ReqContext | None = None,
    ) -> None:
        """Something has happened to these blocks, for the request of `context`, if any. `keys` must
        not be changed later."""
        if self.is_kept and keys:
            record = None if context is None else self._open.get(context.req_id)
            self._note(what, place, keys, _NOBODY if record is None else record.number)

    def note_refused(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        """Host memory has no room for these blocks now. The engine offers them again in each step;
        only the first time is noted."""
        record = self._open.get(context.req_id)
        if record is not None and not record.is_refused:
            record.is_refused = True
            self._note(What.REFUSED, HOST_PLACE, keys, record.number)

    def note_reset(self) -> None:
        """The cache was reset."""
        if self.is_kept:
            self.resets.append(Reset(self._clock(), self._resets_tiers))

    def note_breaker(self, place: int, is_for_stores: bool, is_cut_off: bool, text: str) -> None:
        """A breaker has cut a tier off, or lets it be used again."""
        if self.is_kept:
            now = self._clock()
            self.breakers.append(BreakerNote(now, place, is_for_stores, is_cut_off, text))

    def _note(self, what: What, place: int, keys: Sequence[OffloadKey], request: int) -> None:
        weight = len(keys) + _NOTE_WEIGHT
        if self._num_noted - self._num_taken + weight > _MAX_WAITING:
            self.num_lost += len(keys)
            return
        self._num_noted += weight
        self._notes.append((what, place, self._clock(), request, keys))

    # --- the socket's thread --------------------------------------------------------------------

    def take_over(self) -> None:
        """Write the notes of the scheduler's thread into the rings."""
        notes = self._notes
        while notes:
            what, place, when, request, keys = notes.popleft()
            self._num_taken += len(keys) + _NOTE_WEIGHT
            ring = self.seen if what is What.LOOKED_UP else self.moved
            for start in range(0, len(keys), _AT_ONCE):
                part = keys[start : start + _AT_ONCE]
                ring.add(Event(when, what, place, request), part)
                # Python's lock is free for a moment. Otherwise the scheduler's thread would get it
                # only after the interpreter's switch interval, 5 ms.
                time.sleep(0)

    def wall(self, when: float) -> float:
        """A time on the journal's clock, in seconds since the epoch."""
        return when + self._wall_offset

    def requests(self) -> list[RequestRecord]:
        """All records, newest first."""
        # Copying a deque or the values of a dict is one step of the interpreter: no other thread
        # can change them meanwhile.
        open_ones, ended = list(self._open.values()), list(self._ended)
        return sorted([*ended, *open_ones], key=lambda record: -record.number)

    def history(self, key: OffloadKey, until: float = inf) -> list[Event]:
        """What has happened to a block until then, oldest first, without lookups."""
        return [event for event in self.moved.find(key) if event.when <= until]

    def was_seen(self, key: OffloadKey, until: float, but_by: int) -> Event | None:
        """The last lookup of this block until then by a request with another number."""
        events = [e for e in self.seen.find(key) if e.when <= until and e.request != but_by]
        return events[-1] if events else None

    def cut_off_since(
        self, place: int, when: float, *, for_stores: bool = False
    ) -> BreakerNote | None:
        """Why a tier was cut off at a time. None: it was not, or that is not known any more."""
        found = None
        for note in list(self.breakers):
            if note.place == place and note.when <= when and note.is_for_stores is for_stores:
                found = note
        return found if found is not None and found.is_cut_off else None

    def reset_between(self, place: int, since: float, until: float) -> float | None:
        """When a place was last reset in this time. None: it was not."""
        return max(
            (
                reset.when
                for reset in list(self.resets)
                if since <= reset.when <= until and (place == HOST_PLACE or reset.of_tiers)
            ),
            default=None,
        )

    def reaches_back_to(self) -> float:
        """Since when everything that happened to blocks is known."""
        return max(self.began, self.moved.since(), self.seen.since())


_BATCH = np.dtype(
    [("first", "i8"), ("end", "i8"), ("when", "f8"), ("request", "i8"), ("kind", "i4")]
)
_PLACES = 1 << 16


class _KeyRing:
    """Events of batches of blocks. The oldest are overwritten. A block is kept as the hash of its
    key, which Python keeps with the key."""

    def __init__(self, max_keys: int, max_batches: int) -> None:
        self._hashes: NDArray[np.int64] = np.zeros(max_keys, np.int64)
        self._batches: NDArray[Any] = np.zeros(max_batches, _BATCH)
        self._num_hashes = self._num_batches = 0
        """Written since the start."""

    def add(self, event: Event, keys: Sequence[OffloadKey]) -> None:
        """Write the event of a batch, which is smaller than the ring."""
        size = len(self._hashes)
        if not size:
            return
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        first = self._num_hashes
        end = first + len(keys)
        start = first % size
        num_before_wrap = min(len(keys), size - start)
        self._hashes[start : start + num_before_wrap] = hashes[:num_before_wrap]
        self._hashes[: len(keys) - num_before_wrap] = hashes[num_before_wrap:]
        self._num_hashes = end
        kind = event.what * _PLACES + event.place
        row = first, end, event.when, event.request, kind
        self._batches[self._num_batches % len(self._batches)] = row
        self._num_batches += 1

    def since(self) -> float:
        """Since when all events are here: the time of the oldest one, if others were
        overwritten."""
        batches = self._in_order()
        kept = batches[batches["first"] >= self._num_hashes - len(self._hashes)]
        is_complete = len(kept) == self._num_batches
        return -inf if is_complete or not len(kept) else float(kept["when"][0])

    def _in_order(self) -> NDArray[Any]:
        """The batches that were not overwritten, oldest first."""
        count = len(self._batches)
        if self._num_batches <= count:
            return self._batches[: self._num_batches]
        return np.roll(self._batches, -(self._num_batches % count))

    def find(self, key: OffloadKey) -> list[Event]:
        """The events of a block, oldest first."""
        size = len(self._hashes)
        places = np.flatnonzero(self._hashes == np.int64(hash(key)))
        places = places[places < self._num_hashes]
        if not len(places):
            return []
        newest = self._num_hashes - 1
        numbers = np.sort(newest - (newest - places) % size)
        batches = self._in_order()
        at = np.searchsorted(batches["first"], numbers, side="right") - 1
        events = []
        for number, index in zip(numbers.tolist(), at.tolist(), strict=True):
            if index >= 0 and number < batches[index]["end"]:
                _, _, when, request, kind = batches[index].item()
                events.append(Event(when, What(kind // _PLACES), kind % _PLACES, request))
        return events
