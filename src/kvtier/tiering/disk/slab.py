"""A slab file as a whole: opened, locked, resized, and closed."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtier.config.redaction import printable
from kvtier.tiering.disk.file import NotAFile, SlabFile, lock_within
from kvtier.tiering.disk.index import IndexTable
from kvtier.tiering.disk.layout import (
    HOLDER_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
    Holder,
    SlabFormatError,
    SlabVersionError,
    Superblock,
    is_slab_page,
)
from kvtier.tiering.disk.making import format_slab, make_if_missing
from kvtier.tiering.disk.recovery import read_index, resize
from kvtier.tiering.disk.refusal import SlabRefused, foreign_refusal, refusal_for
from kvtier.tiering.disk.room import allocate, allocate_within
from kvtier.tiering.disk.superblocks import (
    has_index,
    mend_copies,
    read_clear_request,
    read_holder,
    read_note,
    read_superblock,
    slots_in_file,
    within_file,
    write_superblock,
)
from kvtier.tiering.io.page import PAGE_BYTES

__all__ = ["Slab", "open_slab"]

logger = logging.getLogger(__name__)

_LOCK_PATIENCE_S = 1.0
_ORPHAN_PAUSE_S = 0.1
_CLOCK_STEP = 2**32
"""By how much the clock jumps when a slab is opened: more than can pass before it is saved."""


class Slab:
    """An open slab, locked for one engine. Made by `open_slab`.

    `superblock` changes through `save_superblock` alone, which the index keeper calls, and whoever
    opens and closes the slab.
    """

    def __init__(
        self,
        file: SlabFile,
        superblock: Superblock,
        index: IndexTable,
        holder: Holder,
        note: bytes,
    ) -> None:
        self.file = file
        self.superblock = superblock
        self.index = index
        self.note = note
        """What an earlier engine has left for this one."""
        self._holder = holder

    @property
    def geometry(self) -> Geometry:
        return self.superblock.geometry

    @property
    def first_seq(self) -> int:
        """No block was ever stored or used with this number, or a larger one, when the slab was
        opened. Numbers grow from here; `keep_clock` must be told."""
        return self.superblock.clock

    def keep_clock(self, seq: int) -> None:
        """Let the next engine begin beyond `seq`, even if this one is killed."""
        if seq > self.superblock.clock + _CLOCK_STEP // 2:
            self.save_superblock(clock=seq)

    def save_superblock(self, **changes: Any) -> None:
        """Change the superblock, also in the file."""
        changed = replace(self.superblock, **changes, revision=self.superblock.revision + 1)
        write_superblock(self.file, changed)
        self.superblock = changed

    def save_note(self, note: bytes) -> None:
        """Leave a note for the next engine."""
        self.file.write(HOLDER_OFFSET, self._holder.encode(note))

    def close(self) -> None:
        """Let others have it. What is not in the file yet is lost."""
        self.index.close()
        self.file.close()


def open_slab(
    path: Path,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    tag: int | None = None,
    may_be_foreign: bool = False,
) -> Slab:
    """Open the slab at `path` for blocks of so many bytes, or make it. Waits for the disk.

    `max_bytes`: what it may take in all; None: as much as it has. `use_o_direct`: None: if it can
    be had. `tag`: the namespace whose blocks are kept first. `may_be_foreign`: also if other users
    may write to it, because no block is going to be read. Whatever can be kept of an existing slab
    is kept. Raises `SlabRefused`, and then nothing has changed but what could not be used
    anyway.
    """
    path = path.resolve()  # a link to a file that is not there yet says where it is to be
    try:
        make_if_missing(path, max_bytes, payload_bytes)
        file = SlabFile(path, os.O_RDWR)
    except NotAFile:
        raise SlabRefused(
            f"{path} is not a regular file: give the path of a file, which is made if need be"
        ) from None
    except OSError as error:
        raise refusal_for(path, error) from error
    try:
        return _open(file, payload_bytes, max_bytes, engine_id, use_o_direct, tag, may_be_foreign)
    except OSError as error:
        file.close()
        raise refusal_for(path, error) from error
    except BaseException:
        file.close()
        raise


def _open(
    file: SlabFile,
    payload_bytes: int,
    max_bytes: int | None,
    engine_id: str,
    use_o_direct: bool | None,
    tag: int | None,
    may_be_foreign: bool,
) -> Slab:
    if not may_be_foreign and (refusal := foreign_refusal(file)) is not None:
        raise refusal
    _lock(file)
    if not file.is_at_its_path():
        raise SlabRefused(f"{file.path} was replaced while it was opened: start the engine again")
    stored = _superblock_or_new(file, payload_bytes, max_bytes)
    holder = _this_process(engine_id)
    note = read_note(file)
    file.write(HOLDER_OFFSET, holder.encode(note))
    superblock = within_file(file, stored)
    if superblock is not stored and max_bytes is None:
        superblock = replace(superblock, max_bytes=0)  # it is smaller now than was asked for
    wanted = _make_room(file, stored, superblock, payload_bytes, max_bytes)
    os.fchmod(file.fd, 0o600)
    if superblock.geometry.payload_bytes != payload_bytes:
        logger.warning(
            "%s holds blocks of %d bytes, and this engine's have %d: it is emptied",
            file.path,
            superblock.geometry.payload_bytes,
            payload_bytes,
        )
        superblock = format_slab(file, wanted, superblock)
    elif (
        wanted != stored.geometry and superblock is stored and not has_index(file, stored.geometry)
    ):
        logger.warning(
            "%s has a hole where its index should be, for %d slots: it is emptied",
            file.path,
            superblock.geometry.num_slots,
        )
        superblock = format_slab(file, wanted, superblock)
    if use_o_direct is not False:
        _use_o_direct(file, is_required=use_o_direct is True)
    index = read_index(file, superblock)
    if wanted != superblock.geometry:
        index = resize(file, superblock, index, wanted, tag)
    clock = max(superblock.clock, superblock.cut) + _CLOCK_STEP
    superblock = replace(
        superblock,
        geometry=wanted,
        clock=clock,
        revision=superblock.revision + 1,
        max_bytes=superblock.max_bytes if max_bytes is None else max_bytes,
    )
    clear_request = read_clear_request(file)
    if clear_request not in (None, superblock.last_clear):
        superblock = replace(superblock, cut=clock, last_clear=clear_request)
    write_superblock(file, superblock)
    if file.size != wanted.file_bytes:
        file.truncate(wanted.file_bytes)
    return Slab(file, superblock, index, holder, note)


def _make_room(
    file: SlabFile,
    stored: Superblock,
    readable: Superblock,
    payload_bytes: int,
    max_bytes: int | None,
) -> Geometry:
    """What the slab is to be like from now on; there is room for it. `stored`: what its superblock
    says; `readable`: what is left of that in the file."""
    has_our_blocks = stored.geometry.payload_bytes == payload_bytes
    if max_bytes is None and has_our_blocks:
        wanted = readable.geometry
    elif max_bytes == stored.max_bytes and has_our_blocks:
        wanted = stored.geometry
        if wanted.file_bytes > max_bytes:
            raise SlabRefused(f"{file.path}: its superblock makes no sense: remove the file")
    else:
        size = max_bytes or readable.geometry.needed_bytes
        return allocate_within(file, size, payload_bytes, file.path)
    # All of it, once more: someone may have cut the end off, or made a hole into the file.
    allocate(file, wanted, file.path)
    return wanted


def _use_o_direct(file: SlabFile, is_required: bool) -> None:
    if file.use_o_direct():
        return
    if is_required:
        raise SlabRefused(
            f"use_o_direct is true, and the file system of {file.path} does not allow O_DIRECT: "
            'leave it at "auto", or put the file on a disk of its own'
        )
    logger.warning(
        "%s: its file system does not allow O_DIRECT; blocks pass through the page cache, which "
        "costs memory and processor time",
        file.path,
    )


def _lock(file: SlabFile) -> None:
    """Wait a moment if someone else has it: an engine that is just ending, or `kvtier store`."""
    if not lock_within(file.fd, _LOCK_PATIENCE_S):
        raise SlabRefused(_in_use(file.path, read_holder(file)))


def _superblock_or_new(file: SlabFile, payload_bytes: int, max_bytes: int | None) -> Superblock:
    """The superblock, or one for a slab whose own cannot be read any more."""
    superblock = None
    try:
        superblock = read_superblock(file)
        mend_copies(file, superblock)
        if not slots_in_file(file, superblock):
            raise SlabFormatError("the file has been cut off")
        return superblock
    except SlabVersionError as error:
        raise SlabRefused(
            f"{file.path}: {error}: use that kvtier, give another path, or remove the file"
        ) from None
    except SlabFormatError as error:
        pages = [file.read(offset, PAGE_BYTES) for offset in SUPERBLOCK_OFFSETS]
        if not any(is_slab_page(page) for page in pages):
            raise SlabRefused(
                f"{file.path} is not a slab: give the path of one, or of a file that does not "
                "exist yet"
            ) from None
        logger.warning("%s: %s; it is made anew", file.path, error)
        size = file.size if max_bytes is None else max_bytes
        geometry = allocate_within(file, size, payload_bytes, file.path)
        return format_slab(file, geometry, superblock)


def _in_use(path: Path, holder: Holder | None) -> str:
    who, remedy = "another process", "give each engine and each tier a path of its own"
    if holder is not None:
        place = f"process {holder.pid} on {holder.host}"
        if holder.pid == os.getpid() and _is_found_by_pid(holder):
            place = "this very process"
        elif _has_lost_its_parent(holder):
            place += f", whose parent, process {holder.parent_pid}, has ended"
            remedy = (
                f"if that was its server, which was killed, it serves nobody: end it with "
                f"`kill {holder.pid}`, and start again. Otherwise {remedy}"
            )
        since = datetime.fromtimestamp(holder.since_ns / 1e9, UTC)
        who = f'the engine "{holder.engine_id}" ({place}, since {since:%Y-%m-%d %H:%M:%S} UTC)'
    return f"{path} is in use by {printable(who)}: {remedy}"


def refuse_orphans(path: Path, patience_s: float) -> None:
    """Raise `SlabRefused` if an engine that has lost the process that started it has the slab, and
    keeps it for so long. Changes nothing. A file that cannot be opened, locked or read is not
    refused here: opening the slab says better what is wrong with it.

    For an engine that is about to load its model: it would be refused anyway, minutes later.
    """
    try:
        file = SlabFile(Path(os.path.realpath(path)), os.O_RDONLY)
    except (NotAFile, OSError):
        return
    try:
        deadline = time.monotonic() + patience_s
        while file.is_locked():
            holder = read_holder(file)
            if holder is None or holder.pid == os.getpid() or not _has_lost_its_parent(holder):
                return
            if time.monotonic() > deadline:
                raise SlabRefused(_in_use(file.path, holder))
            time.sleep(_ORPHAN_PAUSE_S)
    except OSError:
        return
    finally:
        file.close()


def _this_process(engine_id: str) -> Holder:
    return Holder(
        engine_id,
        os.getpid(),
        socket.gethostname(),
        time.time_ns(),
        os.getppid(),
        _pid_namespace(),
        _parent_and_start("self")[1],
    )


def _has_lost_its_parent(holder: Holder) -> bool:
    """Whether the process is there, and has another parent than when it opened the slab."""
    if holder.parent_pid == 0 or not _is_found_by_pid(holder):
        return False
    return _parent_and_start(holder.pid)[0] not in (0, holder.parent_pid)


def _is_found_by_pid(holder: Holder) -> bool:
    """Whether the holder's pid names the holder to this process, and not another process: one in
    another container, or one that was given the same number later."""
    return (
        holder.host == socket.gethostname()
        and holder.pid_namespace != 0
        and holder.started_ticks != 0
        and holder.pid_namespace == _pid_namespace()
        and holder.started_ticks == _parent_and_start(holder.pid)[1]
    )


def _pid_namespace() -> int:
    """The inode of this process's pid namespace; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _parent_and_start(pid: int | str) -> tuple[int, int]:
    """The parent of a process, and its start in clock ticks since boot; zeros: not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # with a name that may not be UTF-8
    except OSError:
        return 0, 0
    fields = stat.rpartition(b")")[2].split()  # from the third on
    return int(fields[1]), int(fields[19])
