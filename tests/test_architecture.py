"""Who may import whom, and what importing kvtier costs.

The rules are read off the source text, so that an import inside a function counts like one at the
top of a module. `CONTRIBUTING.md` shows the same table to people; a test keeps the two equal.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent
SRC = REPO / "src"

PACKAGE = "kvtier"
ROOT = PACKAGE  # the room of kvtier/__init__.py itself

_LEAVES = frozenset({"base", "misuse"})
_GROUND = _LEAVES | {"config", "factory", "seal"}
_CPU = _GROUND | {"admission", "hints", "observe"}
_TIERING = _CPU | {"cpu"}
_CONNECTOR = _TIERING | {"tiering"}
_TOP = _CONNECTOR | {"connector"}

# A room is a module or folder right under src/kvtier. What it may import, itself apart:
MAY_IMPORT: dict[str, frozenset[str]] = {
    ROOT: frozenset(),
    "base": frozenset(),
    "misuse": frozenset(),
    "config": _LEAVES,
    "factory": _LEAVES | {"config"},
    "seal": _LEAVES | {"config"},
    "admission": _LEAVES,
    "hints": _LEAVES | {"config", "seal"},
    "observe": _LEAVES | {"config", "hints"},
    "cpu": _CPU,
    "tiering": _TIERING,
    "connector": _CONNECTOR,
    "engine": _TOP,
    "integrations": _TOP,
    "replay": _CONNECTOR,
    "cli": _TOP | {"engine", "integrations", "replay"},
    "__main__": frozenset({"cli"}),
    "testing": _TOP | {"engine", "integrations"},
}

# What it may name in annotations, under `if TYPE_CHECKING:`, besides.
MAY_NAME_IN_TYPES: dict[str, frozenset[str]] = {
    # A spec holds a configuration, and a configuration speaks in the contract's terms.
    "base": frozenset({"config"}),
    # The public names, loaded on first use.
    ROOT: frozenset({"base", "config", "cpu", "factory", "tiering"}),
}

MAX_FILES = 305
MAX_CLASS_LINES = 350

# Names that say nothing about what is inside.
DRAWERS = frozenset({"utils", "helpers", "misc"})

LIGHT_ROOMS = (
    *("base", "config", "factory", "misuse", "seal", "hints"),
    *("cpu", "tiering", "admission", "replay"),
)
LIGHT_DISTRIBUTIONS = frozenset({"numpy", "xxhash"})
NEED_TORCH = {
    "kvtier.cpu.cuda.trial",
    "kvtier.cpu.cuda.resources",
    "kvtier.cpu.cuda.page_mover",
    "kvtier.cpu.cuda.streams",
    "kvtier.cpu.cuda.copies",
    "kvtier.cpu.gpu_worker",
}
"""Modules of light rooms that are imported only where an engine has brought CUDA tensors."""


class Import(NamedTuple):
    line: int
    module: str
    names: tuple[str, ...]
    """What `from module import ...` takes from it; empty for a plain import."""
    types_only: bool


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _literal_dynamic_import(node: ast.AST) -> str | None:
    """The module in `import_module("...")` or `__import__("...")`: an import in other words."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    argument = node.args[0]
    if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
        return str(argument.value)
    return None


def imports_of(tree: ast.AST, package: str, types_only: bool = False) -> Iterator[Import]:
    """Every import below `tree`, at whatever depth. `package` is where relative ones start."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, (), types_only)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*parent, module] if module else parent)
            yield Import(node.lineno, module, tuple(a.name for a in node.names), types_only)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                yield from imports_of(ast.Module([child], []), package, True)
            for child in node.orelse:
                yield from imports_of(ast.Module([child], []), package, types_only)
        else:
            if (dynamic := _literal_dynamic_import(node)) is not None:
                yield Import(node.lineno, dynamic, (), types_only)  # type: ignore[attr-defined]
            yield from imports_of(node, package, types_only)


def _rooms_of(imported: Import) -> Iterable[str]:
    """The rooms of kvtier that one import reaches into; none for foreign modules."""
    top, _, rest = imported.module.partition(".")
    if top != PACKAGE:
        return ()
    if rest:
        return (rest.partition(".")[0],)
    if not imported.names:
        return (ROOT,)
    # `from kvtier import base` takes a room, `from kvtier import ReqContext` the package's own.
    return [
        name if name in MAY_IMPORT else ROOT for name in imported.names if name != "__version__"
    ]


def violations(src: Path) -> list[str]:
    """Everything under `src/kvtier` that breaks the rules, as `path:line: what`."""
    found: list[str] = []
    for path in sorted((src / PACKAGE).rglob("*.py")):
        where = path.relative_to(src).as_posix()
        parts = path.relative_to(src).with_suffix("").parts
        package = ".".join(parts[:-1])
        if parts[-1] == "__init__":
            parts = parts[:-1]
        room = parts[1] if len(parts) > 1 else ROOT
        found.extend(
            f"{where}:1: {drawer!r} says nothing about what is inside"
            for drawer in DRAWERS.intersection(parts)
        )
        if room not in MAY_IMPORT:
            found.append(f"{where}:1: {room!r} has no import rule: add one")
            continue
        for imported in imports_of(ast.parse(path.read_text(), where), package):
            allowed = MAY_IMPORT[room] | {room}
            if imported.types_only:
                allowed |= MAY_NAME_IN_TYPES.get(room, frozenset())
            found.extend(
                f"{where}:{imported.line}: {room} must not import {target}"
                for target in _rooms_of(imported)
                if target not in allowed
            )
    return found


def rules_without_a_room(src: Path) -> set[str]:
    """Rooms that a rule names, and that do not exist."""
    named = {room for rule in (*MAY_IMPORT.values(), *MAY_NAME_IN_TYPES.values()) for room in rule}
    named |= MAY_IMPORT.keys() | MAY_NAME_IN_TYPES.keys() | set(LIGHT_ROOMS)
    root = src / PACKAGE
    return {
        room
        for room in named - {ROOT}
        if not (root / f"{room}.py").is_file() and not (root / room / "__init__.py").is_file()
    }


def too_long_classes(src: Path) -> list[str]:
    """Classes of more than `MAX_CLASS_LINES` lines, as `path:line: name has n lines`."""
    found = []
    for path in sorted((src / PACKAGE).rglob("*.py")):
        where = path.relative_to(src).as_posix()
        for node in ast.walk(ast.parse(path.read_text(), where)):
            if not isinstance(node, ast.ClassDef):
                continue
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_CLASS_LINES:
                found.append(f"{where}:{node.lineno}: {node.name} has {num_lines} lines")
    return found


def modules_of(rooms: Iterable[str], src: Path) -> list[str]:
    """The import names of all modules in these rooms, as far as they exist."""
    names = []
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        if len(parts) > 1 and parts[1] in rooms:
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


_PROBE = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def foreign_modules(modules: Iterable[str], src: Path) -> set[str]:
    """Top-level modules, neither ours nor Python's own, that importing `modules` brings along."""
    loaded = subprocess.run(
        [sys.executable, "-c", _PROBE, *modules],
        env=os.environ | {"PYTHONPATH": str(src)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {
        name
        for name in json.loads(loaded.stdout)
        if name != PACKAGE
        and name not in sys.stdlib_module_names
        # What Cython registers for the modules it has compiled, numpy's among them.
        and name != "cython_runtime"
        and not name.startswith("_cython_")
    }


# ---------------------------------------------------------------------------------------------
# The real tree
# ---------------------------------------------------------------------------------------------


def test_imports_go_downward_only() -> None:
    assert violations(SRC) == []


def test_every_rule_is_about_a_room_that_exists() -> None:
    assert rules_without_a_room(SRC) == set()
    assert {name for name in NEED_TORCH if name not in modules_of(LIGHT_ROOMS, SRC)} == set()


def test_there_are_few_files() -> None:
    num_files = len(list((SRC / PACKAGE).rglob("*.py")))
    assert num_files <= MAX_FILES, "fold a file that one other file imports into that file"


def test_no_class_is_long() -> None:
    assert too_long_classes(SRC) == []


def test_tests_have_no_drawers_either() -> None:
    assert [path for path in (REPO / "tests").rglob("*") if path.stem in DRAWERS] == []


def test_light_rooms_need_numpy_and_xxhash_alone() -> None:
    modules = [name for name in modules_of(LIGHT_ROOMS, SRC) if name not in NEED_TORCH]
    assert "kvtier.base" in modules
    assert "kvtier.cpu.manager" in modules
    assert foreign_modules(modules, SRC) - LIGHT_DISTRIBUTIONS == set()


def test_importing_the_package_alone_loads_nothing_foreign() -> None:
    assert foreign_modules(["kvtier"], SRC) == set()


def test_importing_the_package_is_quick() -> None:
    probe = "import time; t = time.process_time(); import kvtier; print(time.process_time() - t)"
    # The best of several, in processor time: the bound is about our work, not a busy machine's.
    seconds = min(
        float(
            subprocess.run(
                [sys.executable, "-c", probe],
                env=os.environ | {"PYTHONPATH": str(SRC)},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(5)
    )
    assert seconds < 0.1


def test_contributing_shows_the_same_rules() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## Who may import whom\n")[2].partition("\n## ")[0]
    shown = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 2:
            shown[cells[0].strip("`")] = frozenset(re.findall(r"`(\w+)`", cells[1]))
    assert shown == {room: rule for room, rule in MAY_IMPORT.items() if room != ROOT}


# ---------------------------------------------------------------------------------------------
# The checker can fail
# ---------------------------------------------------------------------------------------------

SOUND_TREE = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from kvtier.base import Key\n__version__ = '1'\n",
    "base.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from kvtier.config import Config\n",
    "config/__init__.py": "from kvtier.config.sizes import parse\nimport kvtier.base\n",
    "config/sizes.py": "parse = int\n",
    "cpu/manager.py": "from kvtier import base, __version__\nimport kvtier.misuse as misuse\n"
    "from kvtier.cpu.common import Spec\n",
    "cli/main.py": "def run():\n    import kvtier.engine\n"
    "    from kvtier.integrations import vllm\n",
}

# One file each, added to the sound tree, and what has to be said about it.
UNSOUND_FILES = {
    "upward": (
        "cpu/policy.py",
        "import kvtier.tiering.manager\n",
        "kvtier/cpu/policy.py:1: cpu must not import tiering",
    ),
    "from": (
        "cpu/policy.py",
        "\nfrom kvtier.connector.scheduler import Scheduler\n",
        "kvtier/cpu/policy.py:2: cpu must not import connector",
    ),
    "inside a function": (
        "tiering/base.py",
        "class Tier:\n    def start(self):\n        from kvtier.connector import events\n",
        "kvtier/tiering/base.py:3: tiering must not import connector",
    ),
    "for types": (
        "admission/reuse.py",
        "import typing\nif typing.TYPE_CHECKING:\n    from kvtier.cpu import manager\n",
        "kvtier/admission/reuse.py:3: admission must not import cpu",
    ),
    "at run time, what is for types alone": (
        "base.py",
        "import kvtier.config\n",
        "kvtier/base.py:1: base must not import config",
    ),
    "beside TYPE_CHECKING": (
        "base.py",
        "import typing as t\nif t.TYPE_CHECKING:\n    pass\nelse:\n    import kvtier.config\n",
        "kvtier/base.py:5: base must not import config",
    ),
    "relative": (
        "cpu/policies/lru.py",
        "from ...engine import model\n",
        "kvtier/cpu/policies/lru.py:1: cpu must not import engine",
    ),
    "relative, of a package": (
        "admission/__init__.py",
        "from .. import cpu\n",
        "kvtier/admission/__init__.py:1: admission must not import cpu",
    ),
    "dynamic": (
        "factory.py",
        "import importlib\nspec = importlib.import_module('kvtier.tiering.spec')\n",
        "kvtier/factory.py:2: factory must not import tiering",
    ),
    "sideways": (
        "engine/model.py",
        "from kvtier import integrations\n",
        "kvtier/engine/model.py:1: engine must not import integrations",
    ),
    "by the public name": (
        "engine/model.py",
        "from kvtier import ReqContext\n",
        "kvtier/engine/model.py:1: engine must not import kvtier",
    ),
    "eagerly from the root": (
        "__init__.py",
        "from kvtier.base import Key\n",
        "kvtier/__init__.py:1: kvtier must not import base",
    ),
    "of the test kit": (
        "cli/main.py",
        "import kvtier.testing\n",
        "kvtier/cli/main.py:1: cli must not import testing",
    ),
    "an unknown room": (
        "gadgets/__init__.py",
        "",
        "kvtier/gadgets/__init__.py:1: 'gadgets' has no import rule: add one",
    ),
    "a drawer": (
        "cpu/utils.py",
        "",
        "kvtier/cpu/utils.py:1: 'utils' says nothing about what is inside",
    ),
    "a folder that is a drawer": (
        "cpu/helpers/__init__.py",
        "",
        "kvtier/cpu/helpers/__init__.py:1: 'helpers' says nothing about what is inside",
    ),
}


def plant(src: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = src / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    plant(tmp_path, SOUND_TREE)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("case", UNSOUND_FILES)
def test_an_unsound_import_is_reported(case: str, tmp_path: Path) -> None:
    name, text, complaint = UNSOUND_FILES[case]
    plant(tmp_path, SOUND_TREE | {name: text})
    assert violations(tmp_path) == [complaint]


def test_a_rule_without_a_room_is_reported(tmp_path: Path) -> None:
    plant(tmp_path, {f"{room}.py": "" for room in MAY_IMPORT if room not in (ROOT, "cpu")})
    assert rules_without_a_room(tmp_path) == {"cpu"}


def test_a_long_class_is_reported(tmp_path: Path) -> None:
    body = "    x = 1\n" * (MAX_CLASS_LINES - 1)
    plant(tmp_path, {"cpu/short.py": f"class Short:\n{body}", "cpu/long.py": ""})
    assert too_long_classes(tmp_path) == []
    plant(tmp_path, {"cpu/long.py": f"\nclass Long:\n{body}    y = 2\n"})
    assert too_long_classes(tmp_path) == [
        f"kvtier/cpu/long.py:2: Long has {MAX_CLASS_LINES + 1} lines"
    ]


def test_a_foreign_module_is_reported(tmp_path: Path) -> None:
    plant(tmp_path, {"__init__.py": "", "cpu/__init__.py": "", "cpu/worker.py": "import torch\n"})
    (tmp_path / "torch.py").touch()
    assert modules_of(["cpu"], tmp_path) == ["kvtier.cpu", "kvtier.cpu.worker"]
    assert foreign_modules(["kvtier.cpu"], tmp_path) == set()
    assert foreign_modules(["kvtier.cpu", "kvtier.cpu.worker"], tmp_path) == {"torch"}
