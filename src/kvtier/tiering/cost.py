"""What computing and loading cost: learnt from what the engine and the tiers report, and kept for
the next start.

`PrefillRate` predicts how long prompt tokens take to compute, `TransferEstimate` how long blocks
take to load from one tier. `kvtier.tiering.guard` compares the two. `Learnt` is the content of the
note with which a tier keeps both for the next engine.
"""

from __future__ import annotations

import json
import socket
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf, isfinite
from typing import NamedTuple

# For `PrefillLine`:
_KEPT_IN_OCTAVE = 16
"""Steps kept for each octave. An octave is the range of positions from one power of two to the
next."""
_QUICK_SHARE = 0.25
"""The sample at this quantile of an octave's tokens, fastest first, stands for the octave."""
_LEAST_SHARE = 1 / 8
"""Steps with fewer tokens than this share of the largest recent step are mostly overhead, and are
left out."""
_MIN_IN_OCTAVE = 4
"""An octave with this many steps is sure: its cost is trusted. With four, one slow step cannot be
the one that stands for the octave."""
_FADE = 0.999
"""Each step multiplies the weights of octaves and the size of the largest step by this."""
_FORGOTTEN_AFTER = 10_000
"""An octave is forgotten after this many steps in other octaves."""
_DRAWN_EVERY = 8
"""Steps from one fit of the line to the next."""
_EARLY_STEPS = 64
"""Up to this number of steps, the line is fitted anew after each one."""
_DOUBT = 0.5
"""A token at position 0 is assumed to cost at most this share of a token at the first sure octave.
From there to that octave, the limit rises linearly."""
_FAR_APART = 2.0
"""Octaves whose positions differ by less than this factor do not show how the cost grows with the
position."""
_MOST_NEEDED = 1024
"""A step of this many tokens shows the cost per token of a step of any size."""

# For `PrefillRate` and `TransferEstimate`:
_MIN_SAMPLES = 8
"""Samples before anything is predicted."""
_STEPS_AROUND = 3
"""The tokens of one store may have been computed in any of this many steps."""
_MOST_TOKENS = 1e9
"""More than any prompt has."""
_DECAY = 0.95
"""Each load multiplies the weights of earlier loads by this."""
_RECALLED_WEIGHT = 4.0
"""The measurements of an earlier engine weigh at most as much as this many loads."""
_FAR_OFF = 2.0
"""A load contradicts the estimate if it takes more than the expected time multiplied by this, or
less than the expected time divided by this."""

# For notes:
MOST_NOTE_BYTES = 1024
_FORMAT = 1
"""Increased when the figures in a note change their meaning. Notes of other formats are ignored."""
_MOST = 1e12
"""The largest figure in a note. A note with a larger one is ignored."""


class CostLine(NamedTuple):
    """The seconds that a prompt token takes, as a straight line over its position."""

    at_start: float
    per_position: float
    deepest: float
    """Tokens behind this position are assumed to cost as much as one at this position."""

    def seconds_per_token(self, position: float) -> float:
        return self.at_start + self.per_position * min(position, self.deepest)


_LEVEL = CostLine(1.0, 0.0, 0.0)
"""A line that does not rise. It is used until one has been fitted."""

_Sample = tuple[float, float, int]
"""One step: seconds per token, mean position, number of tokens. A plain tuple, to save time in each
step."""


class _Point(NamedTuple):
    """The sample that stands for an octave."""

    seconds_per_token: float
    position: float
    weight: float
    deepest: float
    """The largest position in the octave."""
    is_sure: bool
    """True if the octave has enough steps."""


class _Octave:
    """The last steps whose mean position lies between one power of two and the next."""

    __slots__ = ("last_step", "samples")

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque(maxlen=_KEPT_IN_OCTAVE)
        self.last_step = 0

    def point(self, least_tokens: float, line: CostLine) -> _Point | None:
        """The sample that stands for the octave; None if no step has at least `least_tokens`.

        `line`: the expected cost by position, which separates fast steps from slow ones.
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

    With attention, the cost of a token grows linearly with the number of tokens before it.
    Positions are grouped in octaves, so that the many steps at the start of short prompts do not
    displace the few steps deep in long ones. Each octave keeps its last steps. The quick quartile
    of them, weighted by tokens, stands for the octave: what made the other steps slow (a
    compilation, a pause, decoding in the same step) is not a cost of the prompt. The line is a
    least-squares fit through these points, weighted by tokens and by age. It does not fall, and
    does not start below zero.

    The line errs on the low side on purpose. If it is too low, requests compute, which is measured
    and corrects the line. If it is too high, they load, which corrects nothing. So an octave before
    the first sure one counts even with a single step, and positions there are assumed to be
    cheaper. An octave behind it counts only if it is sure. `kvtier.tiering.guard.Trials` corrects
    costs that are too high all the same.
    """

    def __init__(self) -> None:
        self.last_position = 0.0
        """The mean position of the last step that was not left out."""
        self._octaves: dict[int, _Octave] = {}
        self._largest = 0.0
        self._num_steps = 0
        self._num_undrawn = 0
        self._line: CostLine | None = None

    def note(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        """A step has computed `num_tokens` prompt tokens in `seconds`."""
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
        """True if steps of a similar size were measured around this position. Then their cost is
        not extrapolated."""
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
        if points[-1].position < _FAR_APART * first or not spread:  # all at about one position
            here = t / weight
            if not first:
                return CostLine(here, 0.0, deepest)
            return CostLine(_DOUBT * here, (1 - _DOUBT) * here / first, first)
        # `_points` makes the slope and the start non-negative, except for rounding.
        slope = max(0.0, (weight * pt - p * t) / spread)
        return CostLine(max(0.0, (t - slope * p) / weight), slope, deepest)

    def _points(self) -> list[_Point]:
        """The points to fit, by position: those of all sure octaves, and of all octaves before the
        first sure one.

        On a line that neither falls nor starts below zero, no point is above a later one, and the
        cost grows no faster than the position. A point that violates this is lowered, because all
        steps of its octave must have been slow. An unsure point does not lower a sure one. It is
        raised to the least cost that the first sure point allows, and lowered to the limit that
        `_DOUBT` sets.
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
        """The points of all octaves, by position. Forgets octaves without recent steps."""
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


class PrefillRate:
    """How long the engine takes to compute prompt tokens. Scheduler thread only.

    It is configured, or reported by the engine for each step, or else estimated from the cadence of
    stores. That estimate is crude: depending on the engine, blocks that are stored in one step were
    computed in that step, the one before or the one after. The longest of the three counts as the
    time that they took, because a short one would make computing look too fast. Idle time and
    decoding make it look too slow, so a high percentile of the last samples counts.
    """

    def __init__(self, configured: float | None) -> None:
        """`configured`: tokens per second. None: learn it. 0: it is never known, so blocks are
        loaded however long that takes."""
        self.learns_from_stores = configured is None
        """True while it is learnt from the cadence of stores, because the engine has not reported a
        step."""
        self._may_learn = configured is None
        self._flat_rate = configured or None
        """Tokens per second, at any position."""
        self._reported = PrefillLine()
        self._recalled: CostLine | None = None
        """The line that an earlier engine has learnt."""
        self._samples: deque[float] = deque(maxlen=64)
        self._tokens_in_step = 0
        self._tokens_before = 0
        """Tokens stored in the previous step. They are counted when the present step ends, because
        only then its duration is known."""
        self._step_times: deque[float] = deque(maxlen=_STEPS_AROUND)
        self._last_step_end: float | None = None

    @property
    def line(self) -> CostLine | None:
        """The cost of a token: from the engine's reports, or else from the flat rate, or else as an
        earlier engine has learnt it. None: not known."""
        line = self._reported.get()
        if line is not None:
            return line
        if self._flat_rate is not None:
            return CostLine(1 / self._flat_rate, 0.0, 0.0)
        return self._recalled

    def recall(self, line: CostLine) -> None:
        """Use the line of an earlier engine until this engine has learnt a rate."""
        if self.may_learn and line.seconds_per_token(line.deepest) > 0:
            self._recalled = line

    @property
    def may_learn(self) -> bool:
        """False if the rate is configured."""
        return self._may_learn

    @property
    def is_known(self) -> bool:
        """True if costs can be predicted."""
        return self.line is not None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate, at the position of the last reported step. None: not known."""
        line = self.line
        seconds = line.seconds_per_token(self._reported.last_position) if line is not None else 0.0
        return 1 / seconds if seconds else None

    def seconds_for(self, num_tokens: int, mean_position: float) -> float:
        """Seconds to compute this many tokens around this position. Ask `is_known` first."""
        line = self.line
        assert line is not None, "ask `is_known` first"
        return num_tokens * line.seconds_per_token(mean_position)

    def seconds_if_known(self, num_tokens: int, mean_position: float) -> float | None:
        """Like `seconds_for`; None if costs cannot be predicted."""
        return self.seconds_for(num_tokens, mean_position) if self.is_known else None

    @property
    def has_reports(self) -> bool:
        """True if the engine reports what it computes, and its reports are used."""
        return self._may_learn and not self.learns_from_stores

    def is_measured(self, num_tokens: int, mean_position: float) -> bool:
        """True if the engine has reported similar steps. Then the cost is not extrapolated."""
        return self._reported.is_measured(num_tokens, mean_position)

    def note_prefill(self, num_tokens: int, mean_position: float, seconds: float) -> None:
        """The engine reports a step that has computed prompt tokens. Impossible reports (no tokens,
        no time, endless time, a position that no prompt has) are ignored."""
        if (
            self._may_learn
            and num_tokens > 0
            and 0 <= mean_position < _MOST_TOKENS
            and 0 < seconds < inf
        ):
            self.learns_from_stores = False
            self._reported.note(num_tokens, mean_position, seconds)

    def note_computed(self, num_tokens: int) -> None:
        """This step stores new blocks of `num_tokens` tokens."""
        self._tokens_in_step += num_tokens

    def step_ended(self, now: float) -> None:
        """A scheduling step has ended."""
        before, self._tokens_before = self._tokens_before, self._tokens_in_step
        self._tokens_in_step = 0
        last, self._last_step_end = self._last_step_end, now
        if not self.learns_from_stores or last is None:
            return
        self._step_times.append(now - last)
        longest = max(self._step_times)
        if not before or not longest or len(self._step_times) < _STEPS_AROUND:
            return
        self._samples.append(before / longest)
        if len(self._samples) >= _MIN_SAMPLES:
            self._flat_rate = sorted(self._samples)[len(self._samples) * 9 // 10]


class TransferEstimate:
    """How long a tier takes to load a number of blocks: latency, and time per block.

    A least-squares line through the measured loads, weighted by age. A load that took more than
    twice the expected time counts as twice that time, and one that took less than half of it counts
    as half: a single one may be an exception, such as a stall. If the next load deviates in the
    same direction, the tier's speed has changed, and the two replace all earlier ones.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self.num_samples = 0
        self._doubt: tuple[bool, int, float] | None = None
        """The last load, if it contradicted the estimate: whether it was slower, its blocks, its
        seconds."""

    @property
    def sums(self) -> tuple[float, ...] | None:
        """The state, for `recall`; None while nothing can be predicted."""
        if self.predict(1) is None:
            return None
        return (self._weight, self._n, self._nn, self._t, self._nt)

    def recall(self, sums: tuple[float, ...]) -> None:
        """Start from the state of an earlier engine. Loads of this engine soon outweigh it."""
        weight = sums[0]
        if weight > 0 and sums[1] > 0:
            scale = min(1.0, _RECALLED_WEIGHT / weight)
            self._weight, self._n, self._nn, self._t, self._nt = (scale * part for part in sums)
            self.trust()

    def trust(self) -> None:
        """Predict from the samples so far, even if they are few."""
        if self.num_samples or self._weight:
            self.num_samples = max(self.num_samples, _MIN_SAMPLES)

    @property
    def is_in_doubt(self) -> bool:
        """True if the last load contradicted the estimate."""
        return self._doubt is not None

    def note(self, num_blocks: int, seconds: float, num_beside: int = 0) -> None:
        """A load has ended. `num_beside`: blocks of other loads that were under way at the same
        time and may have slowed it down."""
        quickest, slowest = self.predict(num_blocks), self.predict(num_blocks + num_beside)
        if quickest is None or slowest is None:
            self._add(num_blocks, seconds)
            return
        is_slower = seconds > _FAR_OFF * slowest
        if not is_slower and seconds * _FAR_OFF >= quickest:
            self._doubt = None
            self._add(num_blocks, seconds)
            return
        before, self._doubt = self._doubt, (is_slower, num_blocks, seconds)
        if before is not None and before[0] == is_slower:
            self._weight = self._n = self._nn = self._t = self._nt = 0.0
            self._add(*before[1:])
            self._add(num_blocks, seconds)
            self._doubt = None
        else:
            self._add(num_blocks, _FAR_OFF * slowest if is_slower else quickest / _FAR_OFF)

    def note_late(self, num_blocks: int, seconds: float) -> None:
        """A load has not ended after `seconds`. This counts only if it contradicts the estimate.
        `num_blocks`: the blocks of this load and of the loads before it."""
        expected = self.predict(num_blocks)
        if expected is None or seconds > _FAR_OFF * expected:
            self.note(num_blocks, seconds)

    def _add(self, num_blocks: int, seconds: float) -> None:
        n, t = float(num_blocks), seconds
        self._weight = self._weight * _DECAY + 1
        self._n = self._n * _DECAY + n
        self._nn = self._nn * _DECAY + n * n
        self._t = self._t * _DECAY + t
        self._nt = self._nt * _DECAY + n * t
        self.num_samples += 1

    def predict(self, num_blocks: int) -> float | None:
        """The expected seconds for a load of this many blocks. None: not known."""
        if self.num_samples < _MIN_SAMPLES or not self._n:
            return None
        spread = self._weight * self._nn - self._n * self._n
        if spread > 1e-6 * self._nn * self._weight:
            per_block = (self._weight * self._nt - self._n * self._t) / spread
            latency = (self._t - per_block * self._n) / self._weight
            if per_block >= 0 and latency >= 0:
                return latency + per_block * num_blocks
        # All loads had the same size, or the line has a negative part: assume no latency.
        return self._t / self._n * num_blocks


class Learnt(NamedTuple):
    """The content of a note. A part that is None was not known."""

    loads: tuple[float, ...] | None
    """`TransferEstimate.sums` of the tier."""
    prefill: CostLine | None
    saved_up: float = 0.0
    """Bytes of the tier's write budget. 0 while an engine uses the tier, so that the bytes of one
    that is killed are not spent twice."""


def write_note(learnt: Learnt, fingerprint: bytes) -> bytes:
    """Encode a note. `fingerprint`: that of the engine with these costs."""
    fields = {
        "format": _FORMAT,
        "fingerprint": fingerprint.hex(),
        "host": socket.gethostname(),
        "loads": learnt.loads,
        "prefill": learnt.prefill,
        "saved_up": learnt.saved_up,
    }
    return json.dumps(fields).encode()


def read_note(note: object, fingerprint: bytes) -> Learnt:
    """Decode a note. Both parts are None if it is damaged, or if an engine with another fingerprint
    or on another host wrote it."""
    try:
        if not isinstance(note, bytes) or len(note) > MOST_NOTE_BYTES:
            return Learnt(None, None)
        fields = json.loads(note)
        owner = fields["format"], fields["fingerprint"], fields["host"]
        if owner != (_FORMAT, fingerprint.hex(), socket.gethostname()):
            return Learnt(None, None)
        loads, prefill = _figures(fields["loads"], 5), _figures(fields["prefill"], 3)
        (saved_up,) = _figures([fields.get("saved_up", 0.0)], 1) or (0.0,)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Learnt(None, None)
    return Learnt(loads, None if prefill is None else CostLine(*prefill), saved_up)


def _figures(found: Sequence[object] | None, count: int) -> tuple[float, ...] | None:
    if found is None:
        return None
    figures = [figure for figure in found if isinstance(figure, (int, float))]
    is_sound = all(isfinite(figure) and 0 <= figure <= _MOST for figure in figures)
    if len(figures) != len(found) or len(figures) != count or not is_sound:
        raise ValueError("invalid figures in a note")
    return tuple(map(float, figures))
