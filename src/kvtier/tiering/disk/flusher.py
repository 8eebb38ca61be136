"""The thread that writes a slab's index and superblock to the file. Once a second it also checks
whether the file was removed, and whether a user has asked for it to be cleared."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from kvtier.base import OffloadKey
from kvtier.config import NamespaceDescription
from kvtier.cpu.policies.base import CachePolicy
from kvtier.tiering.disk.file import read_clear_request
from kvtier.tiering.disk.index import write_index
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.slots import SlabBlock
from kvtier.tiering.io.metrics import UnexpectedErrors

__all__ = ["IndexFlusher"]

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.05
"""Seconds between two writes of the index. A killed engine loses the blocks stored since the last
write."""
_NOTE_USES_EVERY_S = 2.0
_LOOK_EVERY_S = 1.0
_NOTE_AGAIN_S = 30.0
"""Seconds from a note that could not be written to the next attempt. After each failed write the
index waits, too."""
_DESTROYED_AT_ONCE = 256
_MAX_USES = 1024
"""Limit on batches of uses that wait to be written. Beyond it the oldest are dropped, so the next
engine may evict blocks that were used recently."""


class IndexFlusher:
    """While the tier runs, only this class writes the superblock and the index to the file."""

    def __init__(
        self,
        slab: Slab,
        slots_of: Callable[[Collection[OffloadKey]], list[tuple[int, int]]],
        next_seq: Callable[[], int],
        on_clear: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """Start the thread, which makes all callbacks. `slots_of` returns (position in the given
        keys, slot) for each readable block, and `next_seq` the next sequence number. `on_clear` is
        called when a user has asked for the slab to be cleared, `on_error` when a read or write of
        the file has failed."""
        self._slab = slab
        self._slots_of = slots_of
        self._next_seq = next_seq
        self._on_clear = on_clear
        self._on_error = on_error
        self._unexpected = UnexpectedErrors(
            slab.file.path,
            "the file could not be updated; after a restart, recent blocks may be missing",
        )
        self._uses: deque[tuple[int, Collection[OffloadKey]]] = deque(maxlen=_MAX_USES)
        self._to_destroy: deque[tuple[CachePolicy, dict[OffloadKey, SlabBlock]]] = deque()
        self._wanted_cut = slab.superblock.cut
        self._description: NamespaceDescription | None = None
        """Of the namespace that blocks belong to after the cut. None: it is in the file."""
        self._note: bytes | None = None
        """The newest note passed to `keep_note`. Only the scheduler's thread sets it, so a newer
        note is never replaced by an older one."""
        self._written_note: bytes | None = None
        self._note_again_at = 0.0
        """No note is written before this time, since the last attempt has failed."""
        self._is_writing = False
        """True while pages taken from the index are not in the file yet."""
        self._wake = threading.Event()
        self._stopping = False
        self._resting_until = 0.0
        self._obeyed = slab.superblock.last_clear
        """Id of the last clear request that this thread has acted on. The superblock gets this id
        when the cut (see `cut_at`) is written."""
        self._clear_cut = 0
        """The cut for the request `_obeyed`. Chosen when the tier is told to empty itself, so a cut
        that is written late does not invalidate blocks stored in the meantime."""
        self.allocated_bytes = slab.file.allocated_bytes
        """Disk usage of the file in bytes, updated about once a second. 0 once the file was removed
        or replaced."""
        self._is_there = True
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-index", daemon=True)
        self._thread.start()

    # --- scheduler thread: nothing here waits, except `stop` -----------------------------------

    def note_use(self, first_seq: int, keys: Collection[OffloadKey]) -> None:
        """Record a use of these blocks, given in prompt order. It has one sequence number for each
        block, from `first_seq` on."""
        self._uses.append((first_seq, keys))

    def cut_at(self, seq: int, description: NamespaceDescription) -> None:
        """Make blocks with a sequence number below `seq` invalid in the file, for every later
        engine. `description`: of the namespace of later blocks."""
        self._description = description
        self._wanted_cut = seq
        self._wake.set()

    @property
    def is_behind(self) -> bool:
        """True while changes of the index, or a cut, are not in the file yet. The next engine needs
        both."""
        # `has_changed` is read first. `_write` sets `_is_writing` before it takes the changed
        # pages, so one of the two is true until the pages are in the file.
        is_index_behind = self._slab.index.has_changed or self._is_writing
        return is_index_behind or self._is_cut_due

    @property
    def _is_cut_due(self) -> bool:
        superblock = self._slab.superblock
        return self._wanted_cut > superblock.cut or self._obeyed != superblock.last_clear

    def keep_note(self, note: bytes) -> None:
        """Write a note for the next engine, within about a second. Tried again if the write
        fails."""
        self._note = note

    def destroy(self, policy: CachePolicy, blocks: dict[OffloadKey, SlabBlock]) -> None:
        """Free the objects of a former slot table, on the flusher's thread."""
        self._to_destroy.append((policy, blocks))

    def stop(self) -> None:
        """Write everything that is pending, and end the thread. Waits for the disk."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    # --- flusher thread ------------------------------------------------------------------------

    def _run(self) -> None:
        looked = noted = time.monotonic()
        while True:
            self._wake.wait(_WRITE_EVERY_S)
            self._wake.clear()
            is_last = self._stopping
            now = time.monotonic()
            if now < self._resting_until and not is_last:
                continue
            if self._is_cut_due:
                self._try(self._cut)
            is_due = now - noted >= _NOTE_USES_EVERY_S or len(self._uses) > _MAX_USES // 2
            if is_last or is_due:
                noted = now
                self._try(self._note_uses)
            self._try(self._write)
            if is_last or now - looked >= _LOOK_EVERY_S:
                looked = now
                for step in (self._check_file, self._save_note, self._obey_request):
                    self._try(step)
            if is_last:
                self._try(self._slab.file.sync)
                return
            self._try(self._destroy_some)

    def _try(self, step: Callable[[], None]) -> None:
        """Run one step. If it raises, report that and go on with the next step. Afterwards the
        thread does nothing for `_LOOK_EVERY_S`, unless it has to stop."""
        try:
            step()
        except Exception as error:
            self._resting_until = time.monotonic() + _LOOK_EVERY_S
            if isinstance(error, OSError):
                self._on_error(error)
            else:
                self._unexpected.log(error)

    def _cut(self) -> None:
        is_clear = self._obeyed != self._slab.superblock.last_clear
        cut = max(self._wanted_cut, self._clear_cut)
        changes: dict[str, Any] = {"cut": cut, "last_clear": self._obeyed}
        if (description := self._description) is not None:
            changes["descriptions"] = self._slab.describe(description)
        self._slab.save_superblock(**changes)
        self._slab.file.sync()
        if is_clear:
            logger.info("%s: cleared by request", self._slab.file.path)

    def _note_uses(self) -> None:
        slots: list[int] = []
        seqs: list[int] = []
        while self._uses:
            first_seq, keys = self._uses.popleft()
            last_seq = first_seq + len(keys) - 1
            for position, slot in self._slots_of(keys):
                slots.append(slot)
                seqs.append(last_seq - position)  # the head of a prompt is evicted last
        # If a slot occurs twice, numpy keeps the later number, which is the larger one.
        self._slab.index.mark_used(np.array(slots, np.int64), np.array(seqs, np.int64))

    def _write(self) -> None:
        index = self._slab.index
        self._is_writing = True
        try:
            pages = index.take_changed()
            if pages:
                try:
                    write_index(self._slab.file, index, pages)
                except OSError:
                    index.give_back(pages)
                    raise
        finally:
            self._is_writing = False

    def _check_file(self) -> None:
        file = self._slab.file
        was_there, self._is_there = self._is_there, file.is_at_its_path()
        self.allocated_bytes = file.allocated_bytes if self._is_there else 0
        if was_there and not self._is_there:
            self._warn_that_file_is_gone()
        self._slab.keep_clock(self._next_seq())

    def _save_note(self) -> None:
        note, now = self._note, time.monotonic()
        if note is None or note == self._written_note:
            return
        if now >= self._note_again_at or self._stopping:
            self._note_again_at = now + _NOTE_AGAIN_S  # if this fails
            self._slab.save_note(note)
            self._written_note, self._note_again_at = note, 0.0

    def _obey_request(self) -> None:
        """Clear the tier if a user has asked for it. If the cut cannot be written, `_run` tries
        again; the tier itself is emptied once."""
        request_id = read_clear_request(self._slab.file)
        if request_id is not None and request_id != self._obeyed:
            # `on_clear` comes before the cut. A block stored between the two may be lost, but no
            # block from before the request survives.
            self._on_clear()
            self._clear_cut = self._next_seq()
            self._obeyed = request_id
            self._cut()

    def _warn_that_file_is_gone(self) -> None:
        path = self._slab.file.path
        what = "was removed"
        if not path.parent.exists():
            what = f"was removed, with its directory {path.parent}"
        elif path.exists():
            what = "was replaced by another file"
        logger.warning(
            "%s %s while this engine has it open. The engine continues with the open file, but its "
            "blocks are lost when the engine ends, and its %d bytes of disk space are freed only "
            "then. Restart the engine to keep blocks again",
            path,
            what,
            self._slab.file.allocated_bytes,
        )

    def _destroy_some(self) -> None:
        """Free objects in small steps: freeing a million at once would hold the interpreter lock
        and stop every other thread."""
        deadline = time.monotonic() + _WRITE_EVERY_S
        while self._to_destroy and time.monotonic() < deadline:
            policy, blocks = self._to_destroy[0]
            for _ in range(min(_DESTROYED_AT_ONCE, len(blocks))):
                policy.remove(blocks.popitem()[0])
            if not blocks:
                self._to_destroy.popleft()
            time.sleep(0)
