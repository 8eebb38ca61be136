"""Valkey tiers for tests, driven by the harness of the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.base import OffloadingSpec, OffloadKey
from kvtier.testing import TierHarness
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.remote.manager import namespace_of
from kvtier.tiering.valkey.manager import ValkeySecondaryTierManager
from kvtier.tiering.valkey.servers import block_key
from tests.tiering.patience import PATIENCE_S

__all__ = ["ROW_BYTES", "little_memory", "server_keys", "valkey_harness"]

ROW_BYTES = 8192


def valkey_harness(url: str, *, namespace: str = "these weights", **keys: Any) -> TierHarness:
    """An engine with a valkey tier. Raises the errors of the tier's constructor."""

    def make_tier(spec: OffloadingSpec, view: memoryview) -> SecondaryTierManager:
        return ValkeySecondaryTierManager(spec, view, "valkey", url=url, **keys)

    return TierHarness(make_tier, row_bytes=ROW_BYTES, patience_s=PATIENCE_S, namespace=namespace)


def server_keys(harness: TierHarness, keys: list[OffloadKey]) -> list[bytes]:
    """The keys on the server of these blocks."""
    return [block_key(namespace_of(harness.fingerprint), key) for key in keys]


@contextmanager
def little_memory(most_bytes: int = 64 << 20) -> Iterator[None]:
    """Fails if this process takes more memory, even for a moment."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest so far
    before = _highest_resident_bytes()
    yield
    assert _highest_resident_bytes() - before < most_bytes


def _highest_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
