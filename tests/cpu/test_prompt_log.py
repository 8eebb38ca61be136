"""What an engine reports of its prompts, and what it answers about its hit curve."""

from __future__ import annotations

import pytest

from kvtier.base import ReqContext, make_offload_key
from kvtier.connector import OffloadingConnectorScheduler
from kvtier.cpu.prompt_log import PromptLog, PromptWatching, num_prompt_blocks
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engine import Engine
from kvtier.observe.client import ask, find_engines
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.config.sample import make_config
from tests.engine.models import random_tokens
from tests.engine.test_offloading import CASES, offloading_engine


def manager_of(engine: Engine) -> PromptWatching:
    assert engine._connector is not None
    scheduler = engine._connector.scheduler
    assert isinstance(scheduler, OffloadingConnectorScheduler)
    assert isinstance(scheduler.manager, PromptWatching)
    return scheduler.manager


def log_of(engine: Engine) -> PromptLog:
    log = manager_of(engine).prompts
    assert log is not None
    return log


@pytest.mark.parametrize("case", CASES)
def test_the_reference_engine_reports_its_prompts(case: str) -> None:
    """Two requests of 100 tokens with the same prompt: 12 blocks of 8 tokens each."""
    model, engine_config = CASES[case]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        prompt = random_tokens(0, 100)
        for _ in range(2):
            engine.generate([prompt], 10)
        log = log_of(engine)
        (curve,) = [
            answer
            for answer in (ask(its, "curve") for its in find_engines())
            if answer["num_blocks"] == log.curve.num_blocks == 24
        ]
        assert curve["model"] == "kvtier-reference"
        assert curve["block_tokens"] == 8


def test_requests_that_must_not_count() -> None:
    """A request with `skip`, and a prefetch."""
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        log = log_of(engine)
        for hint in ("skip", "prefetch"):
            engine.generate([random_tokens(1, 60)], 2, kv_transfer_params={hint: True})
        assert log.curve.num_blocks == 0


def test_groups_share_host_memory() -> None:
    """A block of 8 tokens, and two blocks of 4 tokens in the other group, for the same tokens."""
    model, engine_config = CASES["hybrid"]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        log = log_of(engine)
        same = [size.num_blocks for size, _ in log.curve.points() if size.factor == 1]
        stats = manager_of(engine).get_stats()
        assert stats is not None
        assert same == [stats.gauges["kvtier_cpu_slots"] // 3]


def test_every_size_is_declared_as_a_metric() -> None:
    extra = {
        "cpu_bytes_to_use": "1MiB",
        "secondary_tiers": [
            {"type": "example", "max_blocks": 40},
            {"type": "example", "max_blocks": 100, "write": "on_evict"},
        ],
    }
    spec = TieringOffloadingSpec(make_config(extra, engine_id="curve of tiers"))
    manager = spec.get_manager()
    assert manager.prompts is not None
    sizes = {size.gauge: size.num_blocks for size, _ in manager.prompts.curve.points()}
    assert sizes == {
        "kvtier_cpu_estimated_hit_ratio_half": 8,
        "kvtier_cpu_estimated_hit_ratio": 16,
        "kvtier_cpu_estimated_hit_ratio_double": 32,
        "kvtier_cpu_estimated_hit_ratio_quadruple": 64,
        'kvtier_tier_estimated_hit_ratio{tier="0:example",size="1"}': 40,
        'kvtier_tier_estimated_hit_ratio{tier="0:example",size="2"}': 80,
        'kvtier_tier_estimated_hit_ratio{tier="1:example",size="1"}': 140,
        'kvtier_tier_estimated_hit_ratio{tier="1:example",size="2"}': 240,
    }
    definitions = spec.build_metric_definitions(extra)
    assert sizes.keys() <= {
        series for name, definition in definitions.items() for series in definition.series(name)
    }
    manager.shutdown()


def test_the_manager_reports_the_estimates() -> None:
    spec = CPUOffloadingSpec(make_config({"cpu_bytes_to_use": "1MiB"}))
    manager = spec.get_manager()
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(8)]
    for n in range(300):
        manager.note_prompt(keys, ReqContext(str(n)), 8 * 16 + 3)
    assert manager.get_stats().gauges["kvtier_cpu_estimated_hit_ratio"] > 0.9
    manager.reset_cache()
    manager.shutdown()
    manager.shutdown()


def test_a_system_without_memfd_goes_without_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise OSError("not here")

    monkeypatch.setattr("os.memfd_create", refuse)
    log = PromptLog(make_config({"cpu_bytes_to_use": "1MiB"}))
    log.note([make_offload_key(b"x" * 32, 0)], ReqContext("r"), 16, 0)
    assert num_prompt_blocks(make_config({"cpu_bytes_to_use": "1MiB"}), 16) == 16
    log.close()
