"""The fingerprint changes when the bytes behind a key would, and only then."""

from __future__ import annotations

import mmap
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.config import (
    FINGERPRINT_BYTES,
    USER_KEYS,
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    new_epoch,
)
from tests.config.sample import GROUP, GiB, make_config

MODEL = OffloadingModelConfig("my-model", "bfloat16")
WINDOWED = replace(GROUP, kind=AttentionKind.SLIDING_WINDOW, window_tokens=512)
RANKS = OffloadingParallelConfig(world_size=8)


def with_group(**changes: Any) -> dict[str, Any]:
    return {"groups": (replace(GROUP, **changes),)}


def with_ranks(**changes: Any) -> dict[str, Any]:
    return {"parallel": replace(RANKS, **changes)}


def with_tier(**keys: Any) -> dict[str, Any]:
    return {"secondary_tiers": [{"type": "fs", **keys}]}


# Every field and key, each changed alone: the engine's fields, and the user's keys.
Change = tuple[dict[str, Any], dict[str, Any]]

DECIDES: dict[str, Change] = {
    "groups.tokens_per_block": (with_group(tokens_per_block=32), {}),
    "groups.layer_names": (with_group(layer_names=("layer.0", "layer.2")), {}),
    "groups.group_id": (with_group(group_id=1), {}),
    "groups.kind": (with_group(kind=AttentionKind.STATE_SPACE), {}),
    "groups.window_tokens": ({"groups": (WINDOWED,)}, {}),
    "worker_kv_bytes_per_block": ({"worker_kv_bytes_per_block": 65537}, {}),
    "model.name": ({"model": replace(MODEL, name="other")}, {}),
    "model.dtype": ({"model": replace(MODEL, dtype="float16")}, {}),
    "model.weights_revision": ({"model": replace(MODEL, weights_revision="4f2a")}, {}),
    "model.variant": ({"model": replace(MODEL, variant="rope 8x")}, {}),
    "cache.tokens_per_hash": ({"cache": OffloadingCacheConfig(8)}, {}),
    "cache.blocks_per_chunk": ({"cache": OffloadingCacheConfig(16, 2)}, {}),
    "parallel.world_size": (with_ranks(), {}),
    "parallel.tp_size": (with_ranks(tp_size=4), {}),
    "parallel.pp_size": (with_ranks(pp_size=4), {}),
    "parallel.pcp_size": (with_ranks(pcp_size=4), {}),
    "parallel.dcp_size": (with_ranks(dcp_size=4), {}),
    "kv_cache_layout": ({"kv_cache_layout": "HND"}, {}),
    "extra_config.cache_namespace": ({}, {"cache_namespace": "v2"}),
    "extra_config.seal_key_file": ({}, {"seal_key_file": "/etc/kvtier.keys"}),
    "extra_config.block_size": ({}, {"block_size": 48}),
    "extra_config.blocks_per_chunk": ({}, {"blocks_per_chunk": 4}),
}

DECIDES_NOTHING: dict[str, Change] = {
    "model.served_name": ({"model": replace(MODEL, served_name="my-model")}, {}),
    "model.settings": ({"model": replace(MODEL, settings=(("length", 4096),))}, {}),
    "cache.hash_root": ({"cache": OffloadingCacheConfig(16, hash_root="1a2b")}, {}),
    "model.unknown_because": ({"model": replace(MODEL, unknown_because="dummy weights")}, {}),
    "engine_id": ({"engine_id": "engine-1"}, {}),
    "enable_kv_cache_events": ({"enable_kv_cache_events": True}, {}),
    "parallel.rank": (with_ranks(rank=7), {}),
    "parallel.data_parallel_index": (with_ranks(data_parallel_index=1), {}),
    "parallel.data_parallel_size": (with_ranks(data_parallel_size=2), {}),
    "extra_config.cpu_bytes_to_use": ({}, {"cpu_bytes_to_use": "2GiB"}),
    "extra_config.spec_name": ({}, {"spec_name": "MySpec"}),
    "extra_config.spec_module_path": ({}, {"spec_name": "MySpec", "spec_module_path": "m"}),
    "extra_config.eviction_policy": ({}, {"eviction_policy": "arc"}),
    "extra_config.cache_policy_module_path": (
        {},
        {"eviction_policy": "P", "cache_policy_module_path": "m"},
    ),
    "extra_config.store_threshold": ({}, {"store_threshold": 2}),
    "extra_config.max_tracker_size": ({}, {"max_tracker_size": 5}),
    "extra_config.offload_prompt_only": ({}, {"offload_prompt_only": False}),
    "extra_config.self_describing_kv_events": ({}, {"self_describing_kv_events": False}),
    "extra_config.name_tier_in_events": ({}, {"name_tier_in_events": True}),
    "extra_config.secondary_tiers": ({}, with_tier(root_dir="/mnt/kv", max_bytes="1GiB")),
    "extra_config.tenants": ({}, {"tenants": {"acme": {"priority": 3}}}),
    "extra_config.tenant_key_file": ({}, {"tenant_key_file": "/etc/kvtier-tenants.keys"}),
    "extra_config.max_retained_share": ({}, {"max_retained_share": 0.5}),
    "extra_config.reset_scope": ({}, {"reset_scope": "primary"}),
    "extra_config.prefill_tokens_per_s": ({}, {"prefill_tokens_per_s": 20_000}),
    "extra_config.record_trace": ({}, {"record_trace": "/tmp/trace.jsonl"}),
    "extra_config.record_trace_bytes": ({}, {"record_trace_bytes": "1MiB"}),
    "extra_config.status_socket": ({}, {"status_socket": "off"}),
    "extra_config.shutdown_timeout_ms": ({}, {"shutdown_timeout_ms": 1}),
    "extra_config.allow_unproven_models": ({}, {"allow_unproven_models": True}),
    "extra_config.engine_config": ({}, {"engine_config": {"rack": 7}}),
}


def changed(change: Change) -> OffloadingConfig:
    engine, extra = change
    return make_config(extra, **engine)


def unchanged_for(name: str) -> OffloadingConfig:
    """The sample, with as many ranks as the changes of the parallel layout start from."""
    spread = name.startswith("parallel.") and name != "parallel.world_size"
    return make_config(parallel=RANKS) if spread else make_config()


def test_every_field_and_key_is_known_to_decide_or_not() -> None:
    nested = {
        "groups": OffloadingGroupConfig,
        "model": OffloadingModelConfig,
        "cache": OffloadingCacheConfig,
        "parallel": OffloadingParallelConfig,
    }
    names = {field.name for field in fields(OffloadingConfig)} - {
        *nested,
        "extra_config",
        "options",
    }
    names |= {f"{part}.{field.name}" for part, cls in nested.items() for field in fields(cls)}
    names |= {f"extra_config.{key}" for key in USER_KEYS}
    assert DECIDES.keys() | DECIDES_NOTHING.keys() == names
    assert not DECIDES.keys() & DECIDES_NOTHING.keys()


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_the_bytes_changes_the_fingerprint(name: str) -> None:
    assert changed(DECIDES[name]).fingerprint() != unchanged_for(name).fingerprint()


INGREDIENTS = {
    "groups.": "group 0",
    "extra_config.seal_key_file": "signed",
    "extra_config.block_size": "blocks_per_chunk",
    "model.name": "model_name",
}
"""The names of ingredients that are not the names of fields."""


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_the_bytes_is_named_by_the_description(name: str) -> None:
    config, before = changed(DECIDES[name]), unchanged_for(name)
    differing = [
        each.partition(":")[0] for each in before.describe().differences(config.describe())
    ]
    named = next(
        (shown for start, shown in INGREDIENTS.items() if name.startswith(start)),
        name.rpartition(".")[2],
    )
    assert named in differing
    assert config.describe().namespace == config.fingerprint().hex()


@pytest.mark.parametrize("name", DECIDES_NOTHING)
def test_what_decides_nothing_is_no_difference(name: str) -> None:
    config, before = changed(DECIDES_NOTHING[name]), unchanged_for(name)
    if name != "model.settings":  # which an engine makes from the variant
        assert before.describe().differences(config.describe()) == []


@pytest.mark.parametrize("name", DECIDES_NOTHING)
def test_what_decides_nothing_leaves_the_fingerprint(name: str) -> None:
    assert changed(DECIDES_NOTHING[name]).fingerprint() == unchanged_for(name).fingerprint()


def test_no_two_changes_give_the_same_fingerprint() -> None:
    fingerprints = {name: changed(change).fingerprint() for name, change in DECIDES.items()}
    for one, other in combinations(fingerprints, 2):
        assert fingerprints[one] != fingerprints[other], (one, other)


# ---------------------------------------------------------------------------------------------
# Different identities whose parts, written one after the other, would read the same
# ---------------------------------------------------------------------------------------------

HASH_OF_2 = {"cache": OffloadingCacheConfig(tokens_per_hash=2)}

LOOK_ALIKES: dict[str, tuple[Change, Change]] = {
    "layers that run together": (
        (with_group(layer_names=("a", "bc")), {}),
        (with_group(layer_names=("ab", "c")), {}),
    ),
    "a layer with a separator": (
        (with_group(layer_names=('a","b',)), {}),
        (with_group(layer_names=("a", "b")), {}),
    ),
    "layers in another order": (
        (with_group(layer_names=("a", "b")), {}),
        (with_group(layer_names=("b", "a")), {}),
    ),
    "a layer that moves to the next group": (
        (
            {
                "groups": (
                    replace(GROUP, layer_names=("a", "b")),
                    replace(GROUP, layer_names=("c",), group_id=1),
                )
            },
            {},
        ),
        (
            {
                "groups": (
                    replace(GROUP, layer_names=("a",)),
                    replace(GROUP, layer_names=("b", "c"), group_id=1),
                )
            },
            {},
        ),
    ),
    "digits that change sides": (
        (with_group(group_id=1, tokens_per_block=16) | HASH_OF_2, {}),
        (with_group(group_id=11, tokens_per_block=6) | HASH_OF_2, {}),
    ),
    "a model named like another's revision": (
        ({"model": OffloadingModelConfig("m-4f2a", "bfloat16")}, {}),
        ({"model": OffloadingModelConfig("m", "bfloat16", "4f2a")}, {}),
    ),
    "a revision used as namespace": (
        ({"model": OffloadingModelConfig("m", "bfloat16", "v2")}, {}),
        ({"model": OffloadingModelConfig("m", "bfloat16")}, {"cache_namespace": "v2"}),
    ),
    "a namespace named like none": (({}, {"cache_namespace": "null"}), ({}, {})),
    "a layout named like none": (({"kv_cache_layout": "None"}, {}), ({}, {})),
    "equal rows, cut differently": (
        ({"worker_kv_bytes_per_block": 65536}, {"blocks_per_chunk": 2}),
        ({"worker_kv_bytes_per_block": 131072}, {"blocks_per_chunk": 1}),
    ),
    "equal rows, spread differently": (
        ({"parallel": OffloadingParallelConfig(world_size=2, tp_size=2)}, {}),
        ({"parallel": OffloadingParallelConfig(world_size=2, pp_size=2)}, {}),
    ),
    "letters that look the same": (
        ({"model": OffloadingModelConfig("modèl", "bfloat16")}, {}),
        ({"model": OffloadingModelConfig("mode\u0300l", "bfloat16")}, {}),
    ),
}


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_look_alikes_have_different_fingerprints(case: str) -> None:
    one, other = LOOK_ALIKES[case]
    assert changed(one).fingerprint() != changed(other).fingerprint()


# ---------------------------------------------------------------------------------------------
# Any two configurations
# ---------------------------------------------------------------------------------------------

# Few letters, among them those that could end a quoted text, so that parts often coincide.
WORD = st.text(alphabet='ab",[\\', min_size=1, max_size=3)


@st.composite
def groups(draw: st.DrawFn) -> tuple[OffloadingGroupConfig, ...]:
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True))
    return tuple(draw(_group(group_id)) for group_id in ids)


@st.composite
def _group(draw: st.DrawFn, group_id: int) -> OffloadingGroupConfig:
    kind = draw(st.sampled_from(AttentionKind))
    return OffloadingGroupConfig(
        tokens_per_block=draw(st.sampled_from([4, 8])),
        layer_names=tuple(draw(st.lists(WORD, min_size=1, max_size=2))),
        group_id=group_id,
        kind=kind,
        window_tokens=draw(st.integers(1, 2)) if kind.has_window else None,
    )


@st.composite
def configs(draw: st.DrawFn) -> OffloadingConfig:
    world_size = draw(st.sampled_from([2, 4]))
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": draw(st.integers(GiB, 2 * GiB)),
        "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
        "cache_namespace": draw(st.none() | WORD),
    }
    return OffloadingConfig(
        groups=draw(groups()),
        worker_kv_bytes_per_block=draw(st.integers(1, 2)) * 1000,
        engine_id=draw(WORD),
        model=OffloadingModelConfig(draw(WORD), draw(WORD), draw(st.none() | WORD)),
        cache=OffloadingCacheConfig(draw(st.sampled_from([2, 4])), draw(st.integers(1, 2))),
        parallel=OffloadingParallelConfig(
            rank=draw(st.integers(0, world_size - 1)),
            world_size=world_size,
            tp_size=draw(st.integers(1, 2)),
            dcp_size=draw(st.integers(1, 2)),
            data_parallel_index=draw(st.integers(0, 3)),
        ),
        kv_cache_layout=draw(st.none() | WORD),
        enable_kv_cache_events=draw(st.booleans()),
        extra_config=dict(draw(st.permutations(list(extra.items())))),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[OffloadingConfig, OffloadingConfig]:
    """Two configurations that share some of their parts."""
    one, other = draw(configs()), draw(configs())
    shared = draw(
        st.sets(st.sampled_from([field.name for field in fields(one) if field.init]))
        | st.just({field.name for field in fields(one) if field.init} - {"engine_id"})
    )
    return one, replace(other, **{name: getattr(one, name) for name in shared})


def identity(config: OffloadingConfig) -> tuple[object, ...]:
    """Everything that decides the bytes, part by part."""
    parallel = replace(config.parallel, rank=0, data_parallel_index=0, data_parallel_size=1)
    return (
        config.groups,
        config.model,
        config.cache,
        parallel,
        config.kv_cache_layout,
        config.worker_kv_bytes_per_block,
        config.options.cache_namespace,
        config.options.seal_key_file is not None,
    )


EPOCH = st.sampled_from([b"", b"a", b"aa"])


@given(pairs(), EPOCH, EPOCH)
@example((make_config(), make_config(engine_id="engine-1")), b"", b"")
def test_fingerprints_are_equal_exactly_when_identities_are(
    pair: tuple[OffloadingConfig, OffloadingConfig], epoch: bytes, other_epoch: bytes
) -> None:
    one, other = pair
    equal = (identity(one), epoch) == (identity(other), other_epoch)
    assert (one.fingerprint(epoch) == other.fingerprint(other_epoch)) == equal
    shown, other_shown = (
        config.identity(its).describe().ingredients
        for config, its in ((one, epoch), (other, other_epoch))
    )
    assert (shown == other_shown) == equal


# ---------------------------------------------------------------------------------------------
# The rest
# ---------------------------------------------------------------------------------------------


def test_blocks_stored_by_earlier_versions_stay_reachable() -> None:
    """A change here makes every stored block unreachable: raise the format version, and say so."""
    # Rows of the sample are whole pages on machines of every page size.
    assert make_config().fingerprint().hex() == "03b13b5d3172f7165ee609d82ed93185"
    assert len(make_config().fingerprint()) == FINGERPRINT_BYTES


def test_a_key_s_spelling_does_not_count() -> None:
    spelled: list[dict[str, Any]] = [
        {"blocks_per_chunk": 2},
        {"block_size": 32},
        {"cpu_bytes_to_use": "1GiB", "block_size": 32},
    ]
    assert len({make_config(extra).fingerprint() for extra in spelled}) == 1


def test_a_machine_with_other_pages_has_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(worker_kv_bytes_per_block=1000)
    before = config.fingerprint()
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * mmap.PAGESIZE)
    assert config.fingerprint() != before


def test_after_a_reset_nothing_earlier_is_reachable() -> None:
    config = make_config()
    epochs = [new_epoch() for _ in range(100)]
    fingerprints = {config.fingerprint(), *(config.fingerprint(epoch) for epoch in epochs)}
    assert len(fingerprints) == 101
    assert config.fingerprint(epochs[0]) == make_config().fingerprint(epochs[0])
