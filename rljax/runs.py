"""A run seen from outside: its folder, and what it says about itself at start and end."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import jax

from rljax import batching, metrics, plan, sharding
from rljax import config as config_lib
from rljax.config import ConfigError
from rljax.options import Config
from rljax.types import RunState

CONFIG_FILE = "config.json"


def for_wandb(config: Config) -> dict | None:
    """What wandb.init is given for a run; None where metrics.wandb is off."""
    if not config.metrics.wandb:
        return None
    return {"project": config.metrics.wandb, "name": config.name, "config": config_lib.to_dict(config)}


def check_model(config: Config, workdir: pathlib.Path) -> None:
    """Raises ConfigError where a run folder's checkpoints are of another model or other adapters than the config's."""
    saved = config_lib.read_saved(workdir / CONFIG_FILE)
    found = config_lib.differences(config, saved)
    rank = saved.get("lora", {"rank": 0})["rank"]  # runs of before there were adapters have none
    ours = ("model.path", "lora.") if config.lora.rank > 0 or rank > 0 else ("model.path",)
    other = {key: pair for key, pair in found.items() if key.startswith(ours)}
    if other:
        listed = "; ".join(f"{key} is {old!r} there and {new!r} here" for key, (old, new) in other.items())
        raise ConfigError(f"--workdir={workdir} holds checkpoints of another model: {listed}. Give what the run had")


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


UNWRITTEN = "unwritten"  # key of a state's totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A step that is made and not written yet, or the start of a run, which has no records: metrics and records."""

    line: dict
    record: dict | None


def with_unwritten(state: RunState, made: Made) -> RunState:
    """The state with the metrics and records of its step, which is to be evaluated yet; a checkpoint keeps them."""
    plain = {name: metrics.plain(name, value) for name, value in made.line.items()}
    return dataclasses.replace(state, totals=state.totals | {UNWRITTEN: {"line": plain, "record": made.record}})


def unwritten(state: RunState) -> tuple[RunState, Made | None]:
    """The state without what `with_unwritten` added, and that; None where the step's line is written."""
    totals = dict(state.totals)
    kept = totals.pop(UNWRITTEN, None)
    return dataclasses.replace(state, totals=totals), None if kept is None else Made(**kept)


def describe(
    config: Config, model, actor_model, learner, mesh, rollout_mesh, prompts, held_out, dropped
) -> list[tuple[str, str]]:
    """Rows of the start-up table. prompts, held_out: prompts.PromptSet. dropped: tasks.base.Task's."""
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (learner.params, learner.frozen))
    of_them = f", {trained:,} of them trained" if frozen else ""
    r, b = config.rollout, config.budget
    keep = "all" if config.pods.rule == "all" else f"{config.pods.keep} by {config.pods.rule}"
    kind = model.config.model_type
    without = left_out(config, dropped, {"training": prompts.dropped, "held-out": held_out.dropped})
    actor = config.actor.path if config.actor.path else config.actor.dtype
    by = [("actor", f"{actor} makes the rollouts; reward and effective are its own")] if actor else []
    apart = [("rollouts", f"{axes(rollout_mesh)}, of their own")] if rollout_mesh != mesh else []
    lag = [("staleness", "rollouts by weights one step older, made during the update")] if r.staleness else []
    return [
        ("model", f"{config.model.path} ({kind}, {trained + frozen:,} parameters{of_them}, {config.model.dtype})"),
        *by,
        ("task", f"{config.task.name}: {len(prompts):,} training prompts, {len(held_out):,} held out{without}"),
        ("step", f"{r.prompts} prompts × {r.samples} rollouts of ≤ {r.max_new_tokens} tokens, kept: {keep}"),
        ("shapes", shapes(config, rollout_mesh)),
        ("budget", f"{b.rollouts:,} rollouts, {b.rule}; about {total_steps(config):,} steps"),
        ("mesh", axes(mesh)),
        *apart,
        *lag,
        ("memory", memory(plan.state_bytes(config, model.config, mesh, actor_model and actor_model.config), mesh)),
    ]


def axes(mesh) -> str:
    """A mesh in words: its axes' sizes and its devices."""
    devices = f"{mesh.devices.size} {mesh.devices.flat[0].platform} device{'s' if mesh.devices.size > 1 else ''}"
    return f"{' × '.join(f'{name} {size}' for name, size in mesh.shape.items())} ({devices})"


def left_out(config: Config, dropped, too_long: dict[str, int]) -> str:
    """ "; left out: …" with the reasons, or "". dropped: tasks.base.Task's. too_long: prompts by their set."""
    limit = config.rollout.max_prompt_tokens
    longer = {f"{what} prompts longer than {limit} tokens": count for what, count in too_long.items() if count}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in {**dropped, **longer}.items())
    return f"; left out: {reasons}" if reasons else ""


def shapes(config: Config, mesh) -> str:
    """The static shapes that a run compiles for: of decoding, and the widths of an update's rows."""
    r = config.rollout
    prompt, completion = (
        "/".join(map(str, batching.buckets(limit))) for limit in (r.max_prompt_tokens, r.max_new_tokens)
    )
    lanes, slots = r.decoding(sharding.size(mesh, "prompts"))
    return (
        f"decode {lanes} lanes × {slots} slots; learn {r.prompts} × {config.pods.keep} rows,"
        f" padded to {prompt} + {completion} tokens"
    )


def memory(held: plan.StateBytes, mesh) -> str:
    """Bytes on a device of parameters, optimizer and gradients, and what it has where it says so."""
    stats = mesh.local_devices[0].memory_stats()  # None on CPUs
    of = f" of {_size(stats['bytes_limit'])}" if stats is not None and "bytes_limit" in stats else ""
    return f"{_size(held.total)}{of} a device for the learner; caches and activations come on top"


def _size(count: int) -> str:
    """1536 → "1.5 KiB"."""
    power = min(max(count, 1).bit_length() // 10, 4)
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


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
