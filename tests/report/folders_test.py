"""Which runs are seeds of one config, and what is said of folders that are no runs."""

import re
import shutil

import pytest

from rljax import report
from rljax.report import folders


def read_all(*paths):
    return folders.grouped([folders.read(path) for path in paths])


def test_seeds_of_one_config_are_one_group_wherever_they_ran(make_run):
    (one,) = read_all(make_run("a", seed=0), make_run("b", seed=1, mesh={"data": 4}))
    assert one.label == "made" and [run.seed for run in one.runs] == [0, 1]


def test_runs_of_one_name_are_told_apart_by_the_key_that_differs(make_run):
    found = read_all(make_run("a"), make_run("b", learner={"learning_rate": 1e-4}), make_run("c", name="other"))
    assert [g.label for g in found] == [
        "made, learner.learning_rate = 1e-05",
        "made, learner.learning_rate = 0.0001",
        "other",
    ]


def test_the_same_config_and_seed_twice_are_two_groups_by_their_folders(make_run):
    found = read_all(make_run("a"), make_run("b"))
    assert [g.label for g in found] == ["made (a)", "made (b)"]
    assert len({g.label for g in read_all(make_run("c/run"), make_run("d/run"))}) == 2


def test_a_half_written_line_of_a_run_under_way_is_left_out(make_run):
    path = make_run()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "train/lo')
    run = folders.read(path)
    assert run.lines[-1]["step"] == 2 and not run.finished


@pytest.mark.parametrize(
    "break_it, error, told",
    [
        (lambda p: shutil.rmtree(p), FileNotFoundError, "does not exist"),
        (lambda p: (p / "config.json").unlink(), FileNotFoundError, "holds no config.json"),
        (lambda p: (p / "metrics.jsonl").unlink(), FileNotFoundError, "holds no metrics.jsonl"),
        (lambda p: (p / "config.json").write_text("{"), ValueError, "config.json cannot be read as JSON"),
        (lambda p: (p / "config.json").write_text('{"a": ' * 100_000), ValueError, "config.json is nested too deeply"),
        (lambda p: (p / "config.json").write_text("[]"), ValueError, "config.json holds a list"),
        (lambda p: (p / "config.json").write_text('{"name": "x"}'), ValueError, "config.json lacks 'seed'"),
        (lambda p: (p / "metrics.jsonl").write_text('{"step"'), ValueError, "no complete line yet"),
        (lambda p: (p / "metrics.jsonl").write_text('{}\n{"step": 1}\n'), ValueError, "metrics.jsonl, line 1 is no"),
        (lambda p: (p / "eval" / "000002.jsonl").write_text("{}\n"), ValueError, "000002.jsonl, line 1 is no"),
        (lambda p: (p / "eval" / "t-000002.json").write_text("{}"), ValueError, "t-000002.json has no 'measures'"),
    ],
)
def test_a_folder_that_is_no_runs_is_told_by_file(break_it, error, told, make_run):
    path = make_run(everything=True)
    break_it(path)
    with pytest.raises(error, match=re.escape(told)):
        report.run([path])


def test_a_folder_twice_and_too_many_configs_are_refused(make_run):
    first = make_run("0")
    with pytest.raises(ValueError, match="given twice"):
        report.run([first, first.parent / "0" / ".." / "0"])
    more = [make_run(str(i), name=f"n{i}") for i in range(1, 9)]
    with pytest.raises(ValueError, match="9 different configs are more than the 8"):
        report.run([first, *more])
