"""Group advantages: hand-computed values, ragged groups against a loop, and reported faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.algos.advantages import group_advantages, group_statistics, overlong_penalty

jitted = jax.jit(group_advantages, static_argnames=("num_groups", "baseline", "scale"))

REWARDS = jnp.array([1.0, 5.0, 0.0, 2.0, 3.0])
GROUPS = jnp.array([0, 1, 0, 1, 1])
BY_HAND = {
    ("mean", "std"): [1.0, 1.33631, -1.0, -1.06904, -0.26726],
    ("mean", "none"): [0.5, 1.66667, -0.5, -1.33333, -0.33333],
    ("loo", "none"): [1.0, 2.5, -1.0, -2.0, -0.5],
    ("loo", "std"): [2.0, 2.00446, -2.0, -1.60357, -0.40089],
}


@pytest.mark.parametrize("baseline, scale", BY_HAND)
def test_ragged_groups_in_any_order(baseline, scale, run):
    advantages = run(lambda r, g: group_advantages(r, g, 2, baseline=baseline, scale=scale))
    np.testing.assert_allclose(advantages(REWARDS, GROUPS), BY_HAND[baseline, scale], atol=1e-4)


@pytest.mark.parametrize("eps, expected", [(0.5, [0.5, -0.5]), (0.0, [1.0, -1.0])])
def test_eps_is_added_to_the_standard_deviation(eps, expected):
    advantages = jitted(jnp.array([1.0, 0.0]), jnp.zeros(2, int), num_groups=1, eps=eps)
    np.testing.assert_allclose(advantages, expected)


def test_groups_are_not_mixed(run):
    rewards, groups = jnp.array([0.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])
    advantages = run(lambda r, g: group_advantages(r, g, 2, eps=0.0))
    np.testing.assert_array_equal(advantages(rewards, groups), 0.0)


def test_survivors_of_filtering_keep_their_groups(run):
    """Of two prompts × 4, one row of the first is dropped and three of the second: four rows, two groups."""
    rewards, groups = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 1])
    advantages = run(lambda r, g: group_advantages(r, g, 2))(rewards, groups)
    np.testing.assert_allclose(advantages, [1.41421, -0.70711, -0.70711, 0.0], atol=1e-4)


@pytest.mark.parametrize("baseline, expected", [("mean", [1 / 3, -2 / 3, 0, 1 / 3]), ("loo", [0.5, -1, 0, 0.5])])
def test_unscorable_rows_enter_nothing(baseline, expected, run):
    groups, valid = jnp.zeros(4, int), jnp.array([True, True, False, True])
    advantages = run(
        lambda r, g, v: [group_advantages(r, g, 1, valid=v, baseline=baseline, scale=s) for s in ("none", "std")]
    )
    for unknown in (jnp.nan, jnp.inf, -jnp.inf, 7.0):
        raw, scaled = advantages(jnp.array([1.0, 0.0, unknown, 1.0]), groups, valid)
        np.testing.assert_allclose(raw, expected, atol=1e-6)
        np.testing.assert_allclose(scaled, np.divide(expected, 0.4714045), atol=1e-5)


def test_statistics_without_unscorable_rows(run):
    rewards, valid = jnp.array([1.0, 0.0, jnp.nan, 1.0, 8.0]), jnp.array([True, True, True, True, False])
    stats = run(lambda r, g, v: group_statistics(r, g, 1, valid=v))(rewards, jnp.zeros(5, int), valid)
    np.testing.assert_allclose([s[0] for s in stats], [3, 2 / 3, 0.4714045, 0, 1], rtol=1e-6)


def test_nan_without_a_valid_mask_is_unscorable():
    rewards = jnp.array([1.0, 0.0, jnp.nan, 1.0])
    advantages = jitted(rewards, jnp.zeros(4, int), num_groups=1, scale="none")
    np.testing.assert_allclose(advantages, [1 / 3, -2 / 3, 0, 1 / 3], atol=1e-6)


def test_rows_outside_the_groups_are_padding(run):
    rewards, groups = jnp.array([1.0, 9.0, 0.0, 9.0]), jnp.array([0, -1, 0, 1])
    advantages = run(lambda r, g: group_advantages(r, g, 1, eps=0.0))(rewards, groups)
    np.testing.assert_allclose(advantages, [1.0, 0.0, -1.0, 0.0], rtol=1e-6)


def test_leave_one_out_is_scaled_by_the_whole_group(run):
    """The last row's peers are equal up to rounding: their own deviation would be about 1e-8."""
    rewards = jnp.array([0.35] * 7 + [0.95])
    advantages = run(lambda r, g: group_advantages(r, g, 1, baseline="loo"))(rewards, jnp.zeros(8, int))
    np.testing.assert_allclose(advantages, [-0.43195] * 7 + [3.02370], atol=1e-4)


def test_rounding_noise_is_no_signal():
    rewards = jnp.array([0.35, 0.35 + 3e-8, 0.35])
    assert rewards[1] != rewards[0]
    assert np.abs(jitted(rewards, jnp.zeros(3, int), num_groups=1)).max() < 0.1


@pytest.mark.parametrize("baseline, scale", BY_HAND)
def test_equal_rewards_have_exactly_no_advantage(baseline, scale):
    """Also where the mean of equal rewards is off by rounding, with nothing added to σ; and groups of one."""
    groups = jnp.array([0] * 7 + [1])
    for value in (0.0, 0.1, 1e6, -3.3):
        advantages = jitted(jnp.full(8, value), groups, num_groups=2, baseline=baseline, scale=scale, eps=0.0)
        np.testing.assert_array_equal(advantages, 0.0)


def test_a_large_common_offset_does_not_cancel():
    advantages = jitted(jnp.array([1e5, 1e5 + 1]), jnp.zeros(2, int), num_groups=1)
    np.testing.assert_allclose(advantages, [-1.0, 1.0], rtol=1e-4)


def test_statistics_and_signal(run):
    rewards, groups = jnp.array([1.0, 0.0, 3.0, 3.0, 5.0]), jnp.array([0, 0, 1, 1, 3])
    stats = run(lambda r, g: group_statistics(r, g, 4))(rewards, groups)
    np.testing.assert_array_equal(stats.count, [2, 2, 0, 1])
    np.testing.assert_array_equal(stats.mean, [0.5, 3, 0, 5])
    np.testing.assert_array_equal(stats.std, [0.5, 0, 0, 0])
    np.testing.assert_array_equal(stats.minimum, [0, 3, 0, 5])
    np.testing.assert_array_equal(stats.maximum, [1, 3, 0, 5])
    np.testing.assert_array_equal(stats.signal, [True, False, False, False])


def loop(rewards, groups, valid, baseline, scale):
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        rows = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if not valid[i] or len({rewards[j] for j in rows}) < 2:
            continue
        peers = [j for j in rows if baseline == "mean" or j != i]
        sigma = np.std([rewards[j] for j in rows]) + 1e-6 if scale == "std" else 1.0
        out[i] = (rewards[i] - np.mean([rewards[j] for j in peers])) / sigma
    return out


@given(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3), st.booleans()), min_size=10, max_size=10),
    st.sampled_from(sorted(BY_HAND)),
)
@settings(max_examples=100, deadline=None)
def test_equals_a_loop_over_rows(rows, names):
    rewards, groups, valid = (np.array(column) for column in zip(*rows, strict=True))
    baseline, scale = names
    advantages = jitted(rewards / 4, groups, num_groups=4, valid=valid, baseline=baseline, scale=scale)
    np.testing.assert_allclose(advantages, loop(rewards / 4, groups, valid, baseline, scale), atol=2e-5)


def test_overlong_penalty(run):
    penalty = run(lambda length: overlong_penalty(length, max_length=20, buffer=8))
    np.testing.assert_array_equal(penalty(jnp.array([0, 12, 14, 18, 20, 25])), [0, 0, -0.25, -0.75, -1, -1])


ONES = jnp.ones(2)
IDS = jnp.zeros(2, int)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: group_advantages(ONES, IDS, 1, baseline="median"),
            "unknown baseline 'median'; known: 'mean', 'loo'",
        ),
        (lambda: group_advantages(ONES, IDS, 1, scale="var"), "unknown scale 'var'; known: 'std', 'none'"),
        (lambda: group_advantages(ONES, IDS, 1, eps=-1.0), "eps must be ≥ 0, got -1.0"),
        (lambda: group_advantages(ONES, IDS[:1], 1), r"rewards \(2,\), group_ids \(1,\)"),
        (lambda: group_advantages(ONES[None], IDS[None], 1), r"must be \[R\].*\(1, 2\)"),
        (lambda: group_advantages(ONES, IDS, 0), "num_groups 0"),
        (lambda: overlong_penalty(IDS, max_length=4, buffer=5), "got 5 of max_length 4"),
        (lambda: overlong_penalty(IDS, max_length=4, buffer=0), r"in \[1, max_length\], got 0"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
