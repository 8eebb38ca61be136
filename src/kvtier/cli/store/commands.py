"""The commands of `kvtier store`: each asks the inspector of a tier and prints its answer.

Called by `kvtier.cli.store.app` with checked options. Each returns the exit code, and may raise
`InspectionRefused`, `InspectionTimedOut` or `OSError`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier.base import get_offload_block_hash, get_offload_group_idx
from kvtier.cli.output import finish, note, write, write_line
from kvtier.cli.store.terminal import is_confirmed, require_terminal, shown_count, shown_progress
from kvtier.config import NamespaceDescription
from kvtier.config.sizes import as_size
from kvtier.tiering.inspection import (
    Damage,
    GarbageCollection,
    Order,
    Report,
    Scrub,
    StoredBlock,
    TierInspector,
    as_age,
    as_time,
    init_storage,
    open_inspector,
)

__all__ = ["clear", "collect_garbage", "init", "list_blocks", "show_figures", "verify"]

_SHOWN_DAMAGES = 20
_NAME_DIGITS = 8
"""Digits of a namespace in a table. `--json` and `stat` show all of them."""
_INTERRUPTED = 128 + signal.SIGINT


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(report.document, indent=2) + "\n")
    else:
        for line in report.text():
            write_line(line)
    finish()


# --- ls ----------------------------------------------------------------------------------------


def list_blocks(
    location: str, namespace: str | None, order: Order, limit: int | None, *, as_json: bool
) -> int:
    with open_inspector(location) as store:
        listing = store.blocks(namespace, order, limit)
        described = store.descriptions()
        if as_json:
            head = {"path": store.location, "kind": store.kind, "total": listing.num_blocks}
            _write_rows(head, (_block_json(store, block, described) for block in listing.blocks))
        else:
            _write_table(store, listing.blocks, described)
        finish()
        if limit is not None and limit < listing.num_blocks:
            note(f"kvtier store: {limit} of {listing.num_blocks} blocks; --limit 0 for all")
    return 0


def _write_rows(head: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    """Write one JSON document row by row, so that a million blocks need not fit into memory."""
    write(json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "blocks": [')
    separator = "\n    "
    for row in rows:
        write(separator + json.dumps(row))
        separator = ",\n    "
    write("\n  ]\n}\n")


def _block_json(
    store: TierInspector, block: StoredBlock, described: Mapping[str, NamespaceDescription]
) -> dict[str, Any]:
    found = described.get(block.namespace)
    row = {
        "rank": block.rank,
        "block_hash": get_offload_block_hash(block.key).hex(),
        "group": get_offload_group_idx(block.key),
        "namespace": block.namespace,
        "model": None if found is None else found.model,
        store.place_name: block.place,
        "bytes": block.num_bytes,
        "stored_at": None if block.stored_ns is None else as_time(block.stored_ns),
    }
    return row if block.used_ns is None else row | {"used_at": as_time(block.used_ns)}


def _write_table(
    store: TierInspector,
    blocks: Iterator[StoredBlock],
    described: Mapping[str, NamespaceDescription],
) -> None:
    """Write one line for each block. The third column has the block's place or, if places are too
    long for a table, the time since its last use. The last one has the model, if it is known."""
    now_ns = time.time_ns()

    def age(when_ns: int | None) -> str:
        return "-" if when_ns is None else as_age((now_ns - when_ns) / 1e9)

    third = store.place_name if store.is_place_short else "used"
    row = "{:>8}  {:>8}  {:>8}  {:>9}  {:>5}  {:9}  {}{}"
    names = ("rank", "stored", third, "size", "group", "namespace", "block hash")
    write_line(row.format(*names, "  model" if described else ""))
    for block in blocks:
        found = described.get(block.namespace)
        write_line(
            row.format(
                block.rank,
                age(block.stored_ns),
                block.place if store.is_place_short else age(block.used_ns),
                as_size(block.num_bytes),
                get_offload_group_idx(block.key),
                block.namespace[:_NAME_DIGITS],
                get_offload_block_hash(block.key).hex(),
                "" if found is None else f"  {found.model}",
            )
        )


# --- stat --------------------------------------------------------------------------------------


def show_figures(location: str, *, as_json: bool) -> int:
    with open_inspector(location) as store:
        figures = store.figures()
        described = store.descriptions()
    document = {
        **figures.document,
        "descriptions": [
            {
                "namespace": name,
                "model": found.model,
                "made_of": dict(found.ingredients),
                "hash_root": found.hash_root or None,
            }
            for name, found in described.items()
        ],
    }
    lines = list(figures.text())
    if described:
        lines.append("made of")
        lines += [f"  {name}  {found.summary()}" for name, found in described.items()]
    _print(Report(document, lines, figures.is_complete), as_json=as_json)
    return 0


# --- verify ------------------------------------------------------------------------------------


def verify(location: str, namespace: str | None, max_rate: int | None, *, as_json: bool) -> int:
    with open_inspector(location) as store, shown_progress(max_rate) as on_progress:
        scrub = store.verify(namespace, max_rate, on_progress)
    document, lines = _scrub_json(store, scrub), list(_scrub_lines(store, scrub))
    _print(Report(document, lines), as_json=as_json)
    if not scrub.is_complete:
        return _INTERRUPTED
    if scrub.is_damaged:
        return 1
    return 0 if scrub.is_sound else 2


def _scrub_json(store: TierInspector, scrub: Scrub) -> dict[str, Any]:
    return {
        "path": store.location,
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
                store.place_name: damage.place,
                "reason": damage.reason,
                "block_hash": None
                if damage.key is None
                else get_offload_block_hash(damage.key).hex(),
                "group": None if damage.key is None else get_offload_group_idx(damage.key),
            }
            for damage in scrub.damaged
        ],
    }


def _scrub_lines(store: TierInspector, scrub: Scrub) -> Iterator[str]:
    rate = scrub.num_bytes / max(scrub.seconds, 1e-9)
    yield (
        f"{store.location}: {as_size(scrub.num_bytes)} read in {scrub.seconds:.1f} s "
        f"({as_size(rate)} per s)"
    )
    if not scrub.is_complete:
        doubt = "" if scrub.is_certain else "; damaged blocks were not checked a second time"
        yield (
            f"ended by Ctrl-C after {as_size(scrub.num_bytes)} of "
            f"{as_size(scrub.total_bytes)}{doubt}"
        )
    yield f"good     {scrub.num_good}"
    if scrub.num_gone:
        yield f"gone     {scrub.num_gone} (an engine overwrote or removed them during this check)"
    if scrub.num_forbidden:
        yield (
            f"no permission to read {scrub.num_forbidden} blocks as uid {os.geteuid()}: run "
            "this as root. If engines run as this user, they cannot read them either, and "
            f"compute them each time: chown -R {os.geteuid()} {store.location}"
        )
    yield f"damaged  {len(scrub.damaged)}"
    for reason, count in scrub.reasons().most_common():
        yield f"  {reason:12} {count}"
    for damage in scrub.damaged[:_SHOWN_DAMAGES]:
        yield f"DAMAGED  {store.place_name} {damage.place}: {damage.reason}{_which(damage)}"
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
    location: str, namespace: str | None, patience_s: float, *, is_sure: bool, as_json: bool
) -> int:
    with open_inspector(location) as store:
        if not is_sure and not _wants_to_clear(store, namespace):
            note("kvtier store: nothing was cleared")
            return 1
        with shown_count() as on_progress:
            cleared = store.clear(namespace, patience_s, on_progress)
    _print(cleared, as_json=as_json)
    return 0 if cleared.is_complete else _INTERRUPTED


def _wants_to_clear(store: TierInspector, namespace: str | None) -> bool:
    require_terminal("--yes if you are")
    which = "" if namespace is None else f" of namespace {namespace}"
    num_blocks = store.count(namespace)
    num_engines = store.count_engines()
    users = f", and {num_engines} engines use it" if num_engines > 1 else ", and 1 engine uses it"
    return is_confirmed(
        f"{store.location} holds {num_blocks} blocks{which}{users if num_engines else ''}. "
        "Clear all of them?"
    )


# --- gc ----------------------------------------------------------------------------------------


def collect_garbage(
    location: str,
    namespaces: Sequence[str],
    older_than_s: int,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> int:
    with open_inspector(location) as store:
        garbage = store.find_garbage(namespaces, older_than_s)
        is_declined = not is_dry and not _clean(garbage, is_sure)
        report = garbage.report()
    _print(report, as_json=as_json)
    if not report.is_complete:
        return _INTERRUPTED
    if is_declined:
        note("kvtier store: no namespace was removed; the other work of gc was done")
    return int(is_declined)


def _clean(garbage: GarbageCollection, is_sure: bool) -> bool:
    """Tidy up, then remove the namespaces found. Returns False if the user declined the removal."""
    if garbage.question and not is_sure:
        require_terminal("--yes if you are, or --dry-run to see what there is")
    garbage.tidy_up()
    if not garbage.question or not garbage.is_complete:
        return True
    try:
        if not is_sure and not _wants_removal(garbage, garbage.question):
            garbage.keep(is_interrupted=False)
            return False
    except KeyboardInterrupt:
        garbage.keep(is_interrupted=True)
        return True
    with shown_count() as on_progress:
        garbage.remove(on_progress)
    return True


def _wants_removal(garbage: GarbageCollection, question: str) -> bool:
    for line in garbage.candidate_lines():
        note(line)
    return is_confirmed(question)


# --- init --------------------------------------------------------------------------------------


def init(location: str, *, as_json: bool) -> int:
    _print(init_storage(location), as_json=as_json)
    return 0
