"""The page of a sweep: its settings by result, and each key's values against it. One HTML file that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rljax import report, sweeps
from rljax.report import charts, words
from rljax.report.words import escape
from rljax.sweeps import Estimate, Outcome, Row, Spec

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 230, 50, 20, 10, 42  # of a chart, in its own units
STRIP, STRIP_HEIGHT, STRIP_MARGIN = 220, 24, 10  # of the interval in a line of the table
TITLES = {
    "accuracy": "greedy held-out accuracy", "avg_at_k": "held-out accuracy, sampled", "gain": "gain in greedy accuracy",
    "seconds": "time",
}  # fmt: skip
MOST_VALUES = 8  # of an axis that are each written under it
LONGEST_LABEL = 14  # characters under an axis
DODGE = 7  # between the lines' marks at one value
STYLE = """
.whisker { stroke: var(--c); stroke-width: 2; fill: none; }
.seed { fill: var(--c); opacity: .45; }
.strip { display: block; width: 220px; max-width: 100%; height: auto; }
.best > * { background: var(--tint); }
.strip { min-width: 160px; }
.results tr > :nth-child(2), .results td > span { white-space: nowrap; }
pre.command { background: var(--tint); border-radius: 6px; padding: 10px 12px; overflow-x: auto; }
.key svg { width: 44px; height: 12px; vertical-align: middle; display: inline; }
.keys { list-style: none; margin: 8px 0 0; padding: 0; font-size: .85rem; }
"""


def page(spec: Spec, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """The page, of sweeps.ranked rows and of what came of each run."""
    title = f"Sweep of {', '.join(spec.keys)}" if spec.keys else "Sweep over seeds"
    done = [row for row in rows if row.estimates]
    parts = [f"<p>{_lead(spec, rows)}</p>"]
    best = sweeps.best(spec, rows)
    if best is not None:
        parts.append(f'<p>The best setting as a command:</p><pre class="command" tabindex="0">{escape(best)}</pre>')
    sections = []
    if done and spec.keys:
        panels = "".join(_panel(spec, done, key) for key in spec.keys)
        sections.append((f"{TITLES[spec.metric].capitalize()} by key", f'<div class="cards">{panels}</div>'))
    sections.append(("Settings", _table(spec, rows)))
    left = [o for o in outcomes if o.values is None]
    if left:
        listed = "".join(
            f"<li>{escape(o.point.name)}: {escape(o.error if o.error is not None else 'not finished')}</li>"
            for o in left
        )
        sections.append(("Runs without a result", f'<ul class="notes">{listed}</ul>'))
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return f"""{report.head(title, STYLE)}<body>
<header><h1>{escape(title)}</h1>{"".join(parts)}</header>
<main>{body}</main>
<footer><p>{NOTE}</p></footer>
</body>
</html>
"""


NOTE = (
    "Marks are means over seeds, small dots the seeds. Ranges are 95% intervals of the mean by Student’s t; of two"
    " seeds they reach from the one to the other. The best of many settings is in part luck, which no interval shows."
)


def _lead(spec: Spec, rows: Sequence[Row]) -> str:
    runs, finished = sum(row.planned for row in rows), sum(row.finished for row in rows)
    said = f"{finished} of {words.plural(runs, 'run')} finished."
    if not finished:
        return said
    row = rows[0]
    value = row.estimates[spec.metric]
    return (
        f"Best {TITLES[spec.metric]}: <strong>{escape(_form(spec.metric)(value.mean))}</strong> with "
        f"<strong>{escape(label(row))}</strong> ({words.plural(row.finished, 'seed')}). {said}"
    )


def label(row: Row) -> str:
    """learner.learning_rate = 0.0003, loss.clip_low = 0.1."""
    said = ", ".join(f"{key} = {words.value(value)}" for key, value in row.setting.items())
    return said if said else "the config as it is"


def _form(measure: str) -> words.Format:
    return {"accuracy": words.share, "avg_at_k": words.share, "gain": words.points, "seconds": words.duration}[measure]


# ---- the table


def _table(spec: Spec, rows: Sequence[Row]) -> str:
    done = [row for row in rows if row.estimates]
    scale = _scale(done, spec.metric, STRIP_MARGIN, STRIP - STRIP_MARGIN) if done else None
    head = ["setting", "seeds", TITLES[spec.metric], *(TITLES[m] for m in TITLES if m != spec.metric)]
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    strip = f'<th scope="col">{_ticks(scale, spec.metric)}</th>' if scale is not None else ""
    lines = []
    for i, row in enumerate(rows):
        others = [m for m in TITLES if m != spec.metric]
        values = [_value(row, measure) for measure in (spec.metric, *others)]
        body = [f"{row.finished} of {row.planned}", *values]
        drawn = "".join(
            f'<td data-label="{escape(h)}"><span>{cell}</span></td>' for h, cell in zip(head[1:], body, strict=True)
        )
        if scale is not None:
            drawn += f"<td>{_strip(scale, row, spec.metric)}</td>"
        best = ' class="best"' if i == 0 and row.estimates else ""
        lines.append(f'<tr{best}><th scope="row">{escape(label(row))}</th>{drawn}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Settings"><table class="results"><thead><tr>'
        f"{cells}{strip}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _value(row: Row, measure: str) -> str:
    if not row.estimates:
        return "–"
    value = row.estimates[measure]
    span = f"<small>{_range(value, measure)}</small>" if len(value.seeds) > 1 and measure != "seconds" else ""
    return f"{_form(measure)(value.mean)}{span}"


def _range(value: Estimate, measure: str) -> str:
    low, high = (_form(measure)(end) for end in _span(value, measure))
    return f"{low.removesuffix(' points')} to {high}"


def _span(value: Estimate, measure: str) -> tuple[float, float]:
    """The interval; of shares, the part of it that can be."""
    if _form(measure) is not words.share or not all(0 <= v <= 1 for v in value.seeds.values()):
        return value.low, value.high
    return max(value.low, 0.0), min(value.high, 1.0)


def _strip(scale: charts.Scale, row: Row, measure: str) -> str:
    if not row.estimates:
        return ""
    value, middle, said = row.estimates[measure], STRIP_HEIGHT / 2, escape(_said(row, measure))
    low, high = _span(value, measure)
    seeds = "".join(f'<circle class="seed" cx="{scale(v):.1f}" cy="{middle}" r="2.2"/>' for v in value.seeds.values())
    return (
        f'<svg class="strip c0" viewBox="0 0 {STRIP} {STRIP_HEIGHT}" role="img" aria-label="{said}">'
        f'<title>{said}</title><path class="whisker" d="M{scale(low):.1f} {middle}H{scale(high):.1f}"/>{seeds}'
        f'<g class="mark c0" transform="translate({scale(value.mean):.1f},{middle})">{charts.MARKS[0]}</g></svg>'
    )


def _ticks(scale: charts.Scale, measure: str) -> str:
    """The axis of the strips: its first and last tick."""
    ends = (scale.ticks[0], scale.ticks[-1])
    texts = "".join(
        f'<text class="tick" x="{scale(tick):.1f}" y="14" text-anchor="{anchor}">{_tick(tick, measure)}</text>'
        for tick, anchor in zip(ends, ("start", "end"), strict=True)
    )
    line = f'<path class="axis" d="M{scale.start} 20H{scale.end}"/>'
    return f'<svg class="strip" viewBox="0 0 {STRIP} {STRIP_HEIGHT}" aria-hidden="true">{texts}{line}</svg>'


def _scale(rows: Sequence[Row], measure: str, start: float, end: float) -> charts.Scale:
    """Of all seeds, and of the intervals beyond them by at most the seeds' own range."""
    found = [row.estimates[measure] for row in rows]
    spans = [_span(value, measure) for value in found]
    inner = [v for value in found for v in value.seeds.values()]
    room = max(inner) - min(inner)
    low = max(min(inner) - room, min(low for low, _ in spans))
    high = min(max(inner) + room, max(high for _, high in spans))
    return charts.Scale.of((low, high), log=False, start=start, end=end)


def _said(row: Row, measure: str) -> str:
    value = row.estimates[measure]
    span = f", {_range(value, measure)}" if len(value.seeds) > 1 else ""
    return f"{label(row)}: {_form(measure)(value.mean)}{span}, {words.plural(len(value.seeds), 'seed')}"


def _tick(value: float, measure: str) -> str:
    said = words.number(value) if measure == "seconds" else f"{100 * value:.3g}%"
    return said.replace("-", words.MINUS)


# ---- a key's values against the metric


class Axis(NamedTuple):
    """places: of each row along x. ticks: (place, text, whole text)."""

    places: list[float]
    ticks: list[tuple[float, str, str]]


def _panel(spec: Spec, rows: Sequence[Row], key: str) -> str:
    lines = _lines(spec, rows, key)
    axis = _axis(spec, rows, key)
    at = dict(zip(map(id, rows), axis.places, strict=True))
    y = _scale(rows, spec.metric, HEIGHT - BOTTOM, TOP)
    drawn = []
    for i, (_, members) in enumerate(lines):
        shift = DODGE * (i - (len(lines) - 1) / 2)
        places = [(at[id(row)] + shift, row) for row in members]
        xs = {x for x, _ in places}
        if spec.grid and len(xs) == len(places) > 1:  # one mean at each value
            means = sorted((x, row.estimates[spec.metric].mean) for x, row in places)
            path = " ".join(f"{x:.1f},{y(mean):.1f}" for x, mean in means)
            drawn.append(f'<polyline class="line c{i}" stroke-dasharray="{charts.DASHES[i]}" points="{path}"/>')
        drawn += [_point(x, y, row, spec.metric, i) for x, row in places]
    title = f"{TITLES[spec.metric]} by {key}"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_frame(axis, y, key, spec.metric)}{''.join(drawn)}</svg>"
    )
    legend = "".join(f"<li>{_sample(i)} {escape(name)}</li>" for i, (name, _) in enumerate(lines) if name)
    legend = f'<ul class="keys key">{legend}</ul>' if legend else ""
    of = f"{TITLES[spec.metric]}, mean and interval over seeds"
    return f'<figure class="card"><figcaption><h3>{escape(key)}</h3><p>{of}</p></figcaption>{svg}{legend}</figure>'


def _lines(spec: Spec, rows: Sequence[Row], key: str) -> list[tuple[str, list[Row]]]:
    """(name, rows) of each line: settings of a grid that differ in the key's axis alone; else all as one.

    One, too, where there are more lines than can be told apart.
    """
    together = next((keys for keys in spec.grid if key in keys), (key,))
    order = [repr(setting) for setting in sweeps.settings(spec)]
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.index(repr(row.setting))):
        rest = {k: v for k, v in row.setting.items() if k not in together}
        name = ", ".join(f"{k} = {words.value(v)}" for k, v in rest.items())
        groups.setdefault(name, []).append(row)
    if not spec.grid or len(groups) > charts.MOST_GROUPS:
        return [("", list(rows))]
    return list(groups.items())


def _axis(spec: Spec, rows: Sequence[Row], key: str) -> Axis:
    """Drawn numbers lie by their size; values of a grid or of a choice stand side by side in the order given."""
    start, end = LEFT + 24, WIDTH - RIGHT - 24
    rule = spec.random.get(key, ("grid",))
    if rule[0] in ("log", "uniform", "int"):
        log = rule[0] == "log"
        scale = charts.Scale.of((rule[1], rule[2]), log=log, start=LEFT, end=WIDTH - RIGHT, exact=True)
        ticks = [(scale(tick), words.number(tick), words.number(tick)) for tick in scale.ticks]
        return Axis([scale(row.setting[key]) for row in rows], ticks)
    values = _values(spec, key)
    step = (end - start) / (len(values) - 1) if len(values) > 1 else 0.0
    places = [start + i * step if len(values) > 1 else (start + end) / 2 for i in range(len(values))]
    every = math.ceil(len(values) / MOST_VALUES)
    ticks = []
    for place, value in list(zip(places, values, strict=True))[::every]:
        whole = words.value(value)
        short = whole if len(whole) <= LONGEST_LABEL else f"{whole[: LONGEST_LABEL - 1]}…"
        ticks.append((place, short, whole))
    return Axis([places[values.index(row.setting[key])] for row in rows], ticks)


def _values(spec: Spec, key: str) -> list[Any]:
    """A key's values, each once, in the order given."""
    if spec.random:
        return list(spec.random[key][1])
    for keys, rows in spec.grid.items():
        if key in keys:
            return list(dict.fromkeys(row[keys.index(key)] for row in rows))
    raise KeyError(key)


def _point(x: float, y: charts.Scale, row: Row, measure: str, i: int) -> str:
    value = row.estimates[measure]
    low, high = _span(value, measure)
    seeds = "".join(f'<circle class="seed" cx="{x:.1f}" cy="{y(v):.1f}" r="2"/>' for v in value.seeds.values())
    return (
        f'<g class="c{i}"><title>{escape(_said(row, measure))}</title>'
        f'<path class="whisker" d="M{x:.1f} {y(low):.1f}V{y(high):.1f}"/>{seeds}'
        f'<g class="mark c{i}" transform="translate({x:.1f},{y(value.mean):.1f})">{charts.MARKS[i]}</g></g>'
    )


def _frame(axis: Axis, y: charts.Scale, key: str, measure: str) -> str:
    bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for tick in y.ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_tick(tick, measure)}</text>'
        )
    for place, short, whole in axis.ticks:
        parts.append(f'<path class="axis" d="M{place:.1f} {bottom}v4"/>')
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(short)}'
            f"<title>{escape(whole)}</title></text>"
        )
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(key)}</text>'
    )
    return "".join(parts)


def _sample(i: int) -> str:
    """A piece of a line with its mark."""
    return (
        f'<svg viewBox="0 0 44 12" aria-hidden="true"><path class="line c{i}" stroke-dasharray="{charts.DASHES[i]}" '
        f'd="M0 6H44"/><g class="mark c{i}" transform="translate(22,6)">{charts.MARKS[i]}</g></svg>'
    )
