"""The phases of the demo, in order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtier.cli.demo.display import Display
from kvtier.cli.demo.process import Ended, EngineTask, ProcessFailed, Started, run_in_process
from kvtier.cli.demo.report import (
    LengthRow,
    OperatorLog,
    PhaseRow,
    References,
    Report,
    Source,
    is_identical,
    problem_of,
    row_of,
)
from kvtier.cli.demo.server import DoomedTier, OffloadingServer, Served, Server
from kvtier.cli.demo.settings import DemoSettings, Prompt, disk_tier
from kvtier.engine import ModelConfig

__all__ = ["Demo"]

_DOOMED_TIER: dict[str, Any] = {
    "type": DoomedTier.__name__,
    "module_path": DoomedTier.__module__,
    "max_blocks": 100_000,
    "load_timeout_ms": 1_000,
    "store_timeout_ms": 1_000,
}
_DOOMED, _OTHER = 0, 1
_SPARE_PROMPTS = 16
"""Extra room in host memory, as a number of prompts, because a dead tier may hold up to a quarter
of all slots."""
_MAX_REQUESTS = 10
"""The dead tier must be cut off within this many requests. Its breaker opens after three missed
deadlines."""
_REPEATS = 3

_TITLES = {
    Source.COMPUTED: "cold",
    Source.DEVICE: "from the device cache",
    Source.HOST: "from host memory",
    Source.TIER: "from disk",
}


class Demo:
    """Runs the phases in order and adds each to the report as it ends."""

    def __init__(
        self,
        report: Report,
        display: Display,
        log: OperatorLog,
        check: Callable[[], None],
    ) -> None:
        """`check` is called before every engine step, and may raise."""
        self._report = report
        self._settings: DemoSettings = report.settings
        self._display = display
        self._log = log
        self._check = check
        self._folder = Path()

    def run(self) -> None:
        """Run all phases. Disk tiers have their files in the user's temporary directory."""
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
            self._folder = Path(folder)
            self._run()

    def _run(self) -> None:
        model, prompts = self._settings.model, self._settings.prompts
        references = self._compute("without offloading", model, prompts)
        self._serve_from_everywhere("", model, prompts, references, tuple(Source))
        self._restart(model, prompts, references)
        self._kill_a_tier(model, prompts, references)
        hybrid = self._settings.hybrid_model
        references = self._compute("hybrid: without offloading", hybrid, prompts)
        sources = (Source.COMPUTED, Source.HOST, Source.TIER)
        self._serve_from_everywhere("hybrid: ", hybrid, prompts, references, sources)
        self._compare_lengths(model, self._settings.prompts_by_length)

    # --- without offloading ---------------------------------------------------------------------

    def _compute(self, title: str, model: ModelConfig, prompts: Sequence[Prompt]) -> References:
        with Server(model, prompts, self._check) as server:
            return {s.prompt: s for s in self._serve_all(title, server, prompts)}

    def _serve_all(self, title: str, server: Server, prompts: Sequence[Prompt]) -> Iterable[Served]:
        self._display.begin(title, len(prompts))
        for prompt in prompts:
            yield self._shown(server.serve(prompt))

    def _shown(self, served: Served) -> Served:
        self._display.advance(served.first_token_s)
        return served

    # --- from the device, host memory, a tier ---------------------------------------------------

    def _serve_from_everywhere(
        self,
        kind: str,
        model: ModelConfig,
        prompts: Sequence[Prompt],
        references: References,
        sources: Sequence[Source],
    ) -> None:
        with (
            self._disk_tier(model, prompts) as tier,
            OffloadingServer(model, prompts, self._check, [tier]) as server,
        ):
            for source in sources:
                title = kind + _TITLES[source]
                problems = _forget(server, source)
                served = []
                for one in self._serve_all(title, server, prompts):
                    served.append(one)
                    server.settle()
                name = f"{kind}{source.name}".lower().replace(": ", "_")
                row = row_of(name, title, served, references, server, source)
                row.problems += problems
                if source is Source.COMPUTED:
                    row.notes.append(_price_of_storing(row))
                self._add_row(row)

    @contextmanager
    def _disk_tier(self, model: ModelConfig, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Yield the configuration of a new disk tier, and remove its file afterwards."""
        path = self._folder / "kv.slab"
        try:
            yield disk_tier(path, model, prompts)
        finally:
            path.unlink(missing_ok=True)

    def _add_row(self, row: PhaseRow) -> None:
        row.notes += self._log.take()
        self._report.phases.append(row)

    # --- from disk, in a new process ------------------------------------------------------------

    def _restart(
        self, model: ModelConfig, prompts: Sequence[Prompt], references: References
    ) -> None:
        title = "from disk, after a restart"
        try:
            with self._disk_tier(model, prompts) as tier:
                task = EngineTask(model, prompts, [tier])
                first = self._run_process("stored by another process", task)
                second = self._run_process(title, task)
        except ProcessFailed as failure:
            self._report.problems.append(f"{title}: {failure}")
            return
        row = row_of("restarted", title, second.served, references, second.started, Source.TIER)
        for served in first.served:
            row.identical &= is_identical(served, references)
            if problem := problem_of(served, Source.COMPUTED):
                row.problems.append(f"in the first process, {problem}")
        row.notes.append(
            f"process {first.started.process_id} computed and stored the prompts, and ended; "
            f"process {second.started.process_id} was given the file it left"
        )
        row.notes += [*first.warnings, *second.warnings]
        self._add_row(row)

    def _run_process(self, title: str, task: EngineTask) -> _Outcome:
        self._display.begin(title, len(task.prompts))
        started: Started | None = None
        all_served = []
        warnings: Sequence[str] = ()
        with closing(run_in_process(task, self._folder, self._check)) as messages:
            for message in messages:
                match message:
                    case Started():
                        started = message
                    case Served():
                        all_served.append(self._shown(message))
                    case Ended():
                        warnings = message.warnings
        assert started is not None
        return _Outcome(started, all_served, warnings)

    # --- one tier dies --------------------------------------------------------------------------

    def _kill_a_tier(
        self, model: ModelConfig, prompts: Sequence[Prompt], references: References
    ) -> None:
        title = "one of two tiers killed"
        with (
            self._disk_tier(model, prompts) as other,
            OffloadingServer(
                model,
                prompts,
                self._check,
                [_DOOMED_TIER, other],
                spare_prompts=_SPARE_PROMPTS,
            ) as server,
        ):
            for _ in self._serve_all("both tiers filled", server, prompts):
                server.settle()
            half = prompts[: -(-len(prompts) // 2)]
            self._display.begin(title, len(half) + _MAX_REQUESTS + len(prompts))
            before = [self._serve_from_tiers(server, prompt) for prompt in half]
            doomed = server.tiers[_DOOMED]
            assert isinstance(doomed, DoomedTier)
            # After its first step, the request waits for a load. Then the tier dies, and the load
            # never ends.
            dying = [self._serve_from_tiers(server, prompts[-1], doomed.kill)]
            while not server.is_cut_off(_DOOMED) and len(dying) < _MAX_REQUESTS:
                dying.append(self._serve_from_tiers(server, prompts[len(dying) % len(prompts)]))
            is_cut_off = server.is_cut_off(_DOOMED)
            after = [self._serve_from_tiers(server, prompt) for prompt in prompts]
            while all(map(_is_probe, after)) and len(after) < _MAX_REQUESTS:
                after.append(self._serve_from_tiers(server, prompts[0]))
            row = row_of(
                "killed", title, [*before, *dying, *after], references, server, source=None
            )
        for served in before:
            row.problems += _problems_unless_from(served, _DOOMED)
        for served in after:
            if not _is_probe(served):
                row.problems += _problems_unless_from(served, _OTHER)
        probes = sum(map(_is_probe, after))
        if probes == len(after):
            row.problems.append("nothing came from the other tier")
        if not is_cut_off:
            row.problems.append(f"not cut off after {_counted(len(dying), 'request')}")
        computed = sum(not served.result.num_loaded_tokens for served in dying)
        outcome = "and were computed" if computed == len(dying) else f"and {computed} were computed"
        slowest = max(served.first_token_s for served in dying)
        row.notes.append(
            f"{_counted(_num_from(_DOOMED, before), 'prompt')} came from the first tier; it died "
            f"during the next load; {_counted(len(dying), 'request')} waited for it in vain "
            f"{outcome}, the slowest with its first token after {slowest * 1e3:.0f} ms; then its "
            f"breaker {'opened' if is_cut_off else 'did NOT open'}, and "
            f"{_counted(_num_from(_OTHER, after), 'prompt')} came from the second tier"
            + (f", while {_counted(probes, 'request')} tried the first one again" if probes else "")
        )
        self._add_row(row)

    def _serve_from_tiers(
        self,
        server: OffloadingServer,
        prompt: Prompt,
        after_first_step: Callable[[], None] | None = None,
    ) -> Served:
        server.flush_host_memory()
        return self._shown(server.serve(prompt, after_first_step))

    # --- by length ------------------------------------------------------------------------------

    def _compare_lengths(self, model: ModelConfig, prompts: Sequence[Prompt]) -> None:
        references = self._compute("all lengths, without offloading", model, prompts)
        with (
            self._disk_tier(model, prompts) as tier,
            OffloadingServer(model, prompts, self._check, [tier]) as server,
        ):
            for prompt in prompts:
                self._display.begin(f"{len(prompt)} tokens", 1 + 2 * _REPEATS)
                cold = self._shown(server.serve(prompt))
                server.settle()
                warm: dict[Source, list[Served]] = {Source.HOST: [], Source.TIER: []}
                problems = [problem_of(cold, Source.COMPUTED)]
                for source, served in warm.items():
                    for _ in range(_REPEATS):
                        problems += _forget(server, source)
                        served.append(self._shown(server.serve(prompt)))
                        server.settle()
                        problems.append(problem_of(served[-1], source))
                all_served = [cold, *warm[Source.HOST], *warm[Source.TIER]]
                self._report.lengths.append(
                    LengthRow(
                        tokens=len(prompt),
                        cold_s=references[prompt].first_token_s,
                        host_s=median(s.first_token_s for s in warm[Source.HOST]),
                        tier_s=median(s.first_token_s for s in warm[Source.TIER]),
                        identical=all(is_identical(s, references) for s in all_served),
                        problems=list(dict.fromkeys(p for p in problems if p)),
                    )
                )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of one process."""

    started: Started
    served: Sequence[Served]
    warnings: Sequence[str]


def _forget(server: OffloadingServer, source: Source) -> list[str]:
    """Empty the caches that would serve a prompt instead of `source`: the device cache for host
    memory, the device cache and host memory for a tier. Returns a problem if blocks are left in
    host memory."""
    if source is Source.HOST:
        server.drop_device_cache()
    if source is Source.TIER and (num_left := server.flush_host_memory()):
        return [f"{_counted(num_left, 'block')} left in host memory after it was flushed"]
    return []


def _problems_unless_from(served: Served, position: int) -> list[str]:
    """Return a problem if a prompt did not come from the tier at `position`."""
    problem = problem_of(served, Source.TIER)
    if problem is None and not served.tier_blocks[position]:
        problem = f"a prompt did not come from tier {position}"
    return [] if problem is None else [problem]


def _num_from(position: int, all_served: Iterable[Served]) -> int:
    return sum(bool(served.tier_blocks[position]) for served in all_served)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_probe(served: Served) -> bool:
    """True if this request probed whether the dead tier has recovered."""
    return served.late_loads[_DOOMED] > 0


def _price_of_storing(row: PhaseRow) -> str:
    return (
        f"first token {row.first_token_s * 1e3:.0f} ms with offloading, "
        f"{row.cold_s * 1e3:.0f} ms without"
    )
