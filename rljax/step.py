"""One step: granted prompts → rollouts → rewards → budget (`collect`), and kept rows → update (`train_step`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rljax import batching, budget, hosts, learner, records, rewards, rollout, sharding
from rljax.algos import advantages, down_sampling
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


def train_step(parts: Parts, state: RunState, seen: Experience, stages) -> tuple[RunState, dict, records.Trace]:
    """Learns from a step's experience: the state after it, the step's metrics, and all its rollouts."""
    config = parts.config
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
        key = sharding.everywhere(parts.mesh, parts.key(ACCEPTANCE))
        new_learner, sums = parts.step(state.learner, batch, parts.reference, key)
        acceptance = sums.pop("acceptance", None)  # stays on the device until it is looked at
        sums, updates = jax.device_get((sums, new_learner.updates))
        line = learner.metrics(sums)
    made = np.int32(max(updates - 1, 0))  # updates before the step's last
    line["train/learning_rate"] = float(jax.device_get(parts.learning_rate(jax.device_put(made))))
    line["train/prompts"] = int(np.count_nonzero(keep.advantages.any(axis=1)))
    line |= parts.allocator.metrics(seen.budget) | keep.metrics | seen.lines | rollout_metrics(seen)
    after = counted(state, seen)
    line["rollouts/total"] = after.totals["rollouts"]
    line["rollouts/staleness"] = min(config.rollout.staleness, state.step)  # in steps; the first weights make two
    line["rollouts/discarded"] = len(seen.rollouts) - len(rollouts)
    line["cero/spent"] = after.totals["rollouts"] / config.budget.rollouts
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
    return dataclasses.replace(after, learner=new_learner), line, trace


def counted(state: RunState, seen: Experience) -> RunState:
    """The state with a step's rollouts made and counted, and nothing learned from them."""
    totals = state.totals | {"rollouts": state.totals["rollouts"] + len(seen.rollouts)}
    return dataclasses.replace(state, budget=seen.budget, draws=seen.draws, step=state.step + 1, totals=totals)


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

    They are made by state.behaviour where the state has it, else by the learner's weights.
    With rollout.max_rounds above 1 (DAPO's dynamic sampling, arXiv 2503.14476), further prompts are drawn until
    rollout.prompts groups have unlike rewards, the rounds are over or the budget is.
    """
    config, rounds = parts.config, []
    with stages("rollout"):
        weights = parts.handover.weights(state.learner) if state.behaviour is None else state.behaviour
        behaviour = parts.handover.behaviour(weights)
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


def roll(
    parts: Parts, behaviour: tuple[Any, Any], asked: Prompts, counts: np.ndarray, stages
) -> tuple[Rollouts, rewards.Scores]:
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
        penalty = _overlong_penalty(jax.device_put(padded), max_length=limit, buffer=buffer)
        rewards_R = rewards_R + jax.device_get(penalty)[: len(lengths)]
    if seen.rounds == 1:
        return seen.prompts, seen.rollouts, rewards_R
    groups = np.flatnonzero(signal(seen.rollouts, seen.rewards, len(seen.prompts)))
    return batching.take(seen.prompts, seen.rollouts, rewards_R, groups[:P] if len(groups) else np.arange(P))


_overlong_penalty = jax.jit(advantages.overlong_penalty, static_argnames=("max_length", "buffer"))


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
    rewards, number = jax.device_put((rewards_Pn, np.uint32(step)))
    out = _select(
        rewards,
        number,
        parts.key(SELECTION),
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
def _select(rewards_Pn, step, key, *, keep, rule, normalize_over, baseline, scale, eps):
    indices, kept = down_sampling.down_sample(rewards_Pn, keep, rule=rule, key=jax.random.fold_in(key, step))
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


def rollout_metrics(seen: Experience) -> dict:
    """Metrics of all rollouts of a step, kept or not.

    cero/effective_prompt_ratio: cero.effective_prompt_ratio, of what is on the host.
    rollouts/entropy: nats a token of the model that makes them, by the mean of -log q over its own samples.
    """
    rollouts, valid = seen.rollouts, np.isfinite(seen.rewards)
    scored, mixed = np.unique(rollouts.group[valid]), signal(rollouts, seen.rewards, len(seen.prompts))
    there = np.arange(rollouts.tokens.shape[1]) < rollouts.lengths[:, None]
    return {
        "train/reward_mean": float(seen.rewards[valid].mean()) if valid.any() else None,
        "cero/effective_prompt_ratio": float(mixed.sum() / max(len(scored), 1)),
        "rollouts/step": len(rollouts),
        "rollouts/rounds": seen.rounds,
        "rollouts/tokens": int(rollouts.lengths.sum()),
        "rollouts/length_mean": float(rollouts.lengths.mean()),
        "rollouts/truncated": float(rollouts.truncated.mean()),
        "rollouts/entropy": -float(rollouts.logprobs[there].mean()),
    }
