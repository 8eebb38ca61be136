"""The key `tenants`: what a rule is read as, and which rules are refused."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import ConfigError, OffloadingOptions
from kvtier.config.fields import declared_keys
from kvtier.config.tenants import (
    HIGHEST_PRIORITY,
    NO_RULES,
    NORMAL_PRIORITY,
    Amount,
    Quota,
    TenantRule,
    TenantRules,
)
from tests.config.sample import MINIMAL, options_of
from tests.config.test_documentation import USER_SECTIONS

DISK = {"type": "disk", "path": "/mnt/slab", "max_bytes": "1GiB"}
FS = {"type": "fs", "root_dir": "/mnt/shared", "max_bytes": "1GiB"}
KEY_FILE = {"tenant_key_file": "/etc/kvtier-tenants.keys"}


def rules_of(tenants: dict[str, Any], *tiers: dict[str, Any], **keys: Any) -> TenantRules:
    return options_of({"tenants": tenants, "secondary_tiers": list(tiers)} | keys).tenant_rules


def problems_of(tenants: object, *tiers: dict[str, Any], **keys: Any) -> list[str]:
    given = MINIMAL | {"tenants": tenants, "secondary_tiers": list(tiers)} | keys
    with pytest.raises(ConfigError) as refused:
        OffloadingOptions.from_extra_config(given)
    return [str(problem) for problem in refused.value.problems]


def test_without_the_key_there_is_one_tenant_that_may_have_everything() -> None:
    rules = options_of({}).tenant_rules
    assert rules is NO_RULES
    (default,) = rules
    assert default.name == "default"
    assert default.max_priority == HIGHEST_PRIORITY
    assert default.may_use("0:disk")
    assert not rules.has_quotas


def test_a_rule_is_read_whole() -> None:
    rules = rules_of(
        {
            "acme": {
                "host": {"floor": "20%", "cap": "50%"},
                "disk": {"cap": "100MiB"},
                "1:fs": {"floor": "12.5%"},
                "tiers": ["disk"],
                "share": "private",
                "priority": 6,
                "max_priority": 8,
                "max_retain_s": 30,
            }
        },
        DISK,
        FS,
        **KEY_FILE,
    )
    default, acme = rules
    assert (default.name, default.index, acme.name, acme.index) == ("default", 0, "acme", 1)
    assert acme.quota("host") == Quota(Amount(200_000), Amount(500_000))
    assert acme.quota("0:disk") == Quota(cap=Amount(None, 100 << 20))
    assert acme.quota("1:fs") == Quota(Amount(125_000))
    assert acme.quota("2:obj") == Quota()
    assert acme.may_use("0:disk")
    assert not acme.may_use("1:fs")
    assert acme.is_private
    assert (acme.priority, acme.max_priority, acme.max_retain_s) == (6, 8, 30)
    assert rules.has_quotas


def test_a_tenant_raises_itself_above_others_only_if_the_operator_says_so() -> None:
    default, modest, _ = rules_of({"modest": {"priority": 2}, "proud": {"max_priority": 9}})
    assert default.max_priority == NORMAL_PRIORITY
    assert modest.max_priority == 2


def test_tenants_have_the_same_order_however_they_are_written() -> None:
    names = [rule.name for rule in rules_of({"zeta": {}, "default": {"priority": 1}, "alpha": {}})]
    assert names == ["default", "alpha", "zeta"]


def test_rules_can_be_pickled() -> None:
    rules = rules_of({"acme": {"disk": {"cap": "10%"}, "tiers": ["disk"]}}, DISK)
    assert pickle.loads(pickle.dumps(rules)) == rules


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        ([], 'tenants: got []; allowed: an object with one entry for each tenant. Write an object'),
        ({"acme": 3}, "tenants.acme: got 3; allowed: an object. Write an object such as"),
        ({"a.b": {}}, 'tenants.a.b: got the name "a.b"; allowed: 1 to 64 letters, digits'),
        ({"other": {}}, 'tenants.other: got the name "other"; allowed: 1 to 64 letters'),
        ({"a" * 65: {}}, f'tenants.{"a" * 65}: got the name'),
        ({"acme": {"fs": {"cap": "1%"}}}, 'tenants.acme.fs: got {"cap": "1%"}; allowed: only'),
        ({"acme": {"dsk": {}}}, 'Did you mean "disk"?'),
        ({"acme": {"tiers": ["dsk"]}}, 'allowed: one of disk, 0:disk. Did you mean "disk"?'),
        ({"acme": {"tiers": ["host"]}}, "Remove it: every block passes through host memory."),
        ({"acme": {"tiers": "disk"}}, 'tenants.acme.tiers: got "disk"; allowed: a list of tiers'),
        ({"acme": {"disk": "20%"}}, 'tenants.acme.disk: got "20%"; allowed: an object with'),
        ({"acme": {"host": {"cap": "101%"}}}, '.host.cap: got "101%"; allowed: a share'),
        ({"acme": {"host": {"cap": "x%"}}}, 'Write a percentage such as "20%" or "12.5%".'),
        ({"acme": {"host": {"floor": -1}}}, "tenants.acme.host.floor: got -1; allowed: a share"),
        ({"acme": {"host": {"flor": 1}}}, 'Did you mean "floor"?'),
        ({"acme": {"host": {"floor": "30%", "cap": "20%"}}}, 'allowed: at most the cap, "20%"'),
        ({"acme": {"priority": 10}}, "acme.priority: got 10; allowed: a whole number from 0"),
        ({"acme": {"priority": 6, "max_priority": 5}}, "allowed: at least priority, 6."),
        ({"acme": {"max_retain_s": -1}}, "max_retain_s: got -1; allowed: a number of"),
        ({"acme": {"share": "mine"}}, 'tenants.acme.share: got "mine"; allowed: "shared" or'),
        ({"default": {"share": "private"}}, "tenants.default.share"),
        ({"a": {"host": {"floor": "60%"}}, "b": {"host": {"floor": "40.1%"}}},
         "tenants: got floors of a, b in host that are 100.1 % together; allowed: at most 100 %"),
        ({"acme": {"share": "private"}}, "tenant_key_file: got nothing; allowed: the path"),
        ({str(n): {} for n in range(1001)}, "tenants: got 1001 tenants; allowed: at most 1000."),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_refused_with_its_key_and_the_remedy(tenants: Any, expected: str) -> None:
    (problem,) = problems_of(tenants, DISK)
    assert expected in problem


def test_a_tier_is_named_by_its_place_where_several_have_its_type() -> None:
    problems = problems_of({"acme": {"tiers": ["disk"]}}, DISK, DISK)
    assert "allowed: one of 0:disk, 1:disk" in problems[0]
    _, acme = rules_of({"acme": {"tiers": ["1:disk"]}}, DISK, DISK)
    assert acme.tiers == frozenset({"1:disk"})


def test_every_mistake_is_reported_at_once() -> None:
    tenants = {"a": {"priority": -1, "tiers": ["fs"]}, "b": {"host": {"cap": []}}}
    assert len(problems_of(tenants, DISK)) == 3


@given(
    shares=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    num_blocks=st.integers(0, 1 << 40),
)
def test_floors_of_at_most_the_whole_always_fit(shares: list[int], num_blocks: int) -> None:
    total = max(1, sum(shares))
    tenants = tuple(
        TenantRule(f"t{n}", n, {"host": Quota(Amount(share * 1_000_000 // total))})
        for n, share in enumerate(shares)
    )
    TenantRules(tenants).require_floors_fit("host", "cpu_bytes_to_use", num_blocks, 4096)


def test_floors_in_bytes_are_checked_once_the_capacity_is_known() -> None:
    rules = rules_of({"a": {"host": {"floor": "1MiB"}}, "b": {"host": {"floor": "2MiB"}}})
    rules.require_floors_fit("host", "cpu_bytes_to_use", 3, 1 << 20)
    with pytest.raises(ConfigError, match=r"floors of b of 3 blocks|floors of a, b of 3 blocks"):
        rules.require_floors_fit("host", "cpu_bytes_to_use", 2, 1 << 20)


@given(millionths=st.integers(0, 1_000_000), blocks=st.integers(0, 1 << 50))
def test_a_share_is_rounded_down_and_never_more_than_all(millionths: int, blocks: int) -> None:
    part = Amount(millionths).in_blocks(blocks, 4096)
    assert part * 1_000_000 <= blocks * millionths < (part + 1) * 1_000_000


def test_the_page_shows_the_keys_of_a_rule_as_they_are_declared() -> None:
    for name, key in declared_keys(TenantRule).items():
        assert f"| `{name}` | {key.kind.allowed} | `" in USER_SECTIONS["tenants"]
        assert key.help in USER_SECTIONS["tenants"]


def test_the_examples_of_the_page_can_be_configured() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tenants.md").read_text()
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        rules = OffloadingOptions.from_extra_config(json.loads(example)).tenants
        assert rules is not None
    two_teams = OffloadingOptions.from_extra_config(json.loads(examples[1])).tenant_rules
    assert [rule.name for rule in two_teams if rule.is_private] == ["research"]
