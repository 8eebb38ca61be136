"""Says what comes to the root and what leaves it, as it happens, under the ledger's lock."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.tiering.fs.books import Books, Evicted, Outcome, Written
from kvtier.tiering.fs.clerk import Clerk
from kvtier.tiering.fs.ledger import Balance
from kvtier.tiering.fs.names import SHARDS
from kvtier.tiering.fs.tree import BlockFile, read_shard
from tests.tiering.disk.crash.planting import plant

_IN_ONE_REPORT = 16
"""A report is one write into a pipe, which others write into as well."""
_ENOUGH = 24
"""Where fewer stay, chance has had too much of a say in what was found."""


class Wrong(Exception):
    """The tier did what it must not do."""


class Witness:
    """Put around the tier's own methods. What is published is said after it has happened, what
    leaves before: whatever has been said when the process is killed, no block that must be there
    has left."""

    def __init__(self, root: Path, report: Callable[..., None]) -> None:
        self._root = root
        self._blocks = f"{root}/blocks/"
        self._report = report
        self._first_error = ""
        """For which the seat was given up."""

    def plant(self) -> None:
        self._plant_in_rename()
        self._plant_in_publish()
        self._plant_in_evict()
        self._plant_in_loss()

    def _plant_in_rename(self) -> None:
        real = os.rename

        def rename(source: Any, target: Any, **options: Any) -> None:
            if str(source).startswith(self._blocks):
                self._report("leaves", str(source).removeprefix(self._blocks))
            real(source, target, **options)

        plant(os, rename=rename)

    def _plant_in_publish(self) -> None:
        real = Books.publish

        def publish(
            books: Books, balance: Balance, written: Sequence[Written], on_error: Any
        ) -> list[Outcome]:
            self._report_paths("publishes", [block.final for block in written])
            outcomes = real(books, balance, written, on_error)
            there = [
                block.final
                for block, outcome in zip(written, outcomes, strict=True)
                if outcome is not Outcome.FAILED
            ]
            self._report_paths("published", there)
            return outcomes

        plant(Books, publish=publish)

    def _report_paths(self, what: str, paths: list[str]) -> None:
        for start in range(0, len(paths), _IN_ONE_REPORT):
            self._report(what, paths[start : start + _IN_ONE_REPORT])

    def _plant_in_evict(self) -> None:
        real = Books.evict

        def evict(
            books: Books, balance: Balance, blocks: Iterable[BlockFile], is_forced: bool = False
        ) -> list[Evicted]:
            candidates = list(blocks)
            gone = real(books, balance, candidates, is_forced=is_forced)
            if gone:
                self._report("evicted", len(gone))
            if gone and not is_forced:
                self._judge(candidates, gone)
            return gone

        plant(Books, evict=evict)

    def _plant_in_loss(self) -> None:
        """Nothing goes wrong with the file system here, so nobody has to give up its seat."""
        real = Clerk._lost

        real_give_up = Books.give_up_seat

        def give_up_seat(books: Books) -> None:
            error = sys.exc_info()[1]
            if error is not None and not self._first_error:
                frames = traceback.extract_tb(error.__traceback__)
                self._first_error = f"{error!r} in {[frame.name for frame in frames]}"
            real_give_up(books)

        def lost(clerk: Clerk[Any], why: str) -> None:
            self._report("wrong", f"the seat is lost: {why}; at first {self._first_error[:2000]}")
            real(clerk, why)

        plant(Books, give_up_seat=give_up_seat)
        plant(Clerk, _lost=lost)

    def _judge(self, candidates: list[BlockFile], gone: list[Evicted]) -> None:
        looked_at = {block.path: block.used_ns for block in candidates}
        used = [each for each in gone if each.block.used_ns != looked_at[each.block.path]]
        if used:
            self._report("wrong", f"{used[0].block.path} has left, and was used a moment ago")
        namespace = Path(gone[0].block.path).parent.parent
        oldest = min(
            each.block.used_ns for each in gone if each.block.path.startswith(f"{namespace}/")
        )
        left = [block.used_ns for shard in SHARDS for block in read_shard(namespace, shard)]
        num_older = sum(used_ns < oldest for used_ns in left)
        if len(left) >= _ENOUGH and num_older > len(left) * 3 / 4:
            self._report("wrong", f"of {len(left)} that stay, {num_older} are older than who left")
