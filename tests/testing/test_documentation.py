"""What docs/writing-a-tier.md shows works as shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import FaultKind, TierConformance
from kvtier.testing.conformance.hooks import ConformanceHooks
from kvtier.testing.sample_spec import sample_spec
from kvtier.testing.slots import LentSlots
from kvtier.tiering.factory import SecondaryTierFactory
from tests.installed import install

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "writing-a-tier.md").read_text()


def listings(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` with the files that the page shows."""
    for text in listings("python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shelf_tier", raising=False)
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
    assert len(skipped) == 4  # in one class or the other: restart, events, capacity, backing
    assert "failed" not in printed


def test_the_bad_day_is_the_same_every_time(folder: Path) -> None:
    printed = run(folder, "bad_day.py")
    assert run(folder, "bad_day.py") == printed
    assert "8 of 8 arrived" in printed
    assert re.search(r"^[1-7] of 8 arrived$", printed, re.MULTILINE)
    assert re.search(r"^[1-9]\d* faults$", printed, re.MULTILINE)


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
    entries = [json.loads(text)["secondary_tiers"] for text in listings("json")]
    for (entry,) in entries:
        tier = created(entry)
        assert type(tier).__name__ == "ShelfTier"
        assert tier.max_blocks == 5000
    assert [entry.get("module_path") for (entry,) in entries] == [None, "shelf_tier"]


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
        if not name.startswith("_") and name not in ("harness", "fitting", "slowed")
    }
    assert {name for name in hooks if f"`{name}" not in PAGE} == set()
    assert {kind for kind in FaultKind if f"`{kind}`" not in PAGE} == set()


def test_the_defaults_on_the_page_are_the_defaults() -> None:
    kit = TierConformance
    assert (kit.call_limit_s, kit.patience_s, kit.settle_s, kit.row_bytes) == (0.1, 20, 0.05, 8192)
    assert "| 0.1 s, 20 s, 0.05 s, 8 KiB |" in PAGE
