"""Learns how soon blocks are used again, by the class of their last use and by age.

The class says what was known when a request came: how many earlier prompts it continued, how long
ago the last of them was used, and how much of it was new. For each class and age, the estimate is a
hazard: of the blocks that waited this long, the share that was used next. The data are samples of
what requests used last, whether those blocks are still stored or not.
"""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvtier.base import OffloadKey

SHARED = 32
"""The class of a head that several stored prompts share."""
NUM_CLASSES = 33

_NUM_BUCKETS = 28
"""Buckets of age; two for each doubling."""
_FIRST_BUCKET = 2
"""Younger ages count as this bucket: what is repeated at once says little about later uses."""
_MAX_AGE = 1 << (_NUM_BUCKETS // 2)
_ENDS = [2 ** ((bucket + 1) / 2) for bucket in range(_NUM_BUCKETS)]

_MAX_SAMPLES = 4096
_PERIOD = 64
"""Requests between two estimates."""
_KEPT = 0.97
"""Share of the earlier counts that each estimate keeps."""
_MIN_REUSED = 20
"""Samples that must have been used again before an estimate is made of them."""
_PRIOR = 8.0
"""Weight of all classes together in the estimate for one class, in samples."""

_TURNS = (1, 3, 6)
"""Where the classes by turn begin, after the first."""
_SIZES = (0.4, 1.1, 4.5)
"""Where the classes by number of new blocks begin, after the first, as multiples of the mean."""
_MEAN_STEP = 0.001
_GAP_STEP = 1.02


def _bucket(age: int) -> int:
    octave = max(age, 1).bit_length() - 1
    is_upper_half = age * age >= 2 << (2 * octave)
    return min(2 * octave + is_upper_half, _NUM_BUCKETS - 1)


_BUCKETS = bytes(map(_bucket, range(_MAX_AGE)))
_BUCKETS_BY_AGE = np.frombuffer(_BUCKETS, np.uint8)


def bucket_of(age: int) -> int:
    """The bucket of an age in requests."""
    return _BUCKETS[age] if age < _MAX_AGE else _NUM_BUCKETS - 1


class Sample(NamedTuple):
    """The last use of a sampled block."""

    group: int
    """Its class."""
    used_at: int
    """When, in requests."""
    num_keys: int
    """Blocks of the prompt up to and including this one."""
    turn: int
    """How many earlier prompts this prompt had continued."""


class ReuseOdds:
    """The clock, which counts requests, and the estimates."""

    def __init__(self, cache_capacity: int) -> None:
        self.now = 0
        """Number of requests so far."""
        self.is_informed = False
        """False until enough blocks have been used again to say which ones are worth storing."""
        self.worth: list[list[float]] = []
        """Expected uses of a block for each request that it waits, by class and bucket of age. Only
        if `is_informed`."""
        self._max_samples = min(_MAX_SAMPLES, max(cache_capacity, 16))
        self._samples: OrderedDict[OffloadKey, Sample] = OrderedDict()
        self._ended = _zeros()
        self._reused = _zeros()
        self._mean_new = 0.0
        """Mean number of new blocks of late."""
        self._median_gap = 1.0

    def __len__(self) -> int:
        """Number of samples that wait for the next use."""
        return len(self._samples)

    def begin_request(self) -> None:
        """Advance the clock by one request."""
        self.now += 1
        if self.now % _PERIOD == 0:
            self._estimate()

    def classify(self, turn: int, num_new: int, gap: int) -> int:
        """The class of a request with `num_new` blocks that no sampled prompt had. `turn`: how many
        earlier prompts it continues. `gap`: requests since the last of them; 0 if there is none."""
        self._mean_new += (num_new - self._mean_new) * max(_MEAN_STEP, 1 / self.now)
        size = bisect(_SIZES, num_new / self._mean_new) if self._mean_new else 0
        is_late = gap > self._median_gap
        if turn:
            self._median_gap *= _GAP_STEP if is_late else 1 / _GAP_STEP
        return 2 * ((len(_SIZES) + 1) * bisect(_TURNS, turn) + size) + is_late

    def end_samples(self, keys: Iterable[OffloadKey]) -> Sample | None:
        """Note that a request uses these keys. Returns the sample that is deepest in the prompt."""
        deepest: Sample | None = None
        for key in self._samples.keys() & keys:
            sample = self._samples.pop(key)
            bucket = bucket_of(self.now - sample.used_at)
            self._ended[sample.group, bucket] += 1
            self._reused[sample.group, bucket] += 1
            # A set has no order that is the same in every process, so compare everything.
            if deepest is None or (sample.num_keys, sample) > (deepest.num_keys, deepest):
                deepest = sample
        return deepest

    def begin_sample(self, key: OffloadKey, group: int, num_keys: int, turn: int) -> None:
        """Wait for the next use of a key. The sample that has waited longest ends if there are too
        many."""
        samples = self._samples
        if samples.pop(key, None) is None and len(samples) >= self._max_samples:
            _, oldest = samples.popitem(last=False)
            self._ended[oldest.group, bucket_of(self.now - oldest.used_at)] += 1
        samples[key] = Sample(group, self.now, num_keys, turn)

    def clear(self) -> None:
        """Forget the samples and all counts."""
        self._samples.clear()
        self._ended, self._reused = _zeros(), _zeros()
        self._mean_new = 0.0
        self.is_informed = False

    def _estimate(self) -> None:
        """Compute `worth` (Kaplan and Meier's estimate, in which unfinished waits count too)."""
        self.is_informed = bool(self._reused.sum() >= _MIN_REUSED)
        if not self.is_informed:
            return
        ended = self._ended.copy()
        samples = self._samples.values()
        groups = np.fromiter((sample.group for sample in samples), np.intp, len(samples))
        ages = self.now - np.fromiter((sample.used_at for sample in samples), np.intp, len(samples))
        np.add.at(ended, (groups, _BUCKETS_BY_AGE[np.minimum(ages, _MAX_AGE - 1)]), 1.0)
        waited, reused = _smooth(_at_risk(ended, self._reused)), _smooth(self._reused)
        average = (reused[:SHARED].sum(0) + 0.01) / (waited[:SHARED].sum(0) + 1)
        hazard = np.minimum(0.99, (reused + _PRIOR * average) / (waited + _PRIOR))
        self.worth = _best_rates(hazard).tolist()
        self._ended *= _KEPT
        self._reused *= _KEPT


def _zeros() -> NDArray[np.float64]:
    return np.zeros((NUM_CLASSES, _NUM_BUCKETS))


def _at_risk(ended: NDArray[np.float64], reused: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many waits reached each bucket. Those that ended there without a use count half."""
    ended_from = ended[:, ::-1].cumsum(1)[:, ::-1]
    return ended_from - ended + (ended + reused) / 2


def _smooth(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Averages over neighbouring buckets, because a single one has few samples."""
    padded = np.pad(rows, ((0, 0), (1, 1)), mode="edge")
    return (padded[:, :-2] + 2 * rows + padded[:, 2:]) / 4


def _best_rates(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each age, the largest ratio of expected uses to expected time in the cache, over all
    times to wait for the use (the index of Gittins)."""
    ends = np.array(_ENDS)
    widths = np.diff(ends, prepend=0.0)
    rates = np.empty_like(hazard)
    for first in range(_FIRST_BUCKET, _NUM_BUCKETS):
        width = widths[first:].copy()
        width[0] /= 2  # halfway through it, on average
        survival = (1 - hazard[:, first:]).cumprod(1)
        before = np.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
        waited = (before * width * (1 - hazard[:, first:] / 2)).cumsum(1)
        rates[:, first] = ((1 - survival) / waited).max(1)
    rates[:, :_FIRST_BUCKET] = rates[:, _FIRST_BUCKET : _FIRST_BUCKET + 1]
    return rates
