"""Checks that calls on the scheduler's thread do not wait or raise, and that jobs may overlap."""

from __future__ import annotations

import time
from random import Random

from kvtier.base import OffloadingStats, ReqContext, RequestOffloadingContext, ScheduleEndContext
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["CallChecks", "ConcurrencyChecks"]

_ROUNDS_OF_CALLS = 3
_TIME_TO_BEGIN_S = 0.005
"""Seconds for the tier's threads to begin, and to take any lock that they hold during I/O."""
_OPTIONAL_CALLS = (
    "touch",
    "missing",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "step",
)
_ROUNDS_OF_STORES = 8
_ROUNDS_NEEDED = 3
_NUM_STORES = 64
"""More than any tier carries out in parallel, so that later jobs have to wait."""


class CallChecks(ConformanceHooks):
    """The engine calls every method except `drain_jobs` and `shutdown` on the scheduler's thread,
    so a slow call delays all requests."""

    def test_calls_do_not_wait(self) -> None:
        """No call waits for the storage. With the hook `slow_backend`, the storage does not answer
        while the calls are made.

        A method fails the check only if it is slow in each of three rounds, because the machine
        may be busy.
        """
        slow: dict[str, float] = {}
        for number in range(_ROUNDS_OF_CALLS):
            with self.harness() as harness:
                self._make_every_call(harness)
                over = {
                    method: took
                    for method, took in harness.longest_call_s.items()
                    if took >= self.call_limit_s and (number == 0 or method in slow)
                }
            slow = over
            if not slow:
                self.skip_if_not_slowed(harness.tier)
                return
        method, took = max(slow.items(), key=lambda item: item[1])
        raise AssertionError(
            f"{method} took {took:.3f} s, but the limit for a call on the scheduler's thread is "
            f"{self.call_limit_s} s (slow in every round: {', '.join(sorted(slow))}). Hand the "
            "work to a thread of the tier, and hold no lock meanwhile"
        )

    def _make_every_call(self, harness: TierHarness) -> None:
        keys = harness.keys(self.fitting(8))
        harness.wait_for(harness.store(keys))
        with self.slowed(harness.tier):
            for number in range(6):
                harness.store(harness.keys(3, start=100 + 3 * number))
                harness.load(keys[:2])
                time.sleep(_TIME_TO_BEGIN_S)
                request = harness.new_request()
                harness.call("lookup", keys[0], request)
                harness.call("lookup_batch", keys, request)
                harness.call("touch", keys, request)
                harness.call("missing", keys, request)
                harness.call("has_pending_work")
                harness.call("get_stats")
                harness.call("take_seal_failures")
                harness.step()
                harness.call("on_request_finished", request)
            harness.begin_epoch(bytes(16))
            harness.store(keys[:2])
        harness.wait_for(*harness.ledger.unreported.values())

    def test_calls_in_any_order_do_not_raise(self) -> None:
        """No call raises, whether its request is new, unknown or finished, and whether or not the
        tier has its keys. `on_new_request` and `has_pending_work` return the right types."""
        chance = Random(2)
        with self.harness() as harness:
            present, absent = harness.keys(self.fitting(4)), harness.keys(4, start=1000)
            harness.wait_for(harness.store(present))
            told, finished = harness.new_request(), harness.new_request()
            harness.call("on_request_finished", finished)
            for _ in range(200):
                request = chance.choice([told, finished, ReqContext("never-heard-of")])
                some = chance.sample([*present, *absent], chance.randint(0, 5))
                call = chance.choice(_OPTIONAL_CALLS)
                if call in ("touch", "missing"):
                    harness.call(call, some, request)
                elif call == "on_schedule_end":
                    names = [request.req_id]
                    harness.call(call, ScheduleEndContext(new_req_ids=names))
                elif call == "on_new_request":
                    answer = harness.call(call, request)
                    demand(
                        isinstance(answer, RequestOffloadingContext),
                        f"on_new_request answered {answer!r}: give a RequestOffloadingContext",
                    )
                elif call == "on_request_finished":
                    harness.call(call, request)
                elif call == "has_pending_work":
                    answer = harness.call(call)
                    demand(isinstance(answer, bool), f"has_pending_work answered {answer!r}")
                else:
                    harness.step()
            (report,) = harness.wait_for(harness.load(present))
            demand(report.result.success, "blocks do not load after these calls")

    def test_every_figure_is_defined(self) -> None:
        """`build_metric_definitions` defines every metric that `get_stats` reports, because the
        metrics endpoint is set up from the definitions."""
        with self.harness() as harness:
            keys = harness.keys(2)
            harness.wait_for(harness.store(keys), harness.load(keys))
            stats = harness.call("get_stats")
            if stats is None:
                return
            demand(
                isinstance(stats, OffloadingStats),
                f"get_stats answered {stats!r}: give OffloadingStats, or None",
            )
            defined = harness.tier.build_metric_definitions({})
            series = {one for name, its in defined.items() for one in its.series(name)}
            unknown = {*stats.counters, *stats.gauges, *stats.histograms} - series
            demand(
                not unknown,
                f"get_stats reports {sorted(unknown)}, which build_metric_definitions leaves out",
            )


class ConcurrencyChecks(ConformanceHooks):
    """Checks of jobs that are in flight together."""

    def test_overlapping_jobs_bring_the_right_bytes(self) -> None:
        """With many stores and loads of the same blocks in flight, every block that a load reports
        has the right bytes, and every block that a store reports can be loaded at the end."""
        chance = Random(1)
        with self.harness() as harness:
            keys = harness.keys(self.fitting(24))
            for _ in range(200):
                some = chance.sample(keys, chance.randint(1, min(6, len(keys))))
                (harness.load if chance.random() < 0.5 else harness.store)(some)
                if chance.random() < 0.3:
                    harness.step()
            harness.wait_for(*harness.ledger.unreported.values())
            kept = set[bytes]()
            for report in harness.ledger.reports.values():
                if not report.job.is_promotion:
                    kept |= report.moved
            (report,) = harness.wait_for(harness.load(keys))
            lost = kept - report.moved
            demand(
                not lost,
                f"{len(lost)} of {len(keys)} blocks were reported as stored and do not load, "
                "though all of them fit",
            )

    def test_stores_of_one_block_at_once_keep_it(self) -> None:
        """If several stores of the same new blocks are in flight together, each is reported, and
        the blocks can be loaded."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            with self.slowed(harness.tier):
                jobs = [harness.store(keys) for _ in range(4)]
            harness.wait_for(*jobs)
            (report,) = harness.wait_for(harness.load(keys))
            demand(
                report.result.success,
                f"{len(keys) - len(report.moved)} of {len(keys)} blocks do not load after several "
                "stores of them were under way together",
            )

    def test_loads_do_not_wait_behind_stores(self) -> None:
        """A load that is submitted after many stores can end before them: a request waits for the
        load, but no request waits for the stores.

        The check measures no time. Each round submits many stores and then one load, and counts
        only if at least half of the stores are still unreported right after that. The check fails
        if at least three rounds count, and the load overtook half of the remaining stores in none
        of them. With a fast tier too few rounds may count; the hook `slow_backend` prevents that.
        """
        with self.harness(num_slots=2 * _NUM_STORES + 2) as harness:
            (wanted,) = harness.keys(1)
            harness.wait_for(harness.store([wanted]))
            outcomes = [self._load_overtakes_stores(harness, n) for n in range(_ROUNDS_OF_STORES)]
            counted = [outcome for outcome in outcomes if outcome is not None]
            demand(
                len(counted) < _ROUNDS_NEEDED or any(counted),
                f"in {len(counted)} of {_ROUNDS_OF_STORES} rounds a load was submitted behind "
                f"{_NUM_STORES} stores, and each time it was reported after most of them: loads "
                "must not wait behind stores",
            )
            self.skip_if_not_slowed(harness.tier)

    def _load_overtakes_stores(self, harness: TierHarness, number: int) -> bool | None:
        """Return True if the load was reported before at least half of the stores that were
        unreported when it was submitted. None if too few were unreported."""
        (wanted,) = harness.keys(1)
        start = 100 * (number + 1)
        with self.slowed(harness.tier):
            # Each store includes the wanted block, so that a full tier does not evict it.
            stores = [
                harness.store([wanted, *harness.keys(1, start=start + i)])
                for i in range(_NUM_STORES)
            ]
            load = harness.load([wanted])
            harness.step()
            left = [job for job in stores if job.job_id in harness.ledger.unreported]
        harness.wait_for(load, *stores)
        if len(left) < _NUM_STORES // 2:
            return None
        reported = list(harness.ledger.reports)
        behind = set(reported[reported.index(load.job_id) :])
        return sum(job.job_id in behind for job in left) >= len(left) // 2
