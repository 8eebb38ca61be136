"""What is to be said about the ledger of an fs root."""

from __future__ import annotations

from kvtier.tiering.fs.reader import Survey

__all__ = ["ledger_remark"]


def ledger_remark(seen: Survey) -> str | None:
    """What is wrong with it, and the remedy; None: nothing, as far as can be said."""
    if seen.balance is None:
        return (
            "the ledger cannot be read: the next engine that starts counts again, or "
            "`kvtier store gc` does"
        )
    error = seen.ledger_error
    if not error:
        return None
    remark = (
        f"the ledger says {abs(error)} bytes {'more' if error > 0 else 'less'} than there are: "
        "`kvtier store gc` counts again"
    )
    if any(seat.is_alive for seat in seen.seats):
        return f"{remark}. Engines measure it when they have stored nothing for a second"
    return remark
