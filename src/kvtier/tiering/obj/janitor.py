"""Keeps a bucket below `max_bytes`, for all engines that share it.

An object store neither counts bytes nor knows when an object was used. So every engine with
`max_bytes` writes a report every half minute: how many bytes it has written in all, and which
blocks it has used. One of them, the leader, reads the reports. Listing a bucket costs money, so the
leader lists it only when what was written since the last listing may have exceeded the limit. It
then removes the blocks that were unused for longest, until a tenth of the limit is free.

PREFIX/kvtier/1/engines/<engine>    the report of an engine, which also says that it lives
PREFIX/kvtier/1/leader              written by the leader each time; the next one takes it when it
                                    is old
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.obj.objects import BLOCKS, PRIVATE, Objects
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure

__all__ = ["ENGINES", "Janitor"]

logger = logging.getLogger(__name__)

ENGINES = f"{BLOCKS}/engines"
_LEADER = f"{BLOCKS}/leader"
_BLOCK = re.compile(rf"{BLOCKS}/(?:private/[0-9a-f]+/)?[0-9a-f]{{32}}/([0-9a-f]+)")

_SWEEP_S = 30.0
_LEADER_LOST_S = 4 * _SWEEP_S
_ENGINE_LOST_S = 3600.0
"""An engine whose report is older than this has ended: its private blocks are removed."""
_FILL = 0.9
"""What stays of the limit when blocks are removed."""
_AT_ONCE = 500
"""Objects removed with one request."""
_MAX_USES = 65_536
"""Blocks in one report; the least recently used ones are left out."""
_BUCKET_MS = 10_000
"""Blocks that were last used within the same time of this length count as equally old."""

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"KVTUSES1"
_LARGEST_REPORT = _HEAD.size + 16 * _MAX_USES


@dataclass(frozen=True, slots=True)
class _Report:
    """What one engine has said."""

    num_written: int
    """Bytes of blocks that it has written since it started."""
    uses: Mapping[int, int]
    """When it used blocks, in ms since 1970, by the first 8 bytes of their keys."""

    def encode(self) -> bytes:
        keys = np.fromiter(self.uses.keys(), np.uint64, len(self.uses))
        times = np.fromiter(self.uses.values(), np.int64, len(self.uses))
        head = _HEAD.pack(_MAGIC, self.num_written, len(keys))
        return head + keys.tobytes() + times.tobytes()

    @classmethod
    def decode(cls, content: memoryview) -> _Report | None:
        """None if it is damaged."""
        if len(content) < _HEAD.size:
            return None
        magic, num_written, count = _HEAD.unpack_from(content)
        if magic != _MAGIC or len(content) != _HEAD.size + 16 * count:
            return None
        keys: NDArray[np.uint64] = np.frombuffer(content, np.uint64, count, _HEAD.size)
        times: NDArray[np.int64] = np.frombuffer(content, np.int64, count, _HEAD.size + 8 * count)
        return cls(num_written, dict(zip(keys.tolist(), times.tolist(), strict=True)))


class _Stored(NamedTuple):
    """A block in the bucket."""

    name: str
    num_bytes: int
    bucket: int
    """When it was last used or written."""


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class Janitor:
    """The thread of one engine that reports, and removes blocks while it leads."""

    def __init__(self, objects: Objects, max_bytes: int, engine: str, errors: ServerErrors) -> None:
        self._objects = objects
        self._max_bytes = max_bytes
        self._engine = engine
        self._errors = errors
        self._lock = threading.Lock()
        """Protects what is reported."""
        self._uses: dict[int, int] = {}
        self._num_written = 0
        self.num_removed = 0
        """Blocks that this engine has removed to make room."""
        self.num_bytes: int | None = None
        """Bytes in the bucket, as far as the leader knows. None: this engine does not lead."""
        self._counted: int | None = None
        """Bytes at the last listing."""
        self._written_then: dict[str, int] = {}
        """What each engine had written at the last listing."""
        self._skew_ms = 0
        """What the service's clock shows more than this machine's."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-obj-janitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Waits for the request that it has made. Does nothing before `start`."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- any thread ----------------------------------------------------------------------------

    def note_used(self, keys: Collection[OffloadKey]) -> None:
        """A request has used these blocks, in prompt order."""
        when_ms = time.time_ns() // 1_000_000 + self._skew_ms
        with self._lock:
            uses = self._uses
            for position, key in enumerate(keys):
                short = _short(key)
                uses.pop(short, None)
                # Later blocks of a prompt count as older, so that its head is removed last.
                uses[short] = when_ms - position
            for short in list(uses)[: max(len(uses) - _MAX_USES, 0)]:
                del uses[short]

    def note_written(self, num_bytes: int) -> None:
        """A block was written."""
        with self._lock:
            self._num_written += num_bytes

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.wait(_SWEEP_S):
            self._try(self.sweep)
        if self.num_bytes is not None:  # another engine can lead at once
            self._try(lambda: self._objects.remove([_LEADER]))

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except ServerFailure as failure:
            self._errors.note(failure)
        except Exception:
            logger.exception("%s: the limit could not be kept", self._errors.where)

    def sweep(self) -> None:
        """Report; and if this engine leads, keep the limit."""
        with self._lock:
            report = _Report(self._num_written, dict(self._uses))
        name = f"{ENGINES}/{self._engine}"
        self._objects.write(name, report.encode())
        now_s = self._objects.modified_at(name)  # by the service's clock
        if now_s is None:
            return
        self._skew_ms = int((now_s - time.time()) * 1000)
        if not self._leads(now_s):
            self._counted = self.num_bytes = None
            return
        reports = self._read_reports(now_s)
        written = {engine: report.num_written for engine, report in reports.items()}
        growth = sum(
            max(num_bytes - self._written_then.get(engine, 0), 0)
            for engine, num_bytes in written.items()
        )
        if self._counted is None or self._counted + growth > self._max_bytes:
            self._written_then = written
            self._counted = self._make_room(reports)
            growth = 0
        self.num_bytes = self._counted + growth

    def _leads(self, now_s: float) -> bool:
        own = self._engine.encode()
        content = self._objects.read(_LEADER, len(own))
        if content is not None and bytes(content) == own:
            self._objects.write(_LEADER, own)
            return True
        if content is not None:
            written_s = self._objects.modified_at(_LEADER)
            if written_s is not None and now_s - written_s < _LEADER_LOST_S:
                return False
            self._objects.remove([_LEADER])
        return self._objects.create(_LEADER, [own])

    def _read_reports(self, now_s: float) -> dict[str, _Report]:
        """The reports of all engines. Removes what engines have left that ended long ago."""
        reports: dict[str, _Report] = {}
        for page in self._objects.below(ENGINES):
            for item in page:
                name = str(item["path"])
                engine = name.rpartition("/")[2]
                if now_s - item["last_modified"].timestamp() > _ENGINE_LOST_S:
                    self._objects.remove_below(f"{PRIVATE}/{engine}", _SWEEP_S)
                    self._objects.remove([name])
                elif item["size"] <= _LARGEST_REPORT:
                    content = self._objects.read(name, item["size"])
                    report = _Report.decode(memoryview(content)) if content else None
                    if report is not None:
                        reports[engine] = report
        return reports

    def _make_room(self, reports: Mapping[str, _Report]) -> int:
        """List the bucket, and remove blocks if there are too many. Returns the bytes that stay.

        Lists twice, so that a bucket of millions of objects needs little memory."""
        uses: dict[int, int] = {}
        for report in reports.values():
            for short, when_ms in report.uses.items():
                uses[short] = max(when_ms, uses.get(short, 0))
        ages: Counter[int] = Counter()
        for block in self._blocks(uses):
            ages[block.bucket] += block.num_bytes
        total = ages.total()
        to_free = total - int(_FILL * self._max_bytes) if total > self._max_bytes else 0
        if to_free:
            last, freed = 0, 0
            for last in sorted(ages):
                freed += ages[last]
                if freed >= to_free:
                    break
            total -= self._remove_until(last, to_free, uses)
        return total

    def _blocks(self, uses: Mapping[int, int]) -> Iterator[_Stored]:
        for page in self._objects.below(BLOCKS):
            for item in page:
                if found := _BLOCK.fullmatch(item["path"]):
                    short = _short(bytes.fromhex(found[1][:16]))
                    used_ms = max(uses.get(short, 0), int(item["last_modified"].timestamp() * 1000))
                    yield _Stored(item["path"], item["size"], used_ms // _BUCKET_MS)

    def _remove_until(self, last: int, to_free: int, uses: Mapping[int, int]) -> int:
        """Remove blocks whose bucket is `last` or before. Returns the bytes removed."""
        freed = 0
        doomed: list[str] = []
        for block in self._blocks(uses):
            if block.bucket <= last and freed < to_free:
                doomed.append(block.name)
                freed += block.num_bytes
            if len(doomed) >= _AT_ONCE or (doomed and freed >= to_free):
                self._objects.remove(doomed)
                self.num_removed += len(doomed)
                doomed = []
            if freed >= to_free or self._stopped.is_set():
                break
        if doomed:
            self._objects.remove(doomed)
            self.num_removed += len(doomed)
        return freed
