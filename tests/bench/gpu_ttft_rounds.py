"""Fills several engines, then measures them in turns. All are alive; one works at a time."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.gpu_ttft_engine import FORGET_DEVICE, FORGET_HOST, FORGET_NOTHING
from tests.bench.gpu_ttft_raw import Bus, PageCache, RawDisk
from tests.bench.gpu_ttft_samples import (
    DEVICE,
    DISK,
    EMPTIED,
    HOST,
    RECOMPUTED,
    PhaseSamples,
    Reference,
    is_in_place,
    sample_of,
)
from tests.bench.gpu_ttft_settings import (
    FP8,
    GUARD_OFF,
    GUARD_ON,
    LARGER,
    PLAIN,
    VLLM,
    Engine,
    Settings,
)
from tests.bench.vllm_process import EngineFailed, EngineProcess

_NO_LOAD_OR_STORE = {"skip": True}
_FROM_DEVICE = (DEVICE, FORGET_NOTHING)
_SHORT_ONES = 3
"""Runs of a short figure in each round. A device hit takes only 20 to 40 ms on the H200, so the
median of a few runs is not stable."""
_FROM_EVERYWHERE = ((DISK, FORGET_HOST), *((HOST, FORGET_DEVICE), _FROM_DEVICE) * _SHORT_ONES)
_WHERE_DISK_PAYS = ((DISK, FORGET_HOST), (RECOMPUTED, FORGET_DEVICE), *[_FROM_DEVICE] * _SHORT_ONES)
FIGURES = {
    PLAIN: ((RECOMPUTED, FORGET_DEVICE), *[_FROM_DEVICE] * _SHORT_ONES),
    VLLM: _FROM_EVERYWHERE,
    GUARD_OFF: _FROM_EVERYWHERE,
    GUARD_ON: ((EMPTIED, FORGET_HOST), *[_FROM_DEVICE] * _SHORT_ONES),
    FP8: _WHERE_DISK_PAYS,
    LARGER: _WHERE_DISK_PAYS,
}
"""The figures of a round, and the caches that are emptied before each run. The first run brings the
prompt to host memory and device, where the later ones find it."""

_STORED_WITHIN_S = 20.0
_SHORT_LOADS = 3
"""Loads of each short prompt before the guard is measured. The guard decides after eight loads."""
_DEEP_PREFILLS = 2

Say = Callable[[str], None]


class Rounds:
    """The engines and their measurements. `problems` lists failures, `notes` lists deviations."""

    def __init__(self, settings: Settings, scratch: Path, engine_id: str, say: Say) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.phases = [PhaseSamples(phase) for phase in settings.phases]
        self.learning: dict[str, Any] = {}
        self.started_in_s: dict[str, float] = {}
        self.page_cache = PageCache()
        self.bus: Bus | None = None
        self.raw_disk: RawDisk | None = None
        self._settings = settings
        self._scratch = scratch
        self._engine_id = engine_id
        self._say = say
        self._processes: dict[str, EngineProcess] = {}
        """Engines that are ready."""
        self._starting: list[EngineProcess] = []
        self._engines: dict[str, Engine] = {}
        self.references: dict[tuple[str, int, int], Reference] = {}
        """Reference answers by engine, length and number of the prompt."""

    # --- starting and ending --------------------------------------------------------------------

    def launch(self) -> None:
        """Start all engines at the same time."""
        for engine in self._settings.engines:
            self._launch(engine)

    def _launch(self, engine: Engine) -> None:
        number = len(list(self._scratch.glob("engine-*")))
        folder = self._scratch / f"engine-{number}"
        engine_id = f"{self._engine_id}-{number}"
        order = engine.order(self._settings, folder, engine_id)
        process = EngineProcess(engine.name, "tests.bench.gpu_ttft_engine", order, folder)
        self._starting.append(process)
        self._engines[engine.name] = engine

    def await_engines(self, deadline: float) -> None:
        """Wait until all are ready or have failed, or the time is up."""
        while self._starting:
            for process in list(self._starting):
                try:
                    if process.has_started(0.2):
                        self._starting.remove(process)
                        self._processes[process.name] = process
                        self.started_in_s[process.name] = process.started_in_s or 0.0
                        self._say(f"{process.name} has started")
                    elif time.monotonic() > deadline:
                        raise EngineFailed("it did not start in time")
                except EngineFailed as failure:
                    self._starting.remove(process)
                    self._bury(process, "did not start", failure)
                    self._start_instead(process, failure)

    def _start_instead(self, failed: EngineProcess, failure: EngineFailed) -> None:
        other = self._settings.instead.get(failed.name)
        what = f"{failed.name} did not start: {failure}"
        if other is None:
            self.problems.append(what)
        else:
            self.notes.append(f"{what}; {other.name} took its place")
            self._say(f"{other.name} is started instead of {failed.name}")
            self._launch(other)

    def _bury(self, process: EngineProcess, what: str, failure: EngineFailed) -> None:
        self._say(f"{process.name} {what}: {failure}\n--- the end of its log:")
        self._say(process.last_words() + "\n---")
        process.end(within_s=1.0)
        # Other engines need the memory.
        shutil.rmtree(process.folder / "tier", ignore_errors=True)

    def end(self) -> None:
        """End all processes."""
        everyone = [*self._starting, *self._processes.values()]
        for process in everyone:
            process.hang_up()
        for process in self._starting:
            process.end(within_s=0)
        for process in self._processes.values():
            process.end()
        self._starting, self._processes = [], {}

    def prepare_raw(self) -> None:
        """Prepare the measurements of bus and disk while engines start."""
        try:
            self.bus = Bus(self._settings)
        except Exception as error:
            self.problems.append(f"the bus cannot be measured: {error!r}")
        try:
            self.raw_disk = RawDisk(self._settings, self._scratch / "raw")
        except Exception as error:
            self.problems.append(f"the raw disk cannot be measured: {error!r}")

    def choose_raw_threads(self) -> dict[str, Any]:
        """Measure the raw disk while no engine works. Returns how it is read and its speed."""
        if self.raw_disk is None:
            return {}
        rates = self.raw_disk.choose_threads(self._settings)
        return {
            "threads": self.raw_disk.num_threads,
            "chunk_bytes": self._settings.raw_chunk,
            "past_the_page_cache": self.raw_disk.is_direct,
            "bytes_per_s": {str(threads): rate for threads, rate in rates.items()},
        }

    # --- before anything is measured ------------------------------------------------------------

    def fill(self) -> None:
        """Let every engine compute all prompts and store them on disk. Its answers from the device
        cache are the reference for all later answers."""
        for process in list(self._processes.values()):
            self._attempt(process, self._fill)

    def _attempt(self, process: EngineProcess, work: Callable[[EngineProcess], None]) -> bool:
        try:
            work(process)
        except EngineFailed as failure:
            del self._processes[process.name]
            self.problems.append(f"{process.name} failed: {failure}")
            self._bury(process, "failed", failure)
            return False
        return True

    def _fill(self, process: EngineProcess) -> None:
        began = time.monotonic()
        engine, settings = self._engines[process.name], self._settings
        lengths = engine.lengths or settings.lengths
        prompts = [(length, number) for length in lengths for number in range(settings.prompts)]
        for length, number in prompts:
            self._generate(process, length, number, FORGET_DEVICE)
            answer = self._generate(process, length, number, FORGET_NOTHING)
            self.references[engine.name, length, number] = Reference(
                answer["answer"], answer["logprobs"]
            )
        wanted = settings.stored_blocks(engine)
        stored = self._stored(process, wanted)
        if stored < wanted:
            self._say(f"{engine.name}: {stored} of {wanted} blocks are on disk; once more")
            for length, number in prompts:
                self._generate(process, length, number, FORGET_HOST)
            stored = self._stored(process, wanted)
        if stored < wanted:
            self.problems.append(f"{engine.name}: {stored} of {wanted} blocks are on disk")
        self._say(
            f"{engine.name}: {len(prompts)} prompts computed, {stored} blocks on disk, "
            f"{time.monotonic() - began:.1f} s"
        )

    def _stored(self, process: EngineProcess, wanted: int) -> int:
        if not wanted:
            return 0
        question = {"blocks": wanted, "seconds": _STORED_WITHIN_S}
        return int(process.ask("stored_blocks", question))

    def _teach_those_of(self, samples: PhaseSamples) -> None:
        """Let the guards of these engines measure before their first round. Not right after the
        filling, when the disk may be busy with earlier writes."""
        for name in samples.phase.engines:
            process = self._processes.get(name)
            if process is not None and self._engines[name].has_guard and name not in self.learning:
                self._attempt(process, self._teach)

    def _teach(self, process: EngineProcess) -> None:
        """Let the guard measure loads and prefills of every length."""
        engine, settings = self._engines[process.name], self._settings
        lengths = sorted(engine.lengths)
        runs = []
        rounds = [lengths[:1]] * _SHORT_LOADS + [lengths[1:]]
        for of_round in rounds:
            forget = FORGET_HOST
            for length in of_round:
                for number in range(settings.prompts):
                    answer = self._generate(process, length, number, forget)
                    runs.append(_brief(length, "after a reset", answer))
                    forget = FORGET_DEVICE
        for number in range(_DEEP_PREFILLS):
            prompt = number % settings.prompts
            answer = self._generate(process, lengths[-1], prompt, FORGET_DEVICE, _NO_LOAD_OR_STORE)
            runs.append(_brief(lengths[-1], "told to compute", answer))
        figures = process.ask("figures", None)
        rate = figures.get("tiering_prefill_tokens_per_s", 0.0)
        self.learning[engine.name] = {"runs": runs, "prefill_tokens_per_s": rate}
        loads = sum(run["cached_tokens"] > 0 for run in runs)
        self._say(
            f"{engine.name}: its guard has seen {loads} loads and {len(runs) - loads} prefills "
            f"more; it takes prompts to be computed at {rate:,.0f} tokens/s"
        )

    # --- rounds ---------------------------------------------------------------------------------

    def has_engines_for(self, samples: PhaseSamples) -> bool:
        return any(name in self._processes for name in samples.phase.engines)

    def take(self, samples: PhaseSamples) -> None:
        """Run one round of a phase: every figure, with the order of the engines rotated."""
        self._teach_those_of(samples)
        length, round_ = samples.phase.length, samples.num_rounds
        processes = [
            self._processes[name] for name in samples.phase.engines if name in self._processes
        ]
        if not processes:
            return
        num_bytes = max(
            self._settings.served_bytes(self._engines[process.name], length)
            for process in processes
        )
        for process in processes if round_ % 2 == 0 else reversed(processes):
            self._attempt(process, lambda process: self._measure(process, samples))
        samples.num_bytes = num_bytes
        if self.bus is not None:
            samples.bus.values.append(self.bus.seconds_for(num_bytes))
        if self.raw_disk is not None:
            if not self.raw_disk.is_direct:
                self.page_cache.drop()
            samples.raw_disk.values.append(self.raw_disk.seconds_for(num_bytes))
        samples.num_rounds += 1

    def _measure(self, process: EngineProcess, samples: PhaseSamples) -> None:
        engine, length, round_ = (
            self._engines[process.name],
            samples.phase.length,
            samples.num_rounds,
        )
        prompt = round_ % self._settings.prompts
        for turn, (figure, forget) in enumerate(FIGURES[engine.name]):
            if forget == FORGET_HOST:
                self.page_cache.drop()
            is_to_compute = figure == RECOMPUTED and bool(engine.lengths)
            hints = _NO_LOAD_OR_STORE if is_to_compute else None
            # Other engines have used the machine for seconds. The short request before takes the
            # cost of that, so that the first run does not.
            answer = self._generate(process, length, prompt, forget, hints, wake=turn == 0)
            sample = sample_of(
                answer,
                round_=round_,
                prompt=prompt,
                is_in_place=is_in_place(answer, figure, engine, self._settings, length),
                reference=self.references.get((engine.name, length, prompt)),
            )
            samples.add(engine.name, figure, sample)

    def _generate(
        self,
        process: EngineProcess,
        length: int,
        number: int,
        forget: str,
        hints: dict[str, Any] | None = None,
        *,
        wake: bool = False,
    ) -> dict[str, Any]:
        question = {
            "tokens": self._settings.prompt_tokens(length),
            "number": number,
            "forget": forget,
            "hints": hints,
            "wake": wake,
        }
        answer: dict[str, Any] = process.ask("generate", question)
        return answer


def _brief(length: int, what: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": length,
        "what": what,
        "seconds": answer["seconds"],
        "cached_tokens": answer["cached_tokens"],
        "counted": answer["counted"],
    }
