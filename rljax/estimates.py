"""Statistics of scored completions: unbiased pass@k, majority votes and bootstrap intervals. NumPy only."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

_AT_ONCE = 100  # resamples whose counts of every prompt are in memory together


def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that one of k samples is right (arXiv 2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k), as a product that cannot overflow. right: int[P], c right ones of n samples a prompt.
    Returns float64[P]. ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples a prompt; k is to be 1 to {n}")
    wrong = n - np.asarray(right)[:, None]
    factors = 1 - k / np.arange(1, n + 1)
    # of the factors of C(n - c, k) / C(n, k) = Π_{i = n - c + 1}^{n} (1 - k / i), those below are 1
    kept = np.where(np.arange(1, n + 1) > wrong, factors, 1.0)
    return 1 - np.maximum(kept, 0).prod(axis=1)


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Reward of the answer that most samples give (maj@k, arXiv 2203.11171); of several, the first given.

    None is no answer and has no vote; 0.0 if no sample has an answer.
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = votes.most_common(1)[0][0]
    return float(rewards[list(answers).index(most)])


def interval(values: np.ndarray, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean of values[P]: prompts are drawn again, with replacement."""
    values = np.asarray(values, np.float64)
    P, rng = len(values), np.random.default_rng(seed)
    sizes = np.diff(np.append(np.arange(0, resamples, _AT_ONCE), resamples))
    means = np.concatenate([rng.multinomial(P, np.full(P, 1 / P), size=size) @ values / P for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
