"""OBRS in the learner: hand-computed weights, unbiased gradients, κ, tables of either source, the actor's own loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default
from rljax import config as config_lib
from rljax import correction, learner
from rljax.models import quantized
from rljax.objectives import Prior, Settings, actor_loss
from rljax.types import TrainBatch

DEFAULT = config_lib.resolve(default.get_config())
OBRS = dataclasses.replace(DEFAULT.jackpot, rule="obrs", top_k=3, c1=1e9, c2=1e9)
P = np.array([0.6, 0.3, 0.1])  # the policy
Q = np.array([0.2, 0.3, 0.5])  # the actor
ADVANTAGES = np.array([1.0, -2.0, 0.5])  # of each token
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


def sampled(count: int, top: int = 0) -> TrainBatch:
    """count rows of one token drawn from Q, in the exact shares of Q; with the sampler's top tokens, if asked for."""
    tokens = np.repeat(np.arange(3), np.rint(Q * count).astype(int)).astype(np.int32)[None, :, None]
    order = np.argsort(-Q)[:top]
    return TrainBatch(
        prompt_tokens=np.zeros((1, 1), np.int32),
        prompt_lengths=np.ones(1, np.int32),
        tokens=tokens,
        lengths=np.ones(tokens.shape[:2], np.int32),
        sampler_logprobs=np.log(Q)[tokens].astype(np.float32),
        advantages=ADVANTAGES[tokens[..., 0]].astype(np.float32),
        draws=np.zeros(1, np.uint32),
        samples=np.arange(tokens.shape[1], dtype=np.int32)[None],
        top_ids=np.broadcast_to(order, (*tokens.shape, top)).astype(np.int32),
        top_logprobs=np.broadcast_to(np.log(Q[order]), (*tokens.shape, top)).astype(np.float32),
    )


@pytest.fixture
def step_of(softmax_model):
    """step_of(batch, jackpot, …) → (gradient of the policy, of the actor, metrics) from policy P and actor Q."""

    def run(batch, jackpot=OBRS, *, with_actor=True, optimizer=RECORD, seed=0, actor=DEFAULT.actor, loss=None, **more):
        z = [{"z": jnp.log(jnp.asarray(x, jnp.float32))} for x in (P, Q)]
        settings = Settings(
            model=softmax_model, loss=DEFAULT.loss if loss is None else loss, jackpot=jackpot, actor=actor,
            actor_model=softmax_model, **dict(
                temperature=1.0, token_chunk=1 << 14, max_length=1, micro_batches=1, minibatches=1, epochs=1,
            ) | more,
        )  # fmt: skip
        state = learner.init(z[0], optimizer, learner.init(z[1], optimizer) if with_actor else None)
        step = learner.make_step(settings, optimizer, state, optimizer if with_actor else None)
        state, sums = step(state, batch, None, jax.random.key(seed))
        actor_grad = state.actor.opt_state if with_actor else None
        return state.opt_state, actor_grad, learner.metrics(jax.device_get(sums))

    return run


def policy_gradient(p, weights=None):
    """-E_p[w A ∇ log p] of a softmax over three tokens."""
    weights = np.ones(3) if weights is None else weights
    per_token = np.eye(3) - P
    return -(p * weights * ADVANTAGES) @ per_token


@pytest.mark.parametrize("change", [{}, {"normaliser": "exact"}, {"normalise": "proposed"}, {"lam": 0.5}, {"lam": 3.0}])
def test_accepted_tokens_give_the_policys_own_gradient(step_of, change):
    """In one state every normalisation estimates E_p[A ∇ log p], which the actor's rows alone do not."""
    want = policy_gradient(P)
    got, _, line = step_of(sampled(20_000), dataclasses.replace(OBRS, **change))
    np.testing.assert_allclose(got["z"], want, atol=0.03)
    plain, _, _ = step_of(sampled(20_000), dataclasses.replace(OBRS, rule="none"))
    np.testing.assert_allclose(plain["z"], policy_gradient(Q), atol=1e-4)
    assert np.abs(policy_gradient(Q) - want).max() > 0.2
    lam = OBRS.lam if "lam" not in change else change["lam"]
    assert line["jackpot/acceptance"] == pytest.approx(np.minimum(Q, P / lam).sum(), abs=0.015)


def test_metrics_are_those_of_the_two_distributions(step_of):
    """λ = 1: Z = .6, KL .498 before and .148 after; all of the vocabulary is in the table, so κ is near 1."""
    _, _, line = step_of(sampled(20_000))
    assert line["jackpot/z"] == pytest.approx(0.6, abs=1e-5)
    assert line["jackpot/kl_before"] == pytest.approx(0.498, abs=1e-3)
    assert line["jackpot/kl_after"] == pytest.approx(0.148, abs=1e-3)
    assert line["jackpot/kappa"] == pytest.approx(1, abs=0.02)
    assert line["jackpot/weight_mean"] == pytest.approx(1, abs=0.02)
    assert line["jackpot/lambda"] == 1


def test_kappa_makes_up_for_what_the_table_leaves_out(step_of):
    """The sampler's top 2 are tokens 2 and 1: Σ min(q, p) over them is .4 of Z = .6, so κ is 1.5."""
    want = policy_gradient(P)
    got, _, line = step_of(sampled(20_000, top=2), dataclasses.replace(OBRS, table="sampler", top_k=2))
    assert line["jackpot/kappa"] == pytest.approx(1.5, abs=0.03)
    np.testing.assert_allclose(got["z"], want, atol=0.03)


def test_a_budget_finds_its_lambda(step_of):
    """A budget of .8 is λ = 1/3 for this pair."""
    _, _, line = step_of(sampled(20_000), dataclasses.replace(OBRS, budget=0.8))
    assert line["jackpot/lambda"] == pytest.approx(1 / 3, abs=1e-3)
    assert line["jackpot/acceptance"] == pytest.approx(0.8, abs=0.01)


def test_bounds_of_the_weights(step_of):
    """Z max(1, p/q) = (1.8, .6, .6): c1 = 1 cuts the first token's, in all of its accepted rows."""
    got, _, line = step_of(sampled(20_000), dataclasses.replace(OBRS, normaliser="exact", c1=1.0))
    accepted = np.minimum(Q, P) / 0.6
    np.testing.assert_allclose(got["z"], policy_gradient(accepted, np.array([1.0, 0.6, 0.6])), atol=0.02)
    assert line["jackpot/at_c1"] == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.slow
def test_acceptance_is_the_same_in_every_split(step_of, monkeypatch):
    """Uniforms are keyed by draw, sample and position: micro-batches change neither acceptance nor gradient."""
    half = sampled(64)
    batch = jax.tree.map(lambda x: np.concatenate([x] * 4), half)
    batch = dataclasses.replace(batch, draws=np.arange(4, dtype=np.uint32))
    want, want_actor, line = step_of(batch)
    for how in ({"micro_batches": 2}, {"micro_batches": 4}):
        got, actor, parts = step_of(batch, **how)
        np.testing.assert_allclose(got["z"], want["z"], rtol=1e-5)
        np.testing.assert_allclose(actor["z"], want_actor["z"], rtol=1e-5)
        assert parts == pytest.approx(line, rel=1e-5)
    other, _, _ = step_of(batch, seed=1)
    assert np.abs(other["z"] - want["z"]).max() > 1e-4


def test_the_actor_learns_from_its_own_rollouts_and_from_the_policy(step_of):
    actor = dataclasses.replace(DEFAULT.actor, distill_coef=0.0)
    _, got, line = step_of(sampled(1000), actor=actor)
    np.testing.assert_allclose(got["z"], -(Q * ADVANTAGES) @ (np.eye(3) - Q), atol=1e-5)
    assert "actor/distill_kl" not in line
    for direction, first, second in (("reverse", Q, P), ("forward", P, Q)):
        actor = dataclasses.replace(DEFAULT.actor, loss_coef=0.0, distill_coef=2.0, distill_direction=direction)
        _, got, line = step_of(sampled(1000), actor=actor)
        assert line["actor/distill_kl"] == pytest.approx((first * np.log(first / second)).sum(), rel=1e-5)

        def kl(z, direction=direction):
            log_q, log_p = jax.nn.log_softmax(z), jnp.log(jnp.asarray(P))
            if direction == "reverse":
                return 2 * jnp.sum(jnp.exp(log_q) * (log_q - log_p))
            return 2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q))

        np.testing.assert_allclose(got["z"], jax.grad(kl)(jnp.log(jnp.asarray(Q))), atol=1e-5)


def test_stale_form_follows_the_new_policy(step_of):
    """One model: the first of two updates accepts all (q is the policy), the second brings q near to the newer p."""
    loss = dataclasses.replace(DEFAULT.loss, clip_low=1.0, clip_high=1e9)
    jackpot = dataclasses.replace(OBRS, target="new")
    z = np.log(P)
    batch = sampled(20_000)
    tokens = np.repeat(np.arange(3), np.rint(P * 20_000).astype(int)).astype(np.int32)[None, :, None]
    batch = dataclasses.replace(
        batch, tokens=tokens, sampler_logprobs=np.log(P)[tokens].astype(np.float32),
        advantages=ADVANTAGES[tokens[..., 0]].astype(np.float32),
    )  # fmt: skip
    moves = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -g, grads), grads),
    )
    last, _, line = step_of(batch, jackpot, with_actor=False, optimizer=moves, loss=loss, epochs=2)
    new = np.exp(z - policy_gradient(P))
    new /= new.sum()
    want = -(new * ADVANTAGES) @ (np.eye(3) - new)
    np.testing.assert_allclose(last["z"], want, atol=0.03)
    first, second = 1.0, np.minimum(P, new).sum()
    assert line["jackpot/acceptance"] == pytest.approx((first + second) / 2, abs=0.01)
    assert second < 0.95


def test_tables_of_a_model_with_itself_accept_everything(random_model, make_batch):
    model, params = random_model
    batch = make_batch()
    jackpot = dataclasses.replace(OBRS, top_k=5)
    states = correction.tables((model, params), (model, params), batch, 1.0, jackpot, 0.7, 16)
    real = np.arange(5) < batch.lengths[..., None]
    np.testing.assert_allclose(np.asarray(states.z)[real], 1, atol=1e-5)
    np.testing.assert_allclose(np.asarray(states.kl_before)[real], 0, atol=1e-5)
    np.testing.assert_array_equal(states.target_logprobs, states.actor_logprobs)
    again = correction.renewed((model, params), batch, states, 0.7, 16)
    np.testing.assert_allclose(again.target_on, states.target_on, atol=1e-5)
    np.testing.assert_allclose(again.target_logprobs, states.target_logprobs, atol=1e-5)


def test_acceptance_of_each_token_comes_out_of_the_step_in_the_batchs_order(softmax_model, make_batch):
    """min(1, p / (λ q)) of the sampled tokens, 0 past their ends, whatever the minibatches; none without OBRS."""
    batch = make_batch(P=8, vocab=3)
    batch = dataclasses.replace(batch, sampler_logprobs=np.log(Q)[batch.tokens].astype(np.float32))
    z = {"z": jnp.log(jnp.asarray(P, jnp.float32))}
    real = np.arange(batch.tokens.shape[-1]) < batch.lengths[..., None]
    want = np.where(real, np.minimum(1, P / (0.5 * Q))[batch.tokens], 0)
    assert want[real].min() < want.max() == 1
    for rule, pieces in (("obrs", 1), ("obrs", 2), ("none", 1)):
        jackpot = dataclasses.replace(OBRS, rule=rule, lam=0.5, target="new" if pieces > 1 else "old")
        settings = Settings(
            model=softmax_model, loss=DEFAULT.loss, jackpot=jackpot, actor=DEFAULT.actor, actor_model=None,
            temperature=1.0, token_chunk=64, max_length=5, micro_batches=pieces, minibatches=pieces, epochs=1,
        )  # fmt: skip
        step = functools.partial(learner.train_step, settings=settings, optimizer=RECORD)
        state = jax.eval_shape(lambda: learner.init(z, RECORD)) if rule == "none" else learner.init(z, RECORD)
        if rule == "none":
            _, sums = jax.eval_shape(step, state, None, batch, None, jax.random.key(0))
            assert "acceptance" not in sums
            continue
        _, sums = jax.jit(step)(state, None, batch, None, jax.random.key(0))
        np.testing.assert_allclose(sums["acceptance"], want, rtol=1e-5)


def test_int8_is_within_half_a_step_and_keeps_norms(random_model):
    model, params = random_model
    small = quantized.quantize(params)
    back = quantized.dequantize(small)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(back), strict=True):
        if path[-1].key.endswith("norm"):
            np.testing.assert_array_equal(got, want)
            continue
        axis = -1 if path[-1].key == "embed" else -2
        step = np.abs(want).max(axis=axis, keepdims=True) / 127
        assert (np.abs(got - want) <= 0.5 * step + 1e-7).all() and np.abs(got - want).max() > 0
    assert small["layers"]["q"].values.dtype == np.int8
    tokens = jnp.array([[[3, 4, 5]]])
    valid = jnp.ones(tokens.shape, bool)
    hidden = quantized.Quantized(model).extend(small, tokens, valid)
    np.testing.assert_allclose(hidden, model.extend(back, tokens, valid), atol=1e-6)


def test_an_actor_whose_rollouts_are_stale_learns_by_truncated_ratios(softmax_model, make_batch):
    """On tokens whose ratio to the sampler is 1.5 the loss is 1.5 times as large; where it is 4, twice (TIS, C = 2)."""
    batch, z = make_batch(vocab=3, padding_prompts=0), {"z": jnp.log(jnp.asarray(P, jnp.float32))}
    own = np.log(P)[batch.tokens].astype(np.float32)

    def loss(ratio, **changes):
        settings = Settings(
            model=softmax_model, loss=DEFAULT.loss, jackpot=OBRS, actor_model=softmax_model, temperature=1.0,
            actor=dataclasses.replace(DEFAULT.actor, distill_coef=0.0), token_chunk=64, max_length=5, micro_batches=1,
            minibatches=1, epochs=1, **changes,
        )  # fmt: skip
        sampled = dataclasses.replace(batch, sampler_logprobs=own - np.float32(np.log(ratio)))
        prior = Prior(old=None, ref=None, actor=None)
        return float(actor_loss(z, sampled, prior, None, None, (jnp.float32(1), jnp.float32(1)), settings)[0])

    fresh = loss(1.5)
    assert fresh != 0 and loss(4.0) == fresh
    assert loss(1.5, stale=True) == pytest.approx(1.5 * fresh) and loss(4.0, stale=True) == pytest.approx(2 * fresh)


GOLDEN = {"acceptance": 0.875, "policy": 4.24865, "actor": 1.68361, "distill": 0.0130695}


def test_golden_step(random_model, make_batch):
    """One AdamW step of a decoder and of an actor with other weights, on rows that the actor might have sampled."""
    model, params = random_model
    other = jax.jit(model.init)(jax.random.key(5))
    optimizer = learner.make_optimizer(dataclasses.replace(DEFAULT.learner, learning_rate=1e-2, warmup_updates=0), 9)
    settings = Settings(
        model=model, loss=DEFAULT.loss, jackpot=dataclasses.replace(OBRS, top_k=5, c1=3.0), actor=DEFAULT.actor,
        actor_model=model, temperature=0.7, token_chunk=64, max_length=5, micro_batches=1, minibatches=1, epochs=1,
    )  # fmt: skip
    own = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
    state = learner.init(own, optimizer, learner.init(other, optimizer))
    step = learner.make_step(settings, optimizer, state, optimizer)
    _, sums = step(state, make_batch(), None, jax.random.key(0))
    line = learner.metrics(jax.device_get(sums))
    names = {
        "acceptance": "jackpot/acceptance", "policy": "train/grad_norm", "actor": "actor/grad_norm",
        "distill": "actor/distill_kl",
    }  # fmt: skip
    got = {name: line[key] for name, key in names.items()}
    assert got == pytest.approx(GOLDEN, rel=1e-3), (
        f"Jackpot's step computes other numbers: {got}. Change GOLDEN only where the mathematics was meant to change "
        "(say so in the commit), or where a new jax draws other random weights; never to pass a refactoring"
    )
