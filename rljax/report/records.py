"""What the records of single prompts and completions say: difficulty, kept rewards, what training changed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rljax.report import words
from rljax.report.folders import Group, Run

UNSEEN = "not tried yet"
BINS = 5  # of the posterior mean
MOST_BARS = 8  # distinct rewards that a histogram shows one by one


class HeatMap(NamedTuple):
    """cells[row][column]: a number, or None where there is nothing."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[float | None]]


# ---- rollouts by difficulty and epoch


def by_kind(group: Group) -> HeatMap | None:
    """Rollouts of each kind of prompt in each epoch, mean over the group's runs; the kind most often right first.

    None where no run records rollouts, or the prompts have no kind.
    """
    right, made = collections.Counter(), collections.Counter()
    for run in group.runs:
        for prompt in _prompts(run):
            if "kind" in prompt:
                right[prompt["kind"]] += _successes(run, prompt)
                made[prompt["kind"]] += sum(prompt["rewards"].values())
    kinds = sorted(made, key=lambda kind: (-right[kind] / max(made[kind], 1), kind))
    rows = {kind: f"{kind} ({words.share(right[kind] / max(made[kind], 1))} right)" for kind in kinds}
    return _by_epoch(group, lambda run: [p.get("kind") for p in _prompts(run)], rows)


def by_success(group: Group) -> HeatMap | None:
    """Rollouts in each epoch by how often their prompt had been right before: the mean of its Beta posterior.

    The posterior is the prior of the config's block cero and every earlier rollout of the prompt in the run,
    whatever allocates the budget. None where no run records rollouts, or no prompt came twice.
    """
    names = [UNSEEN, *(f"{100 * i // BINS}–{100 * (i + 1) // BINS}% right" for i in range(BINS))]
    found = _by_epoch(group, _posterior_bins, {i - 1: name for i, name in enumerate(names)})
    return None if found is None or list(found.rows) == [UNSEEN] else found


def _posterior_bins(run: Run) -> list[int]:
    """For each prompt of each step, in order: -1 if it had no rollout before, else the bin of its posterior mean."""
    prior = run.config["cero.prior_alpha"], run.config["cero.prior_beta"]
    seen: dict[int, tuple[float, float]] = {}
    bins = []
    for prompt in _prompts(run):
        before = seen.get(prompt["id"])
        bins.append(-1 if before is None else min(int(BINS * before[0] / sum(before)), BINS - 1))
        alpha, beta = before if before is not None else prior
        right = _successes(run, prompt)
        seen[prompt["id"]] = (alpha + right, beta + sum(prompt["rewards"].values()) - right)
    return bins


def _by_epoch(group: Group, places: Callable[[Run], list], names: Mapping[Any, str]) -> HeatMap | None:
    """Rollouts by place (a row, named by `names`) and epoch, mean over the runs that record them."""
    runs = [run for run in group.runs if run.rollouts]
    counts: collections.Counter = collections.Counter()
    for run in runs:
        for place, prompt in zip(places(run), _prompts(run), strict=True):
            if place in names:
                counts[place, prompt["epoch"]] += prompt["rollouts"]
    if not counts:
        return None
    epochs = range(max(epoch for _, epoch in counts) + 1)
    rows = [place for place in names if any((place, epoch) in counts for epoch in epochs)]
    cells = [[counts[place, epoch] / len(runs) for epoch in epochs] for place in rows]
    return HeatMap([names[place] for place in rows], [str(epoch + 1) for epoch in epochs], cells)


def _prompts(run: Run) -> list[dict]:
    return [prompt for line in run.rollouts for prompt in line["prompts"]]


def _successes(run: Run, prompt: dict) -> int:
    threshold = run.config["cero.success_threshold"]
    return sum(count for reward, count in prompt["rewards"].items() if float(reward) >= threshold)


# ---- held-out accuracy by kind


def accuracy_by_kind(group: Group) -> HeatMap | None:
    """Greedy held-out accuracy of each kind at each evaluation, mean over the runs; None without kinds."""
    prefix = "eval/accuracy_"
    found: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for run in group.runs:
        for line in run.lines:
            for name in line:
                if name.startswith(prefix) and line[name] is not None:
                    found[name.removeprefix(prefix), line["step"]].append(line[name])
    if not found:
        return None
    steps = sorted({step for _, step in found})
    steps = [steps[round(i * (len(steps) - 1) / 7)] for i in range(8)] if len(steps) > 8 else steps
    kinds = sorted({kind for kind, _ in found}, key=lambda kind: (-_mean(found.get((kind, steps[0]), [0.0])), kind))

    def cell(kind: str, step: int) -> float | None:
        return _mean(found[kind, step]) if (kind, step) in found else None

    return HeatMap(kinds, [f"{step:,}" for step in steps], [[cell(k, s) for s in steps] for k in kinds])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- kept rewards


class Histogram(NamedTuple):
    """Shares of all scored rollouts and of the kept ones by reward, each summing to 1, and their numbers."""

    bins: list[str]
    made: list[float]
    kept: list[float]
    num_made: int
    num_kept: int


def kept_rewards(group: Group) -> Histogram | None:
    """Rewards of all rollouts and of those learned from, over the group's runs; None where none are recorded.

    A bar a value, or, of more than eight values, ten bins of one width.
    """
    made, kept = collections.Counter(), collections.Counter()
    for run in group.runs:
        for prompt in _prompts(run):
            for counter, name in ((made, "rewards"), (kept, "kept")):
                for reward, count in prompt[name].items():
                    counter[float(reward)] += count
    total, learned = sum(made.values()), sum(kept.values())
    if not total or not learned:
        return None
    values = sorted({*made, *kept})
    if len(values) <= MOST_BARS:
        bins = {value: i for i, value in enumerate(values)}
        names = [words.number(value) for value in values]
    else:
        low, width = values[0], (values[-1] - values[0]) / 10
        bins = {value: min(int((value - low) / width), 9) for value in values}
        names = [words.number(low + i * width) for i in range(10)]

    def shares(counter: collections.Counter, whole: int) -> list[float]:
        out = [0.0] * len(names)
        for value, count in counter.items():
            out[bins[value]] += count / whole
        return out

    return Histogram(names, shares(made, total), shares(kept, learned), total, learned)


# ---- completions before and after


class Change(NamedTuple):
    """A held-out prompt with its completions (greedy first) before and after training."""

    example: dict
    before: list[dict]
    after: list[dict]


# Right before, right after → what to call it, and how many of it to show.
KINDS_OF_CHANGE = {
    (False, True): ("turned right", 3),
    (True, False): ("turned wrong", 2),
    (True, True): ("stayed right", 1),
    (False, False): ("stayed wrong", 2),
}


def changes(run: Run) -> dict[str, list[Change]]:
    """{"turned right": …}: the held-out prompts by their greedy answer in the first and in the last evaluation.

    Empty where the run has no two evaluations of the same prompts with their completions.
    """
    if len(run.evals) < 2:
        return {}
    first, last = (run.evals[step] for step in sorted(run.evals))
    if [record["example"] for record in first] != [record["example"] for record in last]:
        return {}
    found: dict[str, list[Change]] = {name: [] for name, _ in KINDS_OF_CHANGE.values()}
    for before, after in zip(first, last, strict=True):
        name, _ = KINDS_OF_CHANGE[is_right(before["completions"][0]), is_right(after["completions"][0])]
        found[name].append(Change(before["example"], before["completions"], after["completions"]))
    return found


def is_right(completion: dict) -> bool:
    return completion["reward"] > 0.5
