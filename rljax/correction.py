"""OBRS over a batch: which tokens of another model's rollouts count, and what they weigh (algos/obrs.py).

One pass of both models without gradient, at the parameters before the first update, fixes the candidates V_k, both
models' values on them and the old log-probs (`tables`); every minibatch then has its acceptance, its κ and its
weights from these tables (`weigh`), after the policy's values have been renewed where the target is the new policy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rljax.algos import masked, obrs
from rljax.algos.distillation import scan_chunks
from rljax.models import logprobs
from rljax.options import JackpotOptions
from rljax.types import Array, TrainBatch, pytree

Decoder = tuple[Any, Any]  # a model and its parameters


@pytree
class Weighed:
    """accept: bool[..., T], tokens that count. weights: float32[..., T]. Of a minibatch's rows [..., K, T]."""

    accept: Array
    weights: Array


def tables(
    policy: Decoder, behaviour: Decoder, batch: TrainBatch, lam, options: JackpotOptions, temperature, chunk: int
) -> obrs.States:
    """obrs.States of every token [P, K, T] of a batch.

    policy, behaviour: of the target and of the actor. With options.table = "sampler" the
    candidates are the actor's top k that the sampler recorded, the actor is not run, and what needs the whole
    vocabulary (Z, KL) is None.
    """
    hidden = _flat(logprobs.completion_hidden(*policy, batch))
    ids = batch.tokens.reshape(-1)
    if options.table == "sampler":
        top, top_logprobs = _flat(batch.top_ids), _flat(batch.top_logprobs)
        target, on = _values(policy, hidden, ids, top, temperature, chunk)
        found = obrs.States(
            ids=top, mask=jnp.ones(top.shape, bool), target_on=on, actor_on=top_logprobs, target_logprobs=target,
            actor_logprobs=jnp.reshape(batch.sampler_logprobs, -1), z=None, kl_before=None, kl_after=None,
        )  # fmt: skip
    else:
        proposal = _flat(logprobs.completion_hidden(*behaviour, batch))

        def states(part):
            target_hidden, actor_hidden, tokens = part
            target = _logits(policy, target_hidden, temperature)
            return obrs.states(target, _logits(behaviour, actor_hidden, temperature), tokens, lam, k=options.top_k)

        found = scan_chunks(states, (hidden, proposal, ids), chunk=chunk)
    shape = batch.tokens.shape
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)


def renewed(policy: Decoder, batch: TrainBatch, states: obrs.States, temperature, chunk: int) -> obrs.States:
    """The states with the target's values of these parameters; what the pass before knew exactly is dropped."""
    hidden = _flat(logprobs.completion_hidden(*policy, batch))
    target, on = _values(policy, hidden, batch.tokens.reshape(-1), _flat(states.ids), temperature, chunk)
    return dataclasses.replace(
        states,
        target_logprobs=target.reshape(batch.tokens.shape),
        target_on=on.reshape(states.ids.shape),
        z=None,
        kl_before=None,
        kl_after=None,
    )


def acceptance(batch: TrainBatch, states: obrs.States, lam):
    """min(1, p / (λ q)) of each sampled token, float32 of the tokens' shape; 0 past the lengths."""
    log_a = states.target_logprobs - batch.sampler_logprobs - jnp.log(lam)
    known = (jnp.arange(batch.tokens.shape[-1]) < batch.lengths[..., None]) & ~jnp.isnan(log_a)
    return jnp.where(known, jnp.exp(jnp.minimum(log_a, 0.0)), 0.0)


def weigh(batch: TrainBatch, mask, states: obrs.States, old, lam, key, options: JackpotOptions):
    """(Weighed, sums for obrs.summarise, κ) of one minibatch; batch, mask, states, old lead with [micro, P, K].

    old: log-probs of the old policy where the target is the new one, else None. κ is of this minibatch.
    """
    rows, T = batch.samples.size, mask.shape[-1]
    draws = jnp.broadcast_to(batch.draws[..., None], batch.samples.shape).reshape(rows)
    uniforms = obrs.token_uniforms(key, draws, batch.samples.reshape(rows), T).reshape(mask.shape)
    target, actor = states.target_logprobs, batch.sampler_logprobs
    accept = obrs.acceptance_mask(uniforms, target, actor, lam, mask)
    if options.normaliser == "exact":
        kappa, z = jnp.ones(()), states.z
    else:
        part = obrs.normaliser(jnp.exp(states.target_on), jnp.exp(states.actor_on), lam, mask=states.mask)
        kappa = obrs.kappa(masked.masked_count(accept), masked.masked_sum(part, mask))
        z = kappa * part
    how = {"z": z, "old_logprobs": old, "normalise": options.normalise, "c1": options.c1, "c2": options.c2}
    weights = obrs.jackpot_weights(target, actor, lam, **how)
    sums = obrs.weight_sums(target, actor, lam, accept, mask, **how)
    if states.z is not None and states.kl_before is not None and states.kl_after is not None:
        sums |= obrs.state_sums(states.z, states.kl_before, states.kl_after, mask)
    return Weighed(accept=accept, weights=weights), sums, kappa


def budget_lambda(target_logprobs, actor_logprobs, mask, budget):
    """λ at which the mean acceptance of the sampled tokens is the budget (algos/obrs.py)."""
    ratio = masked.bounded_exp(masked.fill(target_logprobs - actor_logprobs, mask)).reshape(-1, 1)
    return obrs.lambda_for_budget(ratio, jnp.ones_like(ratio), budget, mask=mask.reshape(-1))


def _logits(decoder: Decoder, hidden, temperature):
    """float32[N, V] of hidden states [N, E]."""
    model, params = decoder
    return logprobs.scale(model.unembed(params, hidden), temperature)


def _values(policy: Decoder, hidden, tokens, ids, temperature, chunk):
    """(log-probs of the tokens [N], log-probs on the candidates [N, C]) of hidden states [N, E]."""

    def one(part):
        h, token, at = part
        scaled = _logits(policy, h, temperature)
        log_p = scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(log_p, token[:, None], axis=-1)[:, 0]
        return chosen, jnp.take_along_axis(log_p, at, axis=-1)

    return jax.lax.stop_gradient(scan_chunks(one, (hidden, tokens, ids), chunk=chunk))


def _flat(x) -> jax.Array:
    """[P, K, T, ...] → [P K T, ...]."""
    return jnp.reshape(x, (math.prod(x.shape[:3]), *x.shape[3:]))
