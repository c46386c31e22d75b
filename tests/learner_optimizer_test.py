"""The optimizer: its learning rates, what it clips and what it decays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax import learner
from rljax.models.transformer import Model
from rljax.options import LearnerOptions

ADAMW = LearnerOptions(
    optimizer="adamw", moment_dtype="float32", learning_rate=1e-2, warmup_updates=0, schedule="constant",
    adam_b1=0.9, adam_b2=0.99, adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1.0, minibatches=1, epochs=1,
    micro_batches=1,
)  # fmt: skip


def rates(options, total, updates):
    """Learning rate of each update: AdamW's step on a constant gradient."""
    optimizer = learner.make_optimizer(options, total)
    params = {"w": jnp.zeros(())}
    state, out = optimizer.init(params), []
    for _ in range(updates):
        changes, state = optimizer.update({"w": jnp.float32(0.5)}, state, params)
        out.append(-float(changes["w"]))
    return out


def test_warm_up_is_linear_and_its_first_rate_above_zero():
    options = dataclasses.replace(ADAMW, learning_rate=1.0, warmup_updates=4)
    assert rates(options, 10, 7) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1], rel=1e-4)
    schedule = learner.make_schedule(options, 10)
    assert [float(schedule(i)) for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert rates(dataclasses.replace(options, warmup_updates=0), 10, 2) == pytest.approx([1, 1], rel=1e-4)


def test_cosine_ends_at_zero():
    options = dataclasses.replace(ADAMW, learning_rate=1.0, warmup_updates=2, schedule="cosine")
    after = [0.5 * (1 + np.cos(np.pi * t / 4)) for t in range(5)]
    assert rates(options, 6, 7) == pytest.approx([1 / 3, 2 / 3, *after], rel=1e-4, abs=1e-6)


def test_gradient_is_clipped_by_its_global_norm():
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    for limit, kept in ((1.0, 0.2), (10.0, 1.0), (0.0, 1.0)):
        optimizer = learner.make_optimizer(dataclasses.replace(ADAMW, max_grad_norm=limit), 9)
        _, state = optimizer.update(grads, optimizer.init(grads), grads)
        first_moment = optax.tree.get(state, "mu")
        assert float(first_moment["b"][0]) == pytest.approx(0.1 * 4 * kept, rel=1e-5)


def test_weight_decay_leaves_norms_and_biases(make_config):
    model = Model(make_config(model_type="qwen3", qkv_bias=True, qk_norm=True, tie_embeddings=False))
    params = jax.tree.map(lambda p: np.ones(p.shape, np.float32), model.abstract_params())
    optimizer = learner.make_optimizer(dataclasses.replace(ADAMW, weight_decay=0.5), 9)

    @jax.jit
    def update(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    changes = update(params)
    flat = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(changes)}
    still = {"norm", "attn_norm", "mlp_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias"}
    assert {name for name, leaf in flat.items() if not leaf.any()} == still
    np.testing.assert_allclose(flat["head"], -0.5e-2, rtol=1e-6)
