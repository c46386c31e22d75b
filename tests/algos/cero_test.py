"""CERO: hand-computed numbers, optimality against scipy, and whole runs (utility, regret, budget)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.algos import cero as cero_lib
from rljax.algos.cero import Cero

allocate = jax.jit(cero_lib.allocate, static_argnums=0)
update = jax.jit(cero_lib.update, static_argnums=0)
init = jax.jit(cero_lib.init, static_argnums=0)
theta_box = jax.jit(cero_lib.theta_box, static_argnums=0)
informativeness = jax.jit(cero_lib.informativeness)
utility = jax.jit(cero_lib.utility)
best_response = jax.jit(cero_lib.best_response)


def with_q(cero, p):
    """A state whose posterior is all but certain of the success probabilities p."""
    p = jnp.asarray(p, jnp.float32)
    state = dataclasses.replace(init(cero), alpha=p * 1e6, beta=(1 - p) * 1e6)
    return dataclasses.replace(state, theta=cero.rates.eta * informativeness(state))


# ---------------------------------------------------------------- the formulas, by hand


def test_informativeness_is_the_expected_bernoulli_variance():
    state = init(Cero(100, 3, 1, 4))
    state = dataclasses.replace(state, alpha=jnp.array([3.0, 1.0, 1e6]), beta=jnp.array([2.0, 1.0, 1e6]))
    np.testing.assert_allclose(informativeness(state), [0.2, 1 / 6, 0.25], rtol=1e-5)


def test_utility():
    q = jnp.array([0.25, 0.1, 0.0])
    values = utility(q, 0.2, jnp.array([20.0, 50.0, 9.0]))
    np.testing.assert_allclose(values, [0.6321206, 0.6321206, 0], rtol=1e-6)


def test_best_response_maximises_utility_minus_price():
    q, eta, theta = jnp.array([0.25, 0.1, 0.02]), 0.2, jnp.array([0.05 / math.e, 0.003, 0.01])
    n = best_response(theta, q, eta, 100.0)
    np.testing.assert_allclose(n, [20.0, math.log(20 / 3) / 0.02, 0.0], rtol=1e-5)
    grid = jnp.linspace(0, 100, 2001)[:, None]
    values = utility(q, eta, grid) - theta * grid
    np.testing.assert_allclose(grid[values.argmax(0), 0], n, atol=0.05)


def test_best_response_at_the_edges():
    args = jnp.array([0.0, 0.01, 1.0]), jnp.array([0.25, 0.0, 0.25])
    np.testing.assert_array_equal(best_response(*args, 0.2, 48.0), [48.0, 0.0, 0.0])


def test_default_rates():
    rates = Cero(120_000, 500, 30, 16).rates
    eta = 4 * 500 / 120_000
    assert rates.eta == pytest.approx(eta)
    assert rates.step_theta == pytest.approx(eta / (4 * 16 * math.sqrt(30)))
    assert rates.step_mu == pytest.approx(2.5 * eta / (500 * 16 * math.sqrt(30)))
    # What the default eta means: q = .25 at the uniform share is at U = 1 - 1/e.
    assert float(utility(0.25, rates.eta, 120_000 / 500)) == pytest.approx(0.6321206)
    assert Cero(100, 5, 1, 4, eta=0.3, step_theta=0.0, step_mu=0.7).rates == (0.3, 0.0, 0.7)


def test_init_starts_at_the_prior_and_the_top_of_the_box():
    state = init(Cero(100, 5, 2, 4, prior=(3.0, 2.0)))
    np.testing.assert_allclose(state.theta, 4 * 5 / 100 * np.full(5, 0.2), rtol=1e-6)
    assert (state.mu, state.spent, state.draws, state.epoch) == (0, 0, 0, 0)


def test_theta_box():
    low, high = theta_box(Cero(100, 5, 2, 4, eta=0.5), jnp.array([0.2, 0.0]))
    np.testing.assert_allclose(high, [0.1, 0.0], rtol=1e-6)
    np.testing.assert_allclose(low, [0.1 * math.exp(-0.1 * 8), 0.0], rtol=1e-6)
    # exp(-250) underflows; the price must stay positive, or its logarithm is infinite.
    low, _ = theta_box(Cero(100, 5, 100, 100, eta=0.1), jnp.array([0.25]))
    assert low[0] > 0


# ---------------------------------------------------------------- the offline optimum and the dual


def test_offline_allocation_by_hand(run):
    q = jnp.array([0.25, 0.1, 0.02])
    n = run(lambda q: cero_lib.offline_allocation(q, 0.2, 32.0, 24.0))(q)
    np.testing.assert_allclose(n, [22.23, 9.77, 0.0], atol=0.005)
    np.testing.assert_allclose(utility(q, 0.2, n).sum(), 0.8484, atol=5e-5)
    np.testing.assert_allclose(utility(q, 0.2, 32 / 3).sum(), 0.6472, atol=5e-5)


@pytest.mark.parametrize(("budget", "cap"), [(32.0, 24.0), (10.0, 8.0), (60.0, 12.0), (300.0, 80.0)])
def test_offline_allocation_reaches_the_optimum_of_scipy(budget, cap):
    q, eta = np.random.default_rng(1).uniform(0.01, 0.25, 6), 0.3

    def loss(n):
        return -np.sum(1 - np.exp(-eta * q * n))

    best = scipy.optimize.minimize(
        loss,
        np.full(6, budget / 6).clip(0, cap),
        jac=lambda n: -eta * q * np.exp(-eta * q * n),
        method="SLSQP",
        bounds=[(0, cap)] * 6,
        constraints={"type": "ineq", "fun": lambda n: budget - n.sum()},
        options={"ftol": 1e-13, "maxiter": 1000},
    )
    n = np.asarray(cero_lib.offline_allocation(jnp.asarray(q, jnp.float32), eta, budget, cap), np.float64)
    assert n.sum() <= budget * (1 + 1e-6)
    assert n.min() >= 0
    assert n.max() <= cap
    assert loss(n) == pytest.approx(best.fun, abs=1e-6)


def test_offline_allocation_at_the_edges():
    q = jnp.array([0.25, 0.0, 0.1])
    np.testing.assert_array_equal(cero_lib.offline_allocation(q, 0.2, 1000.0, 8.0), [8, 0, 8])
    np.testing.assert_allclose(cero_lib.offline_allocation(q, 0.2, 0.0, 8.0), [0, 0, 0], atol=1e-5)
    n = cero_lib.offline_allocation(q, 0.2, 30.0, jnp.array([5.0, 9.0, 80.0]))  # a cap of its own each
    np.testing.assert_allclose(n, [5, 0, 25], rtol=1e-5)
    for bad in ({"eta": 0.0}, {"budget": -1.0}, {"cap": -1.0}):
        with pytest.raises(ValueError, match=f"offline_allocation {next(iter(bad))}="):
            cero_lib.offline_allocation(q, **({"eta": 0.2, "budget": 3.0, "cap": 8.0} | bad))


def test_dual_objective_bounds_the_primal_and_touches_it_at_the_optimum():
    q, eta, budget, epochs, n_max = jnp.array([0.25, 0.1, 0.02]), 0.2, 32.0, 3, 8
    dual = functools.partial(cero_lib.dual_objective, q=q, eta=eta, budget=budget, epochs=epochs, n_max=n_max)
    n = cero_lib.offline_allocation(q, eta, budget, epochs * n_max)
    theta = eta * q * jnp.exp(-eta * q * n)
    nu = theta[0]  # prompts 0 and 1 are inside their bounds: their marginal utility is the budget's price
    np.testing.assert_allclose(theta[1], nu, rtol=1e-4)
    np.testing.assert_allclose(dual(theta, nu), 0.8484, atol=5e-5)
    rng = np.random.default_rng(0)
    thetas, mus = jnp.asarray(rng.uniform(0, 0.06, (300, 3))), jnp.asarray(rng.uniform(0, 0.06, 300))
    assert jax.vmap(dual)(thetas, mus).min() >= 0.8484
    # One term by hand: theta = mu = 0 gives every prompt its cap of 24.
    np.testing.assert_allclose(dual(jnp.zeros(3), 0.0), utility(q, eta, 24.0).sum(), rtol=1e-6)


# ---------------------------------------------------------------- allocate


def prices(cero, theta, mu, spent=0):
    state, theta = init(cero), jnp.asarray(theta, jnp.float32)
    return dataclasses.replace(state, theta=theta, mu=jnp.float32(mu), spent=jnp.int32(spent))


def counts(cero, state, ids, **kwargs):
    grants = allocate(cero, state, np.array(ids), **kwargs)
    assert grants.dtype == jnp.int32
    return grants.tolist()


def test_allocate_grants_n_max_above_the_budget_price():
    state = prices(Cero(1000, 4, 2, 8), [0.3, 0.1, 0.2, 0.05], 0.1)
    assert counts(Cero(1000, 4, 2, 8), state, [0, 1, 2, 3]) == [8, 0, 8, 0]  # .1 is not greater than .1
    assert counts(Cero(1000, 4, 2, 8), state, [2, 3, 0, -1]) == [8, 0, 8, 0]  # padding gets nothing
    plain = cero_lib.allocate(Cero(1000, 4, 2, 8), state, np.array([2, 3, 0, -1]))
    assert (plain.tolist(), plain.dtype) == ([8, 0, 8, 0], jnp.int32)


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        (76, [8, 8, 8]),
        (77, [7, 8, 8]),
        (82, [2, 8, 8]),
        (83, [0, 8, 8]),  # a single rollout is never granted
        (84, [0, 8, 8]),
        (85, [0, 8, 7]),
        (98, [0, 2, 0]),
        (99, [0, 0, 0]),
        (100, [0, 0, 0]),
    ],
)
def test_allocate_spends_the_last_rollouts_on_the_largest_theta(spent, expected):
    cero = Cero(100, 4, 2, 8)
    state = prices(cero, [0.1, 0.3, 0.2, 0.0], 0.05, spent)
    assert counts(cero, state, [0, 1, 2]) == expected
    assert counts(cero, state, [3, 0, 1, 2]) == [0, *expected]


def test_allocate_counts_reserved_rollouts_as_spent():
    cero = Cero(100, 3, 2, 8)
    state = prices(cero, [0.1, 0.3, 0.2], 0.05, 60)
    assert counts(cero, state, [0, 1, 2], reserved=30) == [0, 8, 2]
    assert counts(cero, state, [0, 1, 2], reserved=1000) == [0, 0, 0]


def test_allocate_takes_a_repeated_prompt_as_two_visits():
    cero = Cero(100, 3, 2, 8)
    state = prices(cero, [0.1, 0.3, 0.2], 0.05)
    assert counts(cero, state, [1, 1, 0]) == [8, 8, 8]
    assert counts(cero, prices(cero, [0.1, 0.3, 0.2], 0.05, 80), [0, 1, 2, 1]) == [0, 8, 4, 8]


def test_min_visits_grants_a_dear_prompt_its_first_visits():
    cero = Cero(1000, 3, 4, 8, min_visits=2)
    state = dataclasses.replace(prices(cero, [0.1, 0.1, 0.3], 0.2), visits=jnp.array([1, 2, 0]))
    assert counts(cero, state, [0, 1, 2]) == [8, 0, 8]
    assert counts(dataclasses.replace(cero, min_visits=0), state, [0, 1, 2]) == [0, 0, 8]


# ---------------------------------------------------------------- update


def test_posterior_takes_thresholded_rewards_of_valid_rows_only():
    cero = Cero(1000, 3, 2, 8)
    ids, rewards = jnp.array([1, 1, 1]), jnp.array([1.0, 1.0, 0.0])
    state = update(cero, init(cero), ids, rewards, jnp.ones(3, bool))
    np.testing.assert_array_equal(state.alpha, [1, 3, 1])
    np.testing.assert_array_equal(state.beta, [1, 2, 1])
    np.testing.assert_allclose(informativeness(state)[1], 0.2, rtol=1e-6)
    # Non-binary: .5 reaches the threshold, -.5 and .49 do not; NaN, inf and invalid rows touch neither.
    ids = jnp.array([0, 0, 0, 2, 2, 2, -1])
    rewards = jnp.array([-0.5, 0.49, 0.5, jnp.nan, jnp.inf, 1.0, 1.0])
    state = update(cero, state, ids, rewards, jnp.array([1, 1, 1, 1, 1, 0, 1], bool))
    np.testing.assert_array_equal(state.alpha, [2, 3, 1])
    np.testing.assert_array_equal(state.beta, [3, 2, 1])
    # All rollouts are spent, invalid ones too; the padding row is no rollout.
    np.testing.assert_array_equal(state.rollouts, [3, 3, 3])
    np.testing.assert_array_equal(state.visits, [1, 1, 1])
    assert state.spent == 9
    state = update(dataclasses.replace(cero, success_threshold=-1.0), state, ids[:1], rewards[:1])
    assert state.alpha[0] == 3


def test_one_step_by_hand():
    # M=3, K=2, N_max=4, B=12, eta=1. Prompt 0 is granted 4 (3 of 4 solved), prompt 1 is drawn and granted 0.
    cero = Cero(12, 3, 2, 4, eta=1.0, step_theta=0.01, step_mu=0.02)
    state = dataclasses.replace(init(cero), theta=jnp.array([0.15, 0.1, 0.12]), mu=jnp.float32(0.11))
    new = update(
        cero,
        state,
        jnp.array([0, 0, 0, 0]),
        jnp.array([1.0, 1, 0, 1]),
        jnp.ones(4, bool),
        drawn_ids=jnp.array([1, 0]),
        drawn_counts=jnp.array([0, 4]),
    )
    # q_0 = 4*2/(6*7) = .190476; n* = ln(.190476/.15)/.190476 = 1.25418; theta = .15 - .01(4 - 1.25418/2)
    # q_1 = 1/6; n* = ln((1/6)/.1)/(1/6) = 3.06495; theta = .1 + .01*3.06495/2. Prompt 2 was not drawn.
    np.testing.assert_allclose(new.theta, [0.1162709, 0.1153248, 0.12], atol=2e-7)
    # target = (12/2)(2/3) = 4 = used
    np.testing.assert_allclose(new.mu, 0.11, rtol=1e-6)
    assert (new.draws, new.epoch, new.spent) == (2, 0, 4)
    np.testing.assert_array_equal(new.visits, [1, 0, 0])
    new = update(cero, new, jnp.zeros(0, int), jnp.zeros(0), drawn_ids=jnp.array([2]), drawn_counts=jnp.array([0]))
    np.testing.assert_allclose(new.mu, 0.11 - 0.02 * 2, rtol=1e-6)  # a step without rollouts lowers the price
    assert (new.draws, new.epoch, new.spent) == (0, 1, 4)


def test_mu_stays_at_or_above_zero_and_theta_in_its_box():
    cero = Cero(12, 3, 2, 4, eta=1.0, step_theta=10.0, step_mu=10.0)
    state = update(
        cero, init(cero), jnp.zeros(0, int), jnp.zeros(0), drawn_ids=jnp.array([0, 1]), drawn_counts=jnp.array([0, 0])
    )
    assert state.mu == 0
    state = update(cero, state, jnp.array([0, 0, 1, -1]), jnp.array([1.0, 0, 1, 0]))
    low, high = theta_box(cero, informativeness(state))
    np.testing.assert_array_equal(state.theta, jnp.array([low[0], low[1], high[2]]))


def test_a_prompt_drawn_twice_steps_by_both_grants():
    cero = Cero(1000, 3, 4, 8, eta=1.0, step_theta=1e-3)
    state = dataclasses.replace(init(cero), theta=jnp.full(3, 0.1))
    none = jnp.zeros(0, int), jnp.zeros(0)
    twice = update(cero, state, *none, drawn_ids=jnp.array([1, 1]), drawn_counts=jnp.array([8, 2]))
    share = math.log(1 / 0.6) * 6 / 4  # n* / K
    np.testing.assert_allclose(twice.theta, [0.1, 0.1 - 1e-3 * (10 - 2 * share), 0.1], rtol=1e-5)
    assert twice.draws == 2
    np.testing.assert_array_equal(twice.visits, [0, 2, 0])


def test_without_drawn_the_prompts_of_the_rows_are_drawn():
    cero = Cero(1000, 4, 4, 8)
    ids, rewards = jnp.array([2, 0, 2, 2, -1]), jnp.array([1.0, 0, 0, 1, 1])
    known = update(cero, init(cero), ids, rewards, drawn_ids=jnp.array([0, 2, -1]), drawn_counts=jnp.array([1, 3, 5]))
    jax.tree.map(np.testing.assert_array_equal, update(cero, init(cero), ids, rewards), known)


def test_prices_and_posterior_may_be_updated_in_calls_of_their_own():
    cero = Cero(1000, 4, 4, 8)
    ids, rewards, invalid = jnp.array([2, 0, 2, 2]), jnp.array([1.0, 0, 0, 1]), jnp.zeros(4, bool)
    drawn = {"drawn_ids": jnp.array([0, 2, 1]), "drawn_counts": jnp.array([1, 3, 0])}
    # Invalid rows leave q, so that the order of the two calls is free.
    whole = update(cero, init(cero), ids, rewards, invalid, **drawn)
    split = update(cero, init(cero), jnp.zeros(0, int), jnp.zeros(0), **drawn)
    split = update(cero, split, ids, rewards, invalid, drawn_ids=jnp.array([-1]), drawn_counts=jnp.array([0]))
    jax.tree.map(np.testing.assert_array_equal, whole, split)


def test_a_drought_ends_when_prices_move_while_drawing():
    cero = Cero(960, 6, 10, 16)
    state = prices(cero, np.full(6, 0.002), 0.01)
    granted, draws = 0, 0
    while granted == 0 and draws < 500:
        grants = allocate(cero, state, jnp.array([draws % 6]))
        state = update(
            cero, state, jnp.zeros(0, int), jnp.zeros(0), drawn_ids=jnp.array([draws % 6]), drawn_counts=grants
        )
        granted, draws = int(grants.sum()), draws + 1
    assert granted == 16
    assert 1 < draws < 100


def test_epoch_advances_after_m_draws_and_discounts_the_posterior():
    cero = Cero(1000, 4, 4, 8, discount=0.5, prior=(1.0, 2.0))
    state = init(cero)
    state = update(cero, state, jnp.array([0, 0, 1, 1]), jnp.array([1.0, 1, 0, 0]))
    np.testing.assert_array_equal(state.alpha, [3, 1, 1, 1])
    assert (state.draws, state.epoch) == (2, 0)
    state = update(
        cero,
        state,
        jnp.array([2, 2, 3]),
        jnp.array([1.0, 0, 0]),
        drawn_ids=jnp.array([2, 3, 0]),
        drawn_counts=jnp.array([2, 1, 0]),
    )
    assert (state.draws, state.epoch) == (1, 1)  # the fifth draw belongs to the next epoch
    np.testing.assert_array_equal(state.alpha, [2, 1, 1.5, 1])
    np.testing.assert_array_equal(state.beta, [2, 3, 2.5, 2.5])
    q = informativeness(state)
    low, high = theta_box(cero, q)
    assert bool(((low <= state.theta) & (state.theta <= high)).all())


def test_uniform_grpo_is_the_case_of_a_free_budget():
    """step_mu = 0 keeps mu at 0 < theta: N_max for every prompt of every epoch, B = M K N_max."""
    cero = Cero(3 * 2 * 4, 3, 2, 4, step_mu=0.0)
    state = init(cero)
    for ids in ([2, 0, 1], [1, 2, 0]):
        grants = allocate(cero, state, jnp.array(ids))
        assert grants.tolist() == [4, 4, 4]
        state = update(
            cero, state, jnp.repeat(jnp.array(ids), 4), jnp.ones(12), drawn_ids=jnp.array(ids), drawn_counts=grants
        )
    assert (state.spent, state.epoch) == (24, 2)
    assert allocate(cero, state, jnp.array([0, 1, 2])).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- properties

SETTINGS = (
    Cero(70, 5, 3, 8, step_mu=0.0),
    Cero(33, 5, 3, 2, step_theta=0.5, step_mu=0.3, min_visits=1),
    Cero(200, 5, 40, 64, discount=0.5, prior=(0.2, 0.3)),
)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(SETTINGS),
    st.lists(st.lists(st.integers(-1, 4), min_size=4, max_size=4), max_size=10),
    st.integers(0, 2**31),
)
def test_budget_and_box_hold_under_any_order_of_prompts(cero, steps, seed):
    rng = np.random.default_rng(seed)
    state, made, draws = init(cero), 0, 0
    for ids in steps:
        grants = np.asarray(allocate(cero, state, jnp.array(ids)))
        assert set(grants[np.array(ids) < 0]) <= {0}
        assert ((grants == 0) | ((grants >= 2) & (grants <= cero.n_max))).all()
        made += grants.sum()
        draws += sum(i >= 0 for i in ids)
        assert made <= cero.budget
        live = np.arange(cero.n_max) < grants[:, None]
        rows = np.where(live, np.array(ids)[:, None], -1).ravel()
        rewards = rng.choice([0.0, 1.0, -0.5, np.nan], rows.shape).astype(np.float32)
        state = update(
            cero, state, rows, rewards, rng.random(rows.shape) < 0.8, drawn_ids=np.array(ids), drawn_counts=grants
        )
        low, high = theta_box(cero, informativeness(state))
        slack = 1 + 1e-6  # the box here is computed outside of jit
        assert bool(((state.theta * slack >= low) & (state.theta <= high * slack) & (state.theta > 0)).all())
        assert min(state.alpha.min(), state.beta.min()) > 0
        assert state.mu >= 0
    assert state.spent == made == state.rollouts.sum()
    assert state.epoch * 5 + state.draws == draws


def test_jit_vmap_and_a_restored_state_change_nothing():
    cero = Cero(400, 6, 5, 8)
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, 6, (2, 3, 20))
    rewards = rng.integers(0, 2, (2, 3, 20)).astype(np.float32)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jitted = []
    for run in range(2):
        state = init(cero)
        for step in range(3):
            state = update(cero, state, ids[run, step], rewards[run, step])
            leaves, tree = jax.tree.flatten(state)
            state = jax.tree.unflatten(tree, [np.array(leaf) for leaf in leaves])
        jitted.append(state)
    many = jax.jit(jax.vmap(functools.partial(cero_lib.update, cero)))
    state = jax.tree.map(lambda x: jnp.stack([x, x]), init(cero))
    for step in range(3):
        state = many(state, ids[:, step], rewards[:, step])
    stacked = jax.tree.map(lambda *x: np.stack(x), *jitted)
    jax.tree.map(close, state, stacked)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, stacked)
    first = update(cero, init(cero), ids[0, 0], rewards[0, 0])
    jax.tree.map(close, cero_lib.update(cero, init(cero), ids[0, 0], rewards[0, 0]), first)
    # Each rollout counts once, whatever the order of the rows (as from two hosts).
    flipped = update(cero, init(cero), ids[0, 0, ::-1], rewards[0, 0, ::-1])
    jax.tree.map(np.testing.assert_array_equal, flipped, first)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"n_max": 1}, "n_max=1"),
        ({"budget": 1}, "budget=1"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"budget": 2**31}, "budget=2147483648"),
        ({"eta": 0.0}, "eta=0.0"),
        ({"eta": math.nan}, "eta=nan"),
        ({"step_theta": -1.0}, "step_theta"),
        ({"step_mu": math.inf}, "step_mu"),
        ({"prior": (0.0, 1.0)}, "prior"),
        ({"prior": (1.0,)}, "prior"),
        ({"discount": 1.1}, "discount"),
        ({"success_threshold": math.nan}, "success_threshold"),
        ({"min_visits": -1}, "min_visits"),
    ],
)
def test_impossible_settings_are_named(change, error):
    with pytest.raises(ValueError, match=error):
        Cero(**({"budget": 100, "num_prompts": 5, "epochs": 2, "n_max": 4} | change))


def test_other_errors_and_hashing():
    cero = Cero(100, 5, 2, 4, prior=[1.0, 2.0])
    assert hash(cero) == hash(Cero(100, 5, 2, 4, prior=(1.0, 2.0)))
    with pytest.raises(TypeError, match=r"n_max=4\.5"):
        Cero(100, 5, 2, 4.5)
    state = init(cero)
    with pytest.raises(ValueError, match="ids hold prompt 5, but num_prompts=5"):
        cero_lib.allocate(cero, state, np.array([0, 5]))
    with pytest.raises(ValueError, match="ids hold prompt -2"):
        cero_lib.update(cero, state, np.array([-2]), np.ones(1))
    with pytest.raises(ValueError, match="one of drawn_ids and drawn_counts"):
        cero_lib.update(cero, state, np.array([0]), np.ones(1), drawn_ids=np.array([0]))


def test_metrics():
    cero = Cero(100, 4, 2, 8)
    state = dataclasses.replace(prices(cero, [0.4, 0.1, 0.2, 0.1], 0.15, 30), visits=jnp.array([3, 0, 0, 0]))
    got = {k: float(v) for k, v in cero_lib.metrics(cero, state).items()}
    assert got == pytest.approx(
        {
            "mu": 0.15,
            "theta_mean": 0.2,
            "q_mean": 1 / 6,
            "spent": 30,
            "left": 70,
            "epoch": 0,
            "active": 0.5,
            "explored": 0.25,
        }
    )


# ---------------------------------------------------------------- effective prompt ratio


def test_effective_prompt_ratio():
    rewards = jnp.array([1.0, 0, 1, 1, 0, 0.3, jnp.nan, 0.3, 1, 9])
    group = jnp.array([0, 0, 1, 1, 2, 3, 3, 3, 3, -1])
    valid = jnp.array([1, 1, 1, 1, 1, 1, 1, 1, 0, 1], bool)
    # 0 is mixed; 1, 2 and 3 are not (the 1 of group 3 is invalid); 4 has no rollouts
    ratio = functools.partial(cero_lib.effective_prompt_ratio, num_groups=5)
    assert ratio(rewards, group, valid=valid) == pytest.approx(1 / 4)
    assert ratio(rewards, group) == pytest.approx(2 / 4)
    assert jax.jit(ratio)(rewards, group, valid=valid) == pytest.approx(1 / 4)
    assert ratio(rewards, jnp.full(10, -1)) == 0


def test_effective_prompt_ratio_on_equal_numbers_of_samples():
    # 8 rows with one success: 4 at random hold it with probability 1/2; groups of 3 are left out.
    groups = 2000
    rewards = jnp.tile(jnp.array([0.0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1]), groups)
    group = jnp.repeat(jnp.arange(2 * groups), jnp.tile(jnp.array([8, 3]), groups))
    ratio = jax.jit(cero_lib.effective_prompt_ratio, static_argnames=("num_groups", "samples"))
    args = {"rewards": rewards, "group": group, "num_groups": 2 * groups}
    assert ratio(**args) == 1
    only = ratio(**args, samples=4, key=jax.random.key(0))
    assert only == pytest.approx(1 / 2, abs=4 * math.sqrt(0.25 / groups))
    for bad in ({"samples": 4}, {"samples": 1, "key": jax.random.key(0)}):
        with pytest.raises(ValueError, match="samples="):
            cero_lib.effective_prompt_ratio(**args, **bad)


# ---------------------------------------------------------------- whole runs


def simulate(cero, p, order, luck, state, *, learn):
    """Visits order[steps, P] (-1 pads) with uniforms luck[steps, P, N_max].

    Returns the final state, grants[steps, P] and mixed[steps, P] (whether a prompt's rewards differed).
    """

    def step(state, inputs):
        ids, luck = inputs
        grants = cero_lib.allocate(cero, state, ids)
        live = jnp.arange(cero.n_max) < grants[:, None]
        solved = live & (luck < p[ids][:, None])
        state = cero_lib.update(
            cero,
            state,
            jnp.where(live, ids[:, None], -1).ravel(),
            solved.ravel().astype(jnp.float32),
            jnp.full(live.size, learn),
            drawn_ids=ids,
            drawn_counts=grants,
        )
        total = solved.sum(1)
        return state, (grants, (total > 0) & (total < grants))

    return jax.lax.scan(step, state, (order, luck))


@pytest.mark.parametrize(("share", "least"), [(0.5, 189.5), (0.25, 187.5)])
def test_a_run_comes_close_to_the_optimum_with_hindsight(share, least):
    """M=500 prompts, p ~ Beta(.4, .4), N_max=16, 32 prompts a step, K=30, B = share M K N_max."""
    m, epochs, n_max, step = 500, 30, 16, 32
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 0.4, m)
    cero = Cero(int(share * m * epochs * n_max), m, epochs, n_max)
    visits = np.concatenate([rng.permutation(m) for _ in range(epochs)])
    order = np.pad(visits, (0, -len(visits) % step), constant_values=-1).reshape(-1, step)
    luck = rng.random((*order.shape, n_max), np.float32)
    run = jax.jit(functools.partial(simulate, cero, learn=True))
    state, (grants, mixed) = run(jnp.asarray(p, jnp.float32), order, luck, init(cero))
    grants, mixed = (np.asarray(x).ravel()[: len(visits)].reshape(epochs, m) for x in (grants, mixed))

    q, eta = jnp.asarray(p * (1 - p), jnp.float32), cero.rates.eta
    best = utility(q, eta, cero_lib.offline_allocation(q, eta, cero.budget, epochs * n_max)).sum()
    uniform = utility(q, eta, cero.budget / m).sum()
    total = utility(q, eta, state.rollouts).sum()
    assert best == pytest.approx(198.2, abs=0.1)
    assert uniform == pytest.approx(160.2, abs=0.1)
    assert least < total < 193.5

    assert state.spent == grants.sum()
    assert cero.budget - 2 < state.spent <= cero.budget
    assert state.epoch == epochs
    # After the start, every epoch keeps to its pro rata target; the last has what is left.
    use = grants.sum(1) / (cero.budget / epochs)
    assert np.abs(use[3:-1] - 1).max() < 0.25
    assert 0.3 < use[-1] < 1
    ratio = mixed.sum(1) / (grants > 0).sum(1)
    assert ratio[4:].mean() == pytest.approx(0.9, abs=0.05)
    group = n_max * share  # uniform GRPO on the same budget
    assert np.mean(1 - p**group - (1 - p) ** group) == pytest.approx({0.5: 0.55, 0.25: 0.41}[share], abs=0.03)


def test_regret_in_fluid_scaling():
    """U_i(n) = K (1 - exp(-eta q_i n / K)), B = b K: CERO's regret grows like sqrt(K), uniform's like K.

    eta / K is what the default eta = 4 M / B = (4 M / b) / K is, so the code runs as it stands.
    """
    m, n_max, share = 64, 8, 0.5
    p = np.random.default_rng(5).beta(0.4, 0.4, m)
    horizons = [8, 64, 512]
    regret = {"cero": [], "uniform": []}
    for epochs in horizons:
        cero = Cero(int(share * m * epochs * n_max), m, epochs, n_max)
        start = with_q(cero, p)
        order = np.arange(m * epochs).reshape(-1, 16) % m
        run = jax.jit(functools.partial(simulate, cero, learn=False))  # invalid rows: q stays as it is
        state, _ = run(jnp.asarray(p, jnp.float32), order, np.zeros((*order.shape, n_max), np.float32), start)
        q, eta = np.asarray(informativeness(start), np.float64), cero.rates.eta
        best = cero_lib.offline_allocation(jnp.asarray(q, jnp.float32), eta, cero.budget, epochs * n_max)

        def total(n, q=q, eta=eta, epochs=epochs):
            return epochs * np.sum(1 - np.exp(-eta * q * np.asarray(n, np.float64)))

        assert state.spent <= cero.budget
        regret["cero"].append(total(best) - total(state.rollouts))
        regret["uniform"].append(total(best) - total(np.full(m, cero.budget / m)))
    assert min(regret["cero"]) > 0  # no allocation beats the optimum
    slope = {k: np.polyfit(np.log(horizons), np.log(v), 1)[0] for k, v in regret.items()}
    assert slope["cero"] <= 0.6, slope
    assert slope["uniform"] >= 0.9, slope
