"""The hit ratio that a running engine would have with more or with less memory, by sampling.

One in some hundreds of the blocks that requests use is watched until a request looks it up again.
The watched blocks that were used in between, times the sampling rate, are an estimate of the number
of different blocks used in between. A cache that evicts by LRU has the block if it holds as many.
This is the idea of SHARDS (Waldspurger and others, FAST 2015), with one difference: uses are
sampled, not keys. So no key is hashed, and a block that nearly all prompts share has no special
weight.

A prompt's blocks form a chain: a block determines all blocks before it. So a watched block is found
by the first of the 64 blocks around it, and most keys of a prompt are never looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

HOST = "host memory"
"""The place of the sizes of host memory."""

__all__ = [
    "HOST",
    "CurvePoint",
    "CurveSize",
    "HitCurve",
    "host_sizes",
    "tier_sizes",
]

_RUN = 64
"""Blocks of a prompt whose watched blocks are found by the first one."""
_FEW = 8
"""A run with more watched blocks is searched from its first block to its last."""
_SPARSEST = 384
"""At most this many uses for each sample, unless more than `_MOST_WATCHED` would be watched."""
_LEAST_WATCHED = 4
"""Watched blocks that the smallest size has room for. With a small host memory, a larger share of
the uses is sampled."""
_MOST_WATCHED = 8192
"""The most blocks watched at the same time."""
_MEDIAN = 1 / 3
"""The number of watched blocks has a Poisson distribution. Its median is so much below the next
whole number."""
_SPARE = 1.15
"""More blocks than necessary are watched, so that the oldest are forgotten many at a time."""
_LEAST_SAMPLES = 128
"""Samples after which there is an estimate."""
_HALVED_AT = 16_384
"""Samples after which all counts are halved, so that older ones count less."""
_REFRESHED_EVERY = 32
"""Samples between two computations of the estimates."""


class CurveSize(NamedTuple):
    """A size of the cache for which the hit ratio is estimated."""

    gauge: str
    """The series of the metric."""
    place: str
    """Host memory, or the tier down to which the cache reaches."""
    factor: float
    """The size of that place, as a multiple of what it is."""
    num_blocks: int
    """How many blocks of prompts the whole cache holds then."""


class CurvePoint(NamedTuple):
    """An estimate."""

    size: CurveSize
    hit_ratio: float | None
    """The share of the blocks of prompts that would be found. None: not known yet."""


def host_sizes(num_blocks: int) -> list[CurveSize]:
    """Half of host memory, all of it, twice and four times as much."""
    name = "kvtier_cpu_estimated_hit_ratio"
    return [
        CurveSize(name + suffix, HOST, factor, max(1, int(num_blocks * factor)))
        for suffix, factor in (("_half", 0.5), ("", 1.0), ("_double", 2.0), ("_quadruple", 4.0))
    ]


def tier_sizes(
    gauges: tuple[str, str], place: str, above: int, capacity: int, adds: bool
) -> list[CurveSize]:
    """A tier below, as it is and twice as large, with everything above it.

    `gauges`: the series for the two sizes. `above`: blocks that host memory and the tiers above it
    hold. `adds`: the tier holds other blocks than those above; else it has copies of them, too.
    """
    sizes = []
    for gauge, factor in zip(gauges, (1, 2), strict=True):
        num_blocks = above + factor * capacity if adds else max(above, factor * capacity)
        sizes.append(CurveSize(gauge, place, factor, num_blocks))
    return sizes


class HitCurve:
    """Estimates the hit ratio for some sizes of the cache. Scheduler thread only.

    The estimates are those of LRU, and every size starts empty with the engine. Memory is bounded:
    at most 8,192 blocks are watched.
    """

    def __init__(self, sizes: Iterable[CurveSize], seed: int | None = None) -> None:
        """`seed`: chooses the samples; None: random ones."""
        self._sizes = sorted(sizes, key=lambda size: size.num_blocks)
        smallest, largest = self._sizes[0].num_blocks, self._sizes[-1].num_blocks
        self.every = max(
            1, min(smallest // _LEAST_WATCHED, _SPARSEST), -(-largest // _MOST_WATCHED)
        )
        """One of this many uses is sampled."""
        self._ranks = [size.num_blocks / self.every + _MEDIAN for size in self._sizes]
        self._most_watched = int(self._ranks[-1] * _SPARE) + 2
        self._random = Random(seed).random
        self._numbers: list[int] = []
        """The watched blocks, numbered in order of use. Of one prompt, the last block comes first,
        because the head of a prompt is evicted after its tail."""
        self._keys: dict[int, tuple[OffloadKey, OffloadKey]] = {}
        """By number: the key, and that of the first block of its run."""
        self._runs: dict[OffloadKey, dict[OffloadKey, tuple[int, int]]] = {}
        """By the first block of a run: the numbers and places of its watched blocks."""
        self._last_number = 0
        # One use in each group of `every` uses is sampled. All three are numbers of uses.
        self._num_used = self._group = 0
        self._next = int(self._random() * self.every)
        self.num_blocks = 0
        """Blocks of prompts that requests have looked up."""
        self._num_faded = 0.0
        """How many of these do not count any more, because older ones count less."""
        self._num_found = [0.0] * (len(self._sizes) + 1)
        """Watched blocks that were looked up, by the smallest size that would have had them. Older
        ones count less."""
        self._refresh_at, self._halve_at = _LEAST_SAMPLES, _HALVED_AT
        """Samples at which the estimates are computed next, and at which the counts are halved."""
        self.gauges: dict[str, float] = {}
        """The estimates that are known, by the names of metrics."""

    def note_prompt(self, keys: Sequence[OffloadKey], num_looked_up: int) -> None:
        """A request has ended. `keys`: the blocks that it had, in prompt order from the first one.
        The first `num_looked_up` of these are its prompt."""
        self.num_blocks += num_looked_up
        runs = self._runs
        if num_looked_up > _RUN:
            found = [n for n, first in enumerate(keys[:num_looked_up:_RUN]) if first in runs]
            if found:
                self._find(keys, found, num_looked_up)
        elif num_looked_up and keys[0] in runs:
            self._find(keys, [0], num_looked_up)
        self._num_used = num_used = self._num_used + len(keys)
        if self._next >= num_used:
            return
        self._sample(keys)
        if self._last_number >= self._refresh_at:
            self._refresh()

    def _find(self, keys: Sequence[OffloadKey], runs: list[int], num_looked_up: int) -> None:
        """A prompt has these runs with watched blocks. Count those blocks that it has, and watch
        them no longer."""
        numbers, ranks = self._numbers, self._ranks
        seen: list[int] = []
        for n in runs:
            start = n * _RUN
            watched = self._runs[keys[start]]
            if len(watched) <= _FEW:
                for key, (number, place) in watched.items():
                    at = start + place
                    if at < num_looked_up and keys[at] == key:
                        seen.append(number)
            else:
                run = keys[start : min(start + _RUN, num_looked_up)]
                seen += [watched[key][0] for key in run if key in watched]
        for number in seen:
            # The blocks watched since then stand for the different blocks used since then.
            num_since = len(numbers) - bisect_right(numbers, number)
            self._num_found[bisect_right(ranks, num_since + self._random())] += 1
        for number in seen:
            self._forget(number)
            del numbers[bisect_left(numbers, number)]

    def _sample(self, keys: Sequence[OffloadKey]) -> None:
        """Watch some of the blocks that a request has used."""
        num_before, every, random = self._num_used - len(keys), self.every, self._random
        chosen, at, group = [], self._next, self._group
        while at < self._num_used:
            chosen.append(at - num_before)
            group += every
            at = group + int(random() * every)
        self._next, self._group = at, group
        runs, number = self._runs, self._last_number
        for at in reversed(chosen):
            place = at % _RUN
            key, first = keys[at], keys[at - place]
            number += 1
            run = runs.get(first)
            if run is None:
                runs[first] = {key: (number, place)}
            else:
                if key in run:
                    self._forget_place(run[key][0])
                run[key] = (number, place)
            self._keys[number] = (key, first)
            self._numbers.append(number)
        self._last_number = number
        if len(self._numbers) > self._most_watched:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Watch some blocks no longer: even the largest size would not have them."""
        num_too_many = len(self._numbers) - self._most_watched + self._most_watched // 8
        for number in self._numbers[:num_too_many]:
            self._forget(number)
        del self._numbers[:num_too_many]

    def _forget_place(self, number: int) -> None:
        """Remove a block from the order of uses."""
        del self._keys[number]
        del self._numbers[bisect_left(self._numbers, number)]

    def _forget(self, number: int) -> None:
        """Watch this block no longer. The caller removes it from the order of uses."""
        key, first = self._keys.pop(number)
        run = self._runs[first]
        if len(run) == 1:
            del self._runs[first]
        else:
            del run[key]

    def _refresh(self) -> None:
        if self._last_number >= self._halve_at:
            self._halve_at = self._last_number + _HALVED_AT // 2
            self._num_faded += self._num_recent / 2
            self._num_found = [count / 2 for count in self._num_found]
        self._refresh_at = self._last_number + _REFRESHED_EVERY
        self.gauges = {
            size.gauge: round(ratio, 3) for size, ratio in self.points() if ratio is not None
        }

    @property
    def _num_recent(self) -> float:
        return self.num_blocks - self._num_faded

    def points(self) -> list[CurvePoint]:
        """All estimates, smallest size first."""
        if self._last_number < _LEAST_SAMPLES or not self._num_recent:
            return [CurvePoint(size, None) for size in self._sizes]
        shares = (count * self.every / self._num_recent for count in self._num_found)
        return [
            CurvePoint(size, min(ratio, 1.0))
            for size, ratio in zip(self._sizes, accumulate(shares), strict=False)
        ]

    def reset(self) -> None:
        """No block can be found any more: the cache was reset."""
        self._numbers, self._keys, self._runs = [], {}, {}
