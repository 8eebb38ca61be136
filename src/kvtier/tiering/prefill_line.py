"""What a prompt token costs to compute, by its position: a line, learnt from engine steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from typing import NamedTuple

__all__ = ["CostLine", "PrefillLine"]

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
"""Before the first position that is known for sure, a token may cost less than there: at the very
start, this part of it."""
_FAR_APART = 2.0
"""Positions that are not so many times as deep as others say nothing of how the cost grows."""
_MOST_NEEDED = 1024
"""Tokens of a step that says something of any number of them."""


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
    step counts before the first position that is known for sure, while a few behind it do not; and
    what is before that position is taken to cost less. That it errs nevertheless is seen to by
    `kvtier.tiering.guard.Trials`.
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

    def is_measured(self, num_tokens: int, mean_position: float) -> bool:
        """Whether what so many tokens cost there was seen, and not guessed from other positions, or
        from steps of a few tokens, which are mostly overhead."""
        octave = int(mean_position).bit_length()
        needed = min(num_tokens * _LEAST_SHARE, _MOST_NEEDED)
        return any(
            sum(sample[2] >= needed for sample in self._octaves[number].samples) >= _MIN_IN_OCTAVE
            for number in (octave - 1, octave, octave + 1)
            if number in self._octaves
        )

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
        first = points[0].position
        if points[-1].position < _FAR_APART * first or not spread:  # all of it at one position
            here = t / weight
            if not first:
                return CostLine(here, 0.0, deepest)
            return CostLine(_DOUBT * here, (1 - _DOUBT) * here / first, first)
        # Neither can be negative, points being what they are, but for rounding.
        slope = max(0.0, (weight * pt - p * t) / spread)
        return CostLine(max(0.0, (t - slope * p) / weight), slope, deepest)

    def _points(self) -> list[_Point]:
        """Of each octave of which enough is known, and of those before them all; by position.

        On a line that neither falls nor begins below zero, a cost is not above those behind it, and
        does not grow faster than in proportion to the position. A point that does is lowered: all
        steps of that octave were slow. But one that few steps speak for lowers no other, and is
        raised instead; and it is not above what would be doubted without it.
        """
        found = self._found()
        num_unsure = next((n for n, point in enumerate(found) if point.is_sure), len(found))
        if num_unsure == len(found):
            return []
        found[num_unsure:] = [point for point in found[num_unsure:] if point.is_sure]
        seconds, positions = ([point[column] for point in found] for column in (0, 1))
        for n in range(len(found) - 2, -1, -1):
            seconds[n] = min(seconds[n], seconds[n + 1])
        for n in range(num_unsure):
            nearness = positions[n] / positions[num_unsure]
            most = seconds[num_unsure] * (_DOUBT + (1 - _DOUBT) * nearness)
            seconds[n] = min(max(seconds[n], seconds[num_unsure] * nearness), most)
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
