"""For authors of tiers: the conformance kit, and a wrapper that injects faults into any tier.

A tier conforms if a test class such as this one passes:

    class TestMyTier(TierConformance):
        def make_tier(self, spec, view):
            return MyTier(offloading_spec=spec, primary_kv_view=view, tier_type="my")

Only the kit (`TierConformance`) needs pytest. See docs/writing-a-tier.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.testing.conformance import TierConformance
    from kvtier.testing.damage import BackingBytes, Damage, ExampleBacking, inflict
    from kvtier.testing.faults import Fault, FaultKind, FaultSchedule, InjectedFault
    from kvtier.testing.faulty_tier import FaultyTier
    from kvtier.testing.harness import TierHarness
    from kvtier.testing.job_ledger import payload_of

__all__ = [
    "BackingBytes",
    "Damage",
    "ExampleBacking",
    "Fault",
    "FaultKind",
    "FaultSchedule",
    "FaultyTier",
    "InjectedFault",
    "TierConformance",
    "TierHarness",
    "inflict",
    "payload_of",
]

_HOMES = {
    "BackingBytes": "kvtier.testing.damage",
    "Damage": "kvtier.testing.damage",
    "ExampleBacking": "kvtier.testing.damage",
    "FaultyTier": "kvtier.testing.faulty_tier",
    "TierConformance": "kvtier.testing.conformance",
    "TierHarness": "kvtier.testing.harness",
    "inflict": "kvtier.testing.damage",
    "payload_of": "kvtier.testing.job_ledger",
}

# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(_HOMES.get(name, "kvtier.testing.faults")), name)
        except ModuleNotFoundError as error:
            if error.name != "pytest":
                raise
            raise ImportError(f"{name} needs pytest: pip install 'kvtier[testing]'") from None
        globals()[name] = value  # the next access finds it without coming here
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
