"""``--mode=report``: run folders → one HTML page that needs nothing else. No jax here.

The page has inline CSS and SVG and no script; it loads nothing. The same folders give the same bytes.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from rljax.report import charts, completions, curves, folders, sections
from rljax.report.folders import Group
from rljax.report.words import escape

FILE = "report.html"
STYLE = pathlib.Path(__file__).parent / "style.css"


def run(workdirs: Sequence[pathlib.Path]) -> pathlib.Path:
    """Writes report.html, of all the runs side by side, into the first run's folder, and returns its path.

    Runs whose configs differ in the seed alone (and in where they compute) are shown as one, with intervals.
    Raises FileNotFoundError or ValueError where a folder is no run's, a file of it cannot be read, a folder is
    given twice, or there are more configs than can be told apart.
    """
    resolved = [folder.resolve() for folder in workdirs]
    twice = [folder for i, folder in enumerate(workdirs) if resolved[i] in resolved[:i]]
    if twice:
        raise ValueError(f"run folder {twice[0]} is given twice; name each run once")
    groups = folders.grouped([folders.read(folder) for folder in workdirs])
    if len(groups) > charts.MOST_GROUPS:
        labels = "; ".join(group.label for group in groups)
        raise ValueError(
            f"{len(groups)} different configs are more than the {charts.MOST_GROUPS} that can be told apart in a chart:"
            f" {labels}. Name fewer run folders"
        )
    path = workdirs[0] / FILE
    temporary = path.with_name(f"{FILE}.{os.getpid()}.tmp")
    temporary.write_text(page(groups), encoding="utf-8")
    os.replace(temporary, path)
    return path


def head(title: str, style: str = "") -> str:
    """The beginning of a page, up to its body; `style` comes after the style of all pages."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{STYLE.read_text(encoding="utf-8")}{style}</style>
</head>
"""


def page(groups: Sequence[Group]) -> str:
    """The whole page."""
    title = "Run report: " + ", ".join(group.label for group in groups)
    parts = [
        sections.section("Results", "results", sections.overview(groups) + sections.notes(groups)),
        sections.section("Measured by --mode=eval", "measured", _cards(sections.measures(groups))),
        *(sections.curve_section(groups, part.title, part.panels) for part in curves.SECTIONS),
        sections.section("Difficulty", "difficulty", _cards(sections.difficulty(groups))),
        sections.section("Kept rewards", "kept-rewards", _cards(sections.kept(groups))),
        sections.section("Time by stage", "time-by-stage", _cards(sections.stages(groups))),
        sections.section(
            "Held-out answers before and after", "answers", completions.completions(groups),
            "Greedy completions, in the order of the held-out prompts.",
        ),
        sections.section(
            "Rollouts and their acceptance", "acceptance", completions.acceptance(groups),
            "Completions of the first and of the last step recorded.",
        ),
        sections.section("Config", "config", sections.config(groups)),
    ]  # fmt: skip
    switch = "".join(f'<label for="x-{a.name}">{a.label}</label>' for a in curves.AXES)
    radios = "".join(
        f'<input class="x" type="radio" name="x" id="x-{a.name}"{" checked" if i == 0 else ""} aria-label="{a.label}">'
        for i, a in enumerate(curves.AXES)
    )
    legend = "".join(f"<li>{_line(i)}{escape(_legend(group))}</li>" for i, group in enumerate(groups))
    return f"""{head(title)}<body>
{radios}
<svg class="defs" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><path d="M0 0V5"/></pattern></defs></svg>
<header><h1>{escape(title)}</h1>{"".join(sections.lead(group) for group in groups)}</header>
<div class="bar"><ul class="legend">{legend}</ul><div class="switch"><span>Curves over</span>{switch}</div></div>
<main>
{"".join(parts)}
</main>
<footer><p>{_key(groups)}</p></footer>
</body>
</html>
"""


def _cards(body: str) -> str:
    return f'<div class="cards">{body}</div>' if body else ""


def _line(i: int) -> str:
    """A piece of a group's line with its mark."""
    dashes = charts.DASHES[i]
    return (
        f'<svg class="sample" viewBox="0 0 44 12" aria-hidden="true"><path class="line c{i}" '
        f'stroke-dasharray="{dashes}" d="M0 6H44"/>'
        f'<g class="mark c{i}" transform="translate(22,6)">{charts.MARKS[i]}</g></svg>'
    )


def _legend(group: Group) -> str:
    n = len(group.runs)
    if n == 1:
        return f"{group.label} (seed {group.runs[0].seed})"
    return f"{group.label} ({n} seeds)"


def _key(groups: Sequence[Group]) -> str:
    """How to read the intervals."""
    counts = {len(group.runs) for group in groups}
    said = ["Numbers at the right of a line are its last values."]
    if max(counts) > 1:
        said.append("The line of several seeds is their mean, step by step.")
    if max(counts) > 2:
        said.append("Bands and ranges are 95% intervals of the mean by Student’s t.")
    if 2 in counts:
        said.append("Of two seeds, bands and ranges reach from the one to the other.")
    return " ".join(said)
