"""Reductions over the part of an array that counts, and the checks that all algorithms share.

What a mask hides is replaced before any arithmetic, never multiplied by zero afterwards: 0 * inf and 0 * NaN
are NaN, in the value and once more in the gradient. So the hidden values may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Choice = TypeVar("Choice")
Axis = int | tuple[int, ...] | None

# A ratio of probabilities beyond e^±20 (4.9e8) comes from two models that have nothing to do with each other.
MAX_LOG_RATIO = 20.0


def choose(table: Mapping[str, Choice], name: str, key: str) -> Choice:
    """table[name]; raises ValueError that names the key, the value and the known ones."""
    if name not in table:
        raise ValueError(f"unknown {key} {name!r}; known: {', '.join(map(repr, table))}")
    return table[name]


def check_same_shape(**arrays: ArrayLike | None) -> None:
    """Raises ValueError if the given arrays (None is skipped) are not all of one shape."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items() if array is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must be the same, got {', '.join(f'{k} {v}' for k, v in shapes.items())}")


def as_float(x: ArrayLike) -> jax.Array:
    """x in float32, or in its own type where that is more precise: bfloat16 is for storage, not for sums."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def fill(x: ArrayLike, mask: ArrayLike, value: float = 0.0) -> jax.Array:
    """x where mask, else value; shapes that broadcast. The gradient behind the mask is exactly 0."""
    return jnp.where(jnp.asarray(mask, bool), as_float(x), value)


def masked_sum(x: ArrayLike, mask: ArrayLike, axis: Axis = None) -> jax.Array:
    """Σ x over mask along axis (all axes by default), float32; an empty mask gives 0."""
    return jnp.sum(fill(x, mask), axis=axis)


def masked_count(mask: ArrayLike, axis: Axis = None) -> jax.Array:
    """Number of true entries along axis, as float32 (exact to 2^24)."""
    return jnp.sum(jnp.asarray(mask, bool), axis=axis, dtype=jnp.int32).astype(jnp.float32)


def masked_mean(x: ArrayLike, mask: ArrayLike, axis: Axis = None) -> jax.Array:
    """Mean of x over mask along axis, float32; an empty mask gives 0, with gradient 0."""
    x, mask = jnp.broadcast_arrays(as_float(x), jnp.asarray(mask, bool))
    return safe_divide(masked_sum(x, mask, axis), masked_count(mask, axis))


def masked_max(x: ArrayLike, mask: ArrayLike, axis: Axis = None, *, empty: float = 0.0) -> jax.Array:
    """Maximum of x over mask along axis, float32; `empty` where the mask is empty."""
    x, mask = jnp.broadcast_arrays(as_float(x), jnp.asarray(mask, bool))
    return jnp.where(jnp.any(mask, axis=axis), jnp.max(fill(x, mask, -jnp.inf), axis=axis), empty)


def safe_divide(numerator: ArrayLike, denominator: ArrayLike) -> jax.Array:
    """numerator / denominator, float32; 0 where the denominator is 0, with gradient 0 to both."""
    denominator = as_float(denominator)
    nonzero = denominator != 0
    return jnp.where(nonzero, as_float(numerator) / jnp.where(nonzero, denominator, 1.0), 0.0)


def bounded_exp(log_ratio: ArrayLike) -> jax.Array:
    """exp(x) for |x| ≤ 20; beyond, the constant e^±20 with gradient 0. Finite for every x but NaN."""
    return jnp.exp(jnp.clip(as_float(log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def merge_sums(parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """The metrics of several micro-batches as those of their union.

    parts: dicts with the same keys, of sums, except keys that end in "_max": maxima of values ≥ 0.
    Returns one dict: sums added, maxima compared. Zeros change nothing, so they start an accumulation.
    Raises ValueError if parts is empty or the keys differ.
    """
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"merge_sums needs dicts with the same keys, got {[sorted(part) for part in parts]}")
    merged = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            join = jnp.maximum if name.endswith("_max") else jnp.add
            merged[name] = join(merged[name], value)
    return merged
