"""What `kvtier top` shows, as lines that fit a terminal of any size."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvtier.cli.watch.overview import (
    BREAKER,
    COMPUTED,
    SWITCHED_OFF,
    EngineLine,
    Overview,
    RequestLine,
    TierLine,
)
from kvtier.config.errors import printable
from kvtier.config.sizes import as_size

__all__ = ["Screen"]

_LEAST_WIDE, _MOST_WIDE = 40, 120
_WIDE = 76
"""Columns from which rates stand beside the bar, and not below it."""
_MOST_BAR = 40
_MOST_ENGINES = 8
_LABEL, _ROOM = 11, 17
_INDENT = _LABEL + 1
_STATES = {"working": "green", "idle": "cyan", "silent": "bold yellow", "gone": "bold red"}
_OF_BREAKER = dict(
    zip((*BREAKER, SWITCHED_OFF), ("green", "yellow", "bold red", "cyan"), strict=True)
)


class Screen:
    """One picture. A rich renderable."""

    def __init__(
        self,
        overview: Overview,
        notice: str | None = None,
        height: int = 0,
        ascii_only: bool = False,
    ) -> None:
        """`notice`: shown first. `height`: the most lines; 0: as many as there are."""
        self._overview, self._notice, self._height = overview, notice, height
        self._ascii_only = ascii_only

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(_LEAST_WIDE, min(options.max_width, _MOST_WIDE))
        picture = _Picture(self._overview, width, self._ascii_only or options.ascii_only)
        lines = list(picture.lines(self._notice))
        if self._height and len(lines) > self._height:
            kept = self._height - 1
            lines = [*lines[:kept], Text(f"... {len(lines) - kept} more lines", style="dim")]
        for number, line in enumerate(lines):
            line.truncate(options.max_width, overflow="crop")
            line.no_wrap, line.end = True, "" if number == len(lines) - 1 else "\n"
            yield line


class _Picture:
    def __init__(self, overview: Overview, width: int, ascii_only: bool) -> None:
        self._its, self._width = overview, width
        self._full, self._rest, self._dot = ("#", ".", "-") if ascii_only else ("━", "─", "·")

    def lines(self, notice: str | None) -> Iterator[Text]:
        its = self._its
        yield from self._head()
        for text in (notice, its.problem):
            if text:
                yield from _wrapped(text, self._width, "bold red")
        if its.state == "empty":
            yield Text("No data yet: nothing has been stored or loaded since the start.", "yellow")
        if its.tiers:
            yield from self._served()
            yield from self._requests_now()
            yield Text()
            for tier in its.tiers:
                yield from self._tier(tier)
        if its.requests is not None:
            yield Text()
            yield from self._requests(its.requests)

    # --- the head ---------------------------------------------------------------------------------

    def _head(self) -> Iterator[Text]:
        its = self._its
        if not its.engines:
            yield self._spread(Text("kvtier top", "bold"), _clock(its.now_s))
            return
        models = ", ".join(dict.fromkeys(f"{e.model} {e.dtype}" for e in its.engines))
        title = Text.assemble(("kvtier top ", "bold"), printable(models))
        title.truncate(self._width - 9, overflow="ellipsis")
        yield self._spread(title, _clock(its.now_s))
        for engine in its.engines[:_MOST_ENGINES]:
            yield self._engine(engine)
        if (more := len(its.engines) - _MOST_ENGINES) > 0:
            yield Text(f"and {more} more", "dim")

    def _engine(self, engine: EngineLine) -> Text:
        line = Text(f"process {engine.pid}, up {_span(self._its.now_s - engine.started_s)}, ")
        line.append(engine.state, _STATES[engine.state])
        if engine.state == "idle":
            line.append(f": its last step ended {_span(engine.idle_s)} ago", "dim")
        elif engine.state != "working":
            line.append(f" for {_span(engine.idle_s)}; the figures are from before", "dim")
        return line

    def _served(self) -> Iterator[Text]:
        its = self._its
        if its.tokens_of_all:
            found = 1 - its.tokens_of_all.get(COMPUTED, 0.0)
            line = Text("found of prompts: ")
            line.append(f"{self._found_now()} now", "bold")
            line.append(f", {_percent(found)} in all", "dim")
            yield line
            sources = its.tokens or its.tokens_of_all
            parts = [f"{source} {_percent(share)}" for source, share in sources.items()]
            yield from _wrapped(
                ("now: " if its.tokens else "in all: ") + ", ".join(parts), self._width, "dim"
            )
            parts = []
            if its.saved_s:
                parts.append(f"computing saved: {_seconds(its.saved_s)}")
            if its.mean_wait_s is not None:
                parts.append(f"waits for tiers take {_seconds(its.mean_wait_s)}")
            yield from _wrapped(", ".join(parts), self._width, "")
        elif its.loaded_share_of_all is not None:
            now = "-" if its.loaded_share is None else _percent(its.loaded_share)
            line = Text("loaded, not computed: ")
            line.append(f"{now} of blocks now", "bold")
            line.append(f", {_percent(its.loaded_share_of_all)} in all", "dim")
            yield line

    def _requests_now(self) -> Iterator[Text]:
        its = self._its
        if its.served_percent < 100:
            text = f"kvtier serves {its.served_percent:g} % of the requests (kvtier switch --share)"
            yield from _wrapped(text, self._width, "cyan")
        if its.first_token_s:
            means = [f"{_seconds(s)} {half} kvtier" for half, s in its.first_token_s.items()]
            text = f"{its.requests_per_s:.3g} requests/s, first token after {', '.join(means)}"
            yield from _wrapped(text, self._width, "")

    def _found_now(self) -> str:
        tokens = self._its.tokens
        return _percent(1 - tokens.get(COMPUTED, 0.0)) if tokens else "-"

    # --- tiers ------------------------------------------------------------------------------------

    def _tier(self, tier: TierLine) -> Iterator[Text]:
        is_wide = self._width >= _WIDE
        rates = self._rates(tier)
        label = set_cell_size(printable(tier.tier), _LABEL)
        size = self._width - _LABEL - _ROOM - 2 - (rates.cell_len + 1 if is_wide else 0)
        bar = self._bar(tier.used_share, max(4, min(_MOST_BAR, size)))
        line = Text.assemble((label, "bold"), " ", bar, " ", f"{_room(tier):<{_ROOM}}")
        if is_wide:
            yield self._spread(line, rates)
        else:
            yield line
            yield Text(" " * _INDENT).append_text(rates)
        yield from self._packed(self._details(tier))
        style = "bold red" if tier.is_in_trouble else "yellow"
        troubles = tier.troubles.items()
        yield from self._packed(Text(f"{what}: {_count(n)}", style) for what, n in troubles)

    def _rates(self, tier: TierLine) -> Text:
        return Text.assemble(
            ("load", "dim"),
            f"{_rate(tier.load_bytes_per_s):>11}",
            ("  store", "dim"),
            f"{_rate(tier.store_bytes_per_s):>11}",
        )

    def _bar(self, share: float | None, size: int) -> Text:
        if share is None:
            return Text(" " * size)
        full = min(size, round(share * size + 0.499)) if share else 0
        return Text.assemble((self._full * full, "blue"), (self._rest * (size - full), "dim"))

    def _details(self, tier: TierLine) -> Iterator[Text]:
        if tier.loads is not None and tier.loads == tier.stores:
            yield Text(tier.loads, _OF_BREAKER[tier.loads])
        else:
            for word, state in (("loads", tier.loads), ("stores", tier.stores)):
                if state is not None:
                    yield Text(f"{word} {state}", _OF_BREAKER[state])
        for count, word in (
            (tier.hit_blocks, "hits"),
            (tier.loaded_blocks, "loaded"),
            (tier.stored_blocks, "stored"),
            (tier.evicted_blocks or None, "evicted"),
            (tier.queued_blocks or None, "queued"),
            (tier.loading_blocks or None, "loading"),
        ):
            if count is not None:
                yield Text(f"{_count(count)} {word}")
        if tier.read_back_bytes is not None and tier.stored_bytes:
            yield Text(f"{_percent(tier.read_back_bytes / tier.stored_bytes)} read back")
        if tier.mean_load_s is not None:
            yield Text(f"a load takes {_seconds(tier.mean_load_s)}")
        for text, counts in (("declined", tier.declined), ("not stored", tier.not_stored)):
            for each in _counts(counts):
                yield Text(f"{text}: {each}")

    def _packed(self, parts: Iterable[Text]) -> Iterator[Text]:
        """Parts beside each other, on as many lines as they need."""
        between = Text(f" {self._dot} ", "dim")
        line = Text()
        for part in parts:
            if line and _INDENT + line.cell_len + between.cell_len + part.cell_len > self._width:
                yield Text(" " * _INDENT).append_text(line)
                line = Text()
            if line:
                line.append_text(between)
            line.append_text(part)
        if line:
            yield Text(" " * _INDENT).append_text(line)

    # --- requests ---------------------------------------------------------------------------------

    def _requests(self, requests: Sequence[RequestLine]) -> Iterator[Text]:
        room = self._width - 40
        head = f"{'request':<{room}}{'state':>9}{'tokens':>9}{'found':>8}{'waited':>10}"
        yield Text(head, "dim")
        for its in requests:
            name = set_cell_size(printable(its.id), room - 1)
            tokens = "-" if its.tokens is None else f"{its.tokens:,}"
            found = "-" if its.found_share is None else _percent(its.found_share)
            waited = "-" if its.waited_s is None else _seconds(its.waited_s)
            yield Text(f"{name} {its.state:>9}{tokens:>9}{found:>8}{waited:>10}")
        if not requests:
            yield Text("none yet", "dim")

    def _spread(self, left: Text, right: Text) -> Text:
        gap = max(1, self._width - left.cell_len - right.cell_len)
        return Text.assemble(left, " " * gap, right)


# --- texts ---------------------------------------------------------------------------------------


def _seconds(seconds: float) -> str:
    """A short duration, such as `12 ms`."""
    if seconds < 1:
        milliseconds = max(0.0, seconds * 1e3)
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else _span(seconds)


def _span(seconds: float) -> str:
    """A long duration, such as `2 h 5 min`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _count(count: float) -> str:
    """A number of blocks, such as `12,345` or `1.2 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rate(bytes_per_s: float) -> str:
    return "-" if bytes_per_s < 1 else as_size(bytes_per_s) + "/s"


def _room(tier: TierLine) -> str:
    if tier.used_bytes is None:
        return "" if tier.capacity_bytes is None else f"of {as_size(tier.capacity_bytes)}"
    if tier.used_share is None:
        return as_size(tier.used_bytes)
    return f"{_percent(tier.used_share):>5} of {as_size(tier.capacity_bytes or 0)}"


def _counts(counts: Mapping[str, float]) -> list[str]:
    return [f"{_count(n)} {name.replace('_', ' ')}" for name, n in counts.items()]


def _clock(when_s: float) -> Text:
    return Text(time.strftime("%H:%M:%S", time.localtime(when_s)), "dim")


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    for line in textwrap.wrap(printable(text), width):
        yield Text(line, style)
