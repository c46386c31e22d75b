"""Log-probabilities of tokens: the one function of sampler and learner, and completions after a shared prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rljax.algos import kl
from rljax.algos.distillation import scan_chunks
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


def chunked_values(unembed, hidden, ids, temperature, chunk: int, with_entropy: bool = False):
    """(token_logprobs, entropies in nats or None) of hidden[..., E], float32[...]; ids: int[...].

    unembed: hidden[n, E] → logits[n, V]. At most `chunk` rows of logits are alive at once; the backward pass
    computes those of a chunk again.
    """

    def one(part):
        logits = unembed(part[0])
        entropy = kl.entropy(scale(logits, temperature)) if with_entropy else None
        return token_logprobs(logits, part[1], temperature), entropy

    values = scan_chunks(one, (hidden.reshape(-1, hidden.shape[-1]), ids.reshape(-1)), chunk=chunk)
    return jax.tree.map(lambda x: x.reshape(ids.shape), values)


def completion_logprobs(model, params, batch, temperature, chunk: int):
    """float32[P, K, T] log-probabilities of a batch's completions, of `completion_hidden`."""
    hidden = completion_hidden(model, params, batch)
    return chunked_values(lambda h: model.unembed(params, h), hidden, batch.tokens, temperature, chunk)[0]


def completion_hidden(model, params, batch):
    """hidden[P, K, T, E] whose logits are of the completions' tokens; a prompt is computed once for its K rows.

    batch: prompt_tokens [P, S], prompt_lengths [P], tokens [P, K, T], lengths [P, K] (types.TrainBatch). The
    last prompt token is each row's first input, so that every completion token has its input inside the row:
    the sampler feeds its rows the same way. Values past `lengths` mean nothing and must be masked.
    """
    S, T = batch.prompt_tokens.shape[1], batch.tokens.shape[2]
    prompt_valid = jnp.arange(S) < batch.prompt_lengths[:, None] - 1
    last = jnp.take_along_axis(batch.prompt_tokens, jnp.maximum(batch.prompt_lengths - 1, 0)[:, None], axis=1)
    first = jnp.broadcast_to(last[:, :, None], (*batch.tokens.shape[:2], 1))
    inputs = jnp.concatenate([first, batch.tokens[..., :-1]], axis=2)
    valid = jnp.arange(T) < batch.lengths[..., None]
    return model.extend(params, inputs, valid, (batch.prompt_tokens, prompt_valid))
