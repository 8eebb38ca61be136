"""Runs `kvtier plan` with the options as given, prints the result, and returns the exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.output import finish, write
from kvtier.cli.replay.command import as_duration, explain_os_error
from kvtier.cli.replay.options import require, size_of, tiers_of
from kvtier.cli.store.terminal import shown_share
from kvtier.config.sizes import as_size
from kvtier.cpu.hit_curve import read_boards
from kvtier.replay.counting import Counting
from kvtier.replay.figures import Figures
from kvtier.replay.plan import NUMBER_BYTES, TierPlan, host_sizes, read_model
from kvtier.replay.settings import ReplaySettings, SettingError, TierSettings
from kvtier.replay.trace import TraceError, open_trace

__all__ = ["PlanWishes", "run_engines", "run_plan"]

_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """The options, as the user has written them."""

    model: str | None
    host: str
    host_speed: str
    tiers: list[str]
    conversation: int
    kv_dtype: str | None
    kv_bytes_per_token: str | None
    prefill: float | None
    trace: str | None
    block_tokens: int | None
    policy: str
    limit: int | None


def run_plan(wishes: PlanWishes, *, as_json: bool) -> int:
    """Print the plan. Raises `SettingError`, `ModelError` and `TraceError` for what the user can
    change."""
    for value, option in (
        (wishes.conversation, "--conversation"),
        (wishes.prefill, "--prefill"),
        (wishes.block_tokens, "--block-tokens"),
        (wishes.limit, "--limit"),
    ):
        if value is not None:
            require(value, option, "a number above 0, up to 1e12")
    bytes_per_token, has_windows = _bytes_per_token(wishes)
    speed = float(size_of(wishes.host_speed, "--host-speed", is_speed=True))
    host = TierSettings(
        name="host",
        num_bytes=size_of(wishes.host, "--host"),
        policy=wishes.policy,
        read_bytes_per_s=speed,
        write_bytes_per_s=speed,
    )
    settings = ReplaySettings(
        host=host,
        tiers=tiers_of(wishes.tiers),
        kv_bytes_per_token=bytes_per_token,
        is_timed=False,
    )
    plans = [
        TierPlan.of(tier, bytes_per_token, wishes.conversation) for tier in (host, *settings.tiers)
    ]
    curve = list(_sweep(wishes, settings)) if wishes.trace is not None else []
    if as_json:
        document = {
            "kv_bytes_per_token": bytes_per_token,
            "is_upper_bound": has_windows,
            "conversation_tokens": wishes.conversation,
            "prefill_tokens_per_s": wishes.prefill,
            "tiers": [asdict(plan) for plan in plans],
            "sweep": [{"host_bytes": size, **figures.document()} for size, figures in curve],
        }
        write(json.dumps(document, indent=2) + "\n")
    else:
        write(_as_text(wishes, bytes_per_token, has_windows, plans, curve))
    finish()
    return 0


def _bytes_per_token(wishes: PlanWishes) -> tuple[int, bool]:
    """The size, and whether long prompts need less."""
    if (wishes.model is None) == (wishes.kv_bytes_per_token is None):
        raise SettingError("MODEL", "give a model's config.json, or else --kv-bytes-per-token")
    if wishes.kv_dtype is not None and wishes.kv_dtype not in NUMBER_BYTES:
        allowed = ", ".join(NUMBER_BYTES)
        raise SettingError("--kv-dtype", f'"{wishes.kv_dtype}": give one of {allowed}')
    if wishes.model is None:
        return size_of(str(wishes.kv_bytes_per_token), "--kv-bytes-per-token"), False
    try:
        model = read_model(wishes.model, wishes.kv_dtype)
    except OSError as error:
        raise SettingError(
            "MODEL", explain_os_error(wishes.model, error, "a model's config.json")
        ) from None
    return model.bytes_per_token, model.has_windows


def _sweep(wishes: PlanWishes, settings: ReplaySettings) -> Iterator[tuple[int, Figures]]:
    """The figures of the trace with each size of host memory."""
    path = str(wishes.trace)
    try:
        with open_trace(path, wishes.block_tokens) as trace:
            block_tokens = trace.block_tokens
        settings.check(block_tokens)
        sizes = list(host_sizes(settings.host.num_bytes, settings.block_bytes(block_tokens)))
        with shown_share() as show:
            for number, size in enumerate(sizes):
                show(number, len(sizes))
                with open_trace(path, wishes.block_tokens) as trace:
                    counting = Counting(settings.with_host_bytes(size), block_tokens)
                    for _ in counting.serve(islice(trace.requests(), wishes.limit)):
                        pass
                yield size, counting.end()
    except OSError as error:
        raise TraceError(explain_os_error(path, error, "a trace")) from None


def _as_text(
    wishes: PlanWishes,
    bytes_per_token: int,
    has_windows: bool,
    plans: list[TierPlan],
    curve: list[tuple[int, Figures]],
) -> str:
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, soft_wrap=True)

    say(
        f"KV cache: {as_size(bytes_per_token)} per token, "
        f"{as_size(bytes_per_token * wishes.conversation)} per conversation of "
        f"{wishes.conversation:,} tokens"
    )
    if has_windows:
        say("Some layers keep only the last tokens: long prompts need less than this.")
    say("")
    console.print(_tier_table(wishes, plans))
    if wishes.prefill is None:
        say(
            "",
            "Loading is faster if your engine computes fewer prompt tokens per second than in the "
            "last column; --prefill N compares. On a busy engine, slower tiers help, too: loading "
            "leaves the GPU to others.",
        )
    if curve:
        first = curve[0][1]
        say(
            "",
            f"{wishes.trace}: {first.num_requests:,} requests, {first.num_references:,} blocks; "
            "hits by size of host memory",
            "",
        )
        console.print(_curve_table(curve))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    return table


def _tier_table(wishes: PlanWishes, plans: list[TierPlan]) -> Table:
    columns = ["tier", "size", "tokens", "conversations", "loads one in", "computes below"]
    if wishes.prefill is not None:
        columns[-1:] = ["computed in", "loading is"]
    table = _table(*columns)
    for plan in plans:
        row: list[Any] = [
            plan.name,
            as_size(plan.num_bytes),
            f"{plan.num_tokens:,}",
            f"{plan.num_conversations:,}",
            as_duration(plan.load_s),
        ]
        if wishes.prefill is None:
            row.append(f"{plan.break_even_tokens_per_s:,.0f} tokens/s")
        else:
            factor = plan.break_even_tokens_per_s / wishes.prefill
            row.append(as_duration(wishes.conversation / wishes.prefill))
            row.append(f"{factor:.1f}x faster" if factor >= 1 else f"{1 / factor:.1f}x slower")
        table.add_row(*row)
    return table


def _curve_table(curve: list[tuple[int, Figures]]) -> Table:
    names = [place.name for place in curve[0][1].places]
    table = _table("host memory", *names, *(["together"] if len(names) > 1 else []), "tokens saved")
    for size, figures in curve:
        count = figures.num_references or 1
        hits = [f"{100 * place.hit_blocks / count:.1f} %" for place in figures.places]
        if len(names) > 1:
            hits.append(f"{figures.hit_percent:.1f} %")
        table.add_row(as_size(size), *hits, f"{figures.saved_tokens:,}")
    return table


# --- running engines ----------------------------------------------------------------------------


def run_engines(*, as_json: bool) -> int:
    """Print the hit curves of the engines that run here. Raises `SettingError` if there is none."""
    engines = read_boards()
    if not engines:
        raise SettingError(
            "--engine",
            "no engine with kvtier runs here: run the command as the user of the engine, and in "
            "its container",
        )
    if as_json:
        write(json.dumps({"engines": engines}, indent=2) + "\n")
    else:
        write("\n".join(map(_engine_as_text, engines)))
    finish()
    return 0


def _engine_as_text(engine: dict[str, Any]) -> str:
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    model, engine_id = (_printable(engine[name]) for name in ("model", "engine_id"))
    console.print(
        f"process {engine['pid']}, {model}, engine {engine_id}: "
        f"{engine['num_blocks']:,} blocks of {engine['block_tokens']} tokens in prompts",
        soft_wrap=True,
    )
    sizes = engine["sizes"]
    if any(size["hit_ratio"] is None for size in sizes):
        console.print("Too few requests have ended for an estimate: try again later.")
    else:
        console.print("")
        table = _table("down to", "its size", "blocks together", "found")
        for size in sizes:
            factor = size["factor"]
            table.add_row(
                _printable(size["place"]),
                "now" if factor == 1 else f"x {factor:g}",
                as_size(size["num_blocks"] * engine["block_bytes"]),
                f"{100 * size['hit_ratio']:.1f} %",
            )
        console.print(table)
        ratio = {size["factor"]: size["hit_ratio"] for size in sizes if size["is_host"]}
        console.print(
            "",
            f"With twice the host memory, {100 * ratio[2]:.0f} % of the blocks of prompts would be "
            f"found there instead of {100 * ratio[1]:.0f} %.",
            sep="\n",
            soft_wrap=True,
        )
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _printable(name: object) -> str:
    """A name from another process, without what could control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(name))
