"""PODS against brute force and by hand; which rows are kept, and the advantages of those."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.algos.down_sampling import down_sample, kept_advantages, reward_metrics, take_rows

PAPER = jnp.array([[0.9, 0.8, 0.5, 0.4, 0.1]])
sample = jax.jit(down_sample, static_argnames=("keep", "rule"))


def chosen(rewards, keep, valid=None, rule="max_variance", key=None):
    """The kept rows of one prompt, as a set, in one checked call."""
    rewards = jnp.asarray(rewards, jnp.float32)[None]
    valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid, bool)[None]
    indices, kept = sample(rewards, keep, rule=rule, valid=valid, key=key)
    assert indices.shape == kept.shape == (1, keep) and indices.dtype == jnp.int32 and kept.dtype == bool
    assert len(set(indices[0].tolist())) == keep and set(indices[0].tolist()) <= set(range(rewards.shape[1]))
    return {int(i) for i, k in zip(indices[0], kept[0], strict=True) if k}


# ---------------------------------------------------------------- by hand


def test_the_papers_example(run):
    """{0, 1, 4}: one low and two high rewards, variance .12667; beside it a prompt that takes two low ones."""
    rewards = jnp.concatenate([PAPER, 1 - PAPER, PAPER + 1e4])
    indices, kept = run(lambda r: down_sample(r, 3, rule="max_variance"))(rewards)
    np.testing.assert_array_equal(np.sort(indices), [[0, 1, 4]] * 3)
    assert kept.all()
    np.testing.assert_allclose(np.var(take_rows(rewards, indices)[:2], axis=1), 0.12667, atol=1e-5)


@pytest.mark.parametrize(
    "rewards, keep, expected",
    [
        ([0, 1, 0, 1, 1, 0, 1, 0], 4, {0, 2, 1, 3}),  # binary: half and half, lowest indices of each
        ([0, 1, 0, 0, 0, 0, 0, 0], 4, {1, 0, 2, 3}),  # too few ones: all of them
        ([1, 1, 1, 1, 0, 1, 1, 1], 4, {4, 0, 1, 2}),
        ([0, 1, 0, 1, 1, 0, 1, 0], 3, {0, 1, 3}),  # odd: variances are equal, the larger k
        ([2, 2, 2, 2, 2, 2, 2, 2], 3, {0, 1, 2}),  # nothing to tell apart: index order
        ([5, 3, 3, 3, 3, 3, 3, 1], 4, {0, 7, 1, 2}),  # the middle value comes from both ends
        ([3, 0, 3, 1, 2, 1, 0, 2], 4, {1, 6, 0, 2}),
        ([0, 9, 8, 9, 9, 0, 9, 1], 2, {0, 1}),  # ties at the high end: the lowest index, not the last sorted
        ([4, 1, 2, 3, 0, 1, 2, 3], 1, {0}),  # variance 0 whatever is kept: k = 1, the highest
        ([4, 1, 2, 3, 0, 1, 2, 3], 8, set(range(8))),
    ],
)
def test_max_variance_by_hand(rewards, keep, expected):
    for shift, scale in ((0, 1), (-7, 1e-6), (0, 1e30)):
        assert chosen(np.add(rewards, shift) * scale, keep) == expected


@pytest.mark.parametrize(
    "rewards, keep, expected",
    [
        ([3, 0, 3, 1, 2, 1, 0, 2], 3, {0, 2, 4}),
        ([3, 0, 3, 1, 2, 1, 0, 2], 8, set(range(8))),
        ([0.0, -0.0, 0.0, -0.0, 0, 0, 0, 0], 3, {0, 1, 2}),  # a signed zero is equal to the other
        ([-1, -5, -1, -1, -5, -5, -5, -5], 2, {0, 2}),
    ],
)
def test_max_reward_by_hand(rewards, keep, expected):
    assert chosen(rewards, keep, rule="max_reward") == expected


def test_percentile_by_hand():
    """Sorted positions ⌊(i + ½) n/m⌋ of the valid rows: 1, 3, 5, 7 of 8; 1, 3, 5 of 7."""
    rewards = [7, 6, 5, 4, 3, 2, 1, 0]
    assert chosen(rewards, 4, rule="percentile") == {6, 4, 2, 0}
    assert chosen(rewards, 3, [0] + [1] * 7, rule="percentile") == {6, 4, 2}
    assert chosen([1, 0, 1, 0, 1, 0, 1, 0], 4, rule="percentile") == {3, 7, 2, 6}
    assert chosen(rewards, 8, rule="percentile") == set(range(8))


def test_all():
    valid = jnp.array([[True, False, True]])
    indices, kept = down_sample(jnp.array([[3.0, 1.0, 2.0]]), 3, rule="all", valid=valid)
    np.testing.assert_array_equal(indices, [[0, 1, 2]])
    np.testing.assert_array_equal(kept, valid)


def test_random_is_uniform_over_valid_rows_and_follows_its_key():
    P, n = 20_000, 5
    rewards, valid = jnp.zeros((P, n)), jnp.tile(jnp.array([1, 1, 0, 1, 1], bool), (P, 1))
    draw = functools.partial(sample, rewards, 2, rule="random", valid=valid)
    indices, kept = draw(key=jax.random.key(0))
    assert kept.all() and np.all(indices[:, 0] != indices[:, 1])
    pairs = np.bincount(np.sort(indices, axis=1) @ np.array([n, 1]), minlength=n * n).reshape(n, n)
    expected = [(0, 1), (0, 3), (0, 4), (1, 3), (1, 4), (3, 4)]
    assert pairs.sum() == sum(pairs[i, j] for i, j in expected)
    assert max(abs(pairs[i, j] - P / 6) for i, j in expected) < 4 * np.sqrt(P / 6 * 5 / 6)
    np.testing.assert_array_equal(indices, draw(key=jax.random.key(0))[0])
    assert np.any(indices != draw(key=jax.random.key(1))[0])


# ---------------------------------------------------------------- rows that are no candidates


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "percentile", "random"])
def test_invalid_rows_are_never_kept(rule):
    key = jax.random.key(3)
    rewards = [9.0, 0.0, jnp.nan, 1.0, -9.0, 2.0, jnp.inf, -jnp.inf]
    valid = [0, 1, 1, 1, 0, 1, 1, 1]
    assert chosen(rewards, 2, valid, rule, key) <= {1, 3, 5}
    assert chosen(rewards, 6, valid, rule, key) == {1, 3, 5}
    assert chosen(rewards, 6, [0] * 8, rule, key) == set()


def test_max_variance_of_the_valid_rows():
    assert chosen([0.9, 0.8, 5.0, 0.5, jnp.nan, 0.4, 0.1], 3, [1, 1, 0, 1, 1, 1, 1]) == {0, 1, 6}


def test_prompts_do_not_see_each_other():
    rewards = np.array(jax.random.normal(jax.random.key(0), (3, 8)))
    valid = np.array(jax.random.bernoulli(jax.random.key(1), 0.8, (3, 8)))
    indices, kept = sample(rewards, 3, rule="max_variance", valid=valid)
    for p, (row, its_valid) in enumerate(zip(rewards, valid, strict=True)):
        assert set(np.array(indices[p])[kept[p]].tolist()) == chosen(row, 3, its_valid)


# ---------------------------------------------------------------- brute force


def best_by_definition(rewards, valid, m):
    """The kept set: every k scored in float64, ties by the rule, equal rewards by index; all rows if ≤ m."""
    rows = sorted((i for i in range(len(rewards)) if valid[i]), key=lambda i: (rewards[i], i))
    if len(rows) <= m:
        return set(rows)
    values = [rewards[i] for i in rows]
    tolerance = 1e-6 * (values[-1] - values[0]) ** 2
    subsets = {k: values[: m - k] + values[len(values) - k :] for k in range(m + 1)}
    best = max(np.var(s) for s in subsets.values())
    k = min((k for k in subsets if np.var(subsets[k]) >= best - tolerance), key=lambda k: (abs(k - m / 2), -k))
    return {i for v in set(subsets[k]) for i in [j for j in rows if rewards[j] == v][: subsets[k].count(v)]}


def rows_of(reward, n):
    return st.lists(st.tuples(reward, st.sampled_from([True, True, True, False])), min_size=n, max_size=n)


GRID = st.integers(-4, 4).map(lambda i: i / 4)  # many ties; unequal variances differ by more than the tolerance
SIZES = st.sampled_from([(12, 5), (12, 6), (7, 3), (4, 4), (2, 1)])


@given(st.data(), SIZES)
@settings(max_examples=150, deadline=None)
def test_max_variance_equals_brute_force_over_all_subsets(data, size):
    n, m = size
    rewards, valid = zip(*data.draw(rows_of(GRID, n)), strict=True)
    kept = chosen(rewards, m, valid)
    assert kept == best_by_definition(rewards, valid, m)
    rows = [i for i in range(n) if valid[i]]
    if len(rows) >= m:
        subsets = itertools.combinations([rewards[i] for i in rows], m)
        best = np.var(np.array(list(subsets)), axis=1).max()
        assert np.var([rewards[i] for i in kept]) >= best - 1e-12


@given(st.data(), SIZES)
@settings(max_examples=60, deadline=None)
def test_max_variance_of_any_floats_is_within_its_tolerance(data, size):
    n, m = size
    reward = st.floats(-1000, 1000, width=32)
    rewards, valid = zip(*data.draw(rows_of(reward, n)), strict=True)
    kept = chosen(rewards, m, valid)
    values = [rewards[i] for i in range(n) if valid[i]]
    assert len(kept) == min(m, len(values)) and all(valid[i] for i in kept)
    if len(values) > m:
        best = np.var(np.array(list(itertools.combinations(values, m))), axis=1).max()
        assert np.var([rewards[i] for i in kept]) >= best - 1.5e-6 * np.ptp(values) ** 2


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_variances_within_the_tolerance_count_as_equal(scale):
    """Two zeros beat two ones of which one lacks b, by 2b/9: too little for b = 3e-6, so the larger k stays."""
    assert chosen(np.array([0.0, 0.0, 0.5, 1 - 3e-6, 1.0]) * scale, 3) == {0, 3, 4}
    assert chosen(np.array([0.0, 0.0, 0.5, 1 - 1e-5, 1.0]) * scale, 3) == {0, 1, 4}


# ---------------------------------------------------------------- what is done with the kept rows


def test_take_rows_gathers_every_array_by_the_same_rows(run):
    indices = jnp.array([[2, 0], [1, 1]])
    tree = {"r": jnp.arange(6.0).reshape(2, 3), "tokens": jnp.arange(12).reshape(2, 3, 2)}
    taken = run(take_rows)(tree, indices)
    np.testing.assert_array_equal(taken["r"], [[2, 0], [4, 4]])
    np.testing.assert_array_equal(taken["tokens"], [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(normalize_over="kept"), [0.84293, 0.56195, -1.40488]),
        (dict(normalize_over="all"), [1.25410, 0.90574, -1.53279]),
        (dict(normalize_over="kept", scale="none"), [0.3, 0.2, -0.5]),
        (dict(normalize_over="all", scale="none"), [0.36, 0.26, -0.44]),
        (dict(normalize_over="kept", scale="none", baseline="loo"), [0.45, 0.3, -0.75]),
        (dict(normalize_over="all", scale="none", baseline="loo"), [0.45, 0.325, -0.55]),
        (dict(normalize_over="kept", eps=1.0), [0.22125, 0.14750, -0.36876]),
    ],
)
def test_advantages_over_the_kept_rows_or_over_all(settings, expected):
    rewards = jnp.concatenate([PAPER, PAPER * 0 + 1])
    indices, kept = jnp.array([[0, 1, 4]] * 2), jnp.ones((2, 3), bool)
    advantages = jax.jit(functools.partial(kept_advantages, **settings))(rewards, indices, kept)
    np.testing.assert_allclose(advantages, [expected, [0, 0, 0]], atol=1e-4)


@pytest.mark.parametrize("over, expected", [("kept", [1, -1, 0]), ("all", [1.25410, 0.90574, 0])])
def test_rows_that_are_dropped_later_have_no_part(over, expected):
    indices, kept = jnp.array([[0, 1, 4]]), jnp.array([[True, True, False]])
    advantages = jax.jit(functools.partial(kept_advantages, normalize_over=over))(PAPER, indices, kept)
    np.testing.assert_allclose(advantages, [expected], atol=1e-4)


@pytest.mark.parametrize("over", ["kept", "all"])
def test_rows_that_are_not_kept_or_not_valid_have_no_part(over, run):
    rewards, valid = jnp.array([[1.0, 0.0, jnp.nan, 7.0]]), jnp.array([[True, True, True, False]])
    f = run(
        lambda r, v: kept_advantages(r, *down_sample(r, 3, rule="max_reward", valid=v), normalize_over=over, valid=v)
    )
    np.testing.assert_allclose(f(rewards, valid), [[-1, 1, 0]], atol=1e-5)


def test_reward_metrics(run):
    rewards = jnp.array([[1.0, 0.0, 3.0], [1.0, 1.0, jnp.nan], [5.0, 5.0, 5.0]])
    valid = jnp.array([[1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    indices, kept = jnp.array([[1, 2], [0, 1], [0, 1]]), jnp.array([[1, 1], [1, 0], [0, 0]], bool)
    metrics = run(lambda r, i, k, v: reward_metrics(r, i, k, valid=v))(rewards, indices, kept, valid)
    expected = dict(
        reward_mean=6 / 5,
        reward_variance=(14 / 9 + 0) / 2,
        kept_reward_mean=4 / 3,
        kept_reward_variance=(2.25 + 0) / 2,
        kept_rows=3,
    )
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


R, ROWS, K = jnp.zeros((2, 4)), jnp.zeros((2, 3), int), jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: down_sample(R, 2, rule="best"),
            "unknown rule 'best'; known: 'max_variance', 'max_reward', 'ran",
        ),
        (
            lambda: down_sample(R, 5, rule="max_variance"),
            r"keep must be in \[1, n\], got keep=5 of n=4 rollouts",
        ),
        (lambda: down_sample(R, 0, rule="max_variance"), "got keep=0"),
        (lambda: down_sample(R, 3, rule="all"), "rule='all' keeps all 4 rows, got keep=3"),
        (lambda: down_sample(R, 3, rule="random"), "rule='random' needs key"),
        (lambda: down_sample(R[0], 3, rule="max_variance"), r"rewards must be \[P, n\], got shape \(4,\)"),
        (lambda: down_sample(R, 3, rule="max_variance", valid=R[:1]), r"valid \(1, 4\)"),
        (
            lambda: kept_advantages(R, ROWS, K, normalize_over="some"),
            "unknown normalize_over 'some'; known: 'kept', 'all'",
        ),
        (lambda: kept_advantages(R, ROWS[:, :1], K[:, :1], normalize_over="kept"), "group of one"),
        (lambda: kept_advantages(R[:, :1], ROWS[:, :1], K[:, :1], normalize_over="all"), "group of one"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
