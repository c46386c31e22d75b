"""KL between actor and policy: values, gradients against plain enumeration, memory of the chunked form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algos import distillation

A, P = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.8, 0.2]))
KINDS = ("reverse", "forward")


def by_enumeration(actor_logits, policy_logits, direction):
    a, p = jax.nn.softmax(actor_logits), jax.nn.softmax(policy_logits)
    first, second = (a, p) if direction == "reverse" else (p, a)
    return jnp.sum(first * jnp.log(first / second), -1)


@pytest.mark.parametrize(
    ("direction", "value", "slope"), [("reverse", 0.2231436, -0.3465736), ("forward", 0.1927448, -0.3)]
)
def test_values_and_gradients_by_hand(run, direction, value, slope):
    """KL(a‖p) = ln .5 - (ln .8 + ln .2) / 2; dKL/dz₀ = a₀ (log a₀/p₀ - KL) reverse, a₀ - p₀ forward."""
    f = functools.partial(distillation.kl, direction=direction)
    np.testing.assert_allclose(run(f)(A, P), value, rtol=1e-5)
    np.testing.assert_allclose(run(jax.grad(f))(A, P), [slope, -slope], rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(f, argnums=1)(A, P), 0)  # the policy is a constant


@pytest.mark.parametrize("direction", KINDS)
def test_kl_of_equal_logits_is_zero_and_shifts_change_nothing(direction):
    logits = jnp.array([[3.0, -2.0, 0.5], [100.0, 0.0, -100.0]])
    np.testing.assert_allclose(distillation.kl(logits, logits + 7, direction=direction), 0, atol=1e-5)


@pytest.mark.parametrize("direction", KINDS)
def test_padded_columns_add_nothing(direction):
    f = functools.partial(distillation.kl, direction=direction)
    pad = functools.partial(jnp.append, values=-jnp.inf)
    np.testing.assert_allclose(f(pad(A), pad(P)), f(A, P), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(pad(A), pad(P)), [*jax.grad(f)(A, P), 0.0], rtol=1e-6)


@pytest.mark.parametrize("direction", KINDS)
def test_an_infinite_divergence_has_no_gradient(run, direction):
    """The first state's second distribution lacks a word; the state beside it keeps its value and gradient."""
    lacking = jnp.stack([A.at[1].set(-jnp.inf), P])
    actor, policy = (jnp.stack([A, A]), lacking) if direction == "reverse" else (lacking, jnp.stack([A, A]))
    f = functools.partial(distillation.kl, direction=direction)
    values, gradient = run(f)(actor, policy), run(jax.grad(lambda a, p: f(a, p)[1] + f(a, p)[0]))(actor, policy)
    np.testing.assert_allclose(values, [jnp.inf, f(actor[1], policy[1])], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, 0], jax.grad(f)(actor[1], policy[1])], rtol=1e-6)
    assert np.any(gradient[1])


@pytest.mark.parametrize("direction", KINDS)
def test_bfloat16_logits_are_computed_in_float32(direction):
    a, p = (x.astype(jnp.bfloat16) for x in (A, P))
    out = distillation.kl(a, p, direction=direction)
    assert out.dtype == jnp.float32
    wide = distillation.kl(a.astype(jnp.float32), p.astype(jnp.float32), direction=direction)
    np.testing.assert_array_equal(out, wide)


def setting(tokens=10, hidden=6, vocabulary=17):
    rng = np.random.default_rng(0)
    shapes = {"actor": (hidden, vocabulary), "policy": (hidden + 2, vocabulary)}
    heads = {k: jnp.asarray(rng.normal(0, 1, s), jnp.float32) for k, s in shapes.items()}
    states = {k: jnp.asarray(rng.normal(0, 1, (tokens, s[0])), jnp.float32) for k, s in shapes.items()}
    return heads, states, jnp.asarray(np.arange(tokens) % 4 != 2)


def chunked(heads, states, mask, direction, chunk):
    return distillation.token_kl(
        lambda h: h @ heads["actor"],
        lambda h: h @ heads["policy"],
        states["actor"],
        states["policy"],
        mask,
        direction=direction,
        chunk=chunk,
    )


@pytest.mark.parametrize("direction", KINDS)
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_give_the_value_and_gradient_of_plain_enumeration(direction, chunk):
    heads, states, mask = setting()
    weights = jnp.linspace(0.5, 2, 10)  # a different cotangent for each token

    def plain(heads, states):
        policy = jax.lax.stop_gradient(states["policy"] @ heads["policy"])
        values = by_enumeration(states["actor"] @ heads["actor"], policy, direction)
        return jnp.where(mask, values, 0)

    def total(f, heads, states):
        return (weights * f(heads, states)).sum()

    f = functools.partial(chunked, mask=mask, direction=direction, chunk=chunk)
    np.testing.assert_allclose(jax.jit(f)(heads, states), plain(heads, states), rtol=1e-4, atol=1e-6)
    got = jax.jit(jax.grad(functools.partial(total, f), argnums=(0, 1)))(heads, states)
    expected = jax.jit(jax.grad(functools.partial(total, plain), argnums=(0, 1)))(heads, states)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got, expected)
    assert np.abs(got[0]["actor"]).max() > 0.1
    np.testing.assert_array_equal(got[0]["policy"], 0)
    np.testing.assert_array_equal(got[1]["policy"], 0)


@pytest.mark.parametrize("direction", KINDS)
def test_nan_behind_the_mask_reaches_nothing(direction):
    heads, states, mask = setting()
    bad = jax.tree.map(lambda x: jnp.where(mask[:, None], x, jnp.nan), states)
    f = jax.jit(jax.value_and_grad(lambda h, s: chunked(h, s, mask, direction, 4).sum()))
    jax.tree.map(np.testing.assert_array_equal, f(heads, bad), f(heads, states))
    values, gradient = jax.jit(jax.value_and_grad(lambda h, m: chunked(h, bad, m, direction, 4).sum()))(
        heads, jnp.zeros(10, bool)
    )
    assert values == 0
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradient)


def test_masked_tokens_are_zero_whatever_the_models_make_of_zeros():
    nothing, mask = jnp.zeros((3, 2)), jnp.array([True, False, True])
    values = distillation.token_kl(lambda h: h + A, lambda h: h + P, nothing, nothing, mask, chunk=2)
    np.testing.assert_allclose(values, [0.2231436, 0, 0.2231436], rtol=1e-5)  # reverse is the default
    np.testing.assert_allclose(distillation.kl(A, P), 0.2231436, rtol=1e-5)


def test_chunks_work_under_vmap_and_on_nothing():
    heads, states, mask = setting()
    f = jax.jit(functools.partial(chunked, direction="reverse", chunk=4))
    two = jax.vmap(f, in_axes=(None, 0, 0))(
        heads, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), states), jnp.stack([mask, ~mask])
    )
    np.testing.assert_allclose(two[0], f(heads, states, mask), rtol=1e-5)
    np.testing.assert_allclose(two[1], f(heads, jax.tree.map(lambda x: 2 * x, states), ~mask), rtol=1e-5)
    assert f(heads, jax.tree.map(lambda x: x[:0], states), mask[:0]).shape == (0,)


def test_no_array_of_tokens_by_vocabulary_is_alive():
    tokens, hidden, vocabulary, chunk = 512, 8, 4096, 32
    heads, states, _ = setting(tokens, hidden, vocabulary)

    def peak(chunk):
        loss = jax.grad(lambda h, s: chunked(h, s, jnp.ones(tokens, bool), "reverse", chunk).sum())
        return jax.jit(loss).lower(heads, states).compile().memory_analysis().temp_size_in_bytes

    whole = tokens * vocabulary * 4
    assert peak(tokens) > whole  # the same code in one chunk holds at least one such array
    assert peak(chunk) < whole / 2


def test_scan_chunks_takes_and_returns_trees():
    inputs = {"x": jnp.arange(7.0), "n": jnp.arange(14).reshape(7, 2)}
    out = distillation.scan_chunks(lambda part: (part["x"] * 2, part["n"].sum(-1)), inputs, chunk=3)
    np.testing.assert_array_equal(out[0], np.arange(7) * 2)
    np.testing.assert_array_equal(out[1], np.arange(14).reshape(7, 2).sum(-1))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: distillation.kl(A, P, direction="both"), "'both'; known: 'reverse', 'forward'"),
        (lambda: distillation.kl(A, jnp.zeros(3)), "shapes must be the same"),
        (lambda: distillation.scan_chunks(lambda x: x, A, chunk=0), "chunk=0"),
        (lambda: distillation.scan_chunks(lambda x: x[0], (A, jnp.zeros(3)), chunk=1), "leading axes"),
        (lambda: chunked(*setting(), "both", 4), "unknown direction"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()
