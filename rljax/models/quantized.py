"""A copy of a model in fewer bits, to make rollouts with: bfloat16, or int8 weights with a scale a channel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.models import lora
from rljax.models.config import ModelConfig
from rljax.models.transformer import KV, Model, Prefix
from rljax.types import LearnerState


class Int8(NamedTuple):
    """A matrix as values · scale. values: int8[..., in, out]; scale: one a channel that the product keeps."""

    values: Any
    scale: Any


def quantize(params):
    """Every matrix of a decoder's parameters as Int8, rounded to nearest; norms and biases stay.

    A channel's scale is its largest magnitude / 127: of an output of a projection, of a row of the embedding.
    """

    def one(path, w):
        name = path[-1].key
        if name.endswith("norm") or name.endswith("bias"):
            return w
        axis = -1 if name == "embed" else -2
        largest = jnp.max(jnp.abs(w.astype(jnp.float32)), axis=axis, keepdims=True)
        scale = jnp.where(largest > 0, largest / 127, 1.0)
        return Int8(jnp.round(w / scale).astype(jnp.int8), scale.astype(w.dtype))

    return jax.tree_util.tree_map_with_path(one, params)


def dequantize(params):
    """The parameters that the Int8 leaves stand for, in their scales' dtype."""

    def one(w):
        return w.values.astype(w.scale.dtype) * w.scale if isinstance(w, Int8) else w

    return jax.tree.map(one, params, is_leaf=lambda w: isinstance(w, Int8))


@dataclasses.dataclass(frozen=True)
class Quantized:
    """`model` with parameters of `quantize`: what engine and learner call, computed in the scales' dtype."""

    model: Model

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def on(self, mesh: Mesh) -> Quantized:
        return Quantized(self.model.on(mesh))

    def cache_dtype(self, params):
        return self.model.cache_dtype({"embed": params["embed"].scale})

    def cast(self, params):
        return params

    def prefill(self, params, tokens, valid) -> Prefix:
        return self.model.prefill(dequantize(params), tokens, valid)

    def extend(self, params, tokens, valid, prompts: tuple | None = None):
        return self.model.extend(dequantize(params), tokens, valid, prompts)

    def decode(self, params, tokens, positions, index, prefix: Prefix, cache: KV, column):
        return self.model.decode(dequantize(params), tokens, positions, index, prefix, cache, column)

    def unembed(self, params, hidden):
        return self.model.unembed(dequantize(params), hidden)


def _bfloat16(model: Model, params):
    return model, jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)


# actor.dtype → (model, params) of the copy
COPIES = {
    "": lambda model, params: (model, params),
    "bfloat16": _bfloat16,
    "int8": lambda model, params: (Quantized(model), quantize(params)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _copied(copy: str, model: Model, params):
    return COPIES[copy](dataclasses.replace(model, lora=None), lora.merge(params, model.lora))[1]


def behaviour_of(model: Model, state: LearnerState, actor_model: Model | None, dtype: str):
    """(model, params) that make the rollouts: the actor's, or the policy's own in `dtype` (a key of COPIES)."""
    if state.actor is not None:
        return actor_model, state.actor.params
    return rounded(model, lora.whole(state), dtype)


def rounded(model: Model, params, dtype: str):
    """(model, params) of a copy in `dtype`, a key of COPIES, adapters merged; of themselves where that is ""."""
    if not dtype:
        return model, params
    plain = dataclasses.replace(model, lora=None)
    return (Quantized(plain) if dtype == "int8" else plain), _copied(dtype, model, params)
