"""Sizes, times, speeds and tiers as the options of `kvtier replay` and `kvtier plan` give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from kvtier.config.options import WritePolicyName
from kvtier.config.sizes import SizeError, parse_size
from kvtier.replay.calibration import Calibration
from kvtier.replay.settings import (
    EngineSettings,
    Failure,
    FleetSettings,
    RouterName,
    SettingError,
    Sharing,
    TierSettings,
)

__all__ = [
    "FleetWishes",
    "by_name",
    "engine_of",
    "fleet_of",
    "price_of",
    "require",
    "seconds_of",
    "size_of",
    "tiers_of",
]

_TIER_READ, _TIER_WRITE, _TIER_LATENCY = "6GB", "4GB", "0.1ms"
"""About what one PCIe 4 NVMe drive does."""
_LENT_SPEED = "50GB"
"""About what host memory does."""
_LINK_SPEED = "25GB"
"""200 Gbit per second."""
_MOST_REPLICAS = 8
_MOST_ENGINES, _MOST_COPIES = 4096, 65_536
_FAILURE = re.compile(r"(\d{1,6})@(\d{1,3}(?:\.\d{1,6})?)%?", re.ASCII)
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(us|ms|s)", re.ASCII)
_PRICE = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST, _MOST = 1e-3, 1e12
_LEAST_SPEED = 1_000_000
Value = TypeVar("Value")
_TIER_KEYS = {
    "read_speed": "read_speed=6GB",
    "write_speed": "write_speed=4GB",
    "latency": "latency=0.1ms",
    "policy": "policy=lru",
    "write": "write=adaptive",
    "write_budget": "write_budget=2TiB",
    "shared": "shared=lent",
    "replicas": "replicas=2",
    "link_speed": "link_speed=25GB",
}
"""The keys of a tier, each with an example."""
_WRITE_POLICIES = ", ".join(WritePolicyName)


def tiers_of(texts: Iterable[str], measured: Calibration | None = None) -> tuple[TierSettings, ...]:
    """The tiers of all `--tier` options. Speeds that are not given are those measured, or else the
    defaults."""
    tiers = tuple(_tier_of(text, measured) for text in texts)
    names = [tier.name for tier in tiers]
    twice = next((name for name in names if names.count(name) > 1 or name == "host"), None)
    if twice is not None:
        raise SettingError("--tier", f'"{twice}" names two tiers: give each a name of its own')
    return tiers


class FleetWishes(NamedTuple):
    """The options of a fleet, as the user has written them. None: not given."""

    engines: int | None
    router: str | None
    copies: int | None
    common: float | None
    fail: list[str]
    restart_after: str | None


def fleet_of(wishes: FleetWishes) -> FleetSettings | None:
    """The fleet; None if the user has not asked for one."""
    given = {
        "--router": wishes.router,
        "--copies": wishes.copies,
        "--common": wishes.common,
        "--fail": wishes.fail or None,
        "--restart-after": wishes.restart_after,
    }
    if wishes.engines is None:
        lonely = next((option for option, value in given.items() if value is not None), None)
        if lonely is not None:
            raise SettingError(lonely, f"{lonely} is about several engines: give --engines N, too")
        return None
    _require_count(wishes.engines, "--engines", _MOST_ENGINES)
    copies = 1 if wishes.copies is None else wishes.copies
    _require_count(copies, "--copies", _MOST_COPIES)
    if wishes.common is not None and copies == 1:
        raise SettingError(
            "--common",
            "one copy of the trace has nothing in common with others: give --copies N, too",
        )
    common = wishes.common or 0.0
    if not 0 <= common <= 100:
        raise SettingError("--common", f"{common:g}: give percent of the conversations, 0 to 100")
    if wishes.restart_after is not None and not wishes.fail:
        raise SettingError("--restart-after", "no engine fails: give --fail ENGINE@PERCENT, too")
    return FleetSettings(
        num_engines=wishes.engines,
        router=_router_of(wishes.router or RouterName.STICKY),
        copies=copies,
        common_percent=common,
        failures=tuple(map(_failure_of, wishes.fail)),
        restart_s=seconds_of(wishes.restart_after or "60s", "--restart-after"),
    )


def _require_count(value: int, option: str, most: int) -> None:
    if not 1 <= value <= most:
        raise SettingError(option, f"{value}: give a whole number from 1 to {most}")


def _router_of(text: str) -> RouterName:
    try:
        return RouterName(text)
    except ValueError:
        raise SettingError("--router", f'"{text}": give one of {", ".join(RouterName)}') from None


def _failure_of(text: str) -> Failure:
    match = _FAILURE.fullmatch(text)
    if match is None or float(match[2]) > 100:
        raise SettingError(
            "--fail",
            f'"{text}": write ENGINE@PERCENT, such as 3@40%: engine 3 dies when 40 % of the time '
            "have passed",
        )
    return Failure(int(match[1]), float(match[2]))


def require(value: float, option: str, allowed: str) -> None:
    """Refuse a number that is 0 or less, or of no sensible size. `allowed`: what to give
    instead."""
    if not _LEAST <= value <= _MOST:
        raise SettingError(option, f"{value:g}: give {allowed}")


def size_of(text: str, option: str, *, is_speed: bool = False) -> int:
    """The bytes of a size. `is_speed`: `/s` at its end is allowed. A speed without a unit would be
    replayed for hours."""
    try:
        num_bytes = parse_size(text.removesuffix("/s") if is_speed else text)
    except SizeError as error:
        raise SettingError(option, f'"{text}": {error}') from None
    if is_speed and num_bytes < _LEAST_SPEED:
        raise SettingError(option, f'"{text}": give at least 1MB per second; is the unit right?')
    return num_bytes


def seconds_of(text: str, option: str, *, may_be_zero: bool = True) -> float:
    """The seconds of a time such as `0.1ms`."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _TIME_UNITS[match[2]] if match else -1.0
    if seconds < 0 or not (seconds or may_be_zero):
        raise SettingError(option, f'"{text}": write a number and one of us, ms, s, such as 0.1ms')
    return seconds


def engine_of(
    prefill: float | None, prefill_times: str | None, engine: EngineSettings
) -> EngineSettings:
    """The engine with the prefill speed of `--prefill` or `--prefill-times`, if one was given."""
    if prefill_times is None:
        if prefill is None:
            return engine
        require(prefill, "--prefill", "prompt tokens per second, from 0.001 to 1e12")
        return replace(engine, prefill_tokens_per_s=prefill)
    if prefill is not None:
        raise SettingError("--prefill-times", "give either --prefill or --prefill-times")
    return engine.fitted_to(_prompt_times_of(prefill_times))


def by_name(
    texts: Iterable[str],
    option: str,
    names: Sequence[str],
    parse: Callable[[str], Value],
    example: str,
) -> dict[str, Value]:
    """The values of an option of the form NAME=VALUE that may be given for several tiers."""
    values: dict[str, Value] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names or not value or name in values:
            known = ", ".join(names) or "none; give --tier first"
            raise SettingError(
                option,
                f'"{text}": write NAME=VALUE, such as {example}, once for each; the names are '
                f"{known}",
            )
        values[name] = parse(value)
    return values


def price_of(text: str) -> float:
    """A price, such as 0.10."""
    if not _PRICE.fullmatch(text) or not float(text):
        raise SettingError("--cost-per-gb", f'"{text}": write a number above 0, such as 0.10')
    return float(text)


def _prompt_times_of(text: str) -> list[tuple[int, float]]:
    """The tokens and seconds of one or two prompts, such as `8192:212ms,32768:1.22s`."""
    times: list[tuple[int, float]] = []
    for pair in text.split(","):
        tokens, colon, time = pair.partition(":")
        if not colon or not re.fullmatch(r"[1-9]\d{0,8}", tokens, re.ASCII):
            times = []
            break
        times.append((int(tokens), seconds_of(time, "--prefill-times", may_be_zero=False)))
    if not 1 <= len(times) <= 2:
        raise SettingError(
            "--prefill-times",
            f'"{text}": write TOKENS:TIME of one or two prompts, such as 8192:212ms,32768:1.22s',
        )
    return times


def _tier_of(text: str, measured: Calibration | None) -> TierSettings:
    """One `--tier`: NAME:SIZE[,KEY=VALUE...]."""
    head, *pairs = text.split(",")
    name, colon, size = head.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise SettingError("--tier", f'"{text}": write NAME:SIZE, such as disk:2TiB')
    given = _pairs_of(text, pairs)
    sharing = _sharing_of(given)
    speeds = {"read": float(parse_size(_TIER_READ)), "write": float(parse_size(_TIER_WRITE))}
    latency_s = seconds_of(_TIER_LATENCY, "--tier")
    if sharing is Sharing.LENT:
        speeds = dict.fromkeys(speeds, float(parse_size(_LENT_SPEED)))
    elif measured is not None and sharing is None:
        speeds = {"read": measured.read_bytes_per_s, "write": measured.write_bytes_per_s}
        latency_s = measured.latency_s
    for direction in speeds:
        if f"{direction}_speed" in given:
            wanted = given[f"{direction}_speed"]
            speeds[direction] = float(size_of(wanted, "--tier", is_speed=True))
    return TierSettings(
        name=name,
        num_bytes=size_of(size, "--tier"),
        policy=given.get("policy", "lru"),
        read_bytes_per_s=speeds["read"],
        write_bytes_per_s=speeds["write"],
        latency_s=seconds_of(given["latency"], "--tier") if "latency" in given else latency_s,
        write_policy=_write_policy_of(given.get("write", WritePolicyName.THROUGH)),
        write_budget=size_of(given["write_budget"], "--tier") if "write_budget" in given else None,
        sharing=sharing,
        replicas=_replicas_of(given.get("replicas", "1"), sharing),
        link_bytes_per_s=0.0
        if sharing is None
        else float(size_of(given.get("link_speed", _LINK_SPEED), "--tier", is_speed=True)),
    )


def _sharing_of(given: dict[str, str]) -> Sharing | None:
    text = given.get("shared")
    if text is None:
        alone = next((key for key in ("replicas", "link_speed") if key in given), None)
        if alone is not None:
            raise SettingError(
                "--tier",
                f"{alone} is for tiers that engines share: add shared=lent or shared=server, or "
                f"leave {alone} out",
            )
        return None
    try:
        return Sharing(text)
    except ValueError:
        raise SettingError(
            "--tier",
            f'"shared={text}": write shared=lent (each engine lends SIZE of its memory to all) or '
            "shared=server (SIZE in all, on a server of its own)",
        ) from None


def _replicas_of(text: str, sharing: Sharing | None) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= _MOST_REPLICAS:
        raise SettingError(
            "--tier", f'"replicas={text}": write a whole number from 1 to {_MOST_REPLICAS}'
        )
    if int(text) > 1 and sharing is not Sharing.LENT:
        raise SettingError(
            "--tier",
            "replicas are for shared=lent: a server outlives the engines, and keeps one copy",
        )
    return int(text)


def _pairs_of(text: str, pairs: Iterable[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in _TIER_KEYS or key in given:
            raise SettingError(
                "--tier",
                f'"{pair}" in "{text}": after the size, write each of '
                f"{', '.join(_TIER_KEYS.values())} at most once",
            )
        given[key] = value
    return given


def _write_policy_of(text: str) -> WritePolicyName:
    try:
        return WritePolicyName(text)
    except ValueError:
        raise SettingError(
            "--tier",
            f'"write={text}": write is a write policy, one of {_WRITE_POLICIES}; how fast the tier '
            "writes is write_speed, such as write_speed=4GB",
        ) from None
