"""Held-out accuracy: greedy, and avg@k and pass@k at a temperature, in one pass over the prompts."""

from __future__ import annotations

import collections

import jax
import numpy as np

from rljax import rewards, rollout, sharding
from rljax.models import Model
from rljax.options import Config
from rljax.prompts import PromptSet
from rljax.rewards import RewardPool
from rljax.tokenizer import Tokenizer


def held_out(
    model: Model,
    params,
    prompts: PromptSet,
    *,
    config: Config,
    tokenizer: Tokenizer,
    pool: RewardPool,
    key: jax.Array,
) -> dict[str, float]:
    """Metrics of one greedy completion and eval.samples sampled ones of each prompt.

    eval/accuracy: greedy. eval/avg_at_k: mean over samples. eval/pass_at_k: prompts with a right sample among
    k. eval/truncated: share of sampled completions cut by the limit. eval/unscorable: completions, of both
    kinds, that could not be scored; they count as wrong. eval/accuracy_KIND: greedy, by the example's "kind".
    The same key draws the same samples, so evaluations of one run are paired.
    """
    k = config.eval.samples
    shards = sharding.size(sharding.mesh_of(params), "prompts")
    rows = config.rollout.lanes * config.rollout.slots
    lanes = min(-(-len(prompts) // shards), max(1, rows // (k + 1) // shards)) * shards
    drawn = prompts.all()
    scorer = rewards.StreamingScorer(pool, tokenizer, drawn)
    rollouts = rollout.generate(
        model,
        params,
        drawn,
        np.full(len(prompts), k + 1),
        key=key,
        options=config.rollout,
        stop_ids=tokenizer.stop_ids,
        temperature=[0.0, config.eval.temperature],
        lanes=lanes,
        slots=k + 1,
        on_finished=scorer,
    )
    scores = scorer.result(len(rollouts))
    score = np.nan_to_num(scores.rewards).reshape(len(prompts), k + 1)
    truncated = rollouts.truncated.reshape(len(prompts), k + 1)
    greedy, sampled = score[:, 0], score[:, 1:]
    out = {
        "eval/accuracy": float(greedy.mean()),
        "eval/avg_at_k": float(sampled.mean()),
        "eval/pass_at_k": float((sampled > 0.5).any(axis=1).mean()),
        "eval/truncated": float(truncated[:, 1:].mean()),
        "eval/unscorable": scores.unscorable,
    }
    kinds = collections.defaultdict(list)
    for i, example in enumerate(prompts.examples):
        if "kind" in example:
            kinds[example["kind"]].append(i)
    return out | {f"eval/accuracy_{kind}": float(greedy[ids].mean()) for kind, ids in sorted(kinds.items())}
