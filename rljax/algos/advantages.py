"""Rewards → advantages over ragged groups, and reward shaping by length.

Sources: GRPO (arXiv 2402.03300, section 4.1.2), Dr. GRPO (2503.20783, section 3.2), RLOO (2402.14740, section
2.2), DAPO (2503.14476, section 3.4).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rljax.algos.masked import as_float, check_same_shape, choose, fill, safe_divide

# dev: reward - mean of the whole group. n: usable rows of the group.
# r_i - mean of the n - 1 others = (r_i - mean) n / (n - 1)
BASELINES = {
    "mean": lambda dev, n: dev,
    "loo": lambda dev, n: dev * n / jnp.maximum(n - 1.0, 1.0),
}
SCALES = {
    "std": lambda dev, std, eps: safe_divide(dev, std + eps),
    "none": lambda dev, std, eps: dev,
}


class GroupStatistics(NamedTuple):
    """Rewards of each group over its usable rows; float32[num_groups] each, all 0 for a group without any.

    count: usable rows. mean, std: with the variance of the population. minimum, maximum.
    """

    count: jax.Array
    mean: jax.Array
    std: jax.Array
    minimum: jax.Array
    maximum: jax.Array

    @property
    def signal(self) -> jax.Array:
        """bool[num_groups]: the rewards are not all equal, so that the group has advantages other than 0."""
        return self.maximum > self.minimum


def _usable(rewards, group_ids, num_groups, valid):
    """bool[R]: rows with a finite reward and a group, not declared invalid; and the shape checks."""
    check_same_shape(rewards=rewards, group_ids=group_ids, valid=valid)
    if jnp.ndim(rewards) != 1 or num_groups < 1:
        raise ValueError(
            f"rewards must be [R] and num_groups ≥ 1, got {jnp.shape(rewards)} and num_groups {num_groups}"
        )
    usable = jnp.isfinite(as_float(rewards)) & (group_ids >= 0) & (group_ids < num_groups)
    return usable if valid is None else usable & jnp.asarray(valid, bool)


def group_statistics(
    rewards: ArrayLike, group_ids: ArrayLike, num_groups: int, *, valid: ArrayLike | None = None
) -> GroupStatistics:
    """Count, mean, population standard deviation, minimum and maximum of the rewards of each group.

    The variance takes two passes, mean then squared deviations, so that a large offset does not cancel.
    rewards: float[R]. group_ids: int[R] in any order. valid: bool[R]. Rows that are not valid, not
    finite or of a group outside [0, num_groups) enter nothing. Raises ValueError for other shapes.
    """
    group_ids = jnp.asarray(group_ids)
    usable = _usable(rewards, group_ids, num_groups, valid)
    r = fill(rewards, usable)
    ids = jnp.where(usable, group_ids, num_groups)  # one past the end: the segment sums drop it
    at = jnp.clip(group_ids, 0, num_groups - 1)

    def total(x):
        return jax.ops.segment_sum(x, ids, num_groups)

    count = total(jnp.ones_like(r))
    some = count > 0
    mean = safe_divide(total(r), count)
    variance = safe_divide(total(fill(r - mean[at], usable) ** 2), count)
    minimum = jnp.where(some, jax.ops.segment_min(r, ids, num_groups), 0.0)
    maximum = jnp.where(some, jax.ops.segment_max(r, ids, num_groups), 0.0)
    spread = (maximum > minimum) & (variance > 0)  # sqrt has no gradient at 0
    std = jnp.where(spread, jnp.sqrt(jnp.where(spread, variance, 1.0)), 0.0)
    return GroupStatistics(count, mean, std, minimum, maximum)


def group_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    num_groups: int,
    *,
    valid: ArrayLike | None = None,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 1e-6,
) -> jax.Array:
    """A_i = (r_i - b_i) / (σ + eps) with the statistics of i's own group.

    baseline "mean": b_i = mean of the group (GRPO); "loo": mean of the other rows (RLOO). scale "std": σ is
    the population standard deviation of the WHOLE group, also under "loo": without row i, its peers may
    differ by rounding only, and a σ of 1e-8 makes an advantage in the thousands. scale "none": divided by 1
    (Dr. GRPO).

    rewards: float[R]. group_ids: int[R], in any order, groups of any size. num_groups: static.
    valid: bool[R], False where the reward is not known. Invalid rows, also those whose reward is not finite
    or whose group is outside [0, num_groups), get 0 and enter no statistics. A group whose rewards are all
    equal, and so also a group of one, gets exactly 0; count them with ``group_statistics``.
    Returns float32[R]. Raises ValueError for an unknown baseline or scale, eps < 0, or shapes other than [R].
    Source: arXiv 2402.03300 section 4.1.2; 2503.20783 section 3.2; 2402.14740 section 2.2.
    """
    subtract, divide = choose(BASELINES, baseline, "baseline"), choose(SCALES, scale, "scale")
    if isinstance(eps, (int, float)) and eps < 0:
        raise ValueError(f"eps must be ≥ 0, got {eps}")
    group_ids = jnp.asarray(group_ids)
    usable = _usable(rewards, group_ids, num_groups, valid)
    stats = group_statistics(rewards, group_ids, num_groups, valid=valid)
    at = jnp.clip(group_ids, 0, num_groups - 1)
    dev = fill(rewards, usable) - stats.mean[at]
    scaled = divide(subtract(dev, stats.count[at]), stats.std[at], eps)
    return fill(scaled, usable & stats.signal[at])


def overlong_penalty(lengths: ArrayLike, *, max_length: int, buffer: int) -> jax.Array:
    """DAPO's soft overlong punishment, to be added to the rewards before the advantages.

    0 for L ≤ max_length - buffer; (max_length - buffer - L) / buffer up to max_length; -1 beyond, so that a
    completion cut at max_length has -1.
    lengths: int[...] tokens. max_length, buffer: tokens, static. Returns float32[...] in [-1, 0].
    Raises ValueError unless 1 ≤ buffer ≤ max_length. Source: arXiv 2503.14476 equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be in [1, max_length], got {buffer} of max_length {max_length}")
    return jnp.clip((max_length - buffer - as_float(lengths)) / buffer, -1.0, 0.0)
