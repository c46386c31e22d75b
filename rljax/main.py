"""Train a language model by reinforcement learning.

    python -m rljax.main --config=configs/cero.py[:PRESET] [--workdir=DIR] [--mode=train|eval] [--dry_run]
                         [--config.KEY=VALUE]
    python -m rljax.main --config=configs/cero.py[:PRESET] --mode=plan [--devices=KIND:CHIPS] [--config.KEY=VALUE]
    python -m rljax.main --mode=report --workdir=DIR[,DIR,...]

--mode=eval evaluates the newest checkpoint in DIR, or config.model.path where DIR holds none, on the held-out prompts;
without --config, by DIR/config.json. That file as --config=DIR/config.json starts the same run in another folder.
--mode=plan prints bytes a device, bytes between devices and the least time of a step, on chips that need not be here
(--devices=v5p:32) or on this machine's, and starts nothing; --dry_run of a training prints its config and that.
--mode=report writes report.html, a page of the runs side by side, into the first DIR; seeds of one config become one.
configs/default.py lists every KEY. Exit status: 0 done; 2 refused, with the reason on stderr: a mistake in
the command or the configuration, or a file that cannot be used; 75 preempted by SIGTERM, and saved: the same command
goes on; 1 anything unexpected, with its traceback.
"""

# No jax here, nor any module of rljax that imports it: worker processes import __main__ again.
from __future__ import annotations

import datetime
import difflib
import importlib.util
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

import rljax
from rljax import config as config_lib
from rljax import preemption
from rljax.config import Config, ConfigError


def _starting(config: Config) -> None:
    """A first line at once: imports and jax take seconds. Of process 0, where the command itself says which that is."""
    if not config.hosts.cluster and config.hosts.index == 0:
        print(f"rljax {config.name}: starting", flush=True)


def _train(config: Config, workdir: pathlib.Path) -> None:
    _starting(config)
    from rljax import cache, hosts, train

    with hosts.joined(config, workdir, "train"):
        cache.keep_compiled()
        train.run(config, workdir)
        preemption.over()


def _eval(config: Config, workdir: pathlib.Path) -> None:
    _starting(config)
    from rljax import cache, evaluate, hosts

    with hosts.joined(config, workdir, "eval"):
        cache.keep_compiled()
        evaluate.run(config, workdir)


def _report(config: None, workdir: pathlib.Path) -> None:
    from rljax import report

    print(report.run([pathlib.Path(folder) for folder in str(workdir).split(",")]))


def _plan(config: Config, devices: str) -> None:
    from rljax.plan import report

    report.run(config, devices)


# But for plan, a function of (config, run folder).
MODES: dict[str, Callable[[Any, Any], None]] = {"train": _train, "eval": _eval, "plan": _plan, "report": _report}


_NONE = re.compile(r"--?config\.[\w.]+=None")  # a key that may be None; the flags of ml_collections know only values


class Command(NamedTuple):
    """A parsed command line. Of a report there is no config, and workdir names run folders, split by commas.

    devices: "h200:8", of a plan; "" is this machine's.
    """

    config: Config | None
    workdir: pathlib.Path
    mode: str
    dry_run: bool
    devices: str = ""


class HelpRequested(Exception):
    """--help; the message is the help."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns its exit status."""
    try:
        command = parse(argv)
        if command.dry_run and command.config is not None:
            print_config(command, command.config)
        if command.mode == "plan" or (command.dry_run and command.mode == "train"):
            MODES["plan"](command.config, command.devices)
        elif not command.dry_run:
            MODES[command.mode](command.config, command.workdir)
    except HelpRequested as help_text:
        print(help_text)
    except KeyboardInterrupt:
        print("interrupted; the same command with its --workdir resumes from the last checkpoint", file=sys.stderr)
        return 130
    except preemption.Preempted as told:
        from rljax import metrics

        if metrics.writes():  # all processes of a run are told and say the same
            print(told, file=sys.stderr)
        return preemption.EXIT_STATUS
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        if not _is_for_the_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str]) -> Command:
    """The command of argv (argv[0] is the program). Raises ConfigError that names the flag or key."""
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "a config file: FILE.py or FILE.py:PRESET", flag_values=values)
    flags.DEFINE_string("workdir", None, "run folder (default: runs/NAME-TIME)", flag_values=values)
    flags.DEFINE_enum("mode", "train", list(MODES), "what to do", flag_values=values)
    flags.DEFINE_boolean("dry_run", False, "print the config, of a training its plan, and exit", flag_values=values)
    flags.DEFINE_string("devices", None, "chips of --mode=plan, as h200:8 (default: this machine)", flag_values=values)
    flags.DEFINE_boolean("help", False, "print this help and exit", flag_values=values)
    values.set_gnu_getopt(True)
    try:
        _, *rest = values(list(argv), known_only=True)
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error)) from error
    if values.help:
        raise HelpRequested(f"{__doc__}\n{values.get_help()}")
    if values.devices is not None and values.mode != "plan":
        raise ConfigError(f"--devices={values.devices} is of --mode=plan; add that, or leave it out")
    if values.mode == "report":
        return _parse_report(values, rest)
    if values.workdir == "":
        raise ConfigError("--workdir is empty; name a folder, or leave it out for runs/NAME-TIME")
    spec = values.config
    if not spec and values.mode == "eval" and values.workdir:
        spec = f"{values.workdir}/config.json"
    if not spec:
        raise ConfigError("--config is missing; give a config file, such as --config=configs/cero.py")
    config = config_lib.resolve(override(load(spec), rest, list(values)))
    workdir = values.workdir
    if workdir is None:
        workdir = f"runs/{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    devices = "" if values.devices is None else values.devices
    return Command(config, pathlib.Path(workdir), values.mode, values.dry_run, devices)


def _parse_report(values: flags.FlagValues, rest: Sequence[str]) -> Command:
    given = ["--config"] * (values.config is not None) + ["--dry_run"] * values.dry_run
    given += [arg for arg in rest if arg.startswith("-")]
    if given:
        raise ConfigError(f"--mode=report takes no {given[0]}; the run folders hold their configs")
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; separate run folders by commas, --workdir=DIR,DIR")
    if not values.workdir or not all(values.workdir.split(",")):
        raise ConfigError("--workdir names no run folder; give one or several, --mode=report --workdir=DIR,DIR")
    return Command(None, pathlib.Path(values.workdir), "report", False)


def load(spec: str) -> Any:
    """What get_config() of the file of "FILE.py" returns, or get_config(PRESET) of "FILE.py:PRESET".

    Of a run folder's config.json: what it holds, and for keys that it lacks configs/default.py's values.
    """
    name, colon, preset = spec.partition(":")
    path = pathlib.Path(name)
    if path.suffix == ".json":
        if colon:
            raise ConfigError(f"--config={spec}: a run's config.json has no presets; leave out {colon}{preset}")
        return _saved(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.glob("*.py")), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a .py file"
        raise ConfigError(f"config file {name} does not exist{hint}")
    _make_configs_importable(path)
    source = importlib.util.spec_from_file_location("_rljax_config", path)
    if source is None or source.loader is None:
        raise ConfigError(f"config file {name} is not a .py file")
    module = importlib.util.module_from_spec(source)
    try:
        source.loader.exec_module(module)
        return module.get_config(preset) if colon else module.get_config()
    except Exception as error:  # whatever the user's file does wrong, it is told by file and line
        raise ConfigError(_config_file_error(name, path, error)) from error


def _saved(path: pathlib.Path) -> Any:
    saved = config_lib.read_saved(path)
    folder = _configs(path)
    if folder is None:
        raise ConfigError(f"--config={path} needs the defaults of configs/default.py; run it from a clone of rljax")
    config = load(str(folder / "default.py"))
    saved.pop("hosts", None)  # which processes there are is the command's to say, not the run's
    for key in config_lib.flatten(saved):
        config_lib.check_key(key)
    try:
        config.update(saved)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not the config of a run: {error}") from error
    return config


def override(config: Any, args: Sequence[str], known_flags: Sequence[str]) -> Any:
    """The config after the ``--config.key=value`` of args; whatever else is in args is an error."""
    for arg in args:
        key = re.match(r"--?(?:no)?config\.([^=]*)", arg)
        if key:
            config_lib.check_key(key.group(1))
        elif re.match(r"--?[A-Za-z_]", arg):
            name = arg.lstrip("-").split("=")[0]
            known = [*known_flags, *(f"config.{key}" for key in config_lib.KEYS)]
            near = difflib.get_close_matches(name, known, n=1)
            listing = ", ".join(f"--{known}" for known in (*known_flags, "config.KEY"))
            hint = f"did you mean --{near[0]}?" if near else f"known: {listing}"
            raise ConfigError(f"unknown flag --{name}; {hint}")
    args, unset = _without_none(args)
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *args])
        left = values(["", *args])[1:]
        if unset:
            config.update_from_flattened_dict(dict.fromkeys(unset))
    except TypeError as error:
        raise ConfigError(f"get_config() returned a {type(config).__name__}: {error}") from error
    except (flags.Error, AttributeError, KeyError, ValueError) as error:
        bad = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
        if bad is None:
            raise ConfigError(str(error)) from error
        key, value = bad.groups()
        wanted = config_lib.KEYS[key].type.__name__
        raise ConfigError(f"--config.{key}={value} is not of type {wanted}; give one that is") from error
    if left:
        raise ConfigError(f"unexpected argument {left[0]!r}; write options as --name=value")
    return config


def _without_none(args: Sequence[str]) -> tuple[list[str], set[str]]:
    """(args without those that set a key to None, the keys that end as None: of one key the last arg counts)."""
    rest, unset = [], set()
    for arg in args:
        key = re.match(r"--?(?:no)?config\.([\w.]+)", arg)
        if key and _NONE.fullmatch(arg) and config_lib.KEYS[key.group(1)].optional:
            unset.add(key.group(1))
            continue
        if key:
            unset.discard(key.group(1))
        rest.append(arg)
    return rest, unset


def print_config(command: Command, config: Config) -> None:
    """The resolved configuration as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", title=f"{command.mode} in {command.workdir}", title_justify="left")
    for key, value in config_lib.flat(config).items():
        table.add_row(key, repr(value))
    Console().print(table)


def _configs(path: pathlib.Path) -> pathlib.Path | None:
    """The ``configs`` folder whose defaults a config file takes.

    That is the file's own, <folder>/configs/<file>.py, else the one beside this package (a checkout); so a
    config runs from any working directory and takes its defaults from its own checkout.
    """
    beside = path.resolve().parent.parent, pathlib.Path(rljax.__file__).resolve().parent.parent
    return next((folder / "configs" for folder in beside if (folder / "configs" / "default.py").is_file()), None)


def _make_configs_importable(path: pathlib.Path) -> None:
    """Puts first on sys.path the folder whose ``configs`` package a config file imports."""
    folder = _configs(path)
    if folder is not None and str(folder.parent) not in sys.path[:1]:
        sys.path.insert(0, str(folder.parent))


def _config_file_error(name: str, path: pathlib.Path, error: Exception) -> str:
    if isinstance(error, ValueError):  # a preset, or a value, that the file itself refuses in words
        return f"config file {name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename).resolve() == path.resolve()]
    line = f", line {lines[-1]}" if lines else ""
    return f"config file {name}{line}: {type(error).__name__}: {error}"


def _is_for_the_user(error: Exception) -> bool:
    """Whether rljax raised the error itself, by a raise statement, to tell the user something.

    Any other error (of jax, of a file system, of unpacking a tuple) is unexpected and keeps its traceback.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    package = pathlib.Path(rljax.__file__).parent
    return pathlib.Path(last.filename).is_relative_to(package) and str(last.line).startswith("raise ")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
