"""Who gets how many rollouts: the budget is never passed, and every draw and rollout is counted once."""

import jax
import numpy as np
import pytest

from rljax import budget
from rljax.algos import cero
from rljax.prompts import PromptSet, Stream

M, P, N = 10, 4, 4


@pytest.fixture
def stream():
    return Stream(PromptSet(tuple({"id": i} for i in range(M)), tuple([i + 1] for i in range(M)), 0), seed=3)


def make(rollouts=96, rule="cero", epochs=4, **options):
    if rule == "uniform":
        return budget.Uniform(budget=rollouts, prompts=P, samples=N)
    inner = cero.Cero(budget=rollouts, num_prompts=M, epochs=epochs, n_max=N, **options)
    return budget.Cero(prompts=P, cero=inner)


def rewards_of(ids, counts, draws):
    """float32[R], a function of the draw: prompts 0…2 always solved, 3…5 never, the others mixed."""
    rows = [(i, d, s) for i, n, d in zip(ids, counts, draws, strict=True) for s in range(n)]
    value = {0: lambda d, s: 1.0, 1: lambda d, s: 0.0}
    return np.array([value.get(i // 3, lambda d, s: float((d + s) % 2))(d, s) for i, d, s in rows], np.float32)


def play(allocator, stream, start=None, steps=None):
    """[(Grants, state after its rewards, rollouts so far)] of a run, or of its continuation after `start`."""
    draws, spent, state = (0, 0, allocator.init()) if start is None else start
    out = []
    while steps is None or len(out) < steps:
        grants = allocator.draw(stream, draws, spent, state)
        if not len(grants.prompts):
            return out
        ids = np.repeat(grants.prompts.ids, grants.counts)
        rewards = rewards_of(grants.prompts.ids, grants.counts, grants.prompts.draws)
        draws, spent = grants.draws, spent + len(rewards)
        state = allocator.update(grants.state, ids, rewards, np.ones(len(rewards), bool))
        out.append((grants, state, spent))
    return out


@pytest.mark.parametrize("rule", ["uniform", "cero"])
@pytest.mark.parametrize("rollouts", [16, 35, 96, 97])
def test_budget_is_spent_to_the_last_group_and_never_passed(stream, rule, rollouts):
    run = play(make(rollouts, rule, step_mu=0.0), stream)
    counts = np.concatenate([grants.counts for grants, _, _ in run])
    assert rollouts - 1 <= counts.sum() <= rollouts  # a single rollout is no group
    assert (counts[:-1] == N).all() and 2 <= counts[-1] <= N
    for grants, _, _ in run:
        assert 1 <= len(grants.prompts) <= P and grants.counts.dtype == np.int32
        assert len(grants.prompts) == len(grants.counts)


def test_uniform_takes_the_stream_in_order(stream):
    run = play(make(40, "uniform"), stream)
    assert [len(grants.prompts) for grants, _, _ in run] == [4, 4, 2]
    got = np.concatenate([grants.prompts.ids for grants, _, _ in run])
    np.testing.assert_array_equal(got, stream.take(0, M).ids)
    assert [grants.draws for grants, _, _ in run] == [4, 8, 10]
    assert make(40, "uniform").init() == () and make(40, "uniform").metrics(()) == {}


def test_uniform_has_no_last_epoch(stream):
    assert sum(len(grants.prompts) for grants, _, _ in play(make(50 * N, "uniform"), stream)) == 50


def test_cero_stops_after_its_epochs(stream):
    """A budget for every prompt at every visit, of which the certain ones soon take none."""
    run = play(make(4 * M * N, epochs=4), stream)
    assert run[-1][0].draws <= 4 * M
    assert int(run[-1][1].epoch) in (3, 4)
    seen = np.concatenate([grants.prompts.draws for grants, _, _ in run])
    assert len(set(seen)) == len(seen) and seen.max() < 4 * M


def test_prompts_granted_nothing_use_no_slot(stream):
    """Prices separate the prompts: the certain ones are skipped, and steps are filled with the others."""
    options = dict(eta=0.5, step_theta=0.02, step_mu=0.004)
    run = play(make(240, epochs=16, **options), stream)
    drawn, granted = run[-1][0].draws, sum(len(grants.prompts) for grants, _, _ in run)
    assert granted < drawn
    assert [len(grants.prompts) for grants, _, _ in run] == [P] * 15
    assert all((grants.counts > 0).all() for grants, _, _ in run)
    ids = np.concatenate([grants.prompts.ids for grants, _, _ in run])
    assert np.bincount(ids, minlength=M)[6:].mean() > np.bincount(ids, minlength=M)[:6].mean()


def test_cero_is_algos_cero_called_by_hand(stream):
    """One prompt after the other in the stream's order, without padding, gives the same grants and state."""
    allocator = make(80, epochs=8, eta=1.0, step_theta=0.02, step_mu=0.01, discount=0.5)
    inner, state, taken = allocator.cero, allocator.init(), 0
    for grants, after, _ in play(allocator, stream):
        ids, counts, where = [], [], []
        while taken < grants.draws:
            size = min(P - len(ids), 8 * M - taken)
            chunk = stream.take(taken, size)
            given = cero.allocate(inner, state, chunk.ids, reserved=sum(counts))
            none = np.zeros(0, np.int32), np.zeros(0, np.float32)
            state = cero.update(inner, state, *none, drawn_ids=chunk.ids, drawn_counts=given)
            taken += size
            for i, n, d in zip(chunk.ids, np.asarray(given), chunk.draws, strict=True):
                if n:
                    ids, counts, where = [*ids, i], [*counts, n], [*where, d]
        np.testing.assert_array_equal(grants.prompts.ids, ids)
        np.testing.assert_array_equal(grants.counts, counts)
        empty = np.zeros(0, np.int32)
        rows = np.repeat(ids, counts)
        rewards = rewards_of(ids, counts, where)
        state = cero.update(inner, state, rows, rewards, drawn_ids=empty, drawn_counts=empty)
        for ours, hand in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(ours, hand, rtol=1e-6, atol=1e-9)


def test_every_rollout_is_counted_once(stream):
    run = play(make(96), stream)
    drawn = np.zeros(M, int)
    for grants, state, spent in run:
        assert int(state.spent) == spent
        np.add.at(drawn, grants.prompts.ids, grants.counts)
    np.testing.assert_array_equal(run[-1][1].rollouts, drawn)
    np.testing.assert_array_equal(run[-1][1].alpha + run[-1][1].beta - 2, drawn)


def test_unscorable_rollouts_are_spent_but_teach_nothing(stream):
    allocator = make()
    grants = allocator.draw(stream, 0, 0, allocator.init())
    ids = np.repeat(grants.prompts.ids, grants.counts)
    valid = np.arange(len(ids)) % 4 != 1
    rewards = np.where(valid, np.float32(1), np.float32(np.nan))
    state = allocator.update(grants.state, ids, rewards, valid)
    assert int(state.spent) == 16
    np.testing.assert_array_equal(np.asarray(state.alpha)[grants.prompts.ids], 4)
    np.testing.assert_array_equal(state.beta, 1)


@pytest.mark.parametrize("rule", ["uniform", "cero"])
def test_state_and_draws_resume_a_run(stream, rule):
    allocator = make(160, rule, epochs=8)
    whole = play(allocator, stream)
    for stop in (1, len(whole) // 2, len(whole) - 1):
        grants, state, spent = whole[stop - 1]
        rest = play(allocator, stream, start=(grants.draws, spent, jax.device_get(state)))
        assert len(rest) == len(whole) - stop
        for (a, x, m), (b, y, n) in zip(rest, whole[stop:], strict=True):
            np.testing.assert_array_equal(a.prompts.draws, b.prompts.draws)
            np.testing.assert_array_equal(a.counts, b.counts)
            jax.tree.map(np.testing.assert_array_equal, x, y)
            assert m == n and a.draws == b.draws


def test_config_reaches_the_allocator(run_config):
    assert budget.from_config(run_config(), 12) == budget.Uniform(budget=96, prompts=4, samples=4)
    changes = {
        "budget.rule": "cero", "budget.epochs": 2, "budget.rollouts": 48, "rollout.prompts": 2, "cero.eta": 0.5,
        "cero.step_theta": 0.25, "cero.step_mu": 0.125, "cero.prior_alpha": 2.0, "cero.prior_beta": 3.0,
        "cero.discount": 0.75, "cero.success_threshold": 0.625, "cero.min_visits": 1,
    }  # fmt: skip
    inner = cero.Cero(
        budget=48, num_prompts=11, epochs=2, n_max=4, eta=0.5, step_theta=0.25, step_mu=0.125, prior=(2.0, 3.0),
        discount=0.75, success_threshold=0.625, min_visits=1,
    )  # fmt: skip
    expected = budget.Cero(prompts=2, cero=inner)
    assert budget.from_config(run_config(changes), 11) == expected
    assert set(expected.metrics(expected.init())) >= {"cero/mu", "cero/spent", "cero/q_mean"}


def test_a_budget_that_the_prompts_there_are_cannot_spend_is_refused(run_config):
    """Own tasks and files may hold fewer prompts than task.train_prompts says: 96 rollouts of 5 × 3 × 4."""
    config = run_config({"budget.rule": "cero"})
    assert budget.from_config(config, 8).cero.budget == 96
    with pytest.raises(ValueError, match=r"budget.rollouts = 96 can never be spent: 5 training prompts .* = 60"):
        budget.from_config(config, 5)


@pytest.mark.parametrize(
    "options, told",
    [
        ({}, None),
        # eta / 6 = .0625 of price; 4 + .75 a draw up to 2.5e-3 · 3.25 · 10 < .0625: nothing stops the first epoch.
        ({"rollouts": 41, "epochs": 4, "step_mu": 2.5e-3}, "the first of budget.epochs = 4 will spend about 98%"),
        ({"rollouts": 41, "epochs": 4, "min_visits": 1}, "the first of budget.epochs = 4 will spend about 98%"),
        ({"rollouts": 41, "epochs": 4}, None),
        ({"rollouts": 36}, "budget.rollouts = 36 are 9 groups of rollout.samples = 4 for 10 training prompts"),
    ],
)
def test_what_the_first_epoch_spends_is_foreseen_and_told_where_it_is_nearly_all(stream, options, told):
    allocator = make(**options)
    first = [grants for grants, _, _ in play(allocator, stream, steps=9) if (grants.prompts.draws < M).any()]
    spent = sum(int(grants.counts[grants.prompts.draws < M].sum()) for grants in first)
    assert abs(allocator.first_epoch() - spent) <= 1.5 * N  # M is small: the price goes up by steps
    assert [text.partition(told or "")[1] for text in allocator.foreseen()] == [told] * (told is not None)


def test_the_first_epoch_of_the_default_by_hand():
    """t = 81,920 / (5 · 2,048) = 8; D = 2,048 √5 / (15 (1 - 8/16)) = 610.6; 16 D + 8 (2,048 - D) = 21,268.8."""
    default = budget.Cero(prompts=32, cero=cero.Cero(81_920, 2_048, 5, 16))
    assert default.first_epoch() == pytest.approx(21_268.8, abs=0.1) and default.foreseen() == []


def test_a_uniform_budget_has_nothing_to_foresee():
    assert make(40, "uniform").foreseen() == []
