"""Write policies: which blocks one tier gets, and when.

`through` and `second_use` write blocks that are in use. `on_evict` and `adaptive` write blocks that
are about to leave host memory; `kvtier.tiering.cleaner` finds these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvtier.admission import ReuseFilter
from kvtier.config.options import WritePolicyName

if TYPE_CHECKING:
    from kvtier.base import OffloadKey, ReqContext

_SEEN_PER_SLOT, _LEAST_SEEN = 8, 4096
"""Keys that `SecondUse` remembers: this many for each slot of host memory, and at least this
many."""

_UNKNOWN_CAPACITY = 8
"""A tier that does not know its capacity is taken to hold this many times the blocks of host
memory."""
_MOST_USES = 4
"""Blocks with at least this many uses count as equally often used."""
_ENOUGH = 256
"""Outcomes after which `Adaptive` begins to leave blocks out."""
_PRIOR = 16
"""Outcomes of the average class that count for each class, so that a class with few outcomes of its
own is taken to be average."""
_HALVED_AT = 1024
"""Outcomes of a class at which they are halved, so that older ones count less."""
_MAX_WATCHED, _FEW_WATCHED = 8192, 1024
"""The most blocks that `ReuseSample` watches. If fewer than `_FEW_WATCHED` are left when some are
given up, more are sampled: a tier that stored nothing for a while has made the sample sparse."""
_LEAST_READS = 0.1
"""The reads that a write must be expected to bring, if room in the tier is not scarce."""
_READS_DISPLACED = 2.0
"""What a write displaces: this many times the share of blocks that are used soon after the tier has
evicted them. Chosen with tests/bench/write_policies.py."""


class WriteMoment(Enum):
    """What has just happened to blocks in the primary tier."""

    STORED = "stored"
    """The device has written them."""
    HIT = "hit"
    """A request stores blocks that were there already, and the tier wants whole requests."""
    USED = "used"
    """A request that used them has ended, and the tier lacks them."""


class BlockHistory:
    """What is known of a block in host memory since it came there (`BlockStatus.history`).
    `Cleaner` writes it. Tiers are bits: `GuardedTier.bit`."""

    __slots__ = ("below", "depth", "kept_out", "num_uses", "written")

    def __init__(self) -> None:
        self.below = 0
        """The tiers that have the block, as far as is known."""
        self.written = 0
        """The tiers that it was written to since it came."""
        self.num_uses = 0
        """Requests that have used it and ended."""
        self.depth = 0
        """Its position in the last prompt that used it, in blocks."""
        self.kept_out = 0
        """The tiers that it is not written to: all requests that have used it keep it out, by a
        hint or by the rule of their tenant."""


class WritePolicy(ABC):
    """Decides which blocks one tier gets, and when. Scheduler thread only.

    `Cascades` calls `select` at each `WriteMoment`, with readable blocks. The other methods are
    called only if `tracks_blocks` is True.
    """

    tracks_blocks = False
    """True if the `BlockHistory` of blocks in host memory is kept."""
    counts_uses = False
    """True if the policy needs to know how often, and where in a prompt, blocks were used. Only
    then are `recall`, `is_worth_writing` and `note_left` called."""
    writes_leaving = False
    """True if blocks are written when they are about to leave host memory."""

    def __init__(self, num_host_blocks: int = 1, num_tier_blocks: int | None = None) -> None:
        """`num_tier_blocks`: None if the tier does not know its capacity."""
        self.price_factor = 1.0
        """How much more a write costs now than usual. Set by the cleaner."""
        self.writes_stored = False
        """True while blocks may leave host memory too suddenly to be written just before that. Set
        by the cleaner if `writes_leaving` is True."""

    @abstractmethod
    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        """Return the keys of the blocks that go to the tier now, in the order of `keys`."""

    def note_used(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """A request that used these blocks has ended. Return the keys, in order, of those that go
        to the tier now if they are in host memory and the tier does not have them."""
        return ()

    def recall(self, keys: Sequence[OffloadKey]) -> Mapping[OffloadKey, int]:
        """The device has written these blocks again. Return how often those that are remembered
        were used before they left host memory."""
        return {}

    def begin_pass(self) -> None:
        """The cleaner is about to look for blocks to write."""
        return

    def is_worth_writing(self, history: BlockHistory) -> bool:
        """True if a block that is about to leave host memory, and that the tier does not have,
        should be written. Called only if `counts_uses` is True; otherwise every block is."""
        return True

    def note_left(self, key: OffloadKey, history: BlockHistory, is_below: bool) -> None:
        """A block has left host memory. `is_below`: it is in the tier, because it was written since
        it came to host memory. Not called for a block that was in the tier before that. Called
        only if `counts_uses` is True."""
        return

    def note_written(self, num_blocks: int) -> None:
        """The tier has stored this many blocks."""
        return


class WriteThrough(WritePolicy):
    """Every block, at once."""

    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        return keys


class SecondUse(WritePolicy):
    """Every block that two requests have used. Blocks of a request count as used when it ends."""

    tracks_blocks = True

    def __init__(self, num_host_blocks: int = 1, num_tier_blocks: int | None = None) -> None:
        super().__init__(num_host_blocks, num_tier_blocks)
        max_seen = max(_SEEN_PER_SLOT * num_host_blocks, _LEAST_SEEN)
        self._used = ReuseFilter(2, max_seen)

    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        if moment is WriteMoment.USED:  # the request that has ended is counted
            return self._used.admitted(keys)
        return self._used.admitted(keys, threshold=1)  # and by the one that stores them

    def note_used(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        self._used.count(keys, set())
        return self._used.admitted(keys)


class WriteOnEvict(WritePolicy):
    """Every block that is about to leave host memory."""

    tracks_blocks = writes_leaving = True

    def select(
        self, keys: Sequence[OffloadKey], moment: WriteMoment, req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        return keys if self.writes_stored and moment is WriteMoment.STORED else ()


class Adaptive(WriteOnEvict):
    """Blocks that are about to leave host memory, if enough of their class were used again while
    the tier would still have had them.

    A class is a number of uses in host memory and an order of magnitude of the position in the
    prompt. Until enough is known, every block is worth writing. Each write displaces a block in the
    tier, so writes become more expensive while blocks are wanted soon after they were displaced.
    """

    counts_uses = True

    def __init__(self, num_host_blocks: int = 1, num_tier_blocks: int | None = None) -> None:
        super().__init__(num_host_blocks, num_tier_blocks)
        capacity = num_tier_blocks or _UNKNOWN_CAPACITY * num_host_blocks
        self.sample = ReuseSample(capacity)
        self._max_remembered = max(4 * num_host_blocks, 64)
        self._uses_of_left_out: OrderedDict[OffloadKey, int] = OrderedDict()
        """Blocks that were left out, and how often they had been used. Oldest first."""
        self._verdicts: dict[int, bool] = {}
        """Whether blocks of a class are worth writing, until `begin_pass`."""

    def note_used(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        self.sample.note_used(keys)
        return ()

    def recall(self, keys: Sequence[OffloadKey]) -> Mapping[OffloadKey, int]:
        left_out = self._uses_of_left_out
        return {key: left_out.pop(key) for key in keys if key in left_out} if left_out else {}

    def begin_pass(self) -> None:
        self._verdicts = {}

    def is_worth_writing(self, history: BlockHistory) -> bool:
        its_class = _class_of(history)
        verdict = self._verdicts.get(its_class)
        if verdict is None:
            verdict = self.sample.expected_reads(its_class) >= self.price
            self._verdicts[its_class] = verdict
        return verdict

    @property
    def price(self) -> float:
        """The reads that a write must be expected to bring now."""
        sample = self.sample
        if sample.all.num_outcomes < _ENOUGH:
            return 0.0
        return self.price_factor * (_LEAST_READS + _READS_DISPLACED * sample.late.share)

    def note_left(self, key: OffloadKey, history: BlockHistory, is_below: bool) -> None:
        sample = self.sample
        if sample.takes_next():
            sample.watch(key, _class_of(history))
        if not is_below:
            left_out = self._uses_of_left_out
            left_out[key] = history.num_uses
            if len(left_out) > self._max_remembered:
                left_out.popitem(last=False)

    def note_written(self, num_blocks: int) -> None:
        self.sample.note_written(num_blocks)


def _class_of(history: BlockHistory) -> int:
    return min(history.num_uses or 1, _MOST_USES) << 8 | history.depth.bit_length()


class _Share:
    """How many of some outcomes were good. Older outcomes count less."""

    __slots__ = ("num_good", "num_outcomes")

    def __init__(self) -> None:
        self.num_outcomes = 0.0
        self.num_good = 0.0

    @property
    def share(self) -> float:
        return self.num_good / self.num_outcomes if self.num_outcomes else 0.0

    def add(self, is_good: bool) -> None:
        self.num_outcomes += 1
        self.num_good += is_good
        if self.num_outcomes >= _HALVED_AT:
            self.num_outcomes /= 2
            self.num_good /= 2


class ReuseSample:
    """Watches a sample of the blocks that have left host memory, written or not, and learns how
    many of each class are used again while the tier would still have them: before as many blocks
    were written as the tier can hold. So a block that was not written and is used again counts like
    one that was written and is read back.
    """

    def __init__(self, num_tier_blocks: int) -> None:
        self._lifetime = num_tier_blocks
        """Blocks that are written to the tier while it keeps one."""
        self.num_written = 0
        """Blocks written so far: the clock of the sample."""
        self._watched: OrderedDict[OffloadKey, tuple[int, int]] = OrderedDict()
        """The class of each watched block, and `num_written` when it left. Oldest first."""
        self._every = 1
        """One of this many blocks is watched."""
        self._num_left = 0
        self._classes: dict[int, _Share] = {}
        self.all = _Share()
        """Blocks of all classes: the share that was used again in time."""
        self.late = _Share()
        """The share that was used again too late, but within two lifetimes."""

    def __len__(self) -> int:
        return len(self._watched)

    def expected_reads(self, its_class: int) -> float:
        """The share of the blocks of a class that are used again in time."""
        known = self._classes.get(its_class)
        if known is None:
            return self.all.share
        return (known.num_good + _PRIOR * self.all.share) / (known.num_outcomes + _PRIOR)

    def note_left(self, key: OffloadKey, its_class: int) -> None:
        """A block has left host memory."""
        if self.takes_next():
            self.watch(key, its_class)

    def takes_next(self) -> bool:
        """A block has left host memory. True if it is one of those to `watch`."""
        self._num_left += 1
        return self._num_left % self._every == 0

    def watch(self, key: OffloadKey, its_class: int) -> None:
        """Wait for the next use of a block that has left host memory."""
        watched = self._watched
        watched[key] = (its_class, self.num_written)
        watched.move_to_end(key)
        if len(watched) > _MAX_WATCHED:
            self._thin_out()

    def note_written(self, num_blocks: int) -> None:
        """Blocks were written to the tier."""
        self.num_written += num_blocks
        watched = self._watched
        num_before = len(watched)
        longest = 2 * self._lifetime
        while watched:
            oldest, (old_class, left_at) = next(iter(watched.items()))
            if self.num_written - left_at <= longest:
                break
            del watched[oldest]
            self._note_outcome(old_class, False, False)
        if len(watched) < min(num_before, _FEW_WATCHED):
            self._every = max(self._every // 2, 1)

    def note_used(self, keys: Iterable[OffloadKey]) -> None:
        """A request has used these blocks."""
        watched = self._watched
        for key in list(filter(watched.__contains__, keys)):
            its_class, left_at = watched.pop(key)
            is_late = self.num_written - left_at > self._lifetime
            self._note_outcome(its_class, not is_late, is_late)

    def _note_outcome(self, its_class: int, in_time: bool, is_late: bool) -> None:
        known = self._classes.get(its_class)
        if known is None:
            known = self._classes[its_class] = _Share()
        known.add(in_time)
        self.all.add(in_time)
        self.late.add(is_late)

    def _thin_out(self) -> None:
        """Watch half of the blocks from now on."""
        self._every *= 2
        for key in list(self._watched)[::2]:
            del self._watched[key]


WRITE_POLICIES: dict[WritePolicyName, type[WritePolicy]] = {
    WritePolicyName.THROUGH: WriteThrough,
    WritePolicyName.SECOND_USE: SecondUse,
    WritePolicyName.ON_EVICT: WriteOnEvict,
    WritePolicyName.ADAPTIVE: Adaptive,
}
"""The policies, by their names in the configuration."""
