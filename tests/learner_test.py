"""The learner step: gradients against hand values and across micro-batches and meshes, the optimizer, the state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default
from rljax import config as config_lib
from rljax import learner, sharding
from rljax.algos import down_sampling
from rljax.objectives import Settings
from rljax.types import TrainBatch

DEFAULT = config_lib.resolve(default.get_config())
LOSS = DEFAULT.loss
ADAMW = dataclasses.replace(DEFAULT.learner, learning_rate=1e-2, warmup_updates=0)
# An optimizer that changes nothing and whose state is the gradient it was given.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)
MESHES = {"1": {}, "data 2, fsdp 2": dict(data=2, fsdp=2), "all 2": dict(data=2, fsdp=2, tensor=2)}


def settings(model, loss=LOSS, **changes) -> Settings:
    base = dict(
        jackpot=DEFAULT.jackpot, actor=DEFAULT.actor, actor_model=None, temperature=0.7, token_chunk=16, max_length=9,
        micro_batches=1, minibatches=1, epochs=1,
    )  # fmt: skip
    return Settings(model=model, loss=loss, **base | changes)


def mesh_of(data=1, fsdp=1, tensor=1):
    devices = jax.devices()[: data * fsdp * tensor]
    return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)


def begin(model, params, optimizer, mesh, **changes):
    """(step, state, put) on a mesh; the given params stay alive."""
    where = sharding.params_shardings(mesh, model.axes(), model.abstract_params())
    own = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
    state = learner.init(jax.device_put(own, where), optimizer)
    step = learner.make_step(settings(model, **changes), optimizer, state)
    return step, state, functools.partial(sharding.put_by_prompt, mesh)


def gradient(model, params, batch, mesh, reference=None, **changes):
    step, state, put = begin(model, params, RECORD, mesh, **changes)
    state, sums = step(state, put(batch), reference)
    return jax.device_get(state.opt_state), learner.metrics(jax.device_get(sums))


def assert_same_gradient(got, want):
    """Equal to 1e-5 of the largest element, which is not 0."""
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    assert scale > 1e-3
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * scale, jax.tree_util.keystr(path)


# ---- one gradient, however it is computed


@dataclasses.dataclass(frozen=True)
class Bigram:
    """softmax(E[token] W): a model by the methods that the learner calls, quick to compile."""

    def on(self, mesh):
        return self

    def extend(self, params, tokens, valid, prefix):
        return params["E"][tokens]

    def unembed(self, params, hidden):
        return hidden @ params["W"]


@functools.cache
def bigram_gradient(make_batch, aggregate, micro_batches=1, devices=1, prompts=8):
    E, W = jax.random.normal(jax.random.key(0), (2, 32, 8))
    mesh = mesh_of(data=devices)
    params = jax.device_put({"E": E, "W": W.T}, sharding.replicated(mesh))
    state = learner.init(params, RECORD)
    loss = dataclasses.replace(LOSS, aggregate=aggregate, kl_coef=0.5)
    step = learner.make_step(settings(Bigram(), loss, micro_batches=micro_batches), RECORD, state)
    batch = jax.tree.map(lambda x: x[:prompts], make_batch())
    reference = jax.device_put({"E": E[::-1], "W": W.T}, sharding.replicated(mesh))
    state, sums = step(state, sharding.put_by_prompt(mesh, batch), reference)
    return jax.device_get(state.opt_state), learner.metrics(jax.device_get(sums))


@pytest.mark.parametrize("how", [(4, 1), (1, 8), (2, 4)])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_micro_batches_and_devices_do_not_change_the_gradient(make_batch, aggregate, how):
    (want, line), (got, parts) = bigram_gradient(make_batch, aggregate), bigram_gradient(make_batch, aggregate, *how)
    assert_same_gradient(got, want)
    assert parts == pytest.approx(line, rel=1e-5, abs=1e-6)


def test_padding_prompts_weigh_nothing(make_batch):
    """The batch without its two padding prompts has the same gradient."""
    want, line = bigram_gradient(make_batch, "constant")
    got, parts = bigram_gradient(make_batch, "constant", prompts=6)
    assert_same_gradient(got, want)
    assert parts == pytest.approx(line, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_prompts_without_an_advantage_may_be_left_out(make_batch, aggregate, micro_batches):
    """Gradient and loss are those of the whole batch, in which prompts 2, 4 and 5 say nothing and 6, 7 are padding."""
    batch, E, W = make_batch(), *jax.random.normal(jax.random.key(0), (2, 32, 8))
    taught, silent = np.array([0, 1, 3, 6]), np.array([2, 4, 5, 7])
    batch.advantages[silent] = 0
    less = jax.tree.map(lambda x: x[taught], batch)
    less = dataclasses.replace(less, silent_lengths=np.pad(batch.lengths[silent], ((0, 0), (0, 3))))
    loss = dataclasses.replace(LOSS, aggregate=aggregate)

    def run(batch, micro_batches=1):
        state = learner.init({"E": E.copy(), "W": W.T.copy()}, RECORD)
        step = learner.make_step(settings(Bigram(), loss, micro_batches=micro_batches), RECORD, state)
        state, sums = step(state, batch, None)
        return jax.device_get(state.opt_state), learner.metrics(jax.device_get(sums))["train/loss"]

    (want, whole_loss), (got, own_loss) = run(batch), run(less, micro_batches)
    assert_same_gradient(got, want)
    assert own_loss == pytest.approx(whole_loss, rel=1e-5)


@pytest.fixture(scope="module")
def whole(random_model, make_batch):
    """(step, gradient, metrics) of the decoder's batch as one micro-batch on one device."""
    step, state, put = begin(*random_model, RECORD, mesh_of())
    after, sums = step(state, put(make_batch()), None)
    return step, jax.device_get(after.opt_state), learner.metrics(jax.device_get(sums))


@pytest.mark.parametrize(
    "mesh, micro_batches",
    [
        pytest.param("1", 4, marks=pytest.mark.slow),
        pytest.param("data 2, fsdp 2", 1, marks=pytest.mark.slow),
        ("all 2", 2),
    ],
)
def test_decoder_gradient_is_the_same_on_every_mesh(random_model, make_batch, whole, mesh, micro_batches):
    _, want, line = whole
    got, parts = gradient(*random_model, make_batch(), mesh_of(**MESHES[mesh]), micro_batches=micro_batches)
    assert_same_gradient(got, want)
    assert parts == pytest.approx(line, rel=1e-5, abs=1e-6)


def test_what_stands_in_padding_weighs_nothing(random_model, make_batch, whole):
    step, want, line = whole
    rng, b = np.random.default_rng(1), make_batch()
    pad = np.arange(5) >= b.lengths[..., None]
    late = np.arange(6) >= b.prompt_lengths[:, None]
    other = dataclasses.replace(
        b,
        prompt_tokens=np.where(late, 31 - b.prompt_tokens, b.prompt_tokens),
        tokens=np.where(pad, rng.integers(0, 32, pad.shape), b.tokens).astype(np.int32),
        sampler_logprobs=np.where(pad, -1e9, b.sampler_logprobs).astype(np.float32),
        advantages=np.where(b.lengths == 0, 1e9, b.advantages).astype(np.float32),
    )
    _, state, put = begin(*random_model, RECORD, mesh_of())
    state, sums = step(state, put(other), None)
    assert_same_gradient(jax.device_get(state.opt_state), want)
    assert learner.metrics(jax.device_get(sums)) == pytest.approx(line, rel=1e-5, abs=1e-6)


# ---- hand values: a policy that is one softmax, whatever came before


def rows(*tokens, advantages, sampler=0.5) -> TrainBatch:
    """Each row its own prompt. sampler: probability of every token when it was sampled."""
    width = max(map(len, tokens))
    padded = np.array([[list(row) + [0] * (width - len(row))] for row in tokens], np.int32)
    n = len(tokens)
    return TrainBatch(
        prompt_tokens=np.zeros((n, 1), np.int32),
        prompt_lengths=np.ones(n, np.int32),
        tokens=padded,
        lengths=np.array([[len(row)] for row in tokens], np.int32),
        sampler_logprobs=np.full(padded.shape, np.log(sampler), np.float32),
        advantages=np.array(advantages, np.float32)[:, None],
        draws=np.arange(n, dtype=np.uint32),
        samples=np.zeros((n, 1), np.int32),
        top_ids=np.zeros((*padded.shape, 0), np.int32),
        top_logprobs=np.zeros((*padded.shape, 0), np.float32),
    )


@pytest.fixture
def softmax_step(softmax_model):
    return functools.partial(step_of, softmax_model)


def step_of(model, batch, *, z=(0.0, 0.0), optimizer=RECORD, reference=None, loss=LOSS, **changes):
    """(new z, optimizer state, metrics) of one step from logits z."""
    state = learner.init({"z": jnp.array(z)}, optimizer)
    changes = dict(temperature=1.0) | changes
    step = learner.make_step(settings(model, loss, **changes), optimizer, state)
    state, sums = step(state, batch, reference)
    return state.params["z"], state.opt_state, learner.metrics(jax.device_get(sums))


def test_first_update_has_ratio_one_and_the_policy_gradient(softmax_step):
    _, grad, line = softmax_step(rows([0], advantages=[1.0]))
    assert line["train/loss"] == -1.0 and line["train/ratio_max"] == 1.0
    np.testing.assert_allclose(grad["z"], [-0.5, 0.5], atol=1e-7)


def test_temperature_scales_logits_and_gradient(softmax_step):
    """z = [2, 0] at temperature .5: p(1) = 1 / (1 + e⁴), log -4.018; dlog p/dz = [-p₀, 1 - p₁] / .5."""
    batch = rows([1], advantages=[1.0], sampler=np.exp(-4.0181499))
    _, grad, line = softmax_step(batch, z=(2.0, 0.0), temperature=0.5)
    assert line["train/logprob_gap"] < 1e-5
    np.testing.assert_allclose(grad["z"], [2 * 0.98201379, -2 * 0.98201379], rtol=1e-5)


def test_token_mean_is_of_the_whole_minibatch(softmax_step):
    """One token of loss 4 in one micro-batch, three of 0 in the other: 1.0, not 2.0 or .5."""
    batch = rows([0], [1, 1, 1], advantages=[-4.0, 0.0])
    for micro_batches in (1, 2):
        _, _, line = softmax_step(batch, micro_batches=micro_batches)
        assert line["train/loss"] == pytest.approx(1.0)
        assert line["train/tokens"] == 4


@pytest.mark.parametrize("aggregate, loss", [("token", -3 / 4), ("sequence", -1 / 2), ("constant", -3 / 18)])
def test_aggregates(softmax_step, aggregate, loss):
    """Rows of 1 and 3 tokens, only the long one has an advantage; constant divides by 2 rows × 9 places."""
    batch = rows([0], [1, 1, 1], advantages=[0.0, 1.0])
    for micro_batches in (1, 2):
        options = dataclasses.replace(LOSS, aggregate=aggregate)
        _, _, line = softmax_step(batch, loss=options, micro_batches=micro_batches)
        assert line["train/loss"] == pytest.approx(loss)


@pytest.mark.parametrize("how", [{"epochs": 2}, {"minibatches": 2}])
def test_old_logprobs_predate_the_first_of_several_updates(softmax_step, how):
    """z goes to ±.5 by the first update; the second has ratio σ(1)/.5 = 1.4621 and gradient -1.4621·(1 - σ(1))."""
    batch = rows([0], [0], advantages=[1.0, 1.0])
    sgd = optax.sgd(1.0)
    z, _, line = softmax_step(batch, optimizer=sgd, loss=dataclasses.replace(LOSS, clip_high=1.0), **how)
    assert line["train/ratio_max"] == pytest.approx(1.462117, rel=1e-5)
    np.testing.assert_allclose(z, [0.893223, -0.893223], rtol=1e-5)
    assert line["train/loss"] == pytest.approx(-(1 + 1.462117) / 2, rel=1e-5)
    z, _, line = softmax_step(batch, optimizer=sgd, **how)  # 1.46 is above 1 + clip_high: no gradient
    np.testing.assert_allclose(z, [0.5, -0.5], rtol=1e-6)
    assert line["train/clip_frac"] == 0.5


@pytest.mark.parametrize("kind, gradient_of_z0", [("k1", 0.0), ("k2", -0.3466), ("k3", -0.30)])
def test_kl_gradient_is_that_of_enumeration(softmax_step, kind, gradient_of_z0):
    """π = (.5, .5), ref = (.8, .2): KL .2231, dKL/dz₀ -.3466. Both actions once is the exact expectation."""
    loss = dataclasses.replace(LOSS, kl_coef=1.0, kl_kind=kind)
    reference = {"z": jnp.log(jnp.array([0.8, 0.2]))}
    batch = rows([0], [1], advantages=[0.0, 0.0])
    _, grad, line = softmax_step(batch, loss=loss, reference=reference)
    np.testing.assert_allclose(grad["z"], [gradient_of_z0, -gradient_of_z0], atol=5e-5)
    assert line["train/kl_ref"] == pytest.approx(0.2231, abs=5e-5)  # always k3's

    def kl(z):
        p, q = jax.nn.softmax(z), jax.nn.softmax(reference["z"])
        return jnp.sum(p * jnp.log(p / q))

    if kind == "k2":
        np.testing.assert_allclose(grad["z"], jax.grad(kl)(jnp.zeros(2)), atol=1e-6)


@pytest.mark.parametrize(
    "how, weight",
    [
        (dict(correction="none"), 1.0),
        (dict(correction="truncate"), 2.0),
        (dict(correction="truncate", correction_high=9.0), 4.0),
        (dict(correction="mask", correction_high=3.0), 0.0),
        (dict(correction="mask", correction_low=5.0, correction_high=9.0), 0.0),
        (dict(correction="mask", correction_low=1.0, correction_high=9.0), 4.0),
        (dict(correction="truncate", correction_level="sequence", correction_high=99.0), 16.0),
    ],
)
def test_importance_weights_reach_the_loss(softmax_step, how, weight):
    """Two tokens, each of probability .5 now and .125 when sampled: ratio 4 a token, 16 the sequence."""
    batch = rows([0, 1], advantages=[1.0], sampler=0.125)
    _, _, line = softmax_step(batch, loss=dataclasses.replace(LOSS, **how))
    assert line["train/loss"] == pytest.approx(-weight, rel=1e-6)
    assert line["train/importance_mean"] == pytest.approx(16 if "correction_level" in how else 4, rel=1e-5)


# ---- the state


@pytest.fixture(scope="module")
def begin_adamw(random_model):
    """begin_adamw() → (step, a fresh state, put), one compiled step of AdamW on one device for all."""
    optimizer = learner.make_optimizer(dataclasses.replace(ADAMW, weight_decay=0.1), 9)
    step, _, _ = begin(*random_model, optimizer, mesh_of())

    def make():
        _, state, put = begin(*random_model, optimizer, mesh_of())
        return step, state, put

    return make


def test_nothing_to_learn_from_changes_nothing(begin_adamw, make_batch):
    """No token counts: loss 0, finite zero gradients, and neither momentum nor weight decay moves anything."""
    step, state, put = begin_adamw()
    state, _ = step(state, put(golden_batch("grpo", make_batch)), None)
    before = jax.device_get(state)
    empty = dataclasses.replace(golden_batch("grpo", make_batch), lengths=np.zeros((4, 4), np.int32))
    state, sums = step(state, put(empty), None)
    line = learner.metrics(jax.device_get(sums))
    assert line["train/loss"] == line["train/grad_norm"] == line["train/tokens"] == 0
    assert all(np.isfinite(list(line.values())))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert int(state.updates) == 1


def test_state_keeps_its_shardings_is_donated_and_traced_once(random_model, make_batch):
    model, params = random_model
    adamw = learner.make_optimizer(ADAMW, 9)
    traces = []

    def update(grads, state, params=None):
        traces.append(None)
        return adamw.update(grads, state, params)

    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    step, state, put = begin(model, params, optax.GradientTransformation(adamw.init, update), mesh)
    where = jax.tree.map(lambda x: x.sharding, state)
    for moment in ("mu", "nu"):
        assert optax.tree.get(where.opt_state, moment) == where.params
    assert where.params["layers"]["q"].spec == sharding.partition_spec(("layers", "embed", "heads"))
    given = state
    state, _ = step(state, put(make_batch()), None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.params))
    assert jax.tree.map(lambda x: x.sharding, state) == where
    state, _ = step(state, put(make_batch(seed=1)), None)
    assert jax.tree.map(lambda x: x.sharding, state) == where
    assert len(traces) == 1 and int(state.updates) == 2


# ---- golden steps


GOLDEN = {  # (loss, gradient norm, Σ parameter · change) of one AdamW step at learning rate 1e-2
    "grpo": (-0.094475, 3.91395, -1.75662),
    "pods": (-0.079804, 3.83870, -1.95905),
    "cero": (-0.080187, 3.49881, -1.93772),
}
REWARDS = np.array(
    [[1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]],
    np.float32,
)


def golden_batch(name, make_batch) -> TrainBatch:
    """4 prompts × 4 rows. grpo: the first 4 of 8. pods: the 4 of 8 of greatest variance. cero: one prompt with a
    partial grant of 2, one without."""
    batch = make_batch(P=4, K=8, padding_prompts=0)
    rewards = REWARDS.copy()
    if name == "cero":
        rewards[2, 2:] = rewards[3] = np.nan
    if name != "pods":
        rewards = rewards[:, :4]
    rule = "max_variance" if name == "pods" else "all"
    indices, kept = down_sampling.down_sample(rewards, 4, rule=rule)
    advantages = down_sampling.kept_advantages(rewards, indices, kept, normalize_over="kept")
    by_row = {f: getattr(batch, f) for f in ("tokens", "lengths", "sampler_logprobs", "samples")}
    by_row = down_sampling.take_rows(by_row, indices)
    by_row["lengths"] = jnp.where(kept, by_row["lengths"], 0)
    return jax.device_get(dataclasses.replace(batch, **by_row, advantages=advantages))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_step(random_model, begin_adamw, make_batch, name):
    step, state, put = begin_adamw()
    batch = golden_batch(name, make_batch)
    state, sums = step(state, put(batch), None)
    line = learner.metrics(jax.device_get(sums))
    mean_advantage = (batch.advantages * batch.lengths).sum() / batch.lengths.sum()
    assert line["train/loss"] == pytest.approx(-mean_advantage, rel=1e-5)  # of tokens, since every ratio is 1
    changes = jax.tree.map(lambda a, b: float(jnp.sum((a - b) * b)), state.params, random_model[1])
    got = (line["train/loss"], line["train/grad_norm"], sum(jax.tree.leaves(changes)))
    assert got == pytest.approx(GOLDEN[name], rel=1e-3), (
        f"the {name} step computes other numbers: {got}. Change GOLDEN only where the mathematics was meant to "
        "change (say so in the commit), or where a new jax draws other random weights; never to pass a refactoring"
    )
