"""The page of a sweep: what it says and draws, by hand-made results."""

import re
import xml.etree.ElementTree

import pytest

from rljax import sweeps
from rljax.report import sweep


@pytest.fixture
def make_page(tmp_path):
    """make_page(text, result): the page of a sweep file of that text; result(point) is its accuracy, or None."""

    def make(text, result):
        path = tmp_path / "mine.py"
        path.write_text('CONFIG = "configs/cero.py"\n' + text)
        spec = sweeps.read(path)
        outcomes = []
        for point in sweeps.points(spec):
            accuracy = result(point)
            values = dict.fromkeys(sweeps.MEASURES, 0.25) | {"accuracy": accuracy, "seconds": 61.0}
            error = "exit status 2: <no> such model" if accuracy is None else None
            outcomes.append(sweeps.Outcome(point, None if accuracy is None else values, error))
        return sweep.page(spec, sweeps.ranked(outcomes, spec.metric), outcomes)

    return make


def pictures(page: str) -> list[xml.etree.ElementTree.Element]:
    """Every SVG of the page, read as XML."""
    return [xml.etree.ElementTree.fromstring(text) for text in re.findall("<svg.*?</svg>", page, re.DOTALL)]


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page[page.index("<body>") :]))


TWO = 'GRID = {"loss.clip_low": [0.1, 0.2, 0.3], "loss.aggregate": ["token", "sequence"]}\nSEEDS = [0, 1]\n'


def two(point) -> float:
    return point.setting["loss.clip_low"] + 0.1 * point.seed + 0.3 * (point.setting["loss.aggregate"] == "token")


def test_the_page_says_what_is_best_and_how_to_run_it(make_page):
    said = words_of(make_page(TWO, two))
    assert "Best greedy held-out accuracy: 65.0% with loss.clip_low = 0.3, loss.aggregate = token (2 seeds)." in said
    assert "12 of 12 runs finished." in said and "Runs without a result" not in said
    assert (
        "python -m rljax.main --config=configs/cero.py --config.loss.clip_low=0.3 --config.loss.aggregate=token" in said
    )
    assert said.index("loss.clip_low = 0.3, loss.aggregate = token 2 of 2 65.0% 60.0% to 70.0%") < said.index(
        "loss.clip_low = 0.1, loss.aggregate = sequence 2 of 2 15.0% 10.0% to 20.0%"
    )
    assert "1 min 01 s" in said


def test_a_key_of_a_grid_has_a_line_for_each_setting_of_the_others(make_page):
    page = make_page(TWO, two)
    by_clip, by_aggregate = (p for p in pictures(page) if p.get("viewBox") == "0 0 380 230")
    lines = [[float(xy.split(",")[1]) for xy in p.get("points").split()] for p in by_clip.iter("polyline")]
    assert [len(ys) for ys in lines] == [3, 3] and all(ys[0] > ys[1] > ys[2] for ys in lines)  # up is less
    assert all(high > low for high, low in zip(*reversed(lines), strict=True))  # token, then sequence
    assert [len(p.get("points").split()) for p in by_aggregate.iter("polyline")] == [2, 2, 2]
    assert len([p for p in by_clip.iter("path") if p.get("class") == "whisker"]) == 6
    labels = [text.text for text in by_clip.iter("text")]
    assert {"0.1", "0.2", "0.3", "loss.clip_low"} <= set(labels)
    legend = re.findall("<li>.*?</svg> (.*?)</li>", page)  # in the file's order
    assert legend[:2] == ["loss.aggregate = token", "loss.aggregate = sequence"]


def test_draws_lie_by_their_size_without_lines(make_page):
    text = 'RANDOM = {"learner.learning_rate": ("log", 1e-5, 1e-3), "learner.epochs": ("int", 1, 9)}\nTRIALS = 6\n'
    page = make_page(text, lambda point: 100 * point.setting["learner.learning_rate"])
    by_rate, by_epochs = (p for p in pictures(page) if p.get("viewBox") == "0 0 380 230")
    assert not list(by_rate.iter("polyline")) and not list(by_epochs.iter("polyline"))
    places = [m.get("transform")[10:-1].split(",") for m in by_rate.iter("g") if m.get("class") == "mark c0"]
    assert len(places) == 6
    by_x = sorted((float(x), -float(y)) for x, y in places)
    assert by_x == sorted(by_x, key=lambda xy: xy[1]) and len({x for x, _ in by_x}) == 6
    ticks = [t.text for t in by_rate.iter("text")]
    assert {"1e−5", "0.0001", "0.001"} & set(ticks) or {"1.0e−5", "1.0e−4", "0.001"} <= set(ticks), ticks


def test_runs_without_a_result_are_listed_with_their_error(make_page):
    page = make_page(TWO, lambda point: None if point.seed or point.setting["loss.clip_low"] == 0.1 else two(point))
    said = words_of(page)
    assert "4 of 12 runs finished." in said and "Runs without a result" in said
    assert "loss.clip_low=0.1__loss.aggregate=token__seed=0: exit status 2: &lt;no&gt; such model" in said
    assert "loss.clip_low = 0.1, loss.aggregate = token 0 of 2 – – – –" in said
    assert "1 of 2 60.0% 25.0%" in said  # one seed: no interval
    pictures(page)


def test_a_sweep_of_which_nothing_has_finished_has_a_page(make_page):
    said = words_of(make_page(TWO, lambda point: None))
    assert "0 of 12 runs finished." in said and "Best" not in said and "nan" not in said


def test_a_sweep_over_seeds_alone_has_a_page(make_page):
    said = words_of(make_page("GRID = {}\nSEEDS = [0, 1, 2]\n", lambda point: 0.70 + 0.05 * point.seed))
    assert "Sweep over seeds" in said and "the config as it is 3 of 3 75.0% 62.6% to 87.4%" in said


def test_an_interval_of_shares_ends_at_one(make_page):
    said = words_of(make_page("GRID = {}\nSEEDS = [0, 1, 2]\n", lambda point: 0.90 + 0.05 * point.seed))
    assert "95.0% 82.6% to 100.0%" in said  # .95 ± .124


def test_the_page_loads_nothing_and_runs_nothing(make_page):
    page = make_page(TWO, two)
    assert re.findall(r'(?:href|src|action)="([^"]*)"', page) == ["data:,"]
    assert "<script" not in page and "http" not in page and "@import" not in page and "url(" in page
    assert len(pictures(page)) > 6
