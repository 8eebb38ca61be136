"""Load or recompute: a promotion that takes longer than computing the blocks again is no help."""

from __future__ import annotations

from collections import deque
from math import inf

from kvtier.tiering.prefill_line import CostLine, PrefillLine

_MIN_SAMPLES = 8
_DECAY = 0.95
_STEPS_AROUND = 3

_RECALLED_WEIGHT = 4.0
"""What an earlier engine has measured counts as this many loads at most."""
_FAR_OFF = 2.0
"""A load that takes this many times as long as expected, or as short, contradicts what is known."""

_MOST_TOKENS = 1e9
"""More than any prompt has."""

_TRIAL_SHARE = 1 / 32
"""What trials may cost, of the time that loads take."""
_MEASURED_FACTOR = 8
"""So many times as much has to be spared for a trial of what was measured before."""
_LEAST_TRIED_S = 0.05
"""For less, nobody waits long enough that it would matter."""

_EXPLORED_BLOCKS, _EXPLORED_S = 8, 0.25
"""So many blocks are brought up at first to see whether a tier is still slower than computing; more
of them, up to all, if they take so long at most."""


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
        self._recalled: CostLine | None = None
        """What an earlier engine has learnt."""
        self._samples: deque[float] = deque(maxlen=64)
        self._tokens_in_step = 0
        self._tokens_before = 0
        """Of the last step: its own time and those around it are known now."""
        self._step_times: deque[float] = deque(maxlen=_STEPS_AROUND)
        self._last_step_end: float | None = None

    @property
    def line(self) -> CostLine | None:
        """What a token costs: as the engine tells, or else a flat rate, or else as an earlier
        engine has learnt; None: not known."""
        line = self._told.get()
        if line is not None:
            return line
        if self._flat_rate is not None:
            return CostLine(1 / self._flat_rate, 0.0, 0.0)
        return self._recalled

    def recall(self, line: CostLine) -> None:
        """Go by what an earlier engine has learnt, until this one knows better."""
        if self.may_learn and line.seconds_per_token(line.deepest) > 0:
            self._recalled = line

    @property
    def may_learn(self) -> bool:
        """Whether it is learnt, and not configured."""
        return self._heeds_engine

    @property
    def is_known(self) -> bool:
        """Whether there is anything to go by."""
        return self.line is not None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate: where an engine tells, at the position of the last step; None: not known."""
        line = self.line
        seconds = line.seconds_per_token(self._told.last_position) if line is not None else 0.0
        return 1 / seconds if seconds else None

    def seconds_for(self, num_tokens: int, mean_position: float) -> float:
        """How long computing takes, for tokens that are there on average. Only if it is known."""
        line = self.line
        assert line is not None, "ask `is_known` first"
        return num_tokens * line.seconds_per_token(mean_position)

    @property
    def is_told(self) -> bool:
        """Whether the engine tells what it computes, and that is gone by."""
        return self._heeds_engine and not self.heeds_stores

    def is_measured(self, num_tokens: int, mean_position: float) -> bool:
        """Whether the engine has told of such steps, so that what they take is not guessed."""
        return self._told.is_measured(num_tokens, mean_position)

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


class Trials:
    """When to compute what is thought to be loaded more quickly. Scheduler thread only.

    A prompt that is loaded is not computed, and if it was thought too dear to compute, that would
    never come to light. So one of many is computed, and measured. What that is thought to cost is
    spared before: all loads together lose at most a thirty-second of their time by it.
    """

    def __init__(self) -> None:
        self._spared_s = 0.0

    def note_load(self, load_s: float) -> None:
        """Something is loaded, in so long."""
        self._spared_s += load_s * _TRIAL_SHARE

    def are_due(self, load_s: float, compute_s: float, *, is_measured: bool) -> bool:
        """Whether to compute what would be loaded in so long, and is thought to be computed in so
        long. `is_measured`: and not guessed."""
        cost = max(compute_s - load_s, load_s) * (_MEASURED_FACTOR if is_measured else 1)
        return load_s >= _LEAST_TRIED_S and self._spared_s >= cost

    def note_trial(self) -> None:
        """It is computed."""
        self._spared_s = 0.0


class Exploration:
    """How many blocks to bring up to see whether a tier is still slower than computing. Scheduler
    thread only.

    Few say little of the time that many take: a tier may take its time whatever their number, and
    in proportion to a few blocks that looks like hours. So it is twice as many each time, for as
    long as that takes little in fact, whatever it is thought to take.
    """

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: what may be expected to take longer is not tried."""
        self._longest_s = longest_s
        self._num_blocks = _EXPLORED_BLOCKS

    def num_blocks(self, most: int, estimate: TransferEstimate) -> int:
        """For the next time, of so many: more, up to all, if they are thought to take little."""
        count = self._num_blocks
        while count < most and (estimate.predict(2 * count) or _EXPLORED_S) < _EXPLORED_S:
            count *= 2
        return min(count, most)

    def note(self, num_blocks: int, seconds: float) -> None:
        """So many have taken so long."""
        if seconds > self._longest_s:
            self.begin_anew()
        elif 2 * seconds <= self._longest_s:
            self._num_blocks = max(self._num_blocks, 2 * num_blocks)

    def begin_anew(self) -> None:
        """What is known is of no use any more: blocks are loaded again, or were not in time."""
        self._num_blocks = _EXPLORED_BLOCKS


class TransferEstimate:
    """How long a tier takes for a number of blocks: latency, and time per block.

    A straight line through what was measured, recent jobs counting more. One job that took a
    multiple or a fraction of what was expected counts as if it had taken twice or half as long: it
    may have met a stall. If the next one says the same, the pace has changed, and the two replace
    all that was measured before.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self.num_samples = 0
        self._doubt: tuple[bool, int, float] | None = None
        """The last job, if it was far from what was expected: whether it was slower, its blocks,
        and its seconds."""

    @property
    def sums(self) -> tuple[float, ...] | None:
        """All that is known, for `recall`; None while nothing can be predicted."""
        if self.predict(1) is None:
            return None
        return (self._weight, self._n, self._nn, self._t, self._nt)

    def recall(self, sums: tuple[float, ...]) -> None:
        """Go by what an earlier engine has measured, until this one knows better."""
        weight = sums[0]
        if weight > 0 and sums[1] > 0:
            scale = min(1.0, _RECALLED_WEIGHT / weight)
            self._weight, self._n, self._nn, self._t, self._nt = (scale * part for part in sums)
            self.trust()

    def trust(self) -> None:
        """Go by what was measured, little as it may be."""
        if self.num_samples or self._weight:
            self.num_samples = max(self.num_samples, _MIN_SAMPLES)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last job was far from what was expected."""
        return self._doubt is not None

    def note(self, num_blocks: int, seconds: float, num_beside: int = 0) -> None:
        """A load has taken so long. `num_beside`: blocks of other loads that were under way at the
        same time, and may have slowed it down."""
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
        """Loads of so many blocks, one behind the other, have not ended in so long."""
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
