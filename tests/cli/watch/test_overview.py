"""What is shown, against what engines have answered."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.watch.engines import FollowedEngines, labels_of
from kvtier.cli.watch.overview import Overview, TierLine, hour_of, look, overview_of
from kvtier.observe.client import FOREIGN, EngineNotFound
from tests.cli.watch.told_engine import BLOCK_BYTES, ToldEngine, of_tier

STORED, LOADED = "kvtier_cpu_stored_blocks", "kvtier_cpu_loaded_blocks"
DISK_LOADED = of_tier("bytes", "0:disk", "direction", "load")
DISK_SECONDS = of_tier("seconds", "0:disk", "direction", "load")
FS_USED, FS_LIMIT = of_tier("used_bytes", "1:fs"), of_tier("capacity_bytes", "1:fs")


def seen(engines: FollowedEngines) -> Overview:
    engines.ask()
    return overview_of(engines)


def tier_of(overview: Overview, name: str) -> TierLine:
    (line,) = [tier for tier in overview.tiers if tier.tier == name]
    return line


def test_rates_are_rises_over_the_time_between() -> None:
    engines = FollowedEngines(None, False)
    with ToldEngine() as told:
        told.counters = {STORED: 100, LOADED: 20, DISK_LOADED: 5e6}
        told.histograms = {DISK_SECONDS: {"bounds": [1], "counts": [5, 0], "sum": 1.0}}
        seen(engines)
        told.now_s += 6
        told.counters = {STORED: 130, LOADED: 110, DISK_LOADED: 8e6}
        told.histograms = {DISK_SECONDS: {"bounds": [1], "counts": [8, 1], "sum": 3.0}}
        overview = seen(engines)
    host, disk = overview.tiers[:2]
    assert overview.rates_over_s == pytest.approx(6)
    assert host.store_bytes_per_s == pytest.approx(30 * BLOCK_BYTES / 6)
    assert host.load_bytes_per_s == pytest.approx(90 * BLOCK_BYTES / 6)
    assert disk.load_bytes_per_s == pytest.approx(3e6 / 6)
    assert disk.mean_load_s == pytest.approx(2.0 / 4)
    assert disk.mean_store_s is None
    assert overview.loaded_share == pytest.approx(90 / 120)
    assert overview.loaded_share_of_all == pytest.approx(110 / 240)


def test_the_first_rates_come_from_the_history() -> None:
    with ToldEngine() as told:
        told.counters = {LOADED: 50}
        told.history = [
            (told.now_s - 22, {LOADED: 1}),
            (told.now_s - 12, {LOADED: 10}),
            (told.now_s - 2, {LOADED: 49}),
        ]
        host = seen(FollowedEngines(None, False)).tiers[0]
    assert host.load_bytes_per_s == pytest.approx(40 * BLOCK_BYTES / 12)


def test_rooms_by_what_tiers_tell() -> None:
    with ToldEngine() as told:
        told.tiers = [
            *told.tiers,
            {**told.tiers[1], "tier": "2:mine", "type": "mine", "capacity_blocks": None},
        ]
        told.gauges = {
            "kvtier_cpu_resident_blocks": 25,
            of_tier("used_bytes", "0:disk"): 500 * BLOCK_BYTES,
            FS_USED: 3e9,
            FS_LIMIT: 4e9,
        }
        overview = seen(FollowedEngines(None, False))
    assert [tier.used_share for tier in overview.tiers] == [0.25, 0.5, 0.75, None]


def test_several_engines_are_summed_and_what_they_share_is_counted_once() -> None:
    engines = FollowedEngines(None, True)
    breaker = of_tier("breaker_state", "0:disk", "direction", "load")
    with ToldEngine() as one, ToldEngine() as two:
        for told, state in ((one, 0), (two, 2)):
            told.counters = {STORED: 10, of_tier("hit_blocks", "0:disk"): 3}
            told.gauges = {
                "kvtier_cpu_resident_blocks": 50,
                breaker: state,
                FS_USED: 3e9,
                FS_LIMIT: 4e9,
                of_tier("waiting_blocks", "0:disk"): 2,
                'kvtier_disk_queued_blocks{tier="0:disk"}': 5,
            }
        seen(engines)
        one.now_s += 6
        two.now_s += 12
        one.counters = {STORED: 16}
        two.counters = {STORED: 22}
        overview = seen(engines)
        assert len(overview.engines) == 2
        host, disk, fs = overview.tiers
        assert host.store_bytes_per_s == pytest.approx(2 * BLOCK_BYTES)
        assert host.capacity_bytes == 200 * BLOCK_BYTES
        assert (host.used_share, host.stored_blocks) == (0.5, 38)
        assert (fs.used_bytes, fs.capacity_bytes) == (3e9, 4e9)
        assert (disk.loads, disk.is_in_trouble) == ("cut off", True)
        assert disk.queued_blocks == 14
    with pytest.raises(EngineNotFound):
        FollowedEngines(None, True).find()


def test_reasons_and_troubles() -> None:
    engines = FollowedEngines(None, False)
    failed = of_tier("failed_blocks", "0:disk", "direction", "load")
    with ToldEngine() as told:
        told.counters = {
            of_tier("declined_blocks", "0:disk", "reason", "slower"): 5,
            of_tier("not_stored_blocks", "0:disk", "reason", "left_out"): 7,
            of_tier("declined_blocks", "0:disk", "reason", "late"): 0,
            failed: 2,
            of_tier("seal_failures", "0:disk", "reason", "payload"): 1,
            of_tier("faults", "1:fs", "kind", "blocking_call"): 4,
        }
        disk = tier_of(seen(engines), "0:disk")
        told.now_s += 6
        later = seen(engines)
        told.now_s += 6
        told.counters[failed] += 1
        again = seen(engines)
    assert disk.declined == {"slower": 5}
    assert disk.not_stored == {"left_out": 7}
    assert disk.troubles == {"failed loads": 2, "bad seals (payload)": 1}
    assert tier_of(later, "1:fs").troubles == {"faults (blocking call)": 4}
    assert not tier_of(later, "0:disk").is_in_trouble
    assert tier_of(again, "0:disk").is_in_trouble
    assert not tier_of(again, "1:fs").is_in_trouble


def test_where_prompts_came_from_and_what_that_gave() -> None:
    engines = FollowedEngines(None, False)
    tokens = 'kvtier_prompt_tokens{{source="{}"}}'.format
    with ToldEngine() as told:
        assert (seen(engines).tokens, seen(engines).tokens_of_all) == ({}, {})
        told.counters = {tokens("device"): 100, tokens("computed"): 300}
        seen(engines)
        told.now_s += 10
        told.counters = {
            tokens("device"): 150,
            tokens("host"): 20,
            tokens("0:disk"): 30,
            tokens("computed"): 400,
            'kvtier_saved_prefill_seconds{source="host"}': 2.5,
            'kvtier_saved_prefill_seconds{source="0:disk"}': 1.5,
            of_tier("bytes", "0:disk", "direction", "store"): 1000,
            of_tier("read_back_bytes", "0:disk"): 250,
            'kvtier_requests{half="with"}': 5,
        }
        told.histograms = {
            "kvtier_tiering_wait_seconds": {"bounds": [1], "counts": [4, 0], "sum": 1.0},
            'kvtier_first_token_seconds{half="with"}': {
                "bounds": [1],
                "counts": [5, 0],
                "sum": 0.5,
            },
        }
        overview = seen(engines)
    assert overview.tokens == {"device": 0.25, "host": 0.1, "0:disk": 0.15, "computed": 0.5}
    assert overview.tokens_of_all["computed"] == pytest.approx(400 / 600)
    assert overview.prompt_tokens_per_s == pytest.approx(20)
    assert overview.saved_s == 4
    assert overview.saved_s_per_s == pytest.approx(0.4)
    assert overview.mean_wait_s == pytest.approx(0.25)
    assert overview.first_token_s == {"with": pytest.approx(0.1)}
    assert overview.requests_per_s == pytest.approx(0.5)
    disk = tier_of(overview, "0:disk")
    assert (disk.stored_bytes, disk.read_back_bytes) == (1000, 250)


def test_what_the_operator_has_switched_off() -> None:
    with ToldEngine() as told:
        told.switches = {"loads_off": ["host"], "stores_off": ["1:fs"], "share": 10.0}
        told.gauges = {
            of_tier("breaker_state", "1:fs", "direction", way): 0 for way in ("load", "store")
        }
        overview = seen(FollowedEngines(None, False))
    states = [(tier.loads, tier.stores) for tier in overview.tiers]
    assert states == [("switched off", "in use"), (None, None), ("in use", "switched off")]
    assert overview.served_percent == 10


def test_states() -> None:
    engines = FollowedEngines(None, False)
    with ToldEngine() as told:
        told.counters = {}
        assert seen(engines).state == "empty"
        told.counters = {STORED: 1}
        assert seen(engines).state == "working"
        told.idle_s = 60
        overview = seen(engines)
        assert overview.state == "idle"
        assert overview.engines[0].idle_s == pytest.approx(60)
        path = told.path
    gone = seen(engines)
    assert (gone.state, gone.tiers[0].stored_blocks) == ("gone", 1)
    assert gone.problem
    with ToldEngine(path) as next_one:
        next_one.started_s += 1
        next_one.counters = {STORED: 5}
        later = seen(engines)
        assert (later.state, later.tiers[0].stored_blocks) == ("working", 5)
        assert later.engines[0].started_s == next_one.started_s


def test_no_engine_at_all() -> None:
    engines = FollowedEngines(None, False)
    overview = seen(engines)
    assert (overview.state, overview.tiers) == ("none", [])
    assert "no engine of this user runs here" in (overview.problem or "")


def test_a_process_id_does_not_come_back(run_dir: Path) -> None:
    engines = FollowedEngines(str(os.getpid()), False)
    assert not engines.may_return
    with ToldEngine():
        assert seen(engines).state == "working"
    assert seen(engines).state == "gone"
    assert FollowedEngines("/run/x.sock", False).may_return


REQUEST: dict[str, Any] = {
    "id": "chatcmpl-1",
    "state": "running",
    "arrived_s": 100.0,
    "started_s": 100.5,
    "tokens": {"prompt": 64, "device": 16, "loaded": {"host": 32}, "computed": 16},
}


def test_requests_of_several_engines_newest_first() -> None:
    with ToldEngine() as one, ToldEngine() as two:
        one.requests = [REQUEST]
        two.requests = [{**REQUEST, "id": "chatcmpl-2", "arrived_s": 101.0}]
        overview = seen(FollowedEngines(None, True))
        assert overview.requests is not None
        assert [its.id for its in overview.requests] == ["chatcmpl-2", "chatcmpl-1"]
        first = overview.requests[1]
        assert (first.tokens, first.found_share, first.loaded) == (64, 0.75, {"host": 32})
        assert first.waited_s == 0.5
        one.requests = two.requests = None
        assert seen(FollowedEngines(None, True)).requests is None


def test_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    monkeypatch.setattr("kvtier.observe.client._TIMEOUT_S", 0.2)
    engines = FollowedEngines(None, False)
    with ToldEngine() as told:
        seen(engines)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(told.path))
        mute.listen(8)
        overview = seen(engines)
    assert (overview.state, overview.tiers[0].stored_blocks) == ("silent", 1)
    assert "no answer within" in (overview.problem or "")


def test_an_engine_of_another_version_is_no_reason_to_fail() -> None:
    engines = FollowedEngines(None, False)
    with ToldEngine() as told:
        told.tiers = [{"name": "host"}]
        overview = look(engines)
        assert (overview.state, overview.problem) == ("silent", FOREIGN)
        told.tiers = []
        told.requests = [{"id": 7}]
        overview = look(engines)
        assert (overview.problem, overview.requests) == (None, None)


def test_charts_show_each_ten_seconds_and_leave_gaps_where_nothing_is_known() -> None:
    engines = FollowedEngines(None, False)
    with ToldEngine() as told:
        start = told.now_s - 1000
        told.history = [
            (start + 10 * n, {LOADED: 10.0 * n, STORED: 30.0 * n, DISK_LOADED: 1e6 * n * n})
            for n in range(20)
        ]
        after_a_pause = told.history[-1][0] + 300
        told.history += [(after_a_pause + 10 * n, {LOADED: 500.0 + 20 * n}) for n in range(3)]
        engines.ask()
        hour = hour_of(engines)
    loads = hour.charts["loads"]["host"]
    assert len(loads) == 360
    assert hour.end_s == after_a_pause + 20
    assert loads[-2:] == [pytest.approx(2 * BLOCK_BYTES)] * 2
    assert loads[-32:-2] == [None] * 30
    assert loads[-51:-32] == [pytest.approx(BLOCK_BYTES)] * 19
    assert loads[:-51] == [None] * (360 - 51)
    disk = hour.charts["loads"]["0:disk"][-51:-32]
    assert disk == [pytest.approx(1e5 * (2 * n + 1)) for n in range(19)]
    assert hour.charts["loaded_share"]["loaded"][-51] == pytest.approx(0.25)
    assert hour.charts["used"] == {}


def test_labels_of_a_series() -> None:
    assert labels_of("plain") == ("plain", {})
    assert labels_of(r'name{tier="0:disk",why="a \"b\", {c} \\ d\n"}') == (
        "name",
        {"tier": "0:disk", "why": 'a "b", {c} \\ d\n'},
    )
