"""Builds the manager of host memory and the tiers below it from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvtier.base import MetricDefinition
from kvtier.config import (
    AttentionKind,
    ConfigError,
    Problem,
    ResetScope,
    TenantRules,
    new_epoch,
    read_secondary_tiers,
)
from kvtier.config.errors import redacted
from kvtier.config.options import WritePolicyName
from kvtier.cpu.hit_curve import CurveSize, tier_sizes
from kvtier.cpu.prompt_log import PromptLog, num_prompt_blocks
from kvtier.cpu.prompt_sources import source_metric_definitions
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.observe.observer import observe
from kvtier.observe.status_socket import Answer
from kvtier.tiering.factory import SecondaryTierFactory
from kvtier.tiering.health import TierSettings
from kvtier.tiering.manager import GroupShape, TieringOffloadingManager
from kvtier.tiering.metrics import (
    METRIC_DEFINITIONS,
    tier_label,
    tier_metric_definitions,
    tier_series,
    with_tier,
)
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.tier_calls import close_tiers

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig, OffloadingGroupConfig, TierConfig
    from kvtier.tiering.base import SecondaryTierManager
    from kvtier.tiering.factory import PlannedTier

__all__ = ["TieringOffloadingSpec", "settings_of", "shape_of"]


class TieringOffloadingSpec(CPUOffloadingSpec):
    """The spec of the CPU tier, with the tiers of `secondary_tiers` on the scheduler's side.

    The workers' side is that of the CPU tier: workers do not see the tiers and do not need their
    code. The scheduler's side opens the memory region too, because tiers read and write the slots
    in its process.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._tiering_manager: TieringOffloadingManager | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        """The metrics of the manager and its tiers. Raises `ConfigError` if a tier is unknown."""
        tiers = SecondaryTierFactory.plan_secondary_tiers(read_secondary_tiers(extra_config))
        return super().build_metric_definitions(extra_config) | _definitions_with(tiers)

    # This manager contains the CPU tier's manager, but is not a subclass of it.
    def get_manager(self) -> TieringOffloadingManager:  # type: ignore[override]
        """The manager, with all tiers started and all memory reserved.

        Raises `ConfigError`, with the errors of all tiers, if keys are unknown or missing, before
        any memory is reserved. Raises `NotEnoughMemory` if memory is short, `ConfigError` if a tier
        refuses a value, and `TierStartError` if it cannot start; all of these leave nothing behind.
        """
        if self._tiering_manager is None:
            self._tiering_manager = self._start()
        return self._tiering_manager

    def _start(self) -> TieringOffloadingManager:
        config, options = self.config, self.config.options
        shutdown_timeout_s = options.shutdown_timeout_ms / 1000
        # Report a typo before memory is reserved, which can take minutes.
        planned = SecondaryTierFactory.plan_secondary_tiers(options.secondary_tiers)
        _refuse_quotas(options.tenant_rules, planned)
        tenancy = self._tenancy()
        with ExitStack() as undo:
            region = SharedOffloadRegion(
                config.engine_id, config.num_blocks, None, config.row_bytes, config.cpu_page_size
            )
            undo.callback(region.cleanup)
            primary = CPUPrimaryTierOffloadingManager(
                num_blocks=config.num_blocks,
                mmap_region=region,
                cache_policy=options.eviction_policy,
                cache_policy_module_path=options.cache_policy_module_path,
                enable_events=config.enable_kv_cache_events,
                store_threshold=options.store_threshold,
                max_tracker_size=options.max_tracker_size,
                tenancy=tenancy,
            )
            tiers: list[SecondaryTierManager] = []
            undo.callback(close_tiers, tiers, shutdown_timeout_s)
            for tier in planned:
                view = primary.get_kv_memoryview()
                tiers.append(tier.start(view, self))
            manager = TieringOffloadingManager(
                primary,
                tiers,
                settings=[settings_of(tier_config) for tier_config in options.secondary_tiers],
                groups={
                    group.group_id: shape_of(group, config.cache.blocks_per_chunk)
                    for group in config.groups
                },
                new_fingerprint=self._new_fingerprint,
                prefill_tokens_per_s=options.prefill_tokens_per_s,
                shutdown_timeout_s=shutdown_timeout_s,
            )
            prompts = PromptLog(config, self._curve_sizes(tiers))
            manager.prompts = primary.prompts = prompts
            definitions = super().build_metric_definitions({}) | _definitions_with(planned)
            answers = {"curve": prompts.describe_curve, "start": self._start_remarks(tiers)}
            observe(manager, config, definitions, answers, self._about(tiers))
            undo.pop_all()
        return manager

    def _start_remarks(self, tiers: Sequence[SecondaryTierManager]) -> Answer:
        """Answers why tiers that are not empty have nothing for this engine."""
        labels = [tier_label(its.position, its.type) for its in self.config.options.secondary_tiers]
        named = list(zip(labels, tiers, strict=True))
        return lambda _: {"remarks": {label: tier.start_remark for label, tier in named}}

    def _about(self, tiers: Iterable[SecondaryTierManager]) -> list[dict[str, Any]]:
        """What the status of the engine says about each tier."""
        return [
            {
                "tier": tier_label(its.position, its.type),
                "type": its.type,
                "medium": str(tier.medium),
                "locality": str(tier.locality),
                "capacity_blocks": tier.capacity_blocks,
                "write": str(its.write),
                "write_budget": its.write_budget,
                "options": redacted(its.options),
            }
            for tier, its in zip(tiers, self.config.options.secondary_tiers, strict=True)
        ]

    def _curve_sizes(self, tiers: Iterable[SecondaryTierManager]) -> list[CurveSize]:
        """The sizes with tiers for which hit ratios are estimated: those down to each tier whose
        capacity is known."""
        config = self.config
        sizes: list[CurveSize] = []
        above = config.num_blocks
        for tier, its in zip(tiers, config.options.secondary_tiers, strict=True):
            if tier.capacity_blocks is None:
                continue
            # Blocks that are written when they leave host memory are in one place at a time.
            label = tier_label(its.position, its.type)
            adds = its.write in (WritePolicyName.ON_EVICT, WritePolicyName.ADAPTIVE)
            sizes += tier_sizes(
                (
                    tier_series(label, "estimated_hit_ratio"),
                    tier_series(label, "estimated_hit_ratio_double"),
                ),
                f"tier {its.position} ({its.type})",
                num_prompt_blocks(config, above),
                num_prompt_blocks(config, tier.capacity_blocks),
                adds,
            )
            above = above + tier.capacity_blocks if adds else max(above, tier.capacity_blocks)
        return sizes

    @property
    def _new_fingerprint(self) -> Callable[[], bytes] | None:
        """Makes the namespace that follows a reset; None if the tiers keep theirs."""
        if self.config.options.reset_scope is ResetScope.PRIMARY:
            return None
        return lambda: self.config.fingerprint(new_epoch())


def _refuse_quotas(rules: TenantRules, tiers: Iterable[PlannedTier]) -> None:
    """Raise `ConfigError` if a tenant has a floor or a cap in a tier that cannot keep it."""
    problems = [
        Problem(
            f"tenants.{rule.name}.{label}",
            "a floor or a cap",
            f"none: the tier {tier.config.type} does not know which tenant a block belongs to",
            f'Remove it. "tiers" in the rule keeps a tenant out of {label}; a tier of its own, '
            "with its own max_bytes, gives it a part",
        )
        for tier in tiers
        if not tier.tier_cls.keeps_quotas
        for rule in rules
        if (label := tier_label(tier.config.position, tier.config.type)) in rule.quotas
    ]
    if problems:
        raise ConfigError(*problems)


def _definitions_with(tiers: Iterable[PlannedTier]) -> dict[str, MetricDefinition]:
    """The metrics of the orchestrator over these tiers, and of the tiers themselves."""
    labels: list[str] = []
    own: dict[str, tuple[MetricDefinition, list[str]]] = {}
    for tier in tiers:
        labels.append(tier_label(tier.config.position, tier.config.type))
        for name, its in tier.tier_cls.build_metric_definitions(tier.config.options).items():
            own.setdefault(name, (its, []))[1].append(labels[-1])
    of_tiers = tier_metric_definitions(labels) if labels else {}
    of_tiers |= source_metric_definitions(labels)
    own_of_tiers = {name: with_tier(its, where) for name, (its, where) in own.items()}
    return METRIC_DEFINITIONS | of_tiers | own_of_tiers


def shape_of(group: OffloadingGroupConfig, blocks_per_chunk: int) -> GroupShape:
    """How the engine looks up the offloaded blocks of a group."""
    tokens = group.tokens_per_block * blocks_per_chunk
    if group.kind is AttentionKind.STATE_SPACE:
        return GroupShape(tokens, window_blocks=1)
    if group.window_tokens is None:
        return GroupShape(tokens, is_uncertain=group.kind is AttentionKind.UNKNOWN)
    # A sliding window includes the token to compute next, which needs no stored block.
    sliding = group.kind is AttentionKind.SLIDING_WINDOW
    earlier_tokens = group.window_tokens - 1 if sliding else group.window_tokens
    return GroupShape(tokens, window_blocks=max(1, -(-earlier_tokens // tokens)))


def settings_of(tier: TierConfig) -> TierSettings:
    """The settings of a tier. Keys that the user has not set get the defaults of
    `TierSettings`."""
    default = TierSettings()
    share = tier.max_pinned_share
    return TierSettings(
        lookup_timeout_s=_seconds(tier.lookup_timeout_ms, default.lookup_timeout_s),
        load_timeout_s=_seconds(tier.load_timeout_ms, default.load_timeout_s),
        store_timeout_s=_seconds(tier.store_timeout_ms, default.store_timeout_s),
        max_pinned_share=default.max_pinned_share if share is None else share,
        write_policy=tier.write,
        write_budget=tier.write_budget,
        enable_kv_events=tier.enable_kv_events,
    )


def _seconds(milliseconds: float | None, default: float) -> float:
    return default if milliseconds is None else milliseconds / 1000
