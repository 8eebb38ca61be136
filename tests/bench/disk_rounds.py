"""Tiers on disk and `fio`, measured in turns on one file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from kvtier.config.sizes import as_size
from tests.bench import fio
from tests.bench.disk_subjects import Case, Round
from tests.bench.worker import Worker, worker

KiB, MiB = 1 << 10, 1 << 20
SIZES = (64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB)
JOB_BYTES = 8 * MiB
JOBS_AT_ONCE = 32
ROUNDS = 5
SECONDS = 0.7
SECONDS_ALONE = 0.4

KVTIER, VLLM = "kvtier", "vLLM"
PSYNC, IO_URING, COLD = "fio psync", "fio io_uring", "fio cold"
FIO_DEPTH = 32

Measured = dict[str, list[dict[str, float]]]
"""Measurements by subject and round: `bytes_per_s`, and for tiers `cpu_s_per_gb`."""


@dataclass(frozen=True)
class What:
    """One line of figures."""

    block_bytes: int
    is_load: bool
    is_alone: bool = False
    """One request at a time, instead of a full load."""

    def __str__(self) -> str:
        return f"{as_size(self.block_bytes)} {'read' if self.is_load else 'write'}"


@dataclass(frozen=True)
class Contender:
    """A tier to be measured, in a process of its own."""

    python: str
    subject: str
    """One of `SUBJECTS`."""
    scattered: bool = False
    grows: bool = False
    is_read: bool = True
    """If False, its reads are the same as another contender's, and are not measured."""


class DiskRounds:
    """Measures one line of figures after the other. Create it with `disk_rounds`."""

    def __init__(
        self,
        directory: Path,
        tier_bytes: int,
        contenders: Mapping[str, Contender],
        tiers: dict[str, Worker],
    ) -> None:
        self._directory = directory
        self._tier_bytes = tier_bytes
        self._contenders = contenders
        self._tiers = tiers
        self._fio_file = directory / "fio"
        fio.lay_out(self._fio_file, tier_bytes)
        self.about: dict[str, dict[str, object]] = {}
        """Descriptions that the tiers return."""

    def measure(
        self, block_bytes: int, alone: bool, limits: Sequence[str]
    ) -> Iterator[tuple[What, Measured]]:
        """Measure reads and writes with blocks of one size. `alone`: also one request at a time.
        `limits`: the runs of fio to measure."""
        with ExitStack() as stack:
            for name, tier in self._tiers.items():
                own = stack.enter_context(TemporaryDirectory(dir=self._directory))
                contender = self._contenders[name]
                case = Case(
                    own,
                    f"bench-{os.getpid()}",
                    block_bytes,
                    self._tier_bytes // block_bytes,
                    JOB_BYTES // block_bytes,
                    JOBS_AT_ONCE,
                    scattered=contender.scattered,
                    grows=contender.grows,
                )
                self.about[name] = tier.ask({"begin": asdict(case)})
            # Reads come first, because writes evict the blocks that the tier was filled with.
            for is_load in (True, False):
                for is_alone in (False, True) if alone else (False,):
                    what = What(block_bytes, is_load, is_alone)
                    subjects = self._tier_subjects(what)
                    if not is_alone:
                        fio_subjects = self._fio_subjects(what)
                        subjects |= {name: fio_subjects[name] for name in limits}
                    yield what, in_turns(subjects)
            for tier in self._tiers.values():
                tier.ask({"end": 0})

    def _tier_subjects(self, what: What) -> dict[str, Callable[[], dict[str, float]]]:
        seconds = SECONDS_ALONE if what.is_alone else SECONDS
        command = {"move": asdict(Round(what.is_load, seconds, what.is_alone))}
        return {
            name: partial(tier.ask, command)
            for name, tier in self._tiers.items()
            if self._contenders[name].is_read or not what.is_load
        }

    def _fio_subjects(self, what: What) -> dict[str, Callable[[], dict[str, float]]]:
        threads = self.about[KVTIER]["threads"]
        assert isinstance(threads, int)

        def ask(engine: fio.Engine) -> dict[str, float]:
            speed = fio.bytes_per_second(
                self._fio_file,
                self._tier_bytes,
                what.block_bytes,
                engine,
                write=not what.is_load,
                seconds=SECONDS,
            )
            return {"bytes_per_s": speed}

        as_many_buffers = JOBS_AT_ONCE * JOB_BYTES // what.block_bytes
        return {
            PSYNC: partial(ask, fio.psync(threads)),
            IO_URING: partial(ask, fio.io_uring(FIO_DEPTH)),
            COLD: partial(ask, fio.io_uring(as_many_buffers)),
        }


@contextmanager
def disk_rounds(
    directory: Path, tier_bytes: int, contenders: Mapping[str, Contender]
) -> Iterator[DiskRounds]:
    """`contenders` by name, including `KVTIER`."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(worker(each.python, "tests.bench.disk_load", each.subject))
            for name, each in contenders.items()
        }
        yield DiskRounds(directory, tier_bytes, contenders, workers)


def in_turns(subjects: dict[str, Callable[[], dict[str, float]]], rounds: int = ROUNDS) -> Measured:
    measured: Measured = {name: [] for name in subjects}
    random = Random(0)
    for _ in range(rounds):
        # In a new order each time, so that no subject always follows the same one.
        for name in random.sample(list(subjects), len(subjects)):
            measured[name].append(subjects[name]())
    return measured


def typical(measured: Measured, name: str, field: str = "bytes_per_s") -> float:
    return median(round_[field] for round_ in measured[name])


def ratios(measured: Measured, name: str, to: str, field: str = "bytes_per_s") -> list[float]:
    """Ratios within each round, so that a busy second of the machine affects both."""
    pairs = zip(measured[name], measured[to], strict=True)
    return [ours[field] / theirs[field] for ours, theirs in pairs]


def with_spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
