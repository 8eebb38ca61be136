"""Several engines: the figures of one engine alone, of separate replays and of an independent
model, where these must agree; engines that die; routers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from kvtier.config.options import WritePolicyName
from kvtier.replay.copies import FleetLoad
from kvtier.replay.engine import Counting, TimedEngine
from kvtier.replay.figures import Figures
from kvtier.replay.fleet import Fleet
from kvtier.replay.pool import Pool
from kvtier.replay.settings import (
    EngineSettings,
    Failure,
    FleetSettings,
    ReplaySettings,
    RouterName,
    SettingError,
    Sharing,
)
from kvtier.replay.trace import Request
from tests.replay.oracle import BLOCK_TOKENS, Lru, Oracle, settings_for, some_requests
from tests.trace_replay import key_of

ENGINE = EngineSettings(
    prefill_tokens_per_s=10_000.0, decode_step_s=0.01, step_tokens=2048, most_running=4
)


def fleet_settings(
    num_engines: int, host_blocks: int, *tier_blocks: int, timed: bool = False, **fleet: Any
) -> ReplaySettings:
    """Sizes in blocks. Host memory is fast."""
    chosen = settings_for(host_blocks, *tier_blocks, is_timed=timed, engine=ENGINE)
    host = replace(chosen.host, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    return replace(chosen, host=host, fleet=FleetSettings(num_engines=num_engines, **fleet))


def shared(
    settings: ReplaySettings, sharing: Sharing = Sharing.LENT, **changes: Any
) -> ReplaySettings:
    """The same with the first tier shared."""
    given = {"link_bytes_per_s": 1e6, "replicas": 1} | changes
    first, *others = settings.tiers
    return replace(settings, tiers=(replace(first, sharing=sharing, **given), *others))


def served(
    requests: Iterable[Request], settings: ReplaySettings, **load: Any
) -> tuple[Fleet, Figures]:
    fleet = Fleet(settings, BLOCK_TOKENS)
    for _ in fleet.serve(FleetLoad(requests, **load)):
        pass
    return fleet, fleet.end()


def alone(requests: Iterable[Request], settings: ReplaySettings) -> Figures:
    chosen = replace(settings, fleet=None)
    run = (TimedEngine if settings.is_timed else Counting)(chosen, BLOCK_TOKENS)
    for _ in run.serve(requests):
        pass
    return run.end()


def document(figures: Figures) -> dict[str, Any]:
    """Everything but what only fleets have."""
    return figures.document() | {"fleet": None}


# --- what must agree ---------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("tier_blocks", [(), (80,), (60, 200)])
@pytest.mark.parametrize("gpu_blocks", [None, 12])
@pytest.mark.parametrize("router", RouterName)
def test_one_engine_has_the_figures_of_an_engine_alone(
    timed: bool, tier_blocks: tuple[int, ...], gpu_blocks: int | None, router: RouterName
) -> None:
    requests = some_requests(11, 150, longest=9)
    chosen = fleet_settings(1, 40, *tier_blocks, timed=timed, router=router)
    chosen = replace(
        chosen,
        gpu_bytes=None if gpu_blocks is None else gpu_blocks * BLOCK_TOKENS,
        speed_up=4.0,
    )
    assert document(served(requests, chosen)[1]) == document(alone(requests, chosen))


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("policy", list(WritePolicyName))
def test_a_server_with_one_engine_is_a_tier_of_its_own(
    timed: bool, policy: WritePolicyName
) -> None:
    requests = some_requests(12, 300, longest=9)
    chosen = fleet_settings(1, 40, 150, timed=timed)
    tier = replace(chosen.tiers[0], latency_s=0.002, write_policy=policy)
    chosen = replace(chosen, tiers=(tier,), speed_up=5.0)
    expected = alone(requests, chosen)
    fast = shared(chosen, Sharing.SERVER, link_bytes_per_s=1e15)
    _, figures = served(requests, fast)
    assert document(figures) == document(expected)
    assert figures.places[1].hit_blocks > 0


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("tier_blocks", [(), (80,)])
@pytest.mark.parametrize("router", RouterName)
def test_engines_that_share_nothing_are_separate_replays(
    timed: bool, tier_blocks: tuple[int, ...], router: RouterName
) -> None:
    requests = some_requests(13, 300, longest=9)
    chosen = replace(fleet_settings(4, 40, *tier_blocks, timed=timed, router=router), speed_up=6.0)
    fleet, total = served(requests, chosen)
    assert sorted(set(fleet.routed)) == [0, 1, 2, 3]
    for number, figures in enumerate(fleet.figures_of_engines()):
        own = [r for r, n in zip(requests, fleet.routed, strict=True) if n == number]
        expected = alone(own, chosen)
        assert [place.document(1, 1) for place in figures.places] == [
            place.document(1, 1) for place in expected.places
        ]
        if timed:
            assert figures.timing is not None
            assert expected.timing is not None
            times = figures.timing.first_token_s
            assert times == pytest.approx(expected.timing.first_token_s)
    assert total.num_requests == 300
    places = [figures.places[0] for figures in fleet.figures_of_engines()]
    assert total.places[0].hit_blocks == sum(place.hit_blocks for place in places)
    assert total.places[0].capacity_blocks == 160


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("router", [RouterName.ROUND_ROBIN, RouterName.STICKY])
def test_a_shared_tier_has_the_hits_of_an_independent_model(
    seed: int, sharing: Sharing, router: RouterName
) -> None:
    """Each engine has a cache of its own over one that all write to."""
    requests = some_requests(seed, 400, longest=10)
    num_engines, room = 3, 60
    per_engine = room // num_engines if sharing is Sharing.LENT else room
    chosen = shared(fleet_settings(num_engines, 40, per_engine, router=router), sharing)
    fleet, figures = served(requests, chosen)
    below = Lru(room)
    oracles = [Oracle(40, room) for _ in range(num_engines)]
    for oracle in oracles:
        oracle.tier = below
    in_host = in_tier = 0
    for request, number in zip(requests, fleet.routed, strict=True):
        hits = oracles[number].serve(request.keys)
        in_host, in_tier = in_host + hits[0], in_tier + hits[1]
    host, tier = figures.places
    assert (host.hit_blocks, tier.hit_blocks) == (in_host, in_tier)
    assert tier.written_blocks == below.num_written
    assert tier.capacity_blocks == room
    assert in_tier > 0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_byte_appears_or_disappears(replicas: int) -> None:
    requests = some_requests(14, 400, longest=9)
    chosen = replace(fleet_settings(4, 30, 60, timed=True), speed_up=3.0)
    router = RouterName.ROUND_ROBIN
    assert chosen.fleet is not None
    chosen = replace(chosen, fleet=replace(chosen.fleet, router=router))
    fleet, figures = served(requests, shared(chosen, replicas=replicas))
    pool, tier = fleet.pools["tier0"], figures.places[1]
    traffic, ports = pool.traffic, pool.ports
    assert tier.capacity_blocks == 4 * 60 // replicas
    assert traffic.read_blocks == tier.read_blocks == figures.places[0].promoted_blocks > 0
    sent, received = (
        sum(getattr(port, way).num_bytes for port in ports) for way in ("outgoing", "incoming")
    )
    assert sent == received
    assert sum(port.reads.num_bytes for port in ports) == tier.read_blocks * BLOCK_TOKENS
    written = sum(port.writes.num_bytes for port in ports)
    assert written == replicas * tier.written_blocks * BLOCK_TOKENS
    assert 0 < traffic.local_blocks < traffic.read_blocks
    assert received < written + tier.read_blocks * BLOCK_TOKENS
    resident = tier.written_blocks - tier.evicted_blocks
    assert pool.num_copies() == replicas * resident
    in_hosts = sum(len(engine.caches.host.resident_keys()) for engine in fleet.engines)
    assert figures.fleet is not None
    assert figures.fleet.kept_blocks == in_hosts + replicas * resident


def test_a_server_carries_what_engines_read_and_write() -> None:
    chosen = shared(fleet_settings(3, 30, 200, timed=True), Sharing.SERVER)
    fleet, figures = served(some_requests(15, 300, longest=9), chosen)
    ports, tier = fleet.pools["tier0"].ports, figures.places[1]
    assert sum(port.incoming.num_bytes for port in ports) == tier.read_blocks * BLOCK_TOKENS > 0
    assert sum(port.outgoing.num_bytes for port in ports) == tier.written_blocks * BLOCK_TOKENS
    assert fleet.pools["tier0"].num_copies() == tier.written_blocks - tier.evicted_blocks


def test_nothing_differs_between_two_runs() -> None:
    requests = some_requests(16, 300, longest=8)
    chosen = shared(
        fleet_settings(
            5, 20, 30, timed=True, router=RouterName.PREFIX, failures=(Failure(2, 30.0),)
        ),
        replicas=2,
    )
    first, second = (served(requests, chosen)[1].document() for _ in range(2))
    assert first == second


def test_a_block_that_one_engine_has_stored_is_a_hit_for_all() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(50, 1, 2, 3), prompt(100, 1, 2, 3), prompt(150, 1, 2, 3)]
    chosen = fleet_settings(2, 40, 40, router=RouterName.ROUND_ROBIN)
    assert served(requests, replace(chosen, tiers=()))[1].hit_blocks == 6
    fleet, figures = served(requests, shared(chosen))
    assert figures.hit_blocks == 9
    assert figures.places[1].hit_blocks == 3
    assert figures.places[1].written_blocks == 3
    assert fleet.pools["tier0"].traffic.foreign_blocks == 3


# --- links -------------------------------------------------------------------------------------


def prompt(at: float, *blocks: int, more: int = 8, output: int = 1) -> Request:
    tokens = len(blocks) * BLOCK_TOKENS + more
    return Request(at, tokens, output, [key_of(block) for block in blocks])


def pool_of(sharing: Sharing, num_engines: int = 3, **changes: Any) -> Pool:
    """One byte per token, blocks of 512 bytes."""
    chosen = shared(fleet_settings(num_engines, 10, 30), sharing, **changes)
    return Pool(chosen.tiers[0], num_engines, BLOCK_TOKENS)


def test_a_job_ends_when_the_slowest_link_has_carried_its_part() -> None:
    pool = pool_of(Sharing.SERVER, link_bytes_per_s=1024.0, read_bytes_per_s=2048.0, latency_s=0.5)
    nobody = pool.load(0, [])
    assert pool.times(0, 10.0, 4, nobody, is_load=True) == (12.5, 2.5)
    # The server was busy until 11.5, the link of engine 1 is free: 10.5 + 1 s of waiting + 2 s.
    assert pool.times(1, 10.0, 4, nobody, is_load=True) == (12.5, 2.5)
    # Engine 0 waits for its own link: that is no time of the job.
    assert pool.times(0, 10.0, 4, nobody, is_load=True) == (14.5, 2.5)


def test_waiting_for_other_engines_is_a_part_of_the_time() -> None:
    pool = pool_of(Sharing.SERVER, link_bytes_per_s=1e9, read_bytes_per_s=512.0, latency_s=0.0)
    nobody = pool.load(0, [])
    assert pool.times(0, 0.0, 2, nobody, is_load=True)[0] == 2.0
    assert pool.times(1, 0.0, 2, nobody, is_load=True) == (4.0, 4.0)
    assert pool.times(1, 0.0, 1, nobody, is_load=True) == (5.0, 1.0)


def test_lent_memory_is_read_over_both_links_unless_it_is_the_readers_own() -> None:
    pool = pool_of(Sharing.LENT, link_bytes_per_s=512.0, read_bytes_per_s=1e9, latency_s=0.0)
    pool.store(0, [0, 1, 2, 3])  # in the memory of engines 0, 1, 2 and 0
    lenders = pool.load(1, [0, 1, 2, 3])
    assert lenders == {0: 2, 1: 1, 2: 1}
    assert pool.times(1, 0.0, 4, lenders, is_load=True)[0] == 3.0
    assert [port.incoming.num_bytes for port in pool.ports] == [0, 3 * 512, 0]
    assert [port.outgoing.num_bytes for port in pool.ports] == [2 * 512, 0, 512]
    assert (pool.traffic.local_blocks, pool.traffic.foreign_blocks) == (1, 4)


def test_a_link_too_slow_to_be_worth_it_is_declined() -> None:
    requests = some_requests(17, 400, longest=8)
    chosen = fleet_settings(3, 30, 200, timed=True, router=RouterName.ROUND_ROBIN)
    _, quick = served(requests, shared(chosen))
    _, slow = served(requests, shared(chosen, link_bytes_per_s=600.0))
    tier = slow.places[1]
    assert tier.declined_blocks > tier.read_blocks
    assert quick.places[1].hit_blocks > 2 * tier.hit_blocks
    assert slow.timing is not None
    assert len(slow.timing.first_token_s) == 400


# --- engines die -------------------------------------------------------------------------------


def filled(num_engines: int, replicas: int, policy: str = "lru") -> Fleet:
    """A fleet without time, whose pool is full. Each engine lends 24 blocks."""
    chosen = shared(fleet_settings(num_engines, 12, 24), replicas=replicas, policy=policy)
    requests = [prompt(float(n), *range(4 * n, 4 * n + 4)) for n in range(12 * num_engines)]
    fleet, _ = served(requests, chosen)
    (pool,) = fleet.pools.values()
    assert len(pool.table.resident_keys()) == 24 * num_engines // replicas
    return fleet


@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
@pytest.mark.parametrize(
    ("num_engines", "replicas", "dead", "num_lost"),
    [
        (4, 1, [2], 24),
        (4, 1, [2, 0], 48),
        (4, 2, [2], 0),
        (4, 2, [2, 3], 24),  # every other pair of copies is in the memory of 2 and 3
        (4, 2, [1, 2], 0),  # and the others in that of 0 and 1
        (3, 3, [0, 1], 0),
        (3, 2, [1], 0),
    ],
)
def test_a_dead_engine_takes_exactly_its_share_with_it(
    num_engines: int, replicas: int, dead: Sequence[int], num_lost: int, policy: str
) -> None:
    (pool,) = filled(num_engines, replicas, policy).pools.values()
    before = len(pool.table.resident_keys())
    for engine in dead:
        pool.lose(engine)
    assert pool.traffic.lost_blocks == num_lost
    assert len(pool.table.resident_keys()) == before - num_lost
    slots = pool.table.slots
    assert len(slots.held) == num_lost  # no room while all lenders of a slot are dead
    for engine in dead:
        pool.revive(engine)
    assert not slots.held
    assert slots.num_free() == num_lost


def test_lost_room_cannot_be_used_until_the_engine_is_back() -> None:
    fleet = filled(3, 1)
    (pool,) = fleet.pools.values()
    pool.lose(1)
    for n in range(100, 120):
        fleet.counting[0].serve_one(f"later {n}", prompt(0.0, *range(4 * n, 4 * n + 4)))
    assert len(pool.table.resident_keys()) == 48
    assert pool.num_copies() == 48
    pool.revive(1)
    for n in range(120, 150):
        fleet.counting[0].serve_one(f"last {n}", prompt(0.0, *range(4 * n, 4 * n + 4)))
    assert len(pool.table.resident_keys()) == 72


@pytest.mark.parametrize("timed", [True, False])
def test_requests_of_a_dead_engine_go_elsewhere_and_it_comes_back_cold(timed: bool) -> None:
    # Engine 1 dies at 50 s with a long answer under way, and is back at 70 s.
    requests = [prompt(float(n), 7, 8, output=3000 if n == 49 else 1) for n in range(101)]
    chosen = fleet_settings(
        2,
        40,
        timed=timed,
        router=RouterName.ROUND_ROBIN,
        failures=(Failure(1, 50.0),),
        restart_s=20.0,
    )
    fleet, figures = served(requests, chosen)
    assert fleet.routed[:50] == [0, 1] * 25
    # What arrives in the moment of a death or of a return comes after it.
    assert set(fleet.routed[50:70]) == {0}
    assert fleet.routed[70:] in ([0, 1] * 15 + [0], [1, 0] * 15 + [1])
    assert figures.fleet is not None
    if timed:
        assert figures.fleet.num_rerouted == 1
        assert figures.timing is not None
        assert len(figures.timing.first_token_s) == 101
        assert figures.num_requests == 102
    # Cold three times: both engines at first, and engine 1 again.
    assert figures.num_references - figures.hit_blocks == 3 * 2


def test_the_first_token_of_a_lost_request_counts_from_its_arrival() -> None:
    # Both prompts take 2 s to compute. Engine 0 dies after one second and comes back too late.
    requests = [
        prompt(0.0, *range(40), more=0),
        prompt(0.5, *range(100, 140), more=0),
        prompt(2.0, 1),
    ]
    engine = replace(ENGINE, step_tokens=40 * BLOCK_TOKENS, prefill_tokens_per_s=10_240.0)
    chosen = fleet_settings(
        2, 90, timed=True, router=RouterName.ROUND_ROBIN, failures=(Failure(0, 50.0),)
    )
    _, figures = served(requests, replace(chosen, engine=engine))
    assert figures.timing is not None
    second, first, _ = figures.timing.first_token_s  # all on engine 1
    assert second == pytest.approx(2.01)  # from 0.5 to 2.51
    assert first == pytest.approx(2.51 + 2.01)  # then the one that was lost


def test_a_load_from_a_dying_engine_is_computed_instead() -> None:
    # Engine 1 dies while engine 2 reads from its memory, at 4 blocks per second.
    requests = [prompt(0.0, *range(12)), prompt(1e-3, 90), prompt(100.0, *range(12), more=8)]
    requests.append(prompt(202.0, 91))
    chosen = shared(
        fleet_settings(
            3, 40, 40, timed=True, router=RouterName.ROUND_ROBIN, failures=(Failure(1, 50.0),)
        ),
        link_bytes_per_s=2048.0,
    )
    slow = replace(ENGINE, prefill_tokens_per_s=100.0)
    assert chosen.fleet is not None
    spared = replace(chosen, fleet=replace(chosen.fleet, failures=()))
    _, whole = served(requests, replace(spared, engine=slow))
    fleet, figures = served(requests, replace(chosen, engine=slow))
    (pool,) = fleet.pools.values()
    assert figures.timing is not None
    assert len(figures.timing.first_token_s) == 4
    assert pool.traffic.lost_blocks == 4
    # Of the eight blocks that are loaded, the memory of engine 1 has three.
    assert (figures.places[1].read_blocks, whole.places[1].read_blocks) == (5, 8)
    assert figures.places[1].hit_blocks < whole.places[1].hit_blocks
    assert not pool.doomed
    assert pool.table.slots.num_pinned == pool.table.slots.num_writing == 0


@pytest.mark.parametrize("seed", range(16))
def test_nobody_waits_for_ever_whoever_dies(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    num_engines = rng.randint(2, 6)
    failures = tuple(
        Failure(engine, rng.uniform(0, 100)) for engine in range(rng.randint(1, num_engines - 1))
    )
    chosen = shared(
        fleet_settings(
            num_engines,
            rng.choice([3, 10, 40]),
            rng.choice([2, 10, 60]),
            rng.choice([20, 100]),
            timed=True,
            router=rng.choice(list(RouterName)),
            failures=failures,
            restart_s=rng.choice([0.0, 1.0, 60.0]),
        ),
        rng.choice([Sharing.LENT, Sharing.LENT, Sharing.SERVER]),
        link_bytes_per_s=rng.choice([200.0, 5e3, 1e6]),
        policy=rng.choice(["lru", "arc", "density"]),
        write_policy=rng.choice(list(WritePolicyName)),
    )
    if chosen.tiers[0].sharing is Sharing.LENT:
        chosen = shared(
            chosen,
            replicas=rng.randint(1, min(2, num_engines)),
            link_bytes_per_s=chosen.tiers[0].link_bytes_per_s,
        )
    requests = some_requests(seed, 200, longest=rng.choice([5, 12, 30]))
    fleet, figures = served(requests, replace(chosen, speed_up=rng.choice([0.2, 1.0, 5.0])))
    assert figures.timing is not None
    assert len(figures.timing.first_token_s) == 200
    assert figures.fleet is not None
    assert 200 <= figures.num_requests <= 200 + figures.fleet.num_rerouted
    (pool,) = fleet.pools.values()
    slots = pool.table.slots
    pool.advance(1e9)  # nobody waits for jobs that are overdue
    assert slots.num_pinned == slots.num_writing == 0
    assert not pool.doomed
    assert slots.num_evictable + slots.num_free() + len(slots.held) == slots.num_blocks
    assert pool.num_copies() >= len(pool.table.resident_keys())
    assert all(engine.num_pending_tokens == 0 for engine in fleet.engines)


def test_all_engines_cannot_die() -> None:
    chosen = fleet_settings(2, 10, failures=(Failure(0, 10.0), Failure(1, 90.0)))
    with pytest.raises(SettingError, match="nobody would be left"):
        chosen.check(BLOCK_TOKENS)


def test_the_dead_do_not_die() -> None:
    chosen = fleet_settings(2, 10, failures=(Failure(0, 10.0), Failure(0, 11.0)))
    with pytest.raises(SettingError, match="before it is back"):
        served(some_requests(1, 50, longest=5), chosen)


def test_a_fleet_that_is_ended_early_has_figures() -> None:
    chosen = shared(fleet_settings(3, 30, 60, timed=True))
    fleet = Fleet(chosen, BLOCK_TOKENS)
    for _ in islice(fleet.serve(FleetLoad(some_requests(18, 300, longest=8))), 150):
        pass
    figures = fleet.end()
    assert 0 < figures.num_requests < 300
    assert figures.document()["timing"]["virtual_seconds"] > 0


# --- routers -----------------------------------------------------------------------------------


def test_sticky_keeps_a_conversation_on_its_engine() -> None:
    turns = [(1, 2), (3, 4), (1, 2, 5), (3, 4, 6), (1, 2, 5, 7), (8, 9), (1, 2, 10)]
    requests = [prompt(10.0 * n, *blocks) for n, blocks in enumerate(turns)]
    fleet, _ = served(requests, fleet_settings(3, 40, router=RouterName.STICKY))
    # The last one begins like the first conversation, and then differs from it.
    assert fleet.routed == [0, 1, 0, 1, 0, 2, 0]


def test_prefix_finds_the_blocks_wherever_they_are() -> None:
    turns = [(1, 2), (3, 4), (5, 6), (3, 4, 7), (5, 6, 8, 9), (1, 2, 9), (5, 6, 8, 10)]
    requests = [prompt(10.0 * n, *blocks) for n, blocks in enumerate(turns)]
    fleet, figures = served(requests, fleet_settings(3, 40, router=RouterName.PREFIX))
    first, second, third = fleet.routed[:3]
    assert sorted((first, second, third)) == [0, 1, 2]
    assert fleet.routed[3:] == [second, third, first, third]
    assert figures.hit_blocks == 2 + 2 + 2 + 3


def test_prefix_forgets_what_was_evicted() -> None:
    turns = [(1, 2), (3, 4), *(range(n, n + 9) for n in (10, 20, 30, 40)), (50, 51), (1, 2, 60)]
    requests = [prompt(10.0 * n, *blocks) for n, blocks in enumerate(turns)]
    fleet, figures = served(requests, fleet_settings(2, 10, router=RouterName.PREFIX))
    assert figures.hit_blocks == 0
    assert fleet.routed == [0, 1, 0, 1, 0, 1, 0, 1]  # in turn: engine 0 has 1 and 2 no more


def test_prefix_leaves_an_engine_alone_that_has_much_to_do() -> None:
    held = [prompt(0.0, 1, 2), prompt(50.0, *range(10, 40)), prompt(50.001, 1, 2, 3)]
    chosen = fleet_settings(2, 100, timed=True, router=RouterName.PREFIX)
    fleet, _ = served(held, chosen)
    assert fleet.routed[0] == 0
    # The long prompt goes to engine 1, whose turn it is.
    assert fleet.routed[1:] == [1, 0]
    busy = [*held[:1], prompt(50.0, 5), *held[1:]]
    fleet, figures = served(busy, chosen)
    assert fleet.routed == [0, 1, 0, 1]  # engine 0 has more to do than the two blocks save
    assert figures.hit_blocks == 0
