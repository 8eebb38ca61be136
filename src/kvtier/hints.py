"""What the user of one request, or an orchestrator, asks of the cache: its hints, parsed once.

The connector of this package and the plug-in for vLLM call `HintReader.read` when a request
arrives, and `new_context` keeps the result in the request's `ReqContext`. Every manager and tier
that gets the context reads them with `hints_of`. Nothing else parses hints.

A tenant is a party that shares the cache, and `kvtier.config.tenants` has the operator's rules for
it. A request names its tenant with the hint `tenant` or with vLLM's `cache_salt`. A private tenant
is named by a credential, which only the operator's secret can make. Its blocks have keys that only
that secret can make, too (`PrivateNamespace`): no tier and no other tenant finds them by accident.

Everything here runs on the scheduler thread. A request with hints takes about 20 microseconds, one
without 0.1.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from math import isfinite
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeGuard

from kvtier.base import (
    Locality,
    Medium,
    OffloadKey,
    ReqContext,
    TierFilter,
    TierMatcher,
    WriteHint,
)
from kvtier.config.tenants import HIGHEST_PRIORITY, NO_RULES, NORMAL_PRIORITY, TenantRule
from kvtier.seal.keys import read_keys

if TYPE_CHECKING:
    from kvtier.config import OffloadingOptions

__all__ = [
    "HintReader",
    "PrivateNamespace",
    "RequestHints",
    "hints_of",
    "new_context",
]

logger = logging.getLogger(__name__)

_KEYS = (
    "skip",
    "max_offload_tokens",
    "kv_load_tiers",
    "prefetch",
    "write",
    "tenant",
    "share",
    "priority",
    "retain_s",
    "drop",
    "store_tiers",
)
_KNOWN = (*_KEYS, "max_load_tokens")
"""Hints that kvtier reads, and `max_load_tokens`, which vLLM reads itself."""
_MAX_KEY_LENGTH = 32
"""Longer keys are not compared with `_KNOWN`. A client chooses the keys, and comparing long keys
takes time."""
_MAX_KEYS, _MAX_ENTRIES = 64, 32
"""The most keys of one request that are searched for misspelt hints, and the most entries of a list
of tiers that are read."""
_MAX_NAME_LENGTH = 256
"""Of a longer name of a tenant, or a longer salt, only the beginning is looked at."""
_CREDENTIAL_TOPICS = frozenset(("", "tenant", "not tenant"))
"""Warnings about values that may hold a credential. The log shows only their types."""
_MAX_WORD_LENGTH = 16
"""Longer than every word that a hint can have."""


class PrivateNamespace:
    """Makes the keys of one private tenant's blocks. Any thread.

    A key is a keyed BLAKE2b of the engine's key. Whoever does not have the operator's secret cannot
    compute it from a prompt, and cannot tell from it which prompt a block belongs to. It takes
    about a microsecond.
    """

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes, tenant: str) -> None:
        own = blake2b(tenant.encode(), key=secret, digest_size=32, person=b"kvtier-tenant")
        self._keyed = blake2b(key=own.digest(), digest_size=32, person=b"kvtier-block")

    def key_of(self, key: OffloadKey) -> OffloadKey:
        """The tenant's key of a block. `key`: the engine's."""
        digest = self._keyed.copy()
        digest.update(key)
        return OffloadKey(digest.digest() + key[-4:])


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request."""

    skip: bool = False
    """Neither load nor store anything for this request."""
    max_offload_tokens: int | None = None
    """Store only blocks within this number of tokens from the start of the prompt."""
    load_tiers: TierFilter = TierFilter.ALL
    """Tiers to load from. Host memory is always allowed."""
    prefetch: bool = False
    """Nobody waits for this request: it brings up blocks for one that is still to come."""
    write: WriteHint | None = None
    """Which of its blocks tiers get. None: what their write policies choose."""
    tenant: TenantRule = NO_RULES.default
    """The rule of the request's tenant. Its `index` is 0 for "default"."""
    namespace: PrivateNamespace | None = None
    """Makes the keys of the request's blocks; None: they are the engine's own, and shared."""
    priority: int = NORMAL_PRIORITY
    """0 to 9. Of blocks that are equal otherwise, those of a lower priority leave first."""
    retain_s: float = 0.0
    """Keep the request's blocks for at least so many seconds, if that can be."""
    drop: bool = False
    """Nobody will ask for the request's blocks again: those that no other prompt shares may leave
    first, and new ones are not stored."""
    store_tiers: TierFilter = TierFilter.ALL
    """Tiers to store to. Host memory is always allowed."""

    @property
    def may_store(self) -> bool:
        """False if new blocks of the request are not to be stored anywhere."""
        return not (self.skip or self.drop)

    @property
    def has_intent(self) -> bool:
        """True if the hints say what is to become of the request's blocks once it has ended."""
        return not self.skip and (self.drop or self.retain_s > 0)


_NONE = RequestHints()


def hints_of(context: ReqContext) -> RequestHints:
    """The hints of a request. Those of a request without hints if nobody has parsed any."""
    return context.get_state(RequestHints) or _NONE


def new_context(
    req_id: str,
    params: object,
    hints: RequestHints,
    *,
    num_prompt_tokens: int | None = None,
) -> ReqContext:
    """Make the context of a request, with its hints. `params`: its `kv_transfer_params`, for tiers;
    ignored if they are no mapping."""
    context = ReqContext(
        req_id,
        params if isinstance(params, Mapping) else None,
        hints.load_tiers,
        num_prompt_tokens=num_prompt_tokens,
        is_prefetch=hints.prefetch,
        write_hint=hints.write,
    )
    context.set_state(hints)
    return context


class HintReader:
    """Reads the hints of an engine's requests. Scheduler thread only.

    A value that cannot be read is ignored, counted, and logged: the first one of its kind at
    WARNING, later ones at DEBUG, because otherwise a client could fill the log. Nothing that a
    client sends is kept. There are three exceptions, all for safety. If no entry of a list of tiers
    can be read, the list allows host memory alone. A request that names a private tenant without
    its credential, or asks to be private and cannot, neither loads nor stores anything. The same
    holds if a tenant is private, and the hint `tenant` is no text: it may stand for that one.
    """

    def __init__(self, options: OffloadingOptions) -> None:
        """Raises `ConfigError` if the file of keys cannot be used."""
        self._rules = options.tenant_rules
        self._by_name = {rule.name: rule for rule in self._rules}
        self._has_private = any(rule.is_private for rule in self._rules)
        path = options.tenant_key_file
        self._secrets = () if path is None else tuple(read_keys(path, "tenant_key_file"))
        self._namespaces = (
            {rule.name: PrivateNamespace(self._secrets[0], rule.name) for rule in self._rules}
            if self._secrets
            else {}
        )
        self._plain = self._with_rule(_NONE, self._rules.default)
        self._warned: set[str] = set()
        self.note_ignored: Callable[[int], None] = lambda _: None
        """Called with the number of hints that were ignored. The owner sets it."""

    def read(
        self,
        params: object,
        orders: Mapping[str, Any] | None = None,
        cache_salt: object = None,
    ) -> RequestHints:
        """The hints of a new request. Never raises.

        `params`: its `kv_transfer_params`. Keys that are not hints are for tiers; one that looks
        like a misspelt hint causes a warning. `orders`: hints of an orchestrator in front of the
        engine; they take precedence. `cache_salt`: vLLM's.
        """
        if not params and not orders and not cache_salt:
            return self._plain
        given: Mapping[Any, Any] = {}
        if isinstance(params, Mapping):
            given = params
            self._look_for_misspelt(given)
        elif params:
            self._ignore("", params, "is ignored: give an object.")
        if orders:
            self._look_for_misspelt(orders)
            given = {key: its[key] for its in (given, orders) for key in _KEYS if key in its}
        hints = RequestHints(
            skip=self._flag("skip", given),
            max_offload_tokens=self._tokens(given.get("max_offload_tokens")),
            load_tiers=self._filter("kv_load_tiers", given),
            prefetch=self._flag("prefetch", given),
            write=self._write_hint(given.get("write")),
            drop=self._flag("drop", given),
            store_tiers=self._filter("store_tiers", given),
        )
        hints = self._with_tenant(hints, given, cache_salt)
        return self._with_worth(hints, given)

    # --- tenants --------------------------------------------------------------------------------

    def _with_rule(self, hints: RequestHints, rule: TenantRule) -> RequestHints:
        namespace = self._namespaces.get(rule.name) if rule.is_private else None
        return replace(hints, tenant=rule, namespace=namespace, priority=rule.priority)

    def _with_tenant(
        self, hints: RequestHints, given: Mapping[Any, Any], cache_salt: object
    ) -> RequestHints:
        """Find the tenant, and the namespace of its blocks. A credential decides, if one of the two
        names is one."""
        name = given.get("tenant")
        is_readable = name is None or isinstance(name, str)
        if not is_readable:
            self._ignore("tenant", name, "is ignored: give the name of a tenant.")
            name = None
        salt = cache_salt if isinstance(cache_salt, str) else None
        named = [self._named_by(text) for text in (name, salt) if text]
        proven = next((rule for rule, is_proven in named if is_proven), None)
        claimed = next((rule for rule, _ in named if rule is not None), None)
        if not is_readable and proven is None and self._has_private:
            return replace(self._with_rule(hints, self._rules.default), skip=True)
        rule = proven or claimed or self._rules.default
        if any(other is not None and other is not rule and other.is_private for other, _ in named):
            # Two tenants, one of them private: never store its blocks where the other finds them.
            self._ignore("tenant (two)", rule.name, _TWO_TENANTS, name="tenant")
            return replace(self._with_rule(hints, self._rules.default), skip=True)
        if rule.is_private and proven is None:
            self._ignore("tenant (no credential)", rule.name, _NO_CREDENTIAL, name="tenant")
            return replace(self._with_rule(hints, self._rules.default), skip=True)
        hints = self._with_rule(hints, rule)
        share = given.get("share")
        if share is None or hints.namespace is not None:
            return hints
        if not isinstance(share, str) or share.lower() != "private":
            self._ignore("share", share, 'is ignored: give "private".')
            return hints
        if proven is None:
            self._ignore("share (no credential)", share, _NOT_PRIVATE, name="share")
            return replace(hints, skip=True)
        return replace(hints, namespace=self._namespaces[rule.name])

    def _named_by(self, text: str) -> tuple[TenantRule | None, bool]:
        """The tenant that a text names, and whether the text is that tenant's credential. A wrong
        credential names the tenant, too."""
        name, _, proof = text[:_MAX_NAME_LENGTH].partition(".")  # names have no full stop
        rule = self._by_name.get(name)
        if rule is None:
            return None, False
        is_proven = False
        if proof.isascii():
            for secret in self._secrets:
                is_proven |= hmac.compare_digest(proof, proof_of(name, secret))
        return rule, is_proven

    def _with_worth(self, hints: RequestHints, given: Mapping[Any, Any]) -> RequestHints:
        """Read how long and how firmly to keep the blocks, within the tenant's rule."""
        rule = hints.tenant
        priority, retain_s = given.get("priority"), given.get("retain_s")
        if priority is not None:
            if not _is_int(priority) or not 0 <= priority <= HIGHEST_PRIORITY:
                what = f"is ignored: give a whole number from 0 to {HIGHEST_PRIORITY}."
                self._ignore("priority", priority, what)
            else:
                hints = replace(hints, priority=min(priority, rule.max_priority))
        if retain_s is not None:
            is_number = _is_int(retain_s) or (isinstance(retain_s, float) and isfinite(retain_s))
            if not is_number or retain_s < 0:
                self._ignore("retain_s", retain_s, "is ignored: give seconds, 0 or more.")
            else:
                hints = replace(hints, retain_s=float(min(retain_s, rule.max_retain_s)))
        return hints

    # --- the other hints ------------------------------------------------------------------------

    def _flag(self, name: str, given: Mapping[Any, Any]) -> bool:
        value = given.get(name, False)
        if isinstance(value, bool):
            return value
        self._ignore(name, value, "is ignored: give true or false.")
        return False

    def _tokens(self, most: object) -> int | None:
        if most is None or (_is_int(most) and most >= 0):
            return most
        self._ignore("max_offload_tokens", most, "is ignored: give a whole number, 0 or more.")
        return None

    def _write_hint(self, value: object) -> WriteHint | None:
        if value is None:
            return None
        if isinstance(value, str) and len(value) <= _MAX_WORD_LENGTH:
            for hint in WriteHint:
                if value.lower() == hint:
                    return hint
        self._ignore("write", value, 'is ignored: give "never" or "through".')
        return None

    def _filter(self, name: str, given: Mapping[Any, Any]) -> TierFilter:
        """A filter from the entries that can be read. If there are none, it allows host memory
        alone: a mistake in a list of tiers must not allow tiers that the user wanted to exclude."""
        entries = given.get(name)
        if entries is None:
            return TierFilter.ALL
        allowed = 'give a list such as [{"medium": "STORAGE", "locality": "LOCAL"}].'
        if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
            self._ignore(name, entries, f"allows host memory alone: {allowed}")
            return TierFilter()
        matchers: dict[TierMatcher, None] = {}
        for place, entry in enumerate(islice(entries, _MAX_ENTRIES)):
            try:
                matchers[_matcher_of(entry)] = None
            except (ValueError, TypeError, AttributeError):
                what = f"is ignored: {allowed}"
                self._ignore(f"{name}[]", entry, what, name=f"{name}[{place}]")
        return TierFilter(tuple(matchers))

    def _look_for_misspelt(self, given: Mapping[Any, Any]) -> None:
        for key in islice(given, _MAX_KEYS):
            if not isinstance(key, str) or len(key) > _MAX_KEY_LENGTH or not key.isprintable():
                continue
            if meant := _meant_by(key):
                what = f"is not read by kvtier: did you mean {meant}?"
                self._warn(f"not {meant}", given[key], what, name=key)

    def _ignore(self, topic: str, given: object, what: str, *, name: str | None = None) -> None:
        self.note_ignored(1)
        self._warn(topic, given, what, name=name)

    def _warn(self, topic: str, given: object, what: str, *, name: str | None = None) -> None:
        """Log a warning. `topic`: a text that warnings of the same kind share; "" for a
        `kv_transfer_params` that is not an object. `name`: the key to show, if it is not the
        topic."""
        level = logging.DEBUG if topic in self._warned else logging.WARNING
        self._warned.add(topic)
        if logger.isEnabledFor(level):
            key = topic if name is None else name
            where = f"kv_transfer_params.{key}" if key else "kv_transfer_params"
            shown = _type_of(given) if topic in _CREDENTIAL_TOPICS else _shown(given)
            logger.log(level, "%s = %s %s", where, shown, what)


_NO_CREDENTIAL = (
    "names a private tenant, and not by its credential: the request neither loads nor stores "
    "anything. Let the gateway send the credential (docs/tenants.md)."
)
_TWO_TENANTS = (
    "and cache_salt name two tenants, one of them private: the request neither loads nor stores "
    "anything. Send one of them."
)
_NOT_PRIVATE = (
    "cannot be: the request has no credential of its tenant, so it neither loads nor stores "
    "anything. Set tenant_key_file, and let the gateway send the credential (docs/tenants.md)."
)


def proof_of(tenant: str, secret: bytes) -> str:
    """What follows the tenant's name and a full stop in its credential: HMAC-SHA256, so that an
    operator can make it with openssl."""
    return hmac.digest(secret, f"kvtier tenant {tenant}".encode(), "sha256").hex()


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _matcher_of(entry: object) -> TierMatcher:
    if isinstance(entry, str):
        return TierMatcher(Medium(_word(entry)))
    if not isinstance(entry, Mapping) or len(entry) > 2 or not set(entry) <= {"medium", "locality"}:
        raise TypeError
    medium, locality = entry.get("medium"), entry.get("locality")
    return TierMatcher(
        None if medium is None else Medium(_word(medium)),
        None if locality is None else Locality(_word(locality)),
    )


def _word(value: str) -> str:
    if len(value) > _MAX_WORD_LENGTH:
        raise ValueError
    return value.upper()


@lru_cache(maxsize=256)
def _meant_by(key: str) -> str | None:
    """The hint that this key is probably a misspelling of."""
    if key in _KNOWN:
        return None
    plain = key.lower().replace("-", "_")
    return next(iter(get_close_matches(plain, _KNOWN, n=1, cutoff=0.85)), None)


_brief = Repr()
_brief.maxlevel, _brief.maxdict, _brief.maxlist, _brief.maxstring = 3, 4, 8, 120


def _shown(given: object) -> str:
    """A value that a client has sent, for the log: short, however large and deep it is."""
    try:
        return _brief.repr(given)[:200]
    except Exception:  # such as an int of too many digits
        return _type_of(given)


def _type_of(given: object) -> str:
    return f"<{type(given).__name__}>"
