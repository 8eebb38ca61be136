"""The thread that keeps the slab's index in the file up to date, and looks after the file."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import CachePolicy
from kvtier.tiering.disk.recovery import write_index
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.superblocks import read_clear_request
from kvtier.tiering.disk.transfer import SlabBlock

__all__ = ["IndexKeeper"]

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.05
"""How far the index in the file is behind, about: what a killed engine has stored since is lost."""
_NOTE_USES_EVERY_S = 2.0
_LOOK_EVERY_S = 1.0
_DESTROYED_AT_ONCE = 256
_MAX_USES = 1024
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
        self._former: deque[tuple[CachePolicy, dict[OffloadKey, SlabBlock]]] = deque()
        self._wanted_cut = slab.superblock.cut
        self._note: bytes | None = None
        """A note that is to be written."""
        self._is_writing = False
        """Whether pages were taken out of the index that are not in the file yet."""
        self._wake = threading.Event()
        self._stopping = False
        self._resting_until = 0.0
        self._obeyed: bytes | None = None
        """The last request to clear that was obeyed, though maybe not written down."""
        self.allocated_bytes = slab.file.allocated_bytes
        """What `du` says of the path, a second ago at most: 0 if the file is not there any more."""
        self._is_there = True
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

    @property
    def is_behind(self) -> bool:
        """Whether the file lacks something that another engine must know: which blocks it has, or
        that earlier ones are not valid any more."""
        # In this order: pages are on their way before they are taken out of the index.
        is_index_behind = self._slab.index.has_changed or self._is_writing
        return is_index_behind or self._wanted_cut > self._slab.superblock.cut

    def keep_note(self, note: bytes) -> None:
        """Write this down for the next engine, within a second."""
        self._note = note

    def destroy(self, policy: CachePolicy, blocks: dict[OffloadKey, SlabBlock]) -> None:
        """Let go of blocks that nobody needs any more, and of their order."""
        self._former.append((policy, blocks))

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
            is_last = self._stopping
            now = time.monotonic()
            if now < self._resting_until and not is_last:
                continue
            if self._wanted_cut > self._slab.superblock.cut:
                self._try(lambda: self._cut(self._wanted_cut))
            is_due = now - noted >= _NOTE_USES_EVERY_S or len(self._uses) > _MAX_USES // 2
            if is_last or is_due:
                noted = now
                self._try(self._note_uses)
            self._try(self._write)
            if is_last or now - looked >= _LOOK_EVERY_S:
                looked = now
                self._try(self._look_after_the_file)
            if is_last:
                self._try(self._slab.file.sync)
                return
            self._try(self._destroy_some)

    def _try(self, step: Callable[[], None]) -> None:
        """What fails is tried again at its next time, and keeps nothing else from being done."""
        try:
            step()
        except OSError as error:
            self._resting_until = time.monotonic() + _LOOK_EVERY_S
            self._on_error(error)
        except Exception:
            logger.exception("%s: the index is not kept", self._slab.file.path)

    def _destroy_some(self) -> None:
        """In small steps: freeing a million objects at once would stop every thread for long."""
        deadline = time.monotonic() + _WRITE_EVERY_S
        while self._former and time.monotonic() < deadline:
            policy, blocks = self._former[0]
            for _ in range(min(_DESTROYED_AT_ONCE, len(blocks))):
                policy.remove(blocks.popitem()[0])
            if not blocks:
                self._former.popleft()
            time.sleep(0)

    def _look_after_the_file(self) -> None:
        file = self._slab.file
        was_there, self._is_there = self._is_there, file.is_at_its_path()
        self.allocated_bytes = file.allocated_bytes if self._is_there else 0
        if was_there and not self._is_there:
            self._warn_that_it_is_gone()
        self._slab.keep_clock(self._now())
        note, self._note = self._note, None
        if note is not None:
            self._slab.save_note(note)
        request_id = read_clear_request(file)
        if request_id not in (None, self._slab.superblock.last_clear, self._obeyed):
            self._obeyed = request_id
            # Told first: what is stored from now on may be lost, but nothing from before is left.
            self._on_clear()
            self._cut(self._now(), last_clear=request_id)
            logger.info("%s: cleared by request", file.path)

    def _warn_that_it_is_gone(self) -> None:
        path = self._slab.file.path
        what = "was removed"
        if not path.parent.exists():
            what = f"was removed, with its directory {path.parent}"
        elif path.exists():
            what = "was replaced by another file"
        logger.warning(
            "%s %s while this engine has it open: the engine goes on storing and loading blocks in "
            "the file it has, but they are lost when it ends, and its %d bytes are free only then. "
            "Restart the engine to have its blocks kept",
            path,
            what,
            self._slab.file.allocated_bytes,
        )

    def _cut(self, seq: int, **changes: bytes) -> None:
        self._slab.save_superblock(cut=max(seq, self._wanted_cut), **changes)
        self._slab.file.sync()

    def _note_uses(self) -> None:
        slots: list[int] = []
        seqs: list[int] = []
        while self._uses:
            first_seq, keys = self._uses.popleft()
            last_seq = first_seq + len(keys) - 1
            for position, slot in self._slots_of(keys):
                slots.append(slot)
                seqs.append(last_seq - position)  # of one prompt, the head is the last to leave
        # Where a slot is named twice, the later and so larger number stays.
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
