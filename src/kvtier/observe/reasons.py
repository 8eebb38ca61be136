"""Sentences that say why a block is not there, each with what to do about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvtier.observe.journal import Declined, What

__all__ = [
    "Reason",
    "amount",
    "at",
    "block_reason",
    "declined_reason",
    "late_reason",
    "seconds",
    "tier_reason",
]

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Reason:
    """Why blocks were not loaded."""

    reason: str
    """A word for programs."""
    tier: str | None
    """The place that it is about."""
    text: str
    remedy: str | None
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """As it is sent."""
        return asdict(self)


def seconds(value: float) -> str:
    """A duration, such as `12 ms`."""
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def amount(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def at(epoch_s: float) -> str:
    """A time in the zone of the engine's process, with the date if it is not within a day."""
    is_recent = abs(time.time() - epoch_s) < _DAY_S
    return time.strftime("%H:%M:%S" if is_recent else "%Y-%m-%d %H:%M:%S", time.localtime(epoch_s))


_OF_HOST: dict[What, tuple[str, str | None]] = {
    What.FILTERED: (
        "Host memory did not store it at {at}: too few requests had used it (store_threshold).",
        "Lower store_threshold.",
    ),
    What.UNWANTED: (
        "Host memory did not store it at {at}: the eviction policy would rather keep others.",
        "Raise cpu_bytes_to_use, or choose another eviction_policy.",
    ),
    What.TOO_MANY: (
        "Host memory did not store it at {at}: the prompt is larger than host memory.",
        "Raise cpu_bytes_to_use.",
    ),
    What.REFUSED: (
        "Host memory had no slot for it at {at}: transfers held too many.",
        "Raise cpu_bytes_to_use, or look for a tier that stores too slowly.",
    ),
    What.STALE: (
        "It was not stored at {at}: it may have been computed before a reset of the cache.",
        None,
    ),
    What.COPY_FAILED: (
        "The copy from the device to host memory failed at {at}.",
        "See the engine's log of that time.",
    ),
    What.STORED: (
        "Host memory stored it at {at}, and had lost it later without a record.",
        None,
    ),
}

_OF_TIER: dict[What, tuple[str, str | None]] = {
    What.REMOVED: ("{tier} evicted it at {at}.", "Give the tier more room."),
    What.LOST: (
        "{tier} said that it has it, and could not load it at {at}: it was evicted or damaged.",
        "`kvtier store verify` finds damaged blocks.",
    ),
    What.SHED: (
        "{tier} was cut off when the block should have been stored at {at}{cut_off}.",
        "See the engine's log; the tier is tried again by itself.",
    ),
    What.OVER_BUDGET: (
        "It was not sent to {tier} at {at}: the write budget was used up.",
        "Raise write_budget of the tier.",
    ),
    What.DROPPED: (
        "It was dropped at {at} while it waited for {tier}, which stores too slowly.",
        'Use a faster tier, more host memory, or write = "second_use" or "adaptive".',
    ),
    What.KEPT_OUT: (
        'A hint ("write": "never", "store_tiers") or a rule kept it out of {tier} at {at}.',
        "Remove the hint, or add the tier to the tenant's tiers.",
    ),
    What.LEFT_OUT: (
        "{tier}'s write policy expected no use of it when it left host memory at {at}.",
        'write = "through" stores every block.',
    ),
    What.UNWRITTEN: (
        "It left host memory at {at} before it could be written to {tier}.",
        'More host memory, or write = "through".',
    ),
    What.STORE_FAILED: (
        "{tier} could not store it at {at}.",
        "See the engine's log of that time; is the tier full or read-only?",
    ),
    What.SWITCHED_OFF: (
        "It was not sent to {tier} at {at}: the operator has switched stores off.",
        "Switch them on with `kvtier switch`.",
    ),
}


def block_reason(
    what: What,
    label: str,
    when: str,
    request: str | None,
    cut_off: tuple[str, str] | None = None,
) -> Reason:
    """Why a place does not have a block to which this has happened last. `request`: for which one.
    `cut_off`: since when a tier was cut off, and why."""
    if what is What.EVICTED:
        for_whom = "a request" if request is None else f"request {request}"
        text = f"It was evicted from host memory at {when}, to make room for {for_whom}."
        return Reason("evicted", label, text, "Raise cpu_bytes_to_use, or add a tier below.")
    text, remedy = _OF_TIER.get(what) or _OF_HOST.get(what) or _OF_HOST[What.STORED]
    since = "" if cut_off is None else f" (since {cut_off[0]}: {cut_off[1]})"
    text = text.format(at=when, tier=label, cut_off=since)
    return Reason(what.name.lower(), label, text, remedy)


def tier_reason(label: str, answer: str, cut_off: tuple[str, str] | None) -> Reason:
    """Why a tier was not asked for a block. `answer`: as in `journal.Asked`."""
    match answer:
        case "hint":
            return Reason(
                "hint",
                label,
                f"{label} was not asked: the request's hint kv_load_tiers excludes it.",
                "Remove the hint.",
            )
        case "rule":
            return Reason(
                "rule",
                label,
                f"{label} was not asked: the rule of the request's tenant excludes it.",
                "Add the tier to the tenant's tiers.",
            )
        case "cut off":
            since = "" if cut_off is None else f" since {cut_off[0]}: {cut_off[1]}"
            return Reason(
                "cut_off",
                label,
                f"{label} was not asked: its breaker is open{since}.",
                "See the engine's log; the tier is tried again by itself.",
            )
        case "switched off":
            return Reason(
                "switched_off",
                label,
                f"{label} was not asked: the operator has switched loads off.",
                "Switch them on with `kvtier switch`.",
            )
        case "lost":
            text, remedy = _OF_TIER[What.LOST]
            text = f"{label} said that it has the block, and then could not load it."
            return Reason("lost", label, text, remedy)
        case _:
            return Reason(
                "not_asked", label, f"{label} was not asked: the request had given up on it.", None
            )


def declined_reason(label: str, declined: Declined) -> Reason:
    """Why a request has computed blocks that a tier has."""
    load, compute = _estimate(declined.load_s), _estimate(declined.compute_s)
    has = f"{label} has {amount(declined.num_blocks, 'block')} of them. "
    costs = f"Loading was estimated at {load}, computing at {compute}"
    match declined.why:
        case "slower":
            others = ""
            if declined.num_held_up:
                others = f", with {amount(declined.num_held_up, 'other request')} held up by it"
            text = f"{has}{costs}{others}, so the request computed them."
            remedy = (
                "Nothing is wrong if the estimates are right. A faster tier, or more host "
                "memory (cpu_bytes_to_use), serves more."
            )
        case "late":
            text = (
                f"{has}{costs}. The load would have missed its deadline of "
                f"{seconds(declined.load_timeout_s)}, so the request computed them."
            )
            remedy = "Raise load_timeout_ms of the tier, or give it a faster disk or network."
        case "trial":
            text = (
                f"{has}{costs}. The request computed them all the same, to measure what "
                "computing costs; that happens for a few requests."
            )
            remedy = "Set prefill_tokens_per_s if the engine should not measure."
        case _:
            text = f"{has}{costs}. What is not known is measured first."
            remedy = "Wait for a few requests, or set prefill_tokens_per_s."
    return Reason(
        f"declined_{declined.why}",
        label,
        text,
        remedy,
        {"load_s": declined.load_s, "compute_s": declined.compute_s},
    )


def late_reason(label: str | None, what: str, after_s: float) -> Reason:
    """Why a request did not wait any longer. `what`: as in `RequestRecord.gave_up`."""
    if what == "lookup":
        text = f"{label} did not say within {seconds(after_s)} whether it has the block."
        return Reason("late_lookup", label, text, "Raise its lookup_timeout_ms if that is rare.")
    if what == "load":
        text = f"{label} did not load the blocks within its deadline; {seconds(after_s)} passed."
        return Reason("late_load", label, text, "Raise its load_timeout_ms if that is rare.")
    text = f"The request had waited for {seconds(after_s)}, the longest time, and gave up."
    return Reason("waited", label, text, "Raise load_timeout_ms of the tiers if that is rare.")


def _estimate(estimate: float | None) -> str:
    return "an unknown time" if estimate is None else seconds(estimate)
