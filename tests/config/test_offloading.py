"""The configuration as a whole: derived values and warnings."""

from __future__ import annotations

import logging
import mmap
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import Locality
from kvtier.config import (
    ConfigError,
    OffloadingCacheConfig,
    OffloadingModelConfig,
    OffloadingOptions,
    OffloadingParallelConfig,
    ResetScope,
    TierConfig,
    WritePolicyName,
    read_secondary_tiers,
)
from tests.config.sample import GROUP, MINIMAL, GiB, group_with, make_config, options_of


def test_a_minimal_configuration_has_the_documented_defaults() -> None:
    assert make_config().options == OffloadingOptions(
        cpu_bytes_to_use=GiB,
        spec_name="CPUOffloadingSpec",
        spec_module_path=None,
        block_size=None,
        blocks_per_chunk=None,
        eviction_policy="lru",
        cache_policy_module_path=None,
        store_threshold=1,
        max_tracker_size=64_000,
        offload_prompt_only=True,
        self_describing_kv_events=True,
        secondary_tiers=(),
        cache_namespace=None,
        reset_scope=ResetScope.ALL,
        prefill_tokens_per_s=None,
        shutdown_timeout_ms=10_000.0,
        engine_config=None,
    )


def test_options_made_by_hand_have_the_same_defaults() -> None:
    assert OffloadingOptions(cpu_bytes_to_use=GiB) == options_of({})
    assert options_of({"secondary_tiers": [{"type": "x"}]}).secondary_tiers == (TierConfig("x"),)


def test_every_key_reaches_its_option() -> None:
    given = {
        "cpu_bytes_to_use": "2GiB",
        "spec_name": "MySpec",
        "spec_module_path": "my_package.spec",
        "blocks_per_chunk": 4,
        "eviction_policy": "MyPolicy",
        "cache_policy_module_path": "my_package.policies",
        "store_threshold": 2,
        "max_tracker_size": 10,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": "/mnt/kv",
                "enable_kv_events": True,
                "locality": "REMOTE",
                "lookup_timeout_ms": 2.5,
                "load_timeout_ms": 500,
                "store_timeout_ms": 5000,
                "max_pinned_share": 1,
                "write": "on_evict",
                "write_budget": "2TiB",
            },
            {"type": "MyTier", "module_path": "my_package.tier"},
        ],
        "cache_namespace": "these weights",
        "reset_scope": "primary",
        "prefill_tokens_per_s": 0,
        "shutdown_timeout_ms": 500,
        "engine_config": {"rack": 7},
    }
    config = make_config(given, enable_kv_cache_events=True)
    assert config.options == OffloadingOptions(
        cpu_bytes_to_use=2 * GiB,
        spec_name="MySpec",
        spec_module_path="my_package.spec",
        blocks_per_chunk=4,
        eviction_policy="MyPolicy",
        cache_policy_module_path="my_package.policies",
        store_threshold=2,
        max_tracker_size=10,
        offload_prompt_only=False,
        self_describing_kv_events=True,
        secondary_tiers=(
            TierConfig(
                type="fs",
                position=0,
                enable_kv_events=True,
                locality=Locality.REMOTE,
                lookup_timeout_ms=2.5,
                load_timeout_ms=500.0,
                store_timeout_ms=5000.0,
                max_pinned_share=1.0,
                write=WritePolicyName.ON_EVICT,
                write_budget=2 * 1024**4,
                options={"root_dir": "/mnt/kv"},
            ),
            TierConfig(type="MyTier", position=1, module_path="my_package.tier"),
        ),
        cache_namespace="these weights",
        reset_scope=ResetScope.PRIMARY,
        prefill_tokens_per_s=0.0,
        shutdown_timeout_ms=500.0,
        engine_config={"rack": 7},
    )
    assert config.extra_config == given
    assert config.engine_config == {"rack": 7}


def test_null_is_no_value_where_none_is_the_default() -> None:
    nullable = ("block_size", "blocks_per_chunk", "cache_namespace", "spec_module_path")
    assert options_of(dict.fromkeys(nullable)) == options_of({})


def test_secondary_tiers_select_the_spec_that_has_them() -> None:
    tiers = [{"type": "example"}]
    assert options_of({"secondary_tiers": tiers}).spec_name == "TieringOffloadingSpec"
    assert options_of({"secondary_tiers": []}).spec_name == "CPUOffloadingSpec"
    assert options_of({"secondary_tiers": tiers, "spec_name": "Mine"}).spec_name == "Mine"


def test_tiers_are_read_without_the_rest_of_the_configuration() -> None:
    entries = [{"type": "example"}, {"type": "fs", "root_dir": "/mnt/kv", "load_timeout_ms": 5}]
    extra = {"secondary_tiers": entries, "quux": 1}
    assert read_secondary_tiers(extra) == options_of({"secondary_tiers": entries}).secondary_tiers
    assert read_secondary_tiers({}) == ()
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]\.type: got nothing"):
        read_secondary_tiers({"secondary_tiers": [{"type": "example"}, {}]})
    with pytest.raises(ConfigError, match=r"^extra_config: got 7"):
        read_secondary_tiers(7)  # type: ignore[arg-type]


def test_one_entry_is_read_like_those_of_a_configuration() -> None:
    entry = {"type": "fs", "root_dir": "/mnt/kv", "max_pinned_share": 0.5}
    (tier,) = options_of({"secondary_tiers": [entry]}).secondary_tiers
    assert TierConfig.from_entry(entry) == tier
    assert TierConfig.from_entry(entry, position=3).at == "secondary_tiers[3]"
    with pytest.raises(ConfigError) as refused:
        TierConfig.from_entry({"locality": "x"}, position=3)
    keys = [problem.key for problem in refused.value.problems]
    assert keys == ["secondary_tiers[3].type", "secondary_tiers[3].locality"]


def test_a_threshold_of_zero_stores_every_block_as_in_vllm() -> None:
    assert options_of({"store_threshold": 0}).store_threshold == 1


def test_the_options_do_not_follow_later_changes_of_the_mapping() -> None:
    extra = MINIMAL | {"secondary_tiers": [{"type": "fs", "roots": ["/a"]}]}
    config = make_config(extra)
    extra["secondary_tiers"][0]["roots"].append("/b")
    assert config.options.secondary_tiers[0].options == {"roots": ["/a"]}


def test_a_configuration_is_immutable_and_pickles() -> None:
    config = make_config({"secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv"}]})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.engine_id = "other"  # type: ignore[misc]


def test_a_rank_is_made_from_the_scheduler_s_configuration() -> None:
    config = make_config({"block_size": 64}, parallel=OffloadingParallelConfig(0, 2, tp_size=2))
    worker = replace(config, parallel=replace(config.parallel, rank=1))
    assert worker.parallel.rank == 1
    assert worker.cache == config.cache
    assert worker.options == config.options


@pytest.mark.parametrize(
    ("extra", "blocks_per_chunk"),
    [({}, 2), ({"blocks_per_chunk": 1}, 1), ({"block_size": 16}, 1), ({"block_size": 64}, 4)],
)
def test_the_user_s_word_on_block_size_goes_before_the_engine_s(
    extra: dict[str, Any], blocks_per_chunk: int
) -> None:
    cache = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)
    assert make_config(extra, cache=cache).cache.blocks_per_chunk == blocks_per_chunk


def test_blocks_per_chunk_is_for_groups_of_different_sizes_too() -> None:
    groups = (GROUP, replace(GROUP, group_id=1, tokens_per_block=32))
    assert make_config({"blocks_per_chunk": 3}, groups=groups).cache.blocks_per_chunk == 3


@given(
    worker_bytes=st.integers(1, 10**7),
    blocks_per_chunk=st.integers(1, 16),
    world_size=st.integers(1, 8),
    rows=st.integers(1, 1000),
    spare=st.integers(0, 10**9),
)
def test_rows_hold_all_cells_in_whole_pages_and_fill_the_budget(
    worker_bytes: int, blocks_per_chunk: int, world_size: int, rows: int, spare: int
) -> None:
    cells = worker_bytes * blocks_per_chunk * world_size
    row_bytes = next(
        size for size in range(cells, cells + mmap.PAGESIZE) if size % mmap.PAGESIZE == 0
    )
    config = make_config(
        {"cpu_bytes_to_use": rows * row_bytes + spare % row_bytes},
        worker_kv_bytes_per_block=worker_bytes,
        cache=OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=OffloadingParallelConfig(world_size=world_size),
    )
    assert config.cpu_page_size == worker_bytes * blocks_per_chunk
    assert config.row_bytes == row_bytes
    assert config.num_blocks == rows


def test_the_whole_numbers_of_numpy_are_taken_as_plain_ones() -> None:
    config = make_config(
        {"cpu_bytes_to_use": np.int64(64 * GiB), "blocks_per_chunk": np.int8(100)},
        groups=(group_with(tokens_per_block=np.int8(16), group_id=np.uint8(1)),),
        worker_kv_bytes_per_block=np.int32(65536),
        cache=OffloadingCacheConfig(tokens_per_hash=np.int8(16)),  # type: ignore[arg-type]
        parallel=OffloadingParallelConfig(world_size=np.uint8(200), tp_size=np.uint8(200)),  # type: ignore[arg-type]
    )
    plain = make_config(
        {"cpu_bytes_to_use": 64 * GiB, "blocks_per_chunk": 100},
        groups=(replace(GROUP, group_id=1),),
        parallel=OffloadingParallelConfig(world_size=200, tp_size=200),
    )
    assert config.row_bytes == 65536 * 100 * 200
    assert config.fingerprint() == plain.fingerprint()
    assert {type(value) for value in astuple(config.parallel)} == {int}
    assert repr(config) == repr(plain)


@pytest.mark.parametrize("given", [np.bool_(True), np.float64(2), np.array([2, 3])])
def test_what_is_no_whole_number_of_numpy_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"worker_kv_bytes_per_block: got .*a whole number, 1 or"):
        make_config(worker_kv_bytes_per_block=given)


def test_a_number_of_numpy_is_shown_as_a_number() -> None:
    with pytest.raises(ConfigError, match="store_threshold: got -1; allowed"):
        options_of({"store_threshold": np.int64(-1)})


def test_weights_are_identified_by_revision_or_namespace() -> None:
    by_revision = OffloadingModelConfig("my-model", "bfloat16", weights_revision="4f2a")
    make_config(model=by_revision).require_weights_identity()
    make_config({"cache_namespace": "v2"}).require_weights_identity()


def test_weights_that_are_not_identified_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        make_config().require_weights_identity()
    message = str(refused.value)
    assert message.startswith("cache_namespace: got nothing, and the engine does not know")
    assert "'my-model'" in message
    assert "Set cache_namespace to your own name for these weights" in message


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_keys_of_vllm_alone_are_warned_about_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    backpressure = {"backpressure_cls": "EMABackpressureDetector"}
    config = make_config(
        {
            "canonical_layout": True,
            "backpressure": backpressure,
            "secondary_tiers": [{"type": "fs", "root_dir": "/kv", "backpressure": backpressure}],
        }
    )
    assert config.options.secondary_tiers[0].options == {"root_dir": "/kv"}
    warned = warnings_in(caplog)
    assert [message.split(" has no effect")[0] for message in warned] == [
        "canonical_layout",
        "backpressure",
        "secondary_tiers[0].backpressure",
    ]
    assert all("vLLM" in message and "Remove it." in message for message in warned)


def test_events_that_nobody_publishes_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "self_describing_kv_events": True,
        "secondary_tiers": [{"type": "a"}, {"type": "b", "enable_kv_events": True}],
    }
    make_config(extra, enable_kv_cache_events=True)
    assert warnings_in(caplog) == []
    make_config(extra)
    assert [message.split(" has no effect")[0] for message in warnings_in(caplog)] == [
        "secondary_tiers[1].enable_kv_events",
        "self_describing_kv_events",
    ]


def test_a_sound_configuration_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    make_config({"secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]})
    assert warnings_in(caplog) == []


def test_reading_a_configuration_loads_nothing_heavy() -> None:
    probe = """
import sys
from kvtier.config import OffloadingOptions
OffloadingOptions.from_extra_config({"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs"}]})
print(sorted({"numpy", "kvtier.base", "difflib", "tomllib", "importlib.metadata"} & {*sys.modules}))
"""
    loaded = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True
    )
    assert loaded.stdout == "[]\n"
