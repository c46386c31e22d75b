"""Optimal budgeted rejection sampling of single tokens, and the weights that go with it (Jackpot).

An actor q makes the rollouts, the policy p is to learn from them. OBRS keeps a token x ~ q with probability

    a(x) = min(1, p(x) / (λ q(x))),      Z = Σ_x q(x) a(x) = Σ_x min(q(x), p(x)/λ),

so that kept tokens follow q̃ = min(q, p/λ) / Z. Of all rules that keep a share Z of the tokens this one
brings q̃ closest to p (Verine et al., AISTATS 2024; for language models arXiv 2602.06107). What is left is
weighed by p/q̃ = Z max(λ, p/q), never by p/q, whose mean over kept tokens is not 1.

Z needs both distributions over the whole vocabulary. Over V_k = topk(q) ∪ topk(p) it is too small; the factor

    κ = accepted tokens / Σ_t Z_approx,t

over all proposed tokens of a minibatch makes it right on average, since E[accepted] = Σ_t Z_t.

p, q: probabilities, float[..., V] over the vocabulary or a part of it; the rest is left out of the sum.
*_logprobs: float[...] nats of the sampled tokens. Computed in float32. Nothing here has a gradient to give:
masks, weights and statistics are constants of the loss. Sums add over micro-batches and hosts
(``masked.merge_sums``); ``summarise`` divides them at the end.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from rljax.algos.masked import as_float, bounded_exp, check_same_shape, choose, fill, masked_sum, safe_divide

_HALVINGS = 60  # of log λ; the closed form on the last bracket removes what they leave
_MAX_LOG_LAMBDA = 69.0  # λ in [1e-30, 1e30]
_MAX_WEIGHT = 1e18  # e^20 e^20 is below, and its square within float32
_ATTAINABLE_SLACK = 1e-5  # a sum of float32 probabilities misses 1 by as much

# Weights are counted in bins of equal width of log2 w, so that percentiles can be had from sums.
_BINS_PER_OCTAVE = 16
_OCTAVES = 16  # w in [2^-16, 2^16]; outside, the end bins


def acceptance(p: ArrayLike, q: ArrayLike, lam: ArrayLike) -> jax.Array:
    """a = min(1, p / (λ q)), elementwise; 0 where p = 0, 1 where only q = 0.

    p=(.6,.3,.1), q=(.2,.3,.5), λ=1 → (1, 1, .2). float32 of the shape of p and q. Raises ValueError for a
    known λ that is not positive.
    """
    _check_lambda(lam)
    p, q = _probabilities(p, q)
    scaled = lam * q
    return jnp.where(p > 0, jnp.where(p >= scaled, 1.0, safe_divide(p, scaled)), 0.0)


def normaliser(p: ArrayLike, q: ArrayLike, lam: ArrayLike, *, mask: ArrayLike | None = None) -> jax.Array:
    """Z = Σ_x min(q, p/λ) over the last axis: float32[...].

    Over the whole vocabulary it is exact, the share of tokens that are accepted. On the tokens of
    ``candidates`` (mask: bool[..., C], False for a token listed twice) it is the part of Z that they hold.
    """
    _check_lambda(lam)
    p, q = _probabilities(p, q)
    return masked_sum(jnp.minimum(q, p / lam), True if mask is None else mask, axis=-1)


def accepted_distribution(p: ArrayLike, q: ArrayLike, lam: ArrayLike) -> jax.Array:
    """q̃ = min(q, p/λ) / Z over the last axis, float32[..., V]; 0 where nothing is ever accepted."""
    _check_lambda(lam)
    p, q = _probabilities(p, q)
    kept = jnp.minimum(q, p / lam)
    return safe_divide(kept, kept.sum(-1, keepdims=True))


def candidates(p: ArrayLike, q: ArrayLike, k: int) -> tuple[jax.Array, jax.Array]:
    """V_k = topk(q) ∪ topk(p): (ids int32[..., 2k], mask bool[..., 2k]), no token counted twice.

    p, q: float[..., V], probabilities or log-probabilities. The first k ids are topk(q) in descending order;
    a token of topk(p) that is among them has mask False. Raises ValueError unless 1 <= k <= V.
    """
    check_same_shape(p=p, q=q)
    size = jnp.shape(q)[-1]
    if not 1 <= k <= size:
        raise ValueError(f"candidates k={k} is outside [1, {size}], the size of the vocabulary")
    of_q, of_p = (lax.top_k(lax.stop_gradient(as_float(x)), k)[1] for x in (q, p))
    new = ~(of_p[..., :, None] == of_q[..., None, :]).any(-1)
    return jnp.concatenate([of_q, of_p], -1), jnp.concatenate([jnp.ones_like(new), new], -1)


def lambda_for_budget(p: ArrayLike, q: ArrayLike, budget: ArrayLike, *, mask: ArrayLike | None = None) -> jax.Array:
    """The largest λ whose mean acceptance over all states is the budget: mean_t Z_t(λ) = budget, a scalar.

    p, q: float[..., V], one distribution a state; mask: bool[...], the states that count. budget in (0, 1].
    Bisection on log λ (the mean falls with λ), then the exact λ of the piece: Z = Σ_whole q + Σ_cut p / λ.
    p=(.6,.3,.1), q=(.2,.3,.5), budget .8 → λ = 1/3. Without distributions, p = ratios[N, 1] and
    q = ones[N, 1] of N sampled tokens give the λ whose mean acceptance over these tokens is the budget.
    Raises ValueError for a known budget outside (0, 1], or above Σ q where p > 0, which is all that any λ can
    accept. Where these are traced, a budget out of reach gives the smallest λ, 1e-30.
    """
    p, q = _probabilities(p, q)
    counts = jnp.ones(p.shape[:-1], bool) if mask is None else jnp.asarray(mask, bool)
    check_same_shape(mask=counts, states=p[..., 0])
    # Scaled by each state's share of the mean, all states are one distribution over (state, token).
    p, q = (fill(x, counts[..., None]) / jnp.maximum(counts.sum(), 1) for x in (p, q))
    attainable = jnp.where(p > 0, q, 0.0).sum()
    _check_budget(budget, attainable)
    rejected = jnp.maximum(q.sum() - budget, 0.0)  # a sum of what is rejected can be exactly 0

    def halve(_, bounds):
        low, high = bounds
        mid = 0.5 * (low + high)
        over = jnp.maximum(q - p / jnp.exp(mid), 0.0).sum() > rejected
        return jnp.where(over, low, mid), jnp.where(over, mid, high)

    bounds = jnp.float32(-_MAX_LOG_LAMBDA), jnp.float32(_MAX_LOG_LAMBDA)
    lam = jnp.exp(lax.fori_loop(0, _HALVINGS, halve, bounds)[0])
    cut = p < lam * q
    exact = safe_divide(jnp.where(cut, p, 0.0).sum(), jnp.where(cut, q, 0.0).sum() - rejected)
    # At a kink the closed form of the bracket's piece may not exist; the bracket is exact there.
    near = (exact > lam * (1 - 1e-4)) & (exact < lam * (1 + 1e-4))
    return lax.stop_gradient(jnp.where(near, exact, lam))


def kappa(accepted: ArrayLike, z_sum: ArrayLike) -> jax.Array:
    """κ = (accepted / proposed) / mean(Z_approx) = accepted / Σ Z_approx; 0 where nothing was proposed.

    accepted: number of accepted tokens; z_sum: Σ of Z_approx over all proposed tokens, both of the minibatch
    whose gradient is taken, added over its micro-batches and hosts. Then Z_t = κ Z_approx,t.
    """
    return lax.stop_gradient(safe_divide(accepted, z_sum))


def token_uniforms(key: jax.Array, draws: ArrayLike, samples: ArrayLike, length: int) -> jax.Array:
    """float32[R, length] in [0, 1): one number for each (draw, sample, position), whatever the batch.

    draws, samples: int[R], the running number of the prompt in the stream and the sample of that prompt.
    Neither the other rows, their order nor the padded length changes a row's numbers.
    """

    def one(draw, sample, position):
        folded = jax.random.fold_in(jax.random.fold_in(key, draw), sample)
        return jax.random.uniform(jax.random.fold_in(folded, position))

    draws, samples = jnp.asarray(draws, jnp.uint32), jnp.asarray(samples, jnp.uint32)
    row = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(row, in_axes=(0, 0, None))(draws, samples, jnp.arange(length, dtype=jnp.uint32))


def acceptance_mask(
    uniforms: ArrayLike,
    target_logprobs: ArrayLike,
    actor_logprobs: ArrayLike,
    lam: ArrayLike,
    mask: ArrayLike,
) -> jax.Array:
    """bool[...]: which sampled tokens to keep, u < min(1, p / (λ q)), False behind the mask.

    uniforms: float[...] in [0, 1), ``token_uniforms``. target_logprobs, actor_logprobs: log p and log q of
    the sampled tokens. mask: bool[...], the tokens that exist. A token of unknown (NaN) probability is
    rejected.
    """
    _check_lambda(lam)
    check_same_shape(uniforms=uniforms, target_logprobs=target_logprobs, actor_logprobs=actor_logprobs, mask=mask)
    log_a = as_float(target_logprobs) - as_float(actor_logprobs) - jnp.log(lam)
    return jnp.asarray(mask, bool) & (as_float(uniforms) < jnp.exp(jnp.minimum(log_a, 0.0)))


def _accepted_factor(ratio, lam, z):
    if z is None:
        raise ValueError("jackpot_weights normalise='accepted' needs z, the normaliser (exact or κ Z_approx)")
    return as_float(z) * jnp.maximum(lam, ratio)


def _proposed_factor(ratio, lam, z):
    del z  # a max(λ, p/q) = p/q without it
    return jnp.maximum(lam, ratio)


NORMALISE = {"accepted": _accepted_factor, "proposed": _proposed_factor}


def jackpot_weights(
    target_logprobs: ArrayLike,
    actor_logprobs: ArrayLike,
    lam: ArrayLike,
    *,
    z: ArrayLike | None = None,
    old_logprobs: ArrayLike | None = None,
    c1: float = math.inf,
    c2: float = math.inf,
    normalise: str = "accepted",
) -> jax.Array:
    """The weight of an accepted token in the policy loss, float32[...], without gradient.

        w = min(f, c1) · min(p_old / p_target, c2)

    normalise="accepted": f = Z_t max(λ, p/q) = p/q̃, and the loss is divided by the number of ACCEPTED
        tokens. In one state E_q̃[f g] = E_p[g]; over several, each counts by its Z_t.
    normalise="proposed": f = max(λ, p/q), and the loss is divided by the number of PROPOSED tokens:
        unbiased over all states, since a max(λ, p/q) = p/q.
    target_logprobs, actor_logprobs: float[...], log p and log q of the sampled tokens. z: float[...], Z_t,
    exact or κ Z_approx; only "accepted" uses it. old_logprobs: log p_old where the target is the new policy;
    None where the target is the old one, whose second factor is 1. c1, c2: upper bounds; math.inf is none.
    p=(.6,.3,.1), q=(.2,.3,.5), λ=1 → (1.8,.6,.6). Ratios are held in e^±20. A weight that is not a number, or
    above 1e18 as only λ can make it, is 0 (``weight_sums`` counts them). Raises ValueError for an unknown name,
    bounds <= 0, or no z.
    """
    factor, correction = _factors(target_logprobs, actor_logprobs, lam, z, old_logprobs, c1, c2, normalise)
    w = jnp.minimum(factor, c1) * jnp.minimum(correction, c2)
    return jnp.where(w <= _MAX_WEIGHT, w, 0.0)


def _factors(target_logprobs, actor_logprobs, lam, z, old_logprobs, c1, c2, normalise):
    """Both factors of the weight before their bounds, without gradient."""
    _check_lambda(lam)
    for name, bound in (("c1", c1), ("c2", c2)):
        if not isinstance(bound, Tracer) and not bound > 0:
            raise ValueError(f"jackpot_weights {name}={bound} must be > 0; math.inf is no bound")
    check_same_shape(target_logprobs=target_logprobs, actor_logprobs=actor_logprobs, z=z, old_logprobs=old_logprobs)
    target = as_float(target_logprobs)
    ratio = bounded_exp(target - as_float(actor_logprobs))
    factor = choose(NORMALISE, normalise, "normalise")(ratio, lam, z)
    moved = jnp.zeros_like(factor) if old_logprobs is None else as_float(old_logprobs) - target
    return lax.stop_gradient((factor, bounded_exp(moved)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class States:
    """What OBRS needs of N states (token positions) of both models; all that is kept of their logits.

    ids: int32[N, 2k], mask: bool[N, 2k], ``candidates``. target_on, actor_on: float32[N, 2k], log p and log q
        of these tokens. target_logprobs, actor_logprobs: float32[N], of the sampled token.
    z: float32[N], the exact normaliser. kl_before, kl_after: float32[N] nats, KL(p‖q) and KL(p‖q̃), exact. None where
        the whole vocabulary was not at hand.
    """

    ids: jax.Array
    mask: jax.Array
    target_on: jax.Array
    actor_on: jax.Array
    target_logprobs: jax.Array
    actor_logprobs: jax.Array
    z: jax.Array | None
    kl_before: jax.Array | None
    kl_after: jax.Array | None


def states(target_logits: ArrayLike, actor_logits: ArrayLike, tokens: ArrayLike, lam: ArrayLike, *, k: int) -> States:
    """The gradient-free pre-pass over one chunk of N states (``distillation.scan_chunks`` runs over all).

    target_logits, actor_logits: float[N, V], temperature applied, padded columns -inf. tokens: int[N], as
    sampled. Raises ValueError for vocabularies of unlike size, or a k outside of [1, V].
    """
    check_same_shape(target_logits=target_logits, actor_logits=actor_logits)
    logits = (lax.stop_gradient(as_float(x)) for x in (target_logits, actor_logits))
    log_p, log_q = (jax.nn.log_softmax(x) for x in logits)
    ids, mask = candidates(log_p, log_q, k)
    before, after, z = divergences(log_p, log_q, lam)

    def at(logprobs, where):
        return jnp.take_along_axis(logprobs, where, axis=-1)

    token = jnp.asarray(tokens, jnp.int32)[..., None]
    return States(
        ids=ids,
        mask=mask,
        target_on=at(log_p, ids),
        actor_on=at(log_q, ids),
        target_logprobs=at(log_p, token)[..., 0],
        actor_logprobs=at(log_q, token)[..., 0],
        z=z,
        kl_before=before,
        kl_after=after,
    )


def divergences(
    target_logprobs: ArrayLike, actor_logprobs: ArrayLike, lam: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(KL(p‖q), KL(p‖q̃), Z): float32[...] each, of log p and log q over the whole vocabulary.

    target_logprobs, actor_logprobs: float[..., V]. Both are infinite where p has tokens that q never proposes.
    KL(p‖q̃) = Σ p log(max(λ, p/q)) + log Z, and KL(p‖q) - KL(p‖q̃) <= -log Z. log Z is a logsumexp: of models far
    apart, Z itself may be below the smallest float32. No gradient.
    p=(.6,.3,.1), q=(.2,.3,.5), λ=1 → (.498, .148, .6).
    """
    log_p, log_q = lax.stop_gradient((as_float(target_logprobs), as_float(actor_logprobs)))
    log_lam, support, never = jnp.log(lam), log_p > -jnp.inf, log_q == -jnp.inf
    log_ratio = log_p - jnp.where(never, 0.0, log_q)
    log_z = jax.nn.logsumexp(jnp.minimum(log_q, log_p - log_lam), axis=-1)

    def expected(values):
        total = jnp.where(support, jnp.exp(log_p) * values, 0.0).sum(-1)
        return jnp.where((support & never).any(-1), jnp.inf, total)

    after = expected(jnp.maximum(log_lam, log_ratio) + log_z[..., None])
    return expected(log_ratio), after, jnp.exp(log_z)


def weight_sums(
    target_logprobs: ArrayLike,
    actor_logprobs: ArrayLike,
    lam: ArrayLike,
    accept: ArrayLike,
    mask: ArrayLike,
    *,
    z: ArrayLike | None = None,
    old_logprobs: ArrayLike | None = None,
    c1: float = math.inf,
    c2: float = math.inf,
    normalise: str = "accepted",
) -> dict[str, jax.Array]:
    """Sums that describe the acceptance and the weights of one micro-batch; ``summarise`` reads them.

    Arguments as for ``jackpot_weights``; accept: bool[...], ``acceptance_mask``; mask: bool[...]. Returns
    float32: proposed, accepted, weight (Σ w of accepted tokens), weight_sq, at_c1, at_c2 (accepted tokens
    whose factor reaches its bound), degenerate (weights set to 0), weight_bins (counts by log2 w).
    """
    factor, correction = _factors(target_logprobs, actor_logprobs, lam, z, old_logprobs, c1, c2, normalise)
    w = jnp.minimum(factor, c1) * jnp.minimum(correction, c2)
    kept = jnp.asarray(mask, bool) & jnp.asarray(accept, bool)
    fine = kept & (w <= _MAX_WEIGHT)
    w = fill(w, fine)
    position = (jnp.log2(jnp.maximum(w, 2.0**-_OCTAVES)) + _OCTAVES) * _BINS_PER_OCTAVE
    bins = 2 * _OCTAVES * _BINS_PER_OCTAVE
    bin_of = jnp.clip(position, 0, bins - 1).astype(jnp.int32)
    return {
        "proposed": masked_sum(jnp.ones_like(w), mask),
        "accepted": masked_sum(jnp.ones_like(w), kept),
        "weight": w.sum(),
        "weight_sq": jnp.square(w).sum(),
        "at_c1": masked_sum(factor >= c1, kept),
        "at_c2": masked_sum(correction >= c2, kept),
        "degenerate": masked_sum(jnp.ones_like(w), kept & ~fine),
        "weight_bins": jnp.zeros(bins).at[bin_of.ravel()].add(fine.ravel().astype(jnp.float32)),
    }


def state_sums(z: ArrayLike, kl_before: ArrayLike, kl_after: ArrayLike, mask: ArrayLike) -> dict[str, jax.Array]:
    """Σ over the masked-in states of Z, KL(p‖q) and KL(p‖q̃), and their number; float32 scalars."""
    check_same_shape(z=z, kl_before=kl_before, kl_after=kl_after, mask=mask)
    ones = jnp.ones(jnp.shape(mask))
    values = {"z": z, "kl_before": kl_before, "kl_after": kl_after, "states": ones}
    return {name: masked_sum(value, mask) for name, value in values.items()}


def summarise(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics from the sums of all micro-batches and hosts, of ``weight_sums``, ``state_sums`` or both.

    acceptance (accepted / proposed), weight_mean, weight_p50, _p90, _p99 (within 2.2%), at_c1, at_c2
    (fractions of accepted tokens), degenerate (a count), ess = (Σw)² / (n Σw²) in (0, 1]; z, kl_before,
    kl_after (means a state, nats). Without accepted tokens they are 0.
    """
    out = {}
    if "accepted" in sums:
        accepted = sums["accepted"]
        out["acceptance"] = safe_divide(accepted, sums["proposed"])
        out["weight_mean"] = safe_divide(sums["weight"], accepted)
        # A product of two means, since the squares of large sums overflow.
        out["ess"] = out["weight_mean"] * safe_divide(sums["weight"], sums["weight_sq"])
        out |= {name: safe_divide(sums[name], accepted) for name in ("at_c1", "at_c2")}
        out["degenerate"] = sums["degenerate"]
        out |= {f"weight_p{share}": _percentile(sums["weight_bins"], share / 100) for share in (50, 90, 99)}
    if "states" in sums:
        out |= {name: safe_divide(sums[name], sums["states"]) for name in ("z", "kl_before", "kl_after")}
    return out


def _percentile(counts: jax.Array, share: float) -> jax.Array:
    """The middle of the bin of log2 w below which the share of the counts lies; 0 for no counts."""
    total = jnp.cumsum(counts)
    index = jnp.searchsorted(total, share * total[-1])
    return jnp.where(total[-1] > 0, jnp.exp2((index + 0.5) / _BINS_PER_OCTAVE - _OCTAVES), 0.0)


def _probabilities(p: ArrayLike, q: ArrayLike) -> tuple[jax.Array, jax.Array]:
    check_same_shape(p=p, q=q)
    return lax.stop_gradient(as_float(p)), lax.stop_gradient(as_float(q))


def _check_lambda(lam: ArrayLike) -> None:
    if not isinstance(lam, Tracer) and not np.all(np.asarray(lam) > 0):
        raise ValueError(f"OBRS λ={lam} must be > 0")


def _check_budget(budget: ArrayLike, attainable: jax.Array) -> None:
    if isinstance(budget, Tracer):
        return
    share = float(np.asarray(budget))
    if not 0 < share <= 1:
        raise ValueError(f"OBRS budget={budget} must be in (0, 1]: it is the share of tokens to accept")
    if not isinstance(attainable, Tracer) and share > attainable + _ATTAINABLE_SLACK:
        raise ValueError(
            f"OBRS budget={budget} is out of reach: at most {float(attainable):.6f} of the actor's tokens "
            "have a probability above 0 under the target; lower the budget"
        )
