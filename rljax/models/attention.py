"""Attention of G rows to their shared prefix and to themselves, by one joint softmax.

The same function serves prefill (no prefix, G = 1), learning (a prefix, T tokens a row) and decoding
(a prefix and a cache, T = 1). One softmax runs over both parts: merging two halves by their log-sum-exp
would lose the gradient of that log-sum-exp in jax.nn.dot_product_attention(return_residual=True).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row that sees nothing gives a uniform softmax and not NaN


def visible(query_positions, key_positions, key_valid, window: int | None = None):
    """Which keys each query may attend to: earlier or equal positions, real keys, within the window.

    query_positions: int32[..., T]. key_positions: int32[..., C]. key_valid: bool[..., C].
    Returns bool[..., T, C].
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = (distance >= 0) & key_valid[..., None, :]
    if window is not None:
        mask &= distance < window
    return mask


class Keys(NamedTuple):
    """What queries attend to. The G rows' own: k, v [P, KV, G, C, D], positions and valid [P, G, C]. A prefix, shared
    by the rows of a prompt: k, v [P, KV, S, D], positions and valid [P, 1, S]."""

    k: Any
    v: Any
    positions: Any  # int32
    valid: Any  # bool

    def of_prompts(self) -> Keys:
        """A prefix, of the own keys of prompts that stand as rows, one each."""
        return Keys(self.k[:, :, 0], self.v[:, :, 0], self.positions, self.valid)


def attend(q, positions, own: Keys, prefix: Keys | None = None, window=None, chunk: int = 0, kernel=None):
    """softmax over [prefix keys, own keys] of q·k / sqrt(D), applied to the values; softmax in float32.

    q: [P, G, T, H, D], at positions int32[P, G, T]. window: tokens that a query sees, itself included; None is all.
    chunk: queries of a row whose scores are alive at once, forwards and backwards, so that memory is linear in
    length; 0 is all. kernel: of models/kernels.py instead of this module's products; None is these. Heads are grouped:
    H = KV * h. Returns [P, G, T, H, D] in q's dtype.
    """
    P, G, T, H, D = q.shape
    compute = _attend if kernel is None else kernel
    if not 0 < chunk < T:
        return compute(q, positions, own, prefix, window)
    parts = -(-T // chunk)

    def split(x):  # [P, G, T, …] → [parts, P, G, chunk, …]; padding is cut off again
        x = jnp.pad(x, [(0, 0), (0, 0), (0, parts * chunk - T), *[(0, 0)] * (x.ndim - 3)])
        return jnp.moveaxis(x.reshape(P, G, parts, chunk, *x.shape[3:]), 2, 0)

    # The backward pass computes a chunk's scores again: kept for all chunks they would be quadratic in length.
    one = jax.checkpoint(lambda x: compute(x[0], x[1], own, prefix, window), prevent_cse=False)
    out = jax.lax.map(one, (split(q), split(positions)))
    return jnp.moveaxis(out, 0, 2).reshape(P, G, parts * chunk, H, D)[:, :, :T]


def _attend(q, positions, own: Keys, prefix: Keys | None, window):
    P, G, T, H, D = q.shape
    KV = own.k.shape[1]
    q = q.reshape(P, G, T, KV, H // KV, D) * jnp.asarray(D**-0.5, q.dtype)
    # [P, KV, G, h, T, ·]: batch dimensions lead, so that the prefix product is one matrix product a (P, KV).
    q = q.transpose(0, 3, 1, 4, 2, 5)
    scores = jnp.einsum("pkghtd,pkgcd->pkghtc", q, own.k, preferred_element_type=jnp.float32)
    mask = visible(positions, own.positions, own.valid, window)
    scores = jnp.where(_to_heads(mask), scores, MASKED)
    S = 0
    if prefix is not None:
        S = prefix.k.shape[2]
        shared = jnp.einsum("pkghtd,pksd->pkghts", q, prefix.k, preferred_element_type=jnp.float32)
        # Without a window every prefix token is seen by every row's token, which it precedes.
        seen = prefix.valid[:, :, None] if window is None else visible(positions, *prefix[2:], window)
        scores = jnp.concatenate([jnp.where(_to_heads(seen), shared, MASKED), scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(own.v.dtype)
    out = jnp.einsum("pkghtc,pkgcd->pkghtd", weights[..., S:], own.v)
    if prefix is not None:
        out += jnp.einsum("pkghts,pksd->pkghtd", weights[..., :S], prefix.v)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(P, G, T, H, D)


def _to_heads(mask):
    """[P, G, T, C] → [P, 1, G, 1, T, C]."""
    return mask[:, None, :, None]
