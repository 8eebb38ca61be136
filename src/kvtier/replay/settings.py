"""What a replay simulates: the sizes and speeds of the tiers, and of the engine above them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtier.config import ConfigError
from kvtier.config.options import WritePolicyName
from kvtier.config.sizes import as_size
from kvtier.cpu.policies.factory import CachePolicyFactory

__all__ = ["EngineSettings", "ReplaySettings", "SettingError", "TierSettings"]

MOST_BLOCKS = 1 << 28
"""The largest number of blocks of a tier. The managers need about 220 bytes for each block used."""


class SettingError(ValueError):
    """A setting makes no sense. The message says what is allowed."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Host memory, or one tier below it."""

    name: str
    num_bytes: int
    policy: str = "lru"
    """The name of an eviction policy."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    """Added to each job, however many blocks it has."""
    write_policy: WritePolicyName = WritePolicyName.THROUGH
    """Which blocks a tier gets, and when. Has no meaning for host memory."""
    write_budget: int | None = None
    """Bytes that may be written to a tier in a day, on average. None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The cost model of the engine. The defaults are those of Llama-3-8B on one H200: its prompts
    of 32,768 tokens take 1.2 s to compute (docs/benchmarks.md)."""

    prefill_tokens_per_s: float = 26_000.0
    decode_step_s: float = 0.010
    """What a step takes besides the prompt tokens that it computes."""
    step_tokens: int = 8192
    """The most prompt tokens that one step computes."""
    most_running: int = 64
    """The most requests that compute or decode at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Everything but the trace."""

    host: TierSettings
    tiers: tuple[TierSettings, ...] = ()
    """In the order in which they are asked."""
    kv_bytes_per_token: int = 128 << 10
    """The default is that of Llama-3-8B in bf16: 32 layers, 8 KV heads of 128, K and V."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    is_timed: bool = True
    """False: requests are served one after the other, and nothing takes time."""
    speed_up: float = 1.0
    """Requests arrive this many times faster than in the trace."""

    def block_bytes(self, block_tokens: int) -> int:
        return self.kv_bytes_per_token * block_tokens

    def check(self, block_tokens: int) -> None:
        """Raise `SettingError` if a tier cannot exist."""
        block_bytes = self.block_bytes(block_tokens)
        for option, tier in [("--host", self.host), *(("--tier", tier) for tier in self.tiers)]:
            num_blocks = tier.num_bytes // block_bytes
            if num_blocks < 1:
                raise SettingError(
                    option,
                    f"{tier.name} has {as_size(tier.num_bytes)}, but one block of {block_tokens} "
                    f"tokens has {as_size(block_bytes)}: give more, or fewer --kv-bytes-per-token",
                )
            if num_blocks > MOST_BLOCKS:
                raise SettingError(
                    option,
                    f"{tier.name} would have {num_blocks:,} blocks of {as_size(block_bytes)}: give "
                    f"at most {as_size(MOST_BLOCKS * block_bytes)}, or more --kv-bytes-per-token",
                )
            policy_option = "--policy" if tier is self.host else option
            try:
                CachePolicyFactory.get_cache_policy_cls(tier.policy)
            except ConfigError as unknown:
                raise SettingError(policy_option, str(unknown)) from None
            if tier.write_budget is not None and not self.is_timed:
                raise SettingError(
                    option,
                    f"{tier.name} has a write_budget, which is bytes per day, but requests are "
                    "counted without time: leave write_budget or --no-timing out",
                )

    def with_host_bytes(self, num_bytes: int) -> ReplaySettings:
        """The same with another size of host memory."""
        return replace(self, host=replace(self.host, num_bytes=num_bytes))
