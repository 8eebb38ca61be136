"""The commands of `kvtier store`, from checked options to an exit code."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.base import get_offload_block_hash, get_offload_group_idx
from kvtier.cli.output import finish, note, write
from kvtier.cli.store.amounts import as_age, as_size, as_time
from kvtier.cli.store.answers import is_confirmed, require_terminal, write_result
from kvtier.cli.store.opening import open_store
from kvtier.cli.store.progress import shown_count, shown_progress
from kvtier.cli.store.store import Damage, Order, Scrub, Store, StoredBlock

__all__ = ["clear", "list_blocks", "show_figures", "verify"]

_SHOWN_DAMAGES = 20
_NAME_DIGITS = 8
"""Of a namespace, in a table; `--json` and `stat` have all of them."""


# --- ls ----------------------------------------------------------------------------------------


def list_blocks(
    path: Path, namespace: str | None, order: Order, limit: int | None, *, as_json: bool
) -> int:
    with open_store(path) as store:
        listing = store.blocks(namespace, order, limit)
        if as_json:
            head = {"path": str(path), "kind": store.kind, "total": listing.num_blocks}
            _write_rows(head, (_block_json(store, block) for block in listing.blocks))
        else:
            _write_table(store, listing.blocks)
        finish()
        if limit is not None and limit < listing.num_blocks:
            note(f"kvtier store: {limit} of {listing.num_blocks} blocks; --limit 0 for all")
    return 0


def _write_rows(head: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    """One document, of which no more than a row is held in memory."""
    write(json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "blocks": [')
    separator = "\n    "
    for row in rows:
        write(separator + json.dumps(row))
        separator = ",\n    "
    write("\n  ]\n}\n")


def _block_json(store: Store, block: StoredBlock) -> dict[str, Any]:
    row = {
        "rank": block.rank,
        "block_hash": get_offload_block_hash(block.key).hex(),
        "group": get_offload_group_idx(block.key),
        "namespace": block.namespace,
        store.place_name: block.place,
        "bytes": block.num_bytes,
        "stored_at": None if block.stored_ns is None else as_time(block.stored_ns),
    }
    return row if block.used_ns is None else row | {"used_at": as_time(block.used_ns)}


def _write_table(store: Store, blocks: Iterator[StoredBlock]) -> None:
    """A place that is too long for a table gives way to the last use."""
    now_ns = time.time_ns()

    def age(when_ns: int | None) -> str:
        return "-" if when_ns is None else as_age((now_ns - when_ns) / 1e9)

    third = store.place_name if store.is_place_short else "used"
    row = "{:>8}  {:>8}  {:>8}  {:>9}  {:>5}  {:9}  {}\n"
    write(row.format("rank", "stored", third, "size", "group", "namespace", "block hash"))
    for block in blocks:
        write(
            row.format(
                block.rank,
                age(block.stored_ns),
                block.place if store.is_place_short else age(block.used_ns),
                as_size(block.num_bytes),
                get_offload_group_idx(block.key),
                block.namespace[:_NAME_DIGITS],
                get_offload_block_hash(block.key).hex(),
            )
        )


# --- stat --------------------------------------------------------------------------------------


def show_figures(path: Path, *, as_json: bool) -> int:
    with open_store(path) as store:
        figures = store.figures()
    write_result(figures, as_json=as_json)
    return 0


# --- verify ------------------------------------------------------------------------------------


def verify(path: Path, namespace: str | None, max_rate: int | None, *, as_json: bool) -> int:
    with open_store(path) as store, shown_progress(max_rate) as on_progress:
        scrub = store.verify(namespace, max_rate, on_progress)
        answer = _ScrubAnswer(path, scrub, store.place_name)
    write_result(answer, as_json=as_json)
    if not scrub.is_complete:
        return 128 + signal.SIGINT
    if scrub.is_damaged:
        return 1
    return 0 if scrub.is_sound else 2


@dataclass(frozen=True, slots=True)
class _ScrubAnswer:
    path: Path
    scrub: Scrub
    place_name: str

    def as_json(self) -> dict[str, Any]:
        scrub = self.scrub
        return {
            "path": str(self.path),
            "ok": scrub.is_sound,
            "complete": scrub.is_complete,
            "good": scrub.num_good,
            "damaged": len(scrub.damaged),
            "gone": scrub.num_gone,
            "no_permission": scrub.num_forbidden,
            "reasons": dict(scrub.reasons().most_common()),
            "bytes": scrub.num_bytes,
            "seconds": round(scrub.seconds, 3),
            "problems": scrub.remarks,
            "blocks": [
                {
                    self.place_name: damage.place,
                    "reason": damage.reason,
                    "block_hash": None
                    if damage.key is None
                    else get_offload_block_hash(damage.key).hex(),
                    "group": None if damage.key is None else get_offload_group_idx(damage.key),
                }
                for damage in scrub.damaged
            ],
        }

    def lines(self) -> Iterator[str]:
        scrub = self.scrub
        rate = scrub.num_bytes / max(scrub.seconds, 1e-9)
        yield (
            f"{self.path}: {as_size(scrub.num_bytes)} read in {scrub.seconds:.1f} s "
            f"({as_size(rate)} per s)"
        )
        if not scrub.is_complete:
            doubt = "" if scrub.is_certain else "; what looked damaged was not looked at again"
            yield (
                f"ended by Ctrl-C after {as_size(scrub.num_bytes)} of "
                f"{as_size(scrub.total_bytes)}{doubt}"
            )
        yield f"good     {scrub.num_good}"
        if scrub.num_gone:
            yield f"gone     {scrub.num_gone} (overwritten or dropped by the engine meanwhile)"
        if scrub.num_forbidden:
            yield (
                f"no permission to read {scrub.num_forbidden} blocks as uid {os.geteuid()}: run "
                "this as root. If engines run as this user, they cannot read them either, and "
                f"compute them each time: chown -R {os.geteuid()} {self.path}"
            )
        yield f"damaged  {len(scrub.damaged)}"
        for reason, count in scrub.reasons().most_common():
            yield f"  {reason:12} {count}"
        for damage in scrub.damaged[:_SHOWN_DAMAGES]:
            yield f"DAMAGED  {self.place_name} {damage.place}: {damage.reason}{_which(damage)}"
        if len(scrub.damaged) > _SHOWN_DAMAGES:
            yield f"and {len(scrub.damaged) - _SHOWN_DAMAGES} more; --json has all of them"
        for remark in scrub.remarks:
            yield f"DAMAGED  {remark}"
        if scrub.damaged:
            yield "An engine that loads such a block notices, drops it, and computes it again."


def _which(damage: Damage) -> str:
    return "" if damage.key is None else f", block {get_offload_block_hash(damage.key).hex()}"


# --- clear -------------------------------------------------------------------------------------


def clear(
    path: Path, namespace: str | None, patience_s: float, *, is_sure: bool, as_json: bool
) -> int:
    with open_store(path) as store:
        if not is_sure and not _wants_to_clear(store, namespace):
            note("kvtier store: nothing was cleared")
            return 1
        with shown_count() as on_progress:
            clearing = store.clear(namespace, patience_s, on_progress)
    write_result(clearing, as_json=as_json)
    return 0 if clearing.is_complete else 128 + signal.SIGINT


def _wants_to_clear(store: Store, namespace: str | None) -> bool:
    require_terminal("--yes if you are")
    which = "" if namespace is None else f" of namespace {namespace}"
    num_blocks = store.count(namespace)
    num_engines = store.count_engines()
    users = f", and {num_engines} engines use it" if num_engines > 1 else ", and 1 engine uses it"
    return is_confirmed(
        f"{store.path} holds {num_blocks} blocks{which}{users if num_engines else ''}. "
        "Forget all of them?"
    )
