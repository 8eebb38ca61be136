"""Calls on the scheduler's thread."""

from __future__ import annotations

import time
from random import Random

from kvtier.base import OffloadingStats, ReqContext, RequestOffloadingContext, ScheduleEndContext
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["CallChecks"]

_ROUNDS = 3
_TIME_TO_BEGIN_S = 0.005
"""For the tier's threads to begin: then a lock that they hold during I/O is held."""


class CallChecks(ConformanceHooks):
    """Every method but `drain_jobs` and `shutdown` is called between two steps of the engine."""

    def test_calls_do_not_wait(self) -> None:
        """No call waits for the storage. With the hook `slow_backend`, the storage does not answer
        while the calls are made.

        A call has to be slow in each of three rounds to count: a busy machine is not the tier's
        fault.
        """
        slow: dict[str, float] = {}
        for number in range(_ROUNDS):
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
            f"{method} took {took:.3f} s, and {self.call_limit_s} s are the limit for a call on "
            f"the scheduler's thread (slow in every round: {', '.join(sorted(slow))}). Hand the "
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
        """Requests that the tier was told of, was not told of, or was told are finished; keys that
        it has, and others: no call raises, and the answers have the right types."""
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
        """`get_stats` reports nothing that `build_metric_definitions` does not know: the metrics
        endpoint is set up from the definitions."""
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
            unknown = {*stats.counters, *stats.gauges, *stats.histograms} - defined.keys()
            demand(
                not unknown,
                f"get_stats reports {sorted(unknown)}, which build_metric_definitions leaves out",
            )


_OPTIONAL_CALLS = (
    "touch",
    "missing",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "step",
)
