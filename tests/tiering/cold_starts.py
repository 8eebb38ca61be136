"""Engines that differ in one thing that their namespace is made of, for tests of every tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest

from kvtier.config import OffloadingConfig
from kvtier.testing import TierHarness, harness
from tests.tiering.patience import wait_until

Change: TypeAlias = Callable[[OffloadingConfig], OffloadingConfig]
KEYS = TierHarness.keys(5)
LOGGER = "kvtier.tiering.namespaces"


def served(config: OffloadingConfig, **changes: Any) -> OffloadingConfig:
    """The configuration of an engine with two ranks and settings that have names."""
    settings = {"engine": "0.32.0", "max_model_len": 4096} | changes.pop("settings", {})
    model = replace(
        config.model,
        served_name="org/llama",
        weights_revision="hub:1234",
        settings=tuple(settings.items()),
        variant=repr(settings),
        **changes.pop("model", {}),
    )
    ranks = replace(config.parallel, world_size=2, tp_size=2)
    half = config.worker_kv_bytes_per_block // 2
    fields: dict[str, Any] = {"model": model, "parallel": ranks, "worker_kv_bytes_per_block": half}
    return replace(config, **fields | changes)


def _with_setting(**setting: Any) -> Change:
    return lambda config: served(config, settings=setting)


def _with_namespace(config: OffloadingConfig) -> OffloadingConfig:
    return served(config, extra_config={**config.extra_config, "cache_namespace": "new weights"})


def _with_other_layers(config: OffloadingConfig) -> OffloadingConfig:
    first, *rest = config.groups
    return served(config, groups=(replace(first, layer_names=("layer.7",)), *rest))


def _with_ranks(config: OffloadingConfig) -> OffloadingConfig:
    return served(config, parallel=replace(config.parallel, world_size=2, pp_size=2))


def _with_chunks(config: OffloadingConfig) -> OffloadingConfig:
    quarter = config.worker_kv_bytes_per_block // 4
    cache = replace(config.cache, blocks_per_chunk=2)
    return served(config, cache=cache, worker_kv_bytes_per_block=quarter)


DIFFERENCES: dict[str, tuple[Change, str]] = {
    "length": (_with_setting(max_model_len=2048), "It differs in max_model_len: 4096, now 2048"),
    "release": (_with_setting(engine="0.33.0"), "It differs in engine: 0.32.0, now 0.33.0"),
    "a new setting": (_with_setting(rope=8), "It differs in rope: none, now 8"),
    "weights": (
        lambda config: replace(
            served(config), model=replace(served(config).model, weights_revision="hub:5678")
        ),
        "It differs in weights_revision: hub:1234, now hub:5678",
    ),
    "dtype": (
        lambda config: replace(
            served(config), model=replace(served(config).model, dtype="fp8_e4m3")
        ),
        "It differs in dtype: bfloat16, now fp8_e4m3",
    ),
    "user's word": (
        _with_namespace,
        "It differs in cache_namespace: these weights, now new weights",
    ),
    "layers": (_with_other_layers, "It differs in group 0: id 0, 16 tokens, full, 1 layers #"),
    "ranks": (_with_ranks, "pp_size: 1, now 2; tp_size: 2, now 1"),
    "block size": (_with_chunks, "It differs in blocks_per_chunk: 1, now 2; worker_kv_bytes"),
    "layout": (
        lambda config: served(config, kv_cache_layout="HND"),
        "It differs in kv_cache_layout: none, now HND",
    ),
    "tokens per hash": (
        lambda config: served(config, cache=replace(config.cache, tokens_per_hash=8)),
        "It differs in tokens_per_hash: 16, now 8",
    ),
}


def with_root(root: str) -> Change:
    """An engine whose block hashes start from `root`."""
    return lambda config: served(config, cache=replace(config.cache, hash_root=root))


def other_model(config: OffloadingConfig) -> OffloadingConfig:
    return replace(served(config), model=replace(config.model, served_name="org/qwen", name="qwen"))


@contextmanager
def engines(change: Change = served) -> Iterator[None]:
    """While this context is open, harnesses are made for engines with this configuration."""
    real = harness.sample_spec

    def changed(*args: Any, **kwargs: Any) -> harness.SampleSpec:
        return harness.SampleSpec(change(real(*args, **kwargs).config))

    with patch.object(harness, "sample_spec", changed):
        yield


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about other namespaces."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records if record.name == LOGGER]


def line_of_a_start(
    open_harness: Callable[[], TierHarness], change: Change, caplog: pytest.LogCaptureFixture
) -> str:
    """The one line that an engine logs when it starts with this configuration."""
    caplog.clear()
    with caplog.at_level(logging.INFO, LOGGER), engines(change), open_harness():
        wait_until(lambda: bool(lines(caplog)), "the reason is logged")
    (line,) = lines(caplog)
    return line


def store(harness_: TierHarness, keys: Sequence[Any] = KEYS) -> None:
    (report,) = harness_.wait_for(harness_.store(keys))
    assert report.result.success
