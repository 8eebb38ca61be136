"""The configuration, typed and checked.

The error for a value that is refused names the key, the value and the remedy.

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",)),),
        worker_kv_bytes_per_block=65536,
        engine_id="engine-0",
        model=OffloadingModelConfig(name="my-model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16),
        parallel=OffloadingParallelConfig(),
        extra_config={"cpu_bytes_to_use": "8GiB"},
    )
    config.options.eviction_policy, config.num_blocks, config.fingerprint()
"""

from kvtier.config.engine import (
    AttentionKind,
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from kvtier.config.errors import ConfigError, Problem
from kvtier.config.namespace import FINGERPRINT_BYTES, NamespaceDescription, NamespaceIdentity
from kvtier.config.offloading import OffloadingConfig, new_epoch
from kvtier.config.options import (
    TIER_KEYS,
    USER_KEYS,
    OffloadingOptions,
    ResetScope,
    StatusSocketChoice,
    TierConfig,
    WritePolicyName,
    read_secondary_tiers,
)
from kvtier.config.reader import (
    OptionReader,
    TierOptions,
    load_user_config,
    parse_user_config,
)
from kvtier.config.sizes import SizeError, format_size, parse_size
from kvtier.config.tenants import TenantRule, TenantRules

__all__ = [
    "FINGERPRINT_BYTES",
    "TIER_KEYS",
    "USER_KEYS",
    "AttentionKind",
    "ConfigError",
    "NamespaceDescription",
    "NamespaceIdentity",
    "OffloadingCacheConfig",
    "OffloadingConfig",
    "OffloadingGroupConfig",
    "OffloadingModelConfig",
    "OffloadingOptions",
    "OffloadingParallelConfig",
    "OptionReader",
    "Problem",
    "ResetScope",
    "SizeError",
    "StatusSocketChoice",
    "TenantRule",
    "TenantRules",
    "TierConfig",
    "TierOptions",
    "WritePolicyName",
    "format_size",
    "load_user_config",
    "new_epoch",
    "parse_size",
    "parse_user_config",
    "read_secondary_tiers",
]
