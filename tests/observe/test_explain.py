"""Every reason that `explain` knows, provoked in the reference engine."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.observe import reasons
from kvtier.tiering import guard
from kvtier.tiering.manager import TieringOffloadingManager
from tests.observe.explained_engine import BLOCK, ROW_BYTES, ExplainedEngine, prompt
from tests.observe.moody_tier import MOODY
from tests.test_architecture import REPO

EXAMPLE = {"type": "example", "max_blocks": 1000}


def started(tmp_path: Path, *tiers: Any, **options: Any) -> ExplainedEngine:
    return ExplainedEngine(tmp_path, *tiers, **options)


# --- prompts that are new ------------------------------------------------------------------------


def test_where_the_tokens_of_a_request_came_from(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE, host_blocks=8) as engine:
        engine.serve(prompt(1))
        assert engine.explain()["tokens"] == {
            "prompt": 100, "device": 0, "loaded": {}, "computed": 100
        }  # fmt: skip
        engine.serve(prompt(1), cold=False)
        tokens = engine.explain()["tokens"]
        assert (tokens["device"], tokens["computed"]) == (96, 4)
        engine.serve(prompt(1))
        assert engine.explain()["tokens"]["loaded"] == {"host": 96}
        engine.serve(prompt(2))
        engine.serve(prompt(1))
        explained = engine.explain()
        loaded = explained["tokens"]["loaded"]
        assert sum(loaded.values()) == 96
        assert loaded["0:example"] >= 64
        (load,) = explained["loads"]
        assert load["tier"] == "0:example"
        assert load["loaded_blocks"] * BLOCK == loaded["0:example"]
        assert engine.why() == {"all_found": explained["why"][0]}


def test_a_prompt_that_begins_with_something_new(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        engine.serve(prompt(1))
        engine.serve([7, 7, *prompt(1)])
        reason = engine.why()["first_block_new"]
        assert "first 16 tokens differ" in reason["text"]
        assert "timestamp" in reason["remedy"]


def test_a_prompt_that_goes_on_in_another_way(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE) as engine:
        engine.serve(prompt(1))
        engine.serve([*prompt(1)[:70], *prompt(2)])
        explained = engine.explain()
        assert "from token 64 on" in engine.why()["differs"]["text"]
        assert explained["decisive_block"]["first_token"] == 64
        (asked,) = explained["lookups"]
        assert (asked["tier"], asked["answer"]) == ("0:example", "no")
        assert 0 <= asked["seconds"] < 1
        engine.serve(prompt(3)[:12])
        assert "short" in engine.why()


def test_two_equal_prompts_at_once(tmp_path: Path) -> None:
    with started(tmp_path, device_blocks=64) as engine:
        first, second = engine.engine.generate([prompt(1)] * 2, max_tokens=1)
        assert "first_block_new" in engine.why(first)
        assert first.request_id in engine.why(second)["being_computed"]["text"]


def test_requests_that_have_not_started(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        waiting = engine.engine.add_request(prompt(1), 1)
        assert engine.explain(waiting)["state"] == "waiting"
        assert "waiting" in engine.why(waiting)
        engine.engine.abort(waiting)
        assert "never_started" in engine.why(waiting)
        assert "not_started" not in engine.why(waiting)


# --- what leaves, and what is not stored in host memory ------------------------------------------


def test_evicted_from_host_memory_and_by_the_tier(tmp_path: Path) -> None:
    with started(tmp_path, {"type": "example", "max_blocks": 8}, host_blocks=8) as engine:
        engine.serve(prompt(1))
        engine.serve(prompt(2))
        third = engine.serve(prompt(3))
        engine.serve(prompt(1))
        why = engine.why()
        assert third.request_id in why["evicted"]["text"]
        assert "Raise cpu_bytes_to_use" in why["evicted"]["remedy"]
        assert "evicted_by_tier" in why
        key = engine.explain()["decisive_block"]["key"]
        (block,) = engine.ask(key=key)["blocks"]
        whats = [event["what"] for event in block["events"]]
        assert whats.index("stored") < whats.index("evicted")
        assert [place["reason"] for place in block["places"]] == ["there", "there"]


def test_a_tier_that_reports_what_it_evicts(tmp_path: Path) -> None:
    tier = {"type": "example", "max_blocks": 8, "enable_kv_events": True}
    with started(tmp_path, tier, host_blocks=8) as engine:
        for number in (1, 2, 3):
            engine.serve(prompt(number))
        engine.engine.take_events()
        engine.serve(prompt(1))
        assert "0:example evicted it" in engine.why()["removed"]["text"]


def test_a_real_disk_evicts(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "1MiB"}
    with started(tmp_path, disk, host_blocks=8) as engine:
        capacity = engine.tier().capacity_blocks
        for number in range(capacity // 6 + 3):
            engine.serve(prompt(number))
        engine.serve(prompt(0))
        why = engine.why()
        assert "evicted" in why
        assert "0:disk stored it at" in why["evicted_by_tier"]["text"]


def test_prompts_larger_than_host_memory(tmp_path: Path) -> None:
    with started(tmp_path, host_blocks=8) as engine:
        engine.serve(prompt(1, 12))
        engine.serve(prompt(1, 12))
        assert "larger than host memory" in engine.why()["too_many"]["text"]


def test_no_room_to_load(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "1MiB"}
    with started(tmp_path, disk) as engine:
        engine.serve(prompt(1, 12))
    with started(tmp_path, disk, host_blocks=8) as engine:
        engine.serve(prompt(1, 12))
        assert "no room for more blocks" in engine.why()["no_room"]["text"]
        assert engine.explain()["tokens"]["loaded"]["0:disk"] >= 3 * BLOCK


def test_too_few_uses(tmp_path: Path) -> None:
    with started(tmp_path, store_threshold=3) as engine:
        engine.serve(prompt(1))
        engine.serve(prompt(1))
        assert "store_threshold" in engine.why()["filtered"]["text"]


class Picky(LRUCachePolicy):
    """Wants no block."""

    def num_admitted(self, *_: Any) -> int:
        return 0


def test_a_policy_that_wants_no_blocks(tmp_path: Path) -> None:
    keys = {"eviction_policy": "Picky", "cache_policy_module_path": __name__}
    with started(tmp_path, **keys) as engine:
        engine.serve(prompt(1))
        engine.serve(prompt(1))
        assert "eviction policy" in engine.why()["unwanted"]["text"]


def test_hints_of_the_client(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE, host_blocks=8) as engine:
        engine.serve(prompt(1), skip=True)
        assert '"skip"' in engine.why()["skip"]["text"]
        engine.serve(prompt(2), max_offload_tokens=0)
        engine.serve(prompt(2))
        assert "max_offload_tokens" in engine.why()["never_stored"]["remedy"]
        engine.serve(prompt(3), write="never")
        engine.serve(prompt(4))
        engine.serve(prompt(3))
        assert '"write": "never"' in engine.why()["kept_out"]["text"]
        engine.serve(prompt(5))
        engine.serve(prompt(4), kv_load_tiers=[])
        assert "kv_load_tiers" in engine.why()["hint"]["text"]


def test_the_rule_of_a_tenant(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"acme": {"tiers": []}, "chat": {}}
    with started(tmp_path, EXAMPLE, host_blocks=8, tenants=rules) as engine:
        engine.serve(prompt(1), tenant="chat")
        assert engine.explain()["tenant"] == "chat"
        assert not engine.explain()["is_private"]
        engine.serve(prompt(2), tenant="acme")
        engine.serve(prompt(1), tenant="acme")
        assert "rule of the request's tenant" in engine.why()["rule"]["text"]
        engine.serve(prompt(3), tenant="chat")
        engine.serve(prompt(2), tenant="chat")
        assert "rule kept it out" in engine.why()["kept_out"]["text"]


def test_a_reset(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE) as engine:
        engine.serve(prompt(1))
        engine.engine.load_weights(seed=1)
        engine.serve(prompt(1))
        reasons = engine.explain()["why"]
        assert [reason["reason"] for reason in reasons] == ["reset", "reset"]
        engine.serve(prompt(1))
        assert engine.explain()["tokens"]["loaded"] == {"host": 96}
    with started(tmp_path, EXAMPLE, reset_scope="primary") as engine:
        engine.serve(prompt(1))
        engine.engine.reset_cache()
        engine.serve(prompt(1))
        assert engine.explain()["tokens"]["loaded"] == {"0:example": 96}


def _fail(engine: ExplainedEngine) -> None:
    """From now on, all copies between the device and host memory fail."""
    (worker,) = engine.connector.workers
    get_finished = worker.get_finished

    def failed() -> Any:
        output = get_finished()
        output.finished[:] = [replace(result, success=False) for result in output.finished]
        return output

    worker.get_finished = failed  # type: ignore[method-assign]


def test_copies_that_fail(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        engine.serve(prompt(1))
        _fail(engine)
        engine.serve(prompt(1))
        assert "load_failed" in engine.why()
        engine.serve(prompt(2))
        engine.serve(prompt(2))
        assert "from the device to host memory failed" in engine.why()["copy_failed"]["text"]


# --- tiers that get no blocks --------------------------------------------------------------------


def _leaves_host(engine: ExplainedEngine, number: int) -> None:
    """Serve other prompts until host memory has dropped this one, and then this one again."""
    for other in range(100, 104):
        engine.serve(prompt(other))
    engine.serve(prompt(number))


def test_a_tier_that_is_cut_off_for_stores(tmp_path: Path) -> None:
    with started(tmp_path, MOODY, host_blocks=8) as engine:
        engine.tier().refuses_stores = True
        engine.serve(prompt(1))
        _leaves_host(engine, 1)
        assert "could not store it" in engine.why()["store_failed"]["text"]
        for number in range(2, 12):
            engine.serve(prompt(number))
        engine.serve(prompt(12))
        _leaves_host(engine, 12)
        text = engine.why()["shed"]["text"]
        assert "since" in text
        assert "outcomes were failures" in text


def test_a_write_budget_that_is_used_up(tmp_path: Path) -> None:
    tier = EXAMPLE | {"write_budget": ROW_BYTES}
    with started(tmp_path, tier, host_blocks=8) as engine:
        engine.serve(prompt(1))
        _leaves_host(engine, 1)
        assert "write budget" in engine.why()["over_budget"]["text"]


def test_write_policies_that_choose(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE | {"write": "second_use"}, host_blocks=8) as engine:
        engine.serve(prompt(1))
        _leaves_host(engine, 1)
        assert "write policy" in engine.why()["left_out"]["text"]


def test_blocks_that_leave_before_they_are_written(tmp_path: Path) -> None:
    tier = MOODY | {"write": "on_evict", "store_timeout_ms": 50}
    with started(tmp_path, tier, host_blocks=64) as engine:
        engine.tier().is_stuck = True
        for number in range(1, 16):
            engine.serve(prompt(number), drain=False)
            engine.step(0.02)
        engine.serve(prompt(3), drain=False)
        assert "before it could be written" in engine.why()["unwritten"]["text"]
        engine.tier().is_stuck = False


def test_blocks_that_wait_for_a_tier_in_vain(tmp_path: Path) -> None:
    tier = MOODY | {"max_pinned_share": 0.05, "store_timeout_ms": 300}
    with started(tmp_path, tier, host_blocks=128) as engine:
        engine.tier().is_stuck = True
        for number in range(1, 12):
            engine.serve(prompt(number), drain=False)
        engine.step(0.5)
        for number in range(20, 40):
            engine.serve(prompt(number), drain=False)
        engine.serve(prompt(9), drain=False)
        assert "while it waited" in engine.why()["dropped"]["text"]
        engine.tier().is_stuck = False


def test_host_memory_without_room(tmp_path: Path) -> None:
    tier = MOODY | {"max_pinned_share": 1.0, "store_timeout_ms": 60_000}
    with started(tmp_path, tier, host_blocks=8) as engine:
        engine.tier().is_stuck = True
        engine.serve(prompt(1), drain=False)
        engine.step()
        engine.serve(prompt(2), drain=False)
        engine.serve(prompt(2), drain=False)
        assert "transfers held too many" in engine.why()["refused"]["text"]
        engine.tier().is_stuck = False


# --- tiers that have blocks which are not loaded -------------------------------------------------


def _only_in_tier(engine: ExplainedEngine, number: int, num_blocks: int = 6) -> None:
    """Serve a prompt, and others until only the tier has it."""
    engine.serve(prompt(number, num_blocks))
    for other in range(200, 208):
        engine.serve(prompt(other))


def test_a_tier_that_is_slower_than_computing(tmp_path: Path) -> None:
    with started(tmp_path, MOODY, host_blocks=16, prefill_tokens_per_s=1_000_000) as engine:
        _only_in_tier(engine, 1)
        engine.tier().block_s = 0.005
        engine.serve(prompt(1))  # shows what loading costs
        assert engine.explain()["tokens"]["loaded"] == {"0:MoodyTier": 96}
        _only_in_tier(engine, 2)
        engine.serve(prompt(2))
        reason = engine.why()["declined_slower"]
        assert reason["numbers"]["load_s"] > 0.005
        assert reason["numbers"]["compute_s"] == pytest.approx(96 / 1_000_000)
        assert "Loading was estimated at" in reason["text"]
        assert "computing at 96 us" in reason["text"]
        assert engine.explain()["tokens"]["computed"] == 100


def test_a_load_that_would_be_late(tmp_path: Path) -> None:
    tier = MOODY | {"load_timeout_ms": 300}
    with started(tmp_path, tier, host_blocks=16, prefill_tokens_per_s=1) as engine:
        for number, num_blocks in ((1, 12), (2, 1), (3, 5)):
            _only_in_tier(engine, number, num_blocks)
        engine.tier().block_s = 0.03
        engine.serve(prompt(2, 1))
        engine.serve(prompt(3, 5))
        engine.serve(prompt(1, 12))
        text = engine.why()["declined_late"]["text"]
        assert "missed its deadline of 300 ms" in text


def test_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Trials, "are_due", lambda *_, **__: True)
    with started(tmp_path, MOODY, host_blocks=16, prefill_tokens_per_s=None) as engine:
        engine.slow_down(0.05)
        whys: Counter[str] = Counter()
        for number in range(1, 7):
            _only_in_tier(engine, number, 12)
            engine.serve(prompt(number, 12))
            whys.update(list(engine.why()))
        assert whys["declined_trial"]


def test_costs_that_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BLIND_S", 0.0)
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "1MiB"}
    with started(tmp_path, disk) as engine:
        for number in range(1, 7):
            engine.serve(prompt(number))
    with started(tmp_path, disk, prefill_tokens_per_s=None) as engine:
        engine.step(0.2)  # the tier is measured at the start, with some blocks
        whys: dict[str, dict[str, Any]] = {}
        for number in range(1, 7):
            engine.serve(prompt(number))
            whys |= engine.why()
        assert "computing at an unknown time" in whys["declined_unmeasured"]["text"]


def test_blocks_that_another_request_loads(tmp_path: Path) -> None:
    with started(tmp_path, MOODY, host_blocks=64, prefill_tokens_per_s=100_000) as engine:
        for number in range(1, 12):
            engine.serve(prompt(number, 12))
        for other in range(200, 212):
            engine.serve(prompt(other))
        engine.tier().block_s = 0.02
        for number in range(2, 12):  # shows what loading costs
            engine.serve(prompt(number, 1 + number % 3), prefetch=True)
        engine.engine.drop_device_cache()
        engine.engine.add_request(prompt(1, 12), 1, kv_transfer_params={"prefetch": True})
        engine.step()
        short = engine.engine.add_request([*prompt(1, 12)[:80], *prompt(5, 1)], 1)
        engine.settle()
        reason = engine.why(short)["left"]
        assert "computing them was estimated at" in reason["text"]


def test_tiers_that_are_late(tmp_path: Path) -> None:
    tier = MOODY | {"load_timeout_ms": 100, "lookup_timeout_ms": 50}
    with started(tmp_path, tier, host_blocks=16) as engine:
        _only_in_tier(engine, 1)
        moody = engine.tier()
        moody.answers_later = True
        engine.serve(prompt(1))
        assert "did not say within" in engine.why()["late_lookup"]["text"]
        moody.answers_later = False
        _only_in_tier(engine, 2)
        moody.is_stuck = True
        engine.serve(prompt(2), drain=False)
        explained = engine.explain()
        assert "late_load" in engine.why()
        assert [load["late"] for load in explained["loads"]] == [True]
        moody.is_stuck = False


def test_a_tier_that_is_cut_off(tmp_path: Path) -> None:
    with started(tmp_path, MOODY, host_blocks=16) as engine:
        _only_in_tier(engine, 1)
        engine.tier().raises = True
        for number in range(300, 308):
            engine.serve(prompt(number))
        engine.serve(prompt(1))
        text = engine.why()["cut_off"]["text"]
        assert "breaker is open since" in text
        assert "failures" in text


def test_a_tier_that_cannot_load_what_it_has(tmp_path: Path) -> None:
    with started(tmp_path, MOODY, host_blocks=16) as engine:
        _only_in_tier(engine, 1)
        engine.tier().loses = True
        engine.serve(prompt(1))
        why = engine.why()
        assert "could not load it" in why["lost"]["text"]
        assert engine.explain()["loads"][0]["loaded_blocks"] == 0


def test_what_an_operator_has_switched_off(tmp_path: Path) -> None:
    with started(tmp_path, EXAMPLE, host_blocks=8) as engine:
        assert isinstance(engine.manager, TieringOffloadingManager)
        change = engine.manager.switches.change
        _only_in_tier(engine, 1)
        change({"tiers": ["0:example"], "loads": False})
        engine.serve(prompt(1))
        assert "switched loads off" in engine.why()["switched_off"]["text"]
        change({"tiers": ["0:example"], "loads": True, "stores": False})
        _only_in_tier(engine, 2)
        engine.serve(prompt(2))
        assert "switched stores off" in engine.why()["switched_off"]["text"]
        change({"share": 0})
        engine.serve(prompt(1))
        assert "share" in engine.why()["not_served"]["text"]


def test_every_reason_is_documented() -> None:
    room = REPO / "src" / "kvtier" / "observe"
    text = "".join((room / f"{name}.py").read_text() for name in ("explanation", "reasons"))
    names = set(re.findall(r'Reason\(\s*"([a-z_]+)"', text)) - {"there"}
    names |= {what.name.lower() for what in (*reasons._OF_HOST, *reasons._OF_TIER)} - {"stored"}
    names |= {f"declined_{objection.name.lower()}" for objection in guard.Objection}
    names |= {"late_load", "late_lookup", "waited"}
    documented = set(re.findall(r"`([a-z_]+)`", (REPO / "docs" / "explain.md").read_text()))
    assert names <= documented


# --- questions -----------------------------------------------------------------------------------


def test_requests_are_named_as_clients_know_them(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        for name in ("cmpl-abc-0", "cmpl-abc-1", "cmpl-abd-0-9f3c", "other"):
            engine.engine.add_request(prompt(1), 1, request_id=name)
        engine.settle()
        names = {
            given: [each["id"] for each in engine.ask(request=given)["requests"]]
            for given in ("cmpl-abc", "cmpl-abd", "cmpl-abc-1", "oth", "nobody")
        }
        assert names == {
            "cmpl-abc": ["cmpl-abc-1", "cmpl-abc-0"],
            "cmpl-abd": ["cmpl-abd-0-9f3c"],
            "cmpl-abc-1": ["cmpl-abc-1"],
            "oth": ["other"],
            "nobody": [],
        }
        with pytest.raises(Exception, match="3 requests begin with 'cmpl-ab'"):
            engine.ask(request="cmpl-ab")
        for wrong in ({"last": 0}, {"last": "many"}, {"key": "no hex"}):
            with pytest.raises(Exception, match="give"):
                engine.ask(**wrong)
        assert engine.ask(key="00" * 16)["blocks"] == []


def test_all_requests_of_a_busy_engine_add_up(tmp_path: Path) -> None:
    """What the engine itself counts is what `explain` says, for every request."""
    rng = random.Random(5)
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "1MiB"}
    tiers = ({"type": "example", "max_blocks": 20}, disk)
    sources: Counter[str] = Counter()
    with started(tmp_path, *tiers, host_blocks=24, device_blocks=48, token_budget=64) as engine:
        for round_ in range(25):
            if rng.random() < 0.5:
                engine.engine.drop_device_cache()
            prompts = [
                [*prompt(rng.randrange(6), rng.randrange(2, 8), 0), *prompt(round_ + 50, 1, 3)]
                for _ in range(4)
            ]
            for result in engine.engine.generate(prompts, max_tokens=3):
                explained = engine.explain(result)
                tokens = explained["tokens"]
                loaded = sum(tokens["loaded"].values())
                assert tokens["device"] + loaded + tokens["computed"] == tokens["prompt"]
                assert tokens["prompt"] == result.num_prompt_tokens
                if not result.num_preemptions:
                    assert tokens["device"] == result.num_device_tokens
                    assert loaded == result.num_loaded_tokens
                assert explained["why"]
                sources.update(tokens["loaded"])
    assert sources.keys() == {"host", "0:example", "1:disk"}
