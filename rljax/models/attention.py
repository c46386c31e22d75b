"""Attention of G rows to their shared prefix and to themselves, by one joint softmax.

The same function serves prefill (no prefix, G = 1), learning (a prefix, T tokens a row) and decoding
(a prefix and a cache, T = 1). One softmax runs over both parts: merging two halves by their log-sum-exp
would lose the gradient of that log-sum-exp in jax.nn.dot_product_attention(return_residual=True).
"""

from __future__ import annotations

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


def attend(q, k, v, mask, prefix_k=None, prefix_v=None, prefix_mask=None):
    """softmax over [prefix keys, own keys] of q·k / sqrt(D), applied to the values; softmax in float32.

    q: [P, G, T, H, D]. k, v: [P, G, KV, C, D], the row's own. mask: bool, broadcastable to [P, G, T, C].
    prefix_k, prefix_v: [P, KV, S, D], shared by the G rows of a prompt. prefix_mask: to [P, G, T, S].
    Heads are grouped: H = KV * h. Returns [P, G, T, H, D] in q's dtype.
    """
    P, G, T, H, D = q.shape
    KV = k.shape[2]
    q = q.reshape(P, G, T, KV, H // KV, D) * jnp.asarray(D**-0.5, q.dtype)
    # [P, KV, G, h, T, ·]: batch dimensions lead, so that the prefix product is one matrix product a (P, KV).
    q = q.transpose(0, 3, 1, 4, 2, 5)
    scores = jnp.einsum("pkghtd,pgkcd->pkghtc", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(_to_heads(mask), scores, MASKED)
    S = 0
    if prefix_k is not None:
        S = prefix_k.shape[2]
        prefix = jnp.einsum("pkghtd,pksd->pkghts", q, prefix_k, preferred_element_type=jnp.float32)
        prefix = jnp.where(_to_heads(prefix_mask), prefix, MASKED)
        scores = jnp.concatenate([prefix, scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("pkghtc,pgkcd->pkghtd", weights[..., S:], v)
    if prefix_k is not None:
        out += jnp.einsum("pkghts,pksd->pkghtd", weights[..., :S], prefix_v)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(P, G, T, H, D)


def _to_heads(mask):
    """[P, G, T, C] → [P, 1, G, 1, T, C]."""
    return mask[:, None, :, None]
