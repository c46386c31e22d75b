"""Which curves the report shows, and their points: of one run, or the mean of several seeds with an interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rljax.report import words
from rljax.report.folders import Group, Run

MOST_POINTS = 60  # of a curve: longer ones show means of consecutive steps
# Quantiles 0.975 of Student's t with 1, 2, … degrees of freedom.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


class Panel(NamedTuple):
    """A chart of one metric.

    of: what its numbers are, in words. sparse: an evaluation's, with a mark at each. log: drawn by powers of ten
    where its values allow it.
    """

    metric: str
    title: str
    of: str
    format: words.Format = words.number
    sparse: bool = False
    log: bool = False


class Section(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


SECTIONS = (
    Section("Held-out prompts", (
        Panel("eval/accuracy", "Held-out accuracy, greedy", "share of held-out prompts answered right",
              words.share, True),
        Panel("eval/avg_at_k", "Held-out accuracy, sampled", "share of all sampled answers that are right",
              words.share, True),
        Panel("eval/pass_at_k", "Held-out prompts solved at least once",
              "share of prompts with a right one among their sampled answers", words.share, True),
        Panel("eval/truncated", "Held-out answers cut short", "share of sampled answers that met the token limit",
              words.share, True),
        Panel("eval/actor_accuracy", "The actor’s held-out accuracy, greedy",
              "share of held-out prompts that the rollouts’ model answers right", words.share, True),
        Panel("eval/actor_avg_at_k", "The actor’s held-out accuracy, sampled",
              "share of all its sampled answers that are right", words.share, True),
    )),
    Section("Training", (
        Panel("train/reward_mean", "Mean reward", "over all rollouts of a step"),
        Panel("train/kl_ref", "KL from the reference policy", "nats a token"),
        Panel("train/entropy", "Entropy of the policy", "nats a token"),
        Panel("rollouts/entropy", "Entropy of the rollouts", "of the model that makes them, nats a token"),
        Panel("train/learning_rate", "Learning rate", "of the last update of a step"),
        Panel("train/grad_norm", "Norm of the gradient", "before clipping", log=True),
        Panel("train/loss", "Loss", "of the policy"),
        Panel("train/clip_frac", "Clipped tokens", "share of tokens whose ratio left the clip range", words.share),
        Panel("train/logprob_gap", "Gap between sampler and learner",
              "mean difference of a token’s log probability, nats", log=True),
        Panel("rollouts/length_mean", "Length of the rollouts", "mean tokens"),
        Panel("rollouts/truncated", "Rollouts cut short", "share that met the token limit", words.share),
    )),
    Section("Where the rollouts go", (
        Panel("cero/effective_prompt_ratio", "Prompts that teach", "share of a step’s prompts with unlike rewards",
              words.share),
        Panel("rollouts/step", "Rollouts a step", "number made"),
        Panel("train/prompts", "Prompts in an update", "number with a nonzero advantage"),
        Panel("train/reward_variance", "Reward variance, all rollouts", "within a prompt, mean over prompts"),
        Panel("pods/variance", "Reward variance, kept rollouts", "within a prompt, mean over prompts"),
        Panel("pods/kept", "Rollouts kept a step", "number learned from"),
        Panel("cero/mu", "Price of the budget", "CERO’s μ, utility a rollout"),
        Panel("cero/q_mean", "Expected reward variance", "CERO’s q, mean over the training prompts"),
        Panel("cero/active", "Prompts worth their price", "share of training prompts with θ > μ", words.share),
        Panel("cero/explored", "Prompts visited", "share of training prompts with a grant so far", words.share),
    )),
    Section("Acceptance and KL between actor and policy", (
        Panel("jackpot/acceptance", "Accepted tokens", "share of the actor’s tokens", words.share),
        Panel("jackpot/kl_before", "KL of actor and policy, before rejection", "nats a token"),
        Panel("jackpot/kl_after", "KL of actor and policy, after rejection", "nats a token"),
        Panel("jackpot/ess", "Effective sample size", "share of the accepted tokens, by their weights", words.share),
        Panel("jackpot/weight_mean", "Mean weight of an accepted token", "1 is unbiased"),
        Panel("jackpot/at_c1", "Weights at their bound", "share of accepted tokens at c1", words.share),
        Panel("jackpot/lambda", "Strictness of the rejection", "λ"),
        Panel("actor/distill_kl", "KL that the actor is trained on", "nats a token"),
        Panel("actor/grad_norm", "Norm of the actor’s gradient", "before clipping", log=True),
    )),
    Section("Speed", (
        Panel("rollouts/tokens_per_s", "Speed of the rollouts", "tokens a second", log=True),
        Panel("time/rollout_s", "Time of a step’s rollouts", "seconds", log=True),
        Panel("time/update_s", "Time of a step’s update", "seconds", log=True),
    )),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """x, y: float64[N], x ascending. low, high: float64[N], the interval over seeds; None of one run.

    merged: steps whose mean a point is; 1 is each step alone.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    merged: int


class Axis(NamedTuple):
    """What a curve runs over. title: said under the chart."""

    name: str
    label: str
    title: str


AXES = (
    Axis("step", "Steps", "training steps"),
    Axis("rollouts", "Rollouts", "rollouts so far"),
    Axis("seconds", "Time", "{unit} since the start, evaluations and compilation included"),
)


def positions(run: Run, axis: str) -> np.ndarray:
    """float64[lines], where each line of metrics.jsonl lies on the axis; seconds after the line's evaluation.

    NaN where a run does not say.
    """
    if axis == "step":
        return np.array([line["step"] for line in run.lines], np.float64)
    if axis == "rollouts":
        return np.array([0 if line["step"] == 0 else _value(line, "rollouts/total") for line in run.lines], np.float64)
    return np.cumsum([_value(line, "time/step_s") for line in run.lines])


def points(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values), float64[N], of the lines that have the metric; its infinities and NaN (null) are left out."""
    steps, values = positions(run, "step"), np.array([_value(line, metric) for line in run.lines], np.float64)
    kept = np.isfinite(values)
    return steps[kept], values[kept]


def merged(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray, int]:
    """At most `most` points: means of equally many consecutive ones (the last of maybe fewer), and how many."""
    width = -(-len(x) // most)
    if width <= 1:
        return x, y, 1
    starts = np.arange(0, len(x), width)
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts, width


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean of values[n, …] over n ≥ 2 seeds, by Student's t; of two, the two values themselves."""
    n = len(values)
    if n == 2:
        return values.min(axis=0), values.max(axis=0)
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96 + 2.5 / (n - 1)
    half = quantile * values.std(axis=0, ddof=1) / math.sqrt(n)
    return values.mean(axis=0) - half, values.mean(axis=0) + half


def curve(group: Group, panel: Panel, axis: str) -> Curve | None:
    """The group's curve of a panel; None if none of its runs has the metric, or a place on the axis.

    Of several runs it is their mean at the steps between which all of them have values, linear between a run's
    points; over rollouts or seconds such a point lies at the mean of the runs' own places at its step.
    """
    tracks = [(run, *points(run, panel.metric)) for run in group.runs]
    found = [
        (run, *merged(steps, values, most=len(steps) if panel.sparse else MOST_POINTS))
        for run, steps, values in tracks if len(steps)
    ]  # fmt: skip
    if not found:
        return None
    start, end = max(steps[0] for _, steps, *_ in found), min(steps[-1] for _, steps, *_ in found)
    if start > end:  # no step that all have: one run stopped before another's first value
        return None
    inner = found[0][1]
    grid = np.unique(np.concatenate([[start], inner[(inner > start) & (inner < end)], [end]]))
    x = np.mean([_places(run, axis, grid) for run, *_ in found], axis=0)
    if not np.isfinite(x).all():
        return None
    values = np.array([np.interp(grid, steps, y) for _, steps, y, _ in found])
    width = max(width for *_, width in found)
    if len(found) == 1:
        return Curve(x=x, y=values[0], low=None, high=None, merged=width)
    low, high = interval(values)
    if panel.format is words.share:
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return Curve(x=x, y=values.mean(axis=0), low=low, high=high, merged=width)


def _places(run: Run, axis: str, steps: np.ndarray) -> np.ndarray:
    """Where the steps lie on the axis, linear between the run's lines; NaN where the run does not say."""
    return np.interp(steps, positions(run, "step"), positions(run, axis))


def constant(curves: Sequence[Curve | None]) -> float | None:
    """The one value of all the curves, if there is one."""
    values = {float(v) for c in curves if c is not None for v in c.y}
    return values.pop() if len(values) == 1 else None


def _value(line: dict, name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
