"""The decoder against an independent one; padding, positions, and the parameters' tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import sampling
from rljax.models import logits
from rljax.models.config import RopeScaling
from rljax.models.transformer import Model, rotate

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=8, beta_fast=1.0, beta_slow=0.1)
run = jax.jit(logits, static_argnums=0)

FAMILIES = {
    "llama": {},
    "llama3 rope, untied": {"rope_scaling": LLAMA3, "tie_embeddings": False},
    "qwen2, window": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 3},
    "qwen2, window in two layers of three": {
        "model_type": "qwen2",
        "qkv_bias": True,
        "sliding_window": 3,
        "sliding_layers": (True, False, True),
    },
    "yarn rope": {"rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "num_layers": 2, "norm_eps": 1e-2},
}


@pytest.fixture(scope="module")
def small(make_config, random_params):
    model = Model(make_config(num_layers=2))
    return model, random_params(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_plain_decoder(family, make_config, random_params, plain_logits):
    model = Model(make_config(**FAMILIES[family]))
    params = random_params(model)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9))
    want = plain_logits(model.config, params, tokens)
    np.testing.assert_allclose(run(model, params, tokens), want, atol=3e-5)


def test_decoding_sees_what_whole_rows_see(make_config, random_params, plain_logits):
    changes = {"sliding_window": 3, "sliding_layers": (True, False, True), "rope_scaling": YARN}
    model = Model(make_config(**changes))
    params = random_params(model)
    prompts = [[1, 2, 3, 4, 5], [7]]
    rollouts = sampling.generate(model, params, prompts, num_samples=2, max_new_tokens=8, key=jax.random.key(0))
    for i, group in enumerate(rollouts.group):
        row = np.array([*prompts[group], *rollouts.tokens[i]])
        want = jax.nn.log_softmax(plain_logits(model.config, params, np.pad(row, (0, 13 - len(row)))[None])[0])
        own = np.arange(len(prompts[group]), len(row))
        np.testing.assert_allclose(rollouts.logprobs[i], want[own - 1, row[own]], atol=3e-5)


def test_logits_do_not_see_padding_on_the_right(small):
    model, params = small
    alone = run(model, params, np.array([[3, 4]]), np.array([2]))[0]
    for width in (5, 8):
        rows = np.zeros((1, width), int)
        rows[0, :2] = [3, 4]
        padded = run(model, params, rows, np.array([2]))[0, :2]
        np.testing.assert_allclose(padded, alone, atol=2e-6)
        rows[0, 2:] = 31  # another pad id: not a bit moves
        np.testing.assert_array_equal(run(model, params, rows, np.array([2]))[0, :2], padded)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_padded_at_either_side_gives_the_same_continuation(small, side):
    model, params = small

    @jax.jit
    def continuation(tokens, valid):
        rows = jnp.array([[[7, 1, 9], [2, 2, 5]]])
        return model.unembed(params, model.extend(params, rows, jnp.ones(rows.shape, bool), (tokens, valid)))

    alone = continuation(np.array([[3, 4]]), np.ones((1, 2), bool))
    for width in (5, 8):
        pads = width - 2
        where = (pads, 0) if side == "left" else (0, pads)
        valid = np.pad(np.ones(2, bool), where)[None]
        results = [continuation(np.pad([3, 4], where, constant_values=pad)[None], valid) for pad in (0, 4, 31)]
        np.testing.assert_allclose(results[0], alone, atol=2e-6)
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_positions_of_a_left_padded_prompt_start_at_zero(small):
    model, params = small
    valid = np.array([[False, False, True, True]])
    prefix = jax.jit(model.prefill)(params, np.array([[9, 9, 3, 4]]), valid)
    np.testing.assert_array_equal(prefix.positions, [[0, 0, 0, 1]])


@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_recomputing_changes_no_gradient(small, remat):
    model, params = small
    tokens = np.array([[1, 2, 3, 4]])

    def loss(params, model):
        return jnp.sum(jax.nn.log_softmax(logits(model, params, tokens))[..., 0])

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    kept, again = grad(params, model), grad(params, dataclasses.replace(model, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), kept, again)


def test_logits_of_bfloat16_parameters_are_float32(make_config):
    # 20.00 and 20.05 are one number in bfloat16, whose steps there are 0.125 (faults.md 23).
    model = Model(make_config())
    embed = np.zeros((32, 16), np.float32)
    embed[:, 0], embed[1, 1] = 20.0, 0.05
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), model.abstract_params("bfloat16"))
    params |= {"embed": jnp.asarray(embed, jnp.bfloat16)}
    hidden = jnp.zeros((16,), jnp.bfloat16).at[:2].set(1)
    out = model.unembed(params, hidden)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[:2], [20.0, 20.05], atol=1e-3)
    assert out[1] > out[0]


def test_head_dim_need_not_be_hidden_over_heads(make_config):
    shapes = Model(make_config()).abstract_params()["layers"]  # hidden 16, 4 heads, 2 kv heads, head_dim 8
    assert shapes["q"].shape == (3, 16, 32) and shapes["k"].shape == (3, 16, 16) and shapes["o"].shape == (3, 32, 16)


def test_init_has_the_abstract_shapes_and_every_parameter_names_its_axes(make_config):
    model = Model(make_config(qkv_bias=True, qk_norm=True, tie_embeddings=False, num_layers=1))
    params = jax.jit(lambda key: model.init(key, "bfloat16"))(jax.random.key(0))
    abstract = model.abstract_params("bfloat16")
    jax.tree.map(
        lambda p, a: (p.shape, p.dtype) == (a.shape, a.dtype) or pytest.fail(f"{p.shape} {a}"),
        params,
        abstract,
    )
    axes = model.axes()
    jax.tree.map(lambda a, names: len(names) == a.ndim or pytest.fail(f"{names} {a.shape}"), abstract, axes)
    assert axes["layers"]["o"] == ("layers", "heads", "embed") and axes["head"] == ("embed", "vocab")


def test_two_models_of_one_config_are_one_static_argument(make_config):
    assert hash(Model(make_config())) == hash(Model(make_config())) and Model(make_config()) == Model(make_config())
    assert Model(make_config()) != Model(make_config(rope_theta=5e5))


def test_llama3_frequencies(make_config):
    # Rotations over the 8,192 original positions: more than 4 are kept, fewer than 1 slowed by the factor,
    # and between them the blend (Llama 3.1's reference code, worked out for one pair of features at a time).
    scaling = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    config = make_config(head_dim=64, rope_theta=5e5, rope_scaling=scaling)
    kinds = set()
    for i, got in enumerate(config.inverse_frequencies()):
        freq = 5e5 ** (-2 * i / 64)
        rotations = 8192 * freq / (2 * np.pi)
        if rotations > 4:
            want, kind = freq, "kept"
        elif rotations < 1:
            want, kind = freq / 8, "slowed"
        else:
            blend = (rotations - 1) / 3
            want, kind = (1 - blend) * freq / 8 + blend * freq, "blended"
        kinds.add(kind)
        assert got == pytest.approx(want, rel=1e-5)
    assert kinds == {"kept", "slowed", "blended"}


def test_linear_scaling_divides_every_frequency(make_config):
    plain, scaled = make_config(), make_config(rope_scaling=RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(scaled.inverse_frequencies(), plain.inverse_frequencies() / 4, rtol=1e-6)


def test_yarn_frequencies_and_magnitude(make_config):
    # Qwen2.5's documented setting: factor 4 over 32,768 positions, θ = 10⁶, heads of 128. A pair i turns
    # 32768 / 2π · 10^(-6·2i/128) times: 32 times at i = 23.6 and once at i = 39.7, rounded outwards to 23 and 40.
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=32_768)
    config = make_config(head_dim=128, rope_theta=1e6, rope_scaling=scaling)
    got = config.inverse_frequencies()
    plain = make_config(head_dim=128, rope_theta=1e6).inverse_frequencies()
    np.testing.assert_array_equal(got[:24], plain[:24])
    np.testing.assert_allclose(got[40:], plain[40:] / 4, rtol=1e-6)
    slowed = (30 - 23) / (40 - 23)
    assert got[30] == pytest.approx(1e6 ** (-60 / 128) * (slowed / 4 + 1 - slowed), rel=1e-5)
    assert scaling.magnitude == pytest.approx(1.138629, abs=1e-6)  # 0.1 ln 4 + 1
    # Not rounded, the ramp is from 23.6 to 39.7.
    exact = dataclasses.replace(scaling, truncate=False)
    low, high = (64 * np.log(32_768 / (2 * np.pi * r)) / np.log(1e6) for r in (32, 1))
    slowed = (30 - low) / (high - low)
    assert dataclasses.replace(config, rope_scaling=exact).inverse_frequencies()[30] == pytest.approx(
        1e6 ** (-60 / 128) * (slowed / 4 + 1 - slowed), rel=1e-5
    )


@pytest.mark.parametrize(
    "changes, magnitude",
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.277259 / 1.138629),  # (0.1 · 2 · ln 4 + 1) / (0.1 ln 4 + 1)
        ({"mscale": 2.0}, 1.138629),  # one of the two alone says nothing
        ({"factor": 1.0}, 1.0),
        ({"kind": "linear"}, 1.0),
    ],
)
def test_magnitude(changes, magnitude):
    scaling = RopeScaling(**{"kind": "yarn", "factor": 4.0} | changes)
    assert scaling.magnitude == pytest.approx(magnitude, abs=1e-5)


def test_rotation_past_4096_positions(make_config):
    config = make_config(rope_theta=5e5)
    inverse = config.inverse_frequencies().astype(np.float64)
    x = np.random.default_rng(0).standard_normal((1, 8))
    angles = 5000 * inverse
    z = (x[:, :4] + 1j * x[:, 4:]) * np.exp(1j * angles)
    got = rotate(jnp.asarray(x, jnp.float32), jnp.cos(jnp.float32(angles)), jnp.sin(jnp.float32(angles)))
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], axis=-1), atol=2e-3)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_kv_heads": 3}, "4 is not a multiple.*=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"vocab_size": 0, "num_layers": -1}, "vocab_size=0, num_hidden_layers=-1: a size is"),
        ({"intermediate_size": 2**31}, "intermediate_size=2147483648: a size is"),
        ({"sliding_layers": (True,)}, "names 1 of 3 layers"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta=1.0 is not above 1"),
    ],
)
def test_a_shape_that_cannot_be_is_an_error(make_config, changes, told):
    with pytest.raises(ValueError, match=told):
        make_config(**changes)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"kind": "dynamic"}, "'dynamic' is not known; known: linear, llama3, yarn"),
        ({"kind": "llama3", "low_freq_factor": 4.0}, "high_freq_factor=4.0 is not above low_freq_factor=4.0"),
        ({"kind": "yarn", "beta_slow": 32.0}, "beta_fast=32.0 is not above beta_slow=32.0"),
    ],
)
def test_a_scaling_that_cannot_be_is_an_error(changes, told):
    with pytest.raises(ValueError, match=told):
        RopeScaling(**{"factor": 4.0} | changes)
