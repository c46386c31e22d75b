"""Sweeps: a search over config keys and seeds as a list of runs, and what came of them. No jax here.

launch/sweep.py starts the runs and says what a sweep file holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import pathlib
import random
import re
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rljax import config as config_lib
from rljax.config import Config, ConfigError
from rljax.report import curves

PROGRAM = ("-m", "rljax.main")  # of python
METRICS = ("accuracy", "avg_at_k", "gain")  # what settings can be ranked by; more is better
MEASURES = (*METRICS, "seconds")
FAILURE_FILE = "failure.json"
LONGEST_NAME = 160  # characters of a run folder's name
DRAWS_A_TRIAL = 100  # draws that may repeat earlier settings before RANDOM is found to have too few

Setting = dict[str, Any]  # config key -> value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What a sweep file and the command line ask for. Either `grid` or `random` is empty.

    grid: {keys: rows}, an axis a line: the values that its keys take together. random: {key: (kind, …)}.
    """

    file: str
    config: str
    fixed: Setting
    overrides: tuple[str, ...]
    grid: dict[tuple[str, ...], list[tuple]]
    random: dict[str, tuple]
    trials: int
    draw_seed: int
    seeds: tuple[int, ...]
    metric: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that differ between settings."""
        return (*itertools.chain(*self.grid), *self.random)


class Point(NamedTuple):
    """One run of a sweep. name: of its folder; the same whatever else the sweep holds."""

    number: int
    name: str
    setting: Setting
    seed: int
    args: tuple[str, ...]  # of rljax.main, but --workdir


# ---- the sweep file

NAMES = {
    "CONFIG": str, "GRID": dict, "RANDOM": dict, "TRIALS": int, "DRAW_SEED": int, "SEEDS": list, "METRIC": str,
    "FIXED": dict,
}  # fmt: skip


def read(path: pathlib.Path, overrides: Sequence[str] = ()) -> Spec:
    """The sweep of a file. overrides: ``--config.KEY=VALUE`` for all runs. Raises ConfigError that names the fault."""
    given = _upper_case(path)
    for name, value in given.items():
        if not isinstance(value, NAMES[name]) or isinstance(value, bool):
            raise ConfigError(f"{path}: {name} is a {type(value).__name__}; give a {NAMES[name].__name__}")
    if "CONFIG" not in given:
        raise ConfigError(f'{path} has no CONFIG; set it to a config file, such as CONFIG = "configs/cero.py:tiny"')
    if ("GRID" in given) == ("RANDOM" in given):
        raise ConfigError(f"{path} has {'both' if 'GRID' in given else 'neither'} GRID and RANDOM; give one of them")
    if ("RANDOM" in given) != ("TRIALS" in given):
        raise ConfigError(f"{path}: TRIALS is the number of settings that RANDOM draws; give both or none of them")
    defaults = {"FIXED": {}, "GRID": {}, "RANDOM": {}, "TRIALS": 0, "DRAW_SEED": 0, "SEEDS": [0], "METRIC": "accuracy"}
    g = defaults | given
    spec = Spec(
        file=str(path), config=g["CONFIG"], fixed={k: _plain(v) for k, v in g["FIXED"].items()},
        overrides=tuple(overrides), grid=_grid(path, g["GRID"]), random=dict(g["RANDOM"]), trials=g["TRIALS"],
        draw_seed=g["DRAW_SEED"], seeds=tuple(g["SEEDS"]), metric=g["METRIC"],
    )  # fmt: skip
    _check(spec)
    return spec


def _upper_case(path: pathlib.Path) -> dict[str, Any]:
    """The names of a sweep file that are written in capitals, each one of NAMES."""
    if not path.is_file():
        raise ConfigError(f"sweep file {path} does not exist; give the path of a .py file (launch/sweep.py says what)")
    space: dict[str, Any] = {"__name__": "sweep", "__file__": str(path)}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    except Exception as error:  # whatever the user's file does wrong, it is told by file and line
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"sweep file {path}{where}: {type(error).__name__}: {error}") from error
    found = {name: value for name, value in space.items() if name.isupper() and not name.startswith("_")}
    for name in found:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"write your own in lower case; known: {', '.join(NAMES)}"
            raise ConfigError(f"sweep file {path}: unknown name {name}; {hint}")
    return found


def _grid(path: pathlib.Path, axes: Mapping) -> dict[tuple[str, ...], list[tuple]]:
    grid = {}
    for axis, values in axes.items():
        keys = axis if isinstance(axis, tuple) else (axis,)
        rows = [tuple(map(_plain, value)) for value in _rows(path, axis, values)]
        twice = [row for row in rows if rows.count(row) > 1]
        if twice:
            raise ConfigError(f"{path}: GRID[{axis!r}] has {', '.join(map(repr, twice[0]))} twice; give it once")
        grid[keys] = rows
    return grid


def _rows(path: pathlib.Path, axis: str | tuple[str, ...], values: Any) -> list[Sequence]:
    """An axis' values, each as one or several, as it has keys."""
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray) or not len(values):
        raise ConfigError(f"{path}: GRID[{axis!r}] = {values!r} holds no values; give a list of them")
    if not isinstance(axis, tuple):
        return [(value,) for value in values]
    for value in values:
        if not isinstance(value, tuple | list) or len(value) != len(axis):
            raise ConfigError(f"{path}: GRID[{axis!r}] has {value!r}; give a value for each of its {len(axis)} keys")
    return list(values)


def _check(spec: Spec) -> None:
    overridden = [re.sub(r"^--config\.|=.*", "", arg, flags=re.DOTALL) for arg in spec.overrides]
    places = [("GRID", tuple(itertools.chain(*spec.grid))), ("RANDOM", tuple(spec.random)),
              ("FIXED", tuple(spec.fixed)), ("the command line", tuple(overridden))]  # fmt: skip
    seen: dict[str, str] = {}
    for place, keys in places:
        for key in keys:
            if not isinstance(key, str):
                raise ConfigError(f"{spec.file}, {place}: {key!r} is no config key; give a string")
            try:
                config_lib.check_key(key)
            except ConfigError as error:
                raise ConfigError(f"{spec.file}, {place}: {error}") from error
            if key == "seed":
                raise ConfigError(f"{spec.file}: seed is in {place}; list the seeds in SEEDS")
            if key in seen:
                raise ConfigError(f"{spec.file}: {key} is in {seen[key]} and in {place}; set it in one of them")
            seen[key] = place
    if not spec.seeds or len(set(spec.seeds)) < len(spec.seeds) or any(type(s) is not int for s in spec.seeds):
        raise ConfigError(f"{spec.file}: SEEDS = {list(spec.seeds)}; give one or more different integers")
    if spec.metric not in METRICS:
        raise ConfigError(f"{spec.file}: METRIC = {spec.metric!r} is unknown; known: {', '.join(METRICS)}")
    if spec.random and spec.trials < 1:
        raise ConfigError(f"{spec.file}: TRIALS = {spec.trials}; draw at least 1 setting")
    for key, rule in spec.random.items():
        _check_rule(spec.file, key, rule)


def _check_rule(file: str, key: str, rule: Any) -> None:
    said = f"{file}: RANDOM[{key!r}] = {rule!r}"
    if not isinstance(rule, Sequence) or isinstance(rule, str) or not rule or rule[0] not in DRAWS:
        raise ConfigError(f"{said} is no draw; give one of {', '.join(EXAMPLES)}")
    if rule[0] == "choice":
        if len(rule) != 2 or not isinstance(rule[1], Sequence) or isinstance(rule[1], str) or not rule[1]:
            raise ConfigError(f'{said}; give a list of values, ("choice", [A, B])')
        return
    number = int if rule[0] == "int" else int | float
    if len(rule) != 3 or not all(isinstance(bound, number) for bound in rule[1:]) or not rule[1] < rule[2]:
        raise ConfigError(f"{said}; give two {'integers' if number is int else 'numbers'}, the lower first")
    if rule[0] == "log" and rule[1] <= 0:
        raise ConfigError(f"{said} starts at or below 0, which has no logarithm; start above, or draw uniform")


# ---- its points


def _significant(value: float, low: float, high: float) -> float:
    """Three digits: short folder names, and as fine as a search needs."""
    return min(max(float(f"{value:.3g}"), low), high)


# u in [0, 1) and what follows the kind in RANDOM -> the value.
DRAWS: dict[str, Callable[..., Any]] = {
    "log": lambda u, low, high: _significant(low * (high / low) ** u, float(low), float(high)),
    "uniform": lambda u, low, high: _significant(low + (high - low) * u, float(low), float(high)),
    "int": lambda u, low, high: low + int(u * (high - low + 1)),
    "choice": lambda u, values: _plain(values[int(u * len(values))]),
}
EXAMPLES = ('("log", LOW, HIGH)', '("uniform", LOW, HIGH)', '("int", LOW, HIGH)', '("choice", [A, B])')


def settings(spec: Spec) -> list[Setting]:
    """The settings of a sweep: the product of the grid's axes, the last fastest; or `trials` different draws.

    A key's draws depend on draw_seed and the key alone, so more trials keep the earlier ones.
    """
    if not spec.random:
        rows = itertools.product(*spec.grid.values())
        return [dict(zip(spec.keys, itertools.chain(*row), strict=True)) for row in rows]
    streams = {key: random.Random(f"{spec.draw_seed}/{key}") for key in spec.random}
    found: list[Setting] = []
    for _ in range(spec.trials * DRAWS_A_TRIAL):
        drawn = {key: DRAWS[kind](streams[key].random(), *rest) for key, (kind, *rest) in spec.random.items()}
        if drawn not in found:
            found.append(drawn)
        if len(found) == spec.trials:
            return found
    raise ConfigError(f"{spec.file}: RANDOM has only {len(found)} different settings; lower TRIALS = {spec.trials}")


def points(spec: Spec) -> list[Point]:
    """Every run, all settings of the first seed first: more seeds, or trials of a single one, append."""
    base = command(spec, {})
    runs = [(setting, seed) for seed in spec.seeds for setting in settings(spec)]
    return [
        Point(i, _name(setting, seed), setting, seed, (*base, *flags(setting), f"--config.seed={seed}"))
        for i, (setting, seed) in enumerate(runs)
    ]


def command(spec: Spec, setting: Setting) -> tuple[str, ...]:
    """Arguments of rljax.main for a setting, without seed and --workdir."""
    return (f"--config={spec.config}", *flags(spec.fixed), *spec.overrides, *flags(setting))


def line(*args: str | Sequence[str]) -> str:
    """A command line to copy, of rljax.main with these arguments."""
    flat = itertools.chain(*([arg] if isinstance(arg, str) else arg for arg in args))
    return shlex.join(("python", *PROGRAM, *flat))


def flags(setting: Setting) -> tuple[str, ...]:
    return tuple(f"--config.{key}={text(value)}" for key, value in setting.items())


def text(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_arrival(point: Point, config: Config) -> None:
    """Raises ConfigError where a value of the point did not arrive in its config as it was written."""
    arrived = config_lib.flat(config)
    for key, value in (point.setting | {"seed": point.seed}).items():
        if value is None:  # stands for a default
            continue
        if arrived[key] != value or isinstance(value, bool) != isinstance(arrived[key], bool):
            kind = config_lib.KEYS[key].type.__name__
            raise ConfigError(f"{key} = {value!r} arrives as {arrived[key]!r}; give a value of type {kind}")


def _name(setting: Setting, seed: int) -> str:
    """learner.learning_rate=0.0003__seed=1; with a hash where that cannot be a folder's name."""
    plain = "__".join(f"{key}={text(value)}" for key, value in (setting | {"seed": seed}).items())
    name = re.sub(r"[^\w.+=-]", "-", plain, flags=re.ASCII)
    if name == plain and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{name[:LONGEST_NAME]}--{digest}"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# ---- what came of them


class Estimate(NamedTuple):
    """Mean over seeds; low, high: 95% interval by Student's t, of two seeds the two values, of one that value."""

    mean: float
    low: float
    high: float
    seeds: dict[int, float]


class Outcome(NamedTuple):
    """What came of a point. values: by MEASURES; None if it has not finished. error: why its last try failed."""

    point: Point
    values: dict[str, float] | None
    error: str | None

    @property
    def status(self) -> str:
        return "finished" if self.values is not None else "failed" if self.error is not None else "unfinished"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A setting's results. estimates: by MEASURES, over the seeds that have finished; empty if none has."""

    setting: Setting
    estimates: dict[str, Estimate]
    planned: int

    @property
    def finished(self) -> int:
        return len(self.estimates["accuracy"].seeds) if self.estimates else 0


def measures(folder: pathlib.Path) -> dict[str, float] | None:
    """MEASURES of the finished run in a folder; None if it has not finished. ValueError where its file is broken."""
    file = folder / "summary.json"
    if not file.is_file():
        return None
    summary = read_json(file)
    try:
        first, last = summary["eval"]["first"], summary["eval"]["last"]
        found = {
            "accuracy": last["accuracy"], "avg_at_k": last["avg_at_k"],
            "gain": last["accuracy"] - first["accuracy"], "seconds": summary["wall_s"],
        }  # fmt: skip
        if not all(math.isfinite(value) for value in found.values()):
            raise ValueError(f"not finite: {found}")
    except (KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is no summary of a run ({told}); delete its folder to run it again") from error
    return found


def outcomes(runs: Sequence[Point], folder: pathlib.Path) -> list[Outcome]:
    """What came of each point, by what its folder below `folder` holds."""
    found = []
    for point in runs:
        file = folder / point.name / FAILURE_FILE
        error = str(read_json(file)["error"]) if file.is_file() else None
        found.append(Outcome(point, measures(folder / point.name), error))
    return found


def read_json(file: pathlib.Path) -> dict:
    """The object that a file of a run folder holds. ValueError, with the file, if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON ({error}); delete its folder to run it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object; delete its folder to run it again")
    return value


def estimate(values: Mapping[int, float]) -> Estimate:
    """The mean of one value or more by seed, and its interval."""
    array = np.array(list(values.values()), np.float64)
    low, high = curves.interval(array) if len(array) > 1 else (array[0], array[0])
    return Estimate(float(array.mean()), float(low), float(high), dict(values))


def ranked(found: Sequence[Outcome], metric: str) -> list[Row]:
    """A row a setting, the best first: those with the most finished seeds, and of them by the metric's mean."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in found:
        groups.setdefault(repr(outcome.point.setting), []).append(outcome)
    rows = []
    for members in groups.values():
        done = {outcome.point.seed: outcome.values for outcome in members if outcome.values is not None}
        estimates = {m: estimate({seed: values[m] for seed, values in done.items()}) for m in MEASURES if done}
        rows.append(Row(setting=members[0].point.setting, estimates=estimates, planned=len(members)))
    return sorted(rows, key=lambda row: (-row.finished, -row.estimates[metric].mean if row.estimates else 0.0))


def best(spec: Spec, rows: Sequence[Row]) -> str | None:
    """The command line of the first row; None if no run has finished."""
    return line(command(spec, rows[0].setting)) if rows[0].estimates else None


def record(spec: Spec, rows: Sequence[Row], found: Sequence[Outcome]) -> dict[str, Any]:
    """What sweep.json holds; of ``ranked`` rows."""
    told = best(spec, rows)
    return {
        "file": spec.file, "config": spec.config, "metric": spec.metric, "seeds": list(spec.seeds),
        "best": {"values": rows[0].setting, "command": told} if told is not None else None,
        "settings": [
            {"values": row.setting, "finished": row.finished, "planned": row.planned}
            | {name: value._asdict() for name, value in row.estimates.items()}
            | {"command": line(command(spec, row.setting))}
            for row in rows
        ],
        "points": [
            {"point": o.point.number, "folder": o.point.name, "status": o.status, "error": o.error} for o in found
        ],
    }  # fmt: skip
