"""One decoder for every supported family, as a Flax NNX module split once into (graphdef, params).

`Model` is the static half: hashable, so that it can be a static argument of jit. Parameters are a nested dict
of arrays; every method takes them first. Weights are stored [in, out] and stacked along a leading layer axis.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rljax import sharding
from rljax.models import attention, kernels
from rljax.models.config import ModelConfig
from rljax.models.lora import Lora, join, split


class KV(NamedTuple):
    """Keys (rotated) and values of all layers: [L, P, KV, G, C, D] of rows, [L, P, KV, S, D] of prefixes."""

    k: Any
    v: Any


class Prefix(NamedTuple):
    """P prompts' keys and values, which of their S columns are real, and each column's position."""

    kv: KV
    valid: Any  # bool[P, S]
    positions: Any  # int32[P, S]

    def keys(self, kv: KV) -> attention.Keys:
        """What rows attend to in a layer whose keys and values are `kv`."""
        return attention.Keys(*kv, self.positions[:, None], self.valid[:, None])


class Tokens(NamedTuple):
    """Tokens of G rows a prompt, or of the prompts themselves (G = 1), [P, G, T] each."""

    ids: Any  # int32
    positions: Any  # int32
    valid: Any  # bool


class Block(nnx.Module):
    """Pre-norm attention and gated MLP of one layer; `lora` adds low-rank adapters to the projections it names."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, dtype, lora: Lora | None = None):
        def weight(shape, axes):
            value = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[0] ** -0.5
            return nnx.Param(value.astype(dtype), axes=("layers", *axes))

        def constant(value, size, axis):
            return nnx.Param(jnp.full((size,), value, dtype), axes=("layers", axis))

        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.attn_norm = constant(1, c.hidden_size, "embed_norm")
        self.q = weight((c.hidden_size, q_size), ("embed", "heads"))
        self.k = weight((c.hidden_size, kv_size), ("embed", "kv_heads"))
        self.v = weight((c.hidden_size, kv_size), ("embed", "kv_heads"))
        self.o = weight((q_size, c.hidden_size), ("heads", "embed"))
        if c.qkv_bias:
            self.q_bias = constant(0, q_size, "heads")
            self.k_bias = constant(0, kv_size, "kv_heads")
            self.v_bias = constant(0, kv_size, "kv_heads")
        if c.qk_norm:
            self.q_norm = constant(1, c.head_dim, "head_norm")
            self.k_norm = constant(1, c.head_dim, "head_norm")
        self.mlp_norm = constant(1, c.hidden_size, "embed_norm")
        self.gate = weight((c.hidden_size, c.intermediate_size), ("embed", "mlp"))
        self.up = weight((c.hidden_size, c.intermediate_size), ("embed", "mlp"))
        self.down = weight((c.intermediate_size, c.hidden_size), ("mlp", "embed"))
        self.config, self.lora = c, lora
        if lora is not None:
            self.adapt(lora, rngs)

    def adapt(self, lora: Lora, rngs: nnx.Rngs) -> None:
        """Adds new adapters: A of N(0, 1/in), B of zeros."""
        for name in lora.targets:
            base = getattr(self, name)
            (size_in, size_out), (_, axis_in, axis_out) = base.shape, base.get_metadata("axes")
            a = jax.random.normal(rngs.params(), (size_in, lora.rank), jnp.float32) * size_in**-0.5
            setattr(self, f"{name}_lora_a", nnx.Param(a, axes=("layers", axis_in, "lora")))
            b = jnp.zeros((lora.rank, size_out), jnp.float32)
            setattr(self, f"{name}_lora_b", nnx.Param(b, axes=("layers", "lora", axis_out)))

    def project(self, x, name: str):
        """x @ W, and α/r · x A B beside it where the projection has an adapter (LoRA, 2106.09685, eq. 3)."""
        y = linear(x, getattr(self, name)[...])
        if self.lora is None or name not in self.lora.targets:
            return y
        a, b = (getattr(self, f"{name}_lora_{half}")[...].astype(x.dtype) for half in "ab")
        return y + self.lora.scale * linear(linear(x, a), b)

    def qkv(self, x, cos, sin):
        """x[..., E] → q[..., H, D], k[..., KV, D], v[..., KV, D]; q and k rotated."""
        c = self.config
        h = rms_norm(x, self.attn_norm[...], c.norm_eps)
        q, k, v = self.project(h, "q"), self.project(h, "k"), self.project(h, "v")
        if c.qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        q = q.reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        k = k.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        v = v.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], c.norm_eps)
            k = rms_norm(k, self.k_norm[...], c.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x, attended):
        """Residual of attention [..., H, D], then the MLP."""
        x = x + self.project(attended.reshape(*x.shape[:-1], -1), "o")
        h = rms_norm(x, self.mlp_norm[...], self.config.norm_eps)
        return x + self.project(jax.nn.silu(self.project(h, "gate")) * self.project(h, "up"), "down")


class Decoder(nnx.Module):
    """Embedding, L blocks and the output head."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, dtype, lora: Lora | None = None):
        embed = jax.random.normal(rngs.params(), (c.vocab_size, c.hidden_size), jnp.float32) * 0.02
        self.embed = nnx.Param(embed.astype(dtype), axes=("vocab", "embed"))
        self.layers = nnx.vmap(lambda r: Block(c, r, dtype, lora))(rngs.split(c.num_layers))
        self.norm = nnx.Param(jnp.ones((c.hidden_size,), dtype), axes=("embed_norm",))
        if not c.tie_embeddings:
            head = jax.random.normal(rngs.params(), (c.hidden_size, c.vocab_size), jnp.float32)
            self.head = nnx.Param((head * c.hidden_size**-0.5).astype(dtype), axes=("embed", "vocab"))
        self.config = c

    def extend(self, parts: Sequence[Tokens], remat: str, chunk: int, kernel, mesh: Mesh | None):
        """hidden[P, N, E] of the parts' tokens, part after part, and each layer's keys and values of the first part's.

        parts: prompts or rows alone, or prompts [P, 1, S] and then rows [P, G, T] that continue them. Both go through
        a layer together: each of its products is one of all N = S + G · T tokens, and its weights have one gradient.
        """
        place = functools.partial(sharding.kept_by_prompt, mesh)
        x, cos, sin = self._embed(*(_together(parts, name) for name in ("ids", "positions")))
        graphdef, stacked = nnx.split(self.layers)
        each, same = self._windows()
        ends = list(itertools.accumulate(part.ids.shape[1] * part.ids.shape[2] for part in parts))

        def layer(x, xs):
            weights, window = xs
            block = nnx.merge(graphdef, weights)
            qkv = [jnp.split(y, ends[:-1], axis=1) for y in block.qkv(x, cos, sin)]
            out, keys = [], []
            for part, q, k, v in zip(parts, *qkv, strict=True):
                q, k, v = (y.reshape(*part.ids.shape, *y.shape[2:]) for y in (q, k, v))
                k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)
                before = keys[0].of_prompts() if keys else None
                keys.append(attention.Keys(k, v, part.positions, part.valid))
                limit = same if window is None else window
                attended = attention.attend(q, part.positions, keys[-1], before, limit, chunk, kernel)
                out.append(attended.reshape(x.shape[0], -1, *attended.shape[3:]))
            return place(block.finish(x, jnp.concatenate(out, axis=1))), KV(keys[0].k, keys[0].v)

        x, kv = jax.lax.scan(REMAT[remat](layer), place(x), (stacked, each))
        return rms_norm(x, self.norm[...], self.config.norm_eps), kv

    def decode(self, tokens, positions, index, prefix: Prefix, cache: KV, column, mesh: Mesh | None):
        """One token a row; its key and value go into `column` of the cache, in place inside a loop.

        The cache is a ring of C columns that all rows write at the same place, so a write is one slice and a
        row may start at any time: column c was written (column - c) mod C steps ago, and belongs to the row
        if it has lived that long. index: int32[P, G], the row's steps before this one (at most C - 1).
        """
        place = functools.partial(sharding.kept_by_prompt, mesh)
        x, cos, sin = self._embed(tokens[..., None], positions[..., None])
        age = (column - jnp.arange(cache.k.shape[4])) % cache.k.shape[4]
        key_positions = positions[..., None] - age
        graphdef, stacked = nnx.split(self.layers)
        each, same = self._windows()

        def layer(i, carry):
            x, cache = carry
            pick = functools.partial(jax.lax.dynamic_index_in_dim, index=i, axis=0, keepdims=False)
            weights, window = jax.tree.map(pick, (stacked, each))
            block = nnx.merge(graphdef, weights)
            q, k, v = block.qkv(x, cos, sin)

            def put(buffer, new):
                new = new.transpose(0, 3, 1, 2, 4)[None].astype(buffer.dtype)
                return jax.lax.dynamic_update_slice(buffer, new, (i, 0, 0, 0, column, 0))

            cache = KV(put(cache.k, k), put(cache.v, v))
            own, shared = jax.tree.map(pick, (cache, prefix.kv))
            own = attention.Keys(own.k, own.v, key_positions, age <= index[..., None])
            window = same if window is None else window
            out = attention.attend(q, positions[..., None], own, prefix.keys(shared), window)
            return place(block.finish(x, out)), cache

        x, cache = jax.lax.fori_loop(0, self.config.num_layers, layer, (place(x), cache))
        return rms_norm(x[..., 0, :], self.norm[...], self.config.norm_eps), cache

    def unembed(self, hidden):
        """hidden[..., E] → float32 logits[..., V]."""
        head = self.embed[...].T if self.config.tie_embeddings else self.head[...]
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    def _embed(self, tokens, positions):
        angles = positions[..., None].astype(jnp.float32) * self.config.inverse_frequencies()
        cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.magnitude != 1:
            cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
        return self.embed[...][tokens], cos, sin

    def _windows(self):
        """(each layer's window int32[L], None), or (None, the window of all layers)."""
        windows = self.config.windows()
        return (jnp.asarray(windows), None) if isinstance(windows, np.ndarray) else (None, windows)


# What the backward pass computes again: nothing, all of a layer, or all of it but the products with its weights.
REMAT = {
    "none": lambda layer: layer,
    "layer": functools.partial(jax.checkpoint, prevent_cse=False),
    "dots": functools.partial(
        jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def linear(x, weight):
    """x[..., E] @ weight[E, F] → [..., F], as one matrix product of all rows.

    On CPU the backward pass of a product with several leading dimensions runs at half the speed.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight


def rotate(x, cos, sin):
    """Rotary embedding of x[..., heads, D]; feature i pairs with i + D/2, as Hugging Face stores them."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@functools.lru_cache
def _abstract(config: ModelConfig, lora: Lora | None, dtype: str):
    """(graphdef, abstract state) of a decoder; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), jnp.dtype(dtype), lora)))


@dataclasses.dataclass(frozen=True)
class Model:
    """The static half of a decoder.

    remat: what the backward pass recomputes, a key of REMAT. lora: adapters beside its projections.
    attention_chunk: tokens of a row whose attention scores are alive at once; 0 is all.
    compute_dtype: of products and caches; "" is the parameters' own. Norms, rotary embeddings, softmax and logits
    are float32 always. attention: of prefill and learning, a name of kernels.kernel. mesh: of the devices
    that compute; None leaves the split of activations to the compiler.
    """

    config: ModelConfig
    remat: str = "none"
    lora: Lora | None = None
    compute_dtype: str = ""
    attention_chunk: int = 0
    attention: str = "xla"
    mesh: Mesh | None = None

    def on(self, mesh: Mesh) -> Model:
        """The model for parameters on this mesh."""
        return self if self.mesh == mesh else dataclasses.replace(self, mesh=mesh)

    def init(self, key, dtype="float32"):
        """Random parameters: a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, nnx.Rngs(key), jnp.dtype(dtype), self.lora)))

    def abstract_params(self, dtype="float32"):
        """Shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(_abstract(self.config, self.lora, dtype)[1])

    def axes(self):
        """Logical axis names of every parameter, in the parameters' tree; None where it was given none."""
        state = _abstract(self.config, self.lora, "float32")[1]
        flat = {path: variable.get_metadata().get("axes") for path, variable in nnx.to_flat_state(state)}
        return nnx.traversals.unflatten_mapping(flat)

    def cache_dtype(self, params):
        """Of keys and values."""
        return jnp.dtype(self.compute_dtype) if self.compute_dtype else params["embed"].dtype

    def cast(self, params):
        """The parameters in the compute dtype. A loop over tokens casts once, before it."""
        if not self.compute_dtype:
            return params
        return _cast(params, self.compute_dtype)

    def prefill(self, params, tokens, valid) -> Prefix:
        """Keys and values of prompts. tokens: int32[P, S]; valid: bool[P, S], padding at either side."""
        rows = _in_order(tokens[:, None], valid[:, None])
        _, kv = self._decoder(params).extend([rows], *self._how())
        return Prefix(jax.tree.map(lambda a: a[:, :, :, 0], kv), valid, rows.positions[:, 0])

    def extend(self, params, tokens, valid, prompts: tuple | None = None):
        """hidden[P, G, T, E] of rows. tokens, valid: [P, G, T]. prompts: (tokens, valid) [P, S] that they continue."""
        rows, before = _in_order(tokens, valid), []
        if prompts is not None:
            before = [_in_order(*(x[:, None] for x in prompts))]
            rows = rows._replace(positions=rows.positions + jnp.sum(prompts[1], axis=1, dtype=jnp.int32)[:, None, None])
        hidden, _ = self._decoder(params).extend([*before, rows], *self._how())
        return hidden[:, -tokens.shape[1] * tokens.shape[2] :].reshape(*tokens.shape, -1)

    def decode(self, params, tokens, positions, index, prefix: Prefix, cache: KV, column):
        """hidden[P, G, E] of one more token a row, and the cache with it; see Decoder.decode."""
        return self._decoder(params).decode(tokens, positions, index, prefix, cache, column, self.mesh)

    def unembed(self, params, hidden):
        """float32 logits[..., V]."""
        return self._decoder(params).unembed(hidden)

    def _how(self):
        """(remat, chunk, kernel, mesh) of Decoder.extend."""
        return self.remat, self.attention_chunk, kernels.kernel(self.attention, self.mesh), self.mesh

    def _decoder(self, params) -> Decoder:
        return nnx.merge(_abstract(self.config, self.lora, "float32")[0], self.cast(params))


def _in_order(tokens, valid) -> Tokens:
    """Tokens whose positions count the real ones."""
    return Tokens(tokens, jnp.maximum(jnp.cumsum(valid, axis=-1) - 1, 0).astype(jnp.int32), valid)


def _together(parts: Sequence[Tokens], name: str):
    """[P, N]: a field of all parts, one part after the other."""
    return jnp.concatenate([getattr(part, name).reshape(part.ids.shape[0], -1) for part in parts], axis=1)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params, dtype: str):
    return jax.tree.map(lambda w: w.astype(dtype), params)


def attach_lora(model: Model, params, lora: Lora, key):
    """(model, params) with new adapters beside the given base parameters, sharded by the same rules."""
    mesh, adapted = sharding.mesh_of(params), dataclasses.replace(model, lora=lora)
    where = sharding.params_shardings(mesh, adapted.axes(), adapted.abstract_params())
    # Only the adapters leave the jitted init, so that no second base is made.
    make = jax.jit(lambda key: split(adapted.init(key))[0], out_shardings=split(where)[0])
    return adapted, join(make(key), params)


def logits(model: Model, params, tokens, lengths=None):
    """Next-token logits float32[B, S, V] of right-padded tokens int32[B, S]; lengths int32[B], default S."""
    tokens = jnp.asarray(tokens)
    if lengths is None:
        valid = jnp.ones(tokens.shape, bool)
    else:
        valid = jnp.arange(tokens.shape[1]) < jnp.asarray(lengths)[:, None]
    hidden = model.extend(params, tokens[:, None], valid[:, None])[:, 0]
    return model.unembed(params, hidden)
