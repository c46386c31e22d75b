"""The training loop: prompts, counts, rollouts, rewards, kept rows, update, checkpoint and metrics."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import numpy as np

from rljax import batching, budget, evaluate, learner, metrics, rewards, rollout, runs, sharding, tasks
from rljax import prompts as prompts_lib
from rljax import tokenizer as tokenizer_lib
from rljax.algos import cero, down_sampling
from rljax.checkpoint import Checkpointer
from rljax.models import Model, hf
from rljax.options import Config
from rljax.types import Rollouts, RunState

SAMPLES, EVALUATION, SELECTION, CONTROL = range(4)  # streams of random keys, folded from the run's seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, built once."""

    config: Config
    mesh: Any
    model: Model
    tokenizer: tokenizer_lib.Tokenizer
    pool: rewards.RewardPool
    stream: prompts_lib.Stream
    held_out: prompts_lib.PromptSet
    allocator: budget.Uniform | budget.Cero
    step: Any  # learner.make_step's
    reference: Any  # parameters of the KL's reference policy, or None

    def key(self, stream: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.config.seed), stream)


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
        sizes = len(parts.stream.prompts), len(parts.held_out)
        table = runs.describe(config, parts.model, state.learner.params, parts.mesh, *sizes)
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
    load = functools.partial(hf.load, m.path, dtype=m.dtype, mesh=mesh, remat=m.remat)
    model, params = load()
    tokenizer = tokenizer_lib.load(m.path)
    limit = config.rollout.max_prompt_tokens
    train = prompts_lib.encode(task.train, tokenizer, limit, "training")
    updates = runs.total_steps(config) * config.learner.minibatches * config.learner.epochs
    optimizer = learner.make_optimizer(config.learner, updates)
    state = learner.init(params, optimizer)
    settings = learner.Settings(
        model=model,
        loss=config.loss,
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
        tokenizer=tokenizer,
        pool=pool,
        stream=prompts_lib.Stream(train, config.seed),
        held_out=prompts_lib.encode(task.eval, tokenizer, limit, "held-out"),
        allocator=budget.from_config(config, len(train)),
        step=learner.make_step(settings, optimizer, state),
        reference=load()[1] if config.loss.kl_coef > 0 else None,
    )
    totals = {"rollouts": 0, "wall_s": 0.0, "stage_s": {}, "eval": {}}
    return parts, RunState(learner=state, budget=parts.allocator.init(), draws=0, step=0, totals=totals)


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


def train_step(parts: Parts, state: RunState, grants: budget.Grants, stages) -> tuple[RunState, dict]:
    """One step of the loop, from granted prompts to the updated state and the step's metrics."""
    config, prompts = parts.config, grants.prompts
    scorer = rewards.StreamingScorer(parts.pool, parts.tokenizer, prompts)
    with stages("rollout"):
        rollouts = rollout.generate(
            parts.model,
            state.learner.params,
            prompts,
            grants.counts,
            key=parts.key(SAMPLES),
            options=config.rollout,
            stop_ids=parts.tokenizer.stop_ids,
            on_finished=scorer,
        )
    with stages("reward"):
        scores = scorer.result(len(rollouts))
        rewards_R = scores.rewards
        if config.task.shuffle_rewards:
            rng = np.random.default_rng((config.seed, CONTROL, state.step))
            rewards_R = rng.permutation(rewards_R)
        valid_R = np.isfinite(rewards_R)
    with stages("update"):
        keep = select(parts, state.step, rollouts, len(prompts), rewards_R)
        batch = batching.pack(
            prompts,
            rollouts,
            keep.advantages,
            keep.indices,
            keep.kept,
            num_prompts=config.rollout.prompts,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_new_tokens=config.rollout.max_new_tokens,
            mesh=parts.mesh,
        )
        new_learner, sums = parts.step(state.learner, batch, parts.reference)
        line = learner.metrics(jax.device_get(sums))
    with stages("budget"):
        new_budget = parts.allocator.update(grants.state, prompts.ids[rollouts.group], rewards_R, valid_R)
        line |= parts.allocator.metrics(new_budget)
    line |= keep.metrics | rollout_metrics(rollouts, scores, rewards_R, valid_R)
    totals = state.totals | {"rollouts": state.totals["rollouts"] + len(rollouts)}
    line["rollouts/total"] = totals["rollouts"]
    line["cero/spent"] = totals["rollouts"] / config.budget.rollouts
    step = state.step + 1
    return RunState(learner=new_learner, budget=new_budget, draws=grants.draws, step=step, totals=totals), line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Which rows of each prompt to learn from, [P, K], their advantages, and metrics."""

    indices: np.ndarray
    kept: np.ndarray
    advantages: np.ndarray
    metrics: dict


def select(parts: Parts, step: int, rollouts: Rollouts, num_prompts: int, rewards_R: np.ndarray) -> Kept:
    """Down-samples the rewards and computes the advantages of the kept rows."""
    config = parts.config
    n, P = config.rollout.samples, config.rollout.prompts
    rewards_Pn = batching.dense(rollouts, rewards_R, P, n, np.nan)
    out = _select(
        rewards_Pn,
        jax.random.fold_in(parts.key(SELECTION), step),
        keep=config.pods.keep,
        rule=config.pods.rule,
        normalize_over=config.pods.normalize_over,
        **dataclasses.asdict(config.advantage),
    )
    *rows, stats, effective = jax.device_get(out)
    indices, kept, advantages = (x[:num_prompts] for x in rows)
    named = {
        "pods/kept": int(stats["kept_rows"]),
        "pods/variance": float(stats["kept_reward_variance"]),
        "pods/reward_mean": float(stats["kept_reward_mean"]),
        "train/reward_variance": float(stats["reward_variance"]),
        "cero/effective_prompt_ratio": float(effective),
    }
    return Kept(indices=indices, kept=kept, advantages=advantages, metrics=named)


@functools.partial(jax.jit, static_argnames=("keep", "rule", "normalize_over", "baseline", "scale", "eps"))
def _select(rewards_Pn, key, *, keep, rule, normalize_over, baseline, scale, eps):
    indices, kept = down_sampling.down_sample(rewards_Pn, keep, rule=rule, key=key)
    advantages = down_sampling.kept_advantages(
        rewards_Pn, indices, kept, normalize_over=normalize_over, baseline=baseline, scale=scale, eps=eps
    )
    P, n = rewards_Pn.shape
    effective = cero.effective_prompt_ratio(rewards_Pn.reshape(-1), np.repeat(np.arange(P), n), P)
    return indices, kept, advantages, down_sampling.reward_metrics(rewards_Pn, indices, kept), effective


def rollout_metrics(rollouts: Rollouts, scores: rewards.Scores, rewards_R, valid_R) -> dict:
    """Metrics of all rollouts of a step, kept or not."""
    out = {} if scores.first_error is None else {"train/first_error": scores.first_error.strip().splitlines()[-1]}
    return out | {
        "train/reward_mean": float(rewards_R[valid_R].mean()) if valid_R.any() else None,
        "train/unscorable": scores.unscorable,
        "train/grader_errors": scores.errors,
        "train/grader_timeouts": scores.timeouts,
        "rollouts/step": len(rollouts),
        "rollouts/tokens": int(rollouts.lengths.sum()),
        "rollouts/length_mean": float(rollouts.lengths.mean()),
        "rollouts/truncated": float(rollouts.truncated.mean()),
    }


def held_out(parts: Parts, state: RunState, stages) -> tuple[RunState, dict]:
    """Held-out metrics of the policy, recorded in the state's totals as first, last and best."""
    with stages("eval"):
        scores = evaluate.held_out(
            parts.model,
            state.learner.params,
            parts.held_out,
            config=parts.config,
            tokenizer=parts.tokenizer,
            pool=parts.pool,
            key=parts.key(EVALUATION),
        )
    entry = {"step": state.step, "accuracy": scores["eval/accuracy"], "avg_at_k": scores["eval/avg_at_k"]}
    known = state.totals["eval"]
    best = max((known.get("best", entry), entry), key=lambda e: e["accuracy"])
    record = {"first": known.get("first", entry), "last": entry, "best": best}
    return dataclasses.replace(state, totals=state.totals | {"eval": record}), scores
