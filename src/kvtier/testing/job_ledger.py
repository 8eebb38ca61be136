"""Which jobs a tier was given, what it reported, and whether that is true."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.testing.payload import payload_of
from kvtier.testing.slots import LentSlots
from kvtier.tiering.base import JobResult, TransferJob

__all__ = ["JobLedger", "Report", "demand"]


def demand(condition: bool, complaint: str) -> None:
    """Fail with these words unless `condition` holds."""
    if not condition:
        raise AssertionError(complaint)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """One result, and when it came."""

    poll: int
    """The number of the call of `get_finished_jobs` that gave it."""
    job: TransferJob
    result: JobResult

    @property
    def moved(self) -> set[OffloadKey]:
        """The keys that the tier says it has moved, or had already."""
        if self.result.success:
            return set(self.job.keys)
        return set(self.result.successful_keys or ())


class JobLedger:
    """Takes down every job and every result, and compares results with the slots.

    When a job is reported, its slots are taken back and poisoned.
    """

    def __init__(self, slots: LentSlots) -> None:
        self.unreported: dict[int, TransferJob] = {}
        self.reports: dict[int, Report] = {}
        """By job id, in the order in which they came."""
        self._slots = slots

    def note_submitted(self, job: TransferJob) -> None:
        self.unreported[job.job_id] = job

    def accept(self, result: object, poll: int) -> None:
        """Take down a result, or say what is wrong with it."""
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
                    f"{describe(job)} changed slot {slot}, which it was only to read",
                )
            elif key in report.moved:
                state = (
                    "holds what free slots hold: it was not written, or the block was read from "
                    "its slot after the store was reported"
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
        """The jobs that are missing, as the start of a sentence."""
        names = [describe(job) for job in self.unreported.values()]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{shown} {'was' if len(names) == 1 else 'were'}"


def describe(job: TransferJob) -> str:
    """A job, for people."""
    kind = "load" if job.is_promotion else "store"
    return f"job {job.job_id} (a {kind} of {len(job.keys)} blocks)"
