"""Tiers of a third party whose storage does not return what was stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvtier.base import LookupResult, OffloadKey, ReqContext
from kvtier.tiering.base import JobResult, TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager

Example = ExampleSecondaryTierManager


class OfAnotherNamespace(Example):
    """Its blocks carry the seal of another model, as if it looked in the wrong place."""

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        return super().seal_block(replace(job, fingerprint=bytes(16)), key, payload)


class Flips(Example):
    """One byte of each block changes after it was sealed."""

    def seal_block(self, job: TransferJob, key: OffloadKey, payload: memoryview) -> bytes:
        sealed = super().seal_block(job, key, payload)
        payload[0] ^= 1
        return sealed


class Believes(Flips):
    """The same, and it does not check seals."""

    def verify_block(self, *_: object) -> bool:
        return True


class CannotStore(Example):
    """Every store fails."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._failed: list[JobResult] = []

    def submit_store(self, job: TransferJob) -> None:
        self._failed.append(JobResult(job.job_id, False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        failed, self._failed = self._failed, []
        return [*super().get_finished_jobs(), *failed]


class FindsAnything(Example):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT


class FindsNothing(Example):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS


class CannotStart(Example):
    def __init__(self, **_: object) -> None:
        raise OSError(5, os.strerror(5))


class PressesCtrlC(Example):
    """Its user presses Ctrl-C while it ends."""

    def shutdown(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().shutdown()


class NoTrial(Example):
    @classmethod
    def prepare_trial(cls, *_: object) -> None:  # type: ignore[override]
        return None
