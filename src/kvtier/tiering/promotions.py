"""Brings blocks up from the tiers, for the requests that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.base import LookupResult
from kvtier.tiering.guard import Trials
from kvtier.tiering.leases import Leases

if TYPE_CHECKING:
    from kvtier.base import OffloadKey
    from kvtier.tiering.groups import Groups
    from kvtier.tiering.guard import PrefillRate
    from kvtier.tiering.jobs import Job
    from kvtier.tiering.link import TierLink
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.request import TierRequest
    from kvtier.tiering.step import Step
    from kvtier.tiering.transfers import TransferFactory


_PROBE_SIZES = (1, 8)
"""Blocks of the jobs that measure a tier when the engine starts: two sizes make a line. If it could
not name any then, the first load that a request wants has no more than the last number."""
_PROBE_PATIENCE_S = 0.25
"""A tier that takes longer for these is not waited for."""
_MOST_BLIND_S, _MOST_BLIND = 1.0, 8
"""While it is not known what computing takes, this many requests compute what would take longer
than this to load. Computing shows what it takes; loading never would."""


class _Expected(NamedTuple):
    """Of blocks that are to be brought up."""

    load_s: float | None
    compute_s: float | None
    """None, as above: not known."""
    num_tokens: int
    mean_position: float
    """Of these tokens. Means nothing while `compute_s` is not known."""


class Promotions:
    """All promotions that are wanted, under way, or kept for those who wanted them.

    Scheduler thread only.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        transfers: TransferFactory,
        groups: Groups,
        prefill: PrefillRate,
        step: Step,
    ) -> None:
        self._primary = primary
        self._transfers = transfers
        self._groups = groups
        self._prefill = prefill
        self._step = step
        self.wanting: dict[TierRequest, None] = {}
        """Requests that have found blocks below in this step."""
        self.jobs: dict[int, Job] = {}
        """Those that are under way, late ones included."""
        self.leases = Leases(primary)
        self._declined: list[tuple[TierLink, list[OffloadKey], TierRequest]] = []
        """What was found to be too slow in this step."""
        self._trials = Trials()
        self._num_blind = 0
        """Requests that computed before it was known what that takes."""
        self.num_trials = 0
        """Requests that were let compute what is thought to be loaded more quickly."""
        self.num_given_up = 0
        """Requests that did not wait any longer for a promotion."""

    def await_writer(self, key: OffloadKey, request: TierRequest) -> LookupResult:
        """A block is on its way into the primary tier: HIT_PENDING, if it is worth waiting for."""
        job_id = self._primary.writer_of(key)
        if job_id is None:
            return LookupResult.HIT_PENDING  # from the device
        step, job = self._step, self.jobs[job_id]
        if not job.is_awaited or not request.may_wait(step.now, step.number):
            return LookupResult.MISS
        job.wanters[request] = None
        request.waits(step.now, step.number)
        return LookupResult.HIT_PENDING

    @property
    def has_some_to_send(self) -> bool:
        return bool(self.wanting or self._declined)

    def send(self) -> None:
        """Send one job for each tier and request that found blocks there in this step."""
        for request in self.wanting:
            for link, keys in self._by_link(request).items():
                if not self._promote(keys, link, request):
                    break  # what comes behind would be of no use
        self.wanting = {}
        declined, self._declined = self._declined, []
        now = self._step.now
        for link, found, request in declined:
            if not link.may_explore(now) or request.is_withdrawn or not link.lets(request, now):
                continue
            if link.probes:
                continue
            num_explored = link.exploration.num_blocks(len(found), link.estimate)
            keys = [key for key in found[:num_explored] if not self._primary.has(key)]
            if keys:
                link.explored(now)
                self._bring_up(keys, link, request, is_awaited=False)

    def probe(self, keys: list[OffloadKey], link: TierLink, request: TierRequest) -> None:
        """Measure a tier with blocks that nobody waits for."""
        start, job_ids = 0, []
        for size in _PROBE_SIZES:
            if self._bring_up(keys[start : start + size], link, request, is_awaited=False):
                job_ids.append(self._transfers.last_id)
            start += size
        link.begin_probing(job_ids, self._step.now)

    def declines(self, group: bytes, request: TierRequest) -> bool:
        """Whether what a request has found below, having looked up its whole prompt, would not be
        brought up, since computing is quicker. Then it asks that tier no more, and has to look
        again. To be told so at the end of the step would cost it that step.
        """
        wanted = request.wanted.get(group)
        if not wanted or not self._prefill.is_known or not self._groups.is_only_one:
            return False
        now = self._step.now
        first = next(iter(wanted.values()))
        if first is None or not first.lets(request, now):
            return False
        keys = [key for key, link in wanted.items() if link is first]
        if self._is_worth_it(self._expect(keys, first, request), first):
            return False
        self._decline(keys, first, request)
        self.wanting.pop(request, None)
        request.begin_step(request.step)
        return True

    def _decline(self, keys: list[OffloadKey], link: TierLink, request: TierRequest) -> None:
        """They are computed. Some are brought up all the same, now and then, which nobody waits
        for: or a tier that was slow once would be taken to be slow forever."""
        _count_declined(keys, link)
        self._declined.append((link, keys, request))
        request.decline(link)

    def _is_worth_it(self, expected: _Expected, link: TierLink) -> bool:
        """Whether loading is not slower than computing, as far as is known."""
        load_s, compute_s = expected.load_s, expected.compute_s
        if load_s is None:
            return not link.probes or link.is_probed_since(self._step.now, _PROBE_PATIENCE_S)
        if compute_s is not None:
            return load_s <= compute_s
        may_learn = self._prefill.may_learn and expected.num_tokens > 0
        return load_s <= _MOST_BLIND_S or not may_learn or self._num_blind >= _MOST_BLIND

    def _is_trial_due(self, expected: _Expected) -> bool:
        load_s, compute_s, num_tokens, mean_position = expected
        if load_s is None or compute_s is None or not self._prefill.is_told:
            return False
        is_measured = self._prefill.is_measured(num_tokens, mean_position)
        return self._trials.are_due(load_s, compute_s, is_measured=is_measured)

    def _try_computing(self, keys: list[OffloadKey], link: TierLink, request: TierRequest) -> None:
        """They are computed, whatever any tier has of them: or what was thought dear to compute
        would be taken to be dear forever."""
        _count_declined(keys, link)
        for source in request.sources:
            request.decline(source)
        self._trials.note_trial()
        self.num_trials += 1

    def _by_link(self, request: TierRequest) -> dict[TierLink, list[OffloadKey]]:
        """What to bring up for a request, in prompt order, by tier."""
        by_link: dict[TierLink, list[OffloadKey]] = {}
        for group, wanted in request.wanted.items():
            keys = list(wanted)
            window = self._groups.windows.get(group)
            if window is not None:
                if group in request.ended:
                    continue  # it is not known yet which window it will be
                keys = keys[-window:][::-1]
            for key in keys:
                link = wanted[key]
                if link is None:
                    continue
                if not self._primary.has(key):
                    by_link.setdefault(link, []).append(key)
                elif not self._primary.is_ready(key):
                    self.await_writer(key, request)
        return by_link

    def _promote(self, keys: list[OffloadKey], link: TierLink, request: TierRequest) -> bool:
        """Bring up blocks, or the head of them. Whether all of them are on their way."""
        now = self._step.now
        if not link.lets(request, now):
            return False
        expected = self._expect(keys, link, request)
        if not self._is_worth_it(expected, link):
            self._num_blind += expected.load_s is not None and expected.compute_s is None
            self._decline(keys, link, request)
            return False
        if self._is_trial_due(expected):
            self._try_computing(keys, link, request)
            return False
        if link.probes:
            return False  # how quick the tier is, is known in a moment: it waits for that
        is_probe = expected.load_s is None and self._prefill.may_learn and not link.was_probed
        wanted = keys[: _PROBE_SIZES[-1]] if is_probe else keys
        num_sent = self._bring_up(wanted, link, request, is_awaited=True)
        if num_sent and is_probe:
            link.begin_probing([self._transfers.last_id], now)
        link.count("hit_blocks", num_sent)
        if num_sent and expected.load_s is not None:
            self._trials.note_load(expected.load_s)
        return num_sent == len(keys)

    def _bring_up(
        self, keys: list[OffloadKey], link: TierLink, request: TierRequest, *, is_awaited: bool
    ) -> int:
        """Send a job for as many of the first ones as can be brought up; how many."""
        count = link.num_loadable(len(keys))
        num_leased = self.leases.num_blocks - self.leases.num_blocks_of(request)
        count = min(count, self._primary.num_writable(count, num_leased, request.context))
        if not count:
            return 0
        job_id = self._transfers.new_id()
        placed = self._primary.prepare_write(job_id, keys[:count], request.context)
        if placed is None:
            return 0
        placed_keys, spec = placed
        transfer = self._transfers.make(job_id, placed_keys, spec, True, request.context)
        job = self.jobs[job_id] = link.expect_load(transfer, self._step.now)
        job.is_awaited = is_awaited
        if is_awaited:
            job.wanters[request] = None
        link.submit_load(job)
        if job.is_done:
            self.end(job, (), link)
            return 0
        if job.is_late:
            self.give_up(job)
        return len(placed_keys)

    def _expect(
        self, keys: Sequence[OffloadKey], link: TierLink, request: TierRequest
    ) -> _Expected:
        """How long it will take to load blocks, and to compute them, as far as is known."""
        load_s = link.estimate.predict(len(keys) + link.num_loading_in_time) or None
        num_tokens = self._groups.num_tokens(keys)
        if load_s is None or not num_tokens or not self._prefill.is_known:
            return _Expected(load_s, None, num_tokens, 0.0)
        num_below = num_tokens
        if request.num_wanted > len(keys):  # from several tiers
            num_below = self._groups.num_tokens(
                [key for run in request.wanted.values() for key in run]
            )
        mean_position = _least_start(request, num_below) + num_tokens / 2
        compute_s = self._prefill.seconds_for(num_tokens, mean_position)
        return _Expected(load_s, compute_s, num_tokens, mean_position)

    def end(self, job: Job, moved: Sequence[OffloadKey], link: TierLink) -> None:
        """A tier has reported a promotion; `moved` are the blocks that it has verified."""
        transfer = job.transfer
        del self.jobs[transfer.job_id]
        self._primary.complete_write(transfer.job_id, moved)
        wanters = [request for request in job.wanters if not request.is_withdrawn]
        if len(moved) < len(transfer.keys):
            failed = set(transfer.keys).difference(moved)
            for request in wanters:
                for key in failed:
                    request.avoided.setdefault(key, set()).add(link)
        if moved and wanters:
            for request in wanters:
                request.brought_up.update(dict.fromkeys(moved, link.tier))
            expires = self._step.now + link.settings.load_timeout_s
            self.leases.begin(moved, wanters, transfer.req_context, expires)

    def give_up(self, job: Job) -> None:
        """It is late. Those who wait for it do not, and the slots wait for the tier."""
        self._primary.give_up_write(job.transfer.job_id)
        self.num_given_up += len(job.wanters)
        for request in job.wanters:
            request.given_up = True
        job.wanters.clear()

    def withdraw(self, request: TierRequest) -> None:
        """A request waits for nothing any more."""
        request.is_withdrawn = True
        self.wanting.pop(request, None)
        self.leases.end_for(request)

    def forget_all(self) -> None:
        """Nothing that is wanted or kept is valid any more."""
        self.wanting = {}
        self._declined = []
        self.leases.end_all()


def _count_declined(keys: list[OffloadKey], link: TierLink) -> None:
    link.count("hit_blocks", len(keys))
    link.count("declined_blocks", len(keys))


def _least_start(request: TierRequest, num_tokens: int) -> int:
    """Where in its prompt so many tokens begin, which a request wants from below; at the least.

    What no miss has ended goes on to the end of the prompt. With a miss before that, it is not
    known how much is on the device before them: then it is nothing.
    """
    num_prompt_tokens = request.context.num_prompt_tokens
    if num_prompt_tokens is None or request.ended:
        return 0
    return max(0, num_prompt_tokens - num_tokens)
