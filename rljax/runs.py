"""A run seen from outside: its folder, what it says about itself at start and end, and its warnings."""

from __future__ import annotations

import json
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
    if file.exists() and begun:
        try:
            saved = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not valid JSON ({error}); name another run folder") from error
        found = config_lib.differences(config, saved)
        if found:
            listed = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in found.items())
            raise ConfigError(
                f"--workdir={workdir} holds a run of another config: {listed}. "
                "Name another folder, or change these back"
            )
    metrics.write_json(file, config_lib.to_dict(config))


def total_steps(config: Config) -> int:
    """Steps that the budget allows, each of rollout.prompts × rollout.samples rollouts, the last maybe less."""
    return -(-config.budget.rollouts // (config.rollout.prompts * config.rollout.samples))


def resumed(config: Config, state, over: bool) -> tuple[str, str]:
    """The row of the start-up table that says from where a run goes on, or that it is over."""
    spent = f"{state.totals['rollouts']:,} of {config.budget.rollouts:,} rollouts"
    if over:
        return "finished", f"nothing left to train: step {state.step}, {spent}; for another run name another folder"
    return "resumed", f"at step {state.step}, {spent}"


def describe(
    config: Config, model, params, mesh, num_prompts: int, num_held_out: int
) -> list[tuple[str, str]]:
    """Rows of the start-up table."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    r, b = config.rollout, config.budget
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    keep = "all" if config.pods.rule == "all" else f"{config.pods.keep} by {config.pods.rule}"
    kind = model.config.model_type
    return [
        ("model", f"{config.model.path} ({kind}, {count:,} parameters, {config.model.dtype})"),
        ("task", f"{config.task.name}: {num_prompts:,} training prompts, {num_held_out:,} held out"),
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
    if line["train/grader_errors"] > 0:
        out.append(f"the grader raised, in {line['train/grader_errors']} rollouts: {line['train/first_error']}")
    return out


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
