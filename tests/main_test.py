"""The command line: what it accepts, and that every mistake ends in one clear line and exit status 2."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import rljax
from rljax import config as config_lib
from rljax import main, tasks

ROOT = pathlib.Path(__file__).parent.parent
GRPO, PODS, CERO = (str(ROOT / "configs" / name) for name in ("grpo.py", "pods.py", "cero.py"))


DEFAULTS = "from configs import default\ndef get_config():\n    c = default.get_config()\n"


def parse(*args: str) -> main.Command:
    return main.parse(["main", *args])


def run(*args: str, cwd: pathlib.Path = ROOT, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    """The command in a process of its own, in the folder cwd, with rljax found in the folder path."""
    command = [sys.executable, "-m", "rljax.main", *args]
    env = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


# --- what it accepts


def test_flags_arrive():
    command = parse(f"--config={CERO}:tiny", "--workdir=some/folder", "--dry_run")
    assert command.workdir == pathlib.Path("some/folder") and command.dry_run and command.mode == "train"
    assert command.config.budget.rule == "cero"
    assert parse("--config", CERO).config == command.config


def test_a_run_folder_is_evaluated_by_its_own_config(tmp_path):
    """Keys that the file lacks, of a later release, have their default."""
    config = parse(f"--config={PODS}", "--config.seed=7", "--config.cero.eta=0.5").config
    content = config_lib.to_dict(config)
    del content["lora"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    command = parse("--mode=eval", f"--workdir={tmp_path}", "--config.eval.samples=9", "--config.cero.eta=None")
    changed = {"eval.samples": 9, "cero.eta": None}
    assert config_lib.flat(command.config) == config_lib.flat(config) | changed and command.workdir == tmp_path
    assert parse(f"--config={tmp_path}/config.json", "--workdir=other").config == config


@pytest.mark.parametrize(
    "args, value", [("3.0 None", None), ("None 3.0", 3.0), ("None", None), ("None 2.0 None", None)]
)
def test_of_several_values_the_last_counts_none_too(args, value):
    given = [f"--config.loss.dual_clip={one}" for one in args.split()]
    assert parse(f"--config={GRPO}", *given).config.loss.dual_clip == value


def test_the_default_workdir_is_named_after_the_config():
    first = parse(f"--config={PODS}", "--config.name=mine").workdir
    assert first.parent == pathlib.Path("runs") and first.name.startswith("mine-20")


@pytest.mark.parametrize(
    "args, key, value",
    [
        (["--config.rollout.samples=8"], "rollout.samples", 8),
        (["--config.rollout.samples", "8"], "rollout.samples", 8),
        (["-config.rollout.samples=8"], "rollout.samples", 8),
        (["--config.mesh.fsdp", "-1", "--config.mesh.data=1"], "mesh.fsdp", -1),
        (["--config.learner.learning_rate=1"], "learner.learning_rate", 1.0),
        (["--config.learner.learning_rate=3e-6"], "learner.learning_rate", 3e-6),
        (["--config.budget.rollouts=40_960"], "budget.rollouts", 40_960),
        (["--config.cero.eta=.5"], "cero.eta", 0.5),
        (["--config.pods.keep=4", "--config.pods.rule=random"], "pods.keep", 4),
        (["--config.task.shuffle_rewards"], "task.shuffle_rewards", True),
        (["--config.task.shuffle_rewards=false"], "task.shuffle_rewards", False),
        (["--noconfig.task.shuffle_rewards"], "task.shuffle_rewards", False),
        (["--config.task.mix=add2:3,mul21:1"], "task.mix", "add2:3,mul21:1"),
        (["--config.seed=1", "--config.seed=2"], "seed", 2),
    ],
)
def test_overrides_arrive_wherever_they_stand(args, key, value):
    for order in ([f"--config={GRPO}", *args], [*args, f"--config={GRPO}"]):
        arrived = config_lib.flat(parse(*order).config)[key]
        assert arrived == value and type(arrived) is type(value)


def test_every_key_can_be_overridden_from_the_command_line():
    # What arrives is asserted above and in config_test.py; here no key may be refused by the flags library.
    for key, value in config_lib.flat(config_lib.resolve(main.load(GRPO))).items():
        given = {"jackpot.budget": 1.0}.get(key, 2.0) if value is None else value
        text = f"{given:g}" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        arrived = config_lib.flat(parse(f"--config={GRPO}", f"--config.{key}={text}").config)
        assert arrived[key] == given, key


def test_a_config_elsewhere_finds_the_defaults_of_this_checkout(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(DEFAULTS + "    c.seed = 5\n    return c\n")
    # rljax as an installation finds it: nothing but the package is on the path.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "rljax").symlink_to(ROOT / "rljax")
    done = run(f"--config={mine}", "--mode=eval", "--dry_run", cwd=tmp_path, path=tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert any(line.split()[1:4] == ["seed", "│", "5"] for line in done.stdout.splitlines()), done.stdout


def test_a_config_comes_with_the_defaults_of_its_own_folder(tmp_path):
    copy = tmp_path / "configs"
    copy.mkdir()
    for source in (ROOT / "configs").glob("*.py"):
        (copy / source.name).write_text(source.read_text().replace("c.seed = 0", "c.seed = 41"))
    done = run(f"--config={copy / 'cero.py'}", "--mode=eval", "--dry_run")  # from this checkout, whose seed is 0
    assert any(line.split()[1:4] == ["seed", "│", "41"] for line in done.stdout.splitlines()), done.stdout


# --- what it refuses


@pytest.mark.parametrize(
    "args, told",
    [
        ("", ["--config is missing", "--config=configs/cero.py"]),
        ("--config=", ["--config is missing"]),
        ("--config", ["Missing value for flag --config"]),
        ("--config=configs/absent.py", ["config file configs/absent.py does not exist"]),
        ("--config=FOLDER/cerro.py", ["cerro.py does not exist; did you mean", "configs/cero.py?"]),
        ("--config=CERO:tony", ["unknown preset 'tony'", "did you mean 'tiny'?", "known presets: tiny"]),
        ("--config=CERO:", ["unknown preset ''"]),
        ("--config=CERO --config.rollout.sampels=4", ["'rollout.sampels'; did you mean 'rollout.samples'?"]),
        ("--config=CERO --config.samples=4", ["did you mean 'rollout.samples' or 'eval.samples'?"]),
        ("--config=CERO --config.rollout=4", ["'rollout' is a block", "rollout.samples"]),
        ("--config=CERO --config.rollout.samples=many", ["--config.rollout.samples=many is not of type int"]),
        ("--config=CERO --config.rollout.samples=8.5", ["--config.rollout.samples=8.5 is not of type int"]),
        ("--config=CERO --config.cero.eta=big", ["--config.cero.eta=big is not of type float"]),
        ("--config=CERO --config.task.shuffle_rewards=5", ["is not of type bool"]),
        ("--config=CERO --config.seed", ["Missing value for flag --config.seed"]),
        ("--config=CERO --config.learner.learning_rate=nan", ["learner.learning_rate = nan is not finite"]),
        ("--config=PODS --config.pods.keep=33", ["pods.keep = 33 is more than rollout.samples = 32"]),
        ("--config=GRPO --config.rollout.samples=1", ["rollout.samples = 1 is a group of one"]),
        ("--config=GRPO --config.rollout.top_p=.9", ["rollout.top_p = 0.9 is on in training"]),
        ("--config=CERO --config.rollout.slots=8", ["N_max", "is more than rollout.slots = 8"]),
        ("--config=CERO --workdirr=x", ["unknown flag --workdirr; did you mean --workdir?"]),
        ("--config=CERO --confg.seed=1", ["unknown flag --confg.seed; did you mean --config.seed?"]),
        ("--config=CERO --zzz", ["unknown flag --zzz; known: --config"]),
        ("--config=CERO --workdir=", ["--workdir is empty"]),
        ("--config=CERO --mode=walk", ["--mode=walk", "<train"]),
        ("--config=not/there/config.json", ["not/there/config.json cannot be read", "name another run folder"]),
        ("--config=not/there/config.json:tiny", ["has no presets; leave out :tiny"]),
        ("--mode=eval --workdir=not/there", ["not/there/config.json cannot be read"]),
        ("--config=CERO --config.seed=None", ["--config.seed=None is not of type int"]),
        ("--config=CERO --config.no.such=None", ["unknown config key 'no.such'"]),
        ("--config=CERO stray", ["unexpected argument 'stray'"]),
        ("--mode=report", ["--workdir names no run folder", "--mode=report --workdir=DIR,DIR"]),
        ("--mode=report --workdir=a,,b", ["--workdir names no run folder"]),
        ("--mode=report --workdir=a b", ["unexpected argument 'b'", "by commas"]),
        ("--mode=report --workdir=a --config=CERO", ["--mode=report takes no --config;"]),
        ("--mode=report --workdir=a --config.seed=1", ["--mode=report takes no --config.seed=1;"]),
        ("--mode=report --workdir=a --dry_run", ["--mode=report takes no --dry_run;"]),
        ("--mode=report --workdir=not/there", ["run folder not/there does not exist"]),
    ],
)
def test_mistakes_are_told_in_one_line(args, told, capsys):
    for name, path in {"GRPO": GRPO, "PODS": PODS, "CERO": CERO, "FOLDER": f"{ROOT}/configs"}.items():
        args = args.replace(name, path)
    assert main.main(["main", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in told), err


@pytest.mark.parametrize(
    "text, told",
    [
        ("def get_config(:\n", "SyntaxError: invalid syntax (bad.py, line 1)"),
        ("x = 1\n", "has no attribute 'get_config'"),
        ("import not_there\n", "bad.py, line 1: ModuleNotFoundError: No module named 'not_there'"),
        ("def get_config():\n    return None\n", "get_config() returned a NoneType"),
        (DEFAULTS + "    c.rollout.samples = 'x'\n    return c\n", "bad.py, line 4: TypeError"),
        (DEFAULTS + "    c.rollout.sampels = 4\n    return c\n", "did you mean 'rollout.samples'?"),
    ],
)
def test_a_bad_config_file_is_told_by_file_and_line(text, told, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(text)
    assert main.main(["main", f"--config={tmp_path / 'bad.py'}"]) == 2
    err = capsys.readouterr().err
    assert told in err and err.startswith("error: ") and "Traceback" not in err


# --- what a run's errors and results become


def raising(error: Exception):
    def run(config, workdir):
        raise error

    return run


def test_the_mode_gets_the_config_and_the_workdir(monkeypatch):
    got = []
    monkeypatch.setitem(main.MODES, "train", lambda config, workdir: got.append((config.name, workdir)))
    assert main.main(["main", f"--config={CERO}", "--workdir=w"]) == 0
    assert got == [("cero", pathlib.Path("w"))]


@pytest.mark.parametrize(
    "more, said",
    [
        ((), ["rljax cero: starting"]),
        (("--config.hosts.coordinator=a:1", "--config.hosts.count=2"), ["rljax cero: starting"]),
        (("--config.hosts.coordinator=a:1", "--config.hosts.count=2", "--config.hosts.index=1"), []),
        (("--config.hosts.cluster=slurm",), []),  # who this is will be known later
    ],
)
def test_the_first_line_comes_before_jax_and_the_other_processes(more, said, monkeypatch, capsys):
    def joined(config, workdir, mode):
        assert capsys.readouterr().out.splitlines() == said
        raise KeyboardInterrupt

    from rljax import hosts

    monkeypatch.setattr(hosts, "joined", joined)
    for mode in ("train", "eval"):
        assert main.main(["main", f"--config={CERO}", f"--mode={mode}", *more]) == 130


def test_a_report_of_several_runs_needs_no_config(tmp_path, capsys):
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "mine", "seed": {seed}}}')
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    assert main.main(["main", "--mode=report", f"--workdir={tmp_path / 'a'},{tmp_path / 'b'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'report.html'}\n"
    assert "mine, mean of 2 seeds" in (tmp_path / "a" / "report.html").read_text()


def test_a_dry_run_trains_nothing_and_prints_every_key(monkeypatch, capsys):
    monkeypatch.setitem(main.MODES, "train", raising(AssertionError("trained")))
    assert main.main(["main", f"--config={CERO}", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in config_lib.KEYS) and "'tiny-policy'" in out


def test_an_error_that_rljax_raises_during_a_run_is_told_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setitem(main.MODES, "train", lambda config, workdir: tasks.load(config.task))
    assert main.main(["main", f"--config={CERO}", "--config.task.name=zzz"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: task.name='zzz' is unknown; known: ") and "arithmetic" in told


@pytest.mark.parametrize("error", [ValueError("a"), OSError("b"), KeyError("c"), RuntimeError("d")])
def test_an_unexpected_error_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setitem(main.MODES, "train", raising(error))  # raised here, outside rljax
    with pytest.raises(type(error)) as caught:
        main.main(["main", f"--config={CERO}"])
    assert caught.value is error


def test_an_error_that_rljax_did_not_mean_keeps_its_traceback(monkeypatch):
    code = compile("int('x')", rljax.__file__, "exec")  # in a file of rljax, but by no raise statement
    monkeypatch.setitem(main.MODES, "train", lambda config, workdir: exec(code))
    with pytest.raises(ValueError, match="invalid literal"):
        main.main(["main", f"--config={CERO}"])


# --- as a process


def test_as_a_process_a_mistake_has_exit_status_2_and_no_traceback():
    done = run("--config=configs/cero.py", "--config.rollout.sampels=4")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: unknown config key 'rollout.sampels'; did you mean 'rollout.samples'?"
        " (configs/default.py has all keys)\n"
    )


def test_as_a_process_help_says_the_command():
    done = run("--help")
    assert done.returncode == 0 and "--config=configs/cero.py" in done.stdout and "--workdir" in done.stdout


def test_importing_main_imports_no_jax():
    # Worker processes import __main__ again, before they grade anything.
    heavy = "{'jax', 'flax', 'optax', 'orbax', 'transformers', 'tensorflow_datasets'}"
    code = f"import sys, rljax.main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stdout + done.stderr
