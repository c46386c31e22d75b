"""The training loop: prompts, counts, rollouts, rewards, kept rows, update, checkpoint and metrics."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from rljax import budget, evaluate, metrics, rewards, runs, tasks
from rljax import parts as parts_lib
from rljax.checkpoint import Checkpointer
from rljax.console import Console
from rljax.models import hf, lora, peft
from rljax.options import Config
from rljax.parts import EVALUATION, Parts
from rljax.step import train_step
from rljax.types import RunState


def run(config: Config, workdir: pathlib.Path) -> dict:
    """Trains by `config` in the run folder `workdir`, resuming what is there; returns summary.json's content.

    A run that is over trains nothing, and says so.
    Raises config.ConfigError where workdir holds a run of another config, and what the parts raise.
    """
    workdir = pathlib.Path(workdir)
    runs.claim(config, workdir)
    task = tasks.load(config.task)
    with (
        rewards.RewardPool(task.grade, **dataclasses.asdict(config.rewards)) as pool,
        Checkpointer(workdir / "checkpoints", config.checkpoint.keep) as checkpoints,
        Console() as console,
    ):
        parts, state = parts_lib.build(config, task, pool)
        latest = checkpoints.latest_step()
        if latest is not None:
            state = checkpoints.restore(state)
        stages = metrics.Stages(state.totals["stage_s"])
        grants = draw(parts, state, stages)
        sets = parts.stream.prompts, parts.held_out
        table = runs.describe(config, parts.model, state.learner, parts.mesh, *sets, task.dropped)
        if latest is not None:
            table.append(runs.resumed(config, state, over=grants is None))
        console.start(f"rljax {config.name}", table, progress(config, state))
        with metrics.MetricsWriter(workdir, latest) as writer:
            if latest is None:
                state, line = held_out(parts, state, workdir, stages)
                console.evaluation(0, line)
                state, line = timed(state, line, stages)
                writer.write(0, line)
            while grants:
                state, line = train_step(parts, state, grants, stages)
                runs.check_finite(line, state.step)
                grants = draw(parts, state, stages)
                last = grants is None
                if last or (config.eval.every and state.step % config.eval.every == 0):
                    state, scores = held_out(parts, state, workdir, stages)
                    console.evaluation(state.step, scores)
                    line |= scores
                state, line = timed(state, line, stages)
                writer.write(state.step, line)  # before the save: a step that can be resumed from has its line
                if last or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
                    checkpoints.save(state.step, state)
                for text in runs.warnings(line):
                    console.warn(text)
                console.step(state.step, progress(config, state), line)
        checkpoints.wait()
        if (text := runs.unspent(config, state)) is not None:
            console.warn(text)
        export(workdir, parts, state)
        summary = runs.summary(config, state)
        metrics.write_summary(workdir, summary)
        first, final = summary["eval"]["first"], summary["eval"]["last"]
        sampled = f"accuracy at temperature {config.eval.temperature:g}"
        names = {"accuracy": "greedy accuracy", "avg_at_k": sampled}
        rows = [(text, first[name], final[name]) for name, text in names.items()]
        console.finish(rows, summary["stage_s"], workdir)
    return summary


def draw(parts: Parts, state: RunState, stages: metrics.Stages) -> budget.Grants | None:
    """The next step's prompts and counts; None when the budget is spent or the epochs are over."""
    with stages("prompts"):
        grants = parts.allocator.draw(parts.stream, state.draws, state.totals["rollouts"], state.budget)
    return grants if len(grants.prompts) else None


def progress(config: Config, state: RunState) -> float:
    """Share of the rollout budget spent."""
    return min(1.0, state.totals["rollouts"] / config.budget.rollouts)


def timed(state: RunState, line: dict, stages: metrics.Stages) -> tuple[RunState, dict]:
    """The step's times in its metrics, and in the state's totals."""
    lap = stages.lap()
    if "rollouts/tokens" in line:  # not in the evaluation before the first step
        lap["rollouts/tokens_per_s"] = line["rollouts/tokens"] / lap["time/rollout_s"]
    wall = state.totals["wall_s"] + lap["time/step_s"]
    return dataclasses.replace(state, totals=state.totals | {"stage_s": stages.seconds, "wall_s": wall}), line | lap


def export(workdir: pathlib.Path, parts: Parts, state: RunState) -> None:
    """The trained model as a Hugging Face directory, `model`; its adapters alone beside it, `adapter`."""
    model, params = parts.model, lora.whole(state.learner)
    if model.lora is not None:
        peft.save(workdir / "adapter", model, params, base=parts.config.model.path)
        params = lora.merged(params, model.lora)
    hf.save(workdir / "model", model, params)
    parts.tokenizer.save(workdir / "model")


def held_out(parts: Parts, state: RunState, workdir: pathlib.Path, stages) -> tuple[RunState, dict]:
    """Held-out metrics of the policy, recorded in the state's totals as first, last and best; of the actor beside.

    The policy's completions go to eval/STEP.jsonl.
    """
    score = functools.partial(
        evaluate.score,
        prompts=parts.held_out,
        config=parts.config,
        tokenizer=parts.tokenizer,
        pool=parts.pool,
        key=parts.key(EVALUATION),
    )
    with stages("eval"):
        scored = score(parts.model, lora.whole(state.learner))
        metrics.write_lines(workdir / "eval" / f"{state.step:06}.jsonl", evaluate.records(scored))
        scores = evaluate.summarise(scored)
        if state.learner.actor is not None:
            actor = evaluate.summarise(score(parts.actor_model, state.learner.actor.params))
            scores |= {name.replace("eval/", "eval/actor_"): value for name, value in actor.items()}
    entry = {"step": state.step, "accuracy": scores["eval/accuracy"], "avg_at_k": scores["eval/avg_at_k"]}
    known = state.totals["eval"]
    best = max((known.get("best", entry), entry), key=lambda e: e["accuracy"])
    record = {"first": known.get("first", entry), "last": entry, "best": best}
    return dataclasses.replace(state, totals=state.totals | {"eval": record}), scores
