"""An independent decoder to compare with: whole rows, without prefix, cache or grouped heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models import attention


def _row_logits(c, params, ids):
    S, D = ids.shape[0], c.head_dim
    position = jnp.arange(S)
    angle = position[:, None, None] * jnp.asarray(c.inverse_frequencies())
    causal = position[:, None] >= position[None]
    magnitude = 1.0 if c.rope_scaling is None else c.rope_scaling.magnitude

    def norm(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + c.norm_eps) * weight

    def rope(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    x = params["embed"][ids]
    for i in range(c.num_layers):
        w = {name: value[i] for name, value in params["layers"].items()}
        seen = causal
        if c.sliding_window is not None and (c.sliding_layers is None or c.sliding_layers[i]):
            seen = causal & (position[:, None] - position[None] < c.sliding_window)
        h = norm(x, w["attn_norm"])
        q, k, v = (h @ w[n] + (w[f"{n}_bias"] if c.qkv_bias else 0) for n in "qkv")
        q, k, v = q.reshape(S, -1, D), k.reshape(S, -1, D), v.reshape(S, -1, D)
        if c.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        k, v = (jnp.repeat(a, c.num_heads // c.num_kv_heads, axis=1) for a in (rope(k), v))
        scores = jnp.einsum("shd,thd->hst", rope(q), k) / np.sqrt(D)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("hst,thd->shd", weights, v).reshape(S, -1) @ w["o"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate * jax.nn.sigmoid(gate) * (h @ w["up"])) @ w["down"]
    return norm(x, params["norm"]) @ (params["embed"].T if c.tie_embeddings else params["head"])


@pytest.fixture(scope="session")
def plain_logits():
    """(config, params, tokens[B, S]) → float32[B, S, V]; padding on the right is not seen."""

    @functools.partial(jax.jit, static_argnums=0)
    def plain(c, params, tokens):
        return jax.lax.map(lambda ids: _row_logits(c, params, ids), tokens)

    return plain


@pytest.fixture(scope="session")
def random_params():
    """(model, seed=0, dtype="float32") → params without any constant, so that every bias and norm counts."""

    def make(model, seed=0, dtype="float32"):
        rng = np.random.default_rng(seed)

        def one(path, leaf):
            name = path[-1].key
            scale = 0.3 if name == "embed" else leaf.shape[-2] ** -0.5 if leaf.ndim == 3 else 0.3
            value = scale * rng.standard_normal(leaf.shape) + (1.0 if name.endswith("norm") else 0.0)
            return jnp.asarray(value, leaf.dtype)

        return jax.tree_util.tree_map_with_path(one, model.abstract_params(dtype))

    return make


@dataclasses.dataclass(frozen=True)
class Attention:
    """P prompts and G rows each, padded on the right. prefix: real tokens of each prompt; own: of each row."""

    prefix: list
    own: list
    T: int
    S: int
    H: int = 4
    KV: int = 2
    D: int = 8

    def arrays(self):
        (P, G), T, KV, D = np.shape(self.own), self.T, self.KV, self.D
        rng = np.random.default_rng(0)
        shapes = {
            "q": (P, G, T, self.H, D), "k": (P, KV, G, T, D), "v": (P, KV, G, T, D),
            "prefix_k": (P, KV, self.S, D), "prefix_v": (P, KV, self.S, D),
        }  # fmt: skip
        return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}

    def attend(self, a, *, shared=True, window=None, chunk=0, kernel=None):
        """attention.attend [P, G, T, H, D] of such arrays. Without `shared` the rows alone, as in prefill."""
        own, prompt = np.array(self.own), np.array(self.prefix) if shared else np.zeros(len(self.prefix), int)
        positions = prompt[:, None, None] + np.broadcast_to(np.arange(self.T), (*own.shape, self.T))
        own_keys = attention.Keys(a["k"], a["v"], positions, np.arange(self.T) < own[..., None])
        before = np.broadcast_to(np.arange(self.S), (len(prompt), 1, self.S))
        prefix = attention.Keys(a["prefix_k"], a["prefix_v"], before, before < prompt[:, None, None])
        return attention.attend(a["q"], positions, own_keys, prefix if shared else None, window, chunk, kernel)


@pytest.fixture(scope="session")
def make_attention():
    return Attention
