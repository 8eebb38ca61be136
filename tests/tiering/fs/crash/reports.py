"""Reports of what the tier publishes and evicts, made while it holds the ledger's lock."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.eviction import Sweeper
from kvtier.tiering.fs.layout import SHARDS, BlockFile, read_shard
from kvtier.tiering.fs.publisher import Publisher
from kvtier.tiering.fs.root import RootSession
from kvtier.tiering.fs.transaction import Evicted, Outcome, Transaction, Written
from tests.tiering.crash.points import plant
from tests.tiering.fs.hardship import path_in

_IN_ONE_REPORT = 16
"""Paths in one report, which must be one write into a pipe that others write into, too."""
_ENOUGH = 24
_CLOCK_STEP_NS = 10_000_000
"""Resolution of the clock that gives files their times."""


class TierReports:
    """Wraps the tier's methods. Blocks are reported after they are published and before they are
    evicted: wherever the process is killed, a block that was reported as published and not as
    evicted is in the root."""

    def __init__(self, root: Path, report: Callable[..., None]) -> None:
        self._root = root
        self._blocks = f"{root}/blocks/"
        self._report = report
        self._looked_ns: dict[str, int] = {}
        """By path of a block, when it was last seen to be evictable."""
        self._first_error = ""
        """The error for which the presence was given up."""

    def plant(self) -> None:
        self._plant_in_rename()
        self._plant_in_publish()
        self._plant_in_look()
        self._plant_in_evict()
        self._plant_in_loss()
        self._plant_in_log()

    def _plant_in_rename(self) -> None:
        real = os.rename

        def rename(source: Any, target: Any, **options: Any) -> None:
            path = path_in(source, options.get("src_dir_fd"))
            if path.startswith(self._blocks):
                self._report("leaves", path.removeprefix(self._blocks))
            real(source, target, **options)

        plant(os, rename=rename)

    def _plant_in_publish(self) -> None:
        real = Transaction.publish

        def publish(txn: Transaction, written: Sequence[Written], on_error: Any) -> list[Outcome]:
            self._report_paths("publishes", [block.final for block in written])
            outcomes = real(txn, written, on_error)
            there = [
                block.final
                for block, outcome in zip(written, outcomes, strict=True)
                if outcome is not Outcome.FAILED
            ]
            self._report_paths("published", there)
            return outcomes

        plant(Transaction, publish=publish)

    def _report_paths(self, what: str, paths: list[str]) -> None:
        for start in range(0, len(paths), _IN_ONE_REPORT):
            self._report(what, paths[start : start + _IN_ONE_REPORT])

    def _plant_in_look(self) -> None:
        real = Sweeper._oldest

        def oldest(sweeper: Sweeper, namespaces: Sequence[Path], count: int) -> list[BlockFile]:
            now_ns = time.time_ns()
            found = real(sweeper, namespaces, count)
            self._looked_ns.update((block.path, now_ns) for block in found)
            return found

        plant(Sweeper, _oldest=oldest)

    def _plant_in_evict(self) -> None:
        real = Transaction.evict

        def evict(
            txn: Transaction,
            blocks: Iterable[BlockFile],
            on_error: Any = None,
            is_forced: bool = False,
        ) -> list[Evicted]:
            candidates = list(blocks)
            gone = real(txn, candidates, on_error, is_forced=is_forced)
            if gone:
                self._report("evicted", len(gone))
            if gone and not is_forced:
                self._judge(candidates, gone)
            return gone

        plant(Transaction, evict=evict)

    def _plant_in_loss(self) -> None:
        """No file operation fails in these runs, so no engine has to abandon its presence."""
        real = Publisher._lost

        real_abandon = RootSession.abandon_presence

        def abandon_presence(session: RootSession) -> None:
            error = sys.exc_info()[1]
            if error is not None and not self._first_error:
                frames = traceback.extract_tb(error.__traceback__)
                self._first_error = f"{error!r} in {[frame.name for frame in frames]}"
            real_abandon(session)

        def lost(publisher: Publisher[Any], why: str) -> None:
            self._report(
                "wrong", f"the presence is lost: {why}; at first {self._first_error[:2000]}"
            )
            real(publisher, why)

        plant(RootSession, abandon_presence=abandon_presence)
        plant(Publisher, _lost=lost)

    def _plant_in_log(self) -> None:
        """The tier logs an exception on one of its threads when something unexpected fails, and
        goes on."""

        def exception(logger: logging.Logger, message: str, *args: object) -> None:
            error = traceback.format_exc().strip().splitlines()[-1]
            self._report("wrong", f"an unexpected error: {message % args}: {error[:1000]}")

        plant(logging.Logger, exception=exception)

    def _judge(self, candidates: list[BlockFile], gone: list[Evicted]) -> None:
        looked_at = {block.path: block.used_ns for block in candidates}
        used = [each for each in gone if each.block.used_ns != looked_at[each.block.path]]
        if used:
            self._report("wrong", f"{used[0].block.path} has left, and was used a moment ago")
        self._judge_age(gone)

    def _judge_age(self, gone: list[Evicted]) -> None:
        """Evicted blocks were used before all that stay, except those that the sweeper could not
        have seen when it looked: later blocks, and blocks whose time has changed since."""
        namespace = Path(gone[0].block.path).parent.parent
        victims = [each.block for each in gone if each.block.path.startswith(f"{namespace}/")]
        oldest = min(victims, key=lambda block: block.used_ns)
        known_until_ns = self._looked_ns[oldest.path] - _CLOCK_STEP_NS
        statuses = [
            os.lstat(block.path)
            for shard in SHARDS
            for block in read_shard(NoFollowTree(self._root), namespace, shard)
        ]
        num_older = sum(
            status.st_mtime_ns < oldest.used_ns
            and status.st_ctime_ns < known_until_ns
            and status.st_nlink == 1
            for status in statuses
        )
        if len(statuses) >= _ENOUGH and num_older > len(statuses) / 2:
            self._report(
                "wrong", f"of {len(statuses)} that stay, {num_older} are older than who left"
            )
