"""The policy loss: hand-computed values and gradients of every switch, aggregation, importance weights."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algos.kl import kl_loss
from rljax.algos.losses import aggregate_loss, importance_weights, loss_denominator, policy_loss
from rljax.algos.masked import merge_sums

CLIPS = dict(clip_low=0.2, clip_high=0.28)
WIDE = dict(clip_low=10.0, clip_high=10.0)
AGGREGATES = ("token", "sequence", "constant")


def loss_grad(advantages, mask, **settings):
    """(logprobs, old) → (loss, sums, gradient by logprobs)."""

    def run(logprobs, old):
        f = functools.partial(policy_loss, **(CLIPS | settings))
        (loss, sums), grad = jax.value_and_grad(f, has_aux=True)(logprobs, old, jnp.asarray(advantages), mask)
        return loss, sums, grad

    return run


def rows(values):
    return jnp.asarray(values, jnp.float32)[:, None]


# ---------------------------------------------------------------- the objective


def test_clip_sides_and_clip_metric(run):
    """Objectives 1.28, -1.5, -.8, .5; the first and the third have no gradient and are the clipped ones."""
    ratio, advantages = rows([1.5, 1.5, 0.5, 0.5]), [1.0, -1.0, -1.0, 1.0]
    one = run(jax.vmap(lambda r, a: policy_loss(r, jnp.zeros(1), a, jnp.ones(1, bool), **CLIPS)[0]))
    np.testing.assert_allclose(-one(jnp.log(ratio), jnp.array(advantages)), [1.28, -1.5, -0.8, 0.5], rtol=1e-6)

    step = run(loss_grad(advantages, jnp.ones((4, 1), bool)))
    loss, sums, grad = step(jnp.log(ratio), jnp.zeros((4, 1)))
    np.testing.assert_allclose(loss, 0.52 / 4, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [0.0, 1.5 / 4, 0.0, -0.5 / 4], rtol=1e-6)
    assert sums["clipped_tokens"] / sums["tokens"] == 0.5


def test_each_side_is_clipped_by_its_own_bound(run):
    """A good token at 1.25 is below 1 + .28, though above 1 + .2; a bad one at .75 is below 1 - .2."""
    step = run(loss_grad([1.0, -1.0], jnp.ones((2, 1), bool)))
    loss, sums, grad = step(jnp.log(rows([1.25, 0.75])), jnp.zeros((2, 1)))
    np.testing.assert_allclose(loss, (-1.25 + 0.8) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [-1.25 / 2, 0.0], rtol=1e-6)
    assert sums["clipped_tokens"] == 1


@pytest.mark.parametrize("old_is", ["constant", "the same array"])
def test_first_update_has_the_policy_gradient(old_is, run):
    """The ratio is 1 and still has a gradient, also where the caller forgets to stop old's."""

    def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[:1]
        old = jnp.log(jnp.array([0.5])) if old_is == "constant" else logprobs
        return policy_loss(logprobs, old, 1.0, jnp.ones(1, bool), **CLIPS)[0]

    value, grad = run(jax.value_and_grad(loss))(jnp.zeros(2))
    assert value == -1
    np.testing.assert_allclose(grad, [-0.5, 0.5], rtol=1e-6)


def test_second_update_is_seen_by_the_ratio(run):
    step = run(loss_grad([1.0], jnp.ones((1, 1), bool)))
    _, sums, _ = step(jnp.log(rows([0.6])), jnp.log(rows([0.5])))
    np.testing.assert_allclose(sums["ratio_sum"], 1.2, rtol=1e-6)


def test_infinite_clips_are_no_clip():
    step = loss_grad([1.0, -1.0], jnp.ones((2, 1), bool), clip_low=math.inf, clip_high=math.inf)
    loss, sums, grad = step(jnp.log(rows([5.0, 0.1])), jnp.zeros((2, 1)))
    np.testing.assert_allclose(loss, -4.9 / 2, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [-2.5, 0.05], rtol=1e-6)
    assert sums["clipped_tokens"] == 0


def test_dual_clip_bounds_the_ratio_of_bad_tokens_only(run):
    step = run(loss_grad([-1.0, -1.0, 1.0], jnp.ones((3, 1), bool), dual_clip=3.0))
    loss, sums, grad = step(jnp.log(rows([5.0, 2.5, 5.0])), jnp.zeros((3, 1)))
    np.testing.assert_allclose(loss, (3.0 + 2.5 - 1.28) / 3, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [0.0, 2.5 / 3, 0.0], rtol=1e-6)
    assert (sums["dual_clipped_tokens"], sums["clipped_tokens"]) == (1, 1)


def test_cispo_clips_the_weight_and_keeps_every_gradient(run):
    step = run(loss_grad([1.0, -1.0, 1.0], jnp.ones((3, 1), bool), objective="cispo"))
    logprobs = rows([-0.5, -2.0, -1.0])
    loss, sums, grad = step(logprobs, logprobs - jnp.log(rows([1.5, 0.5, 1.1])))
    np.testing.assert_allclose(loss, (1.28 * 0.5 - 0.8 * 2.0 + 1.1 * 1.0) / 3, rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], np.array([-1.28, 0.8, -1.1]) / 3, rtol=1e-6)
    assert sums["clipped_tokens"] == 2


def test_sequence_ratio_is_the_geometric_mean_over_valid_tokens(run):
    """GSPO: s = exp(mean log ratio) over all valid tokens, also those that are not accepted."""
    mask, accept = jnp.array([[True, True, False]]), jnp.array([[True, False, True]])
    log_ratio, s = jnp.array([[0.2, 0.4, 9.0]]), math.exp(0.3)
    settings = dict(ratio="sequence", aggregate="sequence", **WIDE)
    for given in (None, accept):
        loss, sums, grad = run(loss_grad([2.0], mask, accept=given, **settings))(log_ratio, jnp.zeros((1, 3)))
        np.testing.assert_allclose(loss, -2 * s, rtol=1e-6)
        np.testing.assert_allclose(grad, [[-s, -s, 0.0]], rtol=1e-6)
        np.testing.assert_allclose(sums["ratio_max"], s, rtol=1e-6)


def test_sequence_ratio_clips_whole_sequences(run):
    step = run(loss_grad([1.0, 1.0], jnp.ones((2, 2), bool), ratio="sequence", clip_low=0.1, clip_high=0.2))
    _, sums, grad = step(jnp.array([[0.9, -0.1], [0.9, -0.9]]), jnp.zeros((2, 2)))
    np.testing.assert_allclose(grad, [[0.0, 0.0], [-0.25, -0.25]], rtol=1e-6)
    assert sums["clipped_tokens"] == 2


def test_advantages_of_tokens(run):
    step = run(loss_grad([[1.0, -3.0]], jnp.ones((1, 2), bool)))
    loss, _, grad = step(jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    assert loss == 1.0
    np.testing.assert_array_equal(grad, [[-0.5, 1.5]])


# ---------------------------------------------------------------- aggregation

LOSSES = jnp.array([[4.0, 9.0, 9.0, 9.0], [1.0, 1.0, 3.0, 1.0], [7.0, 7.0, 7.0, 7.0]])
VALID = jnp.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool)  # the last is a padding row
ACCEPT = jnp.array([[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]], bool)


@pytest.mark.parametrize(
    "aggregate, plain, accepted, denominators",
    [
        ("token", 9 / 4, 4 / 2, (4, 2)),
        ("sequence", (4 + 5 / 3) / 2, 2.0, (2, 1)),
        (
            "constant",
            9 / 20,
            4 / 20,
            (20, 20),
        ),  # the limit is 10 tokens; the width 4 of the bucket says nothing
    ],
)
def test_aggregates(aggregate, plain, accepted, denominators, run):
    settings = dict(aggregate=aggregate, max_length=10)
    of = run(lambda x, m, a: aggregate_loss(x, m, accept=a, **settings))
    np.testing.assert_allclose(of(LOSSES, VALID, VALID), plain, rtol=1e-6)
    np.testing.assert_allclose(of(LOSSES, VALID, ACCEPT), accepted, rtol=1e-6)
    count = run(lambda m, a: loss_denominator(m, a, **settings))
    assert (count(VALID, VALID), count(VALID, ACCEPT)) == denominators
    np.testing.assert_allclose(run(lambda x, m: aggregate_loss(x, m, **settings))(LOSSES, VALID), plain, rtol=1e-6)


def test_four_tokens_two_masked():
    losses, mask = jnp.ones((1, 4)), jnp.array([[True, True, False, False]])
    assert aggregate_loss(losses, mask, aggregate="token") == 1.0
    assert aggregate_loss(losses, mask, aggregate="constant", max_length=4) == 0.5


def test_token_mean_of_two_micro_batches(run):
    """One token of loss 4 in one micro-batch and three of 0 in the other make 1."""
    losses = jnp.array([[[4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]])
    mask = jnp.array([[[True, False, False]], [[True, True, True]]])
    denominator = loss_denominator(mask, aggregate="token")
    part = run(lambda x, m, d: aggregate_loss(x, m, aggregate="token", denominator=d))
    assert part(losses[0], mask[0], denominator) + part(losses[1], mask[1], denominator) == 1.0


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_weights_multiply_and_do_not_divide(aggregate, run):
    settings = dict(aggregate=aggregate, max_length=10)
    of = run(lambda x, m, w: aggregate_loss(x, m, weights=w, **settings))
    whole = aggregate_loss(LOSSES, VALID, **settings)
    np.testing.assert_allclose(of(LOSSES, VALID, jnp.full(3, 2.5)), 2.5 * whole, rtol=1e-6)
    weights = jnp.where(VALID, LOSSES, jnp.nan)
    np.testing.assert_allclose(of(LOSSES, VALID, weights), aggregate_loss(LOSSES**2, VALID, **settings), rtol=1e-6)
    gradient = jax.grad(lambda w: of(LOSSES, VALID, w))(jnp.ones((3, 4)))
    np.testing.assert_array_equal(gradient, 0.0)


HALVES = (slice(0, 2), slice(2, 4))


def random_batch():
    keys = jax.random.split(jax.random.key(0), 7)
    shape = (4, 3, 5)
    lengths = jax.random.randint(keys[0], shape[:2], 0, 6).at[3, 2].set(0)
    return dict(
        logprobs=-jax.random.uniform(keys[1], shape) * 3,
        old_logprobs=-jax.random.uniform(keys[2], shape) * 3,
        ref_logprobs=-jax.random.uniform(keys[3], shape) * 3,
        advantages=jax.random.normal(keys[4], shape[:2]),
        mask=jnp.arange(5) < lengths[..., None],
        accept=jax.random.bernoulli(keys[5], 0.7, shape),
        weights=jax.random.uniform(keys[6], shape) * 2,
    )


@pytest.mark.parametrize("aggregate, ratio", [("token", "sequence"), ("sequence", "token"), ("constant", "token")])
def test_micro_batches_add_up(aggregate, ratio):
    """Loss, KL, gradient and metrics of one and of two micro-batches of a [P, K, T] minibatch are the same."""
    batch = random_batch()
    settings = dict(aggregate=aggregate, max_length=8)
    denominator = loss_denominator(batch["mask"], batch["accept"], **settings)

    def total(logprobs, b):
        shared = dict(accept=b["accept"], weights=b["weights"], aggregate=aggregate, denominator=denominator)
        loss, sums = policy_loss(
            logprobs, b["old_logprobs"], b["advantages"], b["mask"], ratio=ratio, **CLIPS, **shared
        )
        kl, kl_sums = kl_loss(logprobs, b["ref_logprobs"], b["mask"], **shared)
        return loss + 0.1 * kl, sums | kl_sums

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    (whole, whole_sums), whole_grad = step(batch["logprobs"], batch)
    results = [step(part["logprobs"], part) for part in ({k: v[s] for k, v in batch.items()} for s in HALVES)]
    np.testing.assert_allclose(sum(r[0][0] for r in results), whole, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([r[1] for r in results]), whole_grad, rtol=1e-5, atol=1e-7)
    merged = merge_sums([r[0][1] for r in results])
    assert merged.keys() == whole_sums.keys()
    for name, value in merged.items():
        np.testing.assert_allclose(value, whole_sums[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_denominator_defaults_to_the_given_batch():
    b = random_batch()
    args = (b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"])
    for aggregate in AGGREGATES:
        settings = dict(aggregate=aggregate, max_length=8)
        own = policy_loss(*args, accept=b["accept"], **settings, **CLIPS)[0]
        denominator = loss_denominator(b["mask"], b["accept"], **settings)
        given = policy_loss(*args, accept=b["accept"], denominator=denominator, aggregate=aggregate, **CLIPS)[0]
        assert own == given


# ---------------------------------------------------------------- masks

SWITCHES = [
    dict(ratio="token", objective="ppo", aggregate="token"),
    dict(ratio="sequence", objective="ppo", aggregate="sequence"),
    dict(ratio="token", objective="cispo", aggregate="constant", max_length=3),
    dict(ratio="token", objective="ppo", aggregate="sequence", dual_clip=3.0),
]
LOG_RATIO = jnp.array([[0.1, -0.2, 0.3], [0.5, 0.1, -0.4]])
OLD = jnp.full((2, 3), -1.0)
SOME = jnp.array([[True, True, False], [True, False, False]])


def check_that_masks_hide(settings, run):
    def step(logprobs, old, advantages, weights, mask):
        def loss(logprobs):
            return policy_loss(logprobs, old, advantages, mask, weights=weights, **CLIPS, **settings)

        return jax.value_and_grad(loss, has_aux=True)(logprobs)

    step = run(step)
    ones = jnp.ones((2, 3))
    clean = step(OLD + LOG_RATIO, OLD, ones, ones, SOME)
    for hidden in (1000.0, -1000.0, jnp.nan, jnp.inf, -jnp.inf):
        dirty = jnp.where(SOME, 0.0, hidden)
        for result in (
            step(OLD + LOG_RATIO + dirty, OLD, ones, ones, SOME),
            step(OLD + LOG_RATIO, OLD + dirty, ones + dirty, ones + dirty, SOME),
        ):
            jax.tree.map(np.testing.assert_array_equal, clean, result)
    assert np.all(np.isfinite(clean[1])) and not np.any(clean[1][~SOME])


@pytest.mark.parametrize("settings", SWITCHES[1:])
def test_what_a_mask_hides_changes_nothing(settings):
    check_that_masks_hide(settings, jax.jit)


def test_what_a_mask_hides_changes_nothing_in_grpo(run):
    check_that_masks_hide(SWITCHES[0], run)


@pytest.mark.parametrize("settings", SWITCHES)
def test_nothing_counts(settings):
    for mask, accept in ((~SOME & SOME, SOME), (SOME, ~SOME)):
        step = jax.jit(loss_grad([1.0, -1.0], mask, accept=accept, **settings))
        bad = jnp.nan if settings["ratio"] == "token" else 0.3  # a sequence's ratio is of its rejected tokens too
        loss, sums, grad = step(OLD + bad, OLD)
        assert loss == 0 and not np.any(grad) and sums["tokens"] == 0
        assert all(np.isfinite(value) for value in sums.values())


def test_extreme_tokens_that_count_are_bounded_and_counted(run):
    log_ratio = jnp.array([[25.0, -50.0, 0.0]])
    loss, sums, grad = run(loss_grad([-1.0], jnp.ones((1, 3), bool)))(OLD[:1] + log_ratio, OLD[:1])
    np.testing.assert_allclose(loss, (math.exp(20) + 0.8 + 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(grad, [[0.0, 0.0, 1 / 3]], rtol=1e-6)
    assert (sums["bounded_tokens"], sums["degenerate_tokens"]) == (2, 0)


@pytest.mark.parametrize("settings", SWITCHES)
def test_tokens_of_probability_zero_weigh_zero_and_are_counted(settings):
    never = -jnp.inf
    new = jnp.array([[-1.0, never, -1.0, never]])
    old = jnp.array([[-1.0, -1.0, never, never]])
    loss, sums, grad = jax.jit(loss_grad([-1.0], jnp.ones((1, 4), bool), **settings))(new, old)
    assert np.isfinite(loss) and np.all(np.isfinite(grad))
    np.testing.assert_array_equal(np.abs(grad) > 0, [[True, False, False, False]])
    assert (sums["degenerate_tokens"], sums["tokens"], sums["ratio_sum"]) == (3, 4, 1)


def test_metrics(run):
    mask, accept = jnp.array([[1, 1, 1], [1, 1, 0]], bool), jnp.array([[1, 1, 0], [0, 0, 1]], bool)
    log_ratio = jnp.log(jnp.array([[1.5, 0.5, 9.0], [9.0, 9.0, 9.0]]))
    step = run(loss_grad([1.0, 1.0], mask, accept=accept, weights=jnp.array([[2.0, 1, 1], [1, 1, 1]])))
    loss, sums, _ = step(OLD + log_ratio, OLD)
    expected = dict(
        loss_sum=-2 * 1.28 - 0.5,
        tokens=2,
        sequences=1,
        weight_sum=3,
        clipped_tokens=1,
        dual_clipped_tokens=0,
        ratio_sum=2,
        ratio_max=1.5,
        log_ratio_sum=math.log(0.75),
        log_ratio_abs_sum=math.log(3),
        bounded_tokens=0,
        degenerate_tokens=0,
    )
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss * 2, sums["loss_sum"], rtol=1e-6)


# ---------------------------------------------------------------- importance weights

RHO = jnp.array([[3.0, 0.5, 1.5, 7.0], [0.25, 2.0, 9.0, 9.0]])
RHO_MASK = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


@pytest.mark.parametrize(
    "level, mode, weights, raw, cut",
    [
        ("token", "truncate", [[2, 0.5, 1.5, 0], [0.25, 2, 0, 0]], (5, 7.25, 3), 1),
        ("token", "mask", [[0, 0.5, 1.5, 0], [0, 2, 0, 0]], (5, 7.25, 3), 2),
        ("token", "none", [[1, 1, 1, 0], [1, 1, 0, 0]], (5, 7.25, 3), 0),
        ("sequence", "truncate", [[2, 2, 2, 0], [0.5, 0.5, 0, 0]], (2, 2.75, 2.25), 1),
        ("sequence", "mask", [[0, 0, 0, 0], [0.5, 0.5, 0, 0]], (2, 2.75, 2.25), 1),
        ("sequence", "none", [[1, 1, 1, 0], [1, 1, 0, 0]], (2, 2.75, 2.25), 0),
    ],
)
def test_importance_weights(level, mode, weights, raw, cut, run):
    f = run(lambda a, b, m: importance_weights(a, b, m, level=level, mode=mode, low=0.4, high=2.0))
    for hidden in (0.0, 1000.0, jnp.nan):
        got, sums = f(OLD[:, :1] + jnp.log(RHO), jnp.where(RHO_MASK, OLD[:, :1], hidden), RHO_MASK)
        np.testing.assert_allclose(got, weights, rtol=1e-5)
        names = ("importance_count", "importance_ratio_sum", "importance_ratio_max")
        np.testing.assert_allclose([sums[n] for n in names], raw, rtol=1e-5)
        assert (sums["importance_cut_count"], sums["importance_degenerate_count"]) == (cut, 0)


def test_importance_weights_keep_the_bounds_and_have_no_gradient():
    one, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    weights, _ = importance_weights(one, one, mask, mode="mask", low=1.0, high=1.0)
    assert weights == 1.0
    gradient = jax.grad(lambda a, b: importance_weights(a, b, mask, high=2.0)[0].sum(), argnums=(0, 1))(one, one)
    np.testing.assert_array_equal(gradient, 0.0)


def test_a_token_that_the_sampler_could_not_draw_weighs_zero(run):
    sampler = jnp.array([[-1.0, -jnp.inf], [-1.0, -1.0]])
    mask = jnp.ones((2, 2), bool)
    for level, expected in (("token", [[1, 0], [1, 1]]), ("sequence", [[0, 0], [1, 1]])):
        f = run(lambda a, b, m, level=level: importance_weights(a, b, m, level=level, high=2.0))
        for new in (-1.0, -jnp.inf):
            weights, sums = f(jnp.full((2, 2), -1.0).at[0, 1].set(new), sampler, mask)
            np.testing.assert_array_equal(weights, expected)
            assert sums["importance_degenerate_count"] == 1 and np.isfinite(sums["importance_ratio_sum"])


# ---------------------------------------------------------------- errors


def call(**changed):
    arrays = dict(logprobs=OLD, old_logprobs=OLD, advantages=jnp.ones(2), mask=SOME)
    return policy_loss(**(arrays | CLIPS | changed))


def weights_of(**changed):
    return importance_weights(OLD, OLD, SOME, **(dict(high=2.0) | changed))


@pytest.mark.parametrize(
    "f, changed, message",
    [
        (call, dict(ratio="word"), "unknown ratio 'word'; known: 'token', 'sequence'"),
        (call, dict(objective="trpo"), "unknown objective 'trpo'; known: 'ppo', 'cispo'"),
        (call, dict(aggregate="mean"), "unknown aggregate 'mean'; known: 'token', 'sequence', 'constant'"),
        (call, dict(aggregate="mean", denominator=1.0), "unknown aggregate 'mean'"),
        (call, dict(aggregate="constant"), "aggregate='constant' needs max_length ≥ 1.*got None"),
        (call, dict(clip_low=-0.1), "clip_low must be ≥ 0, got -0.1"),
        (call, dict(clip_high=math.nan), "clip_high must be ≥ 0, got nan"),
        (call, dict(dual_clip=1.0), "dual_clip must be > 1"),
        (call, dict(dual_clip=3.0, objective="cispo"), "dual_clip belongs to objective='ppo'"),
        (call, dict(mask=SOME[:1]), r"logprobs \(2, 3\).*mask \(1, 3\)"),
        (call, dict(accept=SOME[0]), r"accept \(3,\)"),
        (call, dict(advantages=jnp.ones(3)), r"must be \(2,\) or \(2, 3\), got \(3,\)"),
        (call, dict(weights=jnp.ones((2, 1))), r"must be \(2,\) or \(2, 3\), got \(2, 1\)"),
        (weights_of, dict(level="word"), "unknown level 'word'; known: 'token', 'sequence'"),
        (weights_of, dict(mode="clip"), "unknown mode 'clip'; known: 'truncate', 'mask', 'none'"),
        (weights_of, dict(mode="mask", low=3.0), "got low 3.0 > high 2.0"),
    ],
)
def test_errors(f, changed, message):
    with pytest.raises(ValueError, match=message):
        f(**changed)
