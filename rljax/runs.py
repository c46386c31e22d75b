"""A run seen from outside: its folder, what it says about itself at start and end, and its warnings."""

from __future__ import annotations

import json
import math
import pathlib

import jax

from rljax import config as config_lib
from rljax import metrics
from rljax.config import ConfigError
from rljax.options import Config

CONFIG_FILE = "config.json"


def claim(config: Config, workdir: pathlib.Path) -> None:
    """Writes config.json into a new run folder; in one that holds a run, checks that it is this config's.

    A folder with neither metrics nor checkpoints (its run was refused: a checkpoint that is missing, a mesh
    that does not divide) is new. Raises ConfigError that names the keys that differ, or an unreadable file.
    """
    file = workdir / CONFIG_FILE
    begun = (workdir / metrics.METRICS_FILE).exists() or any(workdir.glob("checkpoints/*"))
    if begun and not file.exists():
        raise ConfigError(f"--workdir={workdir} holds a run without its {CONFIG_FILE}; name another folder")
    if file.exists():
        saved = _read_config(file)
        found = config_lib.differences(config, saved) if begun else {}
        if found:
            listed = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in found.items())
            raise ConfigError(
                f"--workdir={workdir} holds a run of another config: {listed}. "
                "Name another folder, or change these back"
            )
    try:
        metrics.write_json(file, config_lib.to_dict(config))
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} cannot be written to ({error}); name another folder") from error


def check_model(config: Config, workdir: pathlib.Path) -> None:
    """Raises ConfigError where a run folder's checkpoints are of another model or other adapters than the config's."""
    found = config_lib.differences(config, _read_config(workdir / CONFIG_FILE))
    adapted = config.lora.rank > 0 or "lora.rank" in found
    ours = ("model.path", "lora.") if adapted else ("model.path",)
    other = {key: pair for key, pair in found.items() if key.startswith(ours)}
    if other:
        listed = "; ".join(f"{key} is {old!r} there and {new!r} here" for key, (old, new) in other.items())
        raise ConfigError(f"--workdir={workdir} holds checkpoints of another model: {listed}. Give what the run had")


def _read_config(file: pathlib.Path) -> dict:
    """What a run folder's config.json holds; ConfigError if it is no run's."""
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); name another run folder") from error
    if not isinstance(saved, dict) or not {"rollout", "budget"} <= saved.keys():
        raise ConfigError(f"{file} is not the config of a run; name another run folder")
    return saved


def check_finite(line: dict, step: int) -> None:
    """Raises FloatingPointError before a broken state is saved: its loss or gradient is NaN or infinite."""
    broken = [name for name in ("train/loss", "train/grad_norm") if not math.isfinite(line[name])]
    if broken:
        raise FloatingPointError(
            f"{broken[0]} is {line[broken[0]]} at step {step}; nothing of this step is saved. Check the checkpoint's "
            "weights and the rewards, or lower learner.learning_rate; the same command resumes from the last checkpoint"
        )


def total_steps(config: Config) -> int:
    """Steps that the budget allows, each of rollout.prompts × rollout.samples rollouts, the last maybe less."""
    return -(-config.budget.rollouts // (config.rollout.prompts * config.rollout.samples))


def resumed(config: Config, state, over: bool) -> tuple[str, str]:
    """The row of the start-up table that says from where a run goes on, or that it is over."""
    spent = f"{state.totals['rollouts']:,} of {config.budget.rollouts:,} rollouts"
    if over:
        return "finished", f"nothing left to train: step {state.step}, {spent}; for another run name another folder"
    return "resumed", f"at step {state.step}, {spent}"


def describe(config: Config, model, learner, mesh, prompts, held_out, dropped) -> list[tuple[str, str]]:
    """Rows of the start-up table. prompts, held_out: prompts.PromptSet. dropped: tasks.base.Task's."""
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (learner.params, learner.frozen))
    of_them = f", {trained:,} of them trained" if frozen else ""
    r, b = config.rollout, config.budget
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    keep = "all" if config.pods.rule == "all" else f"{config.pods.keep} by {config.pods.rule}"
    kind = model.config.model_type
    too_long = prompts.dropped + held_out.dropped
    left_out = {**dropped, **({f"longer than {r.max_prompt_tokens} tokens": too_long} if too_long else {})}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    without = f"; left out: {reasons}" if reasons else ""
    actor = config.actor.path if config.actor.path else config.actor.dtype
    by = [("actor", f"{actor} makes the rollouts; reward and effective are its own")] if actor else []
    return [
        ("model", f"{config.model.path} ({kind}, {trained + frozen:,} parameters{of_them}, {config.model.dtype})"),
        *by,
        ("task", f"{config.task.name}: {len(prompts):,} training prompts, {len(held_out):,} held out{without}"),
        ("step", f"{r.prompts} prompts × {r.samples} rollouts of ≤ {r.max_new_tokens} tokens, kept: {keep}"),
        ("budget", f"{b.rollouts:,} rollouts, {b.rule}; about {total_steps(config):,} steps"),
        ("mesh", f"{axes} ({mesh.devices.size} {mesh.devices.flat[0].platform} devices)"),
    ]


def warnings(line: dict) -> list[str]:
    """What in a step's metrics deserves a loud word."""
    out = []
    if line["rollouts/truncated"] > 0.5:
        out.append(
            f"{line['rollouts/truncated']:.0%} of the rollouts were cut at the token limit; "
            "raise rollout.max_new_tokens"
        )
    if line["train/unscorable"] > 0:
        out.append(f"{line['train/unscorable']} rollouts could not be scored; they carry no gradient")
    if line["train/grader_timeouts"] > 0:
        out.append(
            f"{line['train/grader_timeouts']} rollouts hung or crashed the grader and scored 0; see rewards.cpu_seconds"
        )
    if line["train/grader_errors"] > 0:
        out.append(f"the grader raised, in {line['train/grader_errors']} rollouts: {line['train/first_error']}")
    return out


def unspent(config: Config, state) -> str | None:
    """What to say of a run that ended with more than a step's rollouts left, if it did."""
    spent, step = state.totals["rollouts"], config.rollout.prompts * config.rollout.samples
    if config.budget.rollouts - spent <= step:
        return None
    return (
        f"{spent:,} of {config.budget.rollouts:,} rollouts were spent when the {config.budget.epochs} epochs were"
        " over; raise budget.epochs to spend the rest"
    )


def summary(config: Config, state) -> dict:
    """What summary.json holds."""
    totals = state.totals
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": state.step,
        "draws": state.draws,
        "rollouts_total": totals["rollouts"],
        "wall_s": totals["wall_s"],
        "stage_s": totals["stage_s"],
        "eval": totals["eval"],
    }
