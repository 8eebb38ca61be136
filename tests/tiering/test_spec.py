"""From a configuration with tiers to blocks that are stored and loaded, and a clean end."""

from __future__ import annotations

import mmap
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    Locality,
    LookupResult,
    MetricDefinition,
    MetricKind,
    OffloadingSpec,
    OffloadingStats,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from kvtier.config import (
    AttentionKind,
    ConfigError,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    TierConfig,
)
from kvtier.cpu.host_memory import NotEnoughMemory
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.factory import OffloadingSpecFactory
from kvtier.tiering.base import JobResult, SecondaryTierManager, TransferJob
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import GroupShape, TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec, settings_of, shape_of
from tests.cpu.caches import Bytes, Layout, finish

SHM = Path("/dev/shm")
HERE = __name__
LIMIT_S = 60.0
LAYOUT = Layout(pages=(96, 64), groups=({0: 96, 1: 64},), blocks_per_chunk=2, num_device_blocks=16)
EXAMPLE = {"type": "example", "simulate_async": True, "load_timeout_ms": 1000 * LIMIT_S}


FULL_GROUP = OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"))


def make_config(
    *tiers: dict[str, Any],
    engine_id: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    slots: int = 8,
    group: OffloadingGroupConfig = FULL_GROUP,
    enable_kv_cache_events: bool = False,
    **extra: Any,
) -> OffloadingConfig:
    budget = {"cpu_bytes_to_use": slots * mmap.PAGESIZE, "blocks_per_chunk": 2}
    return OffloadingConfig(
        groups=(group,),
        worker_kv_bytes_per_block=sum(LAYOUT.pages),
        engine_id=engine_id or uuid.uuid4().hex,
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(rank=rank, world_size=world_size, tp_size=world_size),
        extra_config=budget | {"secondary_tiers": list(tiers)} | extra,
        enable_kv_cache_events=enable_kv_cache_events,
    )


def make_keys(first: int, count: int) -> list[OffloadKey]:
    return [
        make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)
    ]


def region_files(config: OffloadingConfig) -> list[Path]:
    """The files of this engine, which other engines on the machine do not change."""
    return [path for path in SHM.glob("kvtier-*") if config.engine_id in header_of(path)]


def header_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(mmap.PAGESIZE).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def store(manager: TieringOffloadingManager, keys: list[OffloadKey], name: str) -> None:
    """What a request stores, without a device."""
    request = ReqContext(name)
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    assert output is not None
    manager.complete_store(output.keys_to_store, request)
    manager.on_request_finished(request)
    manager.on_schedule_end(ScheduleEndContext())


def step_until(manager: TieringOffloadingManager, condition: Callable[[], bool]) -> None:
    """Take scheduling steps until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        manager.on_schedule_end(ScheduleEndContext())
        time.sleep(0.001)


def settle(manager: TieringOffloadingManager) -> None:
    step_until(manager, lambda: not (manager.has_pending_work() or manager.is_moving_blocks()))


def answers(
    manager: TieringOffloadingManager, keys: list[OffloadKey], request: ReqContext
) -> list[LookupResult]:
    return [manager.lookup(key, request) for key in keys]


# ---------------------------------------------------------------------------------------------
# Tiers that do what they should not
# ---------------------------------------------------------------------------------------------


class Watched(SecondaryTierManager):
    """A tier that records its start and end in `lives`, and keeps nothing."""

    lives: ClassVar[list[str]] = []

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        name: str = "it",
        raises: str = "",
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.name = name
        self.primary_kv_view = primary_kv_view
        self.jobs: list[TransferJob] = []
        if raises == "start":
            raise OSError("no such device")
        if raises == "keys":
            raise ValueError("raises: no such key")
        self.raises = raises
        self.lives.append(f"{name} started")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.RETRY

    def submit_store(self, job: TransferJob) -> None:
        self.jobs.append(job)

    def submit_load(self, job: TransferJob) -> None:
        self.jobs.append(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return ()

    def drain_jobs(self) -> None:
        self.lives.append(f"{self.name} drained")
        if self.raises == "drain":
            raise OSError("cannot drain")

    def shutdown(self) -> None:
        self.lives.append(f"{self.name} shut down")

    def get_stats(self) -> OffloadingStats:
        return OffloadingStats(gauges={"watched_life": 1.0})

    @classmethod
    def build_metric_definitions(cls, tier_options: Any) -> dict[str, MetricDefinition]:
        return {"watched_life": MetricDefinition(MetricKind.GAUGE, tier_options.get("name", ""))}


class Forgetful(Watched):
    """A tier that does not call its base class, and keeps references to all arguments."""

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        self.primary_kv_view = primary_kv_view

    def drain_jobs(self) -> None:
        return

    def shutdown(self) -> None:
        return


class NeverEnds(Watched):
    may_end: ClassVar[threading.Event]

    def drain_jobs(self) -> None:
        type(self).may_end.wait(LIMIT_S)


class OwnPolicy(LRUCachePolicy):
    made: ClassVar[list[LRUCachePolicy]] = []

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.made.append(self)


@pytest.fixture(autouse=True)
def _new_lives() -> None:
    Watched.lives = []
    OwnPolicy.made = []
    NeverEnds.may_end = threading.Event()


Start = Callable[[TieringOffloadingSpec], TieringOffloadingManager]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes managers from specs, and shuts them down even if a test fails."""
    started: list[TieringOffloadingManager] = []

    def get_manager(spec: TieringOffloadingSpec) -> TieringOffloadingManager:
        started.append(spec.get_manager())
        return started[-1]

    yield get_manager
    for manager in started:
        manager.shutdown()


def watched(**keys: Any) -> dict[str, Any]:
    return {"type": "Watched", "module_path": HERE} | keys


# ---------------------------------------------------------------------------------------------
# The whole stack
# ---------------------------------------------------------------------------------------------


def test_blocks_of_all_ranks_come_back_from_a_tier(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine_id = uuid.uuid4().hex
    scheduler = TieringOffloadingSpec(make_config(EXAMPLE, engine_id=engine_id, world_size=2))
    ranks = [
        TieringOffloadingSpec(make_config(EXAMPLE, engine_id=engine_id, rank=rank, world_size=2))
        for rank in range(2)
    ]
    caches: list[list[Bytes]] = [LAYOUT.new_tensors(seed=rank) for rank in range(2)]
    stored = [[tensor[:4].copy() for tensor in tensors] for tensors in caches]
    manager = start(scheduler)
    workers = [
        spec.get_worker(LAYOUT.canonical(tensors))
        for spec, tensors in zip(ranks, caches, strict=True)
    ]

    request = ReqContext("request")
    manager.on_new_request(request)
    keys = make_keys(0, 2)
    output = manager.prepare_store(keys, request)
    assert output is not None
    source = GPULoadStoreSpec([0, 1, 2, 3], [4], [0])
    for worker in workers:
        assert worker.submit_store(1, source, output.store_spec)
        assert finish(worker, 1) == {1: True}
    manager.complete_store(keys, request)
    manager.on_request_finished(request)
    settle(manager)
    for first in (100, 104):
        store(manager, make_keys(first, 4), f"evicting {first}")
        settle(manager)

    again = ReqContext("again")
    manager.on_new_request(again)
    assert answers(manager, keys, again) == [LookupResult.HIT_PENDING] * 2
    step_until(manager, lambda: answers(manager, keys, again) == [LookupResult.HIT] * 2)
    target = GPULoadStoreSpec([9, 7, 12, 5], [4], [0])
    load_spec = manager.prepare_load(keys, again)
    for worker in workers:
        assert worker.submit_load(2, load_spec, target)
        assert finish(worker, 2) == {2: True}
    manager.complete_load(keys, again)
    for tensors, originals in zip(caches, stored, strict=True):
        for tensor, original in zip(tensors, originals, strict=True):
            np.testing.assert_array_equal(tensor[[9, 7, 12, 5]], original)

    manager.on_request_finished(again)
    for worker in workers:
        worker.shutdown()
    manager.shutdown()
    assert region_files(scheduler.config) == []
    assert caplog.messages == []


def test_it_works_without_tiers(start: Start) -> None:
    spec = TieringOffloadingSpec(make_config())
    manager = start(spec)
    keys = make_keys(0, 4)
    store(manager, keys, "request")
    assert answers(manager, keys, ReqContext("again")) == [LookupResult.HIT] * 4
    assert not manager.has_pending_work()


def test_each_half_is_made_once_and_only_when_asked_for(start: Start) -> None:
    spec = TieringOffloadingSpec(make_config(watched()))
    assert region_files(spec.config) == []
    assert Watched.lives == []
    manager = start(spec)
    assert spec.get_manager() is manager
    assert Watched.lives == ["it started"]
    (path,) = region_files(spec.config)
    assert path.stat().st_size == 10 * mmap.PAGESIZE  # 8 rows, a header, and notices
    manager.shutdown()
    assert region_files(spec.config) == []
    assert Watched.lives == ["it started", "it drained", "it shut down"]


def test_a_rank_starts_no_tier() -> None:
    spec = TieringOffloadingSpec(make_config({"type": "Unknown", "module_path": "to_this_machine"}))
    spec.get_worker(LAYOUT.canonical(LAYOUT.new_tensors(1))).shutdown()


def test_tiers_are_in_the_users_order_and_see_the_slots(start: Start) -> None:
    spec = TieringOffloadingSpec(make_config(watched(name="a"), EXAMPLE, watched(name="b")))
    manager = start(spec)
    assert [tier.tier_type for tier in manager.secondary_tiers] == ["Watched", "example", "Watched"]
    for tier in manager.secondary_tiers:
        assert tier.offloading_spec is spec
        assert (tier.rows.num_rows, tier.rows.row_bytes) == (8, mmap.PAGESIZE)
    first, _, last = manager.secondary_tiers
    first.rows[3][:5] = b"hello"
    assert bytes(last.rows[3][:5]) == b"hello"
    manager.shutdown()
    with pytest.raises(ValueError, match="released"):
        first.rows[3]


def test_it_is_found_by_the_tiers_in_the_configuration() -> None:
    spec = OffloadingSpecFactory.create_spec(make_config(EXAMPLE))
    assert type(spec) is TieringOffloadingSpec


# ---------------------------------------------------------------------------------------------
# The user's settings
# ---------------------------------------------------------------------------------------------


def test_what_the_user_does_not_set_is_as_the_orchestrator_has_it() -> None:
    assert settings_of(TierConfig("x")) == TierSettings()
    (tier,) = make_config(watched()).options.secondary_tiers
    assert settings_of(tier) == TierSettings()


def test_what_the_user_sets() -> None:
    keys = {"lookup_timeout_ms": 20, "load_timeout_ms": 500, "store_timeout_ms": 1500}
    tier = TierConfig.from_entry(
        watched(max_pinned_share=0.5, enable_kv_events=True, **keys), position=1
    )
    assert settings_of(tier) == TierSettings(
        lookup_timeout_s=0.02,
        load_timeout_s=0.5,
        store_timeout_s=1.5,
        max_pinned_share=0.5,
        enable_kv_events=True,
    )


def test_each_tier_has_its_own_settings(start: Start) -> None:
    """The first one may hold all slots, the second a quarter of them."""
    spec = TieringOffloadingSpec(make_config(watched(max_pinned_share=1), watched(), slots=200))
    manager = start(spec)
    store(manager, make_keys(0, 100), "request")
    stored = [[len(job.keys) for job in tier.jobs] for tier in manager.secondary_tiers]  # type: ignore[attr-defined]
    assert stored == [[100], [50]]


def test_the_primary_tiers_settings_are_the_users(start: Start) -> None:
    config = make_config(
        EXAMPLE,
        enable_kv_cache_events=True,
        store_threshold=2,
        eviction_policy="OwnPolicy",
        cache_policy_module_path=HERE,
    )
    manager = start(TieringOffloadingSpec(config))
    assert len(OwnPolicy.made) == 1
    keys = make_keys(0, 1)
    stored = []
    for name in ("first", "second"):
        request = ReqContext(name)
        manager.on_new_request(request)
        manager.lookup(keys[0], request)
        output = manager.prepare_store(keys, request)
        assert output is not None
        stored.append(len(output.keys_to_store))
        manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
    assert stored == [0, 1]  # the threshold
    assert [event.keys for event in manager.take_events()] == [keys]


@pytest.mark.parametrize("window", [None, 33])
def test_a_windowed_group_is_searched_beyond_a_miss(start: Start, window: int | None) -> None:
    """Its blocks are asked for from the end of the prompt: an earlier window may still be there."""
    kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW
    group = OffloadingGroupConfig(16, ("a", "b"), kind=kind, window_tokens=window)
    manager = start(TieringOffloadingSpec(make_config(EXAMPLE, group=group)))
    _, middle, tail = make_keys(0, 3)
    for first, count in ((0, 2), (100, 4), (104, 4)):
        store(manager, make_keys(first, count), f"request {first}")
        settle(manager)
    request = ReqContext("again")
    manager.on_new_request(request)
    pending = LookupResult.MISS if window is None else LookupResult.HIT_PENDING
    assert answers(manager, [tail, middle], request) == [LookupResult.MISS, pending]


def test_a_lookup_has_as_long_as_the_user_says(start: Start) -> None:
    spec = TieringOffloadingSpec(make_config(watched(lookup_timeout_ms=1)))
    manager = start(spec)
    request = ReqContext("request")
    manager.on_new_request(request)
    (key,) = make_keys(0, 1)
    assert manager.lookup(key, request) is LookupResult.RETRY
    step_until(manager, lambda: manager.lookup(key, request) is LookupResult.MISS)


@pytest.mark.parametrize("scope", ["all", "primary"])
def test_a_reset_reaches_as_far_as_the_user_says(start: Start, scope: str) -> None:
    spec = TieringOffloadingSpec(make_config(EXAMPLE, watched(), reset_scope=scope))
    manager = start(spec)
    before = spec.config.fingerprint()
    assert {tier.fingerprint for tier in manager.secondary_tiers} == {before}
    manager.reset_cache()
    after = {tier.fingerprint for tier in manager.secondary_tiers}
    assert len(after) == 1
    assert (after == {before}) == (scope == "primary")
    manager.reset_cache()
    assert ({tier.fingerprint for tier in manager.secondary_tiers} == after) == (scope == "primary")


def test_the_prefill_rate_is_the_users(start: Start) -> None:
    manager = start(TieringOffloadingSpec(make_config(prefill_tokens_per_s=1234)))
    assert manager.get_stats().gauges["kvtier_tiering_prefill_tokens_per_s"] == 1234


@pytest.mark.parametrize("enabled", [True, False])
def test_events_of_a_tier(start: Start, enabled: bool) -> None:
    entry = EXAMPLE | {"enable_kv_events": enabled, "locality": "REMOTE"}
    spec = TieringOffloadingSpec(make_config(entry, enable_kv_cache_events=True))
    manager = start(spec)
    keys = make_keys(0, 2)
    store(manager, keys, "request")
    settle(manager)
    localities = [(event.locality, event.keys) for event in manager.take_events()]
    assert ((Locality.REMOTE, keys) in localities) == enabled


def test_the_end_comes_in_the_time_the_user_says(caplog: pytest.LogCaptureFixture) -> None:
    endless = {"type": "NeverEnds", "module_path": HERE}
    spec = TieringOffloadingSpec(make_config(endless, shutdown_timeout_ms=10))
    spec.get_manager().shutdown()  # not in the minute that the tier takes
    assert not NeverEnds.may_end.is_set()
    assert region_files(spec.config) == []
    (message,) = caplog.messages
    assert message.startswith("Tier 'NeverEnds' did not end within 0.01 s")
    NeverEnds.may_end.set()


FULL = AttentionKind.FULL
SLIDING = AttentionKind.SLIDING_WINDOW
CHUNKED = AttentionKind.CHUNKED_LOCAL
STATE = AttentionKind.STATE_SPACE


@pytest.mark.parametrize(
    ("kind", "window_tokens", "blocks_per_chunk", "shape"),
    [
        (FULL, None, 1, GroupShape(16, None)),
        (FULL, None, 4, GroupShape(64, None)),
        (STATE, None, 4, GroupShape(64, 1)),
        (SLIDING, 1, 1, GroupShape(16, 1)),
        (SLIDING, 17, 1, GroupShape(16, 1)),
        (SLIDING, 18, 1, GroupShape(16, 2)),
        (SLIDING, 128, 1, GroupShape(16, 8)),
        (SLIDING, 130, 4, GroupShape(64, 3)),
        (CHUNKED, 16, 1, GroupShape(16, 1)),
        (CHUNKED, 17, 1, GroupShape(16, 2)),
        (CHUNKED, 8192, 2, GroupShape(32, 256)),
    ],
)
def test_the_shape_of_a_group(
    kind: AttentionKind, window_tokens: int | None, blocks_per_chunk: int, shape: GroupShape
) -> None:
    group = OffloadingGroupConfig(16, ("layer",), kind=kind, window_tokens=window_tokens)
    assert shape_of(group, blocks_per_chunk) == shape


# ---------------------------------------------------------------------------------------------
# A start that fails
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "reason"),
    [
        (watched(raises="keys"), ConfigError, r"secondary_tiers\[2\]\.raises: .* no such key"),
        (watched(raises="start"), TierStartError, r"secondary_tiers\[2\]: .* no such device"),
        ({"type": "Forgetful", "module_path": HERE}, TierStartError, r"\[2\]: .* super\(\)"),
    ],
)
def test_a_tier_that_fails_ends_those_that_have_started(
    bad: dict[str, Any], error: type[Exception], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = TieringOffloadingSpec(make_config(EXAMPLE, watched(name="b"), bad, watched(name="d")))
    threads = set(threading.enumerate())
    for _ in range(2):  # the second time as the first
        Watched.lives.clear()
        with pytest.raises(error, match=reason) as kept:
            spec.get_manager()
        assert Watched.lives == ["b started", "b drained", "b shut down"]
        assert region_files(spec.config) == []
        assert set(threading.enumerate()) <= threads
        assert kept.value.__traceback__ is not None
    assert caplog.messages == []


def test_wrong_keys_are_told_before_memory_is_reserved() -> None:
    """Of all tiers at once; there is no such memory, and nothing is said about that."""
    tiers = ({"type": "exmaple"}, watched(), watched(nmae="c"))
    spec = TieringOffloadingSpec(make_config(*tiers, cpu_bytes_to_use="1000TiB"))
    with pytest.raises(ConfigError) as refused:
        spec.get_manager()
    assert [problem.key for problem in refused.value.problems] == [
        "secondary_tiers[0].type",
        "secondary_tiers[2].nmae",
    ]
    assert Watched.lives == []


def test_a_module_path_without_effect_is_warned_of_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(TieringOffloadingSpec(make_config(EXAMPLE | {"module_path": "not_here_at_all"})))
    (message,) = caplog.messages
    assert message.startswith('secondary_tiers[0].module_path = "not_here_at_all" has no effect')


def test_a_start_that_fails_is_not_held_up_by_a_tier(caplog: pytest.LogCaptureFixture) -> None:
    endless = {"type": "NeverEnds", "module_path": HERE}
    tiers = (endless, watched(raises="drain"), watched(raises="start"))
    spec = TieringOffloadingSpec(make_config(*tiers, shutdown_timeout_ms=1000))
    with pytest.raises(TierStartError, match="no such device"):
        spec.get_manager()
    assert region_files(spec.config) == []
    assert "it shut down" in Watched.lives
    assert [message.split(" did not")[0] for message in caplog.messages] == [
        "Tier 'Watched': drain_jobs raised",
        "Tier 'NeverEnds'",
    ]
    NeverEnds.may_end.set()


def test_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    spec = TieringOffloadingSpec(make_config(watched(), cpu_bytes_to_use="1000TiB"))
    with pytest.raises(NotEnoughMemory, match="lower cpu_bytes_to_use"):
        spec.get_manager()
    assert region_files(spec.config) == []
    assert Watched.lives == []
    assert caplog.messages == []


# ---------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------


def test_every_figure_is_defined(start: Start) -> None:
    spec = TieringOffloadingSpec(make_config(EXAMPLE, watched(name="second")))
    definitions = TieringOffloadingSpec.build_metric_definitions(spec.config.extra_config)
    manager = start(spec)
    kinds: dict[str, MetricKind] = {}
    for number in range(3):
        store(manager, make_keys(2 * number, 2), f"request {number}")
        stats = manager.get_stats()
        kinds |= dict.fromkeys(stats.counters, MetricKind.COUNTER)
        kinds |= dict.fromkeys(stats.gauges, MetricKind.GAUGE)
        kinds |= dict.fromkeys(stats.histograms, MetricKind.HISTOGRAM)
    assert {
        'watched_life{tier="1:Watched"}',
        'kvtier_tier_pinned_blocks{tier="1:Watched"}',
    } <= kinds.keys()
    defined = {
        series: definition.kind
        for name, definition in definitions.items()
        for series in definition.series(name)
    }
    assert kinds.items() <= defined.items()
    assert definitions["watched_life"].documentation == "second"


def test_figures_are_defined_before_there_is_an_engine() -> None:
    without_tiers = TieringOffloadingSpec.build_metric_definitions({})
    assert "kvtier_cpu_slots" in without_tiers
    extra = {"secondary_tiers": [EXAMPLE, EXAMPLE]}
    with_tiers = TieringOffloadingSpec.build_metric_definitions(extra)
    assert with_tiers["kvtier_tier_blocks"].labels == (
        ("tier", ("0:example", "1:example")),
        ("direction", ("store", "load")),
    )
    assert without_tiers.keys() < with_tiers.keys()
    wrong = [{"type": "exampel"}, {"type": "example", "max_block": 5}]
    with pytest.raises(ConfigError) as refused:
        TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": wrong})
    assert [problem.key for problem in refused.value.problems] == [
        "secondary_tiers[0].type",
        "secondary_tiers[1].max_block",
    ]


def test_a_device_that_is_none_is_refused_as_without_tiers() -> None:
    larger = Layout(pages=(96, 65), groups=({0: 96, 1: 65},))
    caches: CanonicalKVCaches = larger.canonical(larger.new_tensors(1))
    spec = TieringOffloadingSpec(make_config(EXAMPLE))
    with pytest.raises(ValueError, match="worker_kv_bytes_per_block"):
        spec.get_worker(caches)
    assert region_files(spec.config) == []


def test_the_engines_configuration_is_for_tiers_and_stays_on_the_schedulers_side() -> None:
    config = make_config({"type": "example"})
    spec = TieringOffloadingSpec(config)
    assert spec.engine is None
    fingerprint = config.fingerprint()
    spec.engine = threading.Lock()  # cannot be pickled, as little as much of an engine can
    assert pickle.loads(pickle.dumps(spec)).engine is None
    manager = spec.get_manager()
    try:
        (tier,) = manager.secondary_tiers
        assert tier.offloading_spec.engine is spec.engine
        assert tier.fingerprint == fingerprint
    finally:
        manager.shutdown()
