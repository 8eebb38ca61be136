"""README and documents: links work, named tests and benchmarks exist, the README is short."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.bench.__main__ import BENCHMARKS

REPO = Path(__file__).resolve().parent.parent
DOCS = sorted((REPO / "docs").glob("*.md"))
PAGES = [*(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *DOCS]
MAX_README_WORDS = 700


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if link.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[here](#a-title) [file](gone.md) [title](page.md#another)\n")
    assert broken_links(page) == ["gone.md", "page.md#another"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "seeds.md"], ids=lambda page: page.name
)
def test_named_tests_exist(page: Path) -> None:
    """Not in `seeds.md`, which also names vLLM's files; `test_seeds_map.py` checks that one."""
    named = re.findall(r"`(tests/[\w/.]+)`", page.read_text())
    assert [path for path in named if not (REPO / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_benchmarks_exist(page: Path) -> None:
    commands = re.findall(r"python -m tests\.bench((?: [a-z]\w+)+)", page.read_text())
    assert {name for names in commands for name in names.split()} <= BENCHMARKS.keys()


def test_the_readme_takes_two_minutes() -> None:
    assert len((REPO / "README.md").read_text().split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_begins_with_its_readers(page: Path) -> None:
    title, first, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ")
    assert first.startswith("For ")
