"""The training loop: prompts, counts, rollouts, rewards, kept rows, update, checkpoint and metrics."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from rljax import budget, evaluate, learner, metrics, rewards, runs, sharding, tasks
from rljax import prompts as prompts_lib
from rljax import tokenizer as tokenizer_lib
from rljax.checkpoint import Checkpointer
from rljax.models import hf
from rljax.objectives import Settings
from rljax.options import Config
from rljax.step import EVALUATION, Parts, train_step
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
        metrics.Console() as console,
    ):
        parts, state = build(config, task, pool)
        latest = checkpoints.latest_step()
        if latest is not None:
            state = checkpoints.restore(state)
        stages = metrics.Stages(state.totals["stage_s"])
        grants = draw(parts, state, stages)
        sets = parts.stream.prompts, parts.held_out
        table = runs.describe(config, parts.model, state.learner.params, parts.mesh, *sets)
        if latest is not None:
            table.append(runs.resumed(config, state, over=grants is None))
        console.start(f"rljax {config.name}", table, progress(config, state))
        with metrics.MetricsWriter(workdir, latest) as writer:
            if latest is None:
                state, line = held_out(parts, state, stages)
                console.evaluation(0, line)
                state, line = timed(state, line, stages)
                writer.write(0, line)
            while grants:
                state, line = train_step(parts, state, grants, stages)
                runs.check_finite(line, state.step)
                grants = draw(parts, state, stages)
                last = grants is None
                if last or (config.eval.every and state.step % config.eval.every == 0):
                    state, scores = held_out(parts, state, stages)
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
        hf.save(workdir / "model", parts.model, state.learner.params)
        parts.tokenizer.save(workdir / "model")
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


def build(config: Config, task: tasks.Task, pool: rewards.RewardPool) -> tuple[Parts, RunState]:
    """The parts of a run, and its state before the first step."""
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    check_division(config, mesh)
    m = config.model
    load = functools.partial(hf.load, dtype=m.dtype, mesh=mesh, remat=m.remat)
    model, params = load(m.path)
    check_sizes(config, model)
    tokenizer = tokenizer_lib.load(m.path).stopping_at(task.stop)
    limit = config.rollout.max_prompt_tokens
    train = prompts_lib.encode(task.train, tokenizer, limit, "training")
    updates = runs.total_steps(config) * config.learner.minibatches * config.learner.epochs
    optimizer, actor_model, actor, actor_optimizer = learner.make_optimizer(config.learner, updates), None, None, None
    if config.actor.path:
        actor_model, actor_params = load(config.actor.path)
        check_vocabulary(config, model.config, actor_model.config, tokenizer)
        options = dataclasses.replace(config.learner, learning_rate=config.actor.learning_rate)
        actor_optimizer = learner.make_optimizer(options, updates)
        actor = learner.init(actor_params, actor_optimizer)
    state = learner.init(params, optimizer, actor)
    settings = Settings(
        model=model,
        loss=config.loss,
        jackpot=config.jackpot,
        actor=config.actor,
        actor_model=actor_model,
        temperature=config.rollout.temperature,
        token_chunk=m.token_chunk,
        max_length=config.rollout.max_new_tokens,
        micro_batches=config.learner.micro_batches,
        minibatches=config.learner.minibatches,
        epochs=config.learner.epochs,
    )
    parts = Parts(
        config=config,
        mesh=mesh,
        model=model,
        actor_model=actor_model,
        tokenizer=tokenizer,
        pool=pool,
        stream=prompts_lib.Stream(train, config.seed),
        held_out=prompts_lib.encode(task.eval, tokenizer, limit, "held-out"),
        allocator=budget.from_config(config, len(train)),
        step=learner.make_step(settings, optimizer, state, actor_optimizer),
        reference=load(m.path)[1] if config.loss.kl_coef > 0 else None,
    )
    totals = {"rollouts": 0, "wall_s": 0.0, "stage_s": {}, "eval": {}}
    return parts, RunState(learner=state, budget=parts.allocator.init(), draws=0, step=0, totals=totals)


def check_vocabulary(config: Config, policy, actor, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raises ValueError where the actor's tokens are not the policy's."""
    if policy.vocab_size != actor.vocab_size:
        raise ValueError(
            f"actor.path = {config.actor.path!r} has a vocabulary of {actor.vocab_size} tokens, model.path ="
            f" {config.model.path!r} one of {policy.vocab_size}; choose an actor with the policy's tokenizer"
        )
    if tokenizer_lib.load(config.actor.path).inner.get_vocab() != tokenizer.inner.get_vocab():
        raise ValueError(
            f"actor.path = {config.actor.path!r} and model.path = {config.model.path!r} have tokenizers of unlike"
            " vocabularies; choose an actor with the policy's tokenizer"
        )


def check_sizes(config: Config, model) -> None:
    """Raises ValueError where the config asks for more than the model has: positions, or tokens of a table."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > model.config.max_positions:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}, but {config.model.path} has"
            f" {model.config.max_positions} positions; lower them"
        )
    if config.jackpot.rule != "none" and config.jackpot.top_k > model.config.vocab_size:
        raise ValueError(
            f"jackpot.top_k = {config.jackpot.top_k} is more than the vocabulary of {config.model.path},"
            f" {model.config.vocab_size} tokens; lower it"
        )


def check_division(config: Config, mesh) -> None:
    """Raises ValueError where prompts, lanes or micro-batches do not divide over the devices of prompts."""
    shards = sharding.size(mesh, "prompts")
    per_update = config.rollout.prompts // (config.learner.minibatches * config.learner.micro_batches)
    sizes = {
        "rollout.lanes": config.rollout.lanes,
        "rollout.prompts / (learner.minibatches × learner.micro_batches)": per_update,
    }
    for name, size in sizes.items():
        if size % shards:
            raise ValueError(
                f"{name} = {size} does not divide over the {shards} devices that split prompts "
                f"(mesh.data × mesh.fsdp); make it a multiple of {shards}, or change the mesh"
            )


def held_out(parts: Parts, state: RunState, stages) -> tuple[RunState, dict]:
    """Held-out metrics of the policy, recorded in the state's totals as first, last and best; of the actor beside."""
    evaluated = functools.partial(
        evaluate.held_out,
        prompts=parts.held_out,
        config=parts.config,
        tokenizer=parts.tokenizer,
        pool=parts.pool,
        key=parts.key(EVALUATION),
    )
    with stages("eval"):
        scores = evaluated(parts.model, state.learner.params)
        if state.learner.actor is not None:
            actor = evaluated(parts.actor_model, state.learner.actor.params)
            scores |= {name.replace("eval/", "eval/actor_"): value for name, value in actor.items()}
    entry = {"step": state.step, "accuracy": scores["eval/accuracy"], "avg_at_k": scores["eval/avg_at_k"]}
    known = state.totals["eval"]
    best = max((known.get("best", entry), entry), key=lambda e: e["accuracy"])
    record = {"first": known.get("first", entry), "last": entry, "best": best}
    return dataclasses.replace(state, totals=state.totals | {"eval": record}), scores
