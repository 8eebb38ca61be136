"""A configuration that works, for tests to vary."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import (
    ConfigError,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingOptions,
    OffloadingParallelConfig,
)

GiB = 1024**3
GROUP = OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0", "layer.1"))
MINIMAL: dict[str, Any] = {"cpu_bytes_to_use": GiB}


def make_config(extra: dict[str, Any] | None = None, **engine: Any) -> OffloadingConfig:
    """The sample with user keys added and fields of the engine replaced."""
    fields: dict[str, Any] = {
        "groups": (GROUP,),
        "worker_kv_bytes_per_block": 65536,
        "engine_id": "engine-0",
        "model": OffloadingModelConfig(name="my-model", dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16),
        "parallel": OffloadingParallelConfig(),
        "extra_config": MINIMAL | (extra or {}),
    }
    return OffloadingConfig(**fields | engine)


def refusal_of(extra: dict[str, Any] | None = None, **engine: Any) -> ConfigError:
    """The refusal of the sample with these changes."""
    with pytest.raises(ConfigError) as refused:
        make_config(extra, **engine)
    return refused.value


def options_of(extra: dict[str, Any]) -> OffloadingOptions:
    """The sample's options with these keys added."""
    return OffloadingOptions.from_extra_config(MINIMAL | extra)


def group_with(**fields: Any) -> OffloadingGroupConfig:
    """The sample's group with fields replaced by values of any type."""
    sample: dict[str, Any] = {"tokens_per_block": 16, "layer_names": GROUP.layer_names}
    return OffloadingGroupConfig(**sample | fields)
