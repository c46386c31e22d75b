"""Tasks: prompts with a grader, found by name or by dotted path. Imports no jax."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from rljax.tasks import kinds
from rljax.tasks.base import Task


def _arithmetic(config: Any) -> Task:
    from rljax.tasks import arithmetic

    return arithmetic.make(
        seed=config.seed,
        train_prompts=config.train_prompts,
        eval_prompts=config.eval_prompts,
        mix=config.mix,
        shots=config.shots,
    )


def _file(config: Any) -> Task:
    from rljax.tasks import files

    return files.from_config(config)


def _gym(config: Any) -> Task:
    from rljax.tasks import gym

    return gym.from_config(config)


# name -> a function of the config's task block. Modules are imported when asked for, with what they need.
TASKS: dict[str, Callable[[Any], Task]] = {
    "arithmetic": _arithmetic,
    "reasoning_gym": _gym,
    "file": _file,
    "choice": _file,
    "sciknoweval": _file,
    "gsm8k": _file,
    "math": _file,
    "aime": _file,
    "amc": _file,
    "dapo_math": _file,
}


def load(config: Any) -> Task:
    """The task of a config's ``task`` block (``config.name``, and what that task reads).

    ``name`` is a key of :data:`TASKS`, or ``"package.module:function"`` for a task outside the package: the
    function takes the block and returns a :class:`rljax.tasks.base.Task`. Where no example has a "kind", the first of
    kinds.FIELDS that groups them ("level", "difficulty" …) gives each one.

    Raises:
        ValueError: an unknown name, a path that leads nowhere, or a function that returns no Task.
    """
    if ":" in config.name:
        task = _from_path(config.name)(config)
    elif config.name in TASKS:
        task = TASKS[config.name](config)
    else:
        raise ValueError(
            f"task.name={config.name!r} is unknown; known: {', '.join(sorted(TASKS))}, "
            'or "package.module:function" for a task of your own'
        )
    if not isinstance(task, Task):
        raise ValueError(f"task.name={config.name!r} returned a {type(task).__name__}; return a rljax.tasks.base.Task")
    train, held_out = kinds.add(task.train, task.eval)
    return dataclasses.replace(task, train=train, eval=held_out)


def _from_path(path: str) -> Callable[[Any], object]:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports was not
        raise ValueError(
            f"task.name={path!r}: no module {error.name!r}; put its folder on PYTHONPATH or run from there"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"task.name={path!r}: {module_name} has no function {function_name!r}")
    return function
