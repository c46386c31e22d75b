"""Log-probabilities of tokens: the one function of sampler and learner, and its form by chunks of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rljax.types import Array


def scale(logits, temperature):
    """float32 logits[..., V] / temperature, a scalar or one a row [...]; 0 (greedy) leaves them."""
    temperature = jnp.asarray(temperature, jnp.float32)[..., None]
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)


def token_logprobs(logits, ids, temperature: Array | float = 1.0):
    """log softmax(logits / temperature)[ids] in float32.

    logits: [..., V]. ids: int[...]. temperature: scalar or float[...]; 0 stands for 1, since a greedy choice
    has no log-prob. Returns float32[...], at most 0.
    """
    scaled = scale(logits, temperature)
    chosen = jnp.take_along_axis(scaled, ids[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def chunked_logprobs(unembed, hidden, ids, temperature, chunk: int):
    """token_logprobs of hidden[N, E] → float32[N], with at most `chunk` rows of logits alive at once.

    unembed: hidden[n, E] → logits[n, V]. The backward pass computes the logits of a chunk again.
    """
    N = ids.shape[0]
    chunk = min(chunk, N)
    pad = -N % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[-1])
    ids = jnp.pad(ids, (0, pad)).reshape(-1, chunk)

    @jax.checkpoint
    def one(h, i):
        return token_logprobs(unembed(h), i, temperature)

    if hidden.shape[0] == 1:
        return one(hidden[0], ids[0])[:N]
    _, out = jax.lax.scan(lambda _, xs: (None, one(*xs)), None, (hidden, ids))
    return out.reshape(-1)[:N]


def completion_logprobs(model, params, batch, temperature, chunk: int):
    """float32[P, K, T] log-probabilities of a batch's completions; a prompt is computed once for its K rows.

    batch: prompt_tokens [P, S], prompt_lengths [P], tokens [P, K, T], lengths [P, K] (types.TrainBatch). The
    last prompt token is each row's first input, so that every completion token has its input inside the row:
    the sampler feeds its rows the same way. Values past `lengths` mean nothing and must be masked.
    """
    S, T = batch.prompt_tokens.shape[1], batch.tokens.shape[2]
    prefix_valid = jnp.arange(S) < batch.prompt_lengths[:, None] - 1
    prefix = model.prefill(params, batch.prompt_tokens, prefix_valid)
    last = jnp.take_along_axis(batch.prompt_tokens, jnp.maximum(batch.prompt_lengths - 1, 0)[:, None], axis=1)
    first = jnp.broadcast_to(last[:, :, None], (*batch.tokens.shape[:2], 1))
    inputs = jnp.concatenate([first, batch.tokens[..., :-1]], axis=2)
    valid = jnp.arange(T) < batch.lengths[..., None]
    hidden = model.extend(params, inputs, valid, prefix)
    flat = chunked_logprobs(
        lambda h: model.unembed(params, h),
        hidden.reshape(-1, hidden.shape[-1]),
        batch.tokens.reshape(-1),
        temperature,
        chunk,
    )
    return flat.reshape(batch.tokens.shape)
