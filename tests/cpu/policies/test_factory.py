"""Names of eviction policies to their classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import ConfigError
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.factory import CachePolicyFactory
from kvtier.cpu.policies.lru import LRUCachePolicy
from tests.installed import install, write_module

POLICY_SOURCE = """
    from kvtier.cpu.policies.lru import LRUCachePolicy

    class MyPolicy(LRUCachePolicy):
        pass
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on `sys.path`."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_built_in_policies() -> None:
    assert CachePolicyFactory.get_cache_policy_cls("lru") is LRUCachePolicy
    assert CachePolicyFactory.get_cache_policy_cls("arc") is ARCCachePolicy


def test_a_policy_from_a_module(site: Path) -> None:
    write_module(site, "my_policies", POLICY_SOURCE)
    policy = CachePolicyFactory.get_cache_policy_cls("MyPolicy", "my_policies")
    assert policy.__module__ == "my_policies"
    assert policy(4).cache_capacity == 4


def test_an_installed_policy(site: Path) -> None:
    write_module(site, "my_installed_policies", POLICY_SOURCE)
    value = "my_installed_policies:MyPolicy"
    install(site, "my-installed-policies", "kvtier.policies", {"mine": value})
    assert CachePolicyFactory.get_cache_policy_cls("mine").__module__ == "my_installed_policies"


def test_a_policy_registered_under_a_name(site: Path) -> None:
    write_module(site, "my_registered_policies", POLICY_SOURCE)
    CachePolicyFactory.register_cache_policy("test", "my_registered_policies", "MyPolicy")
    assert CachePolicyFactory.get_cache_policy_cls("test").__module__ == "my_registered_policies"
    with pytest.raises(ValueError, match=r"eviction policy 'lru' is already registered, as kvtier"):
        CachePolicyFactory.register_cache_policy("lru", "my_registered_policies", "MyPolicy")


def test_an_unknown_policy_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError) as refused:
        CachePolicyFactory.get_cache_policy_cls("lur")
    message = str(refused.value)
    assert message.startswith('eviction_policy: got "lur"; allowed: a known eviction policy (arc, ')
    assert "cache_policy_module_path" in message
    assert message.endswith('Did you mean "lru"?')


def test_a_class_that_is_no_policy_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError) as refused:
        CachePolicyFactory.get_cache_policy_cls("Path", "pathlib")
    assert str(refused.value) == (
        'eviction_policy: got "Path" (to be found in pathlib); allowed: the name of a subclass of '
        "kvtier.cpu.policies.base.CachePolicy. Derive Path from CachePolicy."
    )


def test_a_module_that_is_not_there_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r'^cache_policy_module_path: got "no_such_module"; '):
        CachePolicyFactory.get_cache_policy_cls("MyPolicy", "no_such_module")
