"""The kit fails on wrong tiers, in the right check, and with the right complaint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import (
    BackingBytes,
    Damage,
    ExampleBacking,
    FaultSchedule,
    FaultyTier,
    TierConformance,
    TierHarness,
)
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from tests.testing import broken_tiers as broken
from tests.testing.gated_tier import GatedTier

Make = Callable[[OffloadingSpec, memoryview], SecondaryTierManager]

CAPACITY = 6
IMPATIENT_S = 0.4
PATIENT_S = 20.0


class Kit(TierConformance):
    """The kit for a given tier object, not for a class of tiers."""

    call_limit_s: ClassVar[float] = 0.02
    settle_s: ClassVar[float] = 0.2

    def __init__(self, make: Make, patience_s: float = PATIENT_S) -> None:
        self._make = make
        self.patience_s = patience_s  # type: ignore[misc]

    def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return self._make(spec, view)

    def backing(self, tier: SecondaryTierManager) -> BackingBytes:
        assert isinstance(tier, ExampleSecondaryTierManager)
        return ExampleBacking(tier)

    def slow_backend(self, tier: SecondaryTierManager) -> AbstractContextManager[object] | None:
        return tier.closed() if isinstance(tier, GatedTier) else None


class SmallKit(Kit):
    capacity_blocks: ClassVar[int | None] = CAPACITY


class RestartKit(Kit):
    survives_restart: ClassVar[bool] = True


def plain(tier_cls: type[ExampleSecondaryTierManager]) -> Make:
    return lambda spec, view: tier_cls(spec, view, "broken")


def small(tier_cls: type[ExampleSecondaryTierManager]) -> Make:
    return lambda spec, view: tier_cls(spec, view, "broken", max_blocks=CAPACITY)


def faulty(**rates: float) -> Make:
    schedule = {name.replace("__", "."): rate for name, rate in rates.items()}
    return lambda spec, view: FaultyTier(
        ExampleSecondaryTierManager(spec, view, "broken"), FaultSchedule(3, schedule)
    )


@pytest.fixture(autouse=True)
def _broken_tiers_leave_nothing() -> Iterator[None]:
    yield
    broken.clean_up_after_broken_tiers()


class Case(NamedTuple):
    tier: type[ExampleSecondaryTierManager]
    check: str
    words: str
    args: tuple[Any, ...] = ()


HANGS = frozenset(
    {
        "not reported within",
        "(a store of 0 blocks) was",
        "still answered RETRY",
        "did not return within",
        "shutdown: left-behind",
        "shutdown: idle",
        "(/dev/null)",
        "by its events the tier has",
    }
)
"""Complaints that need some waiting."""


PLAIN = [
    Case(broken.LeaksWhatIsThere, "nothing_to_do_is_reported", "not reported within"),
    Case(broken.LeaksWhatIsThere, "storing_twice_keeps_the_block", "not reported within"),
    Case(broken.LeaksEmptyJobs, "a_job_without_blocks_is_reported", "(a store of 0 blocks) was"),
    Case(broken.RaisesForUnknownBlocks, "a_load_of_unknown_blocks_fails", "submit_load raised Key"),
    Case(broken.NamesBlocksItDoesNotHave, "known_keys_can_be_loaded", "which are not stored"),
    Case(broken.BeginsWhatItRefuses, "a_load_of_unknown_blocks_fails", "reported twice"),
    Case(broken.SaysAllArrived, "a_load_names_exactly_what_arrived", "was not written"),
    Case(broken.SaysAllArrived, "a_load_of_unknown_blocks_fails", "was not written"),
    Case(broken.NamesNothingOfAPart, "a_load_names_exactly_what_arrived", "named 0 of the present"),
    Case(broken.GivesUpEarly, "a_load_names_exactly_what_arrived", "named 0 of the present"),
    Case(broken.ReportsBeforeItWrites, "stored_blocks_come_back", "was not written"),
    Case(broken.LoadsInSlotOrder, "stored_blocks_come_back", "holds other bytes"),
    Case(broken.WritesIntoSlotsItReads, "stored_blocks_come_back", "must only read"),
    Case(broken.ReadsSlotsTooLate, "stored_blocks_come_back", "after the store was reported"),
    Case(broken.LoadsByKey, "overlapping_jobs_bring_the_right_bytes", "was not written"),
    Case(broken.TakesTwoForNone, "stores_of_one_block_at_once_keep_it", "several stores"),
    Case(broken.LoadsOnlyOnce, "loading_takes_nothing_away", "load number 2"),
    Case(broken.IgnoresTheGroup, "groups_are_told_apart", "the group is part of the key"),
    Case(broken.ReplacesInPlace, "storing_twice_keeps_the_block", "while they were stored again"),
    Case(broken.KeepsLess, "many_blocks_come_back", "of 1000 blocks came back"),
    Case(broken.PromisesEverythingInBatches, "lookup_batch_agrees_with_lookup", "key by key"),
    Case(broken.EndsBatchesTooSoon, "lookup_batch_agrees_with_lookup", "2 answers for 6 keys"),
    Case(broken.RemembersMisses, "a_lookup_is_no_promise_and_no_obstacle", "earlier lookup"),
    Case(
        broken.MissesWhatIsBeingStored, "missing_names_no_block_that_is_there", "6 blocks that are"
    ),
    Case(broken.MissesEverything, "missing_names_no_block_that_is_there", "8 blocks that are kept"),
    Case(broken.NeverKnows, "stored_blocks_come_back", "still answered RETRY"),
    Case(
        broken.RecordsEventsForNobody,
        "events_that_nobody_takes_are_not_recorded",
        "events were recorded",
    ),
    Case(broken.DrainsNothing, "drain_ends_every_job", "by the first poll after drain_jobs"),
    Case(broken.DrainsForEver, "drain_without_jobs_returns", "did not return within"),
    Case(broken.WritesAgain, "drain_ends_every_job", "changed while no job had them"),
    Case(broken.WritesAfterShutdown, "no_slot_changes_after_shutdown", "changed while no job had"),
    Case(broken.ShutsDownOnlyOnce, "shutdown_twice_is_harmless", "shutdown raised AttributeError"),
    Case(
        broken.ShutsDownOnlyWhenUsed, "shutdown_of_an_unused_tier_returns", "did not return within"
    ),
    Case(broken.KeepsARow, "the_view_is_free_after_shutdown", "KeepsARow.kept_row"),
    Case(broken.KeepsAnArray, "the_view_is_free_after_shutdown", "KeepsAnArray.kept_array"),
    Case(broken.LeavesAThread, "no_thread_or_descriptor_is_left", "shutdown: left-behind"),
    Case(broken.LeavesItsPool, "no_thread_or_descriptor_is_left", "shutdown: idle"),
    Case(broken.LeavesADescriptor, "no_thread_or_descriptor_is_left", "(/dev/null)"),
    *(
        Case(broken.IgnoresSeals, "a_damaged_block_is_refused", words, (how,))
        for how, words in {
            Damage.FLIP: "loaded",
            Damage.TRUNCATE: "loaded",
            Damage.SWAP: "holds other bytes",
            Damage.FOREIGN: "holds other bytes",
        }.items()
    ),
    *(
        Case(broken.DoesNotCountRefusals, "a_damaged_block_is_refused", "counts 0", (how,))
        for how in Damage
    ),
    Case(broken.RefusesTheWholeJob, "a_damaged_block_is_refused", "refused with", (Damage.FLIP,)),
    Case(broken.KeepsRefusedBlocks, "a_refused_block_can_be_stored_again", "refused once"),
    Case(broken.IgnoresTheEpoch, "a_new_epoch_hides_earlier_blocks", "before begin_epoch"),
    Case(broken.KeepsUnderItsOwnEpoch, "jobs_under_way_stay_in_their_epoch", "was under way"),
    Case(
        broken.IgnoresTheFingerprint,
        "blocks_of_another_fingerprint_are_not_found",
        "stored under another fingerprint",
    ),
    Case(broken.SharesWithoutFingerprint, "another_model_finds_nothing", "a HIT for another"),
    Case(broken.WaitsInSubmit, "calls_do_not_wait", "submit_store"),
    Case(broken.HoldsTheLockDuringIO, "calls_do_not_wait", "lookup"),
    Case(broken.LoadsBehindStores, "loads_do_not_wait_behind_stores", "must not wait behind"),
    Case(broken.LoadsAndStoresInOnePool, "loads_do_not_wait_behind_stores", "after most of them"),
    Case(broken.GivesNone, "stored_blocks_come_back", "a list, an empty one if no job has ended"),
    Case(broken.GivesNoEvents, "stored_blocks_come_back", "empty one if no block was stored"),
    Case(broken.NotSetUp, "stored_blocks_come_back", "NotSetUp has no fingerprint and no rows"),
    Case(broken.NotSetUp, "shutdown_of_an_unused_tier_returns", "super().__init__(offloading_spec"),
    Case(broken.KnowsOnlyItsRequests, "calls_in_any_order_do_not_raise", "raised KeyError"),
    Case(broken.AnswersNothing, "calls_in_any_order_do_not_raise", "on_new_request answered None"),
    Case(broken.ReportsAnUndefinedFigure, "every_figure_is_defined", "['made_up']"),
]

SMALL = [
    Case(
        broken.LeaksWithoutRoom,
        "a_full_tier_reports_and_stays_within_its_capacity",
        "not reported within",
    ),
    Case(broken.KeepsMore, "a_full_tier_reports_and_stays_within_its_capacity", "at most 6"),
    Case(broken.ForgetsWhatIsUnderWay, "stores_in_flight_stay_within_the_capacity", "at most 6"),
    Case(broken.DoesNotTellWhoLeft, "events_tell_what_lookups_tell", "by its events the tier has"),
]

FAULTY = {
    "drops": (faulty(drop=0.1), "many_jobs_are_each_reported_once", "not reported within"),
    "duplicates": (faulty(duplicate=0.2), "many_jobs_are_each_reported_once", "reported twice"),
    "hangs": (faulty(hang=0.2), "drain_ends_every_job", "did not return within"),
    "unknown": (faulty(unknown_job=0.5), "many_jobs_are_each_reported_once", "never submitted"),
    "garbage": (
        faulty(get_finished_jobs__garbage=1.0),
        "stored_blocks_come_back",
        "get_finished_jobs",
    ),
    "fails": (faulty(submit_store__fail=0.5), "stored_blocks_come_back", "reported as failed"),
    "fails to load": (faulty(submit_load__fail=1.0), "loading_takes_nothing_away", "load number 1"),
    "loads a part": (faulty(submit_load__partial=1.0), "many_blocks_come_back", "blocks came back"),
    "raises in touch": (
        faulty(touch__raise=1.0),
        "calls_in_any_order_do_not_raise",
        "touch raised InjectedFault",
    ),
    "raises": (faulty(lookup__raise=0.5), "stored_blocks_come_back", "lookup raised InjectedFault"),
}


def complaint_of(kit: TierConformance, check: str, args: tuple[Any, ...] = ()) -> str:
    with pytest.raises(AssertionError) as failed:
        getattr(kit, f"test_{check}")(*args)
    return str(failed.value)


def assert_caught(
    kit: type[Kit], make: Make, check: str, words: str, args: tuple[Any, ...] = ()
) -> None:
    if words in HANGS and words in complaint_of(kit(make, IMPATIENT_S), check, args):
        return
    # Where there was little patience, a busy machine may have been late with something else.
    assert words in complaint_of(kit(make, PATIENT_S), check, args)


def name_of(case: Case) -> str:
    return "-".join([case.tier.__name__, case.check, *map(str, case.args)])


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_a_wrong_tier_is_caught(case: Case) -> None:
    assert_caught(Kit, plain(case.tier), case.check, case.words, case.args)


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_a_wrong_tier_that_is_full_is_caught(case: Case) -> None:
    assert_caught(SmallKit, small(case.tier), case.check, case.words)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_tier_is_caught(fault: str) -> None:
    make, check, words = FAULTY[fault]
    assert_caught(Kit, make, check, words)


def test_a_tier_that_survives_a_restart_passes() -> None:
    RestartKit(plain(broken.Persistent)).test_blocks_survive_a_restart()
    RestartKit(plain(broken.Persistent)).test_another_model_finds_nothing()


def test_a_tier_that_forgets_at_a_restart_is_caught() -> None:
    kit = RestartKit(plain(ExampleSecondaryTierManager))
    assert "MISS after a restart" in complaint_of(kit, "blocks_survive_a_restart")


def test_every_check_has_a_tier_that_fails_it() -> None:
    checks = {name for name in dir(TierConformance) if name.startswith("test_")}
    caught = {f"test_{case.check}" for case in PLAIN + SMALL}
    caught |= {f"test_{check}" for _, check, _ in FAULTY.values()}
    caught.add("test_blocks_survive_a_restart")
    assert checks - caught == set()


def test_every_check_says_what_it_requires() -> None:
    for name in dir(TierConformance):
        if name.startswith("test_"):
            text = getattr(TierConformance, name).__doc__
            assert text, name
            assert re.search(r"[.:] ?", text), name


def test_without_make_tier_the_remedy_is_named() -> None:
    with pytest.raises(NotImplementedError, match="def make_tier"):
        TierConformance().test_stored_blocks_come_back()


@pytest.mark.parametrize(
    ("check", "hook"),
    [
        ("a_refused_block_can_be_stored_again", "backing"),
        ("blocks_survive_a_restart", "survives_restart"),
        ("a_full_tier_reports_and_stays_within_its_capacity", "capacity_blocks"),
        ("stores_in_flight_stay_within_the_capacity", "capacity_blocks"),
        ("calls_do_not_wait", "slow_backend"),
        ("loads_do_not_wait_behind_stores", "slow_backend"),
    ],
)
def test_a_check_without_its_hook_is_skipped_and_names_it(check: str, hook: str) -> None:
    class WithoutHooks(TierConformance):
        def make_tier(self, spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
            return ExampleSecondaryTierManager(spec, view, "example")

    with pytest.raises(pytest.skip.Exception, match=hook):
        getattr(WithoutHooks(), f"test_{check}")()


@pytest.mark.parametrize("check", ["calls_do_not_wait", "loads_do_not_wait_behind_stores"])
def test_a_check_with_slow_storage_is_not_skipped(check: str) -> None:
    try:
        getattr(Kit(plain(GatedTier)), f"test_{check}")()
    except pytest.skip.Exception as skipped:
        pytest.fail(f"skipped: {skipped}")


@pytest.mark.parametrize("returned", [None, 7, ExampleSecondaryTierManager])
def test_a_make_tier_that_returns_no_tier_is_caught(returned: Any) -> None:
    words = complaint_of(Kit(lambda *_: returned), "stored_blocks_come_back")
    assert f"make_tier returned {returned!r}: return the tier" in words


def test_a_capacity_that_is_too_small_for_the_checks_is_refused() -> None:
    class TooSmallKit(Kit):
        capacity_blocks: ClassVar[int | None] = 3

    with pytest.raises(ValueError, match=r"capacity_blocks = 3: .* keeps at least 4 blocks"):
        TooSmallKit(small(ExampleSecondaryTierManager)).test_nothing_to_do_is_reported()


def test_a_job_that_needs_more_slots_than_there_are_is_refused_at_once() -> None:
    make = plain(ExampleSecondaryTierManager)
    with TierHarness(make, num_slots=4, patience_s=0.2) as harness:
        harness.store(harness.keys(4))
        with pytest.raises(ValueError, match="5 slots wanted, 0 of 4 are free"):
            harness.store(harness.keys(5))
        with pytest.raises(ValueError, match="5 slots wanted, 0 of 4 are free"):
            harness.load(harness.keys(5))
        harness.wait_for(harness.load(harness.keys(4)))


@pytest.mark.parametrize("row_bytes", [0, 100, 4097])
def test_rows_that_are_no_pages_are_refused(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"row_bytes = {row_bytes}: give a multiple of the page"):
        TierHarness(plain(ExampleSecondaryTierManager), row_bytes=row_bytes)
