"""A tier from another package gets `kvtier store` for free: the one of docs/writing-a-tier.md."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.testing import TierHarness
from tests.cli.store.slabs import fill, run_store
from tests.installed import install
from tests.test_architecture import REPO

PAGE = (REPO / "docs" / "writing-a-tier.md").read_text()
KEYS = TierHarness.keys(6)
ONE, OTHER = "aa" * 16, "bb" * 16

MAKES_ITS_STORAGE = """
from kvtier.tiering.inspection import InspectionRefused, InspectionTimedOut, Report
from shelf_store import StoredShelfTier

class UrlTier(StoredShelfTier):
    @classmethod
    def open_inspector(cls, location):
        if location == "shelf://locked":
            raise InspectionRefused(f"{location} is locked: unlock it")
        return None

    @classmethod
    def init_storage(cls, location):
        if location == "shelf://slow":
            raise InspectionTimedOut("the server of shelf://slow does not answer: try later")
        return Report({"path": location, "made": True}) if location.startswith("shelf:") else None
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages that are installed for the length of a test."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (shelf_\w+)\.py\n", text):
            (folder / f"{named[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def shelf(packages: Path, tmp_path: Path) -> Path:
    install(packages, "shelf", "kvtier.tiers", {"stored-shelf": "shelf_store:StoredShelfTier"})
    path = tmp_path / "blocks.shelf"
    lines = [f"{ONE if n < 4 else OTHER} {key.hex()} 8192\n" for n, key in enumerate(KEYS)]
    path.write_text("".join(lines))
    return path


def test_stat(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_store(capsys, "stat", shelf) == (
        0,
        {"path": str(shelf), "kind": "shelf", "blocks": 6, "descriptions": []},
    )
    assert main(["store", "stat", str(shelf)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["blocks", "6"]


def test_ls(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_store(capsys, "ls", shelf, "--limit", "2")
    assert (code, document["kind"], document["total"]) == (0, "shelf", 6)
    assert [(row["rank"], row["line"], row["namespace"]) for row in document["blocks"]] == [
        (1, 6, OTHER),
        (2, 5, OTHER),
    ]
    assert run_store(capsys, "ls", shelf, "--namespace", "aa")[1]["total"] == 4
    assert main(["store", "ls", str(shelf)]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["rank", "stored", "line", "size"]
    assert first.split()[:5] == ["1", "-", "6", "8", "KiB"]


def test_clear(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_store(capsys, "clear", shelf, "--yes", "--namespace", "bb")
    assert (code, document["cleared_blocks"]) == (0, 2)
    assert run_store(capsys, "stat", shelf)[1]["blocks"] == 4


@pytest.mark.parametrize(("command", "what"), [("verify", "verified"), ("gc", "garbage-collected")])
def test_what_the_tier_does_not_offer_is_refused(
    command: str, what: str, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", command, str(shelf)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(rf"{shelf} cannot .*{what}: its tier, of kind shelf", printed.err)


def test_errors_of_the_system_are_explained(
    shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.unlink(shelf)
    assert main(["store", "stat", str(shelf)]) == 2
    assert f"there is no {shelf}" in capsys.readouterr().err


def test_built_in_tiers_keep_what_is_theirs(
    shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slab = shelf.with_name("slab.shelf")
    fill(slab, KEYS)
    assert run_store(capsys, "stat", slab)[1]["kind"] == "slab"


def test_urls(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (packages / "url_tier.py").write_text(MAKES_ITS_STORAGE)
    install(packages, "url", "kvtier.tiers", {"url": "url_tier:UrlTier"})
    assert main(["store", "init", "shelf://new//one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "shelf://new//one", "made": True}
    for command, url, code, message in (
        ("init", "shelf://slow", 1, "the server of shelf://slow does not answer"),
        ("stat", "shelf://locked", 2, "shelf://locked is locked: unlock it"),
        ("stat", "nfs://server", 2, "no tier keeps blocks at nfs://server: give the path of"),
        ("init", "nfs://server", 2, "no tier can make storage at nfs://server: give the path of"),
    ):
        assert main(["store", command, url]) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert message in printed.err


def test_a_package_that_cannot_be_imported_is_left_out(
    packages: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(packages, "broken", "kvtier.tiers", {"broken": "there_is_no_such_module:Tier"})
    assert main(["store", "stat", str(shelf), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["blocks"] == 6
    assert "The tier 'broken' could not be loaded and is not asked" in printed.err


DESCRIBES_ITS_NAMESPACES = """
from kvtier.config import NamespaceDescription
from shelf_store import ShelfFile, StoredShelfTier

class DescribedFile(ShelfFile):
    def descriptions(self):
        made_of = {"max_model_len": 4096, "dtype": "bfloat16"}
        return {"aa" * 16: NamespaceDescription("aa" * 16, "org/llama", made_of)}

class DescribedTier(StoredShelfTier):
    @classmethod
    def open_inspector(cls, location):
        found = super().open_inspector(location)
        return None if found is None else DescribedFile(found._path)
"""


def test_descriptions(shelf: Path, packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (packages / "described_tier.py").write_text(DESCRIBES_ITS_NAMESPACES)
    install(packages, "described", "kvtier.tiers", {"described": "described_tier:DescribedTier"})
    (described,) = run_store(capsys, "stat", shelf)[1]["descriptions"]
    assert (described["namespace"], described["model"]) == (ONE, "org/llama")
    assert described["made_of"]["max_model_len"] == 4096
    assert main(["store", "stat", str(shelf)]) == 0
    *_, head, line = capsys.readouterr().out.splitlines()
    assert head == "made of"
    assert line == f"  {ONE}  org/llama, max_model_len 4096, dtype bfloat16"
    rows = run_store(capsys, "ls", shelf)[1]["blocks"]
    assert {(row["namespace"], row["model"]) for row in rows} == {(ONE, "org/llama"), (OTHER, None)}
    assert main(["store", "ls", str(shelf)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("block hash  model")
    assert sum(line.endswith("  org/llama") for line in lines) == 4
