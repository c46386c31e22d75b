"""Where charts put their values, and how numbers read."""

import re

import numpy as np
import pytest

from rljax.report import charts, curves, words
from rljax.report.curves import Curve


def chart(*found, **more) -> str:
    known = [(i, f"run {i}", Curve(x=np.array(x, float), y=np.array(y, float), low=None, high=None, merged=1))
             for i, (x, y) in enumerate(found)]  # fmt: skip
    more = {"title": "T", "x_title": "training steps", "form": words.number, "sparse": True} | more
    return charts.line_chart(known, **more)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'<polyline[^>]*points="([^"]*)"', svg)
    ]


def test_a_line_goes_from_corner_to_corner_of_its_axes():
    (line,) = polylines(chart(([0, 5, 10], [0, 0.25, 1])))
    right, bottom = charts.WIDTH - charts.RIGHT, charts.HEIGHT - charts.BOTTOM
    assert line[0] == (charts.LEFT, bottom) and line[-1] == (right, charts.TOP)
    assert line[1] == pytest.approx(((charts.LEFT + right) / 2, bottom - (bottom - charts.TOP) / 4), abs=0.1)


def test_values_far_apart_are_drawn_by_powers_of_ten_where_a_panel_asks_for_it():
    (line,) = polylines(chart(([0, 1, 2], [0.01, 0.1, 1]), log=True))
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1])
    # not: unasked, within a factor of 20, and where a value has no logarithm
    for first, log in ((0.01, False), (0.06, True), (0.0, True)):
        (line,) = polylines(chart(([0, 1, 2], [first, 0.1, 1]), log=log))
        assert line[0][1] - line[1][1] == pytest.approx((line[1][1] - line[2][1]) * (0.1 - first) / 0.9, abs=0.1)


def test_a_band_that_leaves_the_axis_ends_at_its_edge():
    x, y = np.arange(2.0), np.array([0.01, 1.0])
    band = Curve(x=x, y=y, low=np.array([-1.0, 0.5]), high=np.array([0.02, 9.0]), merged=1)
    svg = charts.line_chart([(0, "run", band)], title="T", x_title="steps", form=words.number, log=True)
    (points,) = re.findall(r'<polygon[^>]*points="([^"]*)"', svg)
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert max(heights) == charts.HEIGHT - charts.BOTTOM and min(heights) == charts.TOP


def test_two_charts_of_one_range_have_one_scale():
    (alone,), (shared,) = polylines(chart(([0, 1], [0, 1]))), polylines(chart(([0, 1], [0, 1]), y_range=(0, 2)))
    bottom = charts.HEIGHT - charts.BOTTOM
    assert bottom - shared[1][1] == pytest.approx((bottom - alone[1][1]) / 2)


def test_lines_that_end_together_have_labels_apart():
    svg = chart(*[([0, 1], [0, 1])] * 8)
    places = [float(y) for y in re.findall(r'class="end c\d" x="[\d.]+" y="([\d.]+)"', svg)]
    assert len(places) == 8 and (np.diff(sorted(places)) >= charts.LABEL_GAP - 0.11).all()
    assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM + 10 for y in places)


def test_lines_differ_in_dashes_and_marks_and_not_in_colour_alone():
    assert len(set(charts.DASHES)) == len(set(charts.MARKS)) == len(set(words.GLYPHS)) == charts.MOST_GROUPS


def test_a_chart_says_its_values_to_those_who_hover_or_do_not_see():
    svg = chart(([0, 60], [0.5, 0.75]), form=words.share, title="Accuracy")
    assert 'aria-label="Accuracy, by training steps. run 0: 50.0% to 75.0%"' in svg
    assert "<title>60 training steps\n● run 0: 75.0%</title>" in svg


def test_a_single_point_is_a_mark():
    svg = chart(([3], [0.5]))
    assert "<polyline" not in svg and svg.count('class="mark c0"') == 1 and "nan" not in svg


def test_long_times_are_in_minutes_or_hours():
    title = curves.AXES[2].title
    for seconds, unit, last in ((90, "seconds", "90"), (600, "minutes", "10.0"), (7200 * 2, "hours", "4.0")):
        assert f"<title>{last} {unit} since the start" in chart(([0, seconds], [0, 1]), x_title=title)


def test_a_cell_is_as_dark_as_its_share_of_the_top():
    table = charts.heat_map(["a"], ["x", "y", "z"], [[0.0, 5.0, None]], corner="k", form=words.number, top=10)
    assert '<td style="--p:0%">0</td><td style="--p:50%">5</td><td class="none">–</td>' in table


# --- words


@pytest.mark.parametrize(
    "form, value, text",
    [
        (words.share, 0.355, "35.5%"),
        (words.share, 0.000326, "0.033%"),
        (words.share, 0.0, "0.0%"),
        (words.points, 0.345, "+34.5 points"),
        (words.points, -0.01, "−1.0 points"),
        (words.number, 0.0, "0"),
        (words.number, 81920, "81,920"),
        (words.number, -0.02604, "−0.026"),
        (words.number, 4.02e-6, "4.0e−6"),
        (words.duration, 0.2, "0.20 s"),
        (words.duration, 45.24, "45 s"),
        (words.duration, 75.24, "1 min 15 s"),
        (words.duration, 591.3, "9 min 51 s"),
        (words.duration, 8040, "2 h 14 min"),
        (words.value, None, "none"),
        (words.value, "", '""'),
        (words.value, True, "true"),
        (words.value, 6400, "6,400"),
        (words.value, 1e-5, "1e-05"),
    ],
)
def test_numbers_read_well(form, value, text):
    assert form(value) == text


@pytest.mark.parametrize(
    "low, high, expected",
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.36, 0.745, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]), (3, 3, [1, 2, 3, 4, 5])],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    np.testing.assert_allclose(words.ticks(low, high), expected)
