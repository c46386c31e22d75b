"""KL divergence from samples of the policy, as a metric and as a loss, and the entropy of a distribution.

With x ~ π and r = log π(x) - log ref(x), three estimators of KL(π‖ref) (J. Schulman, "Approximating KL
divergence", 2020):

    k1 = r                   unbiased, may be negative
    k2 = r² / 2              biased, positive
    k3 = e^(-r) - 1 + r      unbiased, positive, of low variance

Their gradients through log π are another matter, because the samples do not move with the parameters:

    E[∇k1] = E[∇ log π] = 0                      no penalty at all
    E[∇k2] = E[r ∇ log π] = ∇ KL(π‖ref)          the gradient that is wanted
    E[∇k3] = E[(1 - ref/π) ∇ log π] = ∇ KL(ref‖π)  of the other divergence

So the loss takes k2 and the metric k3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from rljax.algos.losses import aggregate_loss, counted_tokens, row_values
from rljax.algos.masked import (
    MAX_LOG_RATIO,
    as_float,
    check_same_shape,
    choose,
    fill,
    masked_count,
    masked_sum,
)


def _k3(r):
    # Bounded below, where e^(-r) overflows: r itself, since bounding e^(-r) alone would turn the gradient.
    r = jnp.maximum(r, -MAX_LOG_RATIO)
    return jnp.expm1(-r) + r


ESTIMATORS = {"k1": lambda r: r, "k2": lambda r: 0.5 * r**2, "k3": _k3}


def kl_estimate(logprobs: ArrayLike, ref_logprobs: ArrayLike, kind: str) -> jax.Array:
    """k1, k2 or k3 (module docstring) of each token. No mask: see ``kl_loss``.

    logprobs, ref_logprobs: float[...], of the same tokens, in nats. Returns float32[...] in nats. The
    gradient goes to logprobs only. k3 is constant below r = -20. Not finite for tokens of probability 0.
    Raises ValueError for an unknown kind or unlike shapes.
    """
    estimator = choose(ESTIMATORS, kind, "kind")
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return estimator(as_float(logprobs) - lax.stop_gradient(as_float(ref_logprobs)))


def kl_loss(
    logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    kind: str = "k2",
    aggregate: str = "token",
    denominator: ArrayLike | None = None,
    max_length: int | None = None,
    weights: ArrayLike | None = None,
    accept: ArrayLike | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """KL(π‖ref) as a loss to be added to the policy loss, aggregated by the same code over the same tokens.

    Rows that are not plain samples of the policy (a kept subset, another model's rows, rejected tokens) need
    the policy loss's weights and accept: the estimators take x ~ π.

    logprobs, ref_logprobs: float[..., T]. mask, accept, weights, aggregate, denominator, max_length: as for
    ``policy_loss``. Tokens of probability 0 under either model weigh 0 and are counted.
    Returns the scalar and sums over the tokens that count, with gradient 0 (merge with ``merge_sums``):
    kl_sum: Σ w k3, so that kl_sum / kl_tokens estimates KL(π‖ref) in nats a token. kl_tokens.
    kl_degenerate_tokens: tokens of probability 0.
    Raises ValueError for an unknown kind or aggregate, or unlike shapes.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, accept=accept)
    counts = counted_tokens(mask, accept)
    new, ref = as_float(logprobs), lax.stop_gradient(as_float(ref_logprobs))
    possible = ~(jnp.isneginf(new) | jnp.isneginf(ref))
    new, ref = fill(new, counts & possible), fill(ref, counts & possible)
    loss = aggregate_loss(
        kl_estimate(new, ref, kind),
        mask,
        aggregate=aggregate,
        accept=accept,
        weights=weights,
        denominator=denominator,
        max_length=max_length,
    )
    w = row_values(weights, new, counts)
    sums = {
        "kl_sum": masked_sum(w * kl_estimate(new, ref, "k3"), counts),
        "kl_tokens": masked_count(counts),
        "kl_degenerate_tokens": masked_count(counts & ~possible),
    }
    return loss, lax.stop_gradient(sums)


def entropy(logits: ArrayLike) -> jax.Array:
    """H = -Σ_v p_v log p_v of p = softmax(logits), in nats; an entropy bonus is -coef × its aggregate.

    logits: float[..., V], already divided by the temperature; -inf is a token of probability 0, whose
    gradient is 0. Returns float32[...], between 0 and log V.
    """
    logp = jax.nn.log_softmax(as_float(logits), axis=-1)
    possible = ~jnp.isneginf(logp)
    logp = fill(logp, possible)  # 0 × -inf, here and in the gradient
    return -jnp.sum(fill(jnp.exp(logp), possible) * logp, axis=-1)
