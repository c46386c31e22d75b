"""The points of the curves and their intervals, by hand."""

import numpy as np
import pytest
from scipy import stats

from rljax.report import curves, folders, words
from rljax.report.curves import Panel


def panel(metric: str, **more) -> Panel:
    return Panel(metric, "", "", **more)


def test_a_curve_runs_over_steps_rollouts_and_seconds(group):
    steps, values = curves.points(group.runs[0], "train/reward_mean")
    assert steps.tolist() == [1, 2] and values.tolist() == [0.25, 0.75]
    places = {"step": [0, 2], "rollouts": [0, 16], "seconds": [2, 2 + 3 + 4]}  # seconds after each line's evaluation
    for axis, expected in places.items():
        found = curves.curve(group, panel("eval/accuracy", sparse=True), axis)
        assert found.x.tolist() == expected and found.y.tolist() == [0.25, 0.75]


def test_what_a_step_does_not_have_is_left_out_of_its_curve(group):
    assert curves.points(group.runs[0], "train/grad_norm")[0].tolist() == [1]  # null at step 2
    assert len(curves.points(group.runs[0], "train/kl_ref")[0]) == 0
    assert curves.curve(group, panel("train/kl_ref"), "step") is None


def test_long_curves_are_means_of_consecutive_steps():
    x, y, width = curves.merged(np.arange(5.0), np.array([1.0, 2, 6, 10, 20]), most=2)
    assert (x.tolist(), y.tolist(), width) == ([1, 3.5], [3, 15], 3)
    assert curves.merged(np.arange(5.0), np.arange(5.0), most=5)[2] == 1


def test_the_interval_is_students_for_three_seeds_and_the_range_for_two():
    low, high = curves.interval(np.array([[0.1], [0.2], [0.3]]))
    half = 4.303 * 0.1 / 3**0.5  # quantile · standard deviation / √n
    np.testing.assert_allclose([low[0], high[0]], [0.2 - half, 0.2 + half], rtol=1e-12)
    assert curves.interval(np.array([0.5, 0.25])) == (0.25, 0.5)


@pytest.mark.parametrize("n", [3, 10, 21, 22, 40, 200])
def test_the_quantiles_are_those_of_scipy(n):
    values = np.arange(float(n))
    _, high = curves.interval(values)
    quantile = (high - values.mean()) / (values.std(ddof=1) / n**0.5)
    assert quantile == pytest.approx(stats.t.ppf(0.975, n - 1), rel=1e-3)


def test_seeds_become_their_mean_where_all_of_them_have_values(make_run):
    def lines(steps, values):  # 4 rollouts a step in one, 6 in the other
        more = 4 if steps[1] == 10 else 6
        return [{"step": s, "eval/accuracy": v, "rollouts/total": more * s} for s, v in zip(steps, values, strict=True)]

    first = make_run("a", lines=lines([0, 10, 20], [0.0, 0.5, 1.0]), seed=0)
    second = make_run("b", lines=lines([0, 12, 16], [0.2, 0.8, 0.8]), seed=1)
    (both,) = folders.grouped([folders.read(first), folders.read(second)])
    found = curves.curve(both, panel("eval/accuracy", format=words.share, sparse=True), "step")
    # At 10 the second lies on the line from 0.2 at 0 to 0.8 at 12; the second ends at 16.
    assert found.x.tolist() == [0, 10, 16]
    np.testing.assert_allclose(found.y, [0.1, (0.5 + 0.7) / 2, (0.8 + 0.8) / 2])
    np.testing.assert_allclose(found.low, [0.0, 0.5, 0.8])
    np.testing.assert_allclose(found.high, [0.2, 0.7, 0.8])
    over_rollouts = curves.curve(both, panel("eval/accuracy", format=words.share, sparse=True), "rollouts")
    assert over_rollouts.x.tolist() == [0, 50, 80] and over_rollouts.y.tolist() == found.y.tolist()
    assert curves.curve(both, panel("eval/accuracy", sparse=True), "seconds") is None  # not recorded


def test_seeds_that_share_no_place_have_no_curve(make_run):
    first = make_run("a", lines=[{"step": 0, "train/loss": 1.0}], seed=0)
    second = make_run("b", lines=[{"step": 5, "train/loss": 1.0}], seed=1)
    (both,) = folders.grouped([folders.read(first), folders.read(second)])
    assert curves.curve(both, panel("train/loss"), "step") is None
