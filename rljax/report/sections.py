"""The parts of the page, each an HTML string; "" where the runs hold nothing for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rljax.report import charts, curves, folders, records, words
from rljax.report.curves import AXES, Panel
from rljax.report.folders import Group, Run
from rljax.report.words import escape


def section(title: str, anchor: str, body: str, lead: str = "") -> str:
    """A section with its heading; "" if its body is."""
    said = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{said}{body}</section>' if body else ""


def card(title: str, of: str, body: str, *, wide: bool = False) -> str:
    """A figure with its title and what its numbers are."""
    kind = "card wide" if wide else "card"
    return f'<figure class="{kind}"><figcaption><h3>{escape(title)}</h3><p>{escape(of)}</p></figcaption>{body}</figure>'


def name(groups: Sequence[Group], i: int) -> str:
    """A group's mark and label, in its colour."""
    return f'<span class="name c{i}">{words.GLYPHS[i]}&nbsp;{escape(groups[i].label)}</span>'


def cards(groups: Sequence[Group], title: str, of: str, draw: Callable[[int, Group], str | None]) -> str:
    """A card a group for which there is something to draw; its label stands in the title where there are several."""
    drawn = [(i, group, draw(i, group)) for i, group in enumerate(groups)]
    return "".join(
        card(title if len(groups) == 1 else f"{title}: {words.GLYPHS[i]}\N{NO-BREAK SPACE}{group.label}", of, body)
        for i, group, body in drawn
        if body is not None
    )


# ---- overview


def evaluations(run: Run, metric: str) -> tuple[float, float] | None:
    """The first and the last value of an evaluation's metric."""
    _, values = curves.points(run, metric)
    return (float(values[0]), float(values[-1])) if len(values) else None


def lead(group: Group) -> str:
    """What happened, in a sentence."""
    pairs = [pair for run in group.runs if (pair := evaluations(run, "eval/accuracy")) is not None]
    of = f"{escape(group.label)}" + (f", mean of {len(group.runs)} seeds" if len(group.runs) > 1 else "")
    if not pairs:
        return f"<p><strong>{of}</strong> has no held-out evaluation.</p>"
    before, after = (float(np.mean([pair[i] for pair in pairs])) for i in (0, 1))
    efforts = [f" over {words.plural(run.lines[-1]['step'], 'step')}{_effort(run)}" for run in group.runs]
    effort = efforts[0] if len(efforts) == 1 else ""
    return (
        f"<p><strong>{of}</strong>: greedy held-out accuracy went from {words.share(before)} to "
        f"<strong>{words.share(after)}</strong> ({words.points(after - before)}){effort}.</p>"
    )


def _effort(run: Run) -> str:
    made, seconds = _last(run, "rollouts"), _last(run, "seconds")
    parts = [f"{made:,.0f} rollouts"] if made is not None else []
    parts += [words.duration(seconds)] if seconds is not None else []
    return "".join([f", {part}" for part in parts[:-1]] + [f" and {part}" for part in parts[-1:]])


def _last(run: Run, axis: str) -> float | None:
    places = curves.positions(run, axis)
    return float(places[-1]) if math.isfinite(places[-1]) else None


COLUMNS = ("accuracy, greedy", "gain, greedy", "accuracy, sampled", "steps", "rollouts", "time")


def overview(groups: Sequence[Group]) -> str:
    """A table of results, a row a group; where a group has several seeds, another with a row a run, folded."""
    rows = []
    for i, group in enumerate(groups):
        seeds = ", ".join(str(run.seed) for run in group.runs)
        word = "seed" if len(group.runs) == 1 else "mean of seeds"
        rows.append(_row(f"{name(groups, i)} <small>{word} {seeds}</small>", group.runs))
    each = [
        _row(f"{name(groups, i)} <small>seed {run.seed}, {escape(run.folder.name)}</small>", (run,))
        for i, group in enumerate(groups) for run in group.runs
    ]  # fmt: skip
    folded = f"<details><summary>Each run by itself</summary>{_results(each)}</details>"
    return _results(rows) + (folded if len(each) > len(rows) else "")


def _results(rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in ("run", *COLUMNS))
    return f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _row(label: str, runs: Sequence[Run]) -> str:
    greedy, sampled = (_known([evaluations(run, m) for run in runs]) for m in ("eval/accuracy", "eval/avg_at_k"))
    state = "" if all(run.finished for run in runs) else " <small>not finished</small>"
    cells = (
        _before_after(greedy),
        _mean([after - before for before, after in greedy], words.points),
        _before_after(sampled),
        _mean([run.lines[-1]["step"] for run in runs], words.count) + state,
        _mean(_known([_last(run, "rollouts") for run in runs]), words.count),
        _mean(_known([_last(run, "seconds") for run in runs]), words.duration),
    )
    body = "".join(
        f'<td data-label="{escape(h)}"><span>{cell}</span></td>' for h, cell in zip(COLUMNS, cells, strict=True)
    )
    return f'<tr><th scope="row">{label}</th>{body}</tr>'


def _known(values: Sequence) -> list:
    return [value for value in values if value is not None]


def _before_after(pairs: Sequence[tuple[float, float]]) -> str:
    """The mean before, and that after with its interval."""
    if not pairs:
        return "–"
    before, after = zip(*pairs, strict=True)
    return f"{words.share(float(np.mean(before)))} → {_mean(after, words.share)}"


def _mean(values: Sequence[float], form: words.Format) -> str:
    """The mean of the values; of several that differ, their interval too."""
    if not values:
        return "–"
    middle = form(float(np.mean(values)))
    if min(values) == max(values):
        return middle
    low, high = (form(float(end)) for end in curves.interval(np.array(values)))
    return f"{middle} <small>{low.removesuffix(' points')} to {high}</small>"


def notes(groups: Sequence[Group]) -> str:
    """What went wrong in the runs, as a list."""
    found = []
    for run in (run for group in groups for run in group.runs):
        who = f"<strong>{escape(run.folder.name)}</strong>"
        for metric, said in (
            ("train/unscorable", "rollouts could not be scored"),
            ("train/grader_errors", "rollouts whose grader raised an error"),
            ("train/grader_timeouts", "rollouts hung or crashed the grader"),
        ):
            count = float(np.sum(curves.points(run, metric)[1]))
            if count:
                found.append(f"{who}: {count:,.0f} {said}.")
        cut = curves.points(run, "rollouts/truncated")[1]
        if len(cut) and cut.mean() > 0.5:
            found.append(f"{who}: {words.share(float(cut.mean()))} of the rollouts met the token limit.")
        errors = [line["train/first_error"] for line in run.lines if "train/first_error" in line]
        found += [f"{who}: the grader’s first error was <code>{escape(errors[0])}</code>."] if errors else []
    return f'<ul class="notes">{"".join(f"<li>{note}</li>" for note in found)}</ul>' if found else ""


def measures(groups: Sequence[Group]) -> str:
    """What --mode=eval measured, a table each."""
    return "".join(
        card(f"{run.folder.name}: {stem}", f"{outcome['model']} on {outcome['prompts']:,} prompts of {outcome['task']}",
             _measures(outcome["measures"]))
        for group in groups for run in group.runs for stem, outcome in run.measured.items()
    )  # fmt: skip


def _measures(rows: dict) -> str:
    def form(label: str) -> words.Format:
        return words.number if label == "length" else words.share

    lines = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="num">{form(label)(row["value"])}</td>'
        f'<td class="num">{form(label)(row["low"])} to {form(label)(row["high"])}</td></tr>'
        for label, row in rows.items()
    )
    head = '<tr><th scope="col"></th><th scope="col">value</th><th scope="col">95% interval</th></tr>'
    return f'<table class="measures"><thead>{head}</thead><tbody>{lines}</tbody></table>'


# ---- curves


def curve_section(groups: Sequence[Group], title: str, panels: Sequence[Panel]) -> str:
    """Cards of the panels that any group has values for; those that never change are told in words."""
    drawn, constant, merged = [], [], 1
    shared = _shared_range(groups, ("jackpot/kl_before", "jackpot/kl_after"))
    for panel in panels:
        by_axis = {axis: [curves.curve(group, panel, axis.name) for group in groups] for axis in AXES}
        steps = by_axis[AXES[0]]
        if all(c is None for c in steps) or _repeats(groups, panel):
            continue
        if (value := curves.constant(steps)) is not None:
            constant.append(f"{panel.title.lower()} {panel.format(value)}")
            continue
        merged = max([merged, *(c.merged for c in steps if c is not None)])
        y_range = shared if panel.metric.startswith("jackpot/kl_") else None
        drawn.append(
            card(panel.title, panel.of, "".join(_chart(groups, panel, a, c, y_range) for a, c in by_axis.items()))
        )
    said = f'<p class="constant">The same at every step: {escape("; ".join(constant))}.</p>' if constant else ""
    body = f'<div class="cards">{"".join(drawn)}</div>{said}' if drawn or said else ""
    return section(title, anchor(title), body, f"Each point is the mean of up to {merged} steps." if merged > 1 else "")


def anchor(title: str) -> str:
    return "-".join("".join(c for c in title.lower() if c.isalnum() or c == " ").split())


def _chart(groups: Sequence[Group], panel: Panel, axis: curves.Axis, found, y_range) -> str:
    known = [(i, groups[i].label, c) for i, c in enumerate(found) if c is not None]
    if not known:
        return f'<p class="by-{axis.name} none">The runs do not record this axis.</p>'
    chart = charts.line_chart(
        known, title=panel.title, x_title=axis.title, form=panel.format, sparse=panel.sparse, log=panel.log,
        y_range=y_range,
    )  # fmt: skip
    return f'<div class="by-{axis.name}">{chart}</div>'


def _repeats(groups: Sequence[Group], panel: Panel) -> bool:
    """Whether a panel of the kept rollouts says the same as that of all, since all are kept."""
    other = {"pods/variance": "train/reward_variance", "pods/kept": "rollouts/step"}.get(panel.metric)
    return other is not None and all(
        line.get(panel.metric) == line.get(other) for group in groups for run in group.runs for line in run.lines
    )


def _shared_range(groups: Sequence[Group], metrics: Sequence[str]) -> tuple[float, float] | None:
    values = [v for group in groups for run in group.runs for m in metrics for v in curves.points(run, m)[1]]
    return (min(values), max(values)) if values else None


# ---- difficulty, kept rewards, stages


def difficulty(groups: Sequence[Group]) -> str:
    """Heat maps: rollouts by kind and by earlier success over epochs; held-out accuracy by kind."""
    by_kind, by_success = ([records_of(g) for g in groups] for records_of in (records.by_kind, records.by_success))
    top_kind, top_success = _top(by_kind), _top(by_success)

    def shaded(found, corner: str, top: float, form: words.Format = words.count) -> str | None:
        return None if found is None else charts.heat_map(*found, corner=corner, form=form, top=top)

    def kinds(i: int, group: Group) -> str | None:
        return shaded(by_kind[i], "kind \\ epoch", top_kind)

    def success(i: int, group: Group) -> str | None:
        return shaded(by_success[i], "so far \\ epoch", top_success)

    def accuracy(i: int, group: Group) -> str | None:
        return shaded(records.accuracy_by_kind(group), "kind \\ step", 1.0, words.share)

    so_far = "number in each epoch, by the share of a prompt’s earlier rollouts that were right (posterior mean)"
    easiest = "greedy; the kind that was easiest at the start first"
    return (
        cards(groups, "Rollouts by kind of prompt", "number in each epoch, the kind most often right first", kinds)
        + cards(groups, "Rollouts by earlier success", so_far, success)
        + cards(groups, "Held-out accuracy by kind", easiest, accuracy)
    )


def _top(maps: Sequence[records.HeatMap | None]) -> float:
    """The largest cell, but of prompts not tried yet, which are all at first: they would pale the rest."""
    rows = [
        row for m in maps if m is not None for name, row in zip(m.rows, m.cells, strict=True) if name != records.UNSEEN
    ]
    return max((cell for row in rows for cell in row if cell is not None), default=1.0)


def kept(groups: Sequence[Group]) -> str:
    """Histograms of rewards, of all rollouts and of those learned from."""

    def draw(i: int, group: Group) -> str | None:
        found = records.kept_rewards(group)
        if found is None:
            return None
        said = f"rewards of {found.num_made:,} rollouts made and of {found.num_kept:,} kept"
        drawn = charts.histogram(found.bins, found.made, found.kept, number=i, label=said)
        return f'{drawn}<p class="key"><i class="swatch made"></i> made <i class="swatch c{i}"></i> kept: {said}</p>'

    return cards(groups, "Rewards of kept rollouts", "share of the rollouts made, and of those learned from", draw)


def stages(groups: Sequence[Group]) -> str:
    """Seconds by stage, mean over the runs of a group; one scale for all."""
    found = [_stage_seconds(group) for group in groups]
    top = max((value for times in found for value in times.values()), default=0.0)

    def draw(i: int, group: Group) -> str | None:
        total = sum(found[i].values())
        rows = [(k, v, f"{words.duration(v)}, {100 * v / total:.0f}%") for k, v in found[i].items()]
        return (
            charts.bars(rows, top=top, number=i) + f'<p class="key">in all {words.duration(total)}</p>'
            if rows
            else None
        )

    return cards(groups, "Time by stage", "of the whole run, compilation included; other: saving and logging", draw)


def _stage_seconds(group: Group) -> dict[str, float]:
    names = dict.fromkeys(key for run in group.runs for line in run.lines for key in line if key.startswith("time/"))
    sums = {n: float(sum(np.sum(curves.points(r, n)[1]) for r in group.runs)) / len(group.runs) for n in names}
    total = sums.pop("time/step_s", None)
    times = {n.removeprefix("time/").removesuffix("_s"): v for n, v in sums.items()}
    times = dict(sorted(times.items(), key=lambda item: -item[1]))
    rest = 0.0 if total is None else total - sum(times.values())
    return times | ({"other": rest} if rest > 0 else {})


# ---- config


def config(groups: Sequence[Group]) -> str:
    """The resolved config, a column a group: what differs, then every key, folded."""
    runs = [run for group in groups for run in group.runs]
    rows = {
        key: [_values([run.config.get(key, folders.ABSENT) for run in group.runs]) for group in groups]
        for key in folders.configs(runs)
    }
    different = folders.differing(runs)
    if len(runs) == 1:
        return _config_table(groups, rows, set())
    some = _config_table(groups, {key: rows[key] for key in different}, set())
    said = "What differs between the runs" if different else "Nothing differs between the runs"
    everything = _config_table(groups, rows, set(different))
    folded = f"<details><summary>All {len(rows)} keys</summary>{everything}</details>"
    return f"<h3>{said}</h3>{some if different else ''}{folded}"


def _values(values: list) -> str:
    return " / ".join(dict.fromkeys(words.value(value) for value in values))


def _config_table(groups: Sequence[Group], rows: dict[str, list[str]], marked: set[str]) -> str:
    head = "".join(f'<th scope="col">{name(groups, i)}</th>' for i in range(len(groups)))
    body = "".join(
        f'<tr{" class=differs" if key in marked else ""}><th scope="row"><code>{escape(key)}</code></th>'
        f"{''.join(f'<td><code>{escape(value)}</code></td>' for value in values)}</tr>"
        for key, values in rows.items()
    )
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Config"><table class="config"><thead><tr>'
        f'<th scope="col">key</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
