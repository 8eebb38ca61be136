"""Slots that a test lends to the jobs of a tier, and a ledger of the jobs and their results."""

from __future__ import annotations

import ctypes
import gc
import mmap
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.base import OffloadKey
from kvtier.cpu.buffer_holders import describe_holders
from kvtier.tiering.base import JobResult, TransferJob

__all__ = ["JobLedger", "LentSlots", "Report", "demand", "payload_of"]

_POISON = bytes([0xA5, 0x5A, 0xC3, 0x3C])


class LentSlots:
    """The slots of a primary tier, which are lent to jobs. Used on one thread.

    Slots are page-aligned rows in one memory mapping. A slot that is not lent holds poison, a fixed
    pattern of bytes. It reveals a load that writes nothing, and a write into a slot that is not
    lent.
    """

    def __init__(self, num_slots: int, row_bytes: int, seed: int = 0) -> None:
        self.num_slots = num_slots
        self.row_bytes = row_bytes
        self.is_closed = False
        self._poison = _POISON * (row_bytes // len(_POISON))
        self._mapping = mmap.mmap(-1, num_slots * row_bytes)
        self.view = memoryview(self._mapping).cast("B", (num_slots, row_bytes))
        self._free = list(range(num_slots))
        # Shuffled, to detect a tier that assumes a job's slots to be adjacent.
        Random(seed).shuffle(self._free)
        for slot in self._free:
            self.fill(slot, self._poison)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, count: int) -> list[int]:
        """Return `count` slots, all poisoned. Raises `ValueError` if fewer are free."""
        if count > len(self._free):
            free = f"{len(self._free)} of {self.num_slots}"
            raise ValueError(f"{count} slots wanted, {free} are free")
        lent, self._free = self._free[:count], self._free[count:]
        return lent

    def take_back(self, slots: list[int]) -> None:
        """Poison the slots of a job that has ended, to detect later writes."""
        for slot in slots:
            self.fill(slot, self._poison)
        self._free += slots

    def take_back_all(self) -> None:
        """Take back the slots of all jobs, reported or not."""
        self._free.clear()
        self.take_back(list(range(self.num_slots)))

    def touched(self) -> list[int]:
        """Return the free slots that were written to."""
        return [slot for slot in sorted(self._free) if self.content(slot) != self._poison]

    def content(self, slot: int) -> bytes:
        return self._mapping[slot * self.row_bytes : (slot + 1) * self.row_bytes]

    def is_poison(self, slot: int) -> bool:
        return self.content(slot) == self._poison

    def fill(self, slot: int, content: bytes) -> None:
        self._mapping[slot * self.row_bytes : (slot + 1) * self.row_bytes] = content

    def close(self) -> list[str]:
        """Unmap the slots. Returns descriptions of the objects that still refer to them; if there
        are any, the slots stay mapped."""
        self.is_closed = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        with suppress(BufferError):  # an array still refers to it, and so to the mapping
            self.view.release()
        with suppress(BufferError):
            self._mapping.close()
            return []
        gc.collect()  # cyclic garbage is not the tier's mistake
        with suppress(BufferError):
            self._mapping.close()
            return []
        return describe_holders(address, len(self._mapping)) or ["unknown holders"]


def payload_of(key: OffloadKey, num_bytes: int) -> bytes:
    """Return the content of the block of `key`: random bytes that depend on the key alone, and are
    the same in every process. So a wrong byte or a block in a wrong slot is detected."""
    return np.random.Generator(np.random.SFC64(xxh3_64_intdigest(key))).bytes(num_bytes)


def demand(condition: bool, complaint: str) -> None:
    """Raise `AssertionError` with this complaint unless `condition` holds."""
    if not condition:
        raise AssertionError(complaint)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """One result, and the poll that returned it."""

    poll: int
    """Number of the call of `get_finished_jobs` that returned the result."""
    job: TransferJob
    result: JobResult

    @property
    def moved(self) -> set[OffloadKey]:
        """The keys that the tier reports as moved, or as present already."""
        if self.result.success:
            return set(self.job.keys)
        return set(self.result.successful_keys or ())


class JobLedger:
    """Records every job and every result, and compares results with the slots.

    When a job is reported, the ledger takes its slots back, which poisons them.
    """

    def __init__(self, slots: LentSlots) -> None:
        self.unreported: dict[int, TransferJob] = {}
        self.reports: dict[int, Report] = {}
        """By job id, in the order of the reports."""
        self._slots = slots

    def note_submitted(self, job: TransferJob) -> None:
        self.unreported[job.job_id] = job

    def accept(self, result: object, poll: int) -> None:
        """Record a result, or raise `AssertionError` with what is wrong."""
        if not isinstance(result, JobResult):
            raise AssertionError(f"get_finished_jobs gave {result!r}: it must give JobResults")
        job_id = result.job_id
        demand(
            job_id not in self.reports,
            f"job {job_id} was reported twice. After the first report its slots may belong to "
            "another job",
        )
        job = self.unreported.pop(job_id, None)
        if job is None:
            raise AssertionError(f"job {job_id!r} was reported, but never submitted")
        report = Report(poll, job, result)
        demand(
            report.moved <= set(job.keys),
            f"{describe(job)} names keys as successful that are not among its own",
        )
        demand(
            result.transfer_time is None or result.transfer_time >= 0,
            f"{describe(job)} took {result.transfer_time} s: give seconds, or None if not known",
        )
        self._compare_with_slots(report)
        self.reports[job_id] = report
        self._slots.take_back(job.block_ids.tolist())

    def _compare_with_slots(self, report: Report) -> None:
        job, slots = report.job, self._slots
        for place, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            is_right = slots.content(slot) == payload_of(key, slots.row_bytes)
            if not job.is_promotion:
                demand(
                    is_right,
                    f"{describe(job)} changed slot {slot}, which a store must only read",
                )
            elif key in report.moved:
                state = (
                    "holds the pattern of free slots: either it was not written, or the tier has "
                    "stored that pattern, because it read a slot after the store was reported"
                    if slots.is_poison(slot)
                    else "holds other bytes"
                )
                demand(
                    is_right,
                    f"{describe(job)} says that it has loaded its block {place}, but slot {slot} "
                    f"{state}. Write and verify a block before reporting it, and name only those "
                    "that arrived",
                )

    def describe_unreported(self) -> str:
        """Return the beginning of a sentence about the unreported jobs, up to "was" or "were"."""
        names = [describe(job) for job in self.unreported.values()]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{shown} {'was' if len(names) == 1 else 'were'}"


def describe(job: TransferJob) -> str:
    """Describe a job for a message."""
    kind = "load" if job.is_promotion else "store"
    return f"job {job.job_id} (a {kind} of {len(job.keys)} blocks)"
