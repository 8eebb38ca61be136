"""The operator's rules for tenants: the key `tenants`.

    "tenants": {
      "default": {"host": {"cap": "80%"}},
      "acme": {"host": {"floor": "20%", "cap": "50%"}, "tiers": ["disk"], "share": "private"}
    }

`TenantRules` has one `TenantRule` for each configured tenant and one for "default". A request of
any other tenant is one of "default". So what is kept for each tenant is bounded by this
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kvtier.config.errors import ConfigError, Problem, describe
from kvtier.config.fields import Key, Kind, Unfit, declared_keys, key, number_between, one_of
from kvtier.config.reader import OptionReader, nearest
from kvtier.config.sizes import SizeError, as_int, parse_size

__all__ = [
    "DEFAULT_TENANT",
    "HIGHEST_PRIORITY",
    "HOST",
    "MAX_RETAIN_S",
    "NO_RULES",
    "NORMAL_PRIORITY",
    "Amount",
    "Quota",
    "Sharing",
    "TenantRule",
    "TenantRules",
    "read_tenants",
    "tier_label",
]

DEFAULT_TENANT = "default"
"""The tenant of every request that names no configured tenant."""
HOST = "host"
"""Host memory's name among the tiers."""
HIGHEST_PRIORITY, NORMAL_PRIORITY = 9, 5
MAX_RETAIN_S = 86_400.0
"""The longest time that a rule may let requests retain blocks, in seconds: one day."""

_MAX_TENANTS = 1000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_RESERVED = "other"
"""Metrics count the smaller tenants together under this name."""
_WHOLE = 1_000_000
_PERCENT = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))? *%", re.ASCII)


def tier_label(position: int, tier_type: str) -> str:
    """The name of a tier in rules, metrics, events and the status of an engine, such as
    `0:disk`."""
    return f"{position}:{tier_type}"


class Sharing(StrEnum):
    """Who finds a tenant's blocks."""

    SHARED = "shared"
    """Every tenant that is not private."""
    PRIVATE = "private"
    """The tenant alone."""


class Amount(NamedTuple):
    """A part of a tier: a share of its capacity, or a size."""

    millionths: int | None
    """The share, in millionths; None for a size."""
    num_bytes: int = 0

    def in_blocks(self, num_blocks: int, block_bytes: int) -> int:
        """The whole blocks of a tier of `num_blocks` that this is, at most all of them."""
        if self.millionths is None:
            return min(num_blocks, self.num_bytes // block_bytes)
        return num_blocks * self.millionths // _WHOLE

    def in_bytes(self, capacity_bytes: int) -> int:
        """The bytes of a tier of `capacity_bytes` that this is, at most all of them."""
        if self.millionths is None:
            return min(capacity_bytes, self.num_bytes)
        return capacity_bytes * self.millionths // _WHOLE


NOTHING, EVERYTHING = Amount(0), Amount(_WHOLE)


def _parse_amount(value: object) -> Amount:
    if isinstance(value, str) and "%" in value:
        match = _PERCENT.fullmatch(value)
        if match is None:
            raise Unfit('Write a percentage such as "20%" or "12.5%"')
        whole, part = match.groups(default="")
        millionths = int(whole) * 10_000 + int(part.ljust(4, "0"))
        if millionths > _WHOLE:
            raise Unfit('Write at most "100%"')
        return Amount(millionths)
    try:
        return Amount(None, parse_size(value, may_be_zero=True))
    except SizeError as error:
        raise Unfit(str(error)) from None


AMOUNT = Kind('a share such as "20%", or a size such as "8GiB"', _parse_amount)


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's part of one tier."""

    floor: Amount = key(
        AMOUNT,
        "What no other tenant takes from this one while it uses it.",
        default=NOTHING,
    )
    cap: Amount = key(AMOUNT, "The most that this tenant has.", default=EVERYTHING)

    @property
    def is_limited(self) -> bool:
        """True if there is a cap."""
        return self.cap != EVERYTHING


NO_QUOTA = Quota()


def _parse_priority(value: object) -> int:
    number = as_int(value)
    if number is None or not 0 <= number <= HIGHEST_PRIORITY:
        raise Unfit(f"Write a whole number from 0 to {HIGHEST_PRIORITY}, without quotes")
    return number


_PRIORITY = Kind(f"a whole number from 0 to {HIGHEST_PRIORITY}", _parse_priority)
_TIERS = Kind('a list of tiers such as ["disk"], or [] for host memory alone', lambda value: value)
_RETAIN = number_between(0, MAX_RETAIN_S, f"a number of seconds from 0 to {MAX_RETAIN_S:.0f}")


@dataclass(frozen=True, slots=True)
class TenantRule:
    """What the operator lets one tenant have. Its keys are those that are not names of tiers."""

    name: str = DEFAULT_TENANT
    index: int = 0
    """Its place among all tenants. 0: "default"."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By tier: `HOST`, or the label of a tier such as `0:disk`. Without entries for others."""
    tiers: frozenset[str] | None = key(
        _TIERS,
        "The tiers below host memory that this tenant's blocks go to and come from.",
        default=None,
    )
    share: Sharing = key(one_of(Sharing), "Who finds this tenant's blocks.", default=Sharing.SHARED)
    priority: int = key(
        _PRIORITY, "Priority of a request without this hint.", default=NORMAL_PRIORITY
    )
    max_priority: int = key(
        _PRIORITY,
        "Highest priority that a request of this tenant can have. `null`: its `priority`.",
        default=None,
    )
    max_retain_s: float = key(
        _RETAIN, "Longest time for which a request of this tenant can retain blocks.", default=600.0
    )

    @property
    def is_private(self) -> bool:
        return self.share is Sharing.PRIVATE

    def quota(self, tier: str) -> Quota:
        """The tenant's part of a tier: `HOST`, or a label such as `0:disk`."""
        return self.quotas.get(tier, NO_QUOTA)

    def may_use(self, tier: str) -> bool:
        """True if the tenant's blocks go to and come from the tier with this label."""
        return self.tiers is None or tier in self.tiers


@dataclass(frozen=True, slots=True)
class TenantRules:
    """All tenants. The first one is "default", and the others are in the order of their names."""

    tenants: tuple[TenantRule, ...] = (TenantRule(max_priority=HIGHEST_PRIORITY),)

    @property
    def default(self) -> TenantRule:
        return self.tenants[0]

    def __iter__(self) -> Iterator[TenantRule]:
        return iter(self.tenants)

    def __len__(self) -> int:
        return len(self.tenants)

    def __getitem__(self, index: int) -> TenantRule:
        return self.tenants[index]

    @property
    def has_quotas(self) -> bool:
        """True if a tenant has a floor or a cap in some tier."""
        return any(quota != NO_QUOTA for rule in self.tenants for quota in rule.quotas.values())

    def require_floors_fit(self, tier: str, at: str, capacity: int, block_bytes: int) -> None:
        """Raise `ConfigError` if all floors together exceed a tier of `capacity` blocks. Called
        when the tier's capacity is known. `at`: the key that sets the capacity."""
        floors = [rule.quota(tier).floor.in_blocks(capacity, block_bytes) for rule in self.tenants]
        given = [rule.name for rule, floor in zip(self.tenants, floors, strict=True) if floor]
        if sum(floors) > capacity:
            raise ConfigError(
                Problem(
                    "tenants",
                    f"floors of {', '.join(given)} of {sum(floors)} blocks together in {tier}",
                    f"at most {capacity} blocks, which is what {at} holds",
                    f"Lower a floor, or raise {at}",
                )
            )


NO_RULES = TenantRules()
"""The rules of an engine without the key `tenants`."""


def read_tenants(
    given: object, tiers: Sequence[tuple[str, str]], problems: list[Problem]
) -> TenantRules:
    """Parse the key `tenants`, and append all problems to `problems`.

    `tiers`: label and type of each entry of `secondary_tiers`. A rule names a tier by its label, or
    by its type if no other tier has that type.
    """
    if not isinstance(given, Mapping):
        sample = '{"acme": {"host": {"cap": "50%"}}}'
        problems.append(
            Problem("tenants", describe(given), "an object with one entry for each tenant",
                    f"Write an object such as {sample}")
        )  # fmt: skip
        return NO_RULES
    if len(given) > _MAX_TENANTS:
        problems.append(
            Problem("tenants", f"{len(given)} tenants", f"at most {_MAX_TENANTS}",
                    "Let small tenants share one: each costs memory in every table")
        )  # fmt: skip
        return NO_RULES
    names = _names_of(tiers)
    entries = {DEFAULT_TENANT: {}, **dict(sorted(given.items(), key=lambda item: str(item[0])))}
    rules = tuple(
        _read_rule(index, name, entry, names, problems)
        for index, (name, entry) in enumerate(entries.items())
    )
    _require_floors_below_whole(rules, problems)
    return TenantRules(rules)


def _names_of(tiers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The label of each tier, by the names that a rule may use for it."""
    types = [tier_type for _, tier_type in tiers]
    alone = {tier_type: label for label, tier_type in tiers if types.count(tier_type) == 1}
    own = {*declared_keys(TenantRule), HOST}
    return {name: label for name, label in alone.items() if name not in own} | {
        label: label for label, _ in tiers
    }


def _read_rule(
    index: int, name: object, entry: object, tiers: Mapping[str, str], problems: list[Problem]
) -> TenantRule:
    at = f"tenants.{name}" if isinstance(name, str) and len(name) <= 80 else "tenants"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == _RESERVED:
        problems.append(
            Problem(
                at,
                f"the name {describe(name)}",
                f'1 to 64 letters, digits, "_" and "-", and not "{_RESERVED}"',
                "Choose another name; a gateway can map any name to it",
            )
        )
    if not isinstance(entry, Mapping):
        problems.append(
            Problem(at, describe(entry), "an object", 'Write an object such as {"priority": 3}')
        )
        return TenantRule(str(name), index, max_priority=NORMAL_PRIORITY)
    reader = OptionReader(entry, at)
    keys = declared_keys(TenantRule)
    keys["max_priority"] = Key(_PRIORITY, default=None)
    values: dict[str, Any] = {name: reader.declared(name, its) for name, its in keys.items()}
    values["tiers"] = _tiers_in(values["tiers"], reader, tiers, f"{at}.tiers")
    if values["max_priority"] is None:
        values["max_priority"] = values["priority"]
    elif values["priority"] is not None and values["max_priority"] < values["priority"]:
        reader.refuse(
            "max_priority",
            f"at least priority, {values['priority']}",
            "Raise it, or lower priority",
        )
    quotas = {}
    for tier in (HOST, *tiers):
        if reader.has(tier):
            quotas[tiers.get(tier, tier)] = _read_quota(entry[tier], f"{at}.{tier}", reader)
        reader.optional(tier, _ANYTHING)
    if name == DEFAULT_TENANT and values["share"] is Sharing.PRIVATE:
        reader.refuse(
            "share",
            '"shared", for the tenant of all requests without a tenant',
            "Name a tenant, and make that one private",
        )
        values["share"] = Sharing.SHARED
    reader.refuse_unread(
        "Name a tier of secondary_tiers by its type, or by its place and type as in "
        '"0:disk" if several have that type'
        if tiers
        else "There are no secondary_tiers: remove it"
    )
    problems.extend(reader.problems)
    return TenantRule(str(name), index, quotas, **values)


_ANYTHING: Kind[Any] = Kind("an object", lambda value: value)


def _tiers_in(
    given: object, reader: OptionReader, tiers: Mapping[str, str], at: str
) -> frozenset[str] | None:
    if given is None:
        return None
    if not isinstance(given, (list, tuple)):
        reader.refuse("tiers", _TIERS.allowed, "Put the names in brackets")
        return None
    labels = set()
    for place, name in enumerate(given):
        label = tiers.get(name) if isinstance(name, str) else None
        if label is not None:
            labels.add(label)
            continue
        meant = nearest(name, tiers) if isinstance(name, str) else None
        remedy = f'Did you mean "{meant}"?' if meant else "Remove it, or add the tier"
        if name == HOST:
            remedy = "Remove it: every block passes through host memory"
        allowed = f"one of {', '.join(tiers)}" if tiers else "nothing: there are no secondary_tiers"
        reader.problems.append(Problem(f"{at}[{place}]", describe(name), allowed, remedy))
    return frozenset(labels)


def _read_quota(given: object, at: str, rule: OptionReader) -> Quota:
    if not isinstance(given, Mapping):
        meant = '{"floor": "20%", "cap": "50%"}'
        rule.problems.append(
            Problem(at, describe(given), 'an object with "floor", "cap" or both', f"Write {meant}")
        )
        return NO_QUOTA
    reader = OptionReader(given, at)
    values = {name: reader.declared(name, its) for name, its in declared_keys(Quota).items()}
    reader.refuse_unread("Remove it")
    quota = NO_QUOTA if reader.problems else Quota(**values)
    if not reader.problems:
        floor, cap = quota.floor, quota.cap
        if (floor.millionths is None) == (cap.millionths is None) and floor > cap:
            reader.refuse("floor", f"at most the cap, {describe(given['cap'])}", "Lower the floor")
    rule.problems.extend(reader.problems)
    return NO_QUOTA if reader.problems else quota


def _require_floors_below_whole(rules: Sequence[TenantRule], problems: list[Problem]) -> None:
    """Refuse floors that are together more than 100 % of a tier. `require_floors_fit` checks those
    that are sizes, once the tier's capacity is known."""
    for tier in sorted({tier for rule in rules for tier in rule.quotas}):
        shares = {rule.name: rule.quota(tier).floor.millionths or 0 for rule in rules}
        given = ", ".join(name for name, share in shares.items() if share)
        total = sum(shares.values())
        if total > _WHOLE:
            problems.append(
                Problem(
                    "tenants",
                    f"floors of {given} in {tier} that are {total / 10_000:g} % together",
                    "at most 100 % of each tier",
                    "Lower a floor",
                )
            )
