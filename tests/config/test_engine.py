"""Wrong values in the engine's description of itself are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from tests.config.sample import GROUP, group_with, make_config, refusal_of

# The engine's fields, the key named, the value shown, what is allowed, the remedy.
Mistake = tuple[dict[str, Any], str, str, str, str]

ENGINE_MISTAKES: dict[str, Mistake] = {
    "no groups": ({"groups": ()}, "groups", "none", "at least one KV-cache group", "Describe"),
    "no tokens": (
        {"groups": (group_with(tokens_per_block=0),)},
        "groups[0].tokens_per_block",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "a block of half a hash": (
        {"groups": (group_with(tokens_per_block=24),)},
        "groups[0].tokens_per_block",
        "24",
        "a multiple of cache.tokens_per_hash, 16",
        "--enable-prefix-caching",
    ),
    "a group without layers": (
        {"groups": (group_with(layer_names=()),)},
        "groups[0].layer_names",
        "[]",
        "a tuple of one or more layer names",
        "Give a tuple",
    ),
    "layers as one text": (
        {"groups": (group_with(layer_names="layer.0"),)},
        "groups[0].layer_names",
        '"layer.0"',
        "a tuple of one or more layer names",
        "Give a tuple",
    ),
    "a layer without name": (
        {"groups": (group_with(layer_names=("a", 1)),)},
        "groups[0].layer_names",
        '["a", 1]',
        "a tuple of one or more layer names",
        "Write it in quotes",
    ),
    "one id twice": (
        {"groups": (GROUP, GROUP)},
        "groups[1].group_id",
        "0",
        "an id of its own; groups[0] has this one",
        "Give every group the index that its keys carry",
    ),
    "a negative id": (
        {"groups": (group_with(group_id=-1),)},
        "groups[0].group_id",
        "-1",
        "a whole number, 0 or more",
        "Write 0 or more",
    ),
    "a kind as text": (
        {"groups": (group_with(kind="full"),)},
        "groups[0].kind",
        '"full"',
        "one of AttentionKind.FULL, AttentionKind.SLIDING_WINDOW",
        "Give a member of AttentionKind",
    ),
    "a window that is missing": (
        {"groups": (group_with(kind=AttentionKind.SLIDING_WINDOW),)},
        "groups[0].window_tokens",
        "nothing",
        'the window in tokens, since the kind is "sliding_window"',
        "Give the window",
    ),
    "a window too many": (
        {"groups": (group_with(window_tokens=512),)},
        "groups[0].window_tokens",
        "512",
        'None, since the kind is "full"',
        "Leave the window out",
    ),
    "an empty window": (
        {"groups": (group_with(kind=AttentionKind.CHUNKED_LOCAL, window_tokens=0),)},
        "groups[0].window_tokens",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "no bytes": (
        {"worker_kv_bytes_per_block": 0},
        "worker_kv_bytes_per_block",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "groups that are none": (
        {"groups": None},
        "groups",
        "null",
        "a tuple of kvtier.OffloadingGroupConfig",
        "Give a tuple, also for one group.",
    ),
    "groups in a list": (
        {"groups": [{"tokens_per_block": 16}]},
        "groups",
        '[{"tokens_per_block": 16}]',
        "a tuple of kvtier.OffloadingGroupConfig",
        "Give a tuple, also for one group.",
    ),
    "a group that is none": (
        {"groups": ({"tokens_per_block": 16},)},
        "groups",
        '[{"tokens_per_block": 16}]',
        "a tuple of kvtier.OffloadingGroupConfig",
        "Make groups[0] an OffloadingGroupConfig.",
    ),
    "a model that is none": (
        {"model": "my-model"},
        "model",
        '"my-model"',
        "an instance of kvtier.OffloadingModelConfig",
        "Make it with OffloadingModelConfig(...).",
    ),
    "a cache that is none": (
        {"cache": {"tokens_per_hash": 16}},
        "cache",
        '{"tokens_per_hash": 16}',
        "an instance of kvtier.OffloadingCacheConfig",
        "Make it with OffloadingCacheConfig(...).",
    ),
    "parallel that is none": (
        {"parallel": None},
        "parallel",
        "null",
        "an instance of kvtier.OffloadingParallelConfig",
        "Make it with OffloadingParallelConfig(...).",
    ),
    "an id that is none": (
        {"groups": (group_with(group_id=[0]),)},
        "groups[0].group_id",
        "[0]",
        "a whole number, 0 or more",
        "Write a whole number",
    ),
    "an empty engine id": (
        {"engine_id": ""},
        "engine_id",
        '""',
        "a text",
        "Write at least one letter.",
    ),
    "no engine id": ({"engine_id": None}, "engine_id", "null", "a text", "Write it in quotes"),
    "events as number": (
        {"enable_kv_cache_events": 1},
        "enable_kv_cache_events",
        "1",
        "true or false",
        "Write true or false",
    ),
    "no layout": ({"kv_cache_layout": ""}, "kv_cache_layout", '""', "a text", "leave it out"),
    "a dtype that is none": (
        {"model": OffloadingModelConfig("m", 16)},  # type: ignore[arg-type]
        "model.dtype",
        "16",
        "a text",
        "Write it in quotes",
    ),
    "no model name": (
        {"model": OffloadingModelConfig("", "bfloat16")},
        "model.name",
        '""',
        "a text",
        "Write at least one letter.",
    ),
    "an empty revision": (
        {"model": OffloadingModelConfig("m", "bfloat16", "")},
        "model.weights_revision",
        '""',
        "a text",
        "leave it out",
    ),
    "no tokens per hash": (
        {"cache": OffloadingCacheConfig(0)},
        "cache.tokens_per_hash",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "no blocks per chunk": (
        {"cache": OffloadingCacheConfig(16, 0)},
        "cache.blocks_per_chunk",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "a rank too many": (
        {"parallel": OffloadingParallelConfig(rank=2, world_size=2)},
        "parallel.rank",
        "2",
        "0 to 1, since parallel.world_size is 2",
        "Number the ranks of one engine from 0",
    ),
    "a negative rank": (
        {"parallel": OffloadingParallelConfig(rank=-1)},
        "parallel.rank",
        "-1",
        "a whole number, 0 or more",
        "Write 0 or more",
    ),
    "ranks that are not counted": (
        {"parallel": OffloadingParallelConfig(world_size=4, tp_size=2, pp_size=2, pcp_size=2)},
        "parallel.world_size",
        "4",
        "a multiple of tp_size 2 x pp_size 2 x pcp_size 2",
        "Count every rank that holds a part of a block",
    ),
}

NO_RANKS: dict[str, Mistake] = {
    f"no {size}": (
        {"parallel": OffloadingParallelConfig(**{size: 0})},
        f"parallel.{size}",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    )
    for size in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size")
}


@pytest.mark.parametrize("case", ENGINE_MISTAKES | NO_RANKS)
def test_a_mistake_of_the_engine_is_refused_with_key_value_and_remedy(case: str) -> None:
    engine, key, value, allowed, remedy = (ENGINE_MISTAKES | NO_RANKS)[case]
    refused = refusal_of(**engine)
    assert [problem.key for problem in refused.problems] == [key]
    message = str(refused)
    assert message.startswith(f"{key}: got {value}; allowed: ")
    assert allowed in message
    assert remedy in message


def test_all_parts_that_are_none_are_refused_at_once_with_the_users_mistakes() -> None:
    refused = refusal_of({"blok_size": 1}, groups=None, model=None, cache=None, parallel=None)
    keys = [problem.key for problem in refused.problems]
    assert keys == ["groups", "model", "cache", "parallel", "blok_size"]


def test_block_size_is_refused_for_groups_of_different_sizes() -> None:
    groups = (GROUP, group_with(group_id=1, tokens_per_block=32))
    assert str(refusal_of({"block_size": 64}, groups=groups)) == (
        "block_size: got 64; allowed: only where all KV-cache groups have device blocks of one "
        "size; here they have 16, 32 tokens. Set blocks_per_chunk instead."
    )


def test_a_replica_of_a_dense_model_may_be_numbered_beyond_its_count() -> None:
    parallel = OffloadingParallelConfig(data_parallel_index=3, data_parallel_size=1)
    assert make_config(parallel=parallel).parallel.data_parallel_index == 3


def test_every_kind_of_group_can_be_described() -> None:
    groups = (
        GROUP,
        group_with(group_id=1, kind=AttentionKind.SLIDING_WINDOW, window_tokens=512),
        group_with(group_id=2, kind=AttentionKind.CHUNKED_LOCAL, window_tokens=8192),
        group_with(group_id=3, kind=AttentionKind.STATE_SPACE),
    )
    assert make_config(groups=groups).groups == groups
