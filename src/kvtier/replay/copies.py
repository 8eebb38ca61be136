"""The load of a fleet: several copies of a trace at the same time, and the conversation that each
request belongs to.

A trace says which prompts begin alike, but not who has sent them. Copies stand for more users. They
have the lengths and the pauses of the trace, each `_SPREAD_S` / copies later than the one before,
so that short bursts of one copy do not meet those of the others. A stated share of the
conversations is the same in all copies, as popular documents and tools are: their blocks have the
same keys in all copies, and so have the blocks that other conversations share with them, such as
the system prompt. All other blocks have keys of their own in each copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heapreplace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import OffloadKey

if TYPE_CHECKING:
    from kvtier.replay.trace import Request

__all__ = ["Conversations", "FleetLoad", "FleetRequest"]

_SPREAD_S = 60.0
"""From the start of the first copy to the start of a copy after the last, in seconds of the
trace."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, are spread evenly: any share of the conversations is
taken from the whole trace, and a larger share contains a smaller one."""


class FleetRequest(NamedTuple):
    """One request of the load."""

    request: Request
    conversation: int
    """Equal for the turns of one conversation of one copy."""


class _Leaf:
    """The end of an earlier prompt."""

    __slots__ = ("conversation", "following")

    def __init__(self, conversation: int) -> None:
        self.conversation = conversation
        self.following: OffloadKey | None = None
        """The block with which the conversation went on."""


class Conversations:
    """Finds the turns of a conversation by their prompts.

    A prompt that continues an earlier one, block by block from its start to its end, is the next
    turn of its conversation. Another prompt that continues the same one in another way begins a new
    conversation: what both have in common is a system prompt or a document, or an answer was asked
    for anew.
    """

    def __init__(self) -> None:
        self._leaves: dict[OffloadKey, _Leaf] = {}
        """The last blocks of all prompts."""
        self._numbers = count()

    def number_of(self, keys: list[OffloadKey]) -> int:
        """The conversation of the next prompt."""
        number = self._continued(keys)
        if number is None:
            number = next(self._numbers)
        if len(keys) > 1:  # one block is too little to tell users apart
            self._leaves.setdefault(keys[-1], _Leaf(number))
        return number

    def _continued(self, keys: list[OffloadKey]) -> int | None:
        following: OffloadKey | None = None
        for key in reversed(keys):
            leaf = self._leaves.get(key)
            if leaf is not None:
                if following is None or leaf.following in (None, following):
                    leaf.following = following or leaf.following
                    return leaf.conversation
                return None
            following = key
        return None


class FleetLoad:
    """The requests of a fleet, in order of arrival. Keeps the trace in memory, but only once."""

    def __init__(
        self, requests: Iterable[Request], copies: int = 1, common_percent: float = 0.0
    ) -> None:
        self._requests = list(requests)
        self._copies = copies
        conversations = Conversations()
        self._numbers = [conversations.number_of(request.keys) for request in self._requests]
        self._num_conversations = max(self._numbers, default=0) + 1
        self._common: set[OffloadKey] = set()
        """Blocks with the same key in all copies."""
        num_common = 0
        if copies > 1:
            for request, number in zip(self._requests, self._numbers, strict=True):
                if number * _GOLDEN % 1 < common_percent / 100:
                    self._common.update(request.keys)
            num_common = sum(map(self._num_common, self._requests))
        num_references = sum(len(request.keys) for request in self._requests)
        self.common_references_percent = 100 * num_common / max(1, num_references)
        """The share of the blocks of prompts that are the same in all copies."""
        self.num_served = 0
        self.num_requests = len(self._requests) * copies

    @property
    def first_s(self) -> float:
        """The first arrival, in seconds of the trace."""
        return self._requests[0].arrives_s if self._requests else 0.0

    @property
    def last_s(self) -> float:
        """The last arrival."""
        last_s = self._requests[-1].arrives_s if self._requests else 0.0
        return last_s + self._delay_s(self._copies - 1)

    def progress(self) -> tuple[int, int]:
        """The requests that have arrived, and all."""
        return self.num_served, self.num_requests

    def __iter__(self) -> Iterator[FleetRequest]:
        requests = self._requests
        if not requests:
            return
        following = [(requests[0].arrives_s + self._delay_s(n), n, 0) for n in range(self._copies)]
        heapify(following)
        while following:
            arrives_s, copy, position = following[0]
            self.num_served += 1
            yield self._copied(position, copy, arrives_s)
            position += 1
            if position < len(requests):
                due_s = requests[position].arrives_s + self._delay_s(copy)
                heapreplace(following, (due_s, copy, position))
            else:
                following.remove((arrives_s, copy, position - 1))
                heapify(following)

    def _delay_s(self, copy: int) -> float:
        return _SPREAD_S * copy / self._copies

    def _copied(self, position: int, copy: int, arrives_s: float) -> FleetRequest:
        request, number = self._requests[position], self._numbers[position]
        if copy:
            num_common, mark = self._num_common(request), copy.to_bytes(4, "big")
            keys = request.keys[:num_common]
            keys += [OffloadKey(mark + key) for key in request.keys[num_common:]]
            request = request._replace(arrives_s=arrives_s, keys=keys)
        return FleetRequest(request, copy * self._num_conversations + number)

    def _num_common(self, request: Request) -> int:
        """How many blocks at the start of a prompt are the same in all copies."""
        common = self._common
        if not common:
            return 0
        return next(
            (n for n, key in enumerate(request.keys) if key not in common), len(request.keys)
        )
