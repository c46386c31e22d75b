"""What is trained and in which precision: adapters of a frozen model, bfloat16, and the optimizers' states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default
from rljax import config as config_lib
from rljax import learner
from rljax.models import lora
from rljax.models.transformer import Model, attach_lora
from rljax.objectives import Settings

DEFAULT = config_lib.resolve(default.get_config())
ADAMW = dataclasses.replace(DEFAULT.learner, learning_rate=1e-2, warmup_updates=0)
LORA = lora.Lora(rank=2, alpha=4.0, targets=("q", "v", "down"))


def one_step(model, params, batch, options=ADAMW, reference=None, loss=DEFAULT.loss):
    """(state before, state after, metrics) of one update; `params` stay alive."""
    settings = Settings(
        model=model, loss=loss, jackpot=DEFAULT.jackpot, actor=DEFAULT.actor, actor_model=None, temperature=1.0,
        token_chunk=16, max_length=9, micro_batches=1, minibatches=1, epochs=1,
    )  # fmt: skip
    optimizer = learner.make_optimizer(options, 10)
    state = learner.init(jax.tree.map(jnp.copy, params), optimizer)
    before = jax.tree.map(np.array, state)
    new, sums = learner.make_step(settings, optimizer, state)(state, batch, reference)
    return before, new, learner.metrics(jax.device_get(sums))


@pytest.fixture(scope="module")
def adapted(random_model):
    return attach_lora(*random_model, LORA, jax.random.key(1))


@pytest.fixture(scope="module")
def adapted_step(adapted, make_batch):
    loss = dataclasses.replace(DEFAULT.loss, kl_coef=0.1)
    return one_step(*adapted, make_batch(), loss=loss, reference=adapted[1])


def test_only_adapters_are_trained(adapted_step):
    before, after, _ = adapted_step
    assert set(after.params) == {"layers"} and set(after.params["layers"]) == {
        f"{name}_lora_{half}" for name in LORA.targets for half in "ab"
    }
    # B is 0 at first, so A has no gradient in the first step and B has one.
    for name, w in after.params["layers"].items():
        assert bool((w != before.params["layers"][name]).any()) == name.endswith("_b"), name
    jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)


def test_optimizer_holds_nothing_of_the_frozen(adapted_step):
    _, after, _ = adapted_step
    for moment in ("mu", "nu"):
        assert jax.tree.structure(optax.tree.get(after.opt_state, moment)) == jax.tree.structure(after.params)


def test_the_base_model_is_the_first_reference(adapted_step):
    assert adapted_step[2]["train/kl_ref"] == pytest.approx(0, abs=1e-10)


def test_gradient_of_b_by_the_chain_rule(random_model, adapted, make_batch):
    """With B = 0 the adapted weight is W, so dL/dB = α/r · Aᵀ dL/dW."""
    model, params = random_model
    sgd = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, s, p=None: (jax.tree.map(jnp.zeros_like, g), g)
    )

    def gradient(model, params):
        settings = Settings(
            model=model, loss=DEFAULT.loss, jackpot=DEFAULT.jackpot, actor=DEFAULT.actor, actor_model=None,
            temperature=1.0, token_chunk=16, max_length=9, micro_batches=1, minibatches=1, epochs=1,
        )  # fmt: skip
        state = learner.init(jax.tree.map(jnp.copy, params), sgd)
        return learner.make_step(settings, sgd, state)(state, make_batch(), None)[0].opt_state

    whole, low = gradient(model, params)["layers"], gradient(*adapted)["layers"]
    for name in LORA.targets:
        a = adapted[1]["layers"][f"{name}_lora_a"]
        want = 2.0 * jnp.einsum("lir,lio->lro", a, whole[name])
        scale = float(jnp.abs(want).max())
        assert scale > 1e-4
        np.testing.assert_allclose(low[f"{name}_lora_b"], want, atol=1e-5 * scale)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_bfloat16_products_give_nearly_the_same_step(random_model, make_batch):
    """Parameters, gradient and state stay float32; the gradient turns by less than 2%, its norm by less than 5%."""
    model, params = random_model
    options = dataclasses.replace(ADAMW, max_grad_norm=0.0)
    _, exact, line = one_step(model, params, make_batch(), options)
    low = Model(model.config, compute_dtype="bfloat16")
    assert low.cache_dtype(params) == jnp.bfloat16
    _, rounded, low_line = one_step(low, params, make_batch(), options)
    assert {x.dtype for x in jax.tree.leaves((rounded.params, optax.tree.get(rounded.opt_state, "mu")))} == {
        jnp.dtype("float32")
    }
    a, b = (flat(optax.tree.get(s.opt_state, "mu")) for s in (exact, rounded))
    assert not np.array_equal(a, b)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98
    assert low_line["train/grad_norm"] == pytest.approx(line["train/grad_norm"], rel=0.05)
    assert low_line["train/loss"] == pytest.approx(line["train/loss"], rel=1e-5)


@pytest.mark.slow
def test_bfloat16_parameters_keep_a_float32_state(random_model, make_batch):
    model, params = random_model
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    _, after, line = one_step(model, params, make_batch())
    assert np.isfinite(line["train/loss"])
    assert {p.dtype for p in jax.tree.leaves(after.params)} == {jnp.dtype(jnp.bfloat16)}
    for moment in ("mu", "nu"):
        assert {p.dtype for p in jax.tree.leaves(optax.tree.get(after.opt_state, moment))} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_first_moment_in_bfloat16(random_model, make_batch):
    _, after, _ = one_step(*random_model, make_batch(), dataclasses.replace(ADAMW, moment_dtype="bfloat16"))
    assert {p.dtype for p in jax.tree.leaves(optax.tree.get(after.opt_state, "mu"))} == {jnp.dtype(jnp.bfloat16)}
    assert {p.dtype for p in jax.tree.leaves(optax.tree.get(after.opt_state, "nu"))} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_adafactor_has_a_small_state_and_moves_by_the_learning_rate(make_config, make_batch):
    """Its update, clipped to an RMS of 1 a leaf, times the rate."""
    model = Model(make_config(hidden_size=128, intermediate_size=256, num_layers=2, vocab_size=160))
    params = model.init(jax.random.key(0))
    before, after, _ = one_step(model, params, make_batch(), dataclasses.replace(ADAMW, optimizer="adafactor"))
    held = sum(x.size for x in jax.tree.leaves(after.opt_state))
    assert held < 0.2 * sum(x.size for x in jax.tree.leaves(params))  # of AdamW: 2
    for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        rms = float(np.sqrt(np.mean((np.asarray(b) - a) ** 2)))
        assert 0 < rms <= 1e-2 * 1.001
