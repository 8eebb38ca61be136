"""What there is to know about an fs root as a whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli.store.amounts import as_age, as_size, as_time
from kvtier.cli.store.fs_ledger import ledger_remark
from kvtier.tiering.fs.reader import SeenNamespace, SeenSeat, Survey

__all__ = ["FsFigures", "namespace_line"]

_NAME_DIGITS = 8


@dataclass(frozen=True, slots=True)
class FsFigures:
    """`Figures` of an fs root."""

    path: Path
    seen: Survey

    @property
    def num_blocks(self) -> int:
        return self.seen.num_blocks

    @property
    def _stray_bytes(self) -> int:
        return sum(stray.num_bytes for stray in self.seen.strays)

    def as_json(self) -> dict[str, Any]:
        balance = self.seen.balance
        return {
            "path": str(self.path),
            "kind": "fs",
            "allocated_bytes": self.seen.num_bytes,
            "ledger_bytes": None if balance is None else balance.total,
            "reserved_bytes": None if balance is None else balance.reserved,
            "remark": ledger_remark(self.seen),
            "blocks": self.num_blocks,
            "namespaces": [self._namespace_json(space) for space in self._by_size()],
            "engines": [_seat_json(seat) for seat in self.seen.seats],
            "stray_files": len(self.seen.strays),
            "stray_bytes": self._stray_bytes,
        }

    def _namespace_json(self, space: SeenNamespace) -> dict[str, Any]:
        return {
            "namespace": space.name,
            "blocks": space.num_blocks,
            "bytes": space.num_bytes,
            "used_at": as_time(space.used_ns),
            "in_use": space.owner is not None or bool(self.seen.live_users(space.name)),
            "private": space.owner is not None,
        }

    def _by_size(self) -> list[SeenNamespace]:
        return sorted(self.seen.namespaces, key=lambda space: (-space.num_blocks, space.name))

    def lines(self) -> Iterator[str]:
        seen = self.seen
        yield str(self.path)
        yield f"on disk     {as_size(seen.num_bytes)} ({seen.num_bytes} bytes)"
        if seen.balance is not None:
            reserved = f", {as_size(seen.balance.reserved)} of it reserved"
            yield (
                f"ledger      {as_size(seen.balance.total)} ({seen.balance.total} bytes)"
                f"{reserved if seen.balance.reserved else ''}"
            )
        remark = ledger_remark(seen)
        if remark is not None:
            yield f"            {remark}"
        yield f"blocks      {self.num_blocks}"
        for space in self._by_size():
            yield f"  {namespace_line(space)}, {self._users(space)}"
        yield f"engines     {sum(seat.is_alive for seat in seen.seats)}"
        for seat in seen.seats:
            yield f"  {_who(seat)}"
        if seen.strays:
            yield (
                f"strays      {len(seen.strays)} files that are no blocks "
                f"({as_size(self._stray_bytes)}); `kvtier store gc --dry-run` names them"
            )

    def _users(self, space: SeenNamespace) -> str:
        if space.owner is not None:
            return "private to one engine after a reset of its cache"
        num_users = len(self.seen.live_users(space.name))
        if not num_users:
            return "used by no live engine"
        return f"used by {num_users} engine{'s' if num_users > 1 else ''}"


def namespace_line(space: SeenNamespace) -> str:
    """A namespace in a list."""
    age = as_age((time.time_ns() - space.used_ns) / 1e9)
    return (
        f"{space.name}  {space.num_blocks} blocks, {as_size(space.num_bytes)}, last used {age} ago"
    )


def _seat_json(seat: SeenSeat) -> dict[str, Any]:
    who = seat.occupant
    return {
        "engine_id": None if who is None else who.engine_id,
        "pid": None if who is None else who.pid,
        "host": None if who is None else who.host,
        "since": None if who is None else as_time(who.since_ns),
        "namespace": None if who is None else who.namespace,
        "alive": seat.is_alive,
    }


def _who(seat: SeenSeat) -> str:
    who = seat.occupant
    name = f"one that has left no name ({seat.engine})"
    if who is not None:
        name = f"{who.engine_id} (process {who.pid} on {who.host}, since {as_time(who.since_ns)})"
    if not seat.is_alive:
        return f"dead: {name}; engines, or `kvtier store gc`, remove what it has left"
    return f"{name}, namespace {who.namespace[:_NAME_DIGITS]}" if who and who.namespace else name
