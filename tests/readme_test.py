"""README.md is true: its commands resolve, its Python runs, and what it names is there."""

import ast
import json
import os
import pathlib
import re
import shlex
import sys
import textwrap
import tomllib
import types

import pytest

from configs import default
from rljax import config as config_lib
from rljax import main, tasks
from rljax.config import ConfigError

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
BLOCKS = [(language, textwrap.dedent(body)) for _, language, body in FENCE.findall(TEXT)]
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", TEXT))]
PROGRAMS = ("python", "pip", "pytest", "sbatch", "kubectl", "launch/", ".ci/")
LISTED = ("algos", "models", "tasks")  # packages whose modules stand one by one in the list of files
MAIN_FLAGS = ("config", "workdir", "mode", "dry_run", "devices")


def lines_of(block: str) -> list[str]:
    """The commands of a block: a line each, or several ended by a backslash; joined ones apart."""
    lines = block.replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split(" && ") if part.strip()]


def is_command(text: str) -> bool:
    return text.startswith(PROGRAMS) and " " in text


PYTHON = [body for language, body in BLOCKS if language == "python"]
COMMANDS = [line for _, body in BLOCKS if is_command(body) for line in lines_of(body)]
COMMANDS += [line for span in SPANS if is_command(span) for line in lines_of(span)]
SKETCHES = [body for language, body in BLOCKS if language != "python" and not is_command(body)]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A working directory that looks like a clone, with a run folder RUN in it."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "RUN").mkdir()
    config = config_lib.to_dict(config_lib.resolve(default.get_config()))
    (tmp_path / "RUN" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


# ---- commands


def check(command: str) -> None:
    """Raises AssertionError or ConfigError where a command of README.md cannot be meant as it stands."""
    words = shlex.split(command, comments=True)
    while words and "=" in words[0] and not words[0].startswith("-"):  # variables
        words.pop(0)
    known = [name for name in CHECKS if words[: len(name.split())] == name.split()]
    known += [name for name in CHECKS if name.endswith("/") and words[0].startswith(name)]
    assert known, f"readme_test.py does not know how to check {command!r}"
    CHECKS[known[0]](words)


def of_main(words: list[str]) -> None:
    main.parse(["main", *words[3:]])


def flags_of(script: pathlib.Path) -> list[str]:
    """Those that the text of a script defines by name, by absl's flags or by argparse."""
    return re.findall(r'(?:DEFINE_\w+\(\s*"|"--)([\w-]+)"', script.read_text())


def of_script(words: list[str]) -> None:
    """python launch/NAME.py …"""
    names = flags_of(pathlib.Path(words[1]))
    own = [word for word in words[2:] if not word.startswith("--config.")]
    unknown = [word for word in own if word.startswith("-") and word.lstrip("-").split("=")[0] not in names]
    assert not unknown, f"{words[1]} has no flag {unknown}; it has {names}"
    missing = [word for word in own if not word.startswith("-") and not pathlib.Path(word).exists()]
    assert not missing, f"{missing} do not exist"
    overrides([word for word in words if word.startswith("--config.")])


def of_launcher(words: list[str]) -> None:
    """launch/NAME.sh …, or sbatch … launch/NAME.sh …: what follows is the arguments of main, or of a sweep."""
    (at,) = (i for i, word in enumerate(words) if word.endswith(".sh"))
    assert os.access(words[at], os.X_OK), f"{words[at]} is no script"
    if any(word.startswith("--config=") for word in words):
        main.parse(["main", *(word for word in words[at + 1 :] if word.startswith("-"))])
    else:
        of_script(["python", "launch/sweep.py", *words[at + 1 :]])


def of_file(words: list[str]) -> None:
    missing = [word for word in words if re.search(r"\w\.\w", word) and not pathlib.Path(word).exists()]
    assert not missing, f"{missing} do not exist"


def of_pip(words: list[str]) -> None:
    (extras,) = (
        [ast.literal_eval(key) for key in map(ast.unparse, keyword.value.keys)]
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)
        for keyword in node.keywords if keyword.arg == "extras_require"
    )  # fmt: skip
    asked = [extra for word in words for names in re.findall(r"\[([\w,]+)\]", word) for extra in names.split(",")]
    assert set(asked) <= set(extras), f"setup.py has no extra {set(asked) - set(extras)}"


def of_pytest(words: list[str]) -> None:
    of_file(words[1:])
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = [mark.split(":")[0] for mark in options["markers"]]
    asked = [words[i + 1] for i, word in enumerate(words) if word == "-m"]
    assert set(asked) <= set(marks), f"there is no mark {asked}"


CHECKS = {
    "python -m rljax.main": of_main, "python": of_script, "pip install": of_pip,
    "pytest": of_pytest, "sbatch": of_launcher, "launch/": of_launcher, "kubectl": of_file, ".ci/": of_file,
}  # fmt: skip


def overrides(words: list[str]) -> None:
    """Raises ConfigError where ``--config.KEY=VALUE`` names no key or not its type. A word in capitals is any value."""
    given = []
    for word in words:
        key, _, value = word.removeprefix("--config.").partition("=")
        if key.isupper():
            continue
        config_lib.check_key(key)
        other = config_lib.KEYS[key].type is not str and value.isupper()
        given.append(f"--config.{key}={'1' if other else value}")
    main.override(default.get_config(), [word for word in given if not word.endswith("=")], MAIN_FLAGS)


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_resolves(command, clone):
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "python -m rljax.main --config=configs/cerro.py", "python -m rljax.main --config=configs/cero.py --dry",
        "python -m rljax.main --config=configs/cero.py:tony", "python launch/bench.py --shpe=tiny",
        "python launch/sweep.py configs/sweeps/absent.py", "python launch/absent.py", "launch/absent.sh 2 --config=x",
        "launch/local.sh 2 --config=configs/absent.py", "sbatch launch/slurm.sh configs/sweeps/learning_rate.py --x=1",
        "kubectl apply -f launch/absent.yaml", "pip install -e '.[absent]'", "pytest -m absent",
        "pytest tests/absent_test.py", "make all", "XLA_FLAGS=x python launch/bench.py --absent",
        "python launch/sweep.py configs/sweeps/learning_rate.py --config.no.such=1",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command, clone):
    with pytest.raises((AssertionError, ConfigError, OSError, ValueError)):
        check(command)


def test_there_are_commands_of_all_kinds():
    programs = {name for name in CHECKS for command in COMMANDS if command.startswith(name)}
    assert len(COMMANDS) > 20 and programs >= {*CHECKS} - {".ci/"}


# ---- names in the text


def test_keys_and_flags_that_are_named_exist():
    flags = {*MAIN_FLAGS, *(name for script in (ROOT / "launch").glob("*.py") for name in flags_of(script))}
    for span in SPANS:
        if span.startswith("-"):
            words = shlex.split(span)
            overrides([word for word in words if word.startswith("--config.")])
            names = {word.lstrip("-").split("=")[0] for word in words if re.match(r"--(?!config\.)", word)}
            assert names <= flags, f"`{span}`: {names - flags} are no flags"
        elif key := re.fullmatch(r"([a-z_]+\.(?!(?:py|jsonl?)$)[a-z_0-9]+)(=.*)?", span):
            if key[1].split(".")[0] in config_lib.BLOCKS:
                overrides([f"--config.{span}" if key[2] else f"--config.{span}="])


def test_experiments_that_are_named_resolve_with_their_presets(clone):
    found, file = 0, None
    for span in SPANS:
        if not (named := re.fullmatch(r"(?:(?:configs/)?(\w+)\.py)?((?::\w+)?)((?: --config\.\S+)*)", span)):
            continue
        stem, preset, more = named.groups()
        file = file if stem is None else stem
        if stem is None and not preset or stem in ("default", "presets", "papers"):
            continue
        if (ROOT / "configs" / f"{file}.py").exists():
            main.parse(["main", f"--config=configs/{file}.py{preset}", *more.split()])
            found += 1
    assert found > 20


def exists(name: str) -> bool:
    """Whether there is such a file or folder: a path of the clone, or the end of one."""
    places = ("", "rljax/", "rljax/*/", "configs/", "launch/", "tests/", "colab/")
    return any(found for place in places for found in ROOT.glob(f"{place}{name}"))


OWN = [re.match(r"# (\w+\.py)\n", body)[1] for body in PYTHON if re.match(r"# \w+\.py\n", body)]  # the reader's files


def test_files_that_are_named_exist():
    words = [word.split(":")[0] for text in (*SPANS, *SKETCHES) for word in re.findall(r"[\w./:-]+", text)]
    names = {word.rstrip(".") for word in words if re.search(r"\w\.(py|sh|yaml|md|css|ipynb)\.?$", word)}
    names |= {word for word in words if re.match(r"(configs|launch|rljax|tests|colab)/\w", word)}
    assert len(names) > 30
    names = {name for name in names if not name.split(".")[0].isupper()}  # FILE.py is any
    assert [name for name in sorted(names) if name not in OWN and not exists(name)] == []
    assert exists("rljax/assets") and exists("losses.py") and not exists("rljax/absent") and not exists("absent.py")


def test_the_list_of_files_is_whole():
    (listing,) = re.findall(r"^## Files\n+```\n(.*?)^```$", TEXT, re.M | re.S)
    words = set(re.findall(r"[\w.]+", listing))
    modules = [*(ROOT / "rljax").glob("*.py"), *(path for p in LISTED for path in (ROOT / "rljax" / p).glob("*.py"))]
    stems = {path.stem for path in modules} - {"__init__"}
    assert sorted(stem for stem in stems if not {stem, f"{stem}.py"} & words) == []
    packages = {path.parent.name for path in (ROOT / "rljax").glob("*/__init__.py")}
    own = [path for path in (ROOT / "launch").iterdir() if path.is_file()]
    names = [f"{name}/" for name in {"configs", "launch", "rljax", "tests"} | packages] + [path.name for path in own]
    assert sorted(name for name in names if name not in listing) == []
    assert sorted(name for name in re.findall(r"\b\w+/(?=\s)", listing) if not exists(name.rstrip("/"))) == []


# ---- Python


def test_every_block_of_python_is_run_here():
    assert [bool(re.match(r"# \w+\.py\n|import jax\n", body)) for body in PYTHON] == [True] * len(PYTHON) != []


def test_the_block_that_samples_runs(capsys):
    (body,) = (body for body in PYTHON if body.startswith("import jax\n"))
    exec(compile(body, "README.md", "exec"), {})
    answers = ast.literal_eval(capsys.readouterr().out)
    assert len(answers) == 4 and all(re.fullmatch(r"-?\d+\n?", answer.strip()) for answer in answers), answers


@pytest.fixture
def mytask(clone, monkeypatch):
    """The reader's own file, beside configs/ as README.md says, and the command that trains on it."""
    (body,) = (body for body in PYTHON if body.startswith(f"# {OWN[0]}\n"))
    (clone / OWN[0]).write_text(body)
    monkeypatch.syspath_prepend(str(clone))
    stem = OWN[0].removesuffix(".py")
    monkeypatch.delitem(sys.modules, stem, raising=False)
    (command,) = {command for command in COMMANDS if f"task.name={stem}:" in command}
    yield types.SimpleNamespace(stem=stem, args=shlex.split(command)[3:], folder=clone)
    sys.modules.pop(stem, None)


def test_the_readers_own_task_loads_and_grades(mytask):
    task = tasks.load(main.parse(["main", *mytask.args]).config.task)
    right = task.train[0]
    assert (task.grade(f" {right['answer']}", right), task.grade("x", right)) == (1.0, 0.0)
    assert not {e["prompt"] for e in task.train} & {e["prompt"] for e in task.eval}


@pytest.mark.slow
def test_the_readers_own_task_trains(mytask, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(mytask.folder), str(ROOT)]))  # of the grading processes
    small = ("--config.budget.rollouts=64", "--config.rollout.prompts=8", "--config.rollout.samples=4",
             "--config.rollout.lanes=8", "--config.rollout.slots=4", "--config.eval.samples=1", "--config.mesh.data=8",
             f"--workdir={mytask.folder}/run")  # fmt: skip
    assert main.main(["main", *mytask.args, *small]) == 0
    lines = [json.loads(line) for line in (mytask.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "run folder:" in capsys.readouterr().out
