"""Bugs planted in the disk tier, each of which a run has to notice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import kvtier.tiering.disk.file as file_module
import kvtier.tiering.disk.recovery as recovery_module
import kvtier.tiering.disk.slab as slab_module
from kvtier import seal
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.disk.file import SlabFile
from kvtier.tiering.disk.flusher import IndexFlusher
from kvtier.tiering.disk.index import IndexTable
from kvtier.tiering.disk.mover import SlabMover, SlabTransfer
from kvtier.tiering.disk.slab import Slab
from kvtier.tiering.disk.slots import FreeSlots, SlabBlock
from kvtier.tiering.io.queue import Transfer, WorkQueue
from tests.tiering.crash.mutants import Mutants
from tests.tiering.crash.points import plant
from tests.tiering.disk.crash.orders import Bias

MUTANTS = Mutants(Bias)


# --- what is read -------------------------------------------------------------------------------


@MUTANTS.mutant(point="slot written")
def nothing_is_verified() -> None:
    plant(SlabMover, _is_valid=lambda *_: True)


@MUTANTS.mutant(4, point="slot half", power_cut="torn index")
def the_payload_is_not_verified() -> None:
    def verify_block(tier: Any, job: Any, key: Any, header: Any, payload: Any) -> bool:
        failure = seal.check(header, payload, key, job.fingerprint)
        return failure is None or failure is seal.SealFailure.DIGEST

    plant(SecondaryTierManager, verify_block=verify_block)


@MUTANTS.mutant(10, power_cut="torn index")
def an_index_page_needs_no_checksum() -> None:
    plant(IndexTable, _empty_damaged_pages=lambda _: None)


@MUTANTS.mutant(power_cut="torn index")
def damaged_index_pages_are_not_rebuilt() -> None:
    def scan_headers(file: Any, geometry: Any, uuid: Any, slots: Sequence[int]) -> Iterable[Any]:
        return ()

    plant(recovery_module, scan_headers=scan_headers)


# --- what is written ----------------------------------------------------------------------------


@MUTANTS.mutant()
def jobs_are_reported_before_they_are_written() -> None:
    real = WorkQueue.submit

    def submit(queue: WorkQueue[SlabBlock], transfer: Transfer[SlabBlock]) -> None:
        if transfer.job.is_promotion or not transfer.pieces:
            real(queue, transfer)
            return
        early = SlabTransfer(transfer.job, list(transfer.pieces), transfer.here)
        early.done = list(transfer.pieces)
        early.num_taken = len(early.pieces)
        queue._ended.append(early)

    plant(WorkQueue, submit=submit)


@MUTANTS.mutant()
def a_changed_index_page_is_forgotten() -> None:
    real = IndexTable.take_changed
    plant(IndexTable, take_changed=lambda index: real(index)[:-1])


@MUTANTS.mutant(6, point="superblock 1 half")
def there_is_one_superblock() -> None:
    plant(file_module, SUPERBLOCK_OFFSETS=(0,))


@MUTANTS.mutant(epoch_rate=0.1, power_cut="torn index")
def the_cut_is_not_written() -> None:
    real = Slab.save_superblock

    def save_superblock(slab: Slab, **changes: Any) -> None:
        cut = changes.pop("cut", slab.superblock.cut)
        real(slab, **changes)
        slab.superblock = replace(slab.superblock, cut=cut)

    plant(Slab, save_superblock=save_superblock)


@MUTANTS.mutant(6, epoch_rate=0.1)
def an_epoch_is_not_cut() -> None:
    plant(IndexFlusher, cut_at=lambda *_: None)


@MUTANTS.mutant()
def the_clock_stands_still() -> None:
    plant(slab_module, _CLOCK_STEP=0)


@MUTANTS.mutant(9, point="index after", power_cut="lost superblock", row_rate=0.6)
def a_slab_made_anew_begins_with_its_first_revision() -> None:
    real = slab_module.format_slab
    plant(slab_module, format_slab=lambda file, geometry, former=None: real(file, geometry))


# --- what is kept -------------------------------------------------------------------------------


@MUTANTS.mutant()
def a_slot_is_free_twice() -> None:
    real = FreeSlots.give

    def give(free: FreeSlots, slots: Iterable[int]) -> None:
        slots = list(slots)
        real(free, slots)
        real(free, slots[:1])

    plant(FreeSlots, give=give)


# --- the file -----------------------------------------------------------------------------------


@MUTANTS.mutant()
def the_file_has_holes() -> None:
    plant(SlabFile, allocate=lambda file, length: os.ftruncate(file.fd, length))


@MUTANTS.mutant()
def a_smaller_slab_keeps_its_file() -> None:
    plant(SlabFile, truncate=lambda *_: None)


@MUTANTS.mutant()
def temporary_files_stay() -> None:
    plant(slab_module, _abandoned=lambda path: [])


@MUTANTS.mutant()
def the_gauge_is_that_of_the_start() -> None:
    plant(SlabFile, allocated_bytes=property(lambda file: file.size))
