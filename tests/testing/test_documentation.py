"""The examples of docs/writing-a-tier.md work as shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import ReqContext, ScheduleEndContext, make_offload_key
from kvtier.config import ConfigError
from kvtier.testing import FaultKind, FaultyTier, TierConformance
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.harness import sample_spec
from kvtier.testing.job_ledger import LentSlots
from kvtier.tiering.factory import SecondaryTierFactory
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.installed import install

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "writing-a-tier.md").read_text()


def listings(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` with the files that the page shows."""
    for text in listings("python"):
        if named := re.match(r"# (\w+)\.py\n", text):
            (tmp_path / f"{named[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_tier_passes_the_kit(folder: Path) -> None:
    printed = run(folder, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(folder))
    skipped = set(re.findall(r"^SKIPPED .*py:\d+: (.*)$", printed, re.MULTILINE))
    assert len(skipped) == 3  # in one class or the other: restart, events, capacity
    assert "failed" not in printed


def test_the_bad_day_is_the_same_every_time(folder: Path) -> None:
    printed = run(folder, "bad_day.py")
    assert run(folder, "bad_day.py") == printed
    assert "8 of 8 arrived" in printed
    assert re.search(r"^[1-7] of 8 arrived$", printed, re.MULTILINE)
    assert re.search(r"^[1-9]\d* faults$", printed, re.MULTILINE)


def shown_entries() -> list[dict[str, Any]]:
    """The tiers of all configurations on the page."""
    return [entry for text in listings("json") for entry in json.loads(text)["secondary_tiers"]]


def created(entry: dict[str, Any]) -> Any:
    """The tier of an entry of `secondary_tiers`, shut down again."""
    slots = LentSlots(2, 4096)
    spec = sample_spec(4096, 2, "namespace", "engine")
    tier = SecondaryTierFactory.create_secondary_tier(entry, slots.view, spec)
    tier.shutdown()
    tier.rows.release()
    assert slots.close() == []
    return tier


def test_users_write_what_is_shown(folder: Path) -> None:
    (entry_points,) = (
        tomllib.loads(text)["project"]["entry-points"]["kvtier.tiers"] for text in listings("toml")
    )
    install(folder, "shelf", "kvtier.tiers", entry_points)
    entries = [entry for entry in shown_entries() if entry["type"] != "BadShelf"]
    for entry in entries:
        tier = created(entry)
        assert type(tier).__name__ == "ShelfTier"
        assert tier.max_blocks == 5000
    assert [entry.get("module_path") for entry in entries] == [None, "shelf_tier"]


@pytest.mark.parametrize("max_blocks", [0, -1, "5", None, 2.5])
def test_the_tier_checks_what_users_write(folder: Path, max_blocks: Any) -> None:
    entry = {"type": "ShelfTier", "module_path": "shelf_tier", "max_blocks": max_blocks}
    with pytest.raises(ConfigError, match=r"max_blocks.*a whole number from 1 on"):
        created(entry)


def test_the_third_load_fails_as_shown(folder: Path) -> None:
    assert run(folder, "third_load.py") == "[8, 8, 0, 8]\n"


def test_an_engine_survives_the_tier_with_faults(folder: Path) -> None:
    (entry,) = (entry for entry in shown_entries() if entry["type"] == "BadShelf")
    sample = sample_spec(4096, 32, "namespace", f"engine-{uuid.uuid4().hex}").config
    extra_config = {
        **sample.extra_config,
        "secondary_tiers": [entry],
        "shutdown_timeout_ms": 200,
    }
    assert TieringOffloadingSpec.build_metric_definitions(extra_config)
    spec = TieringOffloadingSpec(replace(sample, extra_config=extra_config))
    manager = spec.get_manager()
    try:
        for number in range(40):
            request = ReqContext(f"request-{number}")
            keys = [make_offload_key(b"%032d" % n, 0) for n in range(number, number + 4)]
            manager.on_new_request(request)
            manager.lookup_prefix(keys, request)
            output = manager.prepare_store(keys, request)
            if output is not None:
                manager.complete_store(output.keys_to_store, request)
            manager.on_request_finished(request)
            manager.on_schedule_end(ScheduleEndContext())
        (tier,) = manager.secondary_tiers
        assert isinstance(tier, FaultyTier)
        assert {"hang", "raise"} <= {fault.kind for fault in tier.injected}
        counters = manager.get_stats().counters
        assert counters['kvtier_tier_faults{tier="0:BadShelf",kind="error"}'] > 0
    finally:
        manager.shutdown()


REMOTE_IN_USE = """
from remote_shelf import RemoteShelf
from kvtier import LookupResult, ReqContext
from kvtier.testing import TierHarness
import remote_shelf, threading

remote_shelf.MOST_ANSWERS = 10
with TierHarness(lambda spec, view: RemoteShelf(spec, view, "remote")) as harness:
    tier = harness.tier
    keys = harness.keys(30)
    request = ReqContext("waits")
    answers = threading.Event()
    ask = tier._is_there
    tier._is_there = lambda name: answers.wait() and ask(name)
    print({answer.name for answer in tier.lookup_batch(keys, request)})
    print(len(tier._answers))
    answers.set()
    tier.on_request_finished(request)
    print(len(tier._answers))

    waits = ReqContext("waits for a store by another")
    while tier.lookup(keys[0], waits) is LookupResult.RETRY:
        pass
    print(tier.lookup(keys[0], waits).name)
    harness.wait_for(harness.store(keys[:1]))
    while tier.lookup(keys[0], waits) is LookupResult.RETRY:
        pass
    print(tier.lookup(keys[0], waits).name)
    tier._is_there = lambda name: 1 / 0
    while tier.lookup(keys[1], waits) is LookupResult.RETRY:
        pass
    print(tier.lookup(keys[1], waits).name)
"""


def test_the_tier_that_has_to_ask_remembers_what_is_true_and_not_too_much(folder: Path) -> None:
    printed = run(folder, "-c", REMOTE_IN_USE).split()
    assert printed == ["{'RETRY'}", "10", "0", "MISS", "HIT", "MISS"]


USE_REGISTERED = """
import register
from kvtier.tiering.factory import SecondaryTierFactory
print(SecondaryTierFactory.get_secondary_tier_cls({"type": "shelf"}).__name__)
"""


def test_registered_from_code(folder: Path) -> None:
    assert run(folder, "-c", USE_REGISTERED) == "ShelfTier\n"


def test_every_hook_and_every_fault_is_on_the_page() -> None:
    hooks = {
        name
        for name in vars(ConformanceHooks)
        if not name.startswith("_")
        and name not in ("harness", "fitting", "slowed", "skip_if_not_slowed")
    }
    assert {name for name in hooks if f"`{name}" not in PAGE} == set()
    assert {kind for kind in FaultKind if f"`{kind}`" not in PAGE} == set()


def test_the_defaults_on_the_page_are_the_defaults() -> None:
    kit = TierConformance
    assert (kit.call_limit_s, kit.patience_s, kit.settle_s, kit.row_bytes) == (0.1, 20, 0.05, 8192)
    assert "| 0.1 s, 20 s, 0.05 s, 8 KiB |" in PAGE
