"""launch/sweep.py starts, skips, restarts, stops and reports runs; a small script stands in for them."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch import sweep

ROOT = pathlib.Path(__file__).parent.parent
CERO = ROOT / "configs" / "cero.py"

# As rljax.main, as far as a sweep sees it. What a rate does stands in behaviour.json beside it.
FAKE = """
import json, os, pathlib, signal, sys, time

args = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
folder = pathlib.Path(args["workdir"])
rate, seed = float(args["config.learner.learning_rate"]), int(args["config.seed"])
(folder / "tries").open("a").write("x")
(folder / "environment").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
what = json.loads((pathlib.Path(__file__).parent / "behaviour.json").read_text()).get(f"{rate:g}", "finish")
print("a line on stdout")
if what == "fail":
    print("warning: first\\n\\nerror: no such model\\n", file=sys.stderr)
    sys.exit(2)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "nothing":
    sys.exit(0)
if what == "preempted" and len((folder / "tries").read_text()) < 3:
    sys.exit(75)
if what in ("wait", "deaf"):
    def stop(number, frame):
        (folder / "saved").write_text("")
        if what == "wait":
            sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    (folder / "ready").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)
last = {"accuracy": 0.5 + 100 * rate + seed / 10, "avg_at_k": 0.5}
ends = {"first": {"accuracy": 0.25, "avg_at_k": 0.1}, "last": last}
(folder / "summary.json").write_text(json.dumps({"eval": ends, "wall_s": 3.0}))
"""


class Sweep:
    """A sweep file, the folder of its runs, and what stands in for rljax.main."""

    def __init__(self, path: pathlib.Path, rates, behaviour, seeds):
        self.file, self.folder, self.fake = path / "mine.py", path / "runs", path / "fake.py"
        self.fake.write_text(FAKE)
        (path / "behaviour.json").write_text(json.dumps(behaviour))
        text = f"CONFIG = {str(CERO)!r}\nGRID = {{'learner.learning_rate': {rates}}}\nSEEDS = {seeds}\n"
        self.file.write_text(text)
        self.argv = ["sweep", str(self.file), f"--workdir={self.folder}"]

    def run(self, *args: str) -> int:
        return sweep.main([*self.argv, *args], program=(sys.executable, str(self.fake)))

    def start(self) -> subprocess.Popen:
        program = [sys.executable, str(self.fake)]
        code = f"import sys; from launch import sweep; sys.exit(sweep.main(sys.argv, program={program}))"
        command = [sys.executable, "-c", code, *self.argv[1:], "--jobs=2"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)

    def at(self, rate: float, seed: int = 0) -> pathlib.Path:
        return self.folder / f"learner.learning_rate={rate}__seed={seed}"

    def tries(self, rate: float, seed: int = 0) -> int:
        return len((self.at(rate, seed) / "tries").read_text())

    def json(self) -> dict:
        return json.loads((self.folder / "sweep.json").read_text())


@pytest.fixture
def make_sweep(tmp_path):
    def make(rates=(0.001, 0.002), behaviour=None, seeds=(0,)):
        return Sweep(tmp_path, list(rates), behaviour if behaviour is not None else {}, list(seeds))

    return make


def test_all_runs_finish_and_the_best_is_told(make_sweep, capsys):
    mine = make_sweep(seeds=(0, 1))
    assert mine.run("--jobs=3", "--config.budget.rollouts=20480") == 0
    assert all(mine.tries(rate, seed) == 1 for rate in (0.001, 0.002) for seed in (0, 1))
    out = capsys.readouterr().out
    # .5 + .2 and .5 + .2 + .1: a mean of .75, .05 from the one and from the other; a gain of .5
    assert "0.750 ± 0.050" in out and "0.650 ± 0.050" in out and "0.500 ± 0.050" in out
    assert out.index("0.750 ± 0.050") < out.index("0.650 ± 0.050")
    best = f"python -m rljax.main --config={CERO} --config.budget.rollouts=20480 --config.learner.learning_rate=0.002"
    assert f"best by accuracy: {best}\n" in out
    assert mine.json()["best"] == {"values": {"learner.learning_rate": 0.002}, "command": best}
    assert mine.json()["settings"][0]["accuracy"]["mean"] == pytest.approx(0.75)
    assert "<svg" in (mine.folder / "sweep.html").read_text()
    assert (mine.at(0.001) / "stdout.txt").read_text() == "a line on stdout\n"
    assert not list(mine.folder.glob("*.tmp"))


def test_finished_runs_are_skipped_and_a_failed_one_is_tried_again(make_sweep, capsys):
    mine = make_sweep(behaviour={"0.001": "fail"})
    assert mine.run() == 1
    assert json.loads((mine.at(0.001) / "failure.json").read_text()) == {
        "status": 2, "error": "exit status 2: error: no such model",
    }  # fmt: skip
    assert [p["status"] for p in mine.json()["points"]] == ["failed", "finished"]
    assert "failed: exit status 2: error: no such model" in capsys.readouterr().out
    assert "error: no such model" in (mine.folder / "sweep.html").read_text()
    (mine.fake.parent / "behaviour.json").write_text("{}")
    assert mine.run() == 0
    assert mine.tries(0.001) == 2 and mine.tries(0.002) == 1 and not (mine.at(0.001) / "failure.json").exists()
    assert mine.run() == 0 and mine.tries(0.001) == 2
    assert "2 of 2 runs, 2 of them finished before" in capsys.readouterr().out


@pytest.mark.parametrize(
    "what, error",
    [("kill", "killed by SIGKILL: nothing on stderr"), ("nothing", "ended without a summary.json")],
)
def test_how_a_run_failed_is_told(what, error, make_sweep):
    mine = make_sweep(behaviour={"0.001": what})
    assert mine.run() == 1
    assert mine.json()["points"][0]["error"] == error and mine.json()["points"][1]["status"] == "finished"


def test_a_preempted_run_is_started_again(make_sweep, capsys, monkeypatch):
    mine = make_sweep(behaviour={"0.001": "preempted"})
    monkeypatch.setattr(sweep, "MOST_RESTARTS", 1)
    assert mine.run() == 1 and mine.tries(0.001) == 2
    assert mine.json()["points"][0]["error"].startswith("exit status 75: ")
    monkeypatch.setattr(sweep, "MOST_RESTARTS", 2)
    assert mine.run() == 0 and mine.tries(0.001) == 3
    assert capsys.readouterr().out.count("preempted, started again") == 1


def test_one_point_of_an_array(make_sweep, capsys):
    mine = make_sweep(seeds=(0, 1))
    assert mine.run("--point=2") == 0
    assert [path.name for path in mine.folder.iterdir() if path.is_dir()] == [mine.at(0.001, 1).name]
    assert [p["status"] for p in mine.json()["points"]] == ["unfinished", "unfinished", "finished", "unfinished"]
    assert mine.run("--point=2") == 0 and mine.tries(0.001, 1) == 1
    assert mine.run("--point=4") == 2
    assert "--point=4 is no run of this sweep; it has 4, from 0" in capsys.readouterr().err


def test_the_commands_of_what_is_left_are_printed_and_nothing_else(make_sweep, capsys):
    mine = make_sweep()
    mine.run("--point=0")
    capsys.readouterr()
    assert mine.run("--print") == 0
    assert capsys.readouterr().out == (
        f"python -m rljax.main --config={CERO} --config.learner.learning_rate=0.002 --config.seed=0 "
        f"--workdir={mine.at(0.002)}\n"
    )
    assert not mine.at(0.002).exists()


def test_a_report_starts_nothing(make_sweep, capsys):
    mine = make_sweep()
    assert mine.run("--report") == 2
    assert "does not exist; name the folder of a sweep" in capsys.readouterr().err
    mine.run("--point=0")
    (mine.folder / "sweep.json").unlink()
    assert mine.run("--report") == 1 and not mine.at(0.002).exists()
    assert [p["status"] for p in mine.json()["points"]] == ["finished", "unfinished"]


@pytest.mark.parametrize(
    "rates, args, told",
    [
        ("[0.001, -1]", [], ["learning_rate=-1__seed=0", "learner.learning_rate = -1.0"]),
        ("['x']", [], ["--config.learner.learning_rate=x is not of type float"]),
        ("[0.1]", ["--config.rollout.sampels=3"], ["unknown config key 'rollout.sampels'"]),
        ("[0.1]", ["--config.rollout.samples=32"], ["rollout.slots = 16"]),
        ("[0.1]", ["--jbos=3"], ["unknown argument '--jbos=3'"]),
        ("[0.1]", ["--config.seed", "3"], ["unknown argument '--config.seed'", "--config.KEY=VALUE"]),
        ("[0.1]", ["--jobs=-1"], ["--jobs=-1 is less than 0"]),
    ],
)
def test_a_mistake_is_told_before_anything_starts(rates, args, told, make_sweep, capsys):
    mine = make_sweep()
    mine.file.write_text(f"CONFIG = {str(CERO)!r}\nGRID = {{'learner.learning_rate': {rates}}}\n")
    assert mine.run(*args) == 2 and not list(mine.file.parent.glob("runs/*/tries"))
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and all(part in err for part in told), err


def test_a_folder_with_runs_of_another_config_is_refused(make_sweep, capsys):
    mine = make_sweep()
    assert mine.run() == 0
    config = sweep.main_lib.parse(["m", f"--config={CERO}", "--config.learner.learning_rate=0.001"]).config
    (mine.at(0.001) / "config.json").write_text(json.dumps(sweep.config_lib.to_dict(config)))
    (mine.at(0.001) / "metrics.jsonl").write_text("")
    assert mine.run() == 0
    for change, was in (("budget.rollouts=20480", "81920, is now 20480"), ("eval.samples=8", "4, is now 8")):
        assert mine.run(f"--config.{change}") == 2
        err = capsys.readouterr().err
        assert f"{change.split('=')[0]} was {was}" in err and "Name another --workdir" in err


def test_a_run_that_another_process_has_is_left_to_it(make_sweep, capsys):
    mine = make_sweep()
    mine.at(0.001).mkdir(parents=True)
    with open(mine.at(0.001) / "stderr.txt", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert mine.run() == 1
    assert not (mine.at(0.001) / "tries").exists() and mine.tries(0.002) == 1
    assert "already running in another process" in capsys.readouterr().out
    assert mine.run() == 0


# --- stopping


def wait_for(*files: pathlib.Path) -> None:
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until, f"{files} did not appear"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_runs_which_may_save(number, status, make_sweep):
    mine = make_sweep(rates=(0.001, 0.002, 0.003), behaviour={"0.001": "wait", "0.002": "wait"})
    process = mine.start()
    ready = [mine.at(rate) / "ready" for rate in (0.001, 0.002)]
    wait_for(*ready)
    process.send_signal(number)
    if number == signal.SIGTERM:
        time.sleep(0.03)
        process.send_signal(number)  # so soon it is no second demand
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status, out
    assert all((mine.at(rate) / "saved").exists() for rate in (0.001, 0.002))
    assert all(gone(int(file.read_text())) for file in ready)
    assert not mine.at(0.003).exists()  # nothing starts any more
    assert [p["status"] for p in mine.json()["points"]] == ["unfinished"] * 3
    assert "the same command goes on from here" in out


def test_a_second_signal_kills(make_sweep):
    mine = make_sweep(rates=(0.001,), behaviour={"0.001": "deaf"})
    process = mine.start()
    wait_for(mine.at(0.001) / "ready")
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + 60
    while not (mine.at(0.001) / "saved").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert gone(int((mine.at(0.001) / "ready").read_text()))


# --- how many at a time


def test_runs_that_fit():
    assert sweep.fitting([], cores=2, gib=64.0) == 1
    assert sweep.fitting([], cores=16, gib=64.0) == 8
    assert sweep.fitting([], cores=16, gib=9.0) == 2
    assert sweep.fitting([], cores=1, gib=0.5) == 1
    assert sweep.fitting(["0", "3"], cores=64, gib=64.0) == 2
    assert sweep.at_a_time(5, 3, []) == 3 and sweep.at_a_time(2, 3, []) == 2 and 1 <= sweep.at_a_time(0, 3, []) <= 3
    with pytest.raises(ValueError, match="--jobs=3 is more than the 2 GPUs here"):
        sweep.at_a_time(3, 9, ["0", "1"])
    assert 0 < sweep.available_gib() < 1e5


def test_gpus_are_those_that_are_visible():
    assert sweep.gpus({"CUDA_VISIBLE_DEVICES": "2,5"}) == ["2", "5"]
    assert sweep.gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert sweep.gpus({"CUDA_VISIBLE_DEVICES": "2,5", "JAX_PLATFORMS": "cpu"}) == []
    assert sweep.gpus({"CUDA_VISIBLE_DEVICES": "2,5", "JAX_PLATFORMS": "cuda,cpu"}) == ["2", "5"]


def test_each_run_has_gpus_of_its_own(make_sweep, monkeypatch):
    mine = make_sweep(rates=(0.001, 0.002), behaviour={})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert mine.run("--jobs=2") == 0
    given = {(mine.at(rate) / "environment").read_text() for rate in (0.001, 0.002)}
    assert given == {"0,2", "1,3"}


# --- as a process


def test_the_sweep_itself_imports_no_jax():
    heavy = "{'jax', 'flax', 'optax', 'orbax', 'transformers', 'tensorflow_datasets'}"
    code = f"import sys, launch.sweep; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.slow
def test_two_real_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a user's CPU has
    file = tmp_path / "mine.py"
    file.write_text(
        f"CONFIG = {str(CERO)!r}\nGRID = {{'learner.learning_rate': [1e-4, 3e-4]}}\n"
        "FIXED = {'budget.rollouts': 1024, 'task.eval_prompts': 32, 'eval.samples': 1}\n"
    )
    argv = ["sweep", str(file), f"--workdir={tmp_path / 'runs'}"]
    assert sweep.main(argv) == 0
    record = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [p["status"] for p in record["points"]] == ["finished"] * 2
    assert all(0 < row["accuracy"]["mean"] < 1 and row["seconds"]["mean"] > 0 for row in record["settings"])
    before = capsys.readouterr().out
    assert sweep.main(argv) == 0
    assert "2 of them finished before" in capsys.readouterr().out and "finished, greedy accuracy" in before
