"""The user's mistakes: each is refused with key, value, what is allowed, and a remedy."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvtier.config import ConfigError, OffloadingParallelConfig, OptionReader
from kvtier.config.fields import SIZE, whole_number
from tests.config.sample import GiB, options_of, refusal_of

TIER_AT_1 = "secondary_tiers[1]"


def second_tier(**keys: Any) -> dict[str, Any]:
    return {"secondary_tiers": [{"type": "example"}, keys]}


ONE_BLOCK = (
    "at least one block, 262144 bytes (worker_kv_bytes_per_block 65536 x blocks_per_chunk 4 "
    "x world_size 1, rounded up to the page size)"
)

# The user's keys, the key named, the value shown, what is allowed, the remedy.
Mistake = tuple[dict[str, Any], str, str, str, str]

USER_MISTAKES: dict[str, Mistake] = {
    "typo": (
        {"evicton_policy": "arc"},
        "evicton_policy",
        '"arc"',
        "only the keys allow_unproven_models, block_size, blocks_per_chunk",
        'Did you mean "eviction_policy"?',
    ),
    "hyphens and capitals": (
        {"Store-Threshold": 2},
        "Store-Threshold",
        "2",
        "only the keys",
        'Did you mean "store_threshold"?',
    ),
    "a key of another world": (
        {"quux": 1},
        "quux",
        "1",
        "only the keys",
        "and what only your own spec reads belongs in engine_config",
    ),
    "a key of a tier of some type": (
        {"max_blocks": 5},
        "max_blocks",
        "5",
        "only the keys",
        "Remove it; a tier's own key belongs in its entry of secondary_tiers",
    ),
    "a key of every tier": (
        {"load_timeout_ms": 5},
        "load_timeout_ms",
        "5",
        "only the keys",
        ". It belongs in an entry of secondary_tiers.",
    ),
    "another key of every tier": (
        {"write": "through"},
        "write",
        '"through"',
        "only the keys",
        ". It belongs in an entry of secondary_tiers.",
    ),
    "a misspelled key of every tier": (
        {"loadtimeout_ms": 5},
        "loadtimeout_ms",
        "5",
        "only the keys",
        'Did you mean "load_timeout_ms" in an entry of secondary_tiers?',
    ),
    "a part of a key": (
        {"tiers": [{"type": "example"}]},
        "tiers",
        '[{"type": "example"}]',
        "only the keys",
        'Did you mean "secondary_tiers"?',
    ),
    "a part of several keys": ({"path": "x"}, "path", '"x"', "only the keys", "Remove it"),
    "the whole transfer config": (
        {"kv_connector_extra_config": {"cpu_bytes_to_use": 1}},
        "kv_connector_extra_config",
        '{"cpu_bytes_to_use": 1}',
        "only the keys",
        "Give the content of kv_connector_extra_config alone",
    ),
    "a number as key": ({7: 1}, "7", "1", "only the keys", "Remove it"),  # type: ignore[dict-item]
    "a size with a wrong unit": (
        {"cpu_bytes_to_use": "8 gigs"},
        "cpu_bytes_to_use",
        '"8 gigs"',
        'a size above 0, in bytes or as a text such as "8GiB" or "1.5GB"',
        'Write "8GiB" for powers of 1024, "8GB" for powers of 1000',
    ),
    "null where a value is required": (
        {"cpu_bytes_to_use": None},
        "cpu_bytes_to_use",
        "null",
        "a size above 0",
        "This key is required: add it",
    ),
    "null where there is a default": (
        {"eviction_policy": None},
        "eviction_policy",
        "null",
        "a text",
        'Leave it out to have the default, "lru"',
    ),
    "a number in quotes": (
        {"store_threshold": "2"},
        "store_threshold",
        '"2"',
        "a whole number, 0 or more",
        "Write 2 without quotes",
    ),
    "a whole float": (
        {"block_size": 64.0},
        "block_size",
        "64.0",
        "a whole number, 1 or more",
        "Write 64 without a decimal point",
    ),
    "a fraction": (
        {"blocks_per_chunk": 1.5},
        "blocks_per_chunk",
        "1.5",
        "a whole number, 1 or more",
        "Write a whole number, such as 1",
    ),
    "a boolean as number": (
        {"max_tracker_size": True},
        "max_tracker_size",
        "true",
        "a whole number, 1 or more",
        "Write a whole number, such as 1",
    ),
    "too small a number": (
        {"max_tracker_size": 0},
        "max_tracker_size",
        "0",
        "a whole number, 1 or more",
        "Write 1 or more",
    ),
    "a negative number": (
        {"store_threshold": -1},
        "store_threshold",
        "-1",
        "a whole number, 0 or more",
        "Write 0 or more",
    ),
    "a boolean in quotes": (
        {"offload_prompt_only": "False"},
        "offload_prompt_only",
        '"False"',
        "true or false",
        "Write false without quotes",
    ),
    "a number as boolean": (
        {"self_describing_kv_events": 1},
        "self_describing_kv_events",
        "1",
        "true or false",
        "Write true or false",
    ),
    "a number as text": (
        {"cache_namespace": 2},
        "cache_namespace",
        "2",
        "a text",
        "Write it in quotes",
    ),
    "an empty text": (
        {"cache_namespace": " "},
        "cache_namespace",
        '" "',
        "a text",
        "Write at least one letter, or leave it out",
    ),
    "a text with a line end": (
        {"cache_namespace": "v2\n"},
        "cache_namespace",
        r'"v2\n"',
        "a text without white space around it",
        "Remove the white space around it",
    ),
    "a choice in capitals": (
        {"reset_scope": "Primary"},
        "reset_scope",
        '"Primary"',
        '"all" or "primary"',
        'Write "primary"',
    ),
    "no choice": (
        {"reset_scope": "none"},
        "reset_scope",
        '"none"',
        '"all" or "primary"',
        'Write "all" or "primary"',
    ),
    "a file as module": (
        {"spec_name": "S", "spec_module_path": "my-package/spec.py"},
        "spec_module_path",
        '"my-package/spec.py"',
        "an importable module",
        'Write it as in an import statement: "my_package.spec"',
    ),
    "no module at all": (
        {"eviction_policy": "P", "cache_policy_module_path": "a b"},
        "cache_policy_module_path",
        '"a b"',
        "an importable module",
        'Write it as in an import statement: "my_package.my_module"',
    ),
    "a spec's module without its name": (
        {"spec_module_path": "my_package.spec"},
        "spec_module_path",
        '"my_package.spec"',
        "together with the name of the class",
        "Set spec_name to the class's name",
    ),
    "a policy's module without its name": (
        {"cache_policy_module_path": "my_package.policies"},
        "cache_policy_module_path",
        '"my_package.policies"',
        "together with the name of the class",
        "Set eviction_policy to the class's name",
    ),
    "two block sizes": (
        {"block_size": 64, "blocks_per_chunk": 4},
        "block_size",
        "64",
        "block_size (in tokens) or blocks_per_chunk (in device blocks), not both",
        "Remove one of them; blocks_per_chunk is 4",
    ),
    "no multiple": (
        {"block_size": 40},
        "block_size",
        "40",
        "a multiple of the device's block size, 16 tokens",
        "Write 32 or 48",
    ),
    "less than one device block": (
        {"block_size": 8},
        "block_size",
        "8",
        "a multiple of the device's block size, 16 tokens",
        "Write 16.",
    ),
    "a budget below one block": (
        {"cpu_bytes_to_use": "128KiB", "blocks_per_chunk": 4},
        "cpu_bytes_to_use",
        '"128KiB" (131072 bytes)',
        ONE_BLOCK,
        'Write "256KiB" or more, or lower blocks_per_chunk; a useful cache',
    ),
    "a block above the budget": (
        {"cpu_bytes_to_use": "128KiB", "block_size": 64},
        "cpu_bytes_to_use",
        '"128KiB" (131072 bytes)',
        ONE_BLOCK,
        'Write "256KiB" or more, or lower block_size; a useful cache',
    ),
    "a block above any budget": (
        {"block_size": 2**64},
        "cpu_bytes_to_use",
        f"{GiB} ({GiB} bytes)",
        "at least one block",
        ". Lower block_size.",
    ),
    "a device block above the budget": (
        {"cpu_bytes_to_use": "4KiB", "blocks_per_chunk": 1},
        "cpu_bytes_to_use",
        '"4KiB" (4096 bytes)',
        "at least one block, 65536 bytes",
        'Write "64KiB" or more; a useful cache',
    ),
    "a spec without tiers": (
        {"spec_name": "CPUOffloadingSpec", "secondary_tiers": [{"type": "fs"}, {"type": "obj"}]},
        "spec_name",
        '"CPUOffloadingSpec"',
        '"TieringOffloadingSpec", since there are secondary_tiers: CPUOffloadingSpec has none',
        "Remove spec_name, or remove secondary_tiers",
    ),
    "a rate with unit": (
        {"prefill_tokens_per_s": "20k"},
        "prefill_tokens_per_s",
        '"20k"',
        "a number, 0 or more",
        "Write a number without quotes or unit, such as 20000",
    ),
    "a negative rate": (
        {"prefill_tokens_per_s": -0.5},
        "prefill_tokens_per_s",
        "-0.5",
        "a number, 0 or more",
        "Write 0 or more, or leave it out",
    ),
    "an endless rate": (
        {"prefill_tokens_per_s": float("nan")},
        "prefill_tokens_per_s",
        "NaN",
        "a number, 0 or more",
        "Write 0 or more, or leave it out",
    ),
    "no time to end": (
        {"shutdown_timeout_ms": 0},
        "shutdown_timeout_ms",
        "0",
        "a number of milliseconds above 0",
        "above 0, or leave it out",
    ),
    "null time to end": (
        {"shutdown_timeout_ms": None},
        "shutdown_timeout_ms",
        "null",
        "a number of milliseconds above 0",
        "Leave it out to have the default, 10000.0",
    ),
    "more than a day to end": (
        {"shutdown_timeout_ms": 1e13},
        "shutdown_timeout_ms",
        "10000000000000.0",
        "a number of milliseconds above 0 and at most 86400000, one day",
        "Write at most 86400000, which is one day, or leave it out",
    ),
    "a tier of no type": (
        second_tier(type=""),
        f"{TIER_AT_1}.type",
        '""',
        'the name of a tier, such as "example", or of a class in module_path',
        "Write at least one letter.",
    ),
    "a tier outside a list": (
        {"secondary_tiers": {"type": "fs"}},
        "secondary_tiers",
        '{"type": "fs"}',
        'a list of objects such as [{"type": "example"}]',
        "Put the one tier in brackets",
    ),
    "tiers as text": (
        {"secondary_tiers": "fs"},
        "secondary_tiers",
        '"fs"',
        "a list of objects",
        "Write a list",
    ),
    "a tier's name alone": (
        {"secondary_tiers": ["disk"]},
        "secondary_tiers[0]",
        '"disk"',
        'an object with a "type"',
        'Write {"type": "disk"}',
    ),
    "a tier that is nothing": (
        {"secondary_tiers": [{"type": "example"}, None]},
        TIER_AT_1,
        "null",
        'an object with a "type"',
        'Write {"type": "example"}',
    ),
    "a tier without type": (
        second_tier(root_dir="/mnt"),
        f"{TIER_AT_1}.type",
        "nothing",
        "the name of a tier",
        'Write {"type": "example"}, or the name of an installed tier',
    ),
    "a tier with a misspelled type": (
        second_tier(typ="fs"),
        f"{TIER_AT_1}.type",
        "nothing",
        "the name of a tier",
        'Is "typ" a misspelling of it?',
    ),
    "a tier's module": (
        second_tier(type="T", module_path="t.py"),
        f"{TIER_AT_1}.module_path",
        '"t.py"',
        "an importable module",
        'Write it as in an import statement: "t"',
    ),
    "a tier's events": (
        second_tier(type="fs", enable_kv_events="yes"),
        f"{TIER_AT_1}.enable_kv_events",
        '"yes"',
        "true or false",
        "Write true or false",
    ),
    "a tier's locality": (
        second_tier(type="fs", locality="remote"),
        f"{TIER_AT_1}.locality",
        '"remote"',
        '"LOCAL" or "REMOTE"',
        'Write "REMOTE"',
    ),
    "a timeout with unit": (
        second_tier(type="fs", load_timeout_ms="500ms"),
        f"{TIER_AT_1}.load_timeout_ms",
        '"500ms"',
        "a number of milliseconds above 0",
        "without quotes or unit",
    ),
    "no time at all": (
        second_tier(type="fs", lookup_timeout_ms=0),
        f"{TIER_AT_1}.lookup_timeout_ms",
        "0",
        "a number of milliseconds above 0",
        "above 0, or leave it out",
    ),
    "a boolean as time": (
        second_tier(type="fs", load_timeout_ms=True),
        f"{TIER_AT_1}.load_timeout_ms",
        "true",
        "a number of milliseconds above 0",
        "such as 500",
    ),
    "endless time": (
        second_tier(type="fs", store_timeout_ms=float("inf")),
        f"{TIER_AT_1}.store_timeout_ms",
        "Infinity",
        "a number of milliseconds above 0",
        "Write at most 86400000, which is one day",
    ),
    "a time that no float can hold": (
        second_tier(type="fs", store_timeout_ms=10**309),
        f"{TIER_AT_1}.store_timeout_ms",
        f"1{'0' * 199}...",
        "a number of milliseconds above 0",
        "Write at most 86400000, which is one day",
    ),
    "no number of milliseconds": (
        second_tier(type="fs", lookup_timeout_ms=float("nan")),
        f"{TIER_AT_1}.lookup_timeout_ms",
        "NaN",
        "a number of milliseconds above 0",
        "above 0, or leave it out",
    ),
    "a share in percent": (
        second_tier(type="fs", max_pinned_share="25%"),
        f"{TIER_AT_1}.max_pinned_share",
        '"25%"',
        "a number above 0 and at most 1",
        "without quotes or percent sign, such as 0.25",
    ),
    "a share of more than everything": (
        second_tier(type="fs", max_pinned_share=25),
        f"{TIER_AT_1}.max_pinned_share",
        "25",
        "a number above 0 and at most 1",
        "Write a part of 1, such as 0.25 for a quarter, or leave it out",
    ),
    "a share of nothing": (
        second_tier(type="fs", max_pinned_share=0.0),
        f"{TIER_AT_1}.max_pinned_share",
        "0.0",
        "a number above 0 and at most 1",
        "Write a part of 1",
    ),
    "an unknown write policy": (
        second_tier(type="fs", write="back"),
        f"{TIER_AT_1}.write",
        '"back"',
        '"through"',
        'Write "through"',
    ),
}


@pytest.mark.parametrize("case", USER_MISTAKES)
def test_a_mistake_of_the_user_is_refused_with_key_value_and_remedy(case: str) -> None:
    extra, key, value, allowed, remedy = USER_MISTAKES[case]
    refused = refusal_of(extra)
    assert [problem.key for problem in refused.problems] == [key]
    message = str(refused)
    assert message.startswith(f"{key}: got {value}; allowed: ")
    assert allowed in message
    assert remedy in message
    assert message.endswith((".", "?"))


def test_a_missing_budget_is_refused() -> None:
    refused = refusal_of(extra_config={"cpu_byte_to_use": 1})
    assert str(refused.problems[0]) == (
        "cpu_bytes_to_use: got nothing; allowed: a size above 0, in bytes or as a text such as "
        '"8GiB" or "1.5GB". Is "cpu_byte_to_use" a misspelling of it?'
    )


def test_keys_that_are_no_object_are_refused() -> None:
    refused = refusal_of(extra_config=["cpu_bytes_to_use"])
    assert str(refused).startswith('extra_config: got ["cpu_bytes_to_use"]; allowed: an object')


def test_all_problems_are_reported_together() -> None:
    extra = {"reset_scope": "x", "blok_size": 1} | second_tier(locality="x", type=3)
    refused = refusal_of(extra, engine_id="", parallel=OffloadingParallelConfig(rank=1))
    keys = [problem.key for problem in refused.problems]
    assert sorted(keys) == [
        "blok_size",
        "engine_id",
        "parallel.rank",
        "reset_scope",
        "secondary_tiers[1].locality",
        "secondary_tiers[1].type",
    ]
    message = str(refused)
    assert message.startswith("6 problems in the configuration:\n- ")
    assert all(f"\n- {problem}" in message for problem in refused.problems)
    assert str(pickle.loads(pickle.dumps(refused))) == message


@pytest.mark.parametrize("key", ["lookup_timeout_ms", "load_timeout_ms", "store_timeout_ms"])
def test_a_day_is_the_longest_time_of_a_tier(key: str) -> None:
    (tier,) = options_of({"secondary_tiers": [{"type": "x", key: 86_400_000}]}).secondary_tiers
    assert getattr(tier, key) == 86_400_000
    refused = refusal_of({"secondary_tiers": [{"type": "x", key: 86_400_001}]})
    assert [problem.key for problem in refused.problems] == [f"secondary_tiers[0].{key}"]


def test_a_config_error_is_a_value_error() -> None:
    assert isinstance(refusal_of({"quux": 1}), ValueError)


def test_a_tier_reads_its_own_keys_under_its_own_path() -> None:
    tier = options_of(second_tier(type="fs", max_bytes="1GiB", threads="4")).secondary_tiers[1]
    reader = OptionReader(tier.options, tier.at)
    assert reader.required("max_bytes", SIZE) == GiB
    assert reader.get("depth", whole_number(1), 8) == 8
    reader.optional("threads", whole_number(1))
    with pytest.raises(ConfigError) as refused:
        reader.raise_problems()
    assert str(refused.value).startswith('secondary_tiers[1].threads: got "4"; allowed: a whole')
