"""OBRS: the numbers of the paper's small example, and Monte Carlo of what each weight promises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.algos import masked, obrs

P, Q = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.3, 0.5])


DIVERGENCES = jax.jit(obrs.divergences)


def random_states(rng, states, size, *, sharp=1.0, distance=1.0):
    """(p, q): float32[states, size], two related distributions a state."""
    base = rng.normal(0, sharp, (states, size))
    logits = base, base + rng.normal(0, distance, (states, size))
    weights = (np.exp(x - x.max(-1, keepdims=True)) for x in logits)
    return tuple(x / x.sum(-1, keepdims=True) for x in weights)


def f32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


# ---------------------------------------------------------------- the small example


def test_acceptance(run):
    accept = run(lambda p, q: obrs.acceptance(p, q, 1.0))
    np.testing.assert_allclose(accept(P, Q), [1, 1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(run(lambda p, q: obrs.acceptance(p, q, 2.0))(P, Q), [1, 0.5, 0.1], rtol=1e-6)
    # p = 0 is never accepted; q = 0 < p would be; both 0: never.
    np.testing.assert_array_equal(accept(jnp.array([0.0, 0.5, 0.0]), jnp.array([0.5, 0.0, 0.0])), [0, 1, 0])


def test_normaliser_and_accepted_distribution(run):
    np.testing.assert_allclose(run(lambda p, q: obrs.normaliser(p, q, 1.0))(P, Q), 0.6, rtol=1e-6)
    np.testing.assert_allclose(run(lambda p, q: obrs.normaliser(p, q, 2.0))(P, Q), 0.4, rtol=1e-6)
    kept = run(lambda p, q: obrs.accepted_distribution(p, q, 1.0))(P, Q)
    np.testing.assert_allclose(kept, [1 / 3, 1 / 2, 1 / 6], rtol=1e-6)


@pytest.mark.parametrize("lam", [1e-30, 1e-10, 1e10, 1e30])
def test_a_tiny_lambda_keeps_q_and_a_huge_one_keeps_p(lam):
    np.testing.assert_allclose(obrs.accepted_distribution(P, Q, lam), Q if lam < 1 else P, rtol=1e-5)
    logs = jnp.log(P), jnp.log(Q)
    w = obrs.jackpot_weights(*logs, lam, z=jnp.full(3, obrs.normaliser(P, Q, lam)))
    np.testing.assert_allclose(w, P / Q if lam < 1 else jnp.ones(3), rtol=1e-5)  # p/q̃


def test_divergences(run):
    before, after, z = run(lambda p, q: obrs.divergences(jnp.log(p), jnp.log(q), 1.0))(P, Q)
    np.testing.assert_allclose([before, after, z], [0.498, 0.148, 0.6], atol=5e-4)
    # A padded column changes nothing; a token that the actor never proposes makes both infinite.
    pad = functools.partial(jnp.append, values=-jnp.inf)
    padded = obrs.divergences(pad(jnp.log(P)), pad(jnp.log(Q)), 1.0)
    np.testing.assert_allclose(padded, [before, after, z], rtol=1e-6)
    before, after, z = obrs.divergences(jnp.log(P), jnp.log(jnp.array([0.5, 0.5, 0.0])), 1.0)
    assert (before, after) == (math.inf, math.inf)
    np.testing.assert_allclose(z, 0.8, rtol=1e-6)


def test_divergences_of_models_that_have_nothing_in_common(run):
    """Z = 2 e^-300 is no float32, but q̃ = (½, ½) is a distribution; without a common token there is none."""
    divergences = run(lambda p, q: obrs.divergences(p, q, 1.0))
    far = divergences(jnp.array([0.0, -300.0]), jnp.array([-300.0, 0.0]))
    np.testing.assert_allclose(far, [300, math.log(2), 0], rtol=1e-4)
    apart = divergences(jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0]))
    np.testing.assert_array_equal(apart, [math.inf, math.inf, 0])


def test_jackpot_weights(run):
    z = jnp.full(3, 0.6)
    weights = run(lambda p, q, z: obrs.jackpot_weights(jnp.log(p), jnp.log(q), 1.0, z=z))(P, Q, z)
    np.testing.assert_allclose(weights, [1.8, 0.6, 0.6], rtol=1e-6)
    kept = jnp.array([1 / 3, 1 / 2, 1 / 6])
    np.testing.assert_allclose((kept * weights).sum(), 1.0, rtol=1e-6)  # mean 1 under q̃; of p/q it is 1.53
    np.testing.assert_allclose((kept * P / Q).sum(), 1.5333, rtol=1e-4)
    proposed = run(lambda p, q: obrs.jackpot_weights(jnp.log(p), jnp.log(q), 1.0, normalise="proposed"))(P, Q)
    np.testing.assert_allclose(proposed, [3, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(proposed * obrs.acceptance(P, Q, 1.0), P / Q, rtol=1e-6)


def test_jackpot_weights_are_bounded_and_corrected_for_a_moved_target():
    z, old = jnp.full(3, 0.6), jnp.log(jnp.array([0.3, 0.6, 0.1]))
    args = jnp.log(P), jnp.log(Q), 1.0
    np.testing.assert_allclose(obrs.jackpot_weights(*args, z=z, c1=1.5), [1.5, 0.6, 0.6], rtol=1e-6)
    moved = obrs.jackpot_weights(*args, z=z, old_logprobs=old)  # p_old / p = .5, 2, 1
    np.testing.assert_allclose(moved, [0.9, 1.2, 0.6], rtol=1e-6)
    np.testing.assert_allclose(
        obrs.jackpot_weights(*args, z=z, old_logprobs=old, c1=1.5, c2=1.2), [0.75, 0.72, 0.6], rtol=1e-6
    )
    proposed = obrs.jackpot_weights(*args, old_logprobs=old, c1=2.5, c2=1.2, normalise="proposed")
    np.testing.assert_allclose(proposed, [1.25, 1.2, 1.0], rtol=1e-6)


def test_nothing_has_a_gradient():
    def total(p, q):
        logs = jnp.log(p), jnp.log(q)
        w = obrs.jackpot_weights(*logs, 0.7, z=obrs.normaliser(p, q, 0.7) * jnp.ones(3), old_logprobs=logs[1])
        lam = obrs.lambda_for_budget(p, q, 0.7)
        sums = obrs.weight_sums(*logs, 0.7, p > 0, p > 0, old_logprobs=logs[1], normalise="proposed")
        lam += sums["weight"] + sum(obrs.divergences(*logs, 0.7))
        return (w + obrs.acceptance(p, q, 0.7) + obrs.accepted_distribution(p, q, 0.7)).sum() + lam

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(P, Q):
        np.testing.assert_array_equal(gradient, 0)


def test_degenerate_tokens_weigh_nothing_and_are_counted():
    target = jnp.log(jnp.array([0.6, 0.0, jnp.nan, 0.3, 0.6]))
    actor = jnp.log(jnp.array([0.2, 0.3, 0.3, 0.0, 0.2]))
    mask = jnp.array([1, 1, 1, 1, 0], bool)
    w = obrs.jackpot_weights(target, actor, 1.0, z=jnp.full(5, 0.6), c1=9.0)
    np.testing.assert_allclose(w, [1.8, 0.6, 0, 9, 1.8], rtol=1e-6)  # an impossible proposal is held by c1
    accept = obrs.acceptance_mask(jnp.full(5, 0.0), target, actor, 1.0, mask)
    assert accept.tolist() == [True, False, False, True, False]
    weight_sums = jax.jit(functools.partial(obrs.weight_sums, c1=9.0))
    sums = weight_sums(target, actor, 1.0, mask, mask, z=jnp.full(5, 0.6))
    assert sums["degenerate"] == 1
    np.testing.assert_allclose(sums["weight"], 1.8 + 0.6 + 9, rtol=1e-6)


def test_weights_whose_squares_overflow_are_degenerate():
    """Only a λ beyond 1e18 makes them; "accepted" multiplies it by a Z as small."""
    logs, ones = (jnp.log(P), jnp.log(Q)), jnp.ones(3, bool)
    np.testing.assert_array_equal(obrs.jackpot_weights(*logs, 1e20, normalise="proposed"), 0)
    np.testing.assert_allclose(obrs.jackpot_weights(*logs, 1e15, normalise="proposed"), 1e15, rtol=1e-5)
    sums = obrs.weight_sums(*logs, 1e20, ones, ones, normalise="proposed")
    assert (sums["degenerate"], sums["weight_sq"], obrs.summarise(sums)["ess"]) == (3, 0, 0)
    sums = obrs.weight_sums(*logs, 1e17, ones, ones, normalise="proposed")
    sums = masked.merge_sums([sums] * 100)  # (Σw)² is 9e38, more than float32 holds
    np.testing.assert_allclose(obrs.summarise(sums)["ess"], 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: obrs.acceptance(P, Q, 0.0), "λ=0.0 must be > 0"),
        (lambda: obrs.acceptance(P, Q[:2], 1.0), "shapes must be the same"),
        (lambda: obrs.candidates(P, Q, 4), r"k=4 is outside \[1, 3\]"),
        (lambda: obrs.lambda_for_budget(P, Q, 0.0), r"budget=0.0 must be in \(0, 1\]"),
        (lambda: obrs.lambda_for_budget(P, Q, 1.5), r"budget=1.5 must be in \(0, 1\]"),
        (lambda: obrs.lambda_for_budget(jnp.array([1.0, 0, 0]), Q, 0.3), "at most 0.200000"),
        (lambda: obrs.jackpot_weights(P, Q, 1.0), "needs z"),
        (lambda: obrs.jackpot_weights(P, Q, 1.0, z=P, c1=0.0), "c1=0.0 must be > 0"),
        (lambda: obrs.jackpot_weights(P, Q, 1.0, z=P, normalise="all"), "known: 'accepted', 'proposed'"),
        (lambda: obrs.states(jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.zeros(2), 1.0, k=1), "shapes"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()


# ---------------------------------------------------------------- V_k


def test_candidates_by_hand():
    p, q = jnp.array([0.5, 0.05, 0.3, 0.15]), jnp.array([0.1, 0.2, 0.4, 0.3])
    ids, mask = obrs.candidates(p, q, 2)
    assert ids.tolist() == [2, 3, 0, 2]
    assert mask.tolist() == [True, True, True, False]


def test_no_candidate_is_counted_twice():
    p, q = random_states(np.random.default_rng(0), 40, 30)
    ids, mask = jax.jit(obrs.candidates, static_argnums=2)(*f32(p, q), 6)
    on = [jnp.take_along_axis(x, ids, axis=-1) for x in f32(p, q)]
    z = obrs.normaliser(*on, 0.8, mask=mask)
    for state in range(40):
        union = set(np.argsort(-p[state])[:6]) | set(np.argsort(-q[state])[:6])
        assert sorted(np.asarray(ids[state])[np.asarray(mask[state])]) == sorted(union)
        best = sum(min(q[state, x], p[state, x] / 0.8) for x in union)
        np.testing.assert_allclose(z[state], best, rtol=1e-5)
    assert (~mask).any()
    assert (z < obrs.normaliser(*f32(p, q), 0.8)).all()  # what V_k leaves out is missing


def test_states_hold_what_plain_enumeration_gives():
    rng = np.random.default_rng(1)
    logits = f32(rng.normal(0, 1, (5, 9)), rng.normal(0, 1, (5, 9)))
    padded = [jnp.pad(x, ((0, 0), (0, 2)), constant_values=-jnp.inf) for x in logits]
    tokens = jnp.array([0, 8, 3, 3, 1])
    got = jax.jit(obrs.states, static_argnames="k")(*padded, tokens, 0.7, k=3)
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x)) for x in logits)
    before, after, z = obrs.divergences(log_p, log_q, 0.7)
    np.testing.assert_allclose(got.z, z, rtol=1e-5)
    np.testing.assert_allclose(got.kl_before, before, rtol=1e-4)
    np.testing.assert_allclose(got.kl_after, after, rtol=1e-4)
    np.testing.assert_allclose(got.target_logprobs, log_p[np.arange(5), tokens], rtol=1e-5)
    np.testing.assert_allclose(got.actor_logprobs, log_q[np.arange(5), tokens], rtol=1e-5)
    np.testing.assert_allclose(got.target_on, np.take_along_axis(log_p, np.asarray(got.ids), -1), rtol=1e-5)
    np.testing.assert_allclose(got.actor_on, np.take_along_axis(log_q, np.asarray(got.ids), -1), rtol=1e-5)
    assert got.ids.shape == got.mask.shape == (5, 6)


# ---------------------------------------------------------------- λ and the budget


def test_lambda_for_budget_by_hand(run):
    find = run(lambda p, q: obrs.lambda_for_budget(p, q, 0.8))
    np.testing.assert_allclose(find(P, Q), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(obrs.accepted_distribution(P, Q, 1 / 3), [0.25, 0.375, 0.375], rtol=1e-6)
    # All accepted: the largest such λ is the smallest ratio p/q.
    np.testing.assert_allclose(obrs.lambda_for_budget(P, Q, 1.0), 0.2, rtol=1e-5)
    short = Q * (1 - 3e-7)  # as float32 probabilities may sum: a budget of 1 is still attainable
    np.testing.assert_allclose(obrs.lambda_for_budget(P, short, 1.0), 0.2, rtol=1e-4)


@pytest.mark.parametrize("budget", [0.03, 0.5, 0.9, 0.99])
def test_one_lambda_meets_the_budget_of_the_batch(budget):
    p, q = random_states(np.random.default_rng(2), 32, 64, distance=1.5)
    p, q = (np.asarray(x, np.float64) for x in f32(p, q))
    lam = float(jax.jit(obrs.lambda_for_budget)(*f32(p, q), budget))
    assert np.minimum(q, p / lam).sum(-1).mean() == pytest.approx(budget, abs=1e-6)
    # States behind the mask have no say.
    mask = np.arange(32) < 10
    hidden = np.where(mask[:, None], p, np.nan)
    lam = float(obrs.lambda_for_budget(*f32(hidden, q), budget, mask=jnp.asarray(mask)))
    assert np.minimum(q, p / lam).sum(-1)[:10].mean() == pytest.approx(budget, abs=1e-6)


def test_lambda_from_the_ratios_of_sampled_tokens():
    ratios = jnp.array([0.1, 0.5, 2.0, 4.0])[:, None]
    lam = obrs.lambda_for_budget(ratios, jnp.ones_like(ratios), 0.75)
    # λ in [.5, 2]: (.1/λ + .5/λ + 2) / 4 = .75
    np.testing.assert_allclose(lam, 0.6, rtol=1e-6)


def test_a_budget_out_of_reach_under_jit_gives_the_smallest_lambda():
    lam = jax.jit(obrs.lambda_for_budget)(jnp.array([1.0, 0, 0]), Q, 0.3)
    np.testing.assert_allclose(jnp.log(lam), -69.0, atol=0.1)
    p = jnp.array([0.9, 0.1, 0.0])  # half of the proposals can never be kept: .5 is attainable, just
    np.testing.assert_allclose(obrs.normaliser(p, Q, obrs.lambda_for_budget(p, Q, 0.5)), 0.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_input_is_computed_in_float32(dtype):
    p, q = P.astype(dtype), Q.astype(dtype)
    wide = p.astype(jnp.float32), q.astype(jnp.float32)
    for f in (obrs.acceptance, obrs.normaliser, obrs.accepted_distribution):
        out = f(p, q, 1.0)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, f(*wide, 1.0))
    np.testing.assert_array_equal(obrs.lambda_for_budget(p, q, 0.8), obrs.lambda_for_budget(*wide, 0.8))


# ---------------------------------------------------------------- random numbers


def test_token_uniforms_depend_on_draw_sample_and_position_only():
    uniforms = jax.jit(obrs.token_uniforms, static_argnames="length")
    key, draws, samples = jax.random.key(0), jnp.arange(200) // 2 * 999, jnp.arange(200) % 2
    u = np.asarray(uniforms(key, draws, samples, length=50))
    assert u.shape == (200, 50)
    assert 0 <= u.min() < u.max() < 1
    counts = np.histogram(u, 10, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = .001
    order = jnp.array([150, 3])  # other rows, another order, another length: the same numbers
    np.testing.assert_array_equal(uniforms(key, draws[order], samples[order], length=20), u[order, :20])
    assert len(np.unique(u)) > 9980  # float32 has 2^23 values here: some of 10,000 coincide
    assert not np.array_equal(uniforms(jax.random.key(1), draws, samples, length=50), u)


# ---------------------------------------------------------------- Monte Carlo


@pytest.fixture(scope="module")
def draws():
    """10⁶ tokens of one state with 12 tokens, and which of them are accepted at λ = .6."""
    rng = np.random.default_rng(4)
    p, q = (x[0] for x in random_states(rng, 1, 12))
    tokens = rng.choice(12, 1_000_000, p=q / q.sum())
    logs = [jnp.log(jnp.asarray(x, jnp.float32))[tokens] for x in (p, q)]
    uniforms = jnp.asarray(rng.random(tokens.size, np.float32))
    accept = obrs.acceptance_mask(uniforms, *logs, 0.6, jnp.ones(tokens.size, bool))
    return p, q, tokens, logs, np.asarray(accept)


def test_accepted_tokens_follow_the_accepted_distribution(draws):
    p, q, tokens, _, accept = draws
    z = np.minimum(q, p / 0.6).sum()
    counts, total = np.bincount(tokens[accept], minlength=12), accept.sum()
    assert abs(total / tokens.size - z) < 4 * math.sqrt(z * (1 - z) / tokens.size)
    assert np.abs(q - p).max() > 0.05  # so that q itself would be refused
    expected = total * np.asarray(obrs.accepted_distribution(*f32(p, q), 0.6), np.float64)
    assert ((counts - expected) ** 2 / expected).sum() < 31.3  # chi-square, 11 degrees of freedom, p = .001
    wrong = total * q
    assert ((counts - wrong) ** 2 / wrong).sum() > 1000


def test_both_normalisations_estimate_the_mean_under_the_target(draws):
    p, q, tokens, logs, accept = draws
    f = np.sin(np.arange(12.0)) + 1
    truth = (p * f).sum()
    z = jnp.full(tokens.size, obrs.normaliser(*f32(p, q), 0.6))
    weights = {
        "accepted": np.asarray(obrs.jackpot_weights(*logs, 0.6, z=z), np.float64)[accept],
        "proposed": np.asarray(obrs.jackpot_weights(*logs, 0.6, normalise="proposed"), np.float64) * accept,
    }
    values = {"accepted": f[tokens[accept]], "proposed": f[tokens]}
    for name, w in weights.items():
        terms = w * values[name]
        error = terms.std() / math.sqrt(terms.size)
        assert abs(terms.mean() - truth) < 3 * error, name
    plain = np.exp(np.asarray(logs[0] - logs[1], np.float64))[accept] * values["accepted"]
    assert abs(plain.mean() - truth) > 30 * plain.std() / math.sqrt(plain.size)  # p/q is the wrong weight


def test_over_several_states_proposed_is_unbiased_and_accepted_weighs_by_z():
    rng = np.random.default_rng(5)
    p, q = random_states(rng, 4, 6, distance=1.5)
    lam, z, n = 0.9, np.minimum(q, p / 0.9).sum(-1), 100_000
    f = rng.normal(0, 1, (4, 6)) + 4 * z[:, None]
    state = np.repeat(np.arange(4), n)
    tokens = np.concatenate([rng.choice(6, n, p=row / row.sum()) for row in q])
    logs = f32(np.log(p[state, tokens]), np.log(q[state, tokens]))
    uniforms = jnp.asarray(rng.random(tokens.size, np.float32))
    accept = np.asarray(obrs.acceptance_mask(uniforms, *logs, lam, jnp.ones(tokens.size, bool)))
    mean = (p * f).sum(-1)
    w = np.asarray(obrs.jackpot_weights(*logs, lam, normalise="proposed"), np.float64)
    proposed = w * accept * f[state, tokens]
    assert abs(proposed.mean() - mean.mean()) < 3 * proposed.std() / math.sqrt(proposed.size)
    w = obrs.jackpot_weights(*logs, lam, z=jnp.asarray(z[state], jnp.float32))
    kept = (np.asarray(w, np.float64) * f[state, tokens])[accept]
    by_z = (z * mean).sum() / z.sum()
    assert abs(kept.mean() - by_z) < 4 * kept.std() / math.sqrt(kept.size)
    assert abs(by_z - mean.mean()) > 20 * kept.std() / math.sqrt(kept.size)  # and that is another number


def test_kappa_removes_the_error_of_top_k():
    rng = np.random.default_rng(6)
    p, q = random_states(rng, 2000, 100, distance=0.7)
    p32, q32 = f32(p, q)
    ids, mask = obrs.candidates(p32, q32, 16)
    on_p, on_q = (jnp.take_along_axis(x, ids, -1) for x in (p32, q32))
    exact, part = obrs.normaliser(p32, q32, 0.8), obrs.normaliser(on_p, on_q, 0.8, mask=mask)
    tokens = (rng.random((2000, 1)) > np.cumsum(q, -1)).sum(-1).clip(0, 99)
    rows = np.arange(2000)
    logs = f32(np.log(p[rows, tokens]), np.log(q[rows, tokens]))
    uniforms = jnp.asarray(rng.random(2000, np.float32))
    accepted = obrs.acceptance_mask(uniforms, *logs, 0.8, jnp.ones(2000, bool)).sum()
    factor = float(obrs.kappa(accepted, part.sum()))
    before = float(jnp.abs(part - exact).mean() / exact.mean())
    after = float(jnp.abs(factor * part - exact).mean() / exact.mean())
    assert before > 0.3  # the tail is heavy here
    assert after < before / 3
    z = float(exact.mean())
    error = math.sqrt(z * (1 - z) / 2000)
    assert abs(factor * float(part.mean()) - z) < 3 * error  # on average κ Z_approx is Z
    # Its sums add over micro-batches: it is one number of the minibatch, not a mean of two.
    halves = [obrs.kappa(a, s) for a, s in ((3, 2.0), (1, 4.0))]
    np.testing.assert_allclose(obrs.kappa(3 + 1, 2.0 + 4.0), 2 / 3, rtol=1e-6)
    assert abs(float(sum(halves)) / 2 - 2 / 3) > 0.1
    assert obrs.kappa(0, 0.0) == 0


# ---------------------------------------------------------------- optimality


def kl_of_rule(p, q, accept):
    kept = q * accept
    return np.sum(p * np.log(p / (kept / kept.sum(-1, keepdims=True))), -1)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 0.95))
def test_no_rule_of_equal_budget_comes_closer(seed, budget):
    rng = np.random.default_rng(seed)
    p, q = (x[0] for x in random_states(rng, 1, 6))
    lam = float(obrs.lambda_for_budget(*f32(p, q), budget))
    best = np.asarray(obrs.acceptance(*f32(p, q), lam), np.float64)
    reached = kl_of_rule(p, q, best)
    # Random rules, far from and near to the best one, scaled to the same budget within [0, 1].
    rules = np.concatenate([rng.random((2000, 6)), np.clip(best + rng.normal(0, 0.05, (2000, 6)), 1e-3, 1)])
    for _ in range(60):
        rules = np.clip(rules * (budget / (rules @ q))[:, None], 1e-9, 1)
    rules = rules[np.abs(rules @ q - budget) < 1e-6]
    assert len(rules) > 1000
    assert kl_of_rule(p, q, rules).min() >= reached - 1e-6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(-3, 3), st.floats(0.1, 4))
def test_the_cut_of_kl_is_bounded_by_the_acceptance(seed, log_lam, distance):
    p, q = random_states(np.random.default_rng(seed), 8, 10, distance=distance)
    lam = math.exp(log_lam)
    before, after, z = (np.asarray(x) for x in DIVERGENCES(*f32(np.log(p), np.log(q)), lam))
    kept = obrs.accepted_distribution(*f32(p, q), lam)
    np.testing.assert_allclose(after, (p * np.log(p / np.asarray(kept, np.float64))).sum(-1), atol=2e-5)
    assert (before - after >= -1e-5).all()
    assert (before - after <= -np.log(z) + 1e-5).all()


# ---------------------------------------------------------------- sums and summaries


def test_sums_of_micro_batches_are_those_of_the_whole():
    rng = np.random.default_rng(8)
    p, q = random_states(rng, 64, 10)
    tokens = np.array([rng.choice(10, p=row / row.sum()) for row in q])
    rows = np.arange(64)
    logs = f32(np.log(p[rows, tokens]), np.log(q[rows, tokens]))
    mask, accept = jnp.asarray(rng.random(64) < 0.9), jnp.asarray(rng.random(64) < 0.7)
    before, after, z = obrs.divergences(*(jnp.log(x) for x in f32(p, q)), 0.7)

    @jax.jit
    def sums(part):
        weights = obrs.weight_sums(*(x[part] for x in logs), 0.7, accept[part], mask[part], z=z[part], c1=1.2)
        return weights | obrs.state_sums(z[part], before[part], after[part], mask[part])

    summarise = jax.jit(obrs.summarise)
    whole = summarise(sums(rows))
    merged = summarise(masked.merge_sums([sums(rows[:32]), sums(rows[32:])]))
    for name, value in whole.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, err_msg=name)
    kept = np.asarray(mask & accept)
    w = np.asarray(obrs.jackpot_weights(*logs, 0.7, z=z, c1=1.2))[kept]
    np.testing.assert_allclose(whole["acceptance"], kept.sum() / mask.sum(), rtol=1e-6)
    np.testing.assert_allclose(whole["weight_mean"], w.mean(), rtol=1e-5)
    np.testing.assert_allclose(whole["ess"], w.sum() ** 2 / (len(w) * (w**2).sum()), rtol=1e-5)
    np.testing.assert_allclose(whole["at_c1"], (w >= 1.2 - 1e-6).mean(), rtol=1e-6)
    assert 0 < whole["at_c1"] < 1
    assert whole["at_c2"] == whole["degenerate"] == 0
    for share in (50, 90, 99):
        exact = np.percentile(w, share, method="inverted_cdf")
        np.testing.assert_allclose(whole[f"weight_p{share}"], exact, rtol=0.023)
    np.testing.assert_allclose(whole["kl_before"], np.asarray(before)[np.asarray(mask)].mean(), rtol=1e-5)
    assert set(whole) >= {"z", "kl_after"}


def test_fraction_at_c2_and_an_empty_batch():
    target, actor, old = jnp.log(P), jnp.log(Q), jnp.log(jnp.array([0.3, 0.6, 0.1]))
    args = {"z": jnp.full(3, 0.6), "old_logprobs": old, "c2": 0.9}

    @jax.jit
    def summary(mask):
        sums = obrs.weight_sums(target, actor, 1.0, mask, mask, **args) | obrs.state_sums(P, P, P, mask)
        return obrs.summarise(sums)

    np.testing.assert_allclose(summary(jnp.ones(3, bool))["at_c2"], 2 / 3)
    assert {float(x) for x in summary(jnp.zeros(3, bool)).values()} == {0.0}
