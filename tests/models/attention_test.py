"""The joint softmax over a shared prefix and a row's own keys: values and gradients of plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models import attention

P, G, T, S, H, KV, D = 2, 3, 4, 5, 4, 2, 8
PREFIX = [5, 3]  # real prompt tokens
OWN = [[4, 2, 1], [3, 4, 1]]  # real tokens of each row


@pytest.fixture(scope="module")
def case(make_attention):
    return make_attention(prefix=PREFIX, own=OWN, T=T, S=S, H=H, KV=KV, D=D)


@pytest.fixture(scope="module")
def arrays(case):
    return case.arrays()


def plain(a, window):
    """{(p, g): [own, H, D]}: each row alone, prompt and completion in one sequence, heads repeated."""
    out = {}
    for p in range(P):
        for g in range(G):
            n, own = PREFIX[p], OWN[p][g]
            keys, values = (
                jnp.repeat(jnp.concatenate([a[f"prefix_{x}"][p, :, :n], a[x][p, :, g, :own]], axis=1), H // KV, 0)
                for x in "kv"
            )  # [H, n + own, D]
            scores = jnp.einsum("thd,hcd->htc", a["q"][p, g, :own], keys) / np.sqrt(D)
            ahead = np.arange(n, n + own)[:, None] - np.arange(n + own)
            seen = (ahead >= 0) & (ahead < (window if window is not None else 99))
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            out[p, g] = jnp.einsum("htc,hcd->thd", weights, values)
    return out


def weigh(rows):
    """A scalar that no symmetry of the rows leaves alone."""
    return sum(jnp.sum(jnp.sin(row) * (1 + p + 2 * g)) for (p, g), row in rows.items())


def real_rows(out):
    return {(p, g): out[p, g, : OWN[p][g]] for p in range(P) for g in range(G)}


@pytest.mark.parametrize("window, chunk", [(None, 0), (3, 0), (None, 3), (3, 3), (None, 1)])
def test_output_and_gradients_equal_plain_attention(case, arrays, window, chunk):
    def gradient(rows_of):
        """(gradients, rows)"""

        def loss(a):
            rows = rows_of(a)
            return weigh(rows), rows

        return jax.jit(jax.grad(loss, has_aux=True))(arrays)

    got, rows = gradient(lambda a: real_rows(case.attend(a, window=window, chunk=chunk)))
    want, plain_rows = gradient(lambda a: plain(a, window))
    for key, row in plain_rows.items():
        np.testing.assert_allclose(rows[key], row, atol=2e-6, err_msg=str(key))
    for name in arrays:
        assert float(jnp.abs(want[name]).max()) > 0.1, f"{name} has no gradient; the test says nothing"
        np.testing.assert_allclose(got[name], want[name], atol=5e-6, err_msg=name)


def test_padding_keys_change_nothing(case, arrays):
    base = case.attend(arrays)
    spoilt = dict(arrays)
    spoilt["prefix_k"] = arrays["prefix_k"].at[1, :, PREFIX[1] :].set(1e4)
    spoilt["prefix_v"] = arrays["prefix_v"].at[1, :, PREFIX[1] :].set(-1e4)
    spoilt["k"] = arrays["k"].at[0, :, 1, OWN[0][1] :].set(1e4)
    spoilt["v"] = arrays["v"].at[0, :, 1, OWN[0][1] :].set(1e4)
    for key, row in real_rows(case.attend(spoilt)).items():
        np.testing.assert_array_equal(row, real_rows(base)[key])


def test_a_row_that_sees_nothing_is_finite_and_has_finite_gradients(arrays):
    @jax.jit
    @jax.value_and_grad
    def loss(a):
        positions = np.broadcast_to(np.arange(T), (P, G, T))
        own = attention.Keys(a["k"], a["v"], positions, np.zeros((P, G, T), bool))
        prefix = attention.Keys(a["prefix_k"], a["prefix_v"], np.zeros((P, 1, S), np.int32), np.zeros((P, 1, S), bool))
        out = attention.attend(a["q"], positions, own, prefix)
        return jnp.sum(out**2)

    value, grads = loss(arrays)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_visible():
    # Two pads on the left (position 0), then three tokens; queries at the real positions 0, 1, 2.
    keys = np.array([0, 0, 0, 1, 2])
    valid = np.array([False, False, True, True, True])
    causal = [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    np.testing.assert_array_equal(attention.visible(np.arange(3), keys, valid), np.array(causal, bool))
    windowed = [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(attention.visible(np.arange(3), keys, valid, 2), np.array(windowed, bool))
