"""Masked reductions: hand-computed values, and nothing behind a mask shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algos import masked

X = jnp.array([[1.0, 2.0, 6.0], [5.0, 7.0, 9.0]])
MASK = jnp.array([[True, True, False], [False, False, False]])
REDUCTIONS = {
    "sum": (masked.masked_sum, 3.0, [3.0, 0.0]),
    "mean": (masked.masked_mean, 1.5, [1.5, 0.0]),
    "max": (masked.masked_max, 2.0, [2.0, 0.0]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, run):
    reduce, total, rows = REDUCTIONS[name]
    assert run(reduce)(X, MASK) == total
    np.testing.assert_array_equal(run(lambda x, m: reduce(x, m, axis=-1))(X, MASK), rows)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_hidden_values_change_neither_value_nor_gradient(name, run):
    def of_exponentials(x, mask):
        return jnp.sum(REDUCTIONS[name][0](jnp.exp(masked.fill(x, mask)), mask, axis=-1))

    value_and_grad = run(jax.value_and_grad(of_exponentials))
    clean = value_and_grad(X, MASK)
    for hidden in (jnp.nan, jnp.inf, -jnp.inf, 1000.0):
        dirty = value_and_grad(jnp.where(MASK, X, hidden), MASK)
        np.testing.assert_array_equal(clean[0], dirty[0])
        np.testing.assert_array_equal(clean[1], dirty[1])
    assert not np.any(clean[1][~MASK]) and np.all(np.isfinite(clean[1]))


def test_reductions_broadcast_a_mask_of_rows():
    rows = jnp.array([[True], [False]])
    assert masked.masked_mean(X, rows) == 3.0
    assert masked.masked_max(X, rows) == 6.0


def test_masked_max_of_negative_values_and_its_empty_value():
    assert masked.masked_max(-X, MASK) == -1.0
    assert masked.masked_max(X, jnp.zeros_like(MASK), empty=-7.0) == -7.0


def test_bfloat16_is_summed_in_float32():
    x = jnp.full(1000, 1.0, jnp.bfloat16)
    total = masked.masked_sum(x, jnp.ones(1000, bool))
    assert total == 1000 and total.dtype == jnp.float32


def test_safe_divide(run):
    x, y = jnp.array([1.0, 3.0, 0.0]), jnp.array([0.0, 2.0, 0.0])
    np.testing.assert_array_equal(run(masked.safe_divide)(x, y), [0.0, 1.5, 0.0])
    dx, dy = run(jax.grad(lambda x, y: masked.safe_divide(x, y).sum(), argnums=(0, 1)))(x, y)
    np.testing.assert_array_equal(dx, [0.0, 0.5, 0.0])
    np.testing.assert_array_equal(dy, [0.0, -0.75, 0.0])


def test_bounded_exp(run):
    x = jnp.array([0.5, 1000.0, -jnp.inf, jnp.inf])
    np.testing.assert_allclose(run(masked.bounded_exp)(x), np.exp([0.5, 20.0, -20.0, 20.0]), rtol=1e-6)
    gradient = run(jax.grad(lambda x: masked.bounded_exp(x).sum()))(x)
    np.testing.assert_allclose(gradient, [np.exp(0.5), 0, 0, 0], rtol=1e-6)


def test_merge_sums_adds_sums_and_compares_maxima():
    parts = [{"tokens": jnp.float32(3), "ratio_max": jnp.float32(2)}] * 2
    parts += [{"tokens": jnp.float32(1), "ratio_max": jnp.float32(5)}]
    assert masked.merge_sums(parts) == {"tokens": 7, "ratio_max": 5}
    assert parts[0] == {"tokens": 3, "ratio_max": 2}


@pytest.mark.parametrize("parts", [[], [{"a": 1}, {"b": 1}]])
def test_merge_sums_wants_the_same_keys(parts):
    with pytest.raises(ValueError, match="same keys"):
        masked.merge_sums(parts)


def test_errors_name_the_key_and_the_known_names():
    with pytest.raises(ValueError, match="unknown colour 'blue'; known: 'red', 'green'"):
        masked.choose({"red": 1, "green": 2}, "blue", "colour")
    with pytest.raises(ValueError, match=r"same, got a \(2,\), c \(3,\)"):
        masked.check_same_shape(a=jnp.zeros(2), b=None, c=jnp.zeros(3))
