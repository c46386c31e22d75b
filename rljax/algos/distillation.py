"""KL between the actor that makes the rollouts and the policy that learns from them (Jackpot, 2602.06107).

    "reverse"   KL(actor ‖ policy) = Σ_x a(x) (log a(x) - log π(x))
    "forward"   KL(policy ‖ actor) = Σ_x π(x) (log π(x) - log a(x))      (the paper's equation 7)

Both are exact, by enumeration of the vocabulary, so that they have no sampling noise and the true gradient.
It is the actor that is pulled to the policy: the policy is a constant in both (stop-gradient), and learns
from rewards only. The reverse direction makes the actor drop what the policy does not say; the forward one
makes it cover all that the policy says.

An array of [tokens, V] logits is larger than all else in the update (32 rows x 256 tokens x V=49,152 in
float32: 1.6 GB, several times over with its gradient), so it never exists: a scan takes a chunk of hidden
states at a time to logits and to one number a token, and the backward pass computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from rljax.algos.masked import as_float, check_same_shape, choose


def _divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p‖q) over the last axis. A token with p = 0 adds 0 to the value and to the gradient."""
    support, never = log_p > -jnp.inf, log_q == -jnp.inf
    log_p = jnp.where(support, log_p, 0.0)
    log_ratio = log_p - jnp.where(support & ~never, log_q, 0.0)
    divergence = jnp.sum(jnp.where(support, jnp.exp(log_p) * log_ratio, 0.0), axis=-1)
    # ∞ as a constant: the derivative of an infinite term is NaN, and would make NaN of every parameter.
    return jnp.where((support & never).any(-1), jnp.inf, divergence)


DIRECTIONS = {
    "reverse": lambda actor, policy: _divergence(actor, policy),
    "forward": lambda actor, policy: _divergence(policy, actor),
}


def kl(actor_logits: ArrayLike, policy_logits: ArrayLike, *, direction: str = "reverse") -> jax.Array:
    """KL a state, float32[...] nats, with gradient to the actor only.

    actor_logits, policy_logits: float[..., V] of the same vocabulary, temperature applied; a padded column is
    -inf in both. direction: "reverse" is KL(actor‖policy), "forward" KL(SG(policy)‖actor).
    actor=(.5,.5), policy=(.8,.2): reverse .2231, forward .1927.
    Infinite, with gradient 0, where the first distribution has a token that the second never has. Raises
    ValueError for an unknown direction or unlike shapes.
    """
    divergence = choose(DIRECTIONS, direction, "direction")
    check_same_shape(actor_logits=actor_logits, policy_logits=policy_logits)
    policy = jax.nn.log_softmax(as_float(lax.stop_gradient(policy_logits)))
    return divergence(jax.nn.log_softmax(as_float(actor_logits)), policy)


def scan_chunks(f: Callable[[Any], Any], inputs: Any, *, chunk: int) -> Any:
    """f over the leading axis of `inputs`, `chunk` entries at a time: only one chunk's work is alive.

    inputs: a pytree of arrays [N, ...]. f: takes that pytree with N = chunk and returns one of [chunk, ...];
    it must treat entries independently, and may close over parameters, to which gradients flow. A chunk takes every
    so manieth entry, so that where devices split the entries each computes its own of every chunk; zeros fill the last.
    Backward recomputes f a chunk at a time (jax.checkpoint). Returns the pytree of f with leading axis N. Raises
    ValueError for chunk < 1, no arrays, or unlike leading axes.
    """
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(inputs)}
    if chunk < 1 or len(sizes) != 1:
        raise ValueError(f"scan_chunks chunk={chunk} must be >= 1, and leading axes {sizes} must be equal")
    (size,) = sizes
    chunk = min(chunk, max(size, 1))
    number = -(-size // chunk)

    def split(x):
        x = jnp.asarray(x)
        padded = jnp.pad(x, [(0, number * chunk - size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(chunk, number, *x.shape[1:]).swapaxes(0, 1)

    def step(carry, part):
        return carry, f(part)

    # Inside scan the barriers that keep checkpoint from being undone are not needed, and would cost copies.
    _, out = lax.scan(jax.checkpoint(step, prevent_cse=False), None, jax.tree.map(split, inputs))
    return jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(number * chunk, *y.shape[2:])[:size], out)


def token_kl(
    actor_fn: Callable[[Any], jax.Array],
    policy_fn: Callable[[Any], jax.Array],
    actor_inputs: Any,
    policy_inputs: Any,
    mask: ArrayLike,
    *,
    direction: str = "reverse",
    chunk: int,
) -> jax.Array:
    """``kl`` of each of N tokens without ever holding [N, V] logits: float32[N], 0 behind the mask.

    actor_fn, policy_fn: take a chunk of their inputs and give logits float[chunk, V], e.g.
        ``lambda hidden: hidden @ output_matrix``; gradients flow to what actor_fn closes over.
    actor_inputs, policy_inputs: arrays (or pytrees of them) [N, ...], e.g. the last hidden states.
    mask: bool[N]. Masked entries are replaced by zeros beforehand, so that NaN there reaches neither the
        value nor the gradient. chunk: tokens whose logits are alive at once.
    For the loss, sum and divide by the number of tokens of the whole minibatch. Errors as ``kl`` and
    ``scan_chunks``.
    """
    choose(DIRECTIONS, direction, "direction")
    mask = jnp.asarray(mask, bool)

    def clean(x):
        x = jnp.asarray(x)
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    def one_chunk(part):
        actor_part, policy_part, mask_part = part
        value = kl(actor_fn(actor_part), policy_fn(policy_part), direction=direction)
        return jnp.where(mask_part, value, 0.0)

    parts = *jax.tree.map(clean, (actor_inputs, policy_inputs)), mask
    return scan_chunks(one_chunk, parts, chunk=chunk)
