"""What the orchestrator remembers of one request, for as long as a tier may be asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtier.base import LookupResult, OffloadKey, PrefixLookup, ReqContext
    from kvtier.cpu.request_use import RequestUse
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.jobs import Job
    from kvtier.tiering.link import TierLink


class Awaited(NamedTuple):
    """An answer that cannot become final before a promotion has ended."""

    keys: Sequence[OffloadKey]
    """What was asked."""
    answer: PrefixLookup
    job: Job


class TierRequest:
    """One request, as the tiers below the primary one see it."""

    __slots__ = (
        "asking",
        "avoided",
        "awaited",
        "brought_up",
        "context",
        "declined",
        "ended",
        "finished",
        "given_up",
        "has_run",
        "is_withdrawn",
        "last_wait",
        "last_wait_step",
        "leases",
        "links",
        "max_wanted",
        "missed",
        "most_step",
        "most_wait",
        "num_parked",
        "num_wanted",
        "open",
        "prepared",
        "request_level",
        "sources",
        "step",
        "use",
        "used",
        "waited",
        "wanted",
    )

    def __init__(self, context: ReqContext, use: RequestUse) -> None:
        self.context = context
        self.use = use
        """What it has used of the primary tier."""
        self.finished = False
        """Whether the engine has said that it has ended."""
        self.is_withdrawn = False
        """Whether it wants nothing any more from below."""
        self.brought_up: dict[OffloadKey, SecondaryTierManager] = {}
        """Blocks that tiers have brought up for it, and from where."""
        self.links: tuple[TierLink, ...] = ()
        """Tiers that know of it."""
        self.sources: tuple[TierLink, ...] = ()
        """Those of them that it may load from, in lookup order."""
        self.request_level: tuple[TierLink, ...] = ()
        """Those of them that want all of its blocks, also those that were there already."""
        self.most_wait = 0.0
        """How long it may be kept waiting in all, in seconds."""
        self.most_step = 0.0
        """How much of that a single step counts, however long it takes: the longest time that a
        tier may take for one thing. What takes a tier no time must be possible with long steps."""

        # What it asked for in the step `step`:
        self.step = -1
        self.wanted: dict[bytes, dict[OffloadKey, TierLink | None]] = {}
        """By group, in the order asked: blocks found below, and in which tier. In a windowed group
        also those that are in the primary tier (None)."""
        self.missed: bytes | None = None
        """A group of which nothing was found below before it was missed."""
        self.ended: dict[bytes, LookupResult] = {}
        """Groups in which nothing more can be a hit (MISS), or is known to be one (RETRY)."""
        self.open: tuple[TierLink, ...] = ()
        """The tiers that it asks."""
        self.num_wanted = 0
        self.max_wanted = 0
        """How many blocks could ever be promoted for it."""

        # How long it has been waiting:
        self.waited = 0.0
        self.last_wait = -inf
        self.last_wait_step = -2
        self.given_up = False
        """Whether nothing that is not there yet is a hit for it."""
        self.asking: dict[tuple[TierLink, OffloadKey], float] = {}
        """Tiers that do not know yet whether they have a block, and since when."""

        self.awaited: dict[bytes, Awaited] = {}
        """By group, what it was last told, if it was to wait for a promotion."""

        self.declined: set[TierLink] = set()
        """Tiers from which loading would take longer than computing."""
        self.avoided: dict[OffloadKey, set[TierLink]] = {}
        """Blocks that tiers said they had, but could not deliver."""
        self.prepared: dict[OffloadKey, list[OffloadKey]] = {}
        """Blocks on their way from the device: each store by its first key."""
        self.num_parked = 0
        """Blocks to be cascaded for it later: when someone else has written them, or when a tier's
        stores pin less than their share."""
        self.leases: set[int] = set()
        self.has_run = False
        """Whether it has loaded, stored or reported blocks. One that was aborted while it waited
        has used none of those that it looked up."""
        self.used: tuple[OffloadKey, ...] = ()
        """Once it has finished: the blocks it used, in prompt order, until its tiers have heard."""

    def begin_step(self, step: int) -> None:
        """Forget what it asked for in earlier steps."""
        self.step = step
        self.missed = None
        self.num_wanted = 0
        if self.wanted:
            self.wanted = {}
        if self.ended:
            self.ended = {}

    def drop_wanted(self, group: bytes) -> None:
        """What it has found in this group in this step cannot be a hit."""
        run = self.wanted.pop(group, None)
        if run:
            self.num_wanted -= sum(link is not None for link in run.values())

    def decline(self, link: TierLink) -> None:
        """It does not ask this tier any more."""
        self.declined.add(link)
        self.open = tuple(other for other in self.open if other is not link)
        self.asking = {asked: when for asked, when in self.asking.items() if asked[0] is not link}

    def may_wait(self, now: float, step: int) -> bool:
        """Whether it could be told to wait. Not if it has waited long enough.

        A request that has not been kept waiting for a while starts anew.
        """
        if step > self.last_wait_step + 1 and now > self.last_wait + self.most_wait:
            self.waited = 0.0
            self.last_wait = now
            self.given_up = False
            self.asking = {}
        elif self.waited + min(now - self.last_wait, self.most_step) > self.most_wait:
            self.given_up = True
        return not self.given_up

    def waits(self, now: float, step: int) -> None:
        """It is told to wait."""
        if self.last_wait > -inf:
            self.waited += min(now - self.last_wait, self.most_step)
        self.last_wait = now
        self.last_wait_step = step

    def is_asking(self, link: TierLink) -> bool:
        """Whether it waits for this tier to find out."""
        return any(asked is link for asked, _ in self.asking)

    def goes_on(self) -> None:
        """It does not wait any more: what it waits for next is another wait."""
        self.waited = 0.0
        self.last_wait_step = -2
        self.last_wait = -inf
        self.given_up = False
        self.asking = {}
        self.awaited = {}
        self.declined = set()
        self.avoided = {}
