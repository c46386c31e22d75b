"""KL estimators by enumeration, the KL loss, entropy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algos.kl import entropy, kl_estimate, kl_loss
from rljax.algos.losses import aggregate_loss

REF = jnp.log(jnp.array([0.8, 0.2]))
TRUE_KL, TRUE_GRADIENT = 0.22314, -0.34657


def expectation(kind):
    """E_π[kind] over both actions; π's weights are the samples' and have no gradient."""

    def of(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * kl_estimate(logp, REF, kind))

    return of


@pytest.mark.parametrize("kind, value", [("k1", TRUE_KL), ("k2", 0.26512), ("k3", TRUE_KL)])
def test_value_by_enumeration(kind, value, run):
    np.testing.assert_allclose(run(expectation(kind))(jnp.zeros(2)), value, atol=1e-5)


@pytest.mark.parametrize("kind, gradient", [("k1", 0.0), ("k2", TRUE_GRADIENT), ("k3", -0.30)])
def test_gradient_by_enumeration(kind, gradient, run):
    got = run(jax.grad(expectation(kind)))(jnp.zeros(2))
    np.testing.assert_allclose(got, [gradient, -gradient], atol=1e-5)


def test_k2_has_the_gradient_of_the_divergence_itself():
    def kl(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - REF))

    value, gradient = jax.value_and_grad(kl)(jnp.zeros(2))
    np.testing.assert_allclose([value, gradient[0]], [TRUE_KL, TRUE_GRADIENT], atol=1e-5)
    logits = jnp.array([0.7, -1.1])
    np.testing.assert_allclose(jax.grad(expectation("k2"))(logits), jax.grad(kl)(logits), rtol=1e-5)


def test_estimates_are_of_tokens_and_leave_the_reference_alone(run):
    logp, ref = jnp.log(jnp.array([[0.5, 0.2]])), jnp.log(jnp.array([[0.25, 0.4]]))
    log2 = math.log(2)
    expected = {
        "k1": [[log2, -log2]],
        "k2": [[log2**2 / 2] * 2],
        "k3": [[0.5 - 1 + log2, 2 - 1 - log2]],
    }
    for kind, values in expected.items():
        np.testing.assert_allclose(run(lambda a, b, k=kind: kl_estimate(a, b, k))(logp, ref), values, rtol=1e-5)
        gradient = jax.grad(lambda b, k=kind: kl_estimate(logp, b, k).sum())(ref)
        np.testing.assert_array_equal(gradient, 0.0)


def test_k3_is_precise_near_zero_and_finite_far_away():
    near = kl_estimate(jnp.array(1e-4), jnp.array(0.0), "k3")
    np.testing.assert_allclose(near, 0.5e-8, rtol=2e-2)
    value, gradient = jax.value_and_grad(lambda x: kl_estimate(x, jnp.array(0.0), "k3"))(-1000.0)
    np.testing.assert_allclose(value, math.exp(20) - 21, rtol=1e-6)
    assert gradient == 0


LOGP = jnp.log(jnp.array([[0.5, 0.5, 0.9], [0.5, 0.5, 0.9]]))
REFS = jnp.log(jnp.array([[0.8, 0.2, 0.1], [0.2, 0.8, 0.1]]))
MASK = jnp.array([[1, 1, 0], [1, 0, 0]], bool)
K2 = [0.5 * math.log(0.5 / 0.8) ** 2, 0.5 * math.log(0.5 / 0.2) ** 2]
K3 = [0.8 / 0.5 - 1 + math.log(0.5 / 0.8), 0.2 / 0.5 - 1 + math.log(0.5 / 0.2)]


@pytest.mark.parametrize(
    "aggregate, expected",
    [
        ("token", (K2[0] + 2 * K2[1]) / 3),
        ("sequence", ((K2[0] + K2[1]) / 2 + K2[1]) / 2),
        ("constant", (K2[0] + 2 * K2[1]) / 20),
    ],
)
def test_loss_defaults_to_k2_and_reports_k3(aggregate, expected, run):
    f = run(lambda a, b, m: kl_loss(a, b, m, aggregate=aggregate, max_length=10))
    loss, sums = f(LOGP, REFS, MASK)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(sums["kl_sum"], K3[0] + 2 * K3[1], rtol=1e-5)
    assert (sums["kl_tokens"], sums["kl_degenerate_tokens"]) == (3, 0)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])  # each row has one accepted token: both are the same
def test_loss_takes_the_policy_losses_weights_accept_and_denominator(aggregate, run):
    weights, accept = jnp.array([3.0, 0.5]), jnp.array([[0, 1, 1], [1, 1, 1]], bool)
    settings = dict(aggregate=aggregate, weights=weights, accept=accept, denominator=4.0)
    f = run(lambda a, b, m: kl_loss(a, b, m, **settings))
    loss, sums = f(LOGP, REFS, MASK)
    np.testing.assert_allclose(loss, 3.5 * K2[1] / 4, rtol=1e-5)
    np.testing.assert_allclose(sums["kl_sum"], 3.5 * K3[1], rtol=1e-5)
    assert sums["kl_tokens"] == 2


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_hidden_and_impossible_tokens(kind):
    @jax.jit
    def step(logprobs, ref, mask):
        return jax.value_and_grad(lambda x: kl_loss(x, ref, mask, kind=kind), has_aux=True)(logprobs)

    clean = step(LOGP, REFS, MASK)
    for hidden in (1000.0, -1000.0, jnp.nan, jnp.inf):
        dirty = jnp.where(MASK, 0.0, hidden)
        jax.tree.map(np.testing.assert_array_equal, clean, step(LOGP + dirty, REFS, MASK))
        jax.tree.map(np.testing.assert_array_equal, clean, step(LOGP, REFS + dirty, MASK))
    assert np.all(np.isfinite(clean[1])) and not np.any(clean[1][~MASK])

    never = jnp.where(jnp.array([[1, 0, 0], [0, 0, 0]], bool), -jnp.inf, 0.0)
    for new, ref in ((LOGP + never, REFS), (LOGP, REFS + never), (LOGP + never, REFS + never)):
        (loss, sums), gradient = step(new, ref, MASK)
        assert np.isfinite(loss) and np.all(np.isfinite(gradient)) and gradient[0, 0] == 0
        assert (sums["kl_degenerate_tokens"], sums["kl_tokens"]) == (1, 3)

    (loss, _), gradient = step(LOGP, REFS, MASK & False)
    assert loss == 0 and not np.any(gradient)


def test_entropy(run):
    logits = jnp.log(jnp.array([[0.5, 0.5, 1.0], [0.8, 0.2, 1.0]])).at[:, 2].set(-jnp.inf) + 7.0
    np.testing.assert_allclose(run(entropy)(logits), [math.log(2), 0.500402], rtol=1e-5)
    gradient = run(jax.grad(lambda x: entropy(x).sum()))(logits)
    np.testing.assert_allclose(gradient, [[0, 0, 0], [-0.221807, 0.221807, 0]], atol=1e-5)
    np.testing.assert_allclose(run(entropy)(jnp.array([500.0, -500.0])), 0.0, atol=1e-6)


def test_an_entropy_bonus_is_an_aggregate():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.8, 0.2], [0.9, 0.1]]]))
    bonus = aggregate_loss(-entropy(logits), jnp.array([[True, True, False]]), aggregate="token")
    np.testing.assert_allclose(bonus, -(math.log(2) + 0.500402) / 2, rtol=1e-5)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kl_estimate(LOGP, REFS, "k4"), "unknown kind 'k4'; known: 'k1', 'k2', 'k3'"),
        (lambda: kl_estimate(LOGP, REFS[:1], "k1"), r"ref_logprobs \(1, 3\)"),
        (lambda: kl_loss(LOGP, REFS, MASK, kind="k4"), "unknown kind 'k4'"),
        (lambda: kl_loss(LOGP, REFS, MASK, aggregate="mean"), "unknown aggregate 'mean'"),
        (lambda: kl_loss(LOGP, REFS, MASK[:1]), r"mask \(1, 3\)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
