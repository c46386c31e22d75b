"""The policy loss of GRPO and its relatives, its aggregation over tokens, and off-policy importance weights.

One function, several named methods:

    GRPO      ratio="token"     objective="ppo"    aggregate="sequence"   clip_low = clip_high
    Dr. GRPO  ratio="token"     objective="ppo"    aggregate="constant"   (advantages with scale="none")
    DAPO      ratio="token"     objective="ppo"    aggregate="token"      clip_high > clip_low
    GSPO      ratio="sequence"  objective="ppo"    aggregate="sequence"   clips of some 1e-4
    CISPO     ratio="token"     objective="cispo"  aggregate="token"

Their metrics are sums over the tokens that count, float32 scalars without gradient, so that micro-batches add
up (``masked.merge_sums``); divide by `tokens` at the end:

    loss_sum              the scalar × denominator
    tokens, sequences     that count; sequences: those with such a token
    weight_sum
    clipped_tokens        ppo: the clip on the advantage's side binds (gradient 0); cispo: the weight is cut
    dual_clipped_tokens   held at dual_clip · A
    ratio_sum, ratio_max  of ρ before clipping
    log_ratio_sum, log_ratio_abs_sum    of log π - log π_old of each token, in nats
    bounded_tokens        |log ρ| > 20
    degenerate_tokens     of probability 0 under either model

Left out: GSPO-token (advantages that differ within a sequence), and DAPO's dynamic sampling and overlong
filtering, which choose rows, not losses (``GroupStatistics.signal``, and a mask without the truncated rows).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from rljax.algos.masked import (
    MAX_LOG_RATIO,
    as_float,
    bounded_exp,
    check_same_shape,
    choose,
    fill,
    masked_count,
    masked_max,
    masked_mean,
    masked_sum,
    safe_divide,
)


def counted_tokens(mask: ArrayLike, accept: ArrayLike | None = None) -> jax.Array:
    """bool[..., T]: the tokens that count, mask and accept."""
    check_same_shape(mask=mask, accept=accept)
    mask = jnp.asarray(mask, bool)
    return mask if accept is None else mask & jnp.asarray(accept, bool)


def row_values(weights: ArrayLike | None, like: jax.Array, counts: jax.Array) -> jax.Array:
    """Values of rows [...] or of tokens [..., T] as float32[..., T], 0 where not counted, without gradient.

    weights: None is 1. like: float[..., T]. counts: bool[..., T]. Raises ValueError for other shapes.
    """
    if weights is None:
        return fill(jnp.ones_like(like), counts)
    weights = lax.stop_gradient(as_float(weights))
    if weights.shape == like.shape[:-1]:
        weights = weights[..., None]
    elif weights.shape != like.shape:
        raise ValueError(f"advantages and weights must be {like.shape[:-1]} or {like.shape}, got {weights.shape}")
    return fill(weights, counts)


def _sum_of_tokens(losses, counts):
    return jnp.sum(losses)


def _sum_of_sequence_means(losses, counts):
    return jnp.sum(safe_divide(jnp.sum(losses, axis=-1), masked_count(counts, axis=-1)))


def _count_tokens(mask, counts, max_length):
    return masked_count(counts)


def _count_sequences(mask, counts, max_length):
    return masked_count(jnp.any(counts, axis=-1))


def _count_places(mask, counts, max_length):
    if max_length is None or max_length < 1:
        raise ValueError(
            f"aggregate='constant' needs max_length ≥ 1, the configured limit of new tokens, got {max_length}"
        )
    return masked_count(jnp.any(mask, axis=-1)) * max_length


# name: (the sum over a micro-batch, the denominator of the whole minibatch)
AGGREGATES = {
    "token": (_sum_of_tokens, _count_tokens),
    "sequence": (_sum_of_sequence_means, _count_sequences),
    "constant": (_sum_of_tokens, _count_places),
}


def loss_denominator(
    mask: ArrayLike, accept: ArrayLike | None = None, *, aggregate: str, max_length: int | None = None
) -> jax.Array:
    """What the summed loss of a minibatch is divided by; compute it once over the GLOBAL minibatch.

    "token": tokens that count (mask and accept). "sequence": sequences with such a token. "constant":
    sequences with any valid token, accepted or not, times max_length; padding rows are no sequences.
    mask, accept: bool[..., T]. max_length: tokens, static, from the configuration (never the width T of a
    bucket); used by "constant" only. Returns a float32 scalar; denominators of parts add up to that of the
    whole. Raises ValueError for an unknown aggregate, unlike shapes, "constant" without max_length.
    """
    _, count = choose(AGGREGATES, aggregate, "aggregate")
    return count(jnp.asarray(mask, bool), counted_tokens(mask, accept), max_length)


def aggregate_loss(
    token_losses: ArrayLike,
    mask: ArrayLike,
    *,
    aggregate: str,
    accept: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    denominator: ArrayLike | None = None,
    max_length: int | None = None,
) -> jax.Array:
    """Σ w · loss / denominator over the tokens that count: the one way from losses of tokens to a scalar.

    "token" and "constant" sum over tokens; "sequence" sums the means of the sequences, each over its own
    counted tokens. Weights multiply the losses and enter no denominator.
    token_losses: float[..., T], anything where not counted. mask, accept: bool[..., T].
    weights: float[..., T] or [...], no gradient. denominator: scalar, ``loss_denominator`` of the global
    minibatch, so that the scalars and gradients of micro-batches add up to those of the minibatch; None takes
    that of the given arrays. Returns a float32 scalar; 0 with gradient 0 if nothing counts.
    Raises ValueError for an unknown aggregate, unlike shapes, "constant" without max_length and denominator.
    """
    summed, _ = choose(AGGREGATES, aggregate, "aggregate")
    check_same_shape(token_losses=token_losses, mask=mask, accept=accept)
    counts = counted_tokens(mask, accept)
    if denominator is None:
        denominator = loss_denominator(mask, accept, aggregate=aggregate, max_length=max_length)
    losses = fill(token_losses, counts)
    losses = row_values(weights, losses, counts) * losses
    return safe_divide(summed(losses, counts), lax.stop_gradient(as_float(denominator)))


def _token_log_ratio(log_ratio, mask):
    return log_ratio


def _sequence_log_ratio(log_ratio, mask):
    """Mean over all valid tokens, also rejected ones: the geometric mean of the ratios, GSPO equation 7."""
    return jnp.broadcast_to(masked_mean(log_ratio, mask, axis=-1)[..., None], log_ratio.shape)


RATIOS = {"token": _token_log_ratio, "sequence": _sequence_log_ratio}


def _ppo(ratio, logprobs, A, clip_low, clip_high, dual_clip):
    """(objective, tokens clipped, tokens at dual_clip): min(ρA, clip(ρ)A), where A < 0 at least dual_clip·A.

    Selecting the side, instead of jnp.minimum, keeps the whole gradient at ties and an exact 0 where clipped.
    """
    clipped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))
    objective = jnp.where(clipped, jnp.clip(ratio, 1 - clip_low, 1 + clip_high), ratio) * A
    if dual_clip is None:
        return objective, clipped, jnp.zeros_like(clipped)
    bounded = (A < 0) & (ratio > dual_clip)
    return jnp.where(bounded, dual_clip * A, objective), clipped, bounded


def _cispo(ratio, logprobs, A, clip_low, clip_high, dual_clip):
    """SG(clip(ρ)) A log π: clipping bounds a token's weight, and no token loses its gradient."""
    if dual_clip is not None:
        raise ValueError(f"dual_clip belongs to objective='ppo' (cispo bounds every ratio), got {dual_clip}")
    weight = lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    clipped = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    return weight * A * logprobs, clipped, jnp.zeros_like(clipped)


OBJECTIVES = {"ppo": _ppo, "cispo": _cispo}


def _check_clips(clip_low, clip_high, dual_clip):
    for key, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{key} must be ≥ 0, got {value}")
    if isinstance(dual_clip, (int, float)) and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1 (or None for off), got {dual_clip}")


def policy_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float,
    clip_high: float,
    ratio: str = "token",
    objective: str = "ppo",
    aggregate: str = "token",
    denominator: ArrayLike | None = None,
    max_length: int | None = None,
    weights: ArrayLike | None = None,
    accept: ArrayLike | None = None,
    dual_clip: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-Σ w J / denominator over the tokens that count, with ρ = π/π_old; returns (loss, sums of the metrics).

    ratio "token": ρ_t = exp(log π_t - log π_old,t); "sequence" (GSPO): one ρ a sequence, exp of the mean log
    ratio over its valid tokens. objective "ppo": J = min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A), and
    where A < 0 at least dual_clip · A; "cispo": J = SG(clip(ρ)) A log π. aggregate, denominator, weights:
    ``aggregate_loss``.

    logprobs, old_logprobs: float[..., T] nats; old is taken before the first update of the batch and gets no
    gradient (passing logprobs twice is an on-policy update). advantages: float[...] (one a row) or [..., T].
    mask, accept: bool[..., T]; tokens count where both hold. max_length: tokens, for aggregate "constant".
    Log ratios are held in ±20, outside with gradient 0. Tokens of probability 0 under either model weigh 0.
    Returns a float32 scalar and a dict, its names in the module docstring.
    Raises ValueError for unknown names, unlike shapes, clips < 0, dual_clip ≤ 1 or with cispo, "constant"
    without max_length and denominator.
    Sources: arXiv 2402.03300, 2503.20783, 2503.14476, 2507.18071, 2506.13585; dual clip: 1912.09729 eq. 5.
    """
    combine, surrogate = choose(RATIOS, ratio, "ratio"), choose(OBJECTIVES, objective, "objective")
    _check_clips(clip_low, clip_high, dual_clip)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask, accept=accept)
    if denominator is None:
        denominator = loss_denominator(mask, accept, aggregate=aggregate, max_length=max_length)
    counts = counted_tokens(mask, accept)
    new, old = as_float(logprobs), lax.stop_gradient(as_float(old_logprobs))
    usable = jnp.asarray(mask, bool) & ~(jnp.isneginf(new) | jnp.isneginf(old))
    new, old = fill(new, usable), fill(old, usable)
    log_rho = fill(combine(new - old, usable), counts)  # a rejected token's ratio may be anything, too
    A = row_values(advantages, new, counts & usable)
    J, clipped, dual_clipped = surrogate(bounded_exp(log_rho), new, A, clip_low, clip_high, dual_clip)
    loss = aggregate_loss(-J, mask, aggregate=aggregate, accept=accept, weights=weights, denominator=denominator)
    sums = _ratio_sums(log_rho, new - old, counts, usable) | {
        "loss_sum": loss * denominator,
        "weight_sum": jnp.sum(row_values(weights, new, counts)),
        "clipped_tokens": masked_count(clipped & counts),
        "dual_clipped_tokens": masked_count(dual_clipped & counts),
    }
    return loss, lax.stop_gradient(sums)


def _ratio_sums(log_rho, log_ratio, counts, usable):
    """The metrics of policy_loss that depend on the ratios alone."""
    rho, good = bounded_exp(log_rho), counts & usable
    return {
        "tokens": masked_count(counts),
        "sequences": masked_count(jnp.any(counts, axis=-1)),
        "ratio_sum": masked_sum(rho, good),
        "ratio_max": masked_max(rho, good),
        "log_ratio_sum": masked_sum(log_ratio, good),
        "log_ratio_abs_sum": masked_sum(jnp.abs(log_ratio), good),
        "bounded_tokens": masked_count(good & (jnp.abs(log_rho) > MAX_LOG_RATIO)),
        "degenerate_tokens": masked_count(counts & ~usable),
    }


def _token_weight_ratio(log_ratio, mask):
    return log_ratio, mask


def _sequence_weight_ratio(log_ratio, mask):
    """Sum over the valid tokens: the ratio of the probabilities of the whole completions."""
    return masked_sum(log_ratio, mask, axis=-1)[..., None], jnp.any(mask, axis=-1, keepdims=True)


LEVELS = {"token": _token_weight_ratio, "sequence": _sequence_weight_ratio}
MODES = {
    "truncate": lambda rho, low, high: jnp.minimum(rho, high),
    "mask": lambda rho, low, high: jnp.where((rho >= low) & (rho <= high), rho, 0.0),
    "none": lambda rho, low, high: jnp.ones_like(rho),
}


def importance_weights(
    logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights ρ = π/π_sampler that correct for a sampler other than the old policy; no gradient.

    level "token": ρ of each token; "sequence": the product over the completion's valid tokens, given to each.
    mode "truncate" (TIS): min(ρ, high); low is not used. "mask" (MIS, IcePop): ρ inside [low, high], else 0.
    "none": 1; the ratio is reported all the same.

    logprobs, sampler_logprobs: float[..., T] of the old policy and as recorded. mask: bool[..., T].
    Log ratios are held in ±20. A token that has probability 0 under the sampler weighs 0 (its sequence, at
    level "sequence"). Returns float32[..., T], 0 outside the mask, and float32 sums over valid tokens (level
    "token") or sequences with any (level "sequence"), for ``merge_sums``:
    importance_count; importance_ratio_sum and importance_ratio_max of the RAW ρ; importance_cut_count, ρ
    changed by mode "truncate" or "mask"; importance_degenerate_count, probability 0 under the sampler.
    Raises ValueError for unknown names, unlike shapes, mode "mask" with low > high.
    Sources: TIS, F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025; IcePop, Ling team, "Small leak can sink a great ship", 2025.
    """
    combine = choose(LEVELS, level, "level")
    correct = choose(MODES, mode, "mode")
    check_same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    if mode == "mask" and isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise ValueError(f"mode='mask' keeps ratios in [low, high], got low {low} > high {high}")
    mask = jnp.asarray(mask, bool)
    new, sampler = lax.stop_gradient((as_float(logprobs), as_float(sampler_logprobs)))
    impossible = mask & jnp.isneginf(sampler)
    log_ratio = fill(new, mask & ~impossible) - fill(sampler, mask & ~impossible)
    log_rho, counts = combine(log_ratio, mask)
    degenerate = impossible if level == "token" else jnp.any(impossible, axis=-1, keepdims=True)
    usable = counts & ~degenerate
    rho = fill(bounded_exp(log_rho), usable)
    weights = fill(correct(rho, low, high), usable)
    cut = usable & (weights != rho) if mode != "none" else jnp.zeros_like(usable)
    sums = {
        "importance_count": masked_count(counts),
        "importance_ratio_sum": masked_sum(rho, usable),
        "importance_ratio_max": masked_max(rho, usable),
        "importance_cut_count": masked_count(cut),
        "importance_degenerate_count": masked_count(counts & degenerate),
    }
    return jnp.where(mask, weights, 0.0), sums
