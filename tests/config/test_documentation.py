"""docs/configuration.md says what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import TIER_KEYS, USER_KEYS, parse_user_config
from kvtier.config.options import VLLM_ONLY_KEYS, VLLM_ONLY_TIER_KEYS
from kvtier.factory import OffloadingSpecFactory
from tests.config.sample import MINIMAL, make_config, options_of

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


def listing(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def test_the_two_whole_examples_say_the_same_and_can_be_built() -> None:
    parsed = parse_user_config(listing("json"), "json")
    assert parsed == parse_user_config(listing("toml"), "toml")
    OffloadingSpecFactory.create_spec(make_config(parsed)).get_manager().shutdown()


def test_the_example_for_engines_runs(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(listing("json"))
    ran = subprocess.run(
        [sys.executable, "-c", listing("python")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout == "CPUOffloadingSpec: 131072 blocks of 65536 bytes\n"


def test_the_sizes_shown_are_sizes() -> None:
    shown = re.findall(r'"[\d.]+ ?[KMGTP]i?B"', chapter("How values are written"))
    assert len(shown) >= 3
    for size in shown:
        assert options_of(MINIMAL | {"cpu_bytes_to_use": json.loads(size)}).cpu_bytes_to_use > 0
