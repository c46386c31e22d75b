"""Which m of a prompt's n rollouts to learn from: PODS (arXiv 2504.13818).

Rollouts cost inference, which batches well; updates cost memory and communication. So generate n and keep the
m that carry the most signal: the subset of greatest reward variance. It always consists of the k highest and
the m - k lowest rewards for some k (theorem 1 of the paper), so that one sort and m + 1 candidates replace
the search over all subsets.

Letters: P prompts, n rollouts a prompt, m kept. Ragged groups are padded to n with valid=False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from rljax.algos.advantages import group_advantages
from rljax.algos.masked import as_float, check_same_shape, choose, fill, masked_count, masked_mean

VARIANCE_TOLERANCE = 1e-6  # times range²: variances this close are equal, so that rounding decides nothing


def _sorted_rows(keys_Pn, valid_Pn):
    """(keys ascending, their row indices); equal keys by index, invalid rows last, by index too."""
    last = jnp.inf if jnp.issubdtype(keys_Pn.dtype, jnp.floating) else jnp.iinfo(keys_Pn.dtype).max
    keys_Pn = jnp.where(valid_Pn, keys_Pn, jnp.asarray(last, keys_Pn.dtype))
    rows_Pn = lax.broadcasted_iota(jnp.int32, keys_Pn.shape, 1)
    return lax.sort((keys_Pn, rows_Pn), dimension=1, is_stable=True, num_keys=1)


def _at(x_Pn, positions_Pm):
    return jnp.take_along_axis(x_Pn, positions_Pm, axis=1)


def _best_number_of_highest(low_Pm, high_Pm, m):
    """k[P] that maximises the variance of the k highest and m - k lowest rewards.

    low_Pm: the m lowest rewards, ascending. high_Pm: the m highest, descending. Centred on the middle of the
    range and scaled by it, so that the tolerance is one number and nothing overflows.
    """
    range_P1 = high_Pm[:, :1] - low_Pm[:, :1]
    scale = jnp.where(range_P1 > 0, range_P1, 1.0)
    middle = low_Pm[:, :1] + 0.5 * range_P1

    def prefix_sums(x):
        return jnp.pad(jnp.cumsum(x, axis=1), ((0, 0), (1, 0)))  # entry j: of the first j

    low, high = (low_Pm - middle) / scale, (high_Pm - middle) / scale
    sums = prefix_sums(high) + prefix_sums(low)[:, ::-1]  # entry k: k highest, m - k lowest
    squares = prefix_sums(high**2) + prefix_sums(low**2)[:, ::-1]
    variance = squares / m - (sums / m) ** 2
    equal = variance >= jnp.max(variance, axis=1, keepdims=True) - VARIANCE_TOLERANCE
    k = jnp.arange(m + 1)
    preference = 2 * jnp.abs(2 * k - m) - (2 * k > m)  # nearest m/2 first, of two as near the larger
    return jnp.argmin(jnp.where(equal, preference, 2 * m + 1), axis=1)


def _ends(rewards_Pn, valid_Pn, m, number_of_highest: Callable):
    """Rows of the m - k lowest and the k highest rewards; of equal rewards always those of lowest index.

    The ascending sort puts equal rewards by index, which is right at the low end. At the high end the last k
    would take the highest indices of the value at the boundary; those are moved down to the first places of
    that value that the low end leaves free.
    """
    values_Pn, rows_Pn = _sorted_rows(rewards_Pn, valid_Pn)
    count_P1 = jnp.sum(valid_Pn, axis=1, keepdims=True, dtype=jnp.int32)
    slots = jnp.arange(m, dtype=jnp.int32)
    from_top_Pm = jnp.clip(count_P1 - 1 - slots, 0)
    low, high = values_Pn[:, :m], _at(values_Pn, from_top_Pm)
    enough = count_P1 > m  # else every valid row is kept: the first m places are just that
    low, high = jnp.where(enough, low, 0.0), jnp.where(enough, high, 0.0)  # no inf of the invalid rows
    k_P1 = jnp.where(enough, number_of_highest(low, high, m)[:, None].astype(jnp.int32), 0)

    positions = jnp.where(slots < m - k_P1, slots, slots + count_P1 - m)
    first_high = jnp.clip(count_P1 - k_P1, 0, values_Pn.shape[1] - 1)
    boundary = _at(values_Pn, first_high)
    below = jnp.sum(values_Pn < boundary, axis=1, keepdims=True, dtype=jnp.int32)
    shift = first_high - jnp.maximum(below, m - k_P1)
    moved = (slots >= m - k_P1) & (_at(values_Pn, positions) == boundary)
    return _at(rows_Pn, jnp.where(moved, positions - shift, positions))


def _max_variance(rewards, valid, m, key):
    return _ends(rewards, valid, m, _best_number_of_highest)


def _max_reward(rewards, valid, m, key):
    return _ends(rewards, valid, m, lambda low, high, m: jnp.full(low.shape[0], m))


def _percentile(rewards, valid, m, key):
    _, rows = _sorted_rows(rewards, valid)
    count = jnp.sum(valid, axis=1, keepdims=True, dtype=jnp.int32)
    slots = jnp.arange(m, dtype=jnp.int32)
    spread = (2 * slots + 1) * count // (2 * m)
    return _at(rows, jnp.where(count > m, spread, slots))


def _random(rewards, valid, m, key):
    if key is None:
        raise ValueError("rule='random' needs key, a jax.random key")
    bits = jax.random.bits(key, rewards.shape, jnp.uint32) >> 1  # below the key of invalid rows
    return _sorted_rows(bits, valid)[1][:, :m]


def _all(rewards, valid, m, key):
    n = rewards.shape[1]
    if m != n:
        raise ValueError(f"rule='all' keeps all {n} rows, got keep={m}")
    return lax.broadcasted_iota(jnp.int32, rewards.shape, 1)


RULES = {
    "max_variance": _max_variance,
    "max_reward": _max_reward,
    "random": _random,
    "percentile": _percentile,
    "all": _all,
}


def _valid_rewards(rewards, valid):
    if jnp.ndim(rewards) != 2:
        raise ValueError(f"rewards must be [P, n], got shape {jnp.shape(rewards)}")
    check_same_shape(rewards=rewards, valid=valid)
    rewards = as_float(rewards)
    finite = jnp.isfinite(rewards)
    return rewards, finite if valid is None else finite & jnp.asarray(valid, bool)


def down_sample(
    rewards: ArrayLike,
    keep: int,
    *,
    rule: str,
    valid: ArrayLike | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rows to learn from: (indices int32[P, m], kept bool[P, m]).

    "max_variance": the size-m subset of greatest variance (Σr²/m - (Σr/m)²); of variances within 1e-6 ·
    range² the one whose number k of highest rewards is nearest m/2, then the larger k. "max_reward": the m
    highest. "percentile": sorted positions ⌊(i + ½) n/m⌋. "random": uniform without replacement. "all": every
    row, m = n. Of equal rewards those of lowest index are taken first (not "random"). O(n log n) a prompt.

    rewards: float[P, n]. keep: m, static, 1 ≤ m ≤ n. valid: bool[P, n]; rows that are not valid, or whose
    reward is not finite, are never kept, and n above counts the others. key: for "random" only.
    Each row of indices holds m different rows; where fewer than m are valid, all of those are kept and the
    remaining entries have kept False. Apply both to every per-row array (``take_rows``).
    Raises ValueError for an unknown rule, m outside [1, n], "all" with m ≠ n, "random" without key, wrong
    shapes. Source: arXiv 2504.13818, section 3 and algorithm 2.
    """
    select = choose(RULES, rule, "rule")
    rewards, valid = _valid_rewards(rewards, valid)
    if not 1 <= keep <= rewards.shape[1]:
        raise ValueError(f"keep must be in [1, n], got keep={keep} of n={rewards.shape[1]} rollouts")
    indices = select(rewards, valid, keep, key)
    return indices, _at(valid, indices)


def take_rows(tree: Any, indices: ArrayLike) -> Any:
    """Every array [P, n, ...] of the tree → [P, m, ...], gathered by the same indices int[P, m]."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(jnp.asarray(x), jnp.asarray(indices)), tree)


def _over_kept(rewards, valid, indices, kept, settings):
    return _rectangular(_at(rewards, indices), kept, settings)


def _over_all(rewards, valid, indices, kept, settings):
    return fill(_at(_rectangular(rewards, valid, settings), indices), kept)


NORMALIZE_OVER = {"kept": _over_kept, "all": _over_all}


def _rectangular(rewards, valid, settings):
    P, n = rewards.shape
    if n == 1:
        raise ValueError("a group of one rollout has no advantage: keep or sample at least 2")
    groups = jnp.repeat(jnp.arange(P), n)
    return group_advantages(rewards.reshape(-1), groups, P, valid=valid.reshape(-1), **settings).reshape(P, n)


def kept_advantages(
    rewards: ArrayLike,
    indices: ArrayLike,
    kept: ArrayLike,
    *,
    normalize_over: str,
    valid: ArrayLike | None = None,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 1e-6,
) -> jax.Array:
    """Advantages of the kept rows, ``group_advantages`` with the statistics of one of two sets of rows.

    normalize_over "kept": the m kept rows (the paper); "all": all valid rows of the n.
    rewards: float[P, n]. indices, kept: [P, m] of ``down_sample``. valid: bool[P, n]. Returns float32[P, m],
    0 where not kept. Raises ValueError for unknown names, wrong shapes, and groups of one by configuration.
    Source: arXiv 2504.13818 section 3.1.
    """
    compute = choose(NORMALIZE_OVER, normalize_over, "normalize_over")
    rewards, valid = _valid_rewards(rewards, valid)
    settings = {"baseline": baseline, "scale": scale, "eps": eps}
    return compute(rewards, valid, jnp.asarray(indices), jnp.asarray(kept, bool), settings)


def reward_metrics(
    rewards: ArrayLike, indices: ArrayLike, kept: ArrayLike, *, valid: ArrayLike | None = None
) -> dict[str, jax.Array]:
    """Rewards of ALL rollouts, and of the kept subset beside them; float32 scalars.

    rewards: float[P, n]. indices, kept: [P, m]. valid: bool[P, n].
    reward_mean, kept_reward_mean: over rows. reward_variance, kept_reward_variance: population variance of a
    prompt's rows, averaged over the prompts that have any. kept_rows: their number.
    """
    rewards, valid = _valid_rewards(rewards, valid)
    kept = jnp.asarray(kept, bool)
    kept_rewards = _at(rewards, jnp.asarray(indices))

    def variance(x, mask):
        dev = fill(x, mask) - masked_mean(x, mask, axis=1)[:, None]
        return masked_mean(masked_mean(dev**2, mask, axis=1), jnp.any(mask, axis=1))

    return {
        "reward_mean": masked_mean(rewards, valid),
        "reward_variance": variance(rewards, valid),
        "kept_reward_mean": masked_mean(kept_rewards, kept),
        "kept_reward_variance": variance(kept_rewards, kept),
        "kept_rows": masked_count(kept),
    }
