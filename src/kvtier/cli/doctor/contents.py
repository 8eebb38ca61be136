"""What a tier holds already, and whether an engine would find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.checks.finding import Finding, Status
from kvtier.cli.checks.options import CheckedTier
from kvtier.config import NamespaceDescription
from kvtier.config.sizes import as_size
from kvtier.tiering.disk.options import DiskOptions
from kvtier.tiering.fs.access import NoFollowTree, is_root
from kvtier.tiering.fs.layout import namespaces_in
from kvtier.tiering.fs.ledger import LedgerVersion
from kvtier.tiering.fs.options import FsOptions
from kvtier.tiering.fs.survey import read_balance
from kvtier.tiering.inspection import InspectionRefused, open_inspector

__all__ = ["check_contents"]

_MOST_SHOWN = 3
_SHOWN_DIGITS = 8


@dataclass(frozen=True, slots=True)
class _Contents:
    num_blocks: int
    namespaces: Sequence[str]
    """Fingerprints in hexadecimal, largest first if that is known."""
    descriptions: Mapping[str, NamespaceDescription]
    """By namespace: what it is made of, as far as that is known."""
    room: str
    """How full it is, for people."""

    def shown(self) -> str:
        """The namespaces, for people."""
        names = [_named(each, self.descriptions.get(each)) for each in self.namespaces]
        more = len(names) - _MOST_SHOWN
        return "; ".join(names[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")

    def text(self) -> str:
        """All of it, for people."""
        spaces = self.namespaces
        if not self.num_blocks or not spaces:
            return self.room
        return f"{self.room}; namespace{'s' if len(spaces) > 1 else ''} {self.shown()}"

    def difference(self, own: NamespaceDescription | None) -> str:
        """In what the closest of the namespaces differs from `own`; empty if that is not known."""
        if own is None or not self.descriptions:
            return ""
        others = [its for its in self.descriptions.values() if its.namespace != own.namespace]
        return max(others, key=own.num_equal).difference(own) if others else ""


def check_contents(
    tier: CheckedTier,
    namespace: str | None,
    own: NamespaceDescription | None = None,
    *,
    is_judged: bool = True,
) -> Iterator[Finding]:
    """Yield what a disk or fs tier holds. `namespace`: the first digits of an engine's; without it,
    nothing can be said about what that engine finds. `own`: what that is made of. `is_judged`:
    False: say only what is there. Reads no block."""
    options = tier.options
    try:
        if isinstance(options, DiskOptions):
            contents = _of_slab(options.path)
        elif isinstance(options, FsOptions):
            contents = _of_root(options.root_dir, options.max_bytes)
        else:
            return
    except (InspectionRefused, LedgerVersion, OSError):  # the checks of its place say why
        return
    if contents is None:
        return
    name = f"{tier.config.at}.blocks"
    if is_judged:
        yield _judged(name, contents, namespace, own)
    else:
        yield Finding(name, Status.OK, contents.text())


def _of_slab(path: Path) -> _Contents | None:
    if not path.exists():
        return None
    with open_inspector(str(path)) as inspector:
        figures = inspector.figures().document
        descriptions = inspector.descriptions()
    num_blocks, num_slots = int(figures["blocks"]), int(figures["slots"])
    room = f"{num_blocks} of {num_slots} slots hold blocks"
    if num_blocks >= num_slots:
        room += ": it is full, and each new block replaces an old one"
    names = [space["namespace"] for space in figures["namespaces"]]
    return _Contents(num_blocks, names, descriptions, room)


def _of_root(root: Path, max_bytes: int) -> _Contents | None:
    if not root.is_dir() or not is_root(root):
        return None
    balance = read_balance(root)
    if balance is None:
        return None
    room = (
        f"{balance.num_blocks} blocks and what is reserved take {as_size(balance.total)} of "
        f"{as_size(max_bytes)}"
    )
    with open_inspector(str(root)) as inspector:
        descriptions = inspector.descriptions()
    found = namespaces_in(NoFollowTree(root), root / "blocks")
    return _Contents(balance.num_blocks, [path.name for path in found], descriptions, room)


def _named(namespace: str, description: NamespaceDescription | None) -> str:
    name = namespace[:_SHOWN_DIGITS]
    return name if description is None else f"{name} ({description.summary()})"


def _judged(
    name: str, contents: _Contents, namespace: str | None, own: NamespaceDescription | None
) -> Finding:
    spaces = contents.namespaces
    found = contents.text()
    if not contents.num_blocks or not spaces:
        return Finding(name, Status.OK, found)
    if namespace is None:
        return Finding(name, Status.OK, f"{found}. An engine logs its own namespace at its start")
    # Of a damaged slab, only the first digits of a namespace are known.
    if any(each.startswith(namespace) or namespace.startswith(each) for each in spaces):
        return Finding(name, Status.OK, f"{found}. The engine's own is among them")
    found = (
        f"wrong fingerprint: {found}. The engine's namespace is {namespace[:_SHOWN_DIGITS]}, so it "
        "finds none of these blocks"
    )
    difference = contents.difference(own)
    return Finding(
        name,
        Status.PROBLEM,
        f"{found}. The closest differs in {difference}" if difference else found,
        "Start it with what the blocks were made with: model and weights, dtype, maximum length, "
        "parallel sizes, vLLM's release, PYTHONHASHSEED and cache_namespace. If that has changed "
        "for good, it fills the tier anew",
    )
