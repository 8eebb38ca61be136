"""What `kvtier plan` has found out: as text, as entries of the JSON document, and as panels of the
picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.plan.chart import Curve, Panel
from kvtier.cli.replay.command import as_duration
from kvtier.config.errors import printable
from kvtier.config.sizes import as_size
from kvtier.replay.figures import Figures
from kvtier.replay.plan import Point, Sizes, Target, TierPlan
from kvtier.replay.settings import ReplaySettings

__all__ = ["Plan", "Study", "as_text", "engine_as_text", "panels", "point_document"]

_WIDTH = 120
_GB = 1e9
_LONGEST_LIFE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What tiers hold for a model."""

    bytes_per_token: int
    is_upper_bound: bool
    """True if long prompts need less than this for each token."""
    conversation_tokens: int
    computed_s: float | None
    """Seconds to compute one conversation; None if the engine's speed is not known."""
    tiers: list[TierPlan]


@dataclass(slots=True)
class Study:
    """What replays of a trace have shown."""

    path: str
    names: list[str]
    """Of host memory, and of each tier."""
    policies: list[str]
    settings: ReplaySettings
    prices: dict[str, float]
    """Of a GB of each place; empty if the user has given none."""
    endurances: dict[str, int]
    """The bytes that may be written to a tier in its life."""
    most_hits: float = 0.0
    """The percentage of blocks that are hits if nothing is ever evicted."""
    curves: list[dict[str, list[Point]]] = field(default_factory=list)
    """For each place, by policy: replays with several sizes of this place."""
    target: Target | None = None
    recommended: Point | None = None

    @property
    def given(self) -> Sizes:
        settings = self.settings
        return (settings.host.num_bytes, *(tier.num_bytes for tier in settings.tiers))

    @property
    def points(self) -> list[Point]:
        """All points of the curves."""
        return [point for place in self.curves for curve in place.values() for point in curve]

    @property
    def largest_hits(self) -> float:
        """The highest percentage of hits in any curve."""
        return max(point.figures.hit_percent for point in self.points)

    def cost(self, sizes: Sizes) -> float | None:
        if not self.prices:
            return None
        return sum(
            self.prices[name] * size / _GB for name, size in zip(self.names, sizes, strict=True)
        )

    def lives(self, point: Point) -> dict[str, float | None]:
        """The years that each tier with a known endurance lasts."""
        return {
            name: point.life_years(self.names.index(name), endurance)
            for name, endurance in self.endurances.items()
        }


def point_document(study: Study, point: Point) -> dict[str, Any]:
    """One replay, for JSON."""
    cost = study.cost(point.sizes)
    written = [point.written_per_day(place) for place in range(len(study.names))]
    return {
        "policy": point.policy,
        "bytes": dict(zip(study.names, point.sizes, strict=True)),
        "cost": None if cost is None else round(cost, 4),
        "written_bytes_per_day": {
            name: None if per_day is None else round(per_day)
            for name, per_day in zip(study.names, written, strict=True)
        },
        "life_years": {
            name: None if years in (None, inf) else round(years or 0.0, 4)
            for name, years in study.lives(point).items()
        },
        **point.figures.document(),
    }


# --- the picture -------------------------------------------------------------------------------


def panels(study: Study) -> list[list[Panel]]:
    """A row of panels with hits, a panel for each place; if the replays are timed, a second row
    with times to first token."""
    target = study.target or Target()
    rows = [[_hits_panel(study, place, target.hit_percent) for place in range(len(study.names))]]
    if study.settings.is_timed:
        rows.append([_ttft_panel(study, n, target.ttft_s) for n in range(len(study.names))])
    return rows


def _hits_panel(study: Study, place: int, target: float | None) -> Panel:
    by_policy = study.curves[place]
    curves = [
        Curve(policy if len(by_policy) > 1 else "together", _curve(points, place, "hit_percent"))
        for policy, points in by_policy.items()
    ]
    if len(by_policy) == 1:
        (points,) = by_policy.values()
        parts = _parts(points[0].figures)
        for n, name in enumerate(parts if len(parts) > 1 else []):
            shares = [
                (float(point.sizes[place]), list(_parts(point.figures).values())[n])
                for point in points
            ]
            curves.append(Curve(name, shares))
    return _panel(study, place, "hits, % of blocks", curves, target)


def _ttft_panel(study: Study, place: int, target_s: float | None) -> Panel:
    curves = [
        Curve(policy, _curve(points, place, "ttft_s"))
        for policy, points in study.curves[place].items()
    ]
    return _panel(study, place, "first token of 9 in 10 requests within, s", curves, target_s)


def _panel(study: Study, place: int, what: str, curves: list[Curve], target: float | None) -> Panel:
    recommended = study.recommended
    return Panel(
        study.names[place],
        what,
        curves,
        target,
        study.given[place],
        None if recommended is None else recommended.sizes[place],
    )


def _curve(points: list[Point], place: int, what: str) -> list[tuple[float, float]]:
    values = []
    for point in points:
        timing = point.figures.timing
        value = (
            point.figures.hit_percent if what == "hit_percent" or timing is None else timing.p90_s
        )
        values.append((float(point.sizes[place]), value))
    return values


def _parts(figures: Figures) -> dict[str, float]:
    """The percentage of blocks that were hits in each place, by its name."""
    count = figures.num_references or 1
    gpu = {} if figures.gpu is None else {"gpu": 100 * figures.gpu.hit_blocks / count}
    return gpu | {place.name: 100 * place.hit_blocks / count for place in figures.places}


# --- text --------------------------------------------------------------------------------------


def as_text(plan: Plan, study: Study | None) -> str:
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    for part in (*_plan_parts(plan), *(() if study is None else _study_parts(study))):
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _plan_parts(plan: Plan) -> Iterator[str | Table]:
    per_token = plan.bytes_per_token
    yield (
        f"KV cache: {as_size(per_token)} per token, "
        f"{as_size(per_token * plan.conversation_tokens)} per conversation of "
        f"{plan.conversation_tokens:,} tokens"
    )
    if plan.is_upper_bound:
        yield "Some layers keep only the last tokens: long prompts need less than this."
    yield ""
    yield _tier_table(plan)
    if plan.computed_s is None:
        yield ""
        yield (
            "Loading is faster if your engine computes fewer prompt tokens per second than in the "
            "last column; --prefill N compares. On a busy engine, slower tiers help, too: loading "
            "leaves the GPU to others."
        )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    return table


def _tier_table(plan: Plan) -> Table:
    columns = ["tier", "size", "tokens", "conversations", "loads one in", "computes below"]
    if plan.computed_s is not None:
        columns[-1:] = ["computed in", "loading is"]
    table = _table(*columns)
    for tier in plan.tiers:
        row = [
            tier.name,
            as_size(tier.num_bytes),
            f"{tier.num_tokens:,}",
            f"{tier.num_conversations:,}",
            as_duration(tier.load_s),
        ]
        if plan.computed_s is None:
            row.append(f"{tier.break_even_tokens_per_s:,.0f} tokens/s")
        else:
            factor = plan.computed_s / tier.load_s
            row.append(as_duration(plan.computed_s))
            row.append(f"{factor:.1f}x faster" if factor >= 1 else f"{1 / factor:.1f}x slower")
        table.add_row(*row)
    return table


def _study_parts(study: Study) -> Iterator[str | Table]:
    first = study.points[0].figures
    yield ""
    yield (
        f"{printable(study.path)}: {first.num_requests:,} requests, {first.num_references:,} "
        f"blocks; with unlimited memory, {study.most_hits:.1f} % of them would be hits"
    )
    for place, curves in enumerate(study.curves):
        yield ""
        yield _curve_table(study, place, curves)
    last = list(_writing_lines(study))
    if study.target is not None:
        last += _recommendation(study, study.target)
    yield from ["", *last] if last else []


def _curve_table(study: Study, place: int, curves: dict[str, list[Point]]) -> Table:
    """The sizes of one place, the others as given."""
    size_column = f"size of {study.names[place]}"
    if len(curves) > 1:
        table = _table(size_column, *curves)
        for points in zip(*curves.values(), strict=True):
            cells = [_hits_and_time(point.figures) for point in points]
            table.add_row(as_size(points[0].sizes[place]), *cells)
        return table
    (points_of_one,) = curves.values()
    names = list(_parts(points_of_one[0].figures))
    columns = [*names, *(["together"] if len(names) > 1 else []), "tokens saved"]
    columns += ["first token, 9 of 10"] if study.settings.is_timed else []
    columns += ["cost"] if study.prices else []
    columns += [f"life of {name}" for name in study.endurances]
    table = _table(size_column, *columns)
    for point in points_of_one:
        table.add_row(as_size(point.sizes[place]), *_cells(study, point))
    return table


def _cells(study: Study, point: Point) -> Iterator[str]:
    figures = point.figures
    parts = _parts(figures)
    yield from (f"{share:.1f} %" for share in parts.values())
    if len(parts) > 1:
        yield f"{figures.hit_percent:.1f} %"
    yield f"{figures.saved_tokens:,}"
    if figures.timing is not None:
        yield as_duration(figures.timing.p90_s)
    cost = study.cost(point.sizes)
    if cost is not None:
        yield f"{cost:,.2f}"
    yield from (_as_years(years) for years in study.lives(point).values())


def _hits_and_time(figures: Figures) -> str:
    hits = f"{figures.hit_percent:.1f} %"
    return hits if figures.timing is None else f"{hits}, {as_duration(figures.timing.p90_s)}"


def _as_years(years: float | None) -> str:
    if years is None:
        return "-"
    return f"{years:.1f} years" if years < _LONGEST_LIFE else f"over {_LONGEST_LIFE:.0f} years"


def _writing_lines(study: Study) -> Iterator[str]:
    """How much is written to each tier of the sizes given, and how long it lasts."""
    given = next(point for point in study.points if point.sizes == study.given)
    lives = study.lives(given)
    for place, figures in enumerate(given.figures.places[1:], start=1):
        per_day = given.written_per_day(place)
        if per_day is None:
            continue
        line = f"{figures.name}: {as_size(per_day)} written per day, at the trace's rate"
        if figures.name in lives:
            endurance = study.endurances[figures.name] / 1e12
            line += f"; {endurance:,.4g} TB last {_as_years(lives[figures.name])}"
        yield line
        if figures.refused_blocks:
            yield (
                f"{figures.name}: {figures.refused_blocks:,} blocks were not written: no room, or "
                "too slow for what arrived"
            )


def _recommendation(study: Study, target: Target) -> Iterator[str]:
    wanted = []
    if target.hit_percent is not None:
        wanted.append(f"{target.hit_percent:.1f} % hits")
    if target.ttft_s is not None:
        wanted.append(f"9 of 10 first tokens within {as_duration(target.ttft_s)}")
    aim = " and ".join(wanted)
    point = study.recommended
    if point is None:
        remedy = "give larger sizes, or a lower target"
        if (target.hit_percent or 0.0) > study.most_hits:
            remedy = f"no size hits more than {study.most_hits:.1f} %, so give a lower target"
        yield f"No combination of these sizes reaches {aim}: {remedy}."
        return
    sizes = ", ".join(
        f"{name} {as_size(size)}" for name, size in zip(study.names, point.sizes, strict=True)
    )
    facts = [f"{point.figures.hit_percent:.1f} % hits"]
    if point.figures.timing is not None:
        facts.append(f"9 of 10 first tokens within {as_duration(point.figures.timing.p90_s)}")
    cost = study.cost(point.sizes)
    if cost is not None:
        facts.append(f"cost {cost:,.2f}")
    facts += [f"{name} lasts {_as_years(years)}" for name, years in study.lives(point).items()]
    yield f"Recommended: {sizes}, eviction policy {point.policy}: {', '.join(facts)}"
    rule = "the cheapest" if study.prices else "the one with the least host memory"
    yield f"It is {rule} of the replayed combinations of these sizes with {aim}."


# --- running engines ----------------------------------------------------------------------------


def engine_as_text(engine: dict[str, Any]) -> str:
    """What a running engine estimates: its answer to the question `curve`."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    model, engine_id = (_printable(engine[name]) for name in ("model", "engine_id"))
    num_blocks = engine["num_blocks"]
    seen = f": {num_blocks:,} blocks of {engine['block_tokens']} tokens in prompts"
    console.print(
        # The engine shows the number from its first estimate on.
        f"process {engine['pid']}, {model}, engine {engine_id}{seen if num_blocks else ''}",
        soft_wrap=True,
    )
    sizes = engine["sizes"]
    if any(size["hit_ratio"] is None for size in sizes):
        console.print(
            "Too few requests have ended for an estimate, which takes some tens of thousands of "
            "blocks of prompts: try again later.",
            soft_wrap=True,
        )
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
