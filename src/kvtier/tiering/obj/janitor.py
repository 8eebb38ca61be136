"""Keeps a bucket below `max_bytes`, for all engines that share it.

An object store neither counts bytes nor knows when an object was used. So every engine with
`max_bytes` writes a report every half minute: how many bytes it has written in all, and which
blocks it has used. One of them, the leader, reads the reports. Listing a bucket costs money, so the
leader lists it only when what was written since the last listing may have exceeded the limit. It
then removes the blocks that were unused for longest, until a tenth of the limit is free.

An engine that is killed takes with it what it has not reported. That is little: an engine reports
early when it has written a hundredth of the limit, and a new engine counts as having written that
much already.

PREFIX/kvtier/1/engines/<engine>    the report of an engine, which also says that it lives
PREFIX/kvtier/1/made-of/<namespace> removed by the leader when the namespace has no block
PREFIX/kvtier/1/leader              written by the leader each time; the next one takes it when it
                                    is old

All times are by the service's clock.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.base import OffloadKey
from kvtier.tiering.obj.objects import BLOCKS, DESCRIPTIONS, PRIVATE, Objects
from kvtier.tiering.remote.errors import ServerErrors, ServerFailure

__all__ = ["ENGINES", "Janitor", "JanitorTimes"]

ENGINES = f"{BLOCKS}/engines"
_LEADER = f"{BLOCKS}/leader"
_BLOCK = re.compile(rf"{BLOCKS}/(?:private/[0-9a-f]+/)?[0-9a-f]{{32}}/((?:[0-9a-f]{{2}})+)")

_FILL = 0.9
"""What stays of the limit when blocks are removed."""
_UNREPORTED = 0.01
"""Share of the limit that an engine writes at most before it reports early."""
_AT_ONCE = 500
"""Objects removed with one request."""
_MAX_USES = 65_536
"""Blocks in one report; the least recently used ones are left out."""

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"KVTUSES1"
_LARGEST_REPORT = _HEAD.size + 16 * _MAX_USES

_Shorts: TypeAlias = NDArray[np.uint64]
_Times: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JanitorTimes:
    """How often things are done. Tests use shorter ones."""

    sweep_s: float = 30.0
    """Between two reports of an engine."""
    early_s: float = 1.0
    """The same, for an engine that writes much."""
    leader_lost_s: float = 120.0
    """A leader that was silent for so long is replaced."""
    engine_lost_s: float = 3600.0
    """An engine whose report is older than this has ended: its private blocks are removed."""
    recount_s: float = 6 * 3600.0
    """The bucket is listed at least so often, since others remove blocks, too."""
    same_age_ms: int = 10_000
    """Blocks that were last used within the same time of this length count as equally old."""


class _Uses(NamedTuple):
    """When blocks were last used, in ms since 1970, by the first 8 bytes of their keys."""

    shorts: _Shorts
    """Sorted."""
    times: _Times

    @classmethod
    def merged(cls, shorts: _Shorts, times: _Times) -> _Uses:
        """The latest use of each block."""
        order = np.lexsort((times, shorts))
        shorts, times = shorts[order], times[order]
        is_last = np.append(shorts[1:] != shorts[:-1], np.ones(min(len(shorts), 1), np.bool_))
        return cls(shorts[is_last], times[is_last])

    def of(self, shorts: _Shorts) -> _Times:
        """When these blocks were used; 0 for unknown ones."""
        if not len(self.shorts):
            return np.zeros(len(shorts), np.int64)
        places = np.minimum(np.searchsorted(self.shorts, shorts), len(self.shorts) - 1)
        return np.where(self.shorts[places] == shorts, self.times[places], 0)


_NO_USES = _Uses(np.empty(0, np.uint64), np.empty(0, np.int64))


def _encode(num_written: int, uses: Mapping[int, int], offset_ms: int) -> bytes:
    """A report. `uses`: when blocks were used; `offset_ms` makes it ms since 1970."""
    shorts = np.fromiter(uses.keys(), np.uint64, len(uses))
    times = np.fromiter(uses.values(), np.int64, len(uses)) + offset_ms
    return _HEAD.pack(_MAGIC, num_written, len(uses)) + shorts.tobytes() + times.tobytes()


def _written_in(report: bytes) -> int | None:
    """Bytes of blocks that an engine has written since it started, by the head of its report. None
    if it is damaged."""
    if len(report) < _HEAD.size:
        return None
    magic, num_written, _ = _HEAD.unpack_from(report)
    return int(num_written) if magic == _MAGIC else None


def _uses_in(report: bytes) -> _Uses:
    """The uses that a report names; none if it is damaged. Not sorted."""
    if _written_in(report) is None:
        return _NO_USES
    count = _HEAD.unpack_from(report)[2]
    if len(report) != _HEAD.size + 16 * count:
        return _NO_USES
    return _Uses(
        np.frombuffer(report, np.uint64, count, _HEAD.size),
        np.frombuffer(report, np.int64, count, _HEAD.size + 8 * count),
    )


class _Stored(NamedTuple):
    """A block in the bucket."""

    name: str
    num_bytes: int
    bucket: int
    """When it was last used or written."""


class _Interrupted(Exception):
    """The tier ends, or another engine leads."""


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Janitor:
    """The thread of one engine that reports, and removes blocks while it leads."""

    def __init__(
        self,
        objects: Objects,
        max_bytes: int,
        engine: str,
        errors: ServerErrors,
        times: JanitorTimes,
    ) -> None:
        self._objects = objects
        self._max_bytes = max_bytes
        self._unreported = int(_UNREPORTED * max_bytes)
        self._engine = engine
        self._errors = errors
        self._times = times
        self._lock = threading.Lock()
        """Protects what is reported."""
        self._uses: dict[int, int] = {}
        """By this machine's monotonic clock, which nobody adjusts."""
        self._num_written = 0
        self._num_reported = 0
        self.num_removed = 0
        """Blocks that this engine has removed to make room."""
        self.num_bytes: int | None = None
        """Bytes in the bucket, as far as the leader knows. None: this engine does not lead."""
        self._counted: int | None = None
        """Bytes at the last listing."""
        self._written_then: dict[str, int] = {}
        """What each engine had written at the last listing."""
        self._recount_at = 0.0
        self._renew_at = 0.0
        self._offset_ms: int | None = None
        """What the service's clock shows more than this machine's monotonic clock. None: unknown
        before the first report."""
        self._stopped = threading.Event()
        self._woken = threading.Event()
        """Set to report early, and to end."""
        self._thread = threading.Thread(target=self._run, name="kvtier-obj-janitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Report for the last time, and end the thread. Waits for the request that it has made.
        Does nothing before `start`."""
        self._stopped.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- any thread ----------------------------------------------------------------------------

    def note_used(self, keys: Collection[OffloadKey]) -> None:
        """A request has used these blocks, in prompt order."""
        when_ms = _now_ms()
        with self._lock:
            uses = self._uses
            for position, key in enumerate(keys):
                short = _short(key)
                uses.pop(short, None)
                # Later blocks of a prompt count as older, so that its head is removed last.
                uses[short] = when_ms - position
            for short in list(islice(uses, max(len(uses) - _MAX_USES, 0))):
                del uses[short]

    def note_written(self, num_bytes: int) -> None:
        """A block was written."""
        with self._lock:
            self._num_written += num_bytes
            is_much = self._num_written - self._num_reported >= self._unreported
        if is_much:
            self._woken.set()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        works = True
        while not self._stopped.is_set():
            works = self._try(self.sweep)
            self._rest()
        if not works:
            return  # each further request might hold up the end for seconds
        self._try(self._report)
        if self.num_bytes is not None:  # another engine can lead at once
            self._try(lambda: self._objects.remove([_LEADER]))

    def _rest(self) -> None:
        """Wait for the next sweep."""
        if not self._stopped.wait(self._times.early_s):
            self._woken.wait(max(self._times.sweep_s - self._times.early_s, 0.0))
        self._woken.clear()

    def _try(self, act: Callable[[], object]) -> bool:
        """Returns False if the service has failed."""
        try:
            act()
        except ServerFailure as failure:
            self._errors.note(failure)
        except Exception as error:
            self._errors.note_unexpected(error)
        else:
            return True
        return False

    def sweep(self) -> None:
        """Report; and if this engine leads, keep the limit."""
        try:
            self.num_bytes = self._keep_limit()
        except _Interrupted:
            self.num_bytes = None
        if self.num_bytes is None:
            self._counted = None

    def _keep_limit(self) -> int | None:
        """Returns the bytes in the bucket; None if this engine does not lead."""
        now_s = self._report()
        if now_s is None or not self._leads(now_s):
            return None
        written = self._read_written(now_s)
        growth = sum(
            max(num_bytes - self._written_then.get(engine, -self._unreported), 0)
            for engine, num_bytes in written.items()
        )
        if (
            self._counted is None
            or self._counted + growth > self._max_bytes
            or time.monotonic() >= self._recount_at
        ):
            self._counted = self._make_room()
            self._remove_descriptions(now_s)
            self._written_then = written
            self._recount_at = time.monotonic() + self._times.recount_s
            growth = 0
        return self._counted + growth

    def _report(self) -> float | None:
        """Write the report. Returns the time, by the service's clock."""
        is_first = self._offset_ms is None
        with self._lock:
            num_written = self._num_written
            uses = {} if is_first else dict(self._uses)
        name = f"{ENGINES}/{self._engine}"
        self._objects.write(name, _encode(num_written, uses, self._offset_ms or 0))
        with self._lock:
            self._num_reported = num_written
        self._renew_at = time.monotonic() + self._times.sweep_s
        now_s = self._objects.modified_at(name)
        if now_s is not None:
            self._offset_ms = int(now_s * 1000) - _now_ms()
            if is_first and self._uses:
                return self._report()
        return now_s

    def _leads(self, now_s: float) -> bool:
        own = self._engine.encode()
        content = self._objects.read(_LEADER, len(own))
        if content is not None and bytes(content) == own:
            self._objects.write(_LEADER, own)
            return True
        if content is not None:
            written_s = self._objects.modified_at(_LEADER)
            if written_s is not None and now_s - written_s < self._times.leader_lost_s:
                return False
            self._objects.remove([_LEADER])
        return self._objects.create(_LEADER, [own])

    def _read_written(self, now_s: float) -> dict[str, int]:
        """What each engine has written. Removes what engines have left that ended long ago."""
        written: dict[str, int] = {}
        for item in self._reports():
            name, engine = item["path"], item["path"].rpartition("/")[2]
            if now_s - item["last_modified"].timestamp() > self._times.engine_lost_s:
                if self._objects.remove_below(f"{PRIVATE}/{engine}", self._times.sweep_s):
                    self._objects.remove([name])
                continue
            if item["size"] >= _HEAD.size:
                head = self._objects.read_range(name, 0, _HEAD.size)
                num_bytes = _written_in(bytes(head or b""))
                if num_bytes is not None:
                    written[engine] = num_bytes
        return written

    def _reports(self) -> Iterator[dict[str, Any]]:
        for page in self._objects.below(ENGINES):
            yield from page

    def _read_uses(self) -> _Uses:
        found = [_NO_USES]
        for item in self._reports():
            if item["size"] <= _LARGEST_REPORT:
                content = self._objects.read(item["path"], item["size"])
                found.append(_uses_in(bytes(content or b"")))
        return _Uses.merged(
            np.concatenate([uses.shorts for uses in found]),
            np.concatenate([uses.times for uses in found]),
        )

    def _make_room(self) -> int:
        """List the bucket, and remove blocks if there are too many. Returns the bytes that stay.

        Lists twice, so that a bucket of millions of objects needs little memory."""
        uses = self._read_uses()
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

    def _remove_descriptions(self, now_s: float) -> None:
        """Remove the descriptions of namespaces that have no block any more. Engines write theirs
        again while they store blocks, so those that were written lately stay."""
        for page in self._objects.below(DESCRIPTIONS):
            self._stay_leader()
            doomed = []
            for item in page:
                is_old = now_s - item["last_modified"].timestamp() > self._times.engine_lost_s
                blocks = f"{BLOCKS}/{item['path'].rpartition('/')[2]}"
                if is_old and next(self._objects.below(blocks), None) is None:
                    doomed.append(item["path"])
            if doomed:
                self._objects.remove(doomed)

    def _blocks(self, uses: _Uses) -> Iterator[_Stored]:
        for page in self._objects.below(BLOCKS):
            self._stay_leader()
            items = [
                (item, bytes.fromhex(found[1][:16]).ljust(8, b"\0"))
                for item in page
                if (found := _BLOCK.fullmatch(item["path"]))
            ]
            shorts = np.frombuffer(b"".join(short for _, short in items), "<u8")
            for (item, _), used_ms in zip(items, uses.of(shorts).tolist(), strict=True):
                when_ms = max(used_ms, int(item["last_modified"].timestamp() * 1000))
                yield _Stored(item["path"], item["size"], when_ms // self._times.same_age_ms)

    def _stay_leader(self) -> None:
        """Called for each page of a listing, which may take minutes."""
        if self._stopped.is_set():
            raise _Interrupted
        if time.monotonic() >= self._renew_at:
            now_s = self._report()
            if now_s is None or not self._leads(now_s):
                raise _Interrupted

    def _remove_until(self, last: int, to_free: int, uses: _Uses) -> int:
        """Remove blocks whose bucket is `last` or before. Returns the bytes removed."""
        freed = 0
        doomed: list[str] = []
        for block in self._blocks(uses):
            if block.bucket <= last:
                doomed.append(block.name)
                freed += block.num_bytes
            if len(doomed) >= _AT_ONCE or freed >= to_free:
                self._remove(doomed)
                doomed = []
            if freed >= to_free:
                break
        self._remove(doomed)
        return freed

    def _remove(self, names: list[str]) -> None:
        if names:
            self._objects.remove(names)
            self.num_removed += len(names)
