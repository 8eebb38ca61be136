"""A tier that records its lookups."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

COUNTING = {
    "type": "CountingTier",
    "module_path": "tests.integrations.vllm.counting_tier",
    "simulate_async": False,
    "max_pinned_share": 1,
    # Independent of the speed of this machine.
    "lookup_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
}
"""Its entry in `secondary_tiers`."""

ASKED_FOR: list[OffloadKey] = []
"""The keys of all lookups in this process."""


class CountingTier(ExampleSecondaryTierManager):
    """The example tier with a record of its lookups."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        ASKED_FOR.append(key)
        return super().lookup(key, req_context)

    def lookup_batch(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Sequence[LookupResult]:
        ASKED_FOR.extend(keys)
        return super().lookup_batch(keys, req_context)
