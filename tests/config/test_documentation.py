"""docs/configuration.md says what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import (
    TIER_KEYS,
    USER_KEYS,
    ConfigError,
    OffloadingOptions,
    TierConfig,
    TierOptions,
    parse_user_config,
)
from kvtier.config.fields import declared_keys
from kvtier.config.options import VLLM_ONLY_KEYS, VLLM_ONLY_TIER_KEYS
from kvtier.factory import OffloadingSpecFactory
from kvtier.tiering.factory import SecondaryTierFactory
from kvtier.tiering.health import BreakerSettings, TierSettings
from tests.config.sample import MINIMAL, make_config, options_of
from tests.installed import write_module

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()


def chapter(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def sections(title: str) -> dict[str, str]:
    parts = re.split(r"^### `(\w+)`\n", chapter(title), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


USER_SECTIONS = sections("Keys")
TIER_SECTIONS = sections("Keys of every tier")


def example_of(section: str) -> dict[str, Any]:
    (example,) = re.findall(r"Example: `(.+)`\.\n", section)
    return dict(json.loads(f"{{{example}}}"))


def default_of(section: str) -> Any:
    (default,) = re.findall(r"Default: `(.+?)`[.,]", section)
    return json.loads(default)


def test_the_keys_documented_are_the_keys_known() -> None:
    assert sorted(USER_SECTIONS) == sorted(USER_KEYS)
    assert sorted(TIER_SECTIONS) == sorted(TIER_KEYS)


def test_the_keys_of_vllm_alone_are_documented() -> None:
    text = chapter("Keys of vLLM's own offloading")
    table = re.findall(r"^\| `(\w+)`(, also inside a tier)? \|", text, re.MULTILINE)
    assert {key for key, _ in table} == VLLM_ONLY_KEYS.keys()
    assert {key for key, in_tiers in table if in_tiers} == VLLM_ONLY_TIER_KEYS.keys()


@pytest.mark.parametrize("key", USER_KEYS)
def test_a_documented_example_changes_the_option(key: str) -> None:
    example = example_of(USER_SECTIONS[key])
    assert getattr(options_of(example), key) != getattr(options_of({}), key)
    assert key in example


@pytest.mark.parametrize("key", TIER_KEYS)
def test_a_documented_example_changes_the_tier(key: str) -> None:
    example = example_of(TIER_SECTIONS[key])
    (plain,) = options_of({"secondary_tiers": [{"type": "x"}]}).secondary_tiers
    (tier,) = options_of({"secondary_tiers": [{"type": "x"} | example]}).secondary_tiers
    assert example.keys() == {key}
    assert getattr(tier, key) != getattr(plain, key)
    assert tier.options == {}


@pytest.mark.parametrize("key", sorted({*USER_KEYS} - {"cpu_bytes_to_use"}))
def test_a_documented_default_is_the_default(key: str) -> None:
    default = asdict(options_of({}))[key]
    assert default_of(USER_SECTIONS[key]) == (list(default) if default == () else default)


@pytest.mark.parametrize("key", sorted({*TIER_KEYS} - {"type"}))
def test_a_documented_default_of_a_tier_is_the_default(key: str) -> None:
    (tier,) = options_of({"secondary_tiers": [{"type": "x"}]}).secondary_tiers
    assert default_of(TIER_SECTIONS[key]) == getattr(tier, key)


def test_what_is_required_is_documented_as_required() -> None:
    for sections_ in (USER_SECTIONS, TIER_SECTIONS):
        required = [key for key, section in sections_.items() if "Required." in section]
        assert required == ["cpu_bytes_to_use" if sections_ is USER_SECTIONS else "type"]
        assert all(("Default:" in text) != (key in required) for key, text in sections_.items())


def listings(language: str) -> list[str]:
    return [str(text) for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)]


def test_the_two_whole_examples_say_the_same_and_can_be_built() -> None:
    first_json, _ = listings("json")
    (toml,) = listings("toml")
    parsed = parse_user_config(first_json, "json")
    assert parsed == parse_user_config(toml, "toml")
    OffloadingSpecFactory.create_spec(make_config(parsed)).get_manager().shutdown()


TIER_SOURCE = """
    from kvtier.tiering.example.manager import ExampleSecondaryTierManager

    class MyTier(ExampleSecondaryTierManager):
        def __init__(self, offloading_spec, primary_kv_view, tier_type, my_key):
            super().__init__(offloading_spec, primary_kv_view, tier_type)
"""


def test_the_example_with_tiers_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "my_package.my_tier", TIER_SOURCE)
    _, with_tiers = listings("json")
    parsed = parse_user_config(with_tiers, "json") | {"cpu_bytes_to_use": "1MiB"}
    spec = OffloadingSpecFactory.create_spec(make_config(parsed, engine_id=uuid.uuid4().hex))
    assert type(spec).__name__ == "TieringOffloadingSpec"
    spec.get_manager().shutdown()


def table_of(options_cls: type[TierOptions]) -> str:
    """The own keys of a tier as the page shows them, made from their declarations."""
    rows = ["| key | allowed | default | what it sets |", "|---|---|---|---|"]
    for name, key in declared_keys(options_cls).items():
        default = "required" if key.is_required else f"`{json.dumps(key.default)}`"
        rows.append(f"| `{name}` | {key.kind.allowed} | {default} | {key.help} |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("sections_", "options_cls"),
    [(USER_SECTIONS, OffloadingOptions), (TIER_SECTIONS, TierConfig)],
    ids=["user", "tier"],
)
def test_a_section_begins_with_what_the_declaration_says(
    sections_: dict[str, str], options_cls: type[Any]
) -> None:
    for name, key in declared_keys(options_cls).items():
        text = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(sections_[name].split()))
        assert key.help
        assert text.startswith(key.help), (name, key.help)


def test_the_keys_and_defaults_of_the_built_in_tiers_are_those_documented() -> None:
    table = re.findall(r"^\| `(\w+)` \|[^|]*\|$", chapter("Secondary tiers"), re.MULTILINE)
    known = SecondaryTierFactory._registry._registered
    assert set(table) == known.keys() - {"test_factory"}
    for tier_type in table:
        options_cls = SecondaryTierFactory.get_secondary_tier_cls({"type": tier_type}).options_cls
        assert options_cls is not None
        assert table_of(options_cls) in PAGE, table_of(options_cls)


def test_the_documented_defaults_of_deadlines_and_shares_are_those_in_force() -> None:
    stated = {
        key: float(number) / (1000 if unit else 1)
        for key, section in TIER_SECTIONS.items()
        for number, unit in re.findall(r"Default: `null`, ([\d.]+)( ms)?\.(?: |\n)", section)
    }
    in_force = TierSettings()
    assert stated == {
        "lookup_timeout_ms": in_force.lookup_timeout_s,
        "load_timeout_ms": in_force.load_timeout_s,
        "store_timeout_ms": in_force.store_timeout_s,
        "max_pinned_share": in_force.max_pinned_share,
    }


def test_the_documented_longest_time_is_the_longest() -> None:
    times = [(TIER_SECTIONS, key) for key in TIER_KEYS if key.endswith("_timeout_ms")]
    for at, key in [*times, (USER_SECTIONS, "shutdown_timeout_ms")]:
        (longest,) = re.findall(r"at most (\d+) \(one day\)", at[key])
        for time, fits in ((int(longest), True), (int(longest) + 1, False)):
            extra = {key: time}
            if at is TIER_SECTIONS:
                extra = {"secondary_tiers": [{"type": "x"} | extra]}  # type: ignore[dict-item]
            with nullcontext() if fits else pytest.raises(ConfigError):
                options_of(extra)


def test_so_many_late_stores_as_documented_are_one_too_many() -> None:
    assert "After three stores in a row" in TIER_SECTIONS["store_timeout_ms"]
    assert BreakerSettings().max_timeouts_in_a_row == 3


def output_of(source: str, folder: Path) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.stdout.splitlines()


def test_the_example_for_engines_runs(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(listings("json")[0])
    assert output_of("".join(listings("python")), tmp_path) == [
        "CPUOffloadingSpec: 131072 blocks of 65536 bytes",
        "request-1: 0 of 2 blocks found",
        "request-2: 0 of 2 blocks found",
        "request-3: 2 of 2 blocks found",
    ]


EVICTED_AND_BACK = """
def settle():
    while manager.has_pending_work() or manager.is_moving_blocks():
        end_step(manager)

far = TierFilter((TierMatcher(locality=Locality.REMOTE),))
number = 0
for name, wanted in (("nowhere", TierFilter()), ("far", far), ("near", near)):
    settle()
    for _ in range(4):
        number += 1
        serve(manager, ReqContext(str(number)), [make_offload_key(bytes([number]) * 32, 0)])
        settle()
    print(name, serve(manager, ReqContext(name, load_tier_filter=wanted), keys))
settle()
"""


def test_the_example_for_engines_brings_blocks_back_from_a_tier(tmp_path: Path) -> None:
    tier = {"type": "example", "simulate_async": True, "locality": "LOCAL"}
    keys = {
        "cpu_bytes_to_use": 4 * 65536,
        "secondary_tiers": [tier | {"load_timeout_ms": 60_000, "store_timeout_ms": 60_000}],
        "prefill_tokens_per_s": 0,  # load every block, however long it takes
    }
    (tmp_path / "kv.json").write_text(json.dumps(keys))
    *beginning, end = listings("python")
    assert end == "manager.shutdown()\n"
    source = "".join([*beginning, EVICTED_AND_BACK, end])
    assert output_of(source.replace("engine-0", uuid.uuid4().hex), tmp_path) == [
        "TieringOffloadingSpec: 4 blocks of 65536 bytes",
        "request-1: 0 of 2 blocks found",
        "request-2: 2 of 2 blocks found",
        "request-3: 2 of 2 blocks found",
        "nowhere 0",
        "far 0",
        "near 2",
    ]


def test_the_sizes_shown_are_sizes() -> None:
    shown = re.findall(r'"[\d.]+ ?[KMGTP]i?B"', chapter("How values are written"))
    assert len(shown) >= 3
    for size in shown:
        assert options_of(MINIMAL | {"cpu_bytes_to_use": json.loads(size)}).cpu_bytes_to_use > 0
