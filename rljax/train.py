"""The training loop: prompts, counts, rollouts, rewards, kept rows, update, checkpoint and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib

from rljax import budget, claims, evaluate, hosts, metrics, preemption, records, rewards, runs, tasks
from rljax import parts as parts_lib
from rljax.ahead import Ahead
from rljax.alarms import Alarms
from rljax.checkpoint import Checkpointer
from rljax.console import Console
from rljax.models import hf, lora, peft
from rljax.options import Config
from rljax.parts import EVALUATION, RECORDS, Parts
from rljax.plan import report as plan_report
from rljax.step import counted, train_step
from rljax.types import RunState


def run(config: Config, workdir: pathlib.Path) -> dict:
    """Trains by `config` in the run folder `workdir`, resuming what is there; returns summary.json's content.

    A run that is over trains nothing, and says so. All processes of a run on several hosts call this.
    Raises config.ConfigError where workdir holds a run of another config, and what the parts raise; and
    preemption.Preempted, which says where the run goes on, after a SIGTERM and the save of what is whole.
    """
    workdir = pathlib.Path(workdir)
    claims.check(config, workdir)
    task = tasks.load(config.task)
    with (
        preemption.watching(hosts.anywhere),
        rewards.RewardPool(task.grade, **dataclasses.asdict(config.rewards)) as pool,
        Console() as console,
        contextlib.ExitStack() as folder,
    ):
        console.say(f"loading {config.model.path}", style="dim")
        parts, state = parts_lib.build(config, task, pool)
        folder.enter_context(claims.held(config, workdir, console.warn))  # nothing is refused from here on
        checkpoints = folder.enter_context(Checkpointer(workdir / "checkpoints", config.checkpoint.keep))
        latest = checkpoints.latest_step()
        made = runs.Made(line={}, record=None)  # a step that is not written yet; here the start
        if latest is not None:
            state, made = runs.unwritten(checkpoints.restore(state))
        stages = metrics.Stages(state.totals["stage_s"], begun=console.stage)
        grants = draw(parts, state, stages)
        sets = parts.stream.prompts, parts.held_out
        models, meshes = (parts.model, parts.actor_model), (parts.mesh, parts.rollout_mesh)
        table = runs.describe(config, *models, state.learner, *meshes, *sets, task.dropped)
        if latest is not None:
            table.append(runs.resumed(config, state, over=grants is None and made is None))
        console.start(f"rljax {config.name}", table, progress(config, state))
        console.warn(*plan_report.warnings(config, models, meshes))
        if latest is None:
            console.warn(*parts.allocator.foreseen())
        written = None if latest is None else state.step if made is None else state.step - 1
        with (
            metrics.MetricsWriter(workdir, written, wandb=runs.for_wandb(config)) as writer,
            Ahead(parts, stages) as rollouts,
        ):
            alarms, start = Alarms(config, writer.past), state.step
            try:
                while grants or made:
                    if grants and made is None:
                        if state.step == start:
                            console.say("the first step compiles too, and takes longer than the others", style="dim")
                        seen = rollouts.take(state, grants)
                        grants = draw(parts, counted(state, seen), stages)  # of the next step
                        state, line, trace = train_step(parts, rollouts.begin(state, seen, grants), seen, stages)
                        runs.check_finite(line, state.step)
                        made = runs.Made(line=line, record=recorded(parts, state.step, trace, last=grants is None))
                    assert made is not None
                    if grants is None or due(state.step, config.eval.every):
                        if state.step == 0:
                            prompts = f"{len(parts.held_out):,} held-out prompts"
                            console.say(f"compiling, and evaluating {prompts} before the first step", style="dim")
                        state, scores = held_out(parts, state, workdir, stages)
                        made = dataclasses.replace(made, line=made.line | scores)
                    state, line = timed(state, made.line, stages)
                    writer.write(state.step, line, made.record)  # before the save: what is resumed from has its lines
                    if made.record is not None:
                        if grants is None or due(state.step, config.checkpoint.every):
                            save(checkpoints, state)
                        console.step(state.step, progress(config, state), line)
                    console.evaluation(state.step, line)
                    if made.record is not None:
                        console.samples(state.step, made.record["samples"])
                    console.warn(*alarms(line))
                    made = None
                    preemption.check()
            except preemption.Preempted as told:
                raise preemption.Preempted(leave(checkpoints, state, made, stages)) from told
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


def due(step: int, every: int) -> bool:
    """Whether something is to be done at a step: before the first one, and at every so manieth; 0 is never."""
    return step == 0 or (every > 0 and step % every == 0)


def save(checkpoints: Checkpointer, state: RunState) -> None:
    """Saves a step, unless it is there: that of a run that was preempted in the step's evaluation is."""
    if checkpoints.latest_step() != state.step:
        checkpoints.save(state.step, state)


def leave(checkpoints: Checkpointer, state: RunState, made: runs.Made | None, stages: metrics.Stages) -> str:
    """Saves the last whole state, with what is not written yet of its step; says where the run goes on."""
    if made is not None:
        state, line = timed(state, made.line, stages)
        state = runs.with_unwritten(state, dataclasses.replace(made, line=line))
    save(checkpoints, state)
    checkpoints.wait()
    return f"preempted: step {state.step} is saved; the same command goes on from there"


def draw(parts: Parts, state: RunState, stages: metrics.Stages) -> budget.Grants | None:
    """The next step's prompts and counts; None when the budget is spent or the epochs are over."""
    with stages("prompts"):
        grants = parts.allocator.draw(parts.stream, state.draws, state.totals["rollouts"], state.budget)
    return grants if len(grants.prompts) else None


def progress(config: Config, state: RunState) -> float:
    """Share of the rollout budget spent."""
    return min(1.0, state.totals["rollouts"] / config.budget.rollouts)


def recorded(parts: Parts, step: int, trace: records.Trace, last: bool) -> dict[str, list[dict]]:
    """The step's lines of rollouts.jsonl and samples.jsonl: samples at the first, the last and every N-th step."""
    every, seed = parts.config.metrics.samples_every, (parts.config.seed, RECORDS, step)
    wanted = due(step, every) or (every > 0 and (step == 1 or last))
    samples = records.of_rollouts(trace, parts.tokenizer, seed) if wanted else []
    return {"rollouts": [records.of_prompts(trace)], "samples": samples}


def timed(state: RunState, line: dict, stages: metrics.Stages) -> tuple[RunState, dict]:
    """The step's times in its metrics, with what it took before a preemption, and in the state's totals."""
    lap = stages.lap()
    wall = state.totals["wall_s"] + lap["time/step_s"]
    earlier = {name: seconds for name, seconds in line.items() if name.startswith("time/")}
    lap |= {name: seconds + lap.get(name, 0.0) for name, seconds in earlier.items()}
    if "rollouts/tokens" in line:  # not in the evaluation before the first step
        lap["rollouts/tokens_per_s"] = line["rollouts/tokens"] / lap["time/rollout_s"]
    return dataclasses.replace(state, totals=state.totals | {"stage_s": stages.seconds, "wall_s": wall}), line | lap


def export(workdir: pathlib.Path, parts: Parts, state: RunState) -> None:
    """The trained model as a Hugging Face directory, `model`; its adapters alone beside it, `adapter`."""
    model, params = parts.model, lora.whole(state.learner)
    if model.lora is not None:
        peft.save(workdir / "adapter", model, params, base=hf.public_name(parts.config.model.path))
        params = lora.merged(params, model.lora)
    hf.save(workdir / "model", model, params)
    if metrics.writes():
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
        if state.learner.actor is not None and parts.actor_model is not None:
            actor = evaluate.summarise(score(parts.actor_model, state.learner.actor.params))
            scores |= {name.replace("eval/", "eval/actor_"): value for name, value in actor.items()}
    entry = {"step": state.step, "accuracy": scores["eval/accuracy"], "avg_at_k": scores["eval/avg_at_k"]}
    known = state.totals["eval"]
    best = max((known.get("best", entry), entry), key=lambda e: e["accuracy"])
    record = {"first": known.get("first", entry), "last": entry, "best": best}
    return dataclasses.replace(state, totals=state.totals | {"eval": record}), scores
