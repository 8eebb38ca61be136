"""Checks of lookups, and of the namespaces in which lookups find blocks."""

from __future__ import annotations

import os
import time

import pytest

from kvtier.base import LookupResult, OffloadKey
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import TierHarness
from kvtier.testing.job_ledger import demand

__all__ = ["EpochChecks", "LookupChecks"]


class LookupChecks(ConformanceHooks):
    """Lookups agree with each other, with events and with stored blocks."""

    def test_lookup_batch_agrees_with_lookup(self) -> None:
        """`lookup_batch` answers for each key what `lookup` answers, at least up to the first
        MISS."""
        with self.harness() as harness:
            present = harness.keys(self.fitting(6))
            absent = harness.keys(3, start=1000)
            harness.wait_for(harness.store(present))
            for asked in (
                present,
                absent,
                [*present[:2], absent[0], *present[2:], *absent[1:]],
                [absent[0], *present],
                present[:1],
                [],
            ):
                batch = harness.look_up_batch(asked)
                single = [harness.look_up(key) for key in asked]
                demand(
                    len(batch) <= len(asked),
                    f"lookup_batch gave {len(batch)} answers for {len(asked)} keys",
                )
                demand(
                    len(batch) == len(asked) or batch[-1:] == [LookupResult.MISS],
                    f"lookup_batch gave {len(batch)} answers for {len(asked)} keys, but the last "
                    "one is not a MISS: leave out answers only after the first MISS",
                )
                names = [answer.name for answer in batch], [answer.name for answer in single]
                demand(
                    batch == single[: len(batch)],
                    f"lookup_batch answered {names[0]}, and lookup, key by key, {names[1]}",
                )

    def test_known_keys_can_be_loaded(self) -> None:
        """`known_keys` names only blocks that are stored, and no more than it is asked for."""
        with self.harness() as harness:
            present = harness.keys(self.fitting(6))
            harness.wait_for(harness.store(present))
            for most in (0, 2, 100):
                named = harness.call("known_keys", most)
                demand(
                    isinstance(named, (list, tuple)) and len(named) <= most,
                    f"known_keys({most}) answered {named!r}: give a list of at most {most} keys",
                )
                strange = set(named).difference(present)
                demand(not strange, f"known_keys named {strange}, which are not stored")

    def test_a_lookup_is_no_promise_and_no_obstacle(self) -> None:
        """A key that was a MISS is a HIT once it has been stored: the tier forgets the MISS."""
        with self.harness() as harness:
            (key,) = harness.keys(1)
            demand(harness.look_up(key) is LookupResult.MISS, "an empty tier answered HIT")
            harness.wait_for(harness.store([key]))
            demand(
                harness.look_up(key) is LookupResult.HIT,
                "a block is still a MISS after it was stored: forget the answer of an earlier "
                "lookup when a block is stored",
            )

    def test_missing_names_no_block_that_is_there(self) -> None:
        """`missing` names only blocks that it was asked about, each once. It names no block that
        the tier keeps or is storing, because the engine stores the named blocks again."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(8))
            present, coming = keys[:2], keys[2:]
            absent = harness.keys(3, start=1000)
            harness.wait_for(harness.store(present))
            with self.slowed(harness.tier):
                job = harness.store(coming)
                # Ask twice: a tier may find out which blocks it has only after their first use.
                for _ in range(2):
                    self._demand_absent([*present, *coming, *absent], absent, harness)
                    harness.step()
            harness.wait_for(job)
            self._demand_absent([*absent, *keys], absent, harness)

    def _demand_absent(
        self, asked: list[OffloadKey], absent: list[OffloadKey], harness: TierHarness
    ) -> None:
        request = harness.new_request()
        harness.call("touch", asked, request)
        named = harness.call("missing", asked, request)
        harness.call("on_request_finished", request)
        demand(
            isinstance(named, (list, tuple)),
            f"missing answered {named!r}: give a list or a tuple of keys",
        )
        demand(
            set(named) <= set(asked) and len(set(named)) == len(named),
            f"missing answered {named!r}: name blocks that were asked for, each once",
        )
        demand(
            set(named) <= set(absent),
            f"missing named {len(set(named).difference(absent))} blocks that are kept or being "
            "stored: the engine would store them again at every use",
        )

    def test_events_tell_what_lookups_tell(self) -> None:
        """A tier that emits events emits all of them: the blocks that are in the tier according to
        its events are those that are a HIT. Routers use events to find the engine that has a
        block."""
        with self.harness() as harness:
            keys = harness.keys(2 * self.fitting(20))
            for start in range(0, len(keys), 4):
                harness.wait_for(harness.store(keys[start : start + 4]))
            if not harness.events:
                pytest.skip("this tier emits no events")
            self._demand_agreement(harness, keys)
            harness.begin_epoch(bytes(16))
            self._demand_agreement(harness, keys)

    def test_events_that_nobody_takes_are_not_recorded(self) -> None:
        """While `enable_kv_events` is False the tier records no events: the engine does not take
        them, so they would accumulate."""
        with self.harness() as harness:
            harness.tier.enable_kv_events = False
            keys = harness.keys(self.fitting(8))
            harness.wait_for(harness.store(keys))
            harness.begin_epoch(bytes(16))
            harness.step()
            demand(
                not harness.events,
                f"{len(harness.events)} events were recorded while enable_kv_events was False",
            )

    def _demand_agreement(self, harness: TierHarness, keys: list[OffloadKey]) -> None:
        deadline = time.monotonic() + self.patience_s
        while (told := _present(harness)) != (kept := harness.hits(keys)):
            demand(
                time.monotonic() < deadline,
                f"by its events the tier has {len(told)} blocks, by its lookups {len(kept)}; "
                f"{len(told - kept)} of the former are a MISS, {len(kept - told)} of the latter "
                "have no event",
            )
            harness.step()


def _present(harness: TierHarness) -> set[OffloadKey]:
    """Return the blocks in the tier, according to its events."""
    tier, present = harness.tier, set[OffloadKey]()
    for event in harness.events:
        demand(
            tier.medium is None or event.medium == tier.medium,
            f"an event names the medium {event.medium}, but the tier's is {tier.medium}",
        )
        demand(
            event.locality == tier.locality,
            f"an event names the locality {event.locality}, but the tier's is {tier.locality}",
        )
        if event.removed:
            demand(
                present.issuperset(event.keys),
                "an event removes a block that no earlier event has added",
            )
            present.difference_update(event.keys)
        else:
            present.update(event.keys)
    return present


def _new_fingerprint() -> bytes:
    return os.urandom(16)


class EpochChecks(ConformanceHooks):
    """A fingerprint names a namespace. The same key in another namespace is another block."""

    def test_blocks_of_another_fingerprint_are_not_found(self) -> None:
        """A block is found and loaded only under the fingerprint under which it was stored."""
        with self.harness() as harness:
            own, others = harness.fingerprint, _new_fingerprint()
            mine, theirs = harness.keys(2)
            harness.wait_for(harness.store([mine]))
            harness.fingerprint = others
            harness.wait_for(harness.store([theirs]))
            (report,) = harness.wait_for(harness.load([mine]))
            demand(not report.moved, "a load got a block that is kept under another fingerprint")
            harness.fingerprint = own
            demand(
                harness.look_up(theirs) is LookupResult.MISS,
                "a block that a job stored under another fingerprint is a HIT",
            )
            (report,) = harness.wait_for(harness.load([theirs]))
            demand(not report.moved, "a load got a block that is kept under another fingerprint")

    def test_another_model_finds_nothing(self) -> None:
        """A tier with another configuration finds no block of the first tier, even if both use the
        same storage."""
        with self.harness() as first:
            keys = first.keys(3)
            first.wait_for(first.store(keys))
        with self.harness() as second:
            demand(
                not second.hits(keys),
                "blocks of one configuration are a HIT for another: the fingerprint is part of "
                "the name under which a block is kept",
            )
            (report,) = second.wait_for(second.load(keys))
            demand(not report.moved, "a load got another configuration's block")

    def test_a_new_epoch_hides_earlier_blocks(self) -> None:
        """After `begin_epoch`, blocks stored before are a MISS. Blocks stored later are kept as
        usual, including blocks with the same keys."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(4))
            harness.wait_for(harness.store(keys))
            demand(len(harness.hits(keys)) == len(keys), "blocks are a MISS after their store")
            harness.begin_epoch(_new_fingerprint())
            demand(
                not harness.hits(keys),
                "blocks from before begin_epoch are still a HIT: look up in self.fingerprint, and "
                "forget earlier answers",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(not report.moved, "a load got a block from before begin_epoch")
            (report,) = harness.wait_for(harness.store(keys))
            demand(
                report.result.success,
                "a store after begin_epoch failed: blocks of an earlier epoch must not keep later "
                "ones out",
            )
            (report,) = harness.wait_for(harness.load(keys))
            demand(report.result.success, "blocks stored after begin_epoch do not load")

    def test_jobs_under_way_stay_in_their_epoch(self) -> None:
        """A store that was submitted before `begin_epoch` is reported, and its blocks are never
        found afterwards. A load that was submitted before `begin_epoch` is reported as well."""
        with self.harness() as harness:
            keys = harness.keys(self.fitting(16))
            harness.wait_for(harness.store(keys[:2]))
            with self.slowed(harness.tier):
                jobs = [harness.store([key]) for key in keys[2:]]
                jobs.append(harness.load(keys[:2]))
                harness.begin_epoch(_new_fingerprint())
            harness.wait_for(*jobs)
            demand(
                not harness.hits(keys),
                "a store that was under way at begin_epoch shows in the new epoch: keep a block "
                "under the fingerprint of its job, not under that of the tier",
            )
