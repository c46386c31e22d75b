"""Run folders as the report reads them, and which of them are seeds of one config. No jax here."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import operator
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rljax import config as config_lib

# Keys that may differ between runs of one config: which seed, and where and how fast a run computes.
WITHIN_A_CONFIG = ("seed", *(key for key in config_lib.MAY_DIFFER if key not in ("name", "eval.*")))
ABSENT = "(absent)"  # of a key that an older run's config.json lacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds; what it lacks is empty.

    config: config.json by flat key. lines: metrics.jsonl. finished: whether there is a summary.json.
    evals: {step: records} of eval/STEP.jsonl, the first and the last evaluation. measured: {NAME: outcome} of
    eval/NAME.json, which --mode=eval leaves.
    rollouts: rollouts.jsonl, what each prompt of a step was given and what came of it:
        {"step": 3, "prompts": [{"id": 17, "epoch": 0, "kind": "add2", "rollouts": 16,
                                 "rewards": {"0": 12, "1": 4}, "kept": {"0": 4, "1": 4}}]}
        rewards, kept: number of rollouts by reward, of those that could be scored and of those learned from.
        "kind" only where the task's examples have one.
    samples: samples.jsonl, a rollout a line, as pieces of text, one a token:
        {"step": 3, "prompt": "1+1=", "tokens": [" ", "2"], "acceptance": [1.0, 0.31], "reward": 1.0, "kept": true}
        acceptance: probability that rejection sampling accepts each token; only where there is any (Jackpot).
    """

    folder: pathlib.Path
    config: dict[str, Any]
    lines: list[dict]
    finished: bool
    evals: dict[int, list[dict]]
    measured: dict[str, dict]
    rollouts: list[dict]
    samples: list[dict]

    @property
    def name(self) -> str:
        return self.config["name"]

    @property
    def seed(self) -> int:
        return self.config["seed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one config, each with a seed of its own, and what the report calls them."""

    label: str
    runs: tuple[Run, ...]


def read(folder: pathlib.Path) -> Run:
    """The run of a folder.

    Raises:
        FileNotFoundError: it is no folder, or no run's: config.json or metrics.jsonl is missing.
        ValueError: a file of it cannot be read; names the file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder} does not exist; name the --workdir of a training run")
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; name the --workdir of a training run")
    try:
        config = flat(_object(folder / "config.json"))
    except RecursionError as error:
        told = f"{folder / 'config.json'} is nested too deeply for the config of a run; name another run folder"
        raise ValueError(told) from error
    missing = [key for key in ("name", "seed") if key not in config]
    if missing:
        raise ValueError(f"{folder / 'config.json'} lacks {missing[0]!r}; it is not the config of a run")
    lines = _lines(folder / "metrics.jsonl")
    if not lines:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no complete line yet; wait for the run's first evaluation")
    last = lines[-1]["step"]
    return Run(
        folder=folder,
        config=config,
        lines=lines,
        finished=(folder / "summary.json").is_file(),
        evals=_evals(folder / "eval", last),
        measured={path.stem: _measures(path) for path in sorted((folder / "eval").glob("*.json"))},
        rollouts=_up_to(last, folder / "rollouts.jsonl"),
        samples=_up_to(last, folder / "samples.jsonl"),
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rollout": {"samples": 16}} → {"rollout.samples": 16}."""
    values = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The runs by config, in the order given; a second run of the same config and seed is a group of its own."""
    found: list[tuple[dict, list[Run]]] = []
    for run in runs:
        identity = {key: value for key, value in run.config.items() if not _matches(key, WITHIN_A_CONFIG)}
        home = next((g for i, g in found if i == identity and run.seed not in [r.seed for r in g]), None)
        if home is None:
            found.append((identity, [run]))
        else:
            home.append(run)
    groups = [tuple(members) for _, members in found]
    labels = [_label(members, groups) for members in groups]
    if len(set(labels)) < len(labels):
        labels = [_folders(members, str) for members in groups]
    return [Group(label=label, runs=members) for label, members in zip(labels, groups, strict=True)]


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{key: its value in each run} of the keys whose values are not all equal, in the order of config.json."""
    return {key: values for key, values in configs(runs).items() if any(v != values[0] for v in values)}


def configs(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{key: its value in each run}, ABSENT where a run's config lacks the key, in the order of config.json."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}


def _label(members: tuple[Run, ...], groups: list[tuple[Run, ...]]) -> str:
    """The config's name; with one or two keys that tell it from others of that name, else with its folders."""
    name = members[0].name
    same = [group[0] for group in groups if group[0].name == name]
    if len(same) == 1:
        return name
    keys = [key for key in differing(same) if not _matches(key, WITHIN_A_CONFIG)]
    if not 1 <= len(keys) <= 2:
        return f"{name} ({_folders(members, lambda folder: folder.name)})"
    return ", ".join([name, *(f"{key} = {members[0].config.get(key, ABSENT)}" for key in keys)])


def _folders(members: tuple[Run, ...], name) -> str:
    return ", ".join(name(run.folder) for run in members)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


# ---- files


def _object(path: pathlib.Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); restore it or name another run folder") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; it is no file of a run")
    return value


def _lines(path: pathlib.Path, key: str = "step") -> list[dict]:
    """The objects of a file of JSON lines, without a half-written last one; each has `key`, an integer if "step"."""
    texts, records = path.read_text(encoding="utf-8").split("\n"), []
    for number, text in enumerate(texts, 1):
        try:
            record = json.loads(text)
            operator.index(record[key]) if key == "step" else record[key]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(texts):  # no line end: cut off by a kill; or the empty rest after the last line
                break
            raise ValueError(f"{path}, line {number} is no object with {key!r}: {text[:80]!r}") from error
        records.append(record)
    return records


def _up_to(last: int, path: pathlib.Path) -> list[dict]:
    """Lines of the steps that metrics.jsonl has; a run that was stopped may have written later ones."""
    return [line for line in _lines(path) if line["step"] <= last] if path.is_file() else []


def _evals(folder: pathlib.Path, last: int) -> dict[int, list[dict]]:
    found = {int(path.stem): path for path in folder.glob("*.jsonl") if re.fullmatch(r"\d+", path.stem)}
    steps = sorted(step for step in found if step <= last)
    return {step: _lines(found[step], "completions") for step in sorted({*steps[:1], *steps[-1:]})}


def _measures(path: pathlib.Path) -> dict:
    outcome = _object(path)
    if not isinstance(outcome.get("measures"), dict):
        raise ValueError(f"{path} has no 'measures'; it is not what --mode=eval writes")
    return outcome
