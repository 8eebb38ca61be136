"""Draws curves as a picture: SVG as text, and the same picture as PNG with Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, hypot, log2, log10
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from kvtier.config.sizes import as_size

__all__ = ["Curve", "Panel", "as_png", "as_svg"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind people can tell apart."""
_BLACK, _GREY, _PALE, _TARGET = "#222222", "#777777", "#dddddd", "#aa2222"

_PANEL_WIDTH, _PANEL_HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 76, 56
"""Room around the axes of a panel."""
_TITLE_HEIGHT = 44
_MOST_LABELS = 8
"""The most labels on an axis of sizes."""
_PIXELS, _FINER = 2, 2
"""Pixels of a PNG for each unit of length, and how much finer it is drawn, for smooth edges."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel."""

    name: str
    points: Sequence[tuple[float, float]]
    """Sizes in bytes, ascending, and values."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over the size of one place."""

    place: str
    what: str
    """What the values are, with their unit."""
    curves: Sequence[Curve]
    target: float | None = None
    """The value that is wanted."""
    given: float | None = None
    """The size that the user has given."""
    recommended: float | None = None


def as_svg(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """The picture as an SVG document. Each row of panels is drawn below the one before."""
    width, height = _extent(rows)
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>',
        f"<title>{escape(title)}</title>",
        f'<rect {size} fill="white"/>',
        '<g font-family="Helvetica, Arial, sans-serif">',
    ]
    for shape in _shapes(title, rows):
        if isinstance(shape, _Line):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
                f'stroke-width="{shape.width}" stroke-linejoin="round"/>'
            )
        elif isinstance(shape, _Dot):
            parts.append(
                f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius}" '
                f'fill="{shape.colour}"/>'
            )
        else:
            parts.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" '
                f'text-anchor="{_SVG_ANCHORS[shape.anchor]}" fill="{shape.colour}">'
                f"{escape(shape.text)}</text>"
            )
    return "\n".join([*parts, "</g>", "</svg>", ""])


def as_png(title: str, rows: Sequence[Sequence[Panel]]) -> bytes:
    """The same picture as PNG. Needs Pillow."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = _extent(rows)
    scale = _PIXELS * _FINER
    image = Image.new("RGB", (width * scale, height * scale), "white")
    draw: Any = ImageDraw.Draw(image)
    for shape in _shapes(title, rows):
        if isinstance(shape, _Line):
            points = [(x * scale, y * scale) for x, y in shape.points]
            draw.line(points, fill=shape.colour, width=round(shape.width * scale), joint="curve")
        elif isinstance(shape, _Dot):
            centre = (shape.x * scale, shape.y * scale)
            draw.circle(centre, shape.radius * scale, fill=shape.colour)
        else:
            font = ImageFont.load_default(shape.size * scale)
            place = (shape.x * scale, shape.y * scale)
            draw.text(place, shape.text, shape.colour, font, f"{shape.anchor}s")
    small = image.resize((width * _PIXELS, height * _PIXELS), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    small.save(content, "PNG", optimize=True)
    return content.getvalue()


# --- what the picture consists of ---------------------------------------------------------------


class _Line(NamedTuple):
    points: Sequence[tuple[float, float]]
    colour: str
    width: float


class _Dot(NamedTuple):
    x: float
    y: float
    radius: float
    colour: str


class _Text(NamedTuple):
    """`y` is that of the baseline. `anchor`: the text begins (l) at x, or has its middle (m) or its
    end (r) there."""

    x: float
    y: float
    text: str
    size: int = 12
    anchor: str = "l"
    colour: str = _BLACK


_Shape = _Line | _Dot | _Text
_SVG_ANCHORS = {"l": "start", "m": "middle", "r": "end"}


def _extent(rows: Sequence[Sequence[Panel]]) -> tuple[int, int]:
    columns = max(len(row) for row in rows)
    return columns * _PANEL_WIDTH, _TITLE_HEIGHT + len(rows) * _PANEL_HEIGHT


def _shapes(title: str, rows: Sequence[Sequence[Panel]]) -> Iterator[_Shape]:
    yield _Text(_LEFT, 30, title, 15)
    for n, row in enumerate(rows):
        for column, panel in enumerate(row):
            corner = (column * _PANEL_WIDTH, _TITLE_HEIGHT + n * _PANEL_HEIGHT)
            yield from _Axes(panel, *corner).shapes()


class _Axes:
    """One panel, with its upper left corner at (x, y)."""

    def __init__(self, panel: Panel, x: float, y: float) -> None:
        self._panel = panel
        self._left, self._right = x + _LEFT, x + _PANEL_WIDTH - _RIGHT
        self._top, self._bottom = y + _TOP, y + _PANEL_HEIGHT - _BOTTOM
        self._sizes = sorted({size for curve in panel.curves for size, _ in curve.points})
        values = [value for curve in panel.curves for _, value in curve.points]
        highest = max([*values, panel.target or 0.0])
        self._step = _round_step(highest / 5)
        self._highest = self._step * max(1, ceil(highest / self._step - 1e-9))

    def _x(self, size: float) -> float:
        first, last = log2(self._sizes[0]), log2(self._sizes[-1])
        share = (log2(size) - first) / (last - first) if last > first else 0.5
        return self._left + share * (self._right - self._left)

    def _y(self, value: float) -> float:
        return self._bottom - value / self._highest * (self._bottom - self._top)

    def shapes(self) -> Iterator[_Shape]:
        panel = self._panel
        yield _Text(self._left, self._top - 48, f"{panel.what}, by size of {panel.place}", 13)
        yield from self._grid()
        if panel.target is not None:
            y = self._y(panel.target)
            yield from _dashed((self._left, y), (self._right, y), _TARGET)
            yield self._target_label(panel.target, y)
        marks = {panel.given: "given", panel.recommended: "recommended"}
        if panel.given == panel.recommended:
            marks = {panel.given: "given, recommended"}
        for size, name in marks.items():
            if size is not None:
                x = self._x(size)
                yield from _dashed((x, self._top), (x, self._bottom), _GREY)
                yield _Text(x, self._bottom + 32, name, 11, "m", _GREY)
        # Each curve is thinner than the one below it: both can be seen where they are equal.
        width = 1 + len(panel.curves)
        for curve, colour in zip(panel.curves, self._colours(), strict=True):
            places = [(self._x(size), self._y(value)) for size, value in curve.points]
            yield _Line(places, colour, width)
            for x, y in places:
                yield _Dot(x, y, 2 + width / 2, colour)
            width -= 1
        yield from self._legend()

    def _target_label(self, target: float, y: float) -> _Text:
        """Where curves are far from the target, and on the side where they are not."""
        nearest = [
            min((curve.points[end][1] - target for curve in self._panel.curves), key=abs)
            for end in (0, -1)
        ]
        is_left = abs(nearest[0]) > abs(nearest[1])
        y += -5 if nearest[0 if is_left else 1] < 0 else 14
        if is_left:
            return _Text(self._left + 4, y, "target", 11, "l", _TARGET)
        return _Text(self._right - 4, y, "target", 11, "r", _TARGET)

    def _colours(self) -> list[str]:
        return [COLOURS[n % len(COLOURS)] for n in range(len(self._panel.curves))]

    def _grid(self) -> Iterator[_Shape]:
        places = max(0, -floor(log10(self._step)))
        for n in range(round(self._highest / self._step) + 1):
            value = n * self._step
            y = self._y(value)
            yield _Line([(self._left, y), (self._right, y)], _GREY if n == 0 else _PALE, 1)
            yield _Text(self._left - 8, y + 4, f"{value:.{places}f}", 11, "r", _GREY)
        every = ceil(len(self._sizes) / _MOST_LABELS)
        for size in self._sizes[::every]:
            x = self._x(size)
            yield _Line([(x, self._bottom), (x, self._bottom + 4)], _GREY, 1)
            yield _Text(x, self._bottom + 17, as_size(size), 11, "m", _GREY)

    def _legend(self) -> Iterator[_Shape]:
        x, y = self._left, self._top - 20
        for curve, colour in zip(self._panel.curves, self._colours(), strict=True):
            yield _Line([(x, y - 4), (x + 18, y - 4)], colour, 2)
            yield _Text(x + 24, y, curve.name, 12)
            x += 44 + 7 * len(curve.name)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is at least `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))


def _dashed(start: tuple[float, float], end: tuple[float, float], colour: str) -> Iterator[_Line]:
    (x0, y0), (x1, y1) = start, end
    num_dashes = max(1, round(hypot(x1 - x0, y1 - y0) / 8))
    for n in range(num_dashes):
        share, until = n / num_dashes, (n + 0.5) / num_dashes
        yield _Line(
            [
                (x0 + share * (x1 - x0), y0 + share * (y1 - y0)),
                (x0 + until * (x1 - x0), y0 + until * (y1 - y0)),
            ],
            colour,
            1,
        )
