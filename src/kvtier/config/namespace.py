"""What a namespace of stored blocks is made of.

A `NamespaceIdentity` has, by name, everything that decides which bytes a key stands for. The
fingerprint is its digest, and a `NamespaceDescription` shows it to people: lasting tiers keep one
beside the blocks of each namespace. So an engine that finds only blocks of other namespaces can say
in what they differ, and `kvtier store` can name the model.

A description was written by some process, perhaps of another release. It is shown and never
believed: which blocks an engine loads depends on fingerprints and seals alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, TypeAlias

from kvtier.config.errors import printable

__all__ = [
    "DESCRIPTION_BYTES",
    "FINGERPRINT_BYTES",
    "NamespaceDescription",
    "NamespaceIdentity",
    "Scalar",
    "short_value",
]

FINGERPRINT_BYTES = 16
DESCRIPTION_BYTES = 4000
"""No encoded description is longer, so that it fits into a page."""
_FORMAT = 1
_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_LONGEST_VALUE = 64
_LONGEST_NAME = 80
_MOST_INGREDIENTS = 512
_MOST_GROUPS = 8
_SHOWN_DIGITS = 8
_SHOWN_SETTINGS = 3
_SHOWN_DIFFERENCES = 4
_OFF = (False, 0, "", "0", "0.0", "auto", "none")
"""Values that most settings have in most engines."""

Scalar: TypeAlias = str | int | float | bool | None
"""The value of an ingredient."""


def short_value(value: object) -> Scalar:
    """A value as an ingredient: itself if it is a number or a short text, else the start of the
    text, or nothing of a value of another type, and a digest."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, str):
        return short_digest(value)
    shown = printable(value)
    if shown == value and len(value) <= _LONGEST_VALUE:
        return value
    return f"{shown[: _LONGEST_VALUE - _SHOWN_DIGITS - 4]}...{short_digest(value)}"


def short_digest(value: object) -> str:
    """A few digits that differ if the value, which can be written as JSON, differs."""
    text = json.dumps(value, sort_keys=True)
    return "#" + blake2b(text.encode("ascii"), digest_size=_SHOWN_DIGITS // 2).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceIdentity:
    """Everything that the fingerprint covers, and what else describes the namespace. Made by
    `OffloadingConfig.identity`."""

    format_version: int
    """Of kvtier's fingerprints."""
    epoch: bytes
    """Separates blocks stored before a `reset_cache` from those stored after it."""
    is_signed: bool
    """True if seals are signed with the user's keys."""
    cache_namespace: str | None
    model_name: str
    dtype: str
    weights_revision: str | None
    variant: str
    kv_cache_layout: str | None
    tokens_per_hash: int
    blocks_per_chunk: int
    worker_kv_bytes_per_block: int
    row_bytes: int
    """Depends on the machine's page size, which determines the padding of a stored block."""
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    groups: Sequence[Sequence[Any]]
    """For each: its id, tokens per block, names of layers, kind and window."""
    served_name: str = field(compare=False)
    """What people call the model. Not in the fingerprint."""
    settings: Sequence[tuple[str, Scalar]] = field(compare=False)
    """What `variant` is made of, by name. The fingerprint covers `variant` instead."""
    hash_root: str = field(compare=False)
    """What the engine's block hashes start from. Not in the fingerprint."""

    def fingerprint(self) -> bytes:
        """The digest of all fields but the last three. It is made from JSON, which quotes texts, so
        that no two different identities have the same encoding."""
        # Fields that are left out if they are empty did not exist in the first releases, and
        # fingerprints made then stay valid. Engines with keys must not find unsigned blocks.
        signed = {"signed": True} if self.is_signed else {}
        variant = [self.variant] if self.variant else []
        encoded = json.dumps(
            {
                **signed,
                "format_version": self.format_version,
                "epoch": self.epoch.hex(),
                "namespace": self.cache_namespace,
                "model": [self.model_name, self.dtype, self.weights_revision, *variant],
                "kv_cache_layout": self.kv_cache_layout,
                "tokens_per_hash": self.tokens_per_hash,
                "blocks_per_chunk": self.blocks_per_chunk,
                "worker_kv_bytes_per_block": self.worker_kv_bytes_per_block,
                "row_bytes": self.row_bytes,
                "parallel": [
                    self.world_size,
                    self.tp_size,
                    self.pp_size,
                    self.pcp_size,
                    self.dcp_size,
                ],
                "groups": self.groups,
            },
            sort_keys=True,
            separators=(",", ":"),
        )
        # A cryptographic digest, so that no user can choose a namespace that collides with another.
        digest = blake2b(encoded.encode("ascii"), digest_size=FINGERPRINT_BYTES, person=b"kvtier")
        return digest.digest()

    def describe(self) -> NamespaceDescription:
        """The same for people. Two namespaces with different fingerprints differ in at least one
        ingredient."""
        return NamespaceDescription(
            self.fingerprint().hex(),
            printable(self.served_name or self.model_name)[-2 * _LONGEST_VALUE :],
            self._ingredients(),
            printable(self.hash_root)[:_LONGEST_VALUE],
        )

    def _ingredients(self) -> dict[str, Scalar]:
        """All ingredients, those that tell an operator most first."""
        found: dict[str, Scalar] = {}
        # An engine may take the revision, or else the namespace, for the name.
        if self.model_name != (self.weights_revision or self.cache_namespace):
            found["model_name"] = short_value(self.model_name)
        found["weights_revision"] = short_value(self.weights_revision)
        found["cache_namespace"] = short_value(self.cache_namespace)
        for name, value in self.settings:
            found[f"engine's {name}" if name in _NOT_SETTINGS else name] = short_value(value)
        if self.variant:
            found["variant"] = short_value(self.variant)
        shown = {each.name for each in fields(self)} - _SHOWN_OTHERWISE
        found |= {name: short_value(getattr(self, name)) for name in sorted(shown)}
        if len(self.groups) > _MOST_GROUPS:
            found["groups"] = f"{len(self.groups)} groups {short_digest(self.groups)}"
        else:
            for number, group in enumerate(self.groups):
                found[f"group {number}"] = _group_text(*group)
        found["signed"] = self.is_signed
        found["after_reset"] = self.epoch.hex()[:_SHOWN_DIGITS] or None
        found["kvtier_format"] = self.format_version
        return found


_SHOWN_OTHERWISE = frozenset(
    {
        *("format_version", "epoch", "is_signed", "cache_namespace", "model_name", "groups"),
        *("weights_revision", "variant", "served_name", "settings", "hash_root"),
    }
)


def _group_text(
    group_id: int, tokens: int, layers: Sequence[str], kind: str, window: int | None
) -> str:
    windowed = "" if window is None else f" of {window} tokens"
    shape = f"id {group_id}, {tokens} tokens, {kind}{windowed}"
    return f"{shape}, {len(layers)} layers {short_digest(list(layers))}"


@dataclass(frozen=True, slots=True)
class NamespaceDescription:
    """What a namespace is made of, as it is kept beside its blocks."""

    namespace: str
    """The fingerprint in hexadecimal."""
    model: str
    """What people call the model."""
    ingredients: Mapping[str, Scalar]
    """By name, those that tell most first. Long texts are cut, with a digest of the whole."""
    hash_root: str = ""
    """What the block hashes start from of the engine that wrote this. Empty if it does not say."""

    def encode(self) -> bytes:
        """As JSON, of at most `DESCRIPTION_BYTES`. If that is too little, leaves out ingredients
        that are parts of others: first those that are off, then the last ones."""
        kept = dict(self.ingredients)
        optional = [name for name in kept if "." in name]
        optional.sort(key=lambda name: kept[name] in _OFF)
        while len(content := self._json(kept)) > DESCRIPTION_BYTES and optional:
            del kept[optional.pop()]
        while len(content) > DESCRIPTION_BYTES:
            kept.popitem()
            content = self._json(kept)
        return content

    def _json(self, ingredients: Mapping[str, Scalar]) -> bytes:
        document = {
            "format": _FORMAT,
            "namespace": self.namespace,
            "model": self.model,
            "hash_root": self.hash_root,
            "made_of": ingredients,
        }
        return json.dumps(document, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, content: bytes, namespace: str | None = None) -> NamespaceDescription | None:
        """The description that `encode` has made for this namespace; None for anything else.
        `namespace`: None: for any namespace."""
        if len(content) > DESCRIPTION_BYTES:
            return None
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return None
        model, root = document.get("model"), document.get("hash_root")
        made_of = document.get("made_of")
        name = document.get("namespace")
        if not isinstance(name, str) or not _NAMESPACE.fullmatch(name):
            return None
        if namespace not in (None, name):
            return None
        ingredients = _ingredients_in(made_of)
        if ingredients is None or not isinstance(model, str) or not isinstance(root, str):
            return None
        return cls(name, printable(model), ingredients, printable(root))

    # --- for people ----------------------------------------------------------------------------

    def summary(self) -> str:
        """The model and what tells most about the namespace, on one line."""
        made_of = self.ingredients
        settings = [name for name in made_of if "." not in name and name not in _NOT_SETTINGS]
        names = [
            *(name for name in _NAMED_IF_GIVEN if made_of.get(name) is not None),
            *settings[:_SHOWN_SETTINGS],
            "dtype",
        ]
        words = [self.model, *(f"{name} {_shown(made_of.get(name))}" for name in names)]
        if made_of.get("world_size", 1) != 1:
            words.append(f"world_size {_shown(made_of.get('world_size'))}")
        if made_of.get("after_reset") is not None:
            words.append("stored after a reset of the cache")
        return ", ".join(words)

    def num_equal(self, other: NamespaceDescription) -> int:
        """Number of ingredients that both have in common."""
        mine, theirs = self.ingredients.items(), other.ingredients
        return sum(name in theirs and theirs[name] == value for name, value in mine)

    def differences(self, now: NamespaceDescription) -> list[str]:
        """The ingredients in which `now` differs, as "max_model_len: 4096, now 2048"."""
        mine, theirs = self.ingredients, now.ingredients
        names = [*mine, *(name for name in theirs if name not in mine)]
        found = [
            name
            for name in names
            if name not in mine or name not in theirs or mine[name] != theirs[name]
        ]
        # A part that only one of them names was left out for lack of space if the whole is equal.
        found = [name for name in found if not self._is_same(now, name.partition(".")[0])]
        # A digest of several settings says nothing beside the setting that differs.
        parts = {name.partition(".")[0] for name in found if "." in name}
        found = [name for name in found if name not in parts]
        if any(name not in _NOT_SETTINGS for name in found):
            found = [name for name in found if name != "variant"]
        # An ingredient that only one of them names says less: it may be new in a release.
        found.sort(key=lambda name: name not in mine or name not in theirs)
        return [
            f"{name}: {_shown(mine.get(name))}, now {_shown(theirs.get(name))}" for name in found
        ]

    def _is_same(self, other: NamespaceDescription, name: str) -> bool:
        mine, theirs = self.ingredients, other.ingredients
        return name in mine and name in theirs and mine[name] == theirs[name]

    def difference(self, now: NamespaceDescription) -> str:
        """The first of `differences`, and how many more there are; empty if there is none."""
        found = self.differences(now)
        rest = len(found) - _SHOWN_DIFFERENCES
        more = f"; and {rest} more" if rest > 0 else ""
        return "; ".join(found[:_SHOWN_DIFFERENCES]) + more


def _ingredients_in(made_of: object) -> dict[str, Scalar] | None:
    """The ingredients in a decoded document; None if it is not what `encode` writes."""
    if not isinstance(made_of, dict) or len(made_of) > _MOST_INGREDIENTS:
        return None
    found: dict[str, Scalar] = {}
    for name, value in made_of.items():
        if len(name) > _LONGEST_NAME or not isinstance(value, Scalar):
            return None
        if isinstance(value, str) and len(value) > 2 * _LONGEST_VALUE:
            return None
        found[printable(name)] = printable(value) if isinstance(value, str) else value
    return found


_NOT_SETTINGS = (
    {each.name for each in fields(NamespaceIdentity)} - {"settings"}
    | {"signed", "after_reset", "kvtier_format"}
    | {f"group {number}" for number in range(_MOST_GROUPS)}
)


_NAMED_IF_GIVEN = ("weights_revision", "cache_namespace")


def _shown(value: Scalar) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
