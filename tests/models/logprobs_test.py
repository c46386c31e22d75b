"""The one log-probability function, its chunks, and completions of a shared prompt against whole rows."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import drawing
from rljax.models import logprobs
from rljax.models.transformer import Model

PROMPTS = [[3], [5, 1, 9, 30], [8, 8]]
COMPLETIONS = [[[4, 4, 4, 4, 2], [7]], [[1, 2], [2, 9, 9]], [[6, 3, 1, 2], [6, 3, 1, 5]]]
P, K, S, T = 3, 2, 5, 6


def test_sampler_and_learner_have_the_log_prob_of_the_tempered_distribution():
    logits, half = jnp.array([[2.0, 0.0]]), jnp.array([0.5])
    assert logprobs.token_logprobs(logits, jnp.array([1]), 0.5)[0] == pytest.approx(-4.018, abs=1e-3)
    # u = 0.999 lies past the mass of token 0 (0.982): the sampler draws token 1, and records the same number.
    ids, recorded, _, _ = drawing.choose(logits, half, jnp.array([0.999]))
    assert ids[0] == 1 and recorded[0] == pytest.approx(-4.018, abs=1e-3)


def test_temperature_is_a_scalar_or_one_a_row_and_zero_stands_for_one():
    logits = jnp.array([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    got = logprobs.token_logprobs(logits, jnp.array([1, 1, 1]), jnp.array([0.5, 1.0, 0.0]))
    np.testing.assert_allclose(got, [-4.01815, -2.12693, -2.12693], atol=1e-4)


def test_near_ties_stay_apart_in_float32_and_log_probs_are_never_positive():
    low, high = logprobs.token_logprobs(jnp.array([[20.0, 20.05]] * 2), jnp.array([0, 1]))
    assert high - low == pytest.approx(0.05, abs=1e-5)
    logits = 50 * jax.random.normal(jax.random.key(0), (1000, 9))
    values = logprobs.token_logprobs(logits, jnp.argmax(logits, axis=-1), 0.3)
    assert values.dtype == jnp.float32 and (values <= 0).all()
    # Half-precision logits are raised to float32 before the softmax.
    assert logprobs.token_logprobs(logits.astype(jnp.bfloat16), jnp.zeros(1000, int)).dtype == jnp.float32


@pytest.mark.parametrize("chunk", [3, 64])
def test_chunks_change_neither_values_nor_gradients(chunk):
    rng = np.random.default_rng(0)
    hidden, head = jnp.float32(rng.standard_normal((10, 4))), jnp.float32(rng.standard_normal((4, 7)))
    ids, weights = rng.integers(0, 7, 10), jnp.float32(rng.standard_normal(10))

    def whole(hidden, head):
        values = jax.nn.log_softmax(hidden @ head / 0.7)[jnp.arange(10), ids]
        return values @ weights, values

    def chunked(hidden, head):
        values = logprobs.chunked_values(lambda h: h @ head, hidden, jnp.asarray(ids), 0.7, chunk)[0]
        return values @ weights, values

    want, want_values = jax.grad(whole, (0, 1), has_aux=True)(hidden, head)
    got, values = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))(hidden, head)
    np.testing.assert_allclose(values, want_values, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)


def widths(jaxpr):
    """Shapes of everything that is computed, also inside loops and checkpoints."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
    for inner in jax.core.jaxprs_in_params_of(jaxpr) if hasattr(jax.core, "jaxprs_in_params_of") else inner_of(jaxpr):
        yield from widths(inner)


def inner_of(jaxpr):
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield part


def test_no_more_than_a_chunk_of_logits_is_alive():
    N, E, V, chunk = 24, 3, 101, 4

    def loss(hidden, head):
        ids = jnp.zeros(N, int)
        return jnp.sum(logprobs.chunked_values(lambda h: h @ head, hidden, ids, 1.0, chunk)[0])

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.zeros((N, E)), jnp.zeros((E, V)))
    sizes = [np.prod(shape) for shape in widths(traced.jaxpr) if V in shape]
    assert max(sizes) == chunk * V


def batch_of(prompt_width=S, width=T, pad=0):
    """A TrainBatch's fields, padded on the right, and a padding prompt after the third."""
    prompt_tokens = np.full((P + 1, prompt_width), pad)
    tokens = np.full((P + 1, K, width), pad)
    prompt_lengths, lengths = np.zeros(P + 1, int), np.zeros((P + 1, K), int)
    for p, prompt in enumerate(PROMPTS):
        prompt_tokens[p, : len(prompt)], prompt_lengths[p] = prompt, len(prompt)
        for k, row in enumerate(COMPLETIONS[p]):
            tokens[p, k, : len(row)], lengths[p, k] = row, len(row)
    return types.SimpleNamespace(
        prompt_tokens=jnp.asarray(prompt_tokens),
        prompt_lengths=jnp.asarray(prompt_lengths),
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
    )


def ours(model, params, batch, chunk=7):
    """Log-probs of the real completion tokens, 0 elsewhere."""
    mask = jnp.arange(batch.tokens.shape[2]) < batch.lengths[..., None]
    return jnp.where(mask, logprobs.completion_logprobs(model, params, batch, 0.8, chunk), 0)


def plainly(plain_logits, model, params):
    """The same numbers from whole rows, prompt and completion in one sequence each."""
    out = jnp.zeros((P + 1, K, T))
    rows = [(p, k, PROMPTS[p] + COMPLETIONS[p][k]) for p in range(P) for k in range(K)]
    tokens = np.zeros((len(rows), 9), int)
    for i, (_, _, row) in enumerate(rows):
        tokens[i, : len(row)] = row
    logits = jax.nn.log_softmax(plain_logits(model.config, params, tokens) / 0.8)
    for i, (p, k, _) in enumerate(rows):
        first, n = len(PROMPTS[p]), len(COMPLETIONS[p][k])
        values = logits[i, first - 1 + np.arange(n), np.array(COMPLETIONS[p][k])]
        out = out.at[p, k, :n].set(values)
    return out


@pytest.mark.parametrize("window, layers", [(None, 2), (3, 1)])  # the plain decoder compiles by layer
def test_values_and_gradients_equal_plain_attention_over_whole_rows(
    window, layers, make_config, random_params, plain_logits
):
    model = Model(make_config(num_layers=layers, sliding_window=window))
    params = random_params(model)
    weights = jnp.float32(np.random.default_rng(1).standard_normal((P + 1, K, T)))

    def loss(values):
        return jnp.sum(weights * values), values

    got, values = jax.jit(jax.grad(lambda p: loss(ours(model, p, batch_of())), has_aux=True))(params)
    want, plain = jax.jit(jax.grad(lambda p: loss(plainly(plain_logits, model, p)), has_aux=True))(params)
    np.testing.assert_allclose(values, plain, atol=2e-5)

    def close(path, a, b):
        top = float(jnp.abs(b).max())
        assert top > 0, f"{path} has no gradient; the test says nothing"
        np.testing.assert_allclose(a, b, atol=2e-5 * top, err_msg=str(path))

    jax.tree_util.tree_map_with_path(close, got, want)


def test_padding_changes_no_log_prob(make_config, random_params):
    model = Model(make_config(num_layers=2))
    params = random_params(model)

    def batch(**kwargs):
        return vars(batch_of(**kwargs))

    @jax.jit
    def run(params, fields):
        return ours(model, params, types.SimpleNamespace(**fields))

    base = run(params, batch())
    for pad in (2, 31):  # 2 is an EOS that the rows contain
        np.testing.assert_array_equal(run(params, batch(pad=pad)), base)
    wide = run(params, batch(prompt_width=8, width=9, pad=2))
    np.testing.assert_allclose(wide[:, :, :T], base, atol=3e-6)
    assert (wide[:, :, T:] == 0).all() and np.isfinite(wide).all()
