"""A sweep file becomes points, and finished points become rows with intervals; by hand-made files, no run."""

import json
import pathlib

import pytest

from rljax import main, sweeps
from rljax.config import ConfigError

ROOT = pathlib.Path(__file__).parent.parent
HEAD = 'CONFIG = "configs/cero.py:tiny"\n'
GRID = 'GRID = {"learner.learning_rate": [1e-4, 3e-4], "loss.aggregate": ["token", "sequence"]}\n'


@pytest.fixture
def make_spec(tmp_path):
    """make_spec(text, *overrides): the sweep of a file of that text after HEAD."""

    def make(text, *overrides, head=HEAD):
        path = tmp_path / "mine.py"
        path.write_text(head + text)
        return sweeps.read(path, overrides)

    return make


# --- points


def test_a_grid_is_every_combination_once_a_seed(make_spec):
    spec = make_spec(GRID + "SEEDS = [0, 7]\n")
    points = sweeps.points(spec)
    assert [p.number for p in points] == list(range(8)) and [p.seed for p in points] == [0] * 4 + [7] * 4
    values = [(p.setting["learner.learning_rate"], p.setting["loss.aggregate"]) for p in points]
    assert values == 2 * [(1e-4, "token"), (1e-4, "sequence"), (3e-4, "token"), (3e-4, "sequence")]
    assert points[0].args == (
        "--config=configs/cero.py:tiny", "--config.learner.learning_rate=0.0001", "--config.loss.aggregate=token",
        "--config.seed=0",
    )  # fmt: skip
    assert points[7].name == "learner.learning_rate=0.0003__loss.aggregate=sequence__seed=7"


def test_keys_of_one_axis_change_together(make_spec):
    spec = make_spec('GRID = {("rollout.samples", "rollout.slots"): [(8, 8), (4, 16)]}\n')
    assert spec.keys == ("rollout.samples", "rollout.slots")
    assert sweeps.settings(spec) == [
        {"rollout.samples": 8, "rollout.slots": 8}, {"rollout.samples": 4, "rollout.slots": 16},
    ]  # fmt: skip


def test_an_empty_grid_is_a_sweep_over_seeds(make_spec):
    points = sweeps.points(make_spec("GRID = {}\nSEEDS = [3, 4]\n"))
    assert [(p.name, p.args[1:]) for p in points] == [
        ("seed=3", ("--config.seed=3",)), ("seed=4", ("--config.seed=4",)),
    ]  # fmt: skip


def test_values_for_all_runs_are_in_every_command_and_not_in_the_names(make_spec):
    fixed = 'GRID = {"loss.clip_low": [0.1]}\nFIXED = {"task.shuffle_rewards": True}\n'
    spec = make_spec(fixed, "--config.budget.rollouts=5120")
    (point,) = sweeps.points(spec)
    assert point.name == "loss.clip_low=0.1__seed=0"
    assert point.args[1:3] == ("--config.task.shuffle_rewards=true", "--config.budget.rollouts=5120")
    assert sweeps.line(sweeps.command(spec, point.setting)) == (
        "python -m rljax.main --config=configs/cero.py:tiny --config.task.shuffle_rewards=true "
        "--config.budget.rollouts=5120 --config.loss.clip_low=0.1"
    )


def test_values_of_numpy_are_plain_numbers(make_spec):
    spec = make_spec('import numpy as np\nGRID = {"learner.learning_rate": np.array([1e-4, 0.5])}\n')
    assert [p.args[1] for p in sweeps.points(spec)] == [
        "--config.learner.learning_rate=0.0001", "--config.learner.learning_rate=0.5",
    ]  # fmt: skip
    assert json.dumps(sweeps.settings(spec))


def test_a_points_name_does_not_depend_on_the_rest_of_the_sweep(make_spec):
    few = sweeps.points(make_spec('GRID = {"learner.learning_rate": [1e-4]}\n'))
    many = sweeps.points(make_spec('GRID = {"learner.learning_rate": [1e-5, 0.0001]}\nSEEDS = [5, 0]\n'))
    assert few[0].name in [p.name for p in many]


@pytest.mark.parametrize("a, b", [("a/b", "a-b"), ("x" * 300, "x" * 299 + "y"), ("", "-")])
def test_names_are_names_of_folders_and_differ(a, b, make_spec):
    points = sweeps.points(make_spec(f'GRID = {{"task.path": [{a!r}, {b!r}]}}\n'))
    names = [p.name for p in points]
    assert len(set(names)) == 2 and all(len(name) < 200 and set("/,: ").isdisjoint(name) for name in names)


# --- draws

RANDOM = """
RANDOM = {"learner.learning_rate": ("log", 1e-5, 1e-3), "loss.clip_low": ("uniform", 0.1, 0.3),
          "learner.epochs": ("int", 1, 3), "loss.aggregate": ("choice", ["token", "sequence"])}
"""


def test_draws_lie_in_their_ranges_and_spread_as_they_are_told(make_spec):
    drawn = sweeps.settings(make_spec(RANDOM + "TRIALS = 400\n"))
    rates = sorted(s["learner.learning_rate"] for s in drawn)
    assert 1e-5 <= rates[0] < 1.2e-5 and 8e-4 < rates[-1] <= 1e-3
    assert 0.6e-4 < rates[200] < 1.6e-4  # the middle of the logarithm, not .0005
    clips = sorted(s["loss.clip_low"] for s in drawn)
    assert 0.1 <= clips[0] < 0.11 and 0.29 < clips[-1] <= 0.3 and 0.18 < clips[200] < 0.22
    assert {s["learner.epochs"] for s in drawn} == {1, 2, 3}
    counts = [sum(s["learner.epochs"] == n for s in drawn) for n in (1, 2, 3)]
    assert min(counts) > 100
    assert {s["loss.aggregate"] for s in drawn} == {"token", "sequence"}
    assert all(float(f"{rate:.3g}") == rate for rate in rates)


def test_draws_are_those_of_their_seed_and_more_trials_keep_them(make_spec):
    few = sweeps.settings(make_spec(RANDOM + "TRIALS = 3\n"))
    assert sweeps.settings(make_spec(RANDOM + "TRIALS = 9\n"))[:3] == few
    assert sweeps.settings(make_spec(RANDOM + "TRIALS = 3\nDRAW_SEED = 1\n")) != few
    alone = sweeps.settings(make_spec('RANDOM = {"loss.clip_low": ("uniform", 0.1, 0.3)}\nTRIALS = 3\n'))
    assert [s["loss.clip_low"] for s in alone] == [s["loss.clip_low"] for s in few]


def test_draws_are_all_different_and_a_space_that_is_too_small_is_told(make_spec):
    rule = 'RANDOM = {"learner.epochs": ("int", 1, 4)}\n'
    assert sorted(s["learner.epochs"] for s in sweeps.settings(make_spec(rule + "TRIALS = 4\n"))) == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="only 4 different settings; lower TRIALS = 5"):
        sweeps.settings(make_spec(rule + "TRIALS = 5\n"))


# --- mistakes


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "neither GRID and RANDOM"),
        (GRID + RANDOM + "TRIALS = 1\n", "both GRID and RANDOM"),
        (RANDOM, "give both or none"),
        (GRID + "TRIALS = 3\n", "give both or none"),
        (GRID + "SEED = [0]\n", "unknown name SEED; did you mean SEEDS?"),
        (GRID + "ZZZ = 1\n", "unknown name ZZZ; write your own in lower case; known: CONFIG, GRID"),
        (GRID + "SEEDS = 3\n", "SEEDS is a int; give a list"),
        (GRID + "SEEDS = []\n", "SEEDS = []; give one or more different integers"),
        (GRID + "SEEDS = [1, 1]\n", "SEEDS = [1, 1]; give one or more different integers"),
        (GRID + "METRIC = 'loss'\n", "METRIC = 'loss' is unknown; known: accuracy, avg_at_k, gain"),
        (GRID + "FIXED = {'loss.aggregate': 'token'}\n", "loss.aggregate is in GRID and in FIXED"),
        ('GRID = {"learner.learning_rat": [1]}\n', "GRID: unknown config key 'learner.learning_rat'; did you mean"),
        ('GRID = {"seed": [1]}\n', "seed is in GRID; list the seeds in SEEDS"),
        ("GRID = {3: [1]}\n", "GRID: 3 is no config key"),
        ('GRID = {"loss.clip_low": 0.1}\n', "GRID['loss.clip_low'] = 0.1 holds no values"),
        ('GRID = {"loss.clip_low": []}\n', "holds no values"),
        ('GRID = {"loss.clip_low": [0.1, 0.10]}\n', "GRID['loss.clip_low'] has 0.1 twice"),
        ('GRID = {("pods.rule", "pods.keep"): [("random", 4), "all"]}\n', "has 'all'; give a value for each of its 2"),
        ('RANDOM = {"loss.clip_low": ("lgo", 1, 2)}\nTRIALS = 1\n', "is no draw; give one of (\"log\", LOW, HIGH)"),
        ('RANDOM = {"loss.clip_low": [0.1, 0.2]}\nTRIALS = 1\n', "is no draw"),
        ('RANDOM = {"loss.clip_low": ("log", 0, 2)}\nTRIALS = 1\n', "has no logarithm"),
        ('RANDOM = {"loss.clip_low": ("uniform", 2, 1)}\nTRIALS = 1\n', "give two numbers, the lower first"),
        ('RANDOM = {"learner.epochs": ("int", 1.0, 2)}\nTRIALS = 1\n', "give two integers, the lower first"),
        ('RANDOM = {"loss.clip_low": ("choice", 1)}\nTRIALS = 1\n', "give a list of values"),
        ('RANDOM = {"loss.clip_low": ("uniform", 0, 1)}\nTRIALS = 0\n', "TRIALS = 0; draw at least 1"),
        ("x = (\n", "SyntaxError"),
        ("x = 1\ny = x + z\n", "line 3: NameError: name 'z' is not defined"),
    ],
)  # fmt: skip
def test_mistakes_in_a_sweep_file_are_told(text, told, make_spec):
    with pytest.raises(ConfigError) as caught:
        make_spec(text)
    assert told in str(caught.value) and "mine.py" in str(caught.value)


def test_a_file_without_config_and_a_missing_file_are_told(make_spec, tmp_path):
    with pytest.raises(ConfigError, match='has no CONFIG; set it to a config file, such as CONFIG = "configs'):
        make_spec(GRID, head="")
    with pytest.raises(ConfigError, match="absent.py does not exist"):
        sweeps.read(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match="loss.aggregate is in GRID and in the command line"):
        make_spec(GRID, "--config.loss.aggregate=token")


def test_a_value_that_would_arrive_as_another_is_told(make_spec):
    def arrive(values):
        for point in sweeps.points(make_spec(f"GRID = {values!r}\n")):
            sweeps.check_arrival(point, main.parse(["sweep", *point.args]).config)

    arrive({"rollout.samples": [8], "loss.dual_clip": [None, 2], "task.shuffle_rewards": [True, False]})
    with pytest.raises(ConfigError, match="rollout.samples = '8' arrives as 8; give a value of type int"):
        arrive({"rollout.samples": ["8"]})
    with pytest.raises(ConfigError, match="--config.rollout.samples=8.5 is not of type int"):
        arrive({"rollout.samples": [8.5]})
    with pytest.raises(ConfigError, match="task.shuffle_rewards = 1 arrives as True; give a value of type bool"):
        arrive({"task.shuffle_rewards": [1]})


# --- results


def finish(folder, point, first=0.25, last=0.5, sampled=0.4, seconds=10.0):
    """A run folder as rljax leaves it, as far as a sweep reads it."""
    path = folder / point.name
    path.mkdir(parents=True)
    ends = {"first": {"accuracy": first, "avg_at_k": 0.1}, "last": {"accuracy": last, "avg_at_k": sampled}}
    (path / "summary.json").write_text(json.dumps({"eval": ends, "wall_s": seconds}))


def test_a_runs_measures_are_its_last_evaluation_gain_and_seconds(make_spec, tmp_path):
    points = sweeps.points(make_spec(GRID))
    finish(tmp_path, points[0], first=0.25, last=0.75, sampled=0.5, seconds=12.5)
    assert sweeps.measures(tmp_path / points[0].name) == {
        "accuracy": 0.75, "avg_at_k": 0.5, "gain": 0.5, "seconds": 12.5,
    }  # fmt: skip
    assert sweeps.measures(tmp_path / points[1].name) is None


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, not an object"),
        ("{}", "no summary of a run (KeyError: 'eval')"),
        ('{"eval": {"first": {"accuracy": null}, "last": {"accuracy": 1, "avg_at_k": 1}}, "wall_s": 1}', "no summary"),
        ('{"eval": {"first": {"accuracy": NaN}, "last": {"accuracy": 1, "avg_at_k": 1}}, "wall_s": 1}', "not finite"),
    ],
)
def test_a_broken_summary_is_told_by_its_file(text, told, tmp_path):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        sweeps.measures(tmp_path)
    assert told in str(caught.value) and str(caught.value).startswith(f"{tmp_path / 'summary.json'} ")


def test_an_estimate_is_the_mean_with_students_interval():
    three = sweeps.estimate({0: 0.70, 1: 0.75, 2: 0.80})  # .75 ± 4.303 · .05 / √3
    assert three.mean == pytest.approx(0.75) and three.seeds == {0: 0.70, 1: 0.75, 2: 0.80}
    assert (three.low, three.high) == pytest.approx((0.75 - 0.124217, 0.75 + 0.124217), abs=1e-5)
    two = sweeps.estimate({0: 0.2, 5: 0.6})
    assert two[:3] == pytest.approx((0.4, 0.2, 0.6))
    assert sweeps.estimate({3: 0.5})[:3] == (0.5, 0.5, 0.5)


def test_the_best_has_the_most_finished_seeds_and_then_the_largest_mean(make_spec, tmp_path):
    spec = make_spec('GRID = {"loss.clip_low": [0.1, 0.2, 0.3, 0.4]}\nSEEDS = [0, 1]\n')
    points = sweeps.points(spec)
    assert [(p.setting["loss.clip_low"], p.seed) for p in points[:2]] == [(0.1, 0), (0.2, 0)]
    for number, last in {0: 0.5, 4: 0.7, 1: 0.6, 5: 0.8, 2: 0.99}.items():  # .3 has one seed, .4 none
        finish(tmp_path, points[number], last=last, sampled=1 - last)
    (tmp_path / points[6].name).mkdir()
    (tmp_path / points[6].name / sweeps.FAILURE_FILE).write_text('{"status": 1, "error": "exit status 1: no"}')
    outcomes = sweeps.outcomes(points, tmp_path)
    rows = sweeps.ranked(outcomes, "accuracy")
    assert [row.setting["loss.clip_low"] for row in rows] == [0.2, 0.1, 0.3, 0.4]
    assert [(row.finished, row.planned) for row in rows] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert rows[0].estimates["accuracy"].mean == pytest.approx(0.7)
    assert [row.setting["loss.clip_low"] for row in sweeps.ranked(outcomes, "avg_at_k")] == [0.1, 0.2, 0.3, 0.4]

    record = json.loads(json.dumps(sweeps.record(spec, rows, outcomes)))
    assert record["best"] == {
        "values": {"loss.clip_low": 0.2},
        "command": "python -m rljax.main --config=configs/cero.py:tiny --config.loss.clip_low=0.2",
    }
    assert (
        record["settings"][0]["accuracy"]["seeds"] == {"0": 0.6, "1": 0.8} and "accuracy" not in record["settings"][3]
    )
    statuses = [point["status"] for point in record["points"]]
    assert statuses == ["finished"] * 3 + ["unfinished"] + ["finished"] * 2 + ["failed", "unfinished"]
    assert record["points"][6]["error"] == "exit status 1: no"


def test_without_a_finished_run_there_is_no_best(make_spec, tmp_path):
    spec = make_spec(GRID)
    outcomes = sweeps.outcomes(sweeps.points(spec), tmp_path)
    rows = sweeps.ranked(outcomes, "gain")
    assert sweeps.best(spec, rows) is None and sweeps.record(spec, rows, outcomes)["best"] is None
    assert [row.setting for row in rows] == sweeps.settings(spec)


def test_the_shipped_sweep_resolves():
    spec = sweeps.read(ROOT / "configs" / "sweeps" / "learning_rate.py")
    points = sweeps.points(spec)
    assert len(points) == 9
    for point in points:
        sweeps.check_arrival(point, main.parse(["sweep", *point.args]).config)
