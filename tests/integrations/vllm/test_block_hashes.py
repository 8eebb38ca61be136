"""Roots of block hashes as several releases of vLLM make them; without vLLM itself."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.base import Locality, Medium
from kvtier.integrations.vllm.block_hashes import HashRoot, HashSeed, lasting_tiers, tell_about
from kvtier.testing import TierHarness
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


def said(about: HashRoot, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    caplog.set_level(logging.INFO, "kvtier")
    caplog.clear()
    tell_about(about, ["fs", "disk"])
    (record,) = caplog.records
    return record.levelno, record.getMessage()


@pytest.mark.parametrize(
    ("about", "algorithm"),
    [
        (root(strong(DEFAULT)), "strong"),
        (root(os.urandom(16)), None),  # what a weak algorithm gets
        (root(weak("7"), given="7"), "weak"),
        (root(strong("7"), given="7"), "strong"),
        (root(strong(""), given=""), "strong"),  # to vLLM, empty is a seed like any other
        (root(os.urandom(32), default=None), None),
        (root(strong("7"), given="7", default=None), "strong"),
    ],
)
def test_a_root_is_common_if_the_seed_that_all_have_leads_to_it(
    about: HashRoot, algorithm: str | None
) -> None:
    assert about.algorithm == algorithm


def test_a_random_root_is_warned_about_with_the_remedies(caplog: pytest.LogCaptureFixture) -> None:
    level, text = said(root(os.urandom(16)), caplog)
    assert level == logging.WARNING
    assert "stores in fs, disk, nor will this engine after a restart" in text
    assert "--prefix-caching-hash-algo sha256_cbor; or set PYTHONHASHSEED" in text


def test_where_no_algorithm_helps_none_is_named(caplog: pytest.LogCaptureFixture) -> None:
    level, text = said(root(os.urandom(32), default=None), caplog)
    assert level == logging.WARNING
    assert "--prefix-caching-hash-algo" not in text
    assert "Set PYTHONHASHSEED to the same number for every engine" in text


def test_a_common_root_is_noted_so_that_engines_can_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    level, own = said(root(strong(DEFAULT)), caplog)
    assert level == logging.INFO
    assert f"begin with {strong(DEFAULT)[:4].hex()} (strong, vLLM's own seed)" in own
    level, given = said(root(strong("1234567"), given="1234567"), caplog)
    assert level == logging.INFO
    assert "(strong, the seed in PYTHONHASHSEED)" in given
    # Where hashes are weak, a seed that is known helps to forge them.
    assert "1234567" not in given


@pytest.mark.parametrize(
    ("medium", "locality", "lasts"),
    [
        (Medium.CPU, Locality.LOCAL, False),
        (Medium.CPU, Locality.REMOTE, True),
        (Medium.STORAGE, Locality.LOCAL, True),
        (Medium.STORAGE, None, True),
        (None, None, False),
    ],
)
def test_what_is_in_storage_or_elsewhere_is_there_for_other_processes(
    medium: Medium | None, locality: Locality | None, lasts: bool
) -> None:
    class Kind(ExampleSecondaryTierManager):
        pass

    Kind.medium = medium
    with TierHarness(lambda spec, view: Kind(spec, view, "kind")) as harness:
        harness.tier.locality = locality
        assert lasting_tiers([harness.tier]) == (["kind"] if lasts else [])
