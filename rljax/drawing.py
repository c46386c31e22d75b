"""One token a row from logits: filters, inverse-CDF sampling and the random stream of a row's coordinates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rljax.models import logprobs


def filter_logits(logits, top_k: int, top_p: float, min_p: float):
    """Logits[..., V] with everything outside the filters at -inf; the most likely token always stays.

    top_k: the k most likely; 0 is off. top_p: of what top_k leaves, the fewest likeliest tokens whose mass
    reaches it; 1 is off. min_p: tokens at least this fraction as likely as the most likely; 0 is off. Ties
    with the last token that stays also stay.
    """
    if top_k > 0:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p < 1.0:
        probs = jax.nn.softmax(logits, axis=-1)
        ranked = jnp.sort(probs, axis=-1, descending=True)
        before = jnp.cumsum(ranked, axis=-1) - ranked  # mass of the likelier tokens
        stays = (before < top_p) | (jnp.arange(ranked.shape[-1]) == 0)
        least = jnp.min(jnp.where(stays, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(probs < least, -jnp.inf, logits)
    if min_p > 0.0:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def inverse_cdf(logits, uniforms):
    """One draw a row from softmax(logits[..., V]), given uniforms[...] in [0, 1): int32[...].

    Two levels (blocks, then tokens of the block): one uniform a row, where Gumbel noise would take V. A token
    of probability 0 is never drawn.
    """
    V = logits.shape[-1]
    width = max(1, int(np.ceil(np.sqrt(V))))
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -V % width)])
    weights = weights.reshape(*weights.shape[:-1], -1, width)

    def pick(mass, target):
        index = jnp.arange(mass.shape[-1])
        upto = jnp.cumsum(mass, axis=-1)
        # Rounding may leave the target at or past the last sum; the last index with mass takes it then.
        last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1, keepdims=True)
        reached = (upto > target[..., None]) | (index == last)
        chosen = jnp.argmax(reached & (mass > 0), axis=-1)
        rest = target - jnp.take_along_axis(upto - mass, chosen[..., None], axis=-1)[..., 0]
        return chosen, jnp.maximum(rest, 0)

    blocks = weights.sum(axis=-1)
    block, rest = pick(blocks, uniforms * blocks.sum(axis=-1))
    inside = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    return (block * width + pick(inside, rest)[0]).astype(jnp.int32)


def row_uniforms(key, draw, sample, position):
    """float32[lanes, slots] in [0, 1) from fold_in(key, draw, sample, position), whatever the layout.

    draw: uint32[lanes]. sample, position: int32[lanes, slots].
    """

    def one(draw, sample, position):
        k = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, draw), sample), position)
        return jax.random.uniform(k)

    return jax.vmap(jax.vmap(one, (None, 0, 0)))(draw, sample, position)


def choose(
    logits,
    temperature,
    uniforms,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_logprobs: int = 0,
):
    """(ids, log-probs, top ids, top log-probs) of the next tokens; temperature 0 takes the most likely one.

    logits: [..., V]. temperature, uniforms: float32[...]. Log-probs are of the distribution sampled from,
    filters included, and of temperature 1 for a greedy choice. Returns int32[...], float32[...], and int32
    and float32[..., top_logprobs] in falling order.
    """
    greedy = temperature <= 0
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        # Filters act on the tempered distribution; afterwards the temperature is already in the logits.
        logits = filter_logits(logprobs.scale(logits, temperature), top_k, top_p, min_p)
        temperature = jnp.ones_like(temperature)
    scaled = logprobs.scale(logits, temperature)
    drawn = inverse_cdf(scaled, uniforms)
    ids = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    chosen = logprobs.token_logprobs(logits, ids, temperature)
    if top_logprobs == 0:
        none = jnp.zeros((*ids.shape, 0))
        return ids, chosen, none.astype(jnp.int32), none
    top, top_ids = jax.lax.top_k(scaled, top_logprobs)
    return ids, chosen, top_ids, top - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
