"""Load or recompute: a promotion that takes longer than computing the blocks again is no help."""

from __future__ import annotations

from collections import deque

_MIN_SAMPLES = 8
_DECAY = 0.95
_STEPS_AROUND = 3


class PrefillRate:
    """How many prompt tokens the engine computes in a second. Scheduler thread only.

    Configured, or learnt from the cadence of stores. What is offered in one step was computed in
    the step before, in that step or in the next one: engines differ. The longest of the three is
    taken for it: rather too slow a rate than a burst that never was. Idle time and decoding make
    single samples too low, so a high percentile of the last ones counts. None while it is not
    known.
    """

    def __init__(self, configured: float | None) -> None:
        """`configured`: None to learn it, 0 to never know it."""
        self.is_learnt = configured is None
        self.tokens_per_s: float | None = configured or None
        self._samples: deque[float] = deque(maxlen=64)
        self._tokens_in_step = 0
        self._tokens_before = 0
        """Of the last step: its own time and those around it are known now."""
        self._step_times: deque[float] = deque(maxlen=_STEPS_AROUND)
        self._last_step_end: float | None = None

    def note_computed(self, num_tokens: int) -> None:
        """So many new tokens were offered for storing."""
        self._tokens_in_step += num_tokens

    def step_ended(self, now: float) -> None:
        """A scheduling step has ended."""
        before, self._tokens_before = self._tokens_before, self._tokens_in_step
        self._tokens_in_step = 0
        last, self._last_step_end = self._last_step_end, now
        if not self.is_learnt or last is None:
            return
        self._step_times.append(now - last)
        longest = max(self._step_times)
        if not before or not longest or len(self._step_times) < _STEPS_AROUND:
            return
        self._samples.append(before / longest)
        if len(self._samples) >= _MIN_SAMPLES:
            self.tokens_per_s = sorted(self._samples)[len(self._samples) * 9 // 10]


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
