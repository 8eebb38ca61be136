"""Answers the question `explain`: which tokens of a request came from where, and why the others
were computed; and what became of one block.

Everything runs on the thread of the status socket, and only reads the journal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.base import OffloadKey, make_offload_key
from kvtier.observe.journal import HOST_PLACE, Event, What
from kvtier.observe.reasons import (
    Reason,
    amount,
    at,
    block_reason,
    declined_reason,
    late_reason,
    seconds,
    tier_reason,
)

if TYPE_CHECKING:
    from kvtier.observe.journal import Asked, BreakerNote, Journal, RequestRecord

__all__ = ["Explainer", "Place"]

_MOST_SHOWN = 100
_MOST_NAMED = 5


class Explainer:
    """Reads the journal of one engine."""

    def __init__(
        self, journal: Journal, places: Sequence[Place], block_tokens: Mapping[int, int], group: int
    ) -> None:
        """`places`: host memory and the tiers, by their numbers in the journal. `block_tokens`: the
        tokens of an offloaded block, by KV-cache group. `group`: the one that is counted."""
        self._journal = journal
        self._blocks = Whereabouts(journal, places)
        self._groups = tuple(block_tokens)
        self._per_block = block_tokens[group]

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `{"ask": "explain", "request": ID}`, `{..., "key": HEX}` or
        `{..., "last": N}`. Raises `ValueError` for another question."""
        self._journal.take_over()
        answer: dict[str, Any] = {
            "now_s": time.time(),
            "reaches_back_to_s": self._journal.wall(self._journal.reaches_back_to()),
            "lost_keys": self._journal.num_lost,
            "requests": [],
            "blocks": [],
        }
        if isinstance(name := question.get("request"), str):
            answer["requests"] = [self._request(record) for record in self._named(name)]
        elif isinstance(digits := question.get("key"), str):
            answer["blocks"] = [self._blocks.block(key) for key in self._keys_of(digits)]
        else:
            last = question.get("last", 1)
            if not isinstance(last, int) or not 1 <= last <= _MOST_SHOWN:
                raise ValueError(f"last={last!r}: give a whole number from 1 to {_MOST_SHOWN}")
            records = [each for each in self._journal.requests() if not each.is_prefetch]
            answer["requests"] = [self._request(record) for record in records[:last]]
        return answer

    # --- which request, which block -------------------------------------------------------------

    def _named(self, name: str) -> list[RequestRecord]:
        """The requests that a name stands for, newest first: the id, as the client or the engine
        knows it, or the beginning of a single one."""
        newest: dict[str, RequestRecord] = {}
        for record in self._journal.requests():
            newest.setdefault(record.req_id, record)
        if name in newest:
            return [newest[name]]
        # vLLM appends the number of the prompt to the id of an API request, and maybe more.
        parts = [record for req_id, record in newest.items() if req_id.startswith(f"{name}-")]
        if parts:
            return parts[:_MOST_SHOWN]
        fitting = [record for req_id, record in newest.items() if req_id.startswith(name)]
        if len(fitting) > 1:
            some = ", ".join(record.req_id for record in fitting[:_MOST_NAMED])
            raise ValueError(
                f"{len(fitting)} requests begin with {name!r}, such as {some}: give more of the id"
            )
        return fitting

    def _keys_of(self, digits: str) -> list[OffloadKey]:
        """The known keys that hexadecimal digits stand for: a key, or a block hash of any group."""
        try:
            given = bytes.fromhex(digits.removeprefix("0x"))
        except ValueError:
            raise ValueError(f"{digits}: give a block's hash or key in hexadecimal") from None
        keys = [OffloadKey(given), *(make_offload_key(given, group) for group in self._groups)]
        journal = self._journal
        return [key for key in keys if journal.moved.find(key) or journal.seen.find(key)]

    # --- a request ------------------------------------------------------------------------------

    def _request(self, record: RequestRecord) -> dict[str, Any]:
        started = record.started is not None
        found = record.device_tokens + record.loaded_tokens
        state = "ended" if record.ended is not None else "running" if started else "waiting"
        token = found // self._per_block * self._per_block
        decisive = self._decisive(record)
        return {
            "id": record.req_id,
            "state": state,
            "is_prefetch": record.is_prefetch,
            "tenant": record.tenant,
            "is_private": record.is_private,
            "arrived_s": self._blocks.wall(record.arrived),
            "looked_up_s": self._blocks.wall(record.looked_up or None),
            "started_s": self._blocks.wall(record.started),
            "ended_s": self._blocks.wall(record.ended),
            "tokens": {
                "prompt": record.num_tokens if started else record.prompt_tokens,
                "device": record.device_tokens if started else None,
                "loaded": self._loaded_tokens(record),
                "computed": record.num_tokens - found if started else None,
            },
            "decisive_block": None
            if decisive is None
            else {"key": decisive.hex(), "first_token": token},
            "lookups": [
                {
                    "tier": self._blocks.label(place),
                    "answer": asked.answer,
                    "seconds": asked.seconds,
                }
                for place, asked in self._answers(record, decisive).items()
            ],
            "loads": [
                {
                    "tier": self._blocks.label(load.place),
                    "blocks": load.num_blocks,
                    "loaded_blocks": load.num_moved,
                    "seconds": load.seconds,
                    "late": load.is_late,
                }
                for load in list(record.loads)
            ],
            "why": [reason.as_dict() for reason in self._why(record, decisive)],
        }

    def _loaded_tokens(self, record: RequestRecord) -> dict[str, int]:
        """Loaded tokens by the place that they came from. Together they are all loaded tokens: if
        the device had a part of the first block, that part was not loaded."""
        if record.loaded_tokens <= 0 or not record.loaded_blocks:
            return {}
        blocks = record.loaded_blocks
        num_blocks, num_tokens = sum(blocks.values()), record.loaded_tokens
        tokens = {label: num_tokens * count // num_blocks for label, count in blocks.items()}
        tokens[next(iter(tokens))] += num_tokens - sum(tokens.values())
        return tokens

    def _decisive(self, record: RequestRecord) -> OffloadKey | None:
        """The first block that was neither on the device nor loaded."""
        return record.key if record.missed is None else record.missed

    def _answers(self, record: RequestRecord, key: OffloadKey | None) -> dict[int, Asked]:
        """What the tiers answered for a block, by place; empty if they were not asked for it."""
        return dict(enumerate(record.answers(), HOST_PLACE + 1)) if key == record.key else {}

    def _why(self, record: RequestRecord, key: OffloadKey | None) -> list[Reason]:
        """Why the tokens that were not found were computed."""
        if record.skips:
            return [
                Reason(
                    "skip",
                    None,
                    'Nothing is loaded or stored for the request: it has the hint "skip", or '
                    "names a private tenant and not by its credential.",
                    'Remove "skip" from its kv_transfer_params, or send the credential.',
                )
            ]
        if not record.may_load:
            return [
                Reason(
                    "not_served",
                    None,
                    "The operator has switched loads off, for all requests or for a share of them "
                    "to which this one belongs.",
                    "`kvtier switch` shows what is off, and switches it on.",
                )
            ]
        if record.started is None:
            return [self._waits(record)]
        if record.load_failed:
            return [
                Reason(
                    "load_failed",
                    None,
                    "The copy from host memory to the device has failed, so the tokens were "
                    "computed.",
                    "See the engine's log of that time.",
                )
            ]
        found = record.device_tokens + record.loaded_tokens
        rest = record.num_tokens - found
        if found >= (record.num_tokens - 1) // self._per_block * self._per_block:
            return [self._nothing_missing(record, rest)]
        num_found = record.num_hits * self._per_block
        if num_found >= record.loaded_tokens + self._per_block:
            return [
                Reason(
                    "not_used",
                    None,
                    f"{amount(num_found, 'token')} could have been loaded, but the engine has "
                    f"loaded {record.loaded_tokens:,}.",
                    "In vLLM, the hint max_load_tokens limits what is loaded.",
                )
            ]
        if key is None:
            return [
                Reason(
                    "not_looked_up",
                    None,
                    "The engine has not asked for the blocks of this request, or has not used what "
                    "was found.",
                    "Some requests must be computed: in vLLM, those that ask for prompt_logprobs.",
                )
            ]
        decided = self._decisions(record, key)
        return decided or self._absences(record, key, found)

    def _waits(self, record: RequestRecord) -> Reason:
        if record.ended is not None:
            return Reason("never_started", None, "The request ended before it was started.", None)
        text = "The request has not started yet."
        if record.loads or record.has_looked_up:
            text += " It waits for a tier or for the device."
        return Reason("waiting", None, text, None)

    def _nothing_missing(self, record: RequestRecord, rest: int) -> Reason:
        if record.num_tokens <= self._per_block:
            return Reason(
                "short",
                None,
                f"The prompt has no full block of {self._per_block} tokens before its last token.",
                "Nothing to do: such prompts are quick to compute.",
            )
        text = (
            f"All full blocks were found. The last {amount(rest, 'token')} are always computed: "
            f"a block has {self._per_block} tokens, and at least one token must be computed."
        )
        return Reason("all_found", None, text, None)

    def _decisions(self, record: RequestRecord, key: OffloadKey) -> list[Reason]:
        """Why a block was not loaded although a place had it, or might have had it."""
        reasons = [
            declined_reason(self._blocks.label(place), declined)
            for place, declined in record.declined.items()
            if declined.first_key == key
        ]
        if record.no_room == key:
            reasons.append(
                Reason(
                    "no_room",
                    self._blocks.label(HOST_PLACE),
                    "Host memory had no room for more blocks of this request: other transfers hold "
                    "the slots, or the prompt is larger than host memory.",
                    "Raise cpu_bytes_to_use.",
                )
            )
        if record.left is not None and record.left[0] == key:
            _, wait_s, compute_s = record.left
            reasons.append(
                Reason(
                    "left",
                    None,
                    "Another request was loading these blocks, which would have taken about "
                    f"{seconds(wait_s)} more; computing them was estimated at "
                    f"{seconds(compute_s)}, so the request did not wait.",
                    None,
                )
            )
        if record.gave_up is not None and not reasons:
            what, place, after_s = record.gave_up
            label = None if place is None else self._blocks.label(place)
            reasons.append(late_reason(label, what, after_s))
        return reasons

    def _absences(self, record: RequestRecord, key: OffloadKey, found: int) -> list[Reason]:
        """Why no place had a block."""
        journal = self._journal
        when = record.looked_up or record.started or record.arrived
        history = journal.history(key, when)
        answers = self._answers(record, key)
        not_asked = [
            tier_reason(
                self._blocks.places[place].label,
                asked.answer,
                # A tier that is cut off when a request arrives is not asked for it later either.
                self._blocks.cut_off(place, when) or self._blocks.cut_off(place, record.arrived),
            )
            for place, asked in answers.items()
            if asked.answer != "no"
        ]
        if not history:
            return [*self._unknown(record, key, found, when), *not_asked]
        reasons = [self._blocks.of_host(history, when)]
        for place in range(HOST_PLACE + 1, len(self._blocks.places)):
            asked = answers.get(place)
            if asked is None or asked.answer == "no":
                reasons.append(self._blocks.of_tier(place, history, when))
        return [*reasons, *not_asked]

    def _unknown(
        self, record: RequestRecord, key: OffloadKey, found: int, when: float
    ) -> list[Reason]:
        """Nothing is known to have happened to a block."""
        seen = self._journal.was_seen(key, when, record.number)
        since = self._blocks.at(self._journal.reaches_back_to())
        per_block = self._per_block
        if seen is not None:
            other = self._blocks.of_number(seen.request)
            name = "another request" if other is None else f"request {other.req_id}"
            if other is not None and (other.ended is None or other.ended > when):
                text = (
                    f"The block was being computed: {name} had asked for it at "
                    f"{self._blocks.at(seen.when)} and had not stored it yet."
                )
                return [Reason("being_computed", None, text, None)]
            then = self._blocks.at(seen.when)
            text = f"The block was never stored, although {name} had it at {then}."
            remedy = (
                "Blocks are stored when they are complete. offload_prompt_only leaves out answers, "
                "and the hints skip and max_offload_tokens leave out more."
            )
            return [Reason("never_stored", None, text, remedy)]
        if found < per_block:
            text = (
                f"The first {amount(per_block, 'token')} differ from those of every prompt since "
                f"{since}, so no block of this prompt can be found."
            )
            remedy = (
                "For a prompt that should be known: something at its beginning changes, such as a "
                "timestamp, a name or an id. Move it behind the part that stays the same. A cache "
                "salt or a LoRA adapter makes another prompt, too."
            )
            return [Reason("first_block_new", None, text, remedy)]
        text = (
            f"The prompt is new from token {found} on: up to there it is like an earlier one, and "
            f"within the next {amount(per_block, 'token')} it differs from every prompt since "
            f"{since}."
        )
        return [Reason("differs", None, text, "Nothing is wrong if these tokens are new.")]


# --- blocks -----------------------------------------------------------------------------------

_MOST_EVENTS = 64
_ARRIVALS = frozenset({What.STORED, What.PROMOTED})


class Place(NamedTuple):
    """Host memory, or a tier."""

    label: str
    write: str | None = None
    """The write policy of a tier."""


class Whereabouts:
    """What the journal says about blocks at each place."""

    def __init__(self, journal: Journal, places: Sequence[Place]) -> None:
        """`places`: host memory and the tiers, by their numbers in the journal."""
        self._journal = journal
        self.places = places

    def label(self, place: int) -> str:
        """The name of a place."""
        return self.places[place].label if place < len(self.places) else f"tier {place - 1}"

    def of_number(self, number: int) -> RequestRecord | None:
        """The record of a request."""
        return next((r for r in self._journal.requests() if r.number == number), None)

    def name_of(self, number: int) -> str | None:
        """The id of a request. None: there is none, or it is forgotten."""
        record = self.of_number(number) if number else None
        return None if record is None else record.req_id

    def wall(self, when: float | None) -> float | None:
        """A time of the journal, in seconds since the epoch."""
        return None if when is None else self._journal.wall(when)

    def at(self, when: float) -> str:
        """A time of the journal, for people."""
        return at(self._journal.wall(when))

    # --- one block at one place -----------------------------------------------------------------

    def _reset(self, place: int, events: Sequence[Event], until: float) -> Reason | None:
        """The reason if the place was reset when it had the block. `events`: those of the place."""
        last = next((event for event in reversed(events) if event.what in _ARRIVALS), None)
        reset = None if last is None else self._journal.reset_between(place, last.when, until)
        if last is None or reset is None or last.when < events[-1].when < reset:
            return None
        label = self.label(place)
        return Reason(
            "reset",
            label,
            f"The block came to {label} at {self.at(last.when)}. At {self.at(reset)} the cache "
            "was reset (new weights, sleep or pause), and no earlier block is used any more.",
            'If the weights stay the same, reset_scope = "primary" keeps the blocks of the tiers.',
        )

    def of_host(self, history: Iterable[Event], when: float) -> Reason:
        """Why a block with this history was not in host memory then."""
        events = [e for e in history if e.place == HOST_PLACE or e.what is What.PROMOTED]
        label = self.label(HOST_PLACE)
        if not events:
            return Reason("never_stored", label, "It was never stored in host memory.", None)
        last = events[-1]
        return self._reset(HOST_PLACE, events, when) or block_reason(
            last.what, label, self.at(last.when), self.name_of(last.request)
        )

    def of_tier(self, place: int, history: Iterable[Event], when: float) -> Reason:
        """Why a tier did not have a block with this history then."""
        label, write = self.places[place]
        events = [e for e in history if e.place == place and e.what is not What.PROMOTED]
        # What a tier has told last counts: it evicts without a word if its events are off.
        if not events:
            return Reason(
                "never_stored_in_tier",
                label,
                f"It was never sent to {label}, whose write policy is {write}.",
                "docs/tiering.md says which blocks a write policy chooses.",
            )
        reset = self._reset(place, events, when)
        if reset is not None:
            return reset
        last = events[-1]
        if last.what is What.STORED:
            return Reason(
                "evicted_by_tier",
                label,
                f"{label} stored it at {self.at(last.when)} and did not have it any more at "
                f"{self.at(when)}: it has evicted it.",
                "Give the tier more room.",
            )
        cut_off = None
        if last.what is What.SHED:
            note = self._journal.cut_off_since(place, last.when, for_stores=True)
            note = note or self._journal.cut_off_since(place, last.when)
            cut_off = None if note is None else self._because(note)
        return block_reason(last.what, label, self.at(last.when), None, cut_off)

    def _because(self, note: BreakerNote) -> tuple[str, str]:
        """Since when, and why."""
        why = note.text.removeprefix("cut off: ").partition(". Tried again")[0]
        return self.at(note.when), why

    def cut_off(self, place: int, when: float) -> tuple[str, str] | None:
        """Since when a tier was cut off at a time, and why."""
        note = self._journal.cut_off_since(place, when)
        return None if note is None else self._because(note)

    def block(self, key: OffloadKey) -> dict[str, Any]:
        """What became of one block, and where it should be now."""
        journal = self._journal
        now = journal.now()
        history = journal.history(key)
        lookups = journal.seen.find(key)
        places = []
        for place, its in enumerate(self.places):
            events = [e for e in history if e.place == place and e.what is not What.PROMOTED]
            if place == HOST_PLACE:
                events = [e for e in history if e.place == place or e.what is What.PROMOTED]
            last = events[-1] if events else None
            has_it = last is not None and last.what in _ARRIVALS
            if has_it and last is not None and self._reset(place, events, now) is None:
                reason = Reason(
                    "there", its.label, f"It has been there since {self.at(last.when)}.", None
                )
            elif place == HOST_PLACE:
                reason = self.of_host(history, now)
            else:
                reason = self.of_tier(place, history, now)
            places.append(reason.as_dict())
        return {
            "key": key.hex(),
            "places": places,
            "lookups": [
                {"when_s": self.wall(e.when), "request": self.name_of(e.request)}
                for e in lookups[-_MOST_EVENTS:]
            ],
            "events": [
                {
                    "when_s": self.wall(e.when),
                    "what": e.what.name.lower(),
                    "tier": self.label(e.place),
                    "request": self.name_of(e.request),
                }
                for e in history[-_MOST_EVENTS:]
            ],
        }
