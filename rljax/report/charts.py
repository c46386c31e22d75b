"""Drawings as inline SVG and HTML: lines, heat maps, bars. Colours are variables of style.css (--g0, --g1, …)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rljax.report import words
from rljax.report.curves import Curve
from rljax.report.words import escape

WIDTH, HEIGHT = 380, 230  # of a line chart, in its own units; the page scales it to its card
LEFT, RIGHT, TOP, BOTTOM = 50, 78, 8, 40
LABEL_GAP = 14  # least distance of two labels at the lines' ends
MOST_GROUPS = len(words.GLYPHS)
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2", "12 4", "4 4", "1 4")  # tells lines apart without colour
# The shapes of words.GLYPHS around (0, 0).
MARKS = (
    '<circle r="3.2"/>', '<path d="M0-4 4 3.2H-4Z"/>', '<path d="M-3-3H3V3H-3Z"/>',
    '<path d="M0-4.4 4.4 0 0 4.4-4.4 0Z"/>', '<path d="M0 4 4-3.2H-4Z"/>',
    '<path d="M-1-4H1V-1H4V1H1V4H-1V1H-4V-1H-1Z"/>', '<circle class="o" r="3"/>',
    '<path class="o" d="M-3-3H3V3H-3Z"/>',
)  # fmt: skip


def line_chart(
    curves: Sequence[tuple[int, str, Curve]],
    *,
    title: str,
    x_title: str,
    form: words.Format,
    sparse: bool = False,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """An SVG of (number, label, curve) triples; the number picks colour, dashes and mark.

    sparse: every point has its mark, not the last one alone. log: y goes by powers of ten where all values are
    positive and span a factor of 20 or more.
    y_range: values that the axis covers beside the curves', so that two charts can be compared.
    """
    log = log and _spans(curves)
    scale_y = Scale.of(_extent(curves, y_range, log), log=log, start=HEIGHT - BOTTOM, end=TOP)
    low_x, high_x = min(c.x[0] for *_, c in curves), max(c.x[-1] for *_, c in curves)
    unit, divisor = _time_unit(high_x) if "{unit}" in x_title else ("", 1.0)
    scale_x = Scale.of((low_x / divisor, high_x / divisor), log=False, start=LEFT, end=WIDTH - RIGHT, exact=True)
    x_title = x_title.format(unit=unit)

    def at(curve: Curve, values: np.ndarray) -> list[str]:
        return [f"{scale_x(x / divisor):.1f},{scale_y(y):.1f}" for x, y in zip(curve.x, values, strict=True)]

    bands, lines, ends = [], [], []
    for i, _, curve in curves:
        if curve.low is not None and curve.high is not None:
            outline = at(curve, curve.high) + at(curve, curve.low)[::-1]
            bands.append(f'<polygon class="band c{i}" points="{" ".join(outline)}"/>')
        places = at(curve, curve.y)
        lines.append(
            f'<polyline class="line c{i}" stroke-dasharray="{DASHES[i]}" points="{" ".join(places)}"/>'
            if len(places) > 1 else ""
        )  # fmt: skip
        marked = places if sparse else places[-1:]
        lines += [f'<g class="mark c{i}" transform="translate({place})">{MARKS[i]}</g>' for place in marked]
        ends.append((scale_y(curve.y[-1]), i, f"{words.GLYPHS[i]} {form(curve.y[-1])}"))
    said = "; ".join(f"{label}: {form(c.y[0])} to {form(c.y[-1])}" for _, label, c in curves)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}, by {x_title}. {said}")}">'
        f"{_axes(scale_x, scale_y, form, x_title)}{''.join(bands)}{''.join(lines)}{_ends(ends)}"
        f"{_readings(curves, scale_x, divisor, form, x_title)}</svg>"
    )


class Scale:
    """Values to places of one axis, linear or by powers of ten, with the ticks to draw."""

    def __init__(self, low: float, high: float, ticks: list[float], log: bool, start: float, end: float):
        self.ticks, self.log, self.start, self.end = ticks, log, start, end
        self._low, self._span = low, high - low

    @classmethod
    def of(cls, extent: tuple[float, float], *, log: bool, start: float, end: float, exact: bool = False) -> Scale:
        """exact: the axis ends at the extent and not at the ticks beyond it."""
        low, high = extent
        if log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            every = -(-len(powers) // 6)
            return cls(powers[0], powers[-1], [10.0**p for p in powers[::every]], True, start, end)
        if 0 < low < 0.25 * high:
            low = 0.0
        ticks = words.ticks(low, high)
        if exact and high > low:
            return cls(low, high, [tick for tick in ticks if low <= tick <= high], False, start, end)
        return cls(ticks[0], ticks[-1], ticks, False, start, end)

    def __call__(self, value: float) -> float:
        if self.log and value <= 0:  # a band may reach below what has a logarithm
            return self.start
        where = math.log10(value) if self.log else value
        place = self.start + (where - self._low) / self._span * (self.end - self.start)
        return min(max(place, min(self.start, self.end)), max(self.start, self.end))  # a band may leave the axis


def _extent(curves, y_range, log: bool) -> tuple[float, float]:
    """Of the lines, and of the bands beyond them at most half the lines' height; of a log axis, the lines alone."""
    low, high = min(c.y.min() for *_, c in curves), max(c.y.max() for *_, c in curves)
    if y_range is not None:
        low, high = min(low, y_range[0]), max(high, y_range[1])
    if log:
        return low, high
    room = (high - low) / 2
    banded = [c for *_, c in curves if c.low is not None and c.high is not None]
    below = min([low, *(c.low.min() for c in banded)])
    above = max([high, *(c.high.max() for c in banded)])
    floor = 0.0 if low >= 0 else -math.inf
    return max(below, low - room, floor), min(above, high + room)


def _spans(curves) -> bool:
    """Whether the values are all positive and span a factor of 20."""
    low, high = min(c.y.min() for *_, c in curves), max(c.y.max() for *_, c in curves)
    return low > 0 and high >= 20 * low


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds > 3 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds > 180 else ("seconds", 1.0)


def _axes(x: Scale, y: Scale, form: words.Format, x_title: str) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        text = _power(tick) if y.log else _tick(tick, form)
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in x.ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom}v4"/>')
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{_compact(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    small = "" if len(x_title) < 30 else " small"
    parts.append(
        f'<text class="tick{small}" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x_title}</text>'
    )
    return "".join(parts)


def _tick(value: float, form: words.Format) -> str:
    if form is words.share:
        return f"{100 * value:.3g}%".replace("-", words.MINUS)
    return _compact(value)


def _power(value: float) -> str:
    """0.001, 100 and, further from 1, 10⁻⁴ or 10⁶."""
    exponent = round(math.log10(value))
    if -3 <= exponent <= 3:
        return f"{value:,g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _compact(value: float) -> str:
    """20,000 → 20k: a tick has little room."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{letter}".replace("-", words.MINUS)
    return words.number(value) if abs(value) < 1000 else f"{value:,.0f}".replace("-", words.MINUS)


def _ends(ends: list[tuple[float, int, str]]) -> str:
    """The last values right of the lines, moved apart where they would overlap."""
    ends = sorted(ends)
    places = [place for place, *_ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL_GAP)
    floor = HEIGHT - BOTTOM + 4
    for i in reversed(range(len(places))):
        places[i] = min(places[i], floor)
        floor = places[i] - LABEL_GAP
    return "".join(
        f'<text class="end c{i}" x="{WIDTH - RIGHT + 7}" y="{place + 4:.1f}">{escape(text)}</text>'
        for place, (_, i, text) in zip(places, ends, strict=True)
    )


def _readings(curves, scale_x: Scale, divisor: float, form: words.Format, x_title: str) -> str:
    """Invisible strips that show the values there as a tooltip, at no more than 60 of the curves' points."""
    every = np.unique(np.concatenate([c.x for *_, c in curves]))
    shown = every[np.unique(np.linspace(0, len(every) - 1, 60).round().astype(int))]
    places = [scale_x(x / divisor) for x in shown]
    edges = [LEFT, *((a + b) / 2 for a, b in zip(places, places[1:], strict=False)), WIDTH - RIGHT]
    strips = []
    for x, left, right in zip(shown, edges, edges[1:], strict=False):
        values = [
            f"{words.GLYPHS[i]} {label}: {form(float(np.interp(x, c.x, c.y)))}"
            for i, label, c in curves if c.x[0] <= x <= c.x[-1]
        ]  # fmt: skip
        where = f"{x / divisor:,.0f}" if divisor == 1 else f"{x / divisor:.1f}"
        said = escape("\n".join([f"{where} {x_title.split(',')[0]}", *values]))
        strips.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"><title>{said}</title></rect>'
        )
    return "".join(strips)


# ---- tables and bars


def heat_map(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]], *,
    corner: str, form: words.Format, top: float,
) -> str:  # fmt: skip
    """A table whose cells are shaded by their value, from none at 0 to full at `top`; None is an empty cell."""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = []
    for name, values in zip(rows, cells, strict=True):
        row = "".join(
            '<td class="none">–</td>' if v is None
            else f'<td style="--p:{100 * min(max(v / top, 0), 1) if top else 0:.0f}%">{form(v)}</td>'
            for v in values
        )  # fmt: skip
        body.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(corner)}"><table class="heat"><thead><tr>'
        f'<th scope="col">{escape(corner)}</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def bars(rows: Sequence[tuple[str, float, str]], *, top: float, number: int) -> str:
    """Horizontal bars of (label, value, text); a bar of value `top` fills the width. number: picks the colour."""
    lines = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="bar"><span class="c{number}" '
        f'style="width:{100 * value / top if top else 0:.2f}%"></span></td><td class="num">{escape(text)}</td></tr>'
        for label, value, text in rows
    )
    return f'<table class="bars"><tbody>{lines}</tbody></table>'


def histogram(bins: Sequence[str], made: Sequence[float], kept: Sequence[float], *, number: int, label: str) -> str:
    """An SVG of two bars a bin: share of all rollouts, hatched, and of the kept ones, filled."""
    labelled = len(bins) <= 4
    highest = max(*made, *kept, 0.01) * (1.1 if labelled else 1.0)  # with room for the number above a bar
    y = Scale.of((0.0, highest), log=False, start=HEIGHT - BOTTOM, end=TOP)
    wide = (WIDTH - 10 - LEFT) / len(bins)
    bottom, parts = HEIGHT - BOTTOM, []
    for tick in y.ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - 10}"/>')
        text = _tick(tick, words.share)
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for i, (name, of_all, of_kept) in enumerate(zip(bins, made, kept, strict=True)):
        middle, half = LEFT + wide * (i + 0.5), min(wide * 0.4, 40)
        for left, value, kind in ((middle - half, of_all, "made"), (middle, of_kept, f"kept c{number}")):
            parts.append(
                f'<rect class="{kind}" x="{left + 1:.1f}" y="{y(value):.1f}" width="{half - 2:.1f}" '
                f'height="{bottom - y(value):.1f}"><title>{escape(name)}: {words.share(value)} of the '
                f"{'rollouts made' if kind == 'made' else 'rollouts kept'}</title></rect>"
            )
            if labelled:
                parts.append(
                    f'<text class="tick" x="{left + half / 2:.1f}" y="{max(y(value) - 4, 11):.1f}" '
                    f'text-anchor="middle">{words.share(value)}</text>'
                )
        parts.append(
            f'<text class="tick" x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - 10}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - 10) / 2}" y="{HEIGHT - 6}" text-anchor="middle">reward</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
