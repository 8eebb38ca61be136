"""`docs/seeds.md` is complete and true.

It maps every name in the five reports that kvtier grew from to the place it has here. The names
are in `tests/data/seed_names.txt`; `tests/seed_names.py` says how they were found. And it names the
tests of what the reports say of behaviour, risks and future work.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import seed_names

REPO = Path(__file__).resolve().parent.parent
MAP = REPO / "docs" / "seeds.md"
NAMES = seed_names.read(REPO / "tests" / "data" / "seed_names.txt")
REPORTS = REPO.parent / "shared" / "seeds"

EXISTING = ("here", "merged")
STATUSES = (*EXISTING, "planned", "dropped")


class Row(NamedTuple):
    names: list[str]
    reports: set[int]
    targets: list[str]
    status: str
    why: str


def rows(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 5:
            continue
        names, reports, here, status, why = cells
        numbers = {int(number) for number in re.findall(r"#(\d+)", reports)}
        found.append(Row(_quoted(names), numbers, _quoted(here), status, why))
    return found


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def _attributes_set_by(cls: type) -> frozenset[str]:
    """What the methods of a class assign to `self`, base classes included."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("kvtier.")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in own]
    return frozenset(
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def resolves(target: str) -> bool:
    """Whether a path exists, or a dotted name with an optional `(parameter)` at its end."""
    if "/" in target:
        return (REPO / target).exists()
    match = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", target)
    if match is None:
        raise ValueError(f"{target!r} is neither a path nor a dotted name")
    dotted, parameter = match.groups()
    parts = dotted.split(".")
    found: object = None
    for depth, part in enumerate(parts, start=1):
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, type):
            # An attribute of the instances: nothing further can follow it.
            return depth == len(parts) and part in _attributes_set_by(found)
        else:
            module = ".".join(parts[:depth])
            try:
                found = import_module(module)
            except ModuleNotFoundError as missing:
                if missing.name != module:
                    raise
                return False
    if parameter is None:
        return True
    assert callable(found)
    return parameter in inspect.signature(found).parameters


def problems(text: str, names: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with a map of these names."""
    found = []
    mapped: set[str] = set()
    for row in rows(text):
        label = ", ".join(row.names)
        if row.status not in STATUSES:
            found.append(f"{label}: the status {row.status!r} is none of {', '.join(STATUSES)}")
        elif bool(row.targets) == (row.status == "dropped"):
            found.append(f"{label}: {row.status}, so it has to have {_due_targets(row.status)}")
        for target in row.targets:
            if row.status in EXISTING and not resolves(target):
                found.append(f"{label}: {row.status}, but there is no {target}")
            if row.status == "planned" and resolves(target):
                found.append(f"{label}: {target} exists now, so the row is no longer planned")
        if not row.why:
            found.append(f"{label}: no reason is given")
        found.extend(f"{name}: mapped twice" for name in row.names if name in mapped)
        found.extend(f"{name}: not in the reports" for name in row.names if name not in names)
        mapped.update(row.names)
        reports = {number for name in row.names for number in names.get(name, ())}
        if row.reports != reports:
            found.append(f"{label}: from {sorted(reports)}, not from {sorted(row.reports)}")
    found.extend(f"{name}: not mapped" for name in names if name not in mapped)
    return found


def _due_targets(status: str) -> str:
    return "no place here" if status == "dropped" else "a place here"


def test_the_map_is_complete_and_true() -> None:
    assert problems(MAP.read_text(), NAMES) == []


# ---------------------------------------------------------------------------------------------
# Behaviour, risks and future work
# ---------------------------------------------------------------------------------------------

SUBJECTS = ("Behaviour", "Risks", "Future work")


@cache
def _tests_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.lower().startswith("test")
    )


def is_a_test(target: str) -> bool:
    """`path` or `path::name`, from the root of the repository."""
    path, separator, name = target.partition("::")
    file = REPO / path
    if not path.startswith("tests/") or not file.name.startswith("test_") or not file.is_file():
        return False
    return name in _tests_in(file) if separator else bool(_tests_in(file))


def unfounded(text: str, reports: set[int]) -> list[str]:
    """What is wrong with the tables of these subjects: each is to say something of every report."""
    found = []
    for subject in SUBJECTS:
        _, _, rest = text.partition(f"\n## {subject}\n")
        section, _, _ = rest.partition("\n## ")
        seen: set[int] = set()
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not line.startswith("| ") or cells[0] == "what the reports say":
                continue
            seen |= {int(number) for number in re.findall(r"#(\d+)", line)}
            if len(cells) != 4 or not all(cells):
                found.append(f"{line}: give four cells")
                continue
            said, _, tests, _ = cells
            named = _quoted(tests)
            if tests != "no" and not named:
                found.append(f"{said} name tests, or say no")
            found += [f"{said} there is no {target}" for target in named if not is_a_test(target)]
        found += [f"{subject}: nothing of #{number}" for number in sorted(reports - seen)]
    return found


def test_what_the_reports_say_is_tested_as_the_page_says() -> None:
    reports = {number for numbers in NAMES.values() for number in numbers}
    assert len(reports) == 5
    assert unfounded(MAP.read_text(), reports) == []


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the reports are not beside this checkout")
def test_the_names_are_those_of_the_reports() -> None:
    assert seed_names.without_ignored(seed_names.extract(REPORTS)) == NAMES


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the reports are not beside this checkout")
def test_nothing_is_ignored_in_vain() -> None:
    ignored = {name for names in seed_names.IGNORED.values() for name in names.split()}
    assert ignored <= seed_names.extract(REPORTS).keys()


# ---------------------------------------------------------------------------------------------
# The check can fail
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("kvtier.base", True),
        ("kvtier.nowhere", False),
        ("kvtier.base.ReqContext.kv_transfer_params", True),
        ("kvtier.base.ReqContext.no_such_attribute", False),
        ("kvtier.base.GPULoadStoreSpec.group_sizes", True),
        ("kvtier.base.GPULoadStoreSpec.block_ids", True),
        ("kvtier.base.GPULoadStoreSpec.block_ids.nothing", False),
        ("kvtier.base.make_offload_key(group_idx)", True),
        ("kvtier.base.make_offload_key(group)", False),
        ("src/kvtier/base.py", True),
        ("src/kvtier/abstract.py", False),
    ],
)
def test_what_resolves(target: str, expected: bool) -> None:
    assert resolves(target) is expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("| `a` | #1 | `kvtier.base` | here | w |", None),
        ("| `a` | #1 | `kvtier.nowhere` | planned | w |", None),
        ("| `a` | #1 | - | dropped | w |", None),
        ("| `a` | #1 | `kvtier.nowhere` | here | w |", "a: here, but there is no kvtier.nowhere"),
        ("| `a` | #1 | `src/x.py` | merged | w |", "a: merged, but there is no src/x.py"),
        (
            "| `a` | #1 | `kvtier.base` | planned | w |",
            "a: kvtier.base exists now, so the row is no longer planned",
        ),
        (
            "| `a` | #1 | `kvtier.base` | gone | w |",
            "a: the status 'gone' is none of here, merged, planned, dropped",
        ),
        ("| `a` | #1 | - | here | w |", "a: here, so it has to have a place here"),
        ("| `a` | #1 | `kvtier` | dropped | w |", "a: dropped, so it has to have no place here"),
        ("| `a` | #1 | `kvtier.base` | here | |", "a: no reason is given"),
        ("| `a` | #2 | - | dropped | w |", "a: from [1], not from [2]"),
        ("| `a` | #1 | - | dropped | w |\n" * 2, "a: mapped twice"),
        ("| `a`, `b` | #1 | - | dropped | w |", "b: not in the reports"),
        ("", "a: not mapped"),
    ],
)
def test_a_wrong_row_is_reported(line: str, complaint: str | None) -> None:
    assert problems(line, {"a": (1,)}) == ([] if complaint is None else [complaint])


def test_how_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text(
        "PR #7: see https://host/Some_Thing.py\n"
        "`pkg/new_file.py` 定义 SomeClass.init 和 helper、free_function 方法, tests/pkg/\n"
        r"some\_name, Word"
        "\n```\nimport numpy as np_thing\nfrom vllm.v1.part import PartOne\n"
        "class _Hidden:\n    size: int\n    def walk(self):\n        self.left.right = TOP_SIZE\n"
        "```\n"
    )
    assert seed_names.extract(tmp_path) == dict.fromkeys(
        [
            "PartOne",
            "SomeClass",
            "SomeClass.__init__",
            "TOP_SIZE",
            "_Hidden",
            "free_function",
            "helper",
            "left",
            "pkg/new_file.py",
            "right",
            "size",
            "some_name",
            "tests/pkg/",
            "vllm.v1.part",
            "walk",
        ],
        (7,),
    )


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("| A. | #1 | `tests/test_seeds_map.py::test_how_names_are_found` | w |", None),
        ("| A. | #1 | `tests/test_seeds_map.py` | w |", None),
        ("| A. | #1 | no | w |", None),
        ("| A. | #1 | no | |", "| A. | #1 | no | |: give four cells"),
        ("| A. | #1 | soon | w |", "A. name tests, or say no"),
        (
            "| A. | #1 | `tests/test_seeds_map.py::test_nothing` | w |",
            "A. there is no tests/test_seeds_map.py::test_nothing",
        ),
        ("| A. | #1 | `tests/test_nothing.py` | w |", "A. there is no tests/test_nothing.py"),
        ("| A. | #1 | `tests/lives.py` | w |", "A. there is no tests/lives.py"),
        ("| A. | #2 | no | w |", "Risks: nothing of #1"),
    ],
)
def test_a_row_without_its_test_is_reported(row: str, complaint: str | None) -> None:
    good = "| B. | #1 | no | w |"
    page = f"\n## Behaviour\n{good}\n\n## Risks\n{row}\n\n## Future work\n{good}\n"
    assert unfounded(page, {1}) == ([] if complaint is None else [complaint])
