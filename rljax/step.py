"""One step of the loop: granted prompts → rollouts → rewards → kept rows → update → budget."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rljax import batching, budget, hosts, learner, records, rewards, rollout, sharding
from rljax.algos import advantages, cero, down_sampling
from rljax.models import quantized
from rljax.options import Config
from rljax.parts import ACCEPTANCE, CONTROL, SAMPLES, SELECTION, Parts
from rljax.types import Prompts, Rollouts, RunState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
    """All rollouts of a step, of one round or of several, and what the allocator knows after them.

    rewards: float32[R], NaN where a row could not be scored. lines: metrics of the grading, by name.
    """

    prompts: Prompts
    rollouts: Rollouts
    rewards: np.ndarray
    budget: Any
    draws: int
    rounds: int
    lines: dict


def train_step(parts: Parts, state: RunState, grants: budget.Grants, stages) -> tuple[RunState, dict, records.Trace]:
    """One step of the loop, from granted prompts to the updated state, the step's metrics, and all its rollouts."""
    config = parts.config
    seen = collect(parts, state, grants, stages)
    learned_prompts, rollouts, rewards_R = informative(seen, config)
    with stages("update"):
        keep = select(parts, state.step, rollouts, len(learned_prompts), rewards_R)
        batch = batching.pack(
            learned_prompts,
            rollouts,
            keep.advantages,
            keep.indices,
            keep.kept,
            num_prompts=config.rollout.prompts,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_new_tokens=config.rollout.max_new_tokens,
            mesh=parts.mesh,
            halve=may_halve(config, parts.mesh),
        )
        new_learner, sums = parts.step(state.learner, batch, parts.reference, parts.key(ACCEPTANCE))
        acceptance = sums.pop("acceptance", None)  # stays on the device until it is looked at
        line = learner.metrics(jax.device_get(sums))
    made = max(int(new_learner.updates) - 1, 0)  # updates before the step's last
    line["train/learning_rate"] = float(np.asarray(parts.learning_rate(made)))
    line["train/prompts"] = int(np.count_nonzero(keep.advantages.any(axis=1)))
    line |= parts.allocator.metrics(seen.budget) | keep.metrics | seen.lines | rollout_metrics(seen, config)
    totals = state.totals | {"rollouts": state.totals["rollouts"] + len(seen.rollouts)}
    line["rollouts/total"] = totals["rollouts"]
    line["rollouts/discarded"] = len(seen.rollouts) - len(rollouts)
    line["cero/spent"] = totals["rollouts"] / config.budget.rollouts
    set_size = len(parts.stream.prompts)
    line["rollouts/epoch"] = seen.draws / set_size
    trace = records.Trace(
        prompts=seen.prompts,
        rollouts=seen.rollouts,
        rewards=seen.rewards,
        place=records.places(seen.prompts, seen.rollouts, learned_prompts, keep.indices, keep.kept),
        acceptance=acceptance,
        set_size=set_size,
    )
    step = state.step + 1
    return RunState(learner=new_learner, budget=seen.budget, draws=seen.draws, step=step, totals=totals), line, trace


def may_halve(config: Config, mesh) -> bool:
    """Whether a batch may go without the prompts whose advantages are all 0, as half a batch.

    They must add nothing to any gradient, and what is left must divide over minibatches and devices.
    """
    loss, options = config.loss, config.learner
    others = loss.kl_coef > 0 or loss.entropy_coef > 0 or config.jackpot.rule != "none" or bool(config.actor.path)
    pieces = sharding.size(mesh, "prompts") * options.micro_batches
    return not others and options.minibatches == 1 and config.rollout.prompts % (2 * pieces) == 0


def collect(parts: Parts, state: RunState, grants: budget.Grants, stages) -> Experience:
    """Rollouts and rewards of the granted prompts; the allocator learns from all of them.

    With rollout.max_rounds above 1 (DAPO's dynamic sampling, arXiv 2503.14476), further prompts are drawn until
    rollout.prompts groups have unlike rewards, the rounds are over or the budget is.
    """
    config, rounds = parts.config, []
    with stages("rollout"):
        behaviour = quantized.behaviour_of(parts.model, state.learner, parts.actor_model, config.actor.dtype)
    control = np.random.default_rng((config.seed, CONTROL, state.step))
    while True:
        rollouts, scores = roll(parts, behaviour, grants.prompts, grants.counts, stages)
        rewards_R = scores.rewards
        if config.task.shuffle_rewards:
            rewards_R = control.permutation(rewards_R)
        with stages("budget"):
            ids, valid = grants.prompts.ids[rollouts.group], np.isfinite(rewards_R)
            after = parts.allocator.update(grants.state, ids, rewards_R, valid)
        rounds.append((grants.prompts, rollouts, rewards_R, scores))
        carrying = sum(int(signal(r, values, len(asked)).sum()) for asked, r, values, _ in rounds)
        if len(rounds) == config.rollout.max_rounds or carrying >= config.rollout.prompts:
            break
        with stages("prompts"):
            spent = state.totals["rollouts"] + sum(len(x[1]) for x in rounds)
            more = parts.allocator.draw(parts.stream, grants.draws, spent, after)
        if not len(more.prompts):
            after, grants = more.state, more
            break
        grants = more
    asked, rollouts, rewards_R = batching.concatenate([x[:3] for x in rounds])
    return Experience(
        prompts=asked, rollouts=rollouts, rewards=rewards_R, budget=after, draws=grants.draws, rounds=len(rounds),
        lines=grading_metrics([x[3] for x in rounds]),
    )  # fmt: skip


def roll(parts: Parts, behaviour, asked: Prompts, counts: np.ndarray, stages) -> tuple[Rollouts, rewards.Scores]:
    """counts[P] rollouts of the prompts by behaviour (model, params), and their scores."""
    options = parts.config.rollout
    jackpot = parts.config.jackpot
    scorer = rewards.StreamingScorer(parts.pool, parts.tokenizer, asked, hosts.share())
    with stages("rollout"):
        rollouts = rollout.generate(
            *behaviour,
            asked,
            counts,
            key=parts.key(SAMPLES),
            options=options,
            stop_ids=parts.tokenizer.stop_ids,
            top_logprobs=jackpot.top_k if jackpot.rule == "obrs" and jackpot.table == "sampler" else 0,
            on_finished=scorer,
        )
    with stages("reward"):
        return rollouts, scorer.result(len(rollouts))


def signal(rollouts: Rollouts, rewards_R: np.ndarray, num_prompts: int) -> np.ndarray:
    """bool[P]: prompts whose valid rewards are not all equal. On the host, since R differs from round to round."""
    valid = np.isfinite(rewards_R)
    low, high = np.full(num_prompts, np.inf), np.full(num_prompts, -np.inf)
    np.minimum.at(low, rollouts.group[valid], rewards_R[valid])
    np.maximum.at(high, rollouts.group[valid], rewards_R[valid])
    return high > low


def informative(seen: Experience, config: Config) -> tuple[Prompts, Rollouts, np.ndarray]:
    """What to learn from: all of one round; of several, the first rollout.prompts groups with unlike rewards.

    If none has, the first groups as they are. Rewards of long completions are lowered by
    advantage.overlong_buffer.
    """
    P, buffer = config.rollout.prompts, config.advantage.overlong_buffer
    rewards_R = seen.rewards
    if buffer:
        lengths, limit = seen.rollouts.lengths, config.rollout.max_new_tokens
        room = config.rollout.max_rounds * P * config.rollout.samples - len(lengths)
        padded = np.pad(lengths, (0, max(0, room)))  # one shape, so that it compiles once
        penalty = advantages.overlong_penalty(padded, max_length=limit, buffer=buffer)
        rewards_R = rewards_R + np.asarray(penalty)[: len(lengths)]
    if seen.rounds == 1:
        return seen.prompts, seen.rollouts, rewards_R
    groups = np.flatnonzero(signal(seen.rollouts, seen.rewards, len(seen.prompts)))
    return batching.take(seen.prompts, seen.rollouts, rewards_R, groups[:P] if len(groups) else np.arange(P))


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
        baseline=config.advantage.baseline,
        scale=config.advantage.scale,
        eps=config.advantage.eps,
    )
    *rows, stats = jax.device_get(out)
    indices, kept, advantages_PK = (x[:num_prompts] for x in rows)
    if config.loss.mask_truncated:
        cut_Pn = batching.dense(rollouts, rollouts.truncated, P, n, False)[:num_prompts]
        kept = kept & ~np.take_along_axis(cut_Pn, indices, axis=1)
    named = {
        "pods/kept": int(kept.sum()),
        "pods/variance": float(stats["kept_reward_variance"]),
        "pods/reward_mean": float(stats["kept_reward_mean"]),
        "train/reward_variance": float(stats["reward_variance"]),
    }
    return Kept(indices=indices, kept=kept, advantages=advantages_PK, metrics=named)


@functools.partial(jax.jit, static_argnames=("keep", "rule", "normalize_over", "baseline", "scale", "eps"))
def _select(rewards_Pn, key, *, keep, rule, normalize_over, baseline, scale, eps):
    indices, kept = down_sampling.down_sample(rewards_Pn, keep, rule=rule, key=key)
    advantages_PK = down_sampling.kept_advantages(
        rewards_Pn, indices, kept, normalize_over=normalize_over, baseline=baseline, scale=scale, eps=eps
    )
    return indices, kept, advantages_PK, down_sampling.reward_metrics(rewards_Pn, indices, kept)


def grading_metrics(scores: list[rewards.Scores]) -> dict:
    """Sums over a step's rounds of what went wrong in grading."""
    raised = [s.first_error for s in scores if s.first_error is not None]
    out = {"train/first_error": raised[0].strip().splitlines()[-1]} if raised else {}
    return out | {
        "train/unscorable": sum(s.unscorable for s in scores),
        "train/grader_errors": sum(s.errors for s in scores),
        "train/grader_timeouts": sum(s.timeouts for s in scores),
    }


def rollout_metrics(seen: Experience, config: Config) -> dict:
    """Metrics of all rollouts of a step, kept or not.

    rollouts/entropy: nats a token of the model that makes them, by the mean of -log q over its own samples.
    """
    rollouts, valid = seen.rollouts, np.isfinite(seen.rewards)
    capacity = config.rollout.max_rounds * config.rollout.prompts
    rewards_Pn = batching.dense(rollouts, seen.rewards, capacity, config.rollout.samples, np.nan)
    there = np.arange(rollouts.tokens.shape[1]) < rollouts.lengths[:, None]
    return {
        "train/reward_mean": float(seen.rewards[valid].mean()) if valid.any() else None,
        "cero/effective_prompt_ratio": float(_effective(rewards_Pn)),
        "rollouts/step": len(rollouts),
        "rollouts/rounds": seen.rounds,
        "rollouts/tokens": int(rollouts.lengths.sum()),
        "rollouts/length_mean": float(rollouts.lengths.mean()),
        "rollouts/truncated": float(rollouts.truncated.mean()),
        "rollouts/entropy": -float(rollouts.logprobs[there].mean()),
    }


@jax.jit
def _effective(rewards_Pn):
    P, n = rewards_Pn.shape
    return cero.effective_prompt_ratio(rewards_Pn.reshape(-1), np.repeat(np.arange(P), n), P)
