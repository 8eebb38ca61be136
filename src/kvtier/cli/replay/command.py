"""Runs `kvtier replay` with the options as given, prints the result, and returns the exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.checks.tiers import mount_of
from kvtier.cli.output import finish, note, write
from kvtier.cli.replay.options import (
    FleetWishes,
    engine_of,
    fleet_of,
    require,
    seconds_of,
    size_of,
    tiers_of,
)
from kvtier.cli.store.terminal import shown_share, warnings_as_notes
from kvtier.config.errors import printable
from kvtier.config.sizes import as_size
from kvtier.replay.calibration import Calibration, calibrate
from kvtier.replay.copies import FleetLoad
from kvtier.replay.engine import Counting, TimedEngine
from kvtier.replay.figures import Figures, FleetFigures, PlaceFigures, Timing
from kvtier.replay.fleet import Fleet
from kvtier.replay.settings import (
    EngineSettings,
    ReplaySettings,
    SettingError,
    Sharing,
    TierSettings,
)
from kvtier.replay.trace import Trace, TraceError, open_trace

__all__ = ["Wishes", "as_duration", "explain_os_error", "run_replay"]

_INTERRUPTED = 128 + signal.SIGINT
_HOST_SPEED = "50GB"
_SHOWN_EVERY_S = 0.1
_OVERLOADED_PERCENT = 90.0
_MOST_WARNINGS = 10
"""Of a fleet, whose engines often say the same."""
_WIDTH = 100
_LEFT_COLUMNS = ("tier", "policy", "write")
_COLUMNS = ("tier", "size", "policy", "write", "hits", "written", "read back", "written/read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options, as the user has written them."""

    trace: str | None
    host: str
    tiers: list[str]
    policy: str
    kv_bytes_per_token: str
    block_tokens: int | None
    is_timed: bool
    gpu: str | None
    prefill: float | None
    prefill_times: str | None
    decode_step: str
    step_tokens: int
    running: int
    host_speed: str | None
    speed_up: float
    limit: int | None
    calibrate: str | None
    fleet: FleetWishes


def run_replay(wishes: Wishes, *, as_json: bool) -> int:
    """Replay the trace, or measure this machine. Raises `SettingError`, `TraceError` and
    `NotMeasured` for what the user can change."""
    if wishes.trace is None and wishes.calibrate is None:
        raise SettingError("TRACE", "give a trace, or --calibrate DIR to measure this machine")
    settings_of(wishes, None)  # refuse wrong options before anything is measured
    measured = _measure(wishes.calibrate) if wishes.calibrate is not None else None
    if wishes.trace is None:
        assert measured is not None
        _print_calibration(measured, as_json=as_json)
        return 0
    settings = settings_of(wishes, measured)
    try:
        with open_trace(wishes.trace, wishes.block_tokens) as trace:
            settings.check(trace.block_tokens)
            began = time.monotonic()
            figures = _replay(trace, settings, wishes.limit)
            seconds = time.monotonic() - began
    except OSError as error:
        raise TraceError(explain_os_error(wishes.trace, error, "a trace")) from None
    if as_json:
        document = {
            "trace": wishes.trace,
            "settings": asdict(settings),
            "wall_seconds": round(seconds, 3),
            **figures.document(),
        }
        write(json.dumps(document, indent=2) + "\n")
    else:
        write(_as_text(wishes.trace, figures, seconds))
    finish()
    return 0 if figures.is_complete else _INTERRUPTED


def explain_os_error(path: str, error: OSError, what: str) -> str:
    """Why a file cannot be read, and the remedy. `what`: what it should be."""
    if isinstance(error, FileNotFoundError):
        return f"there is no {path}: give the path of {what}"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a directory: give the path of {what}"
    if isinstance(error, PermissionError):
        return f"no permission to read {path} as uid {os.geteuid()}: run this as its owner"
    return f"{path} cannot be read: {error.strerror or error}"


def _replay(trace: Trace, settings: ReplaySettings, limit: int | None) -> Figures:
    requests = islice(trace.requests(), limit)
    fleet = settings.fleet
    run: Fleet | TimedEngine | Counting
    if fleet is not None:
        load = FleetLoad(requests, fleet.copies, fleet.common_percent)
        run = Fleet(settings, trace.block_tokens)
        return _run(run, run.serve(load), load.progress, _MOST_WARNINGS)
    run = (TimedEngine if settings.is_timed else Counting)(settings, trace.block_tokens)
    return _run(run, run.serve(requests), trace.progress)


def _run(
    run: Fleet | TimedEngine | Counting,
    serving: Iterator[None],
    progress: Callable[[], tuple[int, int]],
    most_warnings: int | None = None,
) -> Figures:
    """Serve until the end or until Ctrl-C, and show how far it is."""
    is_complete = True
    with warnings_as_notes("kvtier replay", most_warnings), shown_share() as show:
        try:
            show_at = 0.0
            for _ in serving:
                if time.monotonic() >= show_at:
                    show(*progress())
                    show_at = time.monotonic() + _SHOWN_EVERY_S
        except KeyboardInterrupt:
            is_complete = False
    figures = run.end()
    figures.is_complete = is_complete
    return figures


# --- options -----------------------------------------------------------------------------------


def settings_of(wishes: Wishes, measured: Calibration | None) -> ReplaySettings:
    """The settings. Speeds that are not given are those measured, or else the defaults."""
    if wishes.limit is not None:
        require(wishes.limit, "--limit", "a whole number from 1 to 1e12")
    if wishes.block_tokens is not None:
        require(wishes.block_tokens, "--block-tokens", "a whole number from 1 to 1e12")
    require(wishes.step_tokens, "--step-tokens", "a whole number from 1 to 1e12")
    require(wishes.running, "--running", "a whole number from 1 to 1e12")
    require(wishes.speed_up, "--speed-up", "a number from 0.001 to 1e12; 2 is twice as fast")
    given_speed = wishes.host_speed
    if given_speed is None and measured is not None:
        host_speed = measured.copy_bytes_per_s
    else:
        host_speed = float(size_of(given_speed or _HOST_SPEED, "--host-speed", is_speed=True))
    tiers = tiers_of(wishes.tiers, measured)
    return ReplaySettings(
        host=TierSettings(
            name="host",
            num_bytes=size_of(wishes.host, "--host"),
            policy=wishes.policy,
            read_bytes_per_s=host_speed,
            write_bytes_per_s=host_speed,
        ),
        tiers=tiers,
        kv_bytes_per_token=size_of(wishes.kv_bytes_per_token, "--kv-bytes-per-token"),
        gpu_bytes=None if wishes.gpu is None else size_of(wishes.gpu, "--gpu"),
        engine=engine_of(
            wishes.prefill,
            wishes.prefill_times,
            EngineSettings(
                decode_step_s=seconds_of(wishes.decode_step, "--decode-step", may_be_zero=False),
                step_tokens=wishes.step_tokens,
                most_running=wishes.running,
            ),
        ),
        is_timed=wishes.is_timed,
        speed_up=wishes.speed_up,
        fleet=fleet_of(wishes.fleet),
    )


# --- calibration -------------------------------------------------------------------------------


def _measure(folder: str) -> Calibration:
    with shown_share() as show:
        measured = calibrate(folder, show)
    mount = mount_of(Path(folder).resolve())
    if mount.is_in_memory:
        note(
            f"kvtier replay: {folder} is in memory ({mount.kind}), so these are not the figures of "
            "a disk: give a directory on the disk itself"
        )
    elif not measured.is_direct:
        note(
            "kvtier replay: this file system has no direct I/O, so the page cache has made the "
            "disk look faster than it is: give a directory on the disk itself"
        )
    return measured


def _print_calibration(measured: Calibration, *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(measured._asdict() | {"prefill_tokens_per_s": None}, indent=2) + "\n")
    else:
        write(
            f"host copies   {_rate(measured.copy_bytes_per_s)}, one thread\n"
            f"disk reads    {_rate(measured.read_bytes_per_s)}\n"
            f"disk writes   {_rate(measured.write_bytes_per_s)}\n"
            f"disk latency  {as_duration(measured.latency_s)}\n\n"
            f"--host-speed {_flag(measured.copy_bytes_per_s)} "
            f"--tier disk:SIZE,read_speed={_flag(measured.read_bytes_per_s)},"
            f"write_speed={_flag(measured.write_bytes_per_s)},"
            f"latency={measured.latency_s * 1e6:.0f}us\n"
        )
    finish()
    note(
        "kvtier replay: how fast your model computes prompts cannot be measured without the model: "
        "send an idle engine a short and a long prompt, and give --prefill-times. Copies to a GPU "
        "were not measured either: with a GPU, run `python -m "
        "kvtier.cpu.gpu_selftest`, and give --host-speed"
    )


def _flag(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.0f}MB"


# --- the result as text ------------------------------------------------------------------------


def _as_text(name: str, figures: Figures, seconds: float) -> str:
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    for line in _lines(name, figures, seconds, console.print):
        console.print(line, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _lines(
    name: str, figures: Figures, seconds: float, show: Callable[[Any], None]
) -> Iterator[str]:
    if not figures.is_complete:
        yield "Ended by Ctrl-C: these are the figures until then."
    yield (
        f"{printable(name)}: {figures.num_requests:,} requests, {figures.num_references:,} blocks "
        f"of {figures.block_tokens} tokens, {as_size(figures.block_bytes)} each"
    )
    yield ""
    show(_table(figures))
    yield ""
    saved, prompt = figures.saved_tokens, figures.prompt_tokens
    yield f"tokens saved   {saved:,} of {prompt:,} ({_percent(saved, prompt)})"
    if figures.timing is not None:
        yield from _timing_lines(figures.timing, "engine" if figures.fleet is None else "engines")
    if figures.fleet is not None:
        yield from _fleet_lines(figures.fleet, figures.block_bytes)
    for place in figures.places:
        yield from _remarks(place)
    if seconds > 0:
        rate = figures.num_references / seconds
        yield f"replayed in    {seconds:.1f} s, {rate:,.0f} block references per s"


def _remarks(place: PlaceFigures) -> Iterator[str]:
    """What was not loaded from a place, or not written there."""
    if place.declined_blocks:
        yield (
            f"{place.name}: {place.declined_blocks:,} blocks found there were computed, which "
            "was expected to be faster"
        )
    if place.refused_blocks:
        yield (
            f"{place.name}: {place.refused_blocks:,} blocks were not written: no room, or too "
            "slow for what arrived"
        )
    if place.left_out_blocks:
        yield (f"{place.name}: {place.left_out_blocks:,} blocks were left out by its write policy")
    if place.unwritten_blocks:
        yield (
            f"{place.name}: {place.unwritten_blocks:,} blocks left host memory before they "
            "could be written"
        )
    if place.over_budget_blocks:
        yield (
            f"{place.name}: {place.over_budget_blocks:,} blocks were not written, to keep its "
            "write_budget"
        )


def _table(figures: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT_COLUMNS else "right")
    block_bytes = figures.block_bytes
    if figures.gpu is not None:
        size = as_size(figures.gpu.capacity_blocks * block_bytes)
        hits = _percent(figures.gpu.hit_blocks, figures.num_references)
        table.add_row("gpu", size, "lru", "", hits, "", "", "")
    for place in figures.places:
        table.add_row(
            place.name,
            as_size(place.capacity_blocks * block_bytes),
            place.policy,
            place.write_policy or "",
            _percent(place.hit_blocks, figures.num_references),
            as_size(place.written_blocks * block_bytes),
            as_size(place.read_blocks * block_bytes),
            "-" if place.written_per_read is None else f"{place.written_per_read:.2f}",
        )
    computed = figures.num_references - figures.hit_blocks
    table.add_row("computed", "", "", "", _percent(computed, figures.num_references), "", "", "")
    return table


def _timing_lines(timing: Timing, who: str) -> Iterator[str]:
    document = timing.document()
    ttft = document["ttft_s"]
    shown = ", ".join(f"{name} {as_duration(value)}" for name, value in ttft.items())
    yield f"first token    {shown}"
    yield (
        f"throughput     {document['requests_per_s']:.2f} requests, "
        f"{document['prompt_tokens_per_s']:,.0f} prompt tokens and "
        f"{document['output_tokens_per_s']:,.0f} output tokens per s"
    )
    busy = document["busy_percent"]
    yield f"{who:<15}busy {busy:.1f} % of {timing.seconds:,.0f} s"
    if busy > _OVERLOADED_PERCENT:
        has = "engine has" if who == "engine" else "engines have"
        serves = "it serves" if who == "engine" else "they serve"
        yield (
            f"The {has} hardly a pause: requests arrive about as fast as {serves} them, or "
            "faster. Times to first token then show the queue. A lower --speed-up lowers the load."
        )


def _fleet_lines(fleet: FleetFigures, block_bytes: int) -> Iterator[str]:
    engines, settings = fleet.engines, fleet.settings
    hits = [engine.hit_percent for engine in engines]
    busy = [engine.busy_s for engine in engines if engine.busy_s is not None]
    yield (
        f"fleet          {len(engines)} engines, router {settings.router}, {settings.copies} "
        f"copies of the trace, {fleet.common_references_percent:.1f} % of the blocks common to all"
    )
    spread = f"hits of one engine {min(hits):.1f} to {max(hits):.1f} %"
    if busy and fleet.seconds:
        least, most = (100 * seconds / fleet.seconds for seconds in (min(busy), max(busy)))
        spread += f", busy {least:.1f} to {most:.1f} %"
    yield f"balance        {spread}"
    if fleet.pools:
        shown = [as_size(fleet.link_bytes)]
        for what, num_bytes in [
            ("per engine", fleet.link_bytes / len(engines)),
            ("on the busiest link, one way", fleet.busiest_link_bytes),
        ]:
            rate = fleet.per_second(num_bytes)
            if rate is not None:
                shown.append(f"{_rate(rate)} {what}")
        yield f"links          {', '.join(shown)}"
    for pool in fleet.pools:
        foreign = _percent(pool.foreign_blocks, pool.read_blocks)
        local = _percent(pool.local_blocks, pool.read_blocks)
        yield (
            f"{pool.name:<15}{foreign} of what was read had been stored by another engine"
            + (f", {local} was in the reader's own part" if pool.sharing == Sharing.LENT else "")
        )
    kept, distinct = fleet.kept_blocks * block_bytes, fleet.distinct_blocks * block_bytes
    yield (
        f"kept           {as_size(kept)} at the end, {as_size(kept - distinct)} of it more than "
        f"once, {as_size((fleet.host_blocks - fleet.distinct_host_blocks) * block_bytes)} in "
        "several host memories"
    )
    if settings.failures:
        lost = sum(pool.lost_blocks for pool in fleet.pools)
        yield (
            f"failures       {len(settings.failures)}: {fleet.num_rerouted:,} requests began anew "
            f"on another engine, {lost:,} blocks of shared tiers were lost"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def as_duration(seconds: float) -> str:
    """A time as text, such as "120 ms"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB per s"
