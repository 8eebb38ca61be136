"""`import kvtier` offers the whole public API, and nothing by accident."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import kvtier
import kvtier.base

OTHERS = {
    "AttentionKind": "kvtier.config",
    "CPUOffloadingManager": "kvtier.cpu.manager",
    "CPUOffloadingSpec": "kvtier.cpu.spec",
    "CPUPrimaryTierOffloadingManager": "kvtier.tiering.primary",
    "ConfigError": "kvtier.config",
    "ExampleSecondaryTierManager": "kvtier.tiering.example.manager",
    "JobNotBegun": "kvtier.tiering.base",
    "JobResult": "kvtier.tiering.base",
    "OffloadingCacheConfig": "kvtier.config",
    "OffloadingConfig": "kvtier.config",
    "OffloadingGroupConfig": "kvtier.config",
    "OffloadingModelConfig": "kvtier.config",
    "OffloadingParallelConfig": "kvtier.config",
    "OffloadingSpecFactory": "kvtier.factory",
    "SecondaryTierFactory": "kvtier.tiering.factory",
    "SecondaryTierManager": "kvtier.tiering.base",
    "TieringOffloadingManager": "kvtier.tiering.manager",
    "TieringOffloadingSpec": "kvtier.tiering.spec",
    "TransferJob": "kvtier.tiering.base",
    "load_user_config": "kvtier.config",
}


def test_the_names_are_those_of_the_contract_and_few_more() -> None:
    assert kvtier.__all__ == sorted({*kvtier.base.__all__, *OTHERS, "__version__"})
    assert dir(kvtier) == kvtier.__all__


@pytest.mark.parametrize("name", kvtier.base.__all__)
def test_contract_names_are_the_contracts_own(name: str) -> None:
    assert getattr(kvtier, name) is getattr(kvtier.base, name)


@pytest.mark.parametrize(("name", "module"), OTHERS.items())
def test_other_names_come_from_where_they_live(name: str, module: str) -> None:
    assert getattr(kvtier, name) is getattr(import_module(module), name)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING are a second list of the API, and must not drift."""
    tree = ast.parse(Path(kvtier.__file__).read_text())
    seen = {
        f"{node.module}.{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    contract = {f"kvtier.base.{name}" for name in kvtier.base.__all__}
    assert seen == contract | {f"{module}.{name}" for name, module in OTHERS.items()}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'kvtier' has no attribute 'Offloading'"):
        kvtier.Offloading  # type: ignore[attr-defined]  # noqa: B018
