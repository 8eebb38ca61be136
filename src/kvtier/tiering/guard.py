"""Load or recompute: a promotion that takes longer than computing the blocks again is no help."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from math import inf
from typing import NamedTuple

_MIN_SAMPLES = 8
_DECAY = 0.95
_STEPS_AROUND = 3

_KEPT_IN_OCTAVE = 16
_QUICK_SHARE = 0.25
"""Of an octave's tokens, so many were computed as quickly as its point says, or quicker."""
_LEAST_SHARE = 1 / 8
"""Of the largest step of late: one with fewer tokens is mostly overhead, and is left out."""
_MIN_IN_OCTAVE = 4
"""Three quick steps, however light, outweigh a slow one, however heavy."""
_FADE = 0.999
"""For each step: by how much what it says counts less, and how the largest step is forgotten."""
_FORGOTTEN_AFTER = 10_000
_DRAWN_EVERY = 8
_EARLY_STEPS = 64
"""Up to here each step may be the first to tell of its position: the line is drawn after each."""
_DOUBT = 0.5
"""Where one position is all that is known, a token at the start may cost this part of one there."""
_MOST_TOKENS = 1e9
"""More than any prompt has."""


class CostLine(NamedTuple):
    """Seconds that a prompt token takes, by its position: a straight line."""

    at_start: float
    per_position: float
    deepest: float
    """What is behind this position is taken to cost as much as here."""

    def seconds_per_token(self, position: float) -> float:
        return self.at_start + self.per_position * min(position, self.deepest)


_LEVEL = CostLine(1.0, 0.0, 0.0)
"""Any one that does not rise, for as long as no better one is known."""

_Sample = tuple[float, float, int]
"""One step: seconds for each token, mean position, tokens. Plain: one is made in every step."""


class _Point(NamedTuple):
    """What is known of an octave."""

    seconds_per_token: float
    position: float
    weight: float
    deepest: float
    """No position of its is behind this one."""
    is_sure: bool
    """There were enough steps."""


class _Octave:
    """The last steps whose mean position lies between one power of two and the next."""

    __slots__ = ("last_step", "samples")

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque(maxlen=_KEPT_IN_OCTAVE)
        self.last_step = 0

    def point(self, least_tokens: float, line: CostLine) -> _Point | None:
        """What stands for it; None: it has no steps that count.

        `line`: what is quick at one position is slow at another.
        """
        heavy = [sample for sample in self.samples if sample[2] >= least_tokens]
        if not heavy:
            return None
        start, slope, _ = line
        heavy.sort(key=lambda sample: sample[0] / (start + slope * sample[1] or 1e-9))
        sums = list(accumulate(tokens for _, _, tokens in heavy))
        seconds_per_token, position, _ = heavy[bisect_right(sums, sums[-1] * _QUICK_SHARE)]
        deepest = max(position for _, position, _ in self.samples)
        return _Point(seconds_per_token, position, sums[-1], deepest, len(heavy) >= _MIN_IN_OCTAVE)


class PrefillLine:
    """Learns from engine steps what a prompt token costs, by its position. Scheduler thread only.

    Attention makes a token dearer the more tokens are before it, in a straight line. Positions are
    gathered in octaves, so that the few steps deep in long prompts are not crowded out by the many
    at the start of short ones. Of each octave the last steps are kept, and its quick quartile, by
    tokens, stands for it: whatever made the others slow (a compilation, a pause, decoding beside)
    is no cost of the prompt. The line is the best one through these points, the heavier and the
    more recent ones counting more; it neither falls nor begins below zero.

    It errs on the low side, and deliberately so: what is computed because of that is measured, and
    mends the line; what is loaded because it is thought dear to compute never would be. So a single
    step counts where nothing is known any nearer to the start, while a few behind all that is known
    do not; and where one position is all that is known, what is before it may cost less.
    """

    def __init__(self) -> None:
        self.last_position = 0.0
        """Where the last step that counted was."""
        self._octaves: dict[int, _Octave] = {}
        self._largest = 0.0
        self._num_steps = 0
        self._num_undrawn = 0
        self._line: CostLine | None = None

    def note(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        """A step has computed so many prompt tokens, in so long."""
        self._largest *= _FADE
        if num_tokens > self._largest:
            self._largest = num_tokens
        elif num_tokens < self._largest * _LEAST_SHARE:
            return
        number = int(mean_position).bit_length()
        octave = self._octaves.get(number)
        if octave is None:
            octave = self._octaves[number] = _Octave()
        octave.samples.append((seconds / num_tokens, mean_position, num_tokens))
        octave.last_step = self._num_steps = self._num_steps + 1
        self._num_undrawn += 1
        self.last_position = mean_position

    def get(self) -> CostLine | None:
        """The line; None while it is not known."""
        is_early = self._line is not None and self._num_steps <= _EARLY_STEPS
        if self._num_undrawn >= (1 if is_early else _DRAWN_EVERY):
            self._num_undrawn = 0
            self._line = self._draw() or self._line
        return self._line

    def _draw(self) -> CostLine | None:
        points = self._points()
        if not points:
            return None
        deepest = points[-1].deepest
        weight = p = pp = t = pt = 0.0
        for seconds_per_token, position, w, _, _ in points:
            weight += w
            p += w * position
            pp += w * position * position
            t += w * seconds_per_token
            pt += w * position * seconds_per_token
        spread = weight * pp - p * p
        if spread <= 1e-6 * weight * pp:  # all of it at one position
            position, here = points[0].position, t / weight
            if not position:
                return CostLine(here, 0.0, deepest)
            return CostLine(_DOUBT * here, (1 - _DOUBT) * here / position, position)
        # Neither can be negative, points being what they are, but for rounding.
        slope = max(0.0, (weight * pt - p * t) / spread)
        return CostLine(max(0.0, (t - slope * p) / weight), slope, deepest)

    def _points(self) -> list[_Point]:
        """Of each octave of which enough is known, and of those before them all; by position.

        On a line that neither falls nor begins below zero, a cost is not above those behind it, and
        does not grow faster than in proportion to the position. A point that does is lowered: all
        steps of that octave were slow. But one that few steps speak for lowers no other, and is
        raised instead.
        """
        found = self._found()
        num_unsure = next((n for n, point in enumerate(found) if point.is_sure), len(found))
        if num_unsure == len(found):
            return []
        found[num_unsure:] = filter(_is_sure, found[num_unsure:])
        seconds, positions = ([point[column] for point in found] for column in (0, 1))
        for n in range(len(found) - 2, -1, -1):
            seconds[n] = min(seconds[n], seconds[n + 1])
        for n in range(num_unsure - 1, -1, -1):
            seconds[n] = max(seconds[n], seconds[n + 1] * positions[n] / positions[n + 1])
        for n in range(1, len(found)):
            if positions[n - 1]:
                most = seconds[n - 1] * positions[n] / positions[n - 1]
                seconds[n] = min(seconds[n], most)
        return [
            point._replace(seconds_per_token=s) for s, point in zip(seconds, found, strict=True)
        ]

    def _found(self) -> list[_Point]:
        """Of all octaves, by position. Those of long ago are forgotten."""
        found = []
        least_tokens, line = self._largest * _LEAST_SHARE, self._line or _LEVEL
        for number in sorted(self._octaves):
            octave = self._octaves[number]
            age = self._num_steps - octave.last_step
            if age > _FORGOTTEN_AFTER:
                del self._octaves[number]
            elif (point := octave.point(least_tokens, line)) is not None:
                found.append(point._replace(weight=point.weight * _FADE**age))
        return found


def _is_sure(point: _Point) -> bool:
    return point.is_sure


class PrefillRate:
    """How long the engine takes to compute prompt tokens. Scheduler thread only.

    Configured, or told by the engine step by step, or else learnt from the cadence of stores, which
    is crude. What is offered in one step was computed in the step before, in that step or in the
    next one: engines differ. The longest of the three is taken for it: rather too slow a rate than
    a burst that never was. Idle time and decoding make single samples too low, so a high percentile
    of the last ones counts. Not known until there are a few.
    """

    def __init__(self, configured: float | None) -> None:
        """`configured`: None to learn it, 0 to never know it."""
        self.heeds_stores = configured is None
        """Whether it is learnt from the cadence of stores: nobody has told better."""
        self._heeds_engine = configured is None
        self._flat_rate = configured or None
        """Tokens in a second, wherever they are."""
        self._told = PrefillLine()
        self._samples: deque[float] = deque(maxlen=64)
        self._tokens_in_step = 0
        self._tokens_before = 0
        """Of the last step: its own time and those around it are known now."""
        self._step_times: deque[float] = deque(maxlen=_STEPS_AROUND)
        self._last_step_end: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is anything to go by."""
        return self._flat_rate is not None or self._told.get() is not None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate: where an engine tells, at the position of the last step; None: not known."""
        line = self._told.get()
        if line is None:
            return self._flat_rate
        seconds = line.seconds_per_token(self._told.last_position)
        return 1 / seconds if seconds else None

    def seconds_for(self, num_tokens: int, mean_position: float) -> float:
        """How long computing takes, for tokens that are there on average. Only if it is known."""
        line = self._told.get()
        if line is not None:
            return num_tokens * line.seconds_per_token(mean_position)
        assert self._flat_rate is not None, "ask `is_known` first"
        return num_tokens / self._flat_rate

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        """One step has computed so many prompt tokens, there on average, in so long.

        What cannot be (no tokens, no time, no such position) says nothing.
        """
        if (
            self._heeds_engine
            and num_tokens > 0
            and 0 <= mean_position < _MOST_TOKENS
            and 0 < seconds < inf
        ):
            self.heeds_stores = False
            self._told.note(num_tokens, mean_position, seconds)

    def note_computed(self, num_tokens: int) -> None:
        """So many new tokens were offered for storing."""
        self._tokens_in_step += num_tokens

    def step_ended(self, now: float) -> None:
        """A scheduling step has ended."""
        before, self._tokens_before = self._tokens_before, self._tokens_in_step
        self._tokens_in_step = 0
        last, self._last_step_end = self._last_step_end, now
        if not self.heeds_stores or last is None:
            return
        self._step_times.append(now - last)
        longest = max(self._step_times)
        if not before or not longest or len(self._step_times) < _STEPS_AROUND:
            return
        self._samples.append(before / longest)
        if len(self._samples) >= _MIN_SAMPLES:
            self._flat_rate = sorted(self._samples)[len(self._samples) * 9 // 10]


class TransferEstimate:
    """How long a tier takes for a number of blocks: latency, and time per block.

    A straight line through what was measured, recent jobs counting more.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self.num_samples = 0

    def note(self, num_blocks: int, seconds: float) -> None:
        """A load of so many blocks has taken so long."""
        n, t = float(num_blocks), seconds
        self._weight = self._weight * _DECAY + 1
        self._n = self._n * _DECAY + n
        self._nn = self._nn * _DECAY + n * n
        self._t = self._t * _DECAY + t
        self._nt = self._nt * _DECAY + n * t
        self.num_samples += 1

    def predict(self, num_blocks: int) -> float | None:
        """Seconds for a load of so many blocks; None while not known."""
        if self.num_samples < _MIN_SAMPLES or not self._n:
            return None
        spread = self._weight * self._nn - self._n * self._n
        if spread > 1e-6 * self._nn * self._weight:
            per_block = (self._weight * self._nt - self._n * self._t) / spread
            latency = (self._t - per_block * self._n) / self._weight
            if per_block >= 0 and latency >= 0:
                return latency + per_block * num_blocks
        # All jobs were alike, or the line makes no sense: in proportion.
        return self._t / self._n * num_blocks
