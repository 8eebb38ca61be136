"""Multi-tier KV-cache offloading for LLM inference.

Every public name can be imported from here: `from kvtier import OffloadingManager`. The module of a
name is imported when the name is first used, so `import kvtier` alone does not load numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.base import (
        BlockDescriber,
        BlockIDsLoadStoreSpec,
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
        LoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
        MetricDefinition,
        MetricKind,
        OffloadingEvent,
        OffloadingManager,
        OffloadingSpec,
        OffloadingStats,
        OffloadingWorker,
        OffloadKey,
        OffloadPolicy,
        PrefixLookup,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TierFilter,
        TierMatcher,
        TransferResult,
        WriteHint,
        get_offload_block_hash,
        get_offload_group_idx,
        make_offload_key,
        metric_series,
    )
    from kvtier.config import (
        AttentionKind,
        ConfigError,
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
        load_user_config,
    )
    from kvtier.cpu.manager import CPUOffloadingManager
    from kvtier.cpu.spec import CPUOffloadingSpec
    from kvtier.factory import OffloadingSpecFactory
    from kvtier.tiering.base import JobNotBegun, JobResult, SecondaryTierManager, TransferJob
    from kvtier.tiering.example.manager import ExampleSecondaryTierManager
    from kvtier.tiering.factory import SecondaryTierFactory
    from kvtier.tiering.manager import TieringOffloadingManager
    from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
    from kvtier.tiering.spec import TieringOffloadingSpec

__version__ = "0.1.0"

__all__ = [
    "AttentionKind",
    "BlockDescriber",
    "BlockIDsLoadStoreSpec",
    "CPUOffloadingManager",
    "CPUOffloadingSpec",
    "CPUPrimaryTierOffloadingManager",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ConfigError",
    "ExampleSecondaryTierManager",
    "GPULoadStoreSpec",
    "JobNotBegun",
    "JobResult",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "MetricDefinition",
    "MetricKind",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingCacheConfig",
    "OffloadingConfig",
    "OffloadingEvent",
    "OffloadingGroupConfig",
    "OffloadingManager",
    "OffloadingModelConfig",
    "OffloadingParallelConfig",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "OffloadingStats",
    "OffloadingWorker",
    "PrefixLookup",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "TierFilter",
    "TierMatcher",
    "TieringOffloadingManager",
    "TieringOffloadingSpec",
    "TransferJob",
    "TransferResult",
    "WriteHint",
    "__version__",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "load_user_config",
    "make_offload_key",
    "metric_series",
]

# The modules of the names that `kvtier.base` does not define.
_HOMES = {
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

# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES.get(name, "kvtier.base")), name)
        globals()[name] = value  # later accesses do not call __getattr__
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
