"""Statistics of scored completions, by hand and by enumeration."""

import itertools
import tracemalloc

import numpy as np
import pytest

from rljax import estimates


@pytest.mark.parametrize("n, k", [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, k):
    for right in range(n + 1):
        row = [i < right for i in range(n)]
        want = np.mean([any(subset) for subset in itertools.combinations(row, k)])
        assert estimates.pass_at_k(np.array([right]), n, k)[0] == pytest.approx(want, abs=1e-12)


def test_pass_at_k_by_hand_and_for_many_samples():
    np.testing.assert_allclose(estimates.pass_at_k(np.array([0, 1, 2, 4]), 4, 2), [0, 0.5, 5 / 6, 1])
    assert estimates.pass_at_k(np.array([1]), 10_000, 100)[0] == pytest.approx(0.01)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} of 4 samples"):
            estimates.pass_at_k(np.array([1]), 4, k)


@pytest.mark.parametrize(
    "answers, rewards, want",
    [
        (["7", "8", "7"], [1, 0, 1], 1),
        (["7", "8", "8"], [1, 0, 0], 0),
        (["7", "8"], [1, 0], 1),  # a tie: the first given
        ([None, None, "8"], [0, 0, 1], 1),  # no answer has no vote
        ([None, None], [0, 0], 0),
    ],
)
def test_majority(answers, rewards, want):
    assert estimates.majority(answers, rewards) == want


def test_interval_has_the_width_of_the_normal_one():
    """Of 400 coins: .5 ± 1.96 · .5 / 20."""
    low, high = estimates.interval(np.arange(400) % 2)
    assert (low, high) == pytest.approx((0.451, 0.549), abs=0.005)
    assert estimates.interval(np.ones(7)) == (1, 1)
    assert estimates.interval(np.arange(400) % 2) == (low, high)  # seeded
    narrow = estimates.interval(np.arange(400) % 2, level=0.5)
    assert narrow == pytest.approx((0.4831, 0.5169), abs=0.004)


def test_interval_of_many_prompts_takes_little_memory():
    """The resamples' counts of 20,000 prompts would be 320 MB together; the numbers are those of one draw of all."""
    values = np.random.default_rng(1).random(20_000)
    tracemalloc.start()
    low, high = estimates.interval(values, resamples=250)
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()
    counts = np.random.default_rng(0).multinomial(20_000, np.full(20_000, 1 / 20_000), size=250)
    assert (low, high) == pytest.approx(tuple(np.quantile(counts @ values / 20_000, [0.025, 0.975])), rel=1e-12)
