"""Finds the class of an eviction policy by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.factory import ClassRegistry

if TYPE_CHECKING:
    from kvtier.cpu.policies.base import CachePolicy


def _load_policy_base() -> type[CachePolicy]:
    from kvtier.cpu.policies.base import CachePolicy

    return CachePolicy


class CachePolicyFactory:
    """Finds the policy class that `eviction_policy` and `cache_policy_module_path` name.

    Further policies come from entry points of the group `kvtier.policies`.
    """

    _registry: ClassVar[ClassRegistry[CachePolicy]] = ClassRegistry(
        kind="eviction policy",
        load_base=_load_policy_base,
        entry_point_group="kvtier.policies",
        name_key="eviction_policy",
        module_path_key="cache_policy_module_path",
    )

    @classmethod
    def register_cache_policy(cls, name: str, module_path: str, class_name: str) -> None:
        """Register `class_name` of `module_path` as `name`. See `ClassRegistry.register`."""
        cls._registry.register(name, module_path, class_name)

    @classmethod
    def get_cache_policy_cls(cls, name: str, module_path: str | None = None) -> type[CachePolicy]:
        """The class of the policy `name`. Raises `ConfigError` if there is none."""
        return cls._registry.resolve(name, module_path)

    @classmethod
    def known_names(cls) -> list[str]:
        """The names of all policies, kvtier's own first."""
        return cls._registry.known_names()


CachePolicyFactory.register_cache_policy("lru", "kvtier.cpu.policies.lru", "LRUCachePolicy")
CachePolicyFactory.register_cache_policy("arc", "kvtier.cpu.policies.arc", "ARCCachePolicy")
CachePolicyFactory.register_cache_policy(
    "density", "kvtier.cpu.policies.density", "DensityCachePolicy"
)
