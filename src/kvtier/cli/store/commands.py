"""The commands of `kvtier store`, from checked options to an exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.base import get_offload_block_hash, get_offload_group_idx
from kvtier.cli.output import finish, note, write
from kvtier.cli.store.amounts import as_age, as_size, as_time
from kvtier.cli.store.progress import shown_progress
from kvtier.cli.store.refusal import StoreRefused
from kvtier.cli.store.slab_store import SlabStore
from kvtier.cli.store.store import Damage, Order, Scrub, Store, StoredBlock

__all__ = ["clear", "list_blocks", "show_figures", "verify"]

_SHOWN_DAMAGES = 20
_NAME_DIGITS = 8
"""Of a namespace, in a table; `--json` and `stat` have all of them."""


def open_store(path: Path) -> Store:
    """The store at `path`. Raises `StoreRefused` or `OSError`."""
    if path.is_dir():
        raise StoreRefused(
            f"{path} is a directory: give the path of a slab file, the `path` of a disk tier"
        )
    return SlabStore(path)


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
    return {
        "rank": block.rank,
        "block_hash": get_offload_block_hash(block.key).hex(),
        "group": get_offload_group_idx(block.key),
        "namespace": block.namespace,
        store.place_name: block.place,
        "bytes": block.num_bytes,
        "stored_at": None if block.stored_ns is None else as_time(block.stored_ns),
    }


def _write_table(store: Store, blocks: Iterator[StoredBlock]) -> None:
    now_ns = time.time_ns()
    row = "{:>8}  {:>8}  {:>8}  {:>9}  {:>5}  {:9}  {}\n"
    write(
        row.format("rank", "stored", store.place_name, "size", "group", "namespace", "block hash")
    )
    for block in blocks:
        age = "-" if block.stored_ns is None else as_age((now_ns - block.stored_ns) / 1e9)
        write(
            row.format(
                block.rank,
                age,
                block.place,
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
    if as_json:
        _write_json(figures.as_json())
    else:
        write("".join(f"{line}\n" for line in figures.lines()))
        finish()
    return 0


def _write_json(document: dict[str, Any]) -> None:
    write(json.dumps(document, indent=2) + "\n")
    finish()


# --- verify ------------------------------------------------------------------------------------


def verify(path: Path, namespace: str | None, max_rate: int | None, *, as_json: bool) -> int:
    with open_store(path) as store, shown_progress(max_rate) as on_progress:
        scrub = store.verify(namespace, max_rate, on_progress)
        place_name = store.place_name
    if as_json:
        _write_json(_scrub_json(path, scrub, place_name))
    else:
        write("".join(f"{line}\n" for line in _scrub_lines(path, scrub, place_name)))
        finish()
    if not scrub.is_complete:
        return 128 + signal.SIGINT
    return 0 if scrub.is_sound else 1


def _scrub_json(path: Path, scrub: Scrub, place_name: str) -> dict[str, Any]:
    return {
        "path": str(path),
        "ok": scrub.is_sound,
        "complete": scrub.is_complete,
        "good": scrub.num_good,
        "damaged": len(scrub.damaged),
        "gone": scrub.num_gone,
        "reasons": dict(scrub.reasons().most_common()),
        "bytes": scrub.num_bytes,
        "seconds": round(scrub.seconds, 3),
        "problems": scrub.remarks,
        "blocks": [
            {
                place_name: damage.place,
                "reason": damage.reason,
                "block_hash": None
                if damage.key is None
                else get_offload_block_hash(damage.key).hex(),
                "group": None if damage.key is None else get_offload_group_idx(damage.key),
            }
            for damage in scrub.damaged
        ],
    }


def _scrub_lines(path: Path, scrub: Scrub, place_name: str) -> Iterator[str]:
    rate = scrub.num_bytes / max(scrub.seconds, 1e-9)
    yield (
        f"{path}: {as_size(scrub.num_bytes)} read in {scrub.seconds:.1f} s ({as_size(rate)} per s)"
    )
    if not scrub.is_complete:
        yield (
            f"ended by Ctrl-C after {as_size(scrub.num_bytes)} of {as_size(scrub.total_bytes)}; "
            "what looked damaged was not looked at again"
        )
    yield f"good     {scrub.num_good}"
    if scrub.num_gone:
        yield f"gone     {scrub.num_gone} (overwritten or dropped by the engine meanwhile)"
    yield f"damaged  {len(scrub.damaged)}"
    for reason, count in scrub.reasons().most_common():
        yield f"  {reason:12} {count}"
    for damage in scrub.damaged[:_SHOWN_DAMAGES]:
        yield f"DAMAGED  {place_name} {damage.place}: {damage.reason}{_which(damage)}"
    if len(scrub.damaged) > _SHOWN_DAMAGES:
        yield f"and {len(scrub.damaged) - _SHOWN_DAMAGES} more; --json has all of them"
    for remark in scrub.remarks:
        yield f"DAMAGED  {remark}"
    if scrub.damaged:
        yield "An engine that loads such a block notices, drops it, and computes it again."


def _which(damage: Damage) -> str:
    return "" if damage.key is None else f", block {get_offload_block_hash(damage.key).hex()}"


# --- clear -------------------------------------------------------------------------------------


def clear(path: Path, patience_s: float, *, is_sure: bool, as_json: bool) -> int:
    with open_store(path) as store:
        if not is_sure and not _confirmed(store):
            note("kvtier store: nothing was cleared")
            return 1
        clearing = store.clear(patience_s)
    if as_json:
        _write_json(
            {
                "path": str(path),
                "cleared_blocks": clearing.num_blocks,
                "by_engine": clearing.by_engine,
                "seconds": round(clearing.seconds, 3),
            }
        )
    else:
        by = " by the engine that has it open" if clearing.by_engine else ""
        write(f"{path}: {clearing.num_blocks} blocks were cleared{by}.\n")
        write("Their bytes stay in the file until they are overwritten, or it is removed.\n")
        finish()
    return 0


def _confirmed(store: Store) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise StoreRefused("there is no terminal to ask whether you are sure: add --yes if you are")
    num_blocks = store.figures().num_blocks
    note(f"{store.path} holds {num_blocks} blocks. Forget all of them? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
