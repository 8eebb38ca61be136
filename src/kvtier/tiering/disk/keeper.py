"""The thread that keeps the slab's index in the file up to date, and looks after the file."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from kvtier.base import OffloadKey
from kvtier.tiering.disk.layout import (
    CONTROL_OFFSET,
    PAGE_BYTES,
    SlabFormatError,
    decode_clear_request,
)
from kvtier.tiering.disk.recovery import write_index
from kvtier.tiering.disk.slab import Slab

__all__ = ["IndexKeeper"]

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.05
"""How far the index in the file is behind, about: what a killed engine has stored since is lost."""
_NOTE_USES_EVERY_S = 2.0
_LOOK_EVERY_S = 1.0
_MAX_USES = 4096
"""Batches of uses that wait to be noted. More: the oldest are forgotten, and with them only how
recently some blocks were used."""


class IndexKeeper:
    """Owns the superblock and the index in the file while the tier runs."""

    def __init__(
        self,
        slab: Slab,
        slots_of: Callable[[Collection[OffloadKey]], list[tuple[int, int]]],
        now: Callable[[], int],
        on_clear: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        """All of these are called on the keeper's thread. `slots_of`: position and slot of
        the blocks that are kept; `now`: the next sequence number; `on_clear`: the user wants
        everything to be forgotten."""
        self._slab = slab
        self._slots_of = slots_of
        self._now = now
        self._on_clear = on_clear
        self._on_error = on_error
        self._uses: deque[tuple[int, Collection[OffloadKey]]] = deque(maxlen=_MAX_USES)
        self._former: list[object] = []
        self._wanted_cut = slab.superblock.cut
        self._wake = threading.Event()
        self._stopping = False
        self.allocated_bytes = slab.file.allocated_bytes
        """What `du` says of the file, a second ago at most."""
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-index", daemon=True)
        self._thread.start()

    # --- the scheduler's side: none of these waits ---------------------------------------------

    def note_use(self, first_seq: int, keys: Collection[OffloadKey]) -> None:
        """A request uses these blocks, in prompt order. As many numbers from `first_seq` on are
        theirs."""
        self._uses.append((first_seq, keys))

    def cut_at(self, seq: int) -> None:
        """What was stored before this sequence number must never be found again."""
        self._wanted_cut = seq
        self._wake.set()

    def discard(self, former: object) -> None:
        """Let go of something large, which takes a while."""
        self._former.append(former)

    def stop(self) -> None:
        """Write what there is to write, and end. Waits."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    # --- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        looked = noted = time.monotonic()
        while True:
            self._wake.wait(_WRITE_EVERY_S)
            self._wake.clear()
            self._former.clear()
            is_last = self._stopping
            now = time.monotonic()
            if self._wanted_cut > self._slab.superblock.cut:
                self._try(lambda: self._cut(self._wanted_cut))
            if is_last or now - noted >= _NOTE_USES_EVERY_S:
                noted = now
                self._try(self._note_uses)
            self._try(self._write)
            if is_last or now - looked >= _LOOK_EVERY_S:
                looked = now
                self._try(self._look_after_the_file)
            if is_last:
                self._try(self._slab.file.sync)
                return

    def _try(self, step: Callable[[], None]) -> None:
        """What fails is tried again at its next time, and keeps nothing else from being done."""
        try:
            step()
        except OSError as error:
            self._on_error(error)
        except Exception:
            logger.exception("%s: the index is not kept", self._slab.file.path)

    def _look_after_the_file(self) -> None:
        file = self._slab.file
        self.allocated_bytes = file.allocated_bytes
        self._slab.keep_clock(self._now())
        try:
            request_id = decode_clear_request(file.read(CONTROL_OFFSET, PAGE_BYTES))
        except SlabFormatError:
            return
        if request_id != self._slab.superblock.last_clear:
            # Told first: what is stored from now on may be lost, but nothing from before is left.
            self._on_clear()
            self._cut(self._now(), last_clear=request_id)
            logger.info("%s: cleared by request", file.path)

    def _cut(self, seq: int, **changes: bytes) -> None:
        self._slab.save_superblock(cut=max(seq, self._wanted_cut), **changes)
        self._slab.file.sync()

    def _note_uses(self) -> None:
        while self._uses:
            first_seq, keys = self._uses.popleft()
            found = self._slots_of(keys)
            if found:
                positions, slots = np.array(found).T
                # Of one prompt, the head is the last to leave.
                self._slab.index.mark_used(slots, first_seq + len(keys) - 1 - positions)

    def _write(self) -> None:
        index = self._slab.index
        pages = index.take_changed()
        if pages:
            try:
                write_index(self._slab.file, index, pages)
            except OSError:
                index.give_back(pages)
                raise
