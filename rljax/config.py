"""From the configuration the user wrote to one frozen tree that the rest of rljax reads.

A ``ConfigDict`` (configs/*.py plus ``--config.key=value``) ends here: ``resolve`` checks every key, type,
range, choice and combination, fills in what is derived, and returns a ``Config`` of frozen dataclasses. They
have no defaults: configs/default.py is the only place that has, and says what each key means.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rljax.options import (
    FILE_TASKS,
    BudgetOptions,
    Config,
    LearnerOptions,
    PodsOptions,
    RolloutOptions,
    TaskOptions,
)


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
    given = _flatten(config)
    for key in given:
        check_key(key)
    missing = [key for key in KEYS if key not in given]
    if missing:
        raise ConfigError(f"the config lacks {', '.join(missing)}; start from configs/default.py")
    values = {key: _checked(key, given[key]) for key in KEYS}
    if values["pods.keep"] is None:
        values["pods.keep"] = values["rollout.samples"]
    resolved = _build(Config, values)
    for conflict in _conflicts(resolved):
        raise ConfigError(conflict)
    return resolved


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts of JSON values; ``resolve`` of it gives an equal Config."""
    return dataclasses.asdict(config)


def flat(config: Config) -> dict[str, Any]:
    """The config as one dict {"rollout.samples": 16, …}, in the order of KEYS."""
    return _flatten(to_dict(config))


# Keys that say where, how fast and how closely watched a run computes, never what it learns.
MAY_DIFFER = (
    "name", "mesh.*", "checkpoint.*", "eval.*", "rewards.*",
    "model.remat", "model.token_chunk", "rollout.lanes", "rollout.slots", "rollout.segment",
    "learner.micro_batches",
)  # fmt: skip


def differences(
    config: Config, saved: Mapping[str, Any], *, ignore: tuple[str, ...] = MAY_DIFFER
) -> dict[str, tuple[Any, Any]]:
    """Why ``saved`` (a run folder's config.json) is another run's: {key: (saved value, value now)}.

    Empty if it is the same run's. Keys that match a pattern of ``ignore`` may differ. So may the run's length
    (budget.rollouts, budget.epochs) under uniform allocation with a constant learning rate: a longer run then
    begins exactly as the shorter one did; CERO's prices and the cosine depend on the whole budget from the
    first step. A key that one side lacks has the value "(absent)" there.
    """
    before, now = _flatten(saved), flat(config)
    same_start = config.budget.rule == "uniform" and config.learner.schedule == "constant"
    patterns = (*ignore, "budget.rollouts", "budget.epochs") if same_start else ignore
    absent = "(absent)"
    found = {key: (before.get(key, absent), now.get(key, absent)) for key in {**now, **before}}
    return {
        key: pair for key, pair in found.items()
        if pair[0] != pair[1] and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }  # fmt: skip


def _flatten(tree: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values = {}
    for name, value in tree.items():
        if isinstance(value, ConfigDict | Mapping):
            values |= _flatten(value, f"{prefix}{name}.")
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


def _checked(key: str, value: Any) -> Any:
    """The value with its key's type, or ConfigError. int serves as float; bool never serves as a number."""
    spec = KEYS[key]
    if value is None and spec.optional:
        return None
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


def _conflicts(c: Config) -> Iterator[str]:
    """What is wrong between keys whose values are each right alone, the most basic first."""
    yield from _task_conflicts(c.task)
    yield from _rollout_conflicts(c.rollout)
    yield from _budget_conflicts(c.budget, c.rollout, c.task)
    yield from _pods_conflicts(c.pods, c.rollout.samples)
    if c.loss.correction_low > c.loss.correction_high:
        yield (
            f"loss.correction_low = {c.loss.correction_low} is above loss.correction_high ="
            f" {c.loss.correction_high}; lower the one or raise the other"
        )
    if c.loss.objective == "cispo" and c.loss.dual_clip is not None:
        yield (
            f"loss.dual_clip = {c.loss.dual_clip} has no effect with loss.objective = 'cispo';"
            " set it to None, or loss.objective to 'ppo'"
        )
    yield from _actor_conflicts(c)
    yield from _learner_conflicts(c.learner, c.rollout, c.budget)
    axes = dataclasses.asdict(c.mesh)
    yield from (
        f"mesh.{axis} = 0 is no size; give at least 1, or -1 for the devices that are left"
        for axis, size in axes.items()
        if size == 0
    )
    free = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        yield f"{' and '.join(free)} are -1, but one axis takes the devices that are left; size the others"


# Keys of the task block that a task of rljax reads beside those of all tasks, and their value when not set.
OF_FILES = dict.fromkeys(
    ("path", "eval_path", "prompt_field", "answer_field", "gold", "grader", "template", "stop"), ""
)
OF_ARITHMETIC = {"mix": "", "shots": 0}


def _task_conflicts(t: TaskOptions) -> Iterator[str]:
    if t.system and not t.chat:
        yield f"task.system = {t.system!r} has no effect without task.chat; set task.chat to True"
    of_file = t.name in FILE_TASKS
    if not of_file and t.name != "arithmetic":
        return  # a task of the user's own reads what it likes
    for key, off in (OF_ARITHMETIC if of_file else OF_FILES).items():
        value = getattr(t, key)
        if value != off:
            other = "arithmetic" if of_file else f"one of {', '.join(FILE_TASKS)}"
            yield (
                f"task.{key} = {value!r} has no effect with task.name = {t.name!r}; set it to {off!r}, or"
                f" task.name to {other}"
            )
    if of_file and not t.path:
        yield f"task.name = {t.name!r} reads its problems from a data file; set task.path to one"
    if not of_file and t.train_prompts == 0:
        yield f"task.train_prompts = 0 is all of a data file, but task.name = {t.name!r} has none; set at least 1"
    if t.eval_prompts == 0 and not t.eval_path:
        yield "task.eval_prompts = 0 is all of task.eval_path, which is not set; set at least 1, or task.eval_path"


def _rollout_conflicts(r: RolloutOptions) -> Iterator[str]:
    if r.samples == 1:
        yield "rollout.samples = 1 is a group of one, whose advantage is always 0; set at least 2"
    if r.temperature == 0:
        yield "rollout.temperature = 0 makes all samples of a group equal (greedy); set it above 0"
    for key, value, off in (("top_k", r.top_k, 0), ("top_p", r.top_p, 1.0)):
        if value != off:
            yield (
                f"rollout.{key} = {value} is on in training: the recorded log-probs would be of another"
                f" distribution than the policy's; set it to {off}"
            )
    if r.segment > r.max_new_tokens:
        yield (
            f"rollout.segment = {r.segment} is more than rollout.max_new_tokens = {r.max_new_tokens};"
            f" set rollout.segment to at most {r.max_new_tokens}"
        )


def _budget_conflicts(b: BudgetOptions, r: RolloutOptions, t: TaskOptions) -> Iterator[str]:
    step = r.prompts * r.samples
    if b.rollouts < step:
        yield (
            f"budget.rollouts = {b.rollouts} is less than one step of rollout.prompts * rollout.samples ="
            f" {r.prompts} * {r.samples} = {step}; raise it, or make a step smaller"
        )
    if b.rule != "cero":
        return
    if r.samples > r.slots:
        yield (
            f"rollout.samples = {r.samples}, the largest grant N_max under budget.rule = 'cero', is more"
            f" than rollout.slots = {r.slots}; raise rollout.slots or lower rollout.samples"
        )
    most = t.train_prompts * b.epochs * r.samples
    if t.train_prompts and b.rollouts > most:  # of 0, a whole data file, the number is not known here
        yield (
            f"budget.rollouts = {b.rollouts} can never be spent: task.train_prompts * budget.epochs *"
            f" rollout.samples = {t.train_prompts} * {b.epochs} * {r.samples} = {most};"
            " raise budget.epochs or lower budget.rollouts"
        )


def _pods_conflicts(p: PodsOptions, samples: int) -> Iterator[str]:
    if p.keep > samples:
        yield (
            f"pods.keep = {p.keep} is more than rollout.samples = {samples}; lower pods.keep or raise rollout.samples"
        )
    if p.rule == "all" and p.keep != samples:
        yield (
            f"pods.keep = {p.keep} contradicts pods.rule = 'all', which keeps all rollout.samples ="
            f" {samples}; set pods.keep to {samples} or choose another pods.rule"
        )
    if p.keep == 1 and p.normalize_over == "kept":
        yield (
            "pods.keep = 1 with pods.normalize_over = 'kept' is a group of one, whose advantage is always"
            " 0; keep at least 2, or set pods.normalize_over to 'all'"
        )


def _actor_conflicts(c: Config) -> Iterator[str]:
    j, a = c.jackpot, c.actor
    if a.path and a.dtype:
        yield (
            f"actor.dtype = {a.dtype!r} is that of a copy of the policy, but actor.path = {a.path!r} names another"
            " model; set one of them to ''"
        )
    if c.advantage.overlong_buffer > c.rollout.max_new_tokens:
        yield (
            f"advantage.overlong_buffer = {c.advantage.overlong_buffer} is more than rollout.max_new_tokens ="
            f" {c.rollout.max_new_tokens}; lower it"
        )
    if j.rule == "none":
        return
    updates = c.learner.minibatches * c.learner.epochs
    if not (a.path or a.dtype) and (updates == 1 or j.target == "old"):
        yield (
            "jackpot.rule = 'obrs' has nothing to correct: the policy itself makes the rollouts; set actor.path or"
            " actor.dtype, or several learner.minibatches or learner.epochs with jackpot.target = 'new'"
        )
    if c.loss.correction != "none":
        yield (
            f"loss.correction = {c.loss.correction!r} and jackpot.rule = 'obrs' both weigh tokens;"
            " set one of them to 'none'"
        )
    if j.normaliser == "exact" and (j.table == "sampler" or j.target == "new"):
        yield (
            f"jackpot.normaliser = 'exact' needs the whole vocabulary at the old policy, but jackpot.table ="
            f" {j.table!r} and jackpot.target = {j.target!r}; set jackpot.normaliser to 'top_k'"
        )


def _learner_conflicts(o: LearnerOptions, r: RolloutOptions, b: BudgetOptions) -> Iterator[str]:
    if r.prompts % o.minibatches:
        yield (
            f"learner.minibatches = {o.minibatches} does not divide rollout.prompts = {r.prompts}; change one of them"
        )
    part = r.prompts // o.minibatches
    if part % o.micro_batches:
        yield (
            f"learner.micro_batches = {o.micro_batches} does not divide a minibatch of rollout.prompts /"
            f" learner.minibatches = {r.prompts} / {o.minibatches} = {part} prompts; change one of them"
        )
    updates = b.rollouts // (r.prompts * r.samples) * o.minibatches * o.epochs
    if o.schedule == "cosine" and o.warmup_updates >= updates:
        yield (
            f"learner.warmup_updates = {o.warmup_updates} leaves nothing for learner.schedule = 'cosine':"
            f" budget.rollouts allows {updates} updates; lower the one or raise the other"
        )
