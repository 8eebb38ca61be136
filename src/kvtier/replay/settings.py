"""What a replay simulates: the sizes and speeds of the tiers, and of the engine above them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvtier.config import ConfigError
from kvtier.config.options import WritePolicyName
from kvtier.config.sizes import as_size
from kvtier.cpu.policies.factory import CachePolicyFactory

__all__ = [
    "MOST_BLOCKS",
    "EngineSettings",
    "Failure",
    "FleetSettings",
    "ReplaySettings",
    "RouterName",
    "SettingError",
    "Sharing",
    "TierSettings",
]

MOST_BLOCKS = 1 << 28
"""The largest number of blocks of a tier. The managers need about 220 bytes for each block used."""


class SettingError(ValueError):
    """A setting makes no sense. The message says what is allowed."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class Sharing(StrEnum):
    """Where the blocks of a tier are that all engines of a fleet share."""

    LENT = "lent"
    """In a pool: each engine lends a part of its machine's memory, and loses it when it dies."""
    SERVER = "server"
    """On a server of its own, which outlives the engines."""


class RouterName(StrEnum):
    """Who gets a request."""

    ROUND_ROBIN = "round-robin"
    """The engines in turn."""
    STICKY = "sticky"
    """The engine that has had the conversation; for a new one, the engines in turn."""
    PREFIX = "prefix"
    """The engine whose host memory has most of the prompt, unless another is done sooner."""


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
    sharing: Sharing | None = None
    """How the engines of a fleet share the tier. None: each has one of its own."""
    replicas: int = 1
    """Copies of each block in a pool, in the memory of as many engines."""
    link_bytes_per_s: float = 0.0
    """For a shared tier: what the link of one engine carries, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The cost model of the engine. The defaults are those of Llama-3-8B on one H200: its prompts
    of 32,768 tokens take 1.2 s to compute (docs/benchmarks.md)."""

    prefill_tokens_per_s: float = 26_000.0
    """Prompt tokens per second at the start of a prompt."""
    attention_s: float = 0.0
    """What a prompt token takes more for each token before it, in seconds."""
    decode_step_s: float = 0.010
    """What a step takes besides the prompt tokens that it computes."""
    step_tokens: int = 8192
    """The most prompt tokens that one step computes."""
    most_running: int = 64
    """The most requests that compute or decode at the same time."""

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """The seconds to compute some tokens of a prompt, of which `start` come before them."""
        num_pairs = num_tokens * (start + num_tokens / 2)
        return num_tokens / self.prefill_tokens_per_s + self.attention_s * num_pairs

    def fitted_to(self, times: Sequence[tuple[int, float]]) -> EngineSettings:
        """The same with the prefill speed at which prompts of these numbers of tokens take these
        seconds on an idle engine: one prompt for a constant speed, two for a speed that falls with
        the position.

        Raises `SettingError` if no such speed exists.
        """
        option = "--prefill-times"
        costs = []
        for num_tokens, seconds in times:
            num_steps = -(-num_tokens // self.step_tokens)
            per_token = (seconds - num_steps * self.decode_step_s) / num_tokens
            if per_token <= 0:
                raise SettingError(
                    option,
                    f"{num_tokens} tokens in {seconds:g} s: the {num_steps} steps alone take "
                    f"{num_steps * self.decode_step_s:g} s: give a shorter --decode-step, or a "
                    "longer prompt",
                )
            costs.append((num_tokens, per_token))
        if len(costs) == 1:
            return replace(self, prefill_tokens_per_s=1 / costs[0][1], attention_s=0.0)
        (short, at_short), (long, at_long) = sorted(costs)
        if short == long:
            raise SettingError(option, f"{short} tokens twice: give two lengths that differ")
        # A prompt of n tokens takes n * (per_token + attention * n / 2) seconds.
        attention_s = 2 * (at_long - at_short) / (long - short)
        per_token = at_short - attention_s * short / 2
        if attention_s < 0 or per_token <= 0:
            raise SettingError(
                option,
                f"a token takes {at_short * 1e6:.1f} us in the short prompt and "
                f"{at_long * 1e6:.1f} us in the long one, which attention cannot explain: measure "
                "again on an idle engine, with nothing cached, or give one prompt",
            )
        return replace(self, prefill_tokens_per_s=1 / per_token, attention_s=attention_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine dies, with its GPU, its host memory and its tiers."""

    engine: int
    """Its number, from 0."""
    percent: float
    """When: after this share of the time from the first arrival to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Several engines that serve one load. Each has the sizes and speeds of `ReplaySettings`."""

    num_engines: int
    router: RouterName = RouterName.STICKY
    copies: int = 1
    """The load is this many copies of the trace at the same time."""
    common_percent: float = 0.0
    """The share of the trace's conversations that are the same in all copies."""
    failures: tuple[Failure, ...] = ()
    restart_s: float = 60.0
    """From an engine's death to the moment when it serves again."""

    def check(self) -> None:
        """Raise `SettingError` if there can be no such fleet."""
        count = self.num_engines
        for failure in self.failures:
            if failure.engine >= count:
                raise SettingError(
                    "--fail",
                    f"there is no engine {failure.engine}: the {count} engines of --engines have "
                    f"the numbers 0 to {count - 1}",
                )
        if len({failure.engine for failure in self.failures}) >= count:
            raise SettingError(
                "--fail",
                f"all {count} engines would fail, and nobody would be left to serve: give fewer "
                "--fail, or more --engines",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Everything but the trace."""

    host: TierSettings
    tiers: tuple[TierSettings, ...] = ()
    """In the order in which they are asked."""
    gpu_bytes: int | None = None
    """The engine's own cache in device memory; None: nothing stays there between requests."""
    kv_bytes_per_token: int = 128 << 10
    """The default is that of Llama-3-8B in bf16: 32 layers, 8 KV heads of 128, K and V."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    is_timed: bool = True
    """False: requests are served one after the other, and nothing takes time."""
    speed_up: float = 1.0
    """Requests arrive this many times faster than in the trace."""
    fleet: FleetSettings | None = None
    """None: one engine."""

    def block_bytes(self, block_tokens: int) -> int:
        return self.kv_bytes_per_token * block_tokens

    def check(self, block_tokens: int) -> None:
        """Raise `SettingError` if a tier cannot exist."""
        if self.gpu_bytes is not None:
            self._check_size("--gpu", "the GPU", self.gpu_bytes, block_tokens)
        for option, tier in [("--host", self.host), *(("--tier", tier) for tier in self.tiers)]:
            self._check_size(option, tier.name, tier.num_bytes, block_tokens)
            self._check_size(option, tier.name, self.pool_bytes(tier), block_tokens)
            policy_option = "--policy" if tier is self.host else option
            try:
                CachePolicyFactory.get_cache_policy_cls(tier.policy)
            except ConfigError as unknown:
                raise SettingError(policy_option, str(unknown)) from None
            if tier.write_budget is not None and not self.is_timed:
                raise SettingError(
                    option,
                    f"{tier.name} has a write_budget, which is bytes per day, but requests are "
                    "counted without time (--no-timing; kvtier plan without --target-ttft): leave "
                    "write_budget out",
                )
            self._check_sharing(tier)
        if self.fleet is not None:
            self.fleet.check()

    def _check_sharing(self, tier: TierSettings) -> None:
        if tier.sharing is None:
            return
        if self.fleet is None:
            raise SettingError(
                "--tier",
                f"{tier.name} is shared, but there is only one engine: give kvtier replay "
                "--engines N, or leave shared out",
            )
        if tier.replicas > self.fleet.num_engines:
            raise SettingError(
                "--tier",
                f"{tier.name} has {tier.replicas} replicas, each in the memory of another engine, "
                f"but there are {self.fleet.num_engines}: give at most that many replicas, or more "
                "--engines",
            )

    def pool_bytes(self, tier: TierSettings) -> int:
        """The size of a tier: of a pool, what all engines lend together."""
        if tier.sharing is not Sharing.LENT or self.fleet is None:
            return tier.num_bytes
        return tier.num_bytes * self.fleet.num_engines

    def _check_size(self, option: str, name: str, num_bytes: int, block_tokens: int) -> None:
        block_bytes = self.block_bytes(block_tokens)
        num_blocks = num_bytes // block_bytes
        if num_blocks < 1:
            raise SettingError(
                option,
                f"{name} has {as_size(num_bytes)}, but one block of {block_tokens} tokens has "
                f"{as_size(block_bytes)}: give more, or fewer --kv-bytes-per-token",
            )
        if num_blocks > MOST_BLOCKS:
            raise SettingError(
                option,
                f"{name} would have {num_blocks:,} blocks of {as_size(block_bytes)}: give at most "
                f"{as_size(MOST_BLOCKS * block_bytes)}, or more --kv-bytes-per-token",
            )
