"""One token from logits: filters against plain numpy, draws against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rljax import drawing

FILTERS = ("top_k", "top_p", "min_p")
choose = jax.jit(drawing.choose, static_argnames=(*FILTERS, "top_logprobs"))
filter_logits = jax.jit(drawing.filter_logits, static_argnames=FILTERS)
inverse_cdf = jax.jit(drawing.inverse_cdf)
row_uniforms = jax.jit(drawing.row_uniforms)


def softmax(x):
    e = np.exp(np.float64(x) - np.max(x))
    return e / e.sum()


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Set of tokens that stay, one after the other in falling order of probability."""
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        probs, mass, stay = softmax(logits[order]), 0.0, []
        for token, p in zip(order, probs, strict=True):
            if stay and mass >= top_p:
                break
            stay.append(token)
            mass += p
        order = np.array(stay)
    return {int(t) for t in order if softmax(logits)[t] >= min_p * softmax(logits).max()}


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1}, {"top_k": 3}, {"top_k": 99}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.0},
        {"min_p": 0.2}, {"top_k": 5, "top_p": 0.6, "min_p": 0.1},
    ],
)  # fmt: skip
def test_filters_keep_what_plain_numpy_keeps(filters):
    logits = np.random.default_rng(0).normal(size=(20, 11)).astype(np.float32) * 2
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    got = np.isfinite(filter_logits(jnp.asarray(logits), **settings))
    for row, stays in zip(logits, got, strict=True):
        assert set(np.flatnonzero(stays)) == kept(row, **filters)


def test_filters_act_on_the_tempered_distribution_and_so_does_the_log_prob():
    # Probabilities .5, .3, .2 become .658, .237, .105 at temperature 1/2: top_p .6 keeps one token, not two.
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    ids, logprob, _, _ = choose(logits, jnp.array([0.5]), jnp.array([0.99]), top_p=0.6)
    assert ids[0] == 0 and logprob[0] == pytest.approx(0.0, abs=1e-6)
    ids, logprob, _, _ = choose(logits, jnp.array([1.0]), jnp.array([0.99]), top_p=0.6)
    assert ids[0] == 1 and logprob[0] == pytest.approx(np.log(0.3 / 0.8), abs=1e-5)


def test_greedy_is_argmax_without_division():
    logits = jnp.array([[1.0, 5.0, 5.5, -2.0], [1e30, 3e38, 0.0, 0.0]])
    ids, logprob, _, _ = choose(logits, jnp.array([0.0, 0.0]), jnp.array([0.001, 0.001]))
    np.testing.assert_array_equal(ids, [2, 1])
    np.testing.assert_allclose(logprob, [np.log(softmax(logits[0])[2]), 0.0], atol=1e-6)
    filtered, logprob, _, _ = choose(logits, jnp.array([0.0, 0.0]), jnp.array([0.999, 0.999]), top_k=2)
    np.testing.assert_array_equal(filtered, [2, 1])
    assert np.isfinite(logprob).all()


def test_each_row_has_its_own_temperature():
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 2.0]), (3, 3))
    _, logprob, ids, top = choose(logits, jnp.array([0.5, 1.0, 2.0]), jnp.full(3, 0.999), top_logprobs=2)
    np.testing.assert_array_equal(ids, [[2, 1]] * 3)
    want = [np.log(softmax(np.arange(3) / t))[[2, 1]] for t in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(top, want, atol=1e-5)
    np.testing.assert_allclose(logprob, [row[0] for row in want], atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 9, 200])
def test_inverse_cdf_follows_the_distribution(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=vocabulary).astype(np.float32) * 1.5
    dead = rng.choice(vocabulary, vocabulary // 3, replace=False)
    logits[dead] = -np.inf
    N = 40_000
    ids = np.asarray(inverse_cdf(jnp.broadcast_to(logits, (N, vocabulary)), rng.random(N, np.float32)))
    counts = np.bincount(ids, minlength=vocabulary)
    assert len(counts) == vocabulary and counts[dead].sum() == 0
    expected = N * softmax(logits)
    often = expected >= 5
    if often.sum() > 1:
        statistic = np.sum((counts - expected)[often] ** 2 / expected[often])
        assert scipy.stats.chi2.sf(statistic, often.sum() - 1) > 1e-4


def test_inverse_cdf_counts_up_with_the_uniform():
    # Mass .2, .5, .3: the boundaries lie at .2 and .7, whatever blocks the vocabulary is cut into.
    logits = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    u = jnp.array([0.0, 0.19, 0.21, 0.69, 0.71, 0.999999])
    np.testing.assert_array_equal(inverse_cdf(jnp.broadcast_to(logits, (6, 3)), u), [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("vocabulary", [1, 3, 10, 1000])
@pytest.mark.parametrize("u", [0.0, 1e-38, 1 - 2**-24])
def test_the_ends_of_the_uniform_never_draw_a_dead_token(vocabulary, u):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, vocabulary)).astype(np.float32) * 4
    alive = rng.random((50, vocabulary)) < 0.3
    alive[np.arange(50), rng.integers(0, vocabulary, 50)] = True
    logits[~alive] = -np.inf
    ids = np.asarray(inverse_cdf(jnp.asarray(logits), jnp.full(50, u, jnp.float32)))
    # u = 0 takes the first token with mass; u next to 1 the last, but for mass below its resolution.
    assert alive[np.arange(50), ids].all()
    if u == 0.0:
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        np.testing.assert_array_equal(ids, np.argmax(weights > 0, axis=-1))


def test_row_uniforms_are_the_coordinates_alone():
    key = jax.random.key(3)
    draw, sample, position = (
        np.array([7, 9], np.uint32),
        np.array([[0, 1], [0, 1]]),
        np.array([[4, 4], [4, 5]]),
    )
    grid = row_uniforms(key, draw, sample, position)
    assert grid.dtype == jnp.float32 and len(np.unique(grid)) == 4
    moved = row_uniforms(key, draw[::-1], sample[::-1, ::-1], position[::-1, ::-1])
    np.testing.assert_array_equal(moved[::-1, ::-1], grid)
    assert not np.any(row_uniforms(jax.random.key(4), draw, sample, position) == grid)
