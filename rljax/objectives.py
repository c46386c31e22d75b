"""What is differentiated: the policy's loss, and the actor's where another model makes the rollouts.

Both take a micro-batch [P, K, T] and the denominators of its whole minibatch, so that micro-batches add up.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rljax.algos import distillation, kl, losses, masked
from rljax.correction import Weighed
from rljax.models import Model, logprobs
from rljax.options import ActorOptions, JackpotOptions, LossOptions
from rljax.types import Array, TrainBatch, pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The static half of a step: what is compiled in.

    max_length: tokens, of aggregate="constant". temperature: that the sampler used. micro_batches, minibatches
    and epochs as in configs/default.py. actor_model: of the rollouts, where it is not the policy's own model.
    stale: the rollouts are of older weights than the step begins with, so that the actor too learns from another's.
    """

    model: Model
    loss: LossOptions
    jackpot: JackpotOptions
    actor: ActorOptions
    actor_model: Model | None
    temperature: float
    token_chunk: int
    max_length: int
    micro_batches: int
    minibatches: int
    epochs: int
    stale: bool = False


@pytree
class Prior:
    """Log-probs float32[..., K, T] from before the first update; None where the step has no need of them.

    old: the policy's. ref: the KL reference's. actor: the actor's.
    """

    old: Array | None
    ref: Array | None
    actor: Array | None


def completion_mask(batch: TrainBatch, lengths: Array | None = None):
    """bool[…, K, T]: real completion tokens, from the recorded lengths, or from others of the batch."""
    return jnp.arange(batch.tokens.shape[-1]) < (batch.lengths if lengths is None else lengths)[..., None]


def policy_loss(params, batch: TrainBatch, prior: Prior, weighed: Weighed | None, denominator, settings: Settings):
    """(loss, (sums, hidden)): its share of the minibatch's loss, metrics, and the hidden states [P, K, T, E].

    weighed: OBRS's acceptance and weights; None takes the importance weights that loss.correction names.
    """
    options, mask = settings.loss, completion_mask(batch)
    hidden = logprobs.completion_hidden(settings.model, params, batch)
    new, entropy = logprobs.chunked_values(
        functools.partial(settings.model.unembed, params),
        hidden,
        batch.tokens,
        settings.temperature,
        settings.token_chunk,
        options.entropy_coef > 0,
    )
    old = jax.lax.stop_gradient(new) if prior.old is None else prior.old
    weights, importance = losses.importance_weights(
        old,
        batch.sampler_logprobs,
        mask,
        level=options.correction_level,
        mode=options.correction,
        low=options.correction_low,
        high=options.correction_high,
    )
    accept = None
    if weighed is not None:
        accept, weights = weighed.accept, weighed.weights
    over = {"aggregate": options.aggregate, "denominator": denominator, "max_length": settings.max_length}
    shared = over | {"weights": weights, "accept": accept}
    loss, sums = losses.policy_loss(new, old, batch.advantages, mask, **_surrogate(options), **shared)
    sums |= importance
    gap = masked.fill(jnp.abs(jax.lax.stop_gradient(old) - batch.sampler_logprobs), mask)
    sums["logprob_gap_sum"] = jnp.sum(gap)
    sums["sampler_nll_sum"] = -jnp.sum(masked.fill(batch.sampler_logprobs, mask))
    if prior.ref is not None:
        penalty, kl_sums = kl.kl_loss(new, prior.ref, mask, kind=options.kl_kind, **shared)
        loss += options.kl_coef * penalty
        sums |= kl_sums
    if options.entropy_coef > 0:
        loss -= options.entropy_coef * losses.aggregate_loss(entropy, mask, accept=accept, **over)
        sums["entropy_sum"] = masked.masked_sum(jax.lax.stop_gradient(entropy), losses.counted_tokens(mask, accept))
    return loss, (sums | {"total_loss": jax.lax.stop_gradient(loss)}, jax.lax.stop_gradient(hidden))


def actor_loss(params, batch: TrainBatch, prior: Prior, policy_params, policy_hidden, denominators, settings: Settings):
    """(loss, sums) of the actor: GRPO on its own rollouts, and KL to the policy, which is a constant here.

    policy_hidden: [P, K, T, E] of these tokens, by policy_params. denominators: (of the loss, tokens of the
    minibatch).
    """
    options, actor, model, mask = settings.loss, settings.actor, settings.actor_model, completion_mask(batch)
    assert model is not None  # state.actor is there
    hidden = logprobs.completion_hidden(model, params, batch)
    unembed = functools.partial(model.unembed, params)
    new, _ = logprobs.chunked_values(unembed, hidden, batch.tokens, settings.temperature, settings.token_chunk)
    old = jax.lax.stop_gradient(new) if prior.actor is None else prior.actor
    weights = None
    if settings.stale:  # OBRS corrects the policy alone: this is TIS then
        mode = "truncate" if options.correction == "none" else options.correction
        how = {"level": options.correction_level, "low": options.correction_low, "high": options.correction_high}
        weights, _ = losses.importance_weights(old, batch.sampler_logprobs, mask, mode=mode, **how)
    loss, sums = losses.policy_loss(
        new, old, batch.advantages, mask, **_surrogate(options), weights=weights,
        aggregate=options.aggregate, denominator=denominators[0], max_length=settings.max_length,
    )  # fmt: skip
    loss *= actor.loss_coef
    gap = masked.fill(jnp.abs(jax.lax.stop_gradient(old) - batch.sampler_logprobs), mask)
    named = {name: sums[name] for name in ("tokens", "clipped_tokens", "ratio_max")} | {"logprob_gap_sum": jnp.sum(gap)}
    if actor.distill_coef > 0:
        divergence = distillation.token_kl(
            lambda h: logprobs.scale(unembed(h), settings.temperature),
            lambda h: logprobs.scale(settings.model.unembed(policy_params, h), settings.temperature),
            hidden.reshape(-1, hidden.shape[-1]),
            policy_hidden.reshape(-1, policy_hidden.shape[-1]),
            mask.reshape(-1),
            direction=actor.distill_direction,
            chunk=settings.token_chunk,
        )
        total = jnp.sum(divergence)
        loss += actor.distill_coef * masked.safe_divide(total, denominators[1])
        named["distill_sum"] = jax.lax.stop_gradient(total)
    named["total_loss"] = jax.lax.stop_gradient(loss)
    return loss, {f"actor_{name}": value for name, value in named.items()}


def _surrogate(options: LossOptions) -> dict:
    names = ("clip_low", "clip_high", "ratio", "objective", "dual_clip")
    return {name: getattr(options, name) for name in names}
