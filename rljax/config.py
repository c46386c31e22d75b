"""From the configuration the user wrote to one frozen tree that the rest of rljax reads.

A ``ConfigDict`` (configs/*.py plus ``--config.key=value``) ends here: ``resolve`` checks every key, type,
range, choice and combination, fills in what is derived, and returns a ``Config`` of frozen dataclasses. They
have no defaults: configs/default.py is the only place that has, and says what each key means.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import math
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rljax.conflicts import NOT_SET, conflicts
from rljax.options import Config


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, its value and what to do."""


class Key(NamedTuple):
    """What a key may hold: its type (int, float, str, bool), whether None is allowed, and the rules."""

    type: type
    optional: bool
    rules: tuple[Any, ...]


def _keys(cls: type, prefix: str = "") -> dict[str, Key]:
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            found |= _keys(typing.cast(type, hint), f"{prefix}{name}.")
            continue
        rules = hint.__metadata__ if hasattr(hint, "__metadata__") else ()
        kind = hint.__origin__ if rules else hint
        kinds = [part for part in (typing.get_args(kind) or (kind,)) if part is not types.NoneType]
        optional = kinds[0] is not kind or prefix + name in DERIVED
        found[prefix + name] = Key(kinds[0], optional, rules)
    return found


DERIVED = ("pods.keep",)  # None in the ConfigDict; ``resolve`` computes the value from other keys
KEYS: dict[str, Key] = _keys(Config)  # "rollout.samples" -> Key, in the order of configs/default.py
BLOCKS: tuple[str, ...] = tuple(dict.fromkeys(key.split(".")[0] for key in KEYS if "." in key))


def check_key(key: str) -> None:
    """Raises ConfigError when ``key`` ("rollout.samples") is none of KEYS, with the nearest that is."""
    if key in KEYS:
        return
    if key in BLOCKS:
        inside = ", ".join(known for known in KEYS if known.startswith(f"{key}."))
        raise ConfigError(f"config key {key!r} is a block, not a value; set its keys one by one: {inside}")
    leaf = key.split(".")[-1]
    leaves = {known: known.split(".")[-1] for known in KEYS}
    near_leaves = difflib.get_close_matches(leaf, set(leaves.values()), n=1)
    same_leaf = [known for known in KEYS if leaves[known] == leaf]
    near = (
        (same_leaf if key == leaf else None)  # the block was left out
        or difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        or same_leaf
        or difflib.get_close_matches(key, KEYS, n=1)
        or [known for known in KEYS if leaves[known] in near_leaves]
    )
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"its blocks are {', '.join(BLOCKS)}"
    raise ConfigError(f"unknown config key {key!r}; {hint} (configs/default.py has all keys)")


def resolve(config: ConfigDict | Mapping[str, Any]) -> Config:
    """The checked Config of a ConfigDict, or of the nested dict that a run folder's config.json holds.

    ``pods.keep`` = None becomes ``rollout.samples``. Raises ConfigError that names the key, its value and
    what to do. The division of the mesh by the device count is checked in rljax.sharding: no device is
    touched here.
    """
    if not isinstance(config, ConfigDict | Mapping):
        raise ConfigError(f"the config is a {type(config).__name__}; get_config() must return a ConfigDict")
    given = flatten(config)
    for key in given:
        check_key(key)
    missing = [key for key in KEYS if key not in given]
    if missing:
        raise ConfigError(f"the config lacks {', '.join(missing)}; start from configs/default.py")
    values = {key: _checked(key, given[key]) for key in KEYS}
    if values["pods.keep"] is None:
        values["pods.keep"] = values["rollout.samples"]
    resolved = _build(Config, values)
    found = list(conflicts(resolved))
    if found:
        raise ConfigError("\n".join(found))
    return resolved


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts of JSON values; ``resolve`` of it gives an equal Config."""
    return dataclasses.asdict(config)


def read_saved(file: pathlib.Path) -> dict:
    """What a run folder's config.json holds; ConfigError if it is no run's."""
    try:
        saved = json.loads(file.read_text())
        values = flatten(saved) if isinstance(saved, dict) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); name another run folder") from error
    if not isinstance(saved, dict) or not {"rollout", "budget"} <= saved.keys():
        raise ConfigError(f"{file} is not the config of a run; name another run folder")
    huge = [key for key, value in values.items() if _beyond_64_bits(value)]
    if huge:
        raise ConfigError(f"{file}: {huge[0]} is a number of more than 64 bits; correct it, or name another run folder")
    return saved


def flat(config: Config) -> dict[str, Any]:
    """The config as one dict {"rollout.samples": 16, …}, in the order of KEYS."""
    return flatten(to_dict(config))


# Keys that say where, how fast and how closely watched a run computes, never what it learns.
MAY_DIFFER = (
    "name", "mesh.*", "hosts.*", "checkpoint.*", "eval.*", "rewards.*", "metrics.*",
    "model.remat", "model.attention", "model.attention_chunk", "model.token_chunk",
    "rollout.lanes", "rollout.slots", "rollout.segment",
    "rollout.columns", "learner.micro_batches",
)  # fmt: skip


ABSENT = "(absent)"


def differences(
    config: Config, saved: Mapping[str, Any], *, ignore: tuple[str, ...] = MAY_DIFFER
) -> dict[str, tuple[Any, Any]]:
    """Why ``saved`` (a run folder's config.json) is another run's: {key: (saved value, value now)}.

    Empty if it is the same run's. Keys that match a pattern of ``ignore`` may differ. So may the run's length
    (budget.rollouts, budget.epochs) under uniform allocation with a constant learning rate: a longer run then
    begins exactly as the shorter one did; CERO's prices and the cosine depend on the whole budget from the
    first step. A key that one side lacks has the value ABSENT there.
    """
    before, now = flatten(saved), flat(config)
    same_start = config.budget.rule == "uniform" and config.learner.schedule == "constant"
    patterns = (*ignore, "budget.rollouts", "budget.epochs") if same_start else ignore
    found = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in {**now, **before}}
    return {
        key: pair for key, pair in found.items()
        if pair[0] != pair[1] and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }  # fmt: skip


def flatten(tree: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested blocks as one dict {"rollout.samples": 16, …}."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, ConfigDict | Mapping):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _build(cls: type, values: Mapping[str, Any], prefix: str = ""):
    hints = typing.get_type_hints(cls)
    return cls(**{
        field.name: _build(hints[field.name], values, f"{prefix}{field.name}.")
        if dataclasses.is_dataclass(hints[field.name]) else values[prefix + field.name]
        for field in dataclasses.fields(cls)
    })  # fmt: skip


def _beyond_64_bits(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > 63


def _checked(key: str, value: Any) -> Any:
    """The value with its key's type, or ConfigError. int serves as float; bool never serves as a number."""
    spec = KEYS[key]
    if value is None and spec.optional:
        return None
    if _beyond_64_bits(value):
        raise ConfigError(f"{key} is a number of more than 64 bits; give a smaller one")
    if spec.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not spec.type:
        wanted = f"{spec.type.__name__} or None" if spec.optional else spec.type.__name__
        raise ConfigError(f"{key} = {value!r} is of type {type(value).__name__}; give one of type {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value!r} is not finite; give a finite number")
    for rule in spec.rules:
        complaint = rule.complaint(value)
        if complaint:
            raise ConfigError(f"{key} = {value!r} {complaint}")
    return value


def evaluated(config: Config) -> list[Config]:
    """The configs that --mode=eval evaluates one after the other: its own, or one for each of eval.tasks."""
    pairs = [pair.partition(":") for pair in config.eval.tasks.split(",")] if config.eval.tasks else []
    tasks = [
        dataclasses.replace(
            config.task,
            # The fields and the grader of a task are no other one's.
            **({} if name == config.task.name else NOT_SET)
            | {"name": name, "path": "", "eval_path": file, "eval_prompts": 0},
        )
        for name, _, file in pairs
    ]
    return [dataclasses.replace(config, task=task) for task in tasks] if tasks else [config]
