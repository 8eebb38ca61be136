"""Roots of block hashes as several releases of vLLM compute them; runs without vLLM."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.base import Locality, Medium
from kvtier.config import ConfigError
from kvtier.config.options import TierConfig
from kvtier.integrations.vllm.identity import HashRoot, HashSeed, lasting_tiers, log_hash_root
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

DEFAULT = "a fixed seed"


def strong(seed: str) -> bytes:
    return hashlib.sha256(seed.encode()).digest()


def weak(seed: str) -> bytes:
    return hashlib.md5(seed.encode(), usedforsecurity=False).digest()


def missing(seed: str) -> bytes:
    raise ModuleNotFoundError("its package is not installed")


ALGORITHMS: dict[str, Callable[[Any], bytes]] = {
    "missing": missing,
    "strong": strong,
    "weak": weak,
}


def root(value: bytes, given: str | None = None, default: str | None = DEFAULT) -> HashRoot:
    return HashRoot(value, HashSeed(given, default), ALGORITHMS)


def said(about: HashRoot, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.INFO, "kvtier")
    caplog.clear()
    log_hash_root(about, ["fs", "disk"])
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    return record.getMessage()


@pytest.mark.parametrize(
    ("about", "algorithm"),
    [
        (root(strong(DEFAULT)), "strong"),
        (root(os.urandom(16)), None),  # the root with a weak algorithm
        (root(weak("7"), given="7"), "weak"),
        (root(strong("7"), given="7"), "strong"),
        (root(strong(""), given=""), "strong"),  # vLLM accepts an empty seed
        (root(os.urandom(32), default=None), None),
        (root(strong("7"), given="7", default=None), "strong"),
    ],
)
def test_a_root_is_common_if_the_seed_that_all_have_leads_to_it(
    about: HashRoot, algorithm: str | None
) -> None:
    assert about.algorithm == algorithm


def test_a_random_root_is_refused_with_the_remedies() -> None:
    with pytest.raises(ConfigError) as refused:
        log_hash_root(root(os.urandom(16)), ["fs", "disk"])
    text = str(refused.value)
    assert "stores in fs, disk, nor would this engine after a restart" in text
    assert "--prefix-caching-hash-algo sha256_cbor; or set PYTHONHASHSEED" in text


def test_where_no_algorithm_helps_none_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        log_hash_root(root(os.urandom(32), default=None), ["fs"])
    text = str(refused.value)
    assert "--prefix-caching-hash-algo" not in text
    assert "Set PYTHONHASHSEED to the same number for every engine" in text


def test_a_common_root_is_noted_so_that_engines_can_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = said(root(strong(DEFAULT)), caplog)
    assert f"begins with {strong(DEFAULT)[:4].hex()} (strong, vLLM's own seed)" in own
    given = said(root(strong("1234567"), given="1234567"), caplog)
    assert "(strong, the seed in PYTHONHASHSEED)" in given
    # With weak hashes, a known seed helps to forge them.
    assert "1234567" not in given


class InMemory(ExampleSecondaryTierManager):
    medium = Medium.CPU


class InStorage(ExampleSecondaryTierManager):
    medium = Medium.STORAGE


class SomewhereElse(ExampleSecondaryTierManager):
    medium = Medium.CPU
    locality = Locality.REMOTE


class Untold(ExampleSecondaryTierManager):
    medium = None


@pytest.mark.parametrize(
    ("tier", "user_says", "lasts"),
    [
        (InMemory, {}, False),
        (InMemory, {"locality": "REMOTE"}, True),
        (InStorage, {}, True),
        (InStorage, {"locality": "LOCAL"}, True),
        (SomewhereElse, {}, True),
        (Untold, {}, False),
    ],
)
def test_what_is_in_storage_or_elsewhere_is_there_for_other_processes(
    tier: type, user_says: dict[str, str], lasts: bool
) -> None:
    entry = {"type": tier.__name__, "module_path": __name__} | user_says
    assert lasting_tiers([TierConfig.from_entry(entry)]) == ([tier.__name__] if lasts else [])


def test_a_tier_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="exampel"):
        lasting_tiers([TierConfig.from_entry({"type": "exampel"})])
