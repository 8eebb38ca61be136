"""`kvtier store gc`, from checked options to an exit code."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.output import note
from kvtier.cli.store.amounts import as_size
from kvtier.cli.store.answers import is_confirmed, require_terminal, write_result
from kvtier.cli.store.fs_gc import INTERRUPTED, Candidate, find_candidates, remove_orphans, tidy_up
from kvtier.cli.store.fs_store import FsStore
from kvtier.cli.store.gc_report import GcReport, candidate_lines
from kvtier.cli.store.interrupts import noted_interrupts
from kvtier.cli.store.opening import open_store
from kvtier.cli.store.progress import shown_count
from kvtier.cli.store.refusal import StoreRefused
from kvtier.tiering.fs.reader import Survey

__all__ = ["collect_garbage"]


def collect_garbage(
    path: Path,
    wanted: Sequence[str],
    older_than_s: int,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> int:
    started = time.monotonic()
    seen = _survey(path)
    report = GcReport(path, seen, find_candidates(seen, wanted, older_than_s))
    is_declined = False
    if not is_dry:
        is_declined = not _clean(report, is_sure)
    report.seconds = time.monotonic() - started
    write_result(report, as_json=as_json)
    if not report.is_complete:
        return 128 + signal.SIGINT
    if is_declined:
        note("kvtier store: no namespace was removed; the rest was done")
    return int(is_declined)


def _survey(path: Path) -> Survey:
    try:
        with open_store(path) as store:
            if isinstance(store, FsStore):
                return store.survey()
    except StoreRefused:
        if path.is_dir():
            raise
        raise StoreRefused(f"{path} is no directory: give the root_dir of an fs tier") from None
    raise StoreRefused(
        f"{path} is a slab, which needs no gc: it never grows, and the engine that has it reuses "
        "what is old"
    )


def _clean(report: GcReport, is_sure: bool) -> bool:
    """False: the user does not want namespaces to be removed."""
    chosen = report.chosen
    if chosen and not is_sure:
        require_terminal("--yes if you are, or --dry-run to see what there is")
    with noted_interrupts() as is_stopping:
        report.tidied = tidy_up(report.path)
        report.is_complete = not is_stopping()
    if not report.is_complete:
        _keep(chosen, INTERRUPTED)
    if not chosen or not report.is_complete:
        return True
    try:
        if not is_sure and not _wants_removal(report.candidates, chosen):
            _keep(chosen, "not confirmed")
            return False
    except KeyboardInterrupt:
        _keep(chosen, INTERRUPTED)
        report.is_complete = False
        return True
    with noted_interrupts() as is_stopping:
        with shown_count() as on_progress:
            report.removals = remove_orphans(report.path, chosen, is_stopping, on_progress)
        report.is_complete = not is_stopping()
    return True


def _keep(chosen: Sequence[Candidate], reason: str) -> None:
    for each in chosen:
        each.kept_because = reason


def _wants_removal(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> bool:
    for line in candidate_lines(candidates):
        note(line)
    num_blocks = sum(each.space.num_blocks for each in chosen)
    num_bytes = sum(each.space.num_bytes for each in chosen)
    return is_confirmed(
        f"Remove {len(chosen)} of them, with {num_blocks} blocks, {as_size(num_bytes)}?"
    )
