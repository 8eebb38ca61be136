"""How tiers are shut down: all at the same time, and none can hold up the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tiering.base import SecondaryTierManager

logger = logging.getLogger(__name__)

_SHUTDOWN_SHARE = 0.5
"""How much of the time a tier has for draining alone, before it is told to shut down."""


def close_tiers(
    tiers: Sequence[SecondaryTierManager], timeout_s: float, spent_s: float = 0.0
) -> None:
    """Drain and shut down tiers; return when all have, or when the time is up. `spent_s`: how much
    of it is over already.

    What one tier raises, or lacks because its constructor has not done its part, is logged and
    does not keep the others open. Afterwards no tier can get at the primary tier's slots: asking
    for a row raises. A tier that has not ended by then keeps a thread of its own, which does not
    keep the process alive.
    """
    start, left_s = time.monotonic(), max(0.0, timeout_s - spent_s)
    drains = [_run(tier, "drain_jobs") for tier in tiers]
    _join(drains, start + left_s * _SHUTDOWN_SHARE)
    shutdowns = [_run(tier, "shutdown") for tier in tiers]
    _join(shutdowns + drains, start + left_s)
    for tier, drain, shutdown in zip(tiers, drains, shutdowns, strict=True):
        if drain.is_alive() or shutdown.is_alive():
            logger.error(
                "Tier %r did not end within %g s: it is left behind. Blocks on their way to it are "
                "lost.",
                _name_of(tier),
                timeout_s,
            )
        _release_rows(tier)


def _name_of(tier: SecondaryTierManager) -> str:
    return str(getattr(tier, "tier_type", type(tier).__name__))


def _release_rows(tier: SecondaryTierManager) -> None:
    try:
        if hasattr(tier, "rows"):
            tier.rows.release()
    except Exception:
        logger.exception("Tier %r: its rows cannot be released", _name_of(tier))


def _run(tier: SecondaryTierManager, method: str) -> threading.Thread:
    name = _name_of(tier)

    def call() -> None:
        try:
            getattr(tier, method)()
        except Exception:
            logger.exception("Tier %r: %s raised", name, method)

    thread = threading.Thread(target=call, name=f"kvtier-{method}-{name}", daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
