"""A busy server: many requests in stock vLLM on a GPU, with more work than the caches hold.

    python -m tests.bench.serve_load measure    on the H200: eight to ten minutes for two rounds
    python -m tests.bench.serve_load emulate    without a GPU: one that only sleeps, as fast as an
                                                H200; everything else is real. Needs 16 GB of memory
    python -m tests.bench.serve_load rehearse   with a tiny model on the CPU, one minute; one round

The engines of a setting start together, as many as fit on the GPU, and then run the workloads in
turns: one works, the others wait. `none` is vLLM without offloading, and all ratios are to it;
without it there are no ratios and no limits. `host` and `disk` are kvtier with host memory alone,
and with a disk tier below; `vllm-host` and `vllm-fs` are vLLM's own offloading. `measure` and
`emulate` take 12 GiB of /dev/shm and 44 GiB of disk. Run it with a Python that has vLLM, such as
`.venv-vllm/bin/python` after `make vllm-env`. Results are saved after every round of an engine, in
build/bench and in the folder $OUT if it is set.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from tests.arguments import positive_number, whole_number
from tests.bench.gpu_here import why_no_gpu
from tests.bench.gpu_ttft_settings import H200 as TTFT_H200
from tests.bench.gpu_ttft_settings import REHEARSAL as TTFT_REHEARSAL
from tests.bench.gpu_ttft_settings import Shape
from tests.bench.report import (
    RESULTS,
    missed,
    not_measured,
    print_table,
    save,
    scratch_directory,
    unmeasured,
    verdict,
    verdict_of_all,
)
from tests.bench.vllm_process import EngineFailed, EngineProcess

_GIB = 1 << 30
_MIB = 1 << 20

NONE, HOST, DISK, VLLM_HOST, VLLM_FS = "none", "host", "disk", "vllm-host", "vllm-fs"
ENGINES = (NONE, HOST, DISK, VLLM_HOST, VLLM_FS)

Parts = list[dict[str, Any]]
"""The parts of one workload in one engine; see `serve_load_engine.Session._measure`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One model with its caches, and the workloads that its engines run."""

    name: str
    shape: Shape
    device_blocks: int
    host_bytes: int
    disk_bytes: int
    engine_args: Mapping[str, Any]
    workloads: Mapping[str, Mapping[str, Any]]
    """By the session's method: its argument."""
    warm_up_tokens: int
    start_s: float
    """Seconds within which an engine must start."""
    workload_s: float
    """Seconds within which a workload must end."""
    num_at_once: int = 3
    """Engines that fit on the GPU at the same time."""
    emulated: str | None = None
    """The name of a `Speed` in `tests.bench.sleeping_gpu`; None: on a real device."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of kvtier, beside the sizes."""
    first_later: int = 1
    """The first of the parts that are called later turns."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """By the name of a ratio to `none` for the engine `disk`."""
    host_limits: Mapping[str, float] = field(default_factory=dict)
    """The same for the engine `host`."""

    def order(self, engine: str, folder: Path, engine_id: str) -> dict[str, Any]:
        """The description of an engine, as JSON."""
        engine_args = dict(self.engine_args)
        tier = folder / "tier"
        kvtier: dict[str, Any] | None = None
        if engine in (HOST, DISK):
            # Dummy weights cannot be identified by files. A reset leaves the blocks on disk.
            kvtier = {
                "cpu_bytes_to_use": self.host_bytes,
                "cache_namespace": "serve_load",
                "reset_scope": "primary",
                **self.options,
            }
            if engine == DISK:
                path = str(tier / "kv.slab")
                kvtier["secondary_tiers"] = [
                    {"type": "disk", "path": path, "max_bytes": self.disk_bytes}
                ]
        elif engine != NONE:
            below: dict[str, Any] = {"spec_name": "CPUOffloadingSpec"}
            if engine == VLLM_FS:
                below = {
                    "spec_name": "TieringOffloadingSpec",
                    "secondary_tiers": [{"type": "fs", "root_dir": str(tier)}],
                }
            engine_args["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": engine_id,
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": self.host_bytes,
                    **below,
                },
            }
        return {
            "folder": str(folder),
            "model_config": self.shape.model_config(),
            "vocabulary": self.shape.vocabulary,
            "device_blocks": self.device_blocks,
            "max_requests": 32,
            "engine_args": engine_args,
            "kvtier": kvtier,
            "warm_up_tokens": self.warm_up_tokens,
            "emulated": self.emulated,
        }


_LLAMA_8B = TTFT_H200.engines[0].shape
_SHAPE_32B = Shape(5120, 27648, 64, 40, 8, 128, 152064, 131072)
_TINY = TTFT_REHEARSAL.engines[0].shape

_ON_GPU: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 16_384,
    "distributed_executor_backend": "uni",
}
_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 6, 8, 16, 32],
    },
}
_CHATS = {
    "conversations": 36,
    "turns": 4,
    "first_tokens": 6_000,
    "common_tokens": 512,
    "ask_tokens": 300,
    "say_tokens": 48,
    "active": 6,
}

CHATS = Setting(
    "chats",
    _LLAMA_8B,
    device_blocks=4096,
    host_bytes=12 * _GIB,
    disk_bytes=44 * _GIB,
    engine_args={**_ON_GPU, **_GRAPHS, "gpu_memory_utilization": 0.5},
    workloads={
        "conversations": _CHATS,
        "burst": {"common_tokens": 8_000, "own_tokens": 100, "requests": 24},
    },
    warm_up_tokens=3_000,
    start_s=180.0,
    workload_s=120.0,
    limits={
        "conversations: later turns": 0.80,
        "conversations: later turns, TTFT p90": 1.05,
        "conversations: later turns, TTFT p99": 1.25,
        "conversations: first turn": 1.03,
        "conversations: first turn, decode step": 1.01,
        "burst: later turns": 1.05,
    },
)
LATE_TURNS = replace(
    CHATS,
    name="late_turns",
    workloads={"conversations": _CHATS | {"turns": 8}},
    options={"eviction_policy": "density"},
    first_later=3,
    workload_s=240.0,
    limits={"conversations: later turns": 0.65},
    host_limits={"conversations: later turns": 0.85},
)
EAGER = replace(
    CHATS,
    name="eager",
    engine_args={**_ON_GPU, "gpu_memory_utilization": 0.5},
    workloads={"conversations": _CHATS | {"turns": 1}},
    limits={"conversations: first turn": 1.08},
)
AGENTS = replace(
    CHATS,
    name="agents",
    device_blocks=2048,
    host_bytes=6 * _GIB,
    workloads={
        "agents": {
            "start": 20_000,
            "requests": 400,
            "tokens_per_block": 16,
            "longest": 15_984,
            "say_tokens": 16,
            "active": 8,
        }
    },
    limits={"agents: first turn": 0.67},
)
LARGE = replace(
    CHATS,
    name="large",
    shape=_SHAPE_32B,
    device_blocks=3072,
    host_bytes=8 * _GIB,
    engine_args={**_ON_GPU, **_GRAPHS, "gpu_memory_utilization": 0.75},
    workloads={"conversations": _CHATS | {"conversations": 14, "active": 4}},
    start_s=240.0,
    workload_s=180.0,
    num_at_once=1,
    limits={"conversations: later turns": 0.65},
)
LONG = replace(
    CHATS,
    name="long",
    engine_args={**_ON_GPU, **_GRAPHS, "max_model_len": 33_000, "gpu_memory_utilization": 0.5},
    workloads={"long_prompt": {"tokens": 32_000, "times": 3}},
    limits={},
)
REHEARSAL = Setting(
    "rehearsal",
    _TINY,
    device_blocks=48,
    host_bytes=8 * _MIB,
    disk_bytes=64 * _MIB,
    engine_args={**TTFT_REHEARSAL.engine_args, "max_model_len": 1_400},
    workloads={
        "conversations": _CHATS
        | {
            "conversations": 8,
            "turns": 2,
            "first_tokens": 400,
            "common_tokens": 64,
            "ask_tokens": 40,
            "say_tokens": 8,
            "active": 3,
        },
        "agents": {
            "start": 20_000,
            "requests": 8,
            "tokens_per_block": 2,
            "longest": 1_000,
            "say_tokens": 4,
            "active": 3,
        },
        "burst": {"common_tokens": 512, "own_tokens": 20, "requests": 6},
        "long_prompt": {"tokens": 1_200, "times": 1},
    },
    warm_up_tokens=200,
    start_s=120.0,
    workload_s=120.0,
)
ON_GPU = {setting.name: setting for setting in (CHATS, LATE_TURNS, AGENTS, LARGE, EAGER, LONG)}


def _emulated(setting: Setting, speed: str) -> Setting:
    """The same on a GPU that only sleeps. Two engines fit, of which one has host memory."""
    return replace(
        setting,
        engine_args={
            **_ON_GPU,
            "enforce_eager": True,
            "max_num_batched_tokens": 16_384,
            "max_model_len": setting.engine_args["max_model_len"],
        },
        emulated=speed,
        num_at_once=2,
        workload_s=400.0,
    )


EMULATED = {
    "chats": _emulated(CHATS, "H200_8B"),
    "late_turns": _emulated(LATE_TURNS, "H200_8B"),
    "agents": _emulated(AGENTS, "H200_8B"),
    "large": _emulated(LARGE, "H200_32B"),
    "eager": _emulated(EAGER, "H200_8B_EAGER"),
    "long": _emulated(LONG, "H200_8B"),
}


_SETTINGS = {setting.name: setting for setting in (*EMULATED.values(), REHEARSAL)}
"""By name; a setting and its emulation have the same parts."""


class Measurements:
    """What was measured, by setting, engine and workload: one entry for each round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, dict[str, list[Parts]]]] = {}
        self.problems: list[str] = []

    def add(self, setting: str, engine: str, workload: str, parts: Parts) -> None:
        by_workload = self.rounds.setdefault(setting, {}).setdefault(engine, {})
        by_workload.setdefault(workload, []).append(parts)

    def save(self, name: str) -> None:
        document = {
            "rounds": self.rounds,
            "problems": self.problems,
            "ratios": {
                setting: {
                    engine: ratios_to_none(
                        by_engine[NONE], workloads, _SETTINGS[setting].first_later
                    )
                    for engine, workloads in by_engine.items()
                    if engine != NONE and NONE in by_engine
                }
                for setting, by_engine in self.rounds.items()
            },
        }
        for folder in (RESULTS, *(Path(out) for out in [os.environ.get("OUT")] if out)):
            save(name, document, folder)


# --- what is derived from it ----------------------------------------------------------------------


def ratios_to_none(
    none: Mapping[str, list[Parts]], engine: Mapping[str, list[Parts]], first_later: int = 1
) -> dict[str, float]:
    """Ratios of seconds, TTFT and decode steps, by name: medians over rounds for times, and
    quantiles of all requests of all rounds for TTFT. `first_later`: see `Setting`."""
    ratios: dict[str, float] = {}
    for workload in none.keys() & engine.keys():
        for which, chosen in (
            ("first turn", slice(0, 1)),
            ("later turns", slice(first_later, None)),
        ):
            ours = [parts[chosen] for parts in engine[workload]]
            theirs = [parts[chosen] for parts in none[workload]]
            if not ours[0]:
                continue
            name = f"{workload}: {which}"
            ratios[name] = _seconds(ours) / _seconds(theirs)
            for label, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
                ratios[f"{name}, TTFT {label}"] = _ttft(ours, percent) / _ttft(theirs, percent)
            steps = [_decode_step(rounds) for rounds in (ours, theirs)]
            if all(steps):
                ratios[f"{name}, decode step"] = steps[0] / steps[1]
    return ratios


def _seconds(rounds: Sequence[Parts]) -> float:
    return median(float(sum(part["seconds"] for part in parts)) for parts in rounds)


def _seconds_of(parts: Parts) -> str:
    return " ".join(f"{part['seconds']:.2f}" for part in parts)


def _ttft(rounds: Sequence[Parts], percent: int) -> float:
    waits: list[float] = [wait for parts in rounds for part in parts for wait in part["ttft"]]
    return quantiles(waits, n=100, method="inclusive")[percent - 1] if len(waits) > 1 else waits[0]


def _decode_step(rounds: Sequence[Parts]) -> float:
    """0 if no step has only decoded."""
    steps = [part["decode_step"] for parts in rounds for part in parts if part["decode_step"]]
    return fmean(steps) if steps else 0.0


def show(setting: Setting, by_engine: Mapping[str, Mapping[str, list[Parts]]]) -> None:
    """Print a table for every workload, and the verdicts on `disk`."""
    for workload in setting.workloads:
        rows = []
        for engine, workloads in by_engine.items():
            for number, parts in enumerate(workloads.get(workload, ()), 1):
                later = parts[setting.first_later :] or parts
                found = sum(part["found"] for part in later)
                asked = sum(part["prompt_tokens"] for part in later)
                rows.append(
                    [
                        f"{engine}, round {number}",
                        _seconds_of(parts),
                        f"{found / asked:.0%}",
                        *(f"{_ttft([later], p):.2f}" for p in (50, 90, 99)),
                        f"{step * 1e3:.1f}" if (step := _decode_step([parts])) else "-",
                    ]
                )
        header = ("", "seconds by turn", "found", "TTFT p50, s", "p90", "p99", "decode step, ms")
        print_table(f"{setting.name}: {workload}", header, rows)
    for engine, limits in ((HOST, setting.host_limits), (DISK, setting.limits)):
        if NONE in by_engine and engine in by_engine:
            ratios = ratios_to_none(by_engine[NONE], by_engine[engine], setting.first_later)
            for name, limit in limits.items():
                if name in ratios:
                    what = f"{setting.name}, {engine}, {name}, to none"
                    print("  " + verdict(what, ratios[name], limit))


# --- measuring ------------------------------------------------------------------------------------


def run(
    settings: Sequence[Setting] = (CHATS,),
    engines: Sequence[str] = (NONE, HOST, DISK),
    num_rounds: int = 2,
    deadline_s: float = 540.0,
) -> None:
    """Run all settings, round by round, until the time is up."""
    needs_gpu = all(setting in ON_GPU.values() for setting in settings)
    why_not = _why_not(needs_gpu)
    if why_not is not None:
        not_measured("serve_load", why_not)
        return
    name = "serve_load"
    if not needs_gpu:
        name += "_rehearsal" if REHEARSAL in settings else "_emulated"
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"  [{time.monotonic() - began:5.0f} s] {text}", flush=True)

    measured = Measurements()
    with scratch_directory() as scratch:
        groups = [
            (each, engines[first : first + each.num_at_once])
            for each in settings
            for first in range(0, len(engines), each.num_at_once)
        ]
        for setting, group in groups:
            if time.monotonic() - began > deadline_s:
                say(f"{setting.name}, {', '.join(group)}: no time is left")
                continue
            with _engines(setting, group, scratch, measured, say) as started:
                for engine in _turns(started, num_rounds, began + deadline_s):
                    _run_workloads(setting, started, engine, measured, say)
                    measured.save(name)
    for setting in settings:
        show(setting, measured.rounds.get(setting.name, {}))
    for problem in measured.problems:
        print(f"  problem: {problem}")
        missed.append(f"serve_load: {problem}")


def _why_not(needs_gpu: bool) -> str | None:
    """Why nothing can be measured here; None if it can."""
    if find_spec("vllm") is None:
        return "this Python has no vLLM: take another, such as that of `make vllm-env`"
    missing = why_no_gpu() if needs_gpu else None
    if missing is not None:
        return f"{missing}. `python -m tests.bench.serve_load emulate` needs no GPU"
    return None


def _turns(started: Mapping[str, object], num_rounds: int, deadline: float) -> Iterator[str]:
    """The engines round by round: forwards, then backwards. No round begins after the deadline,
    but the first."""
    for number in range(num_rounds):
        if number and time.monotonic() > deadline:
            return
        yield from list(started)[:: 1 if number % 2 == 0 else -1]


@contextmanager
def _engines(
    setting: Setting, names: Sequence[str], scratch: Path, measured: Measurements, say: Any
) -> Iterator[dict[str, EngineProcess]]:
    """Start engines together, yield those that have started, and end them."""
    processes: dict[str, EngineProcess] = {}
    started = {}
    try:
        for name in names:
            folder = scratch / f"{setting.name}-{name}"
            order = setting.order(name, folder, f"serve-load-{os.getpid()}-{folder.name}")
            processes[name] = EngineProcess(name, "tests.bench.serve_load_engine", order, folder)
        for name, process in processes.items():
            try:
                if not process.has_started(setting.start_s):
                    raise EngineFailed("it did not start in time")
            except EngineFailed as failure:
                _report(setting, process, failure, measured, say)
                continue
            say(f"{setting.name}, {name}: started in {process.started_in_s:.0f} s")
            started[name] = process
        yield started
    finally:
        for process in processes.values():
            process.hang_up()  # so that all of them end at the same time
        for process in processes.values():
            process.end()
            _remove(process.folder / "tier")


def _run_workloads(
    setting: Setting,
    started: dict[str, EngineProcess],
    engine: str,
    measured: Measurements,
    say: Any,
) -> None:
    """One round of one engine. Removes the engine from `started` if it fails."""
    process = started[engine]
    try:
        for workload, argument in setting.workloads.items():
            parts: Parts = process.ask(workload, dict(argument), setting.workload_s)
            measured.add(setting.name, engine, workload, parts)
            say(f"{setting.name}, {engine}: {workload} {_seconds_of(parts)} s")
    except EngineFailed as failure:
        _report(setting, process, failure, measured, say)
        del started[engine]


def _report(
    setting: Setting,
    process: EngineProcess,
    failure: EngineFailed,
    measured: Measurements,
    say: Any,
) -> None:
    what = f"{setting.name}, {process.name}"
    say(f"{what}: {failure}\n--- the end of its log:\n{process.last_words()}\n---")
    measured.problems.append(f"{what}: {failure}")


def _remove(folder: Path) -> None:
    """Remove the blocks of an engine that has ended: the next one needs the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.serve_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("measure", "emulate", "rehearse"))
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(ON_GPU),
        default=[CHATS.name],
        help="what to measure; `rehearse` has its own (default: chats)",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=[NONE, HOST, DISK],
        help="these alone, in this order (default: none host disk)",
    )
    parser.add_argument(
        "--rounds",
        type=whole_number,
        default=2,
        metavar="N",
        help="rounds of each engine (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=positive_number,
        default=540.0,
        metavar="S",
        help="begin no further round after so many seconds (default: %(default)s)",
    )
    arguments = parser.parse_args()
    known = EMULATED if arguments.mode == "emulate" else ON_GPU
    settings, rounds = [known[name] for name in dict.fromkeys(arguments.settings)], arguments.rounds
    if arguments.mode == "rehearse":
        settings, rounds = [REHEARSAL], 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the engines first
    try:
        run(settings, list(dict.fromkeys(arguments.engines)), rounds, arguments.deadline)
    except KeyboardInterrupt:
        raise SystemExit(
            "interrupted; the engines have ended, and what was measured is saved"
        ) from None
    if unmeasured or missed:
        raise SystemExit(verdict_of_all())


if __name__ == "__main__":
    main()
