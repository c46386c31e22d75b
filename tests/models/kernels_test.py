"""Fused attention kernels against attention.attend's own products: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rljax import sharding
from rljax.models import kernels
from rljax.models.transformer import Model

P, G, T, S, H, KV, D = 2, 2, 5, 4, 4, 2, 8
PREFIX, OWN = [4, 2], [[5, 1], [3, 4]]  # real tokens


@pytest.fixture(scope="module")
def case(make_attention):
    return make_attention(prefix=PREFIX, own=OWN, T=T, S=S, H=H, KV=KV, D=D)


@pytest.fixture(scope="module")
def attended(case):
    """attended(arrays, kernel, …): [P, G, T, H, D], 0 where the row is padding."""

    def attend(a, kernel, **how):
        there = np.arange(T) < np.array(OWN)[..., None]
        return jnp.where(there[..., None, None], case.attend(a, kernel=kernel, **how), 0)

    return attend


@pytest.fixture(scope="module")
def arrays(case):
    return case.arrays()


def values_and_gradients(attended, arrays, kernel, **how):
    def loss(a):
        out = attended(a, kernel, **how)
        return jnp.sum(jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape) / out.size), out

    return jax.jit(jax.grad(loss, has_aux=True))(arrays)


def by_xla(q, positions, own, prefix, window):
    return kernels.dot_product(q, positions, own, prefix, window, "xla")


def alone(*args):
    return kernels.splash(*args, mesh=None)


@pytest.mark.parametrize(
    "kernel, how",
    [
        (by_xla, {}),
        (by_xla, {"shared": False, "window": 2}),
        (by_xla, {"window": 3, "chunk": 2}),
        (alone, {}),
        (alone, {"shared": False}),
    ],
)
def test_values_and_gradients_are_those_of_plain_products(attended, arrays, kernel, how):
    want, out = values_and_gradients(attended, arrays, None, **how)
    got, same = values_and_gradients(attended, arrays, kernel, **how)
    np.testing.assert_allclose(same, out, atol=2e-6)
    for name, gradient in want.items():
        if how.get("shared", True) or not name.startswith("prefix"):
            assert float(jnp.abs(gradient).max()) > 0.01, f"{name} has no gradient; the test says nothing"
        np.testing.assert_allclose(got[name], gradient, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"data": 4}, {"tensor": 4}])
def test_splash_runs_on_each_devices_rows_and_heads(attended, arrays, axes):
    # Neither 2 prompts over 4 devices nor 2 heads over 4 divide: these stay whole.
    mesh = sharding.make_mesh(**{"data": 1} | axes, devices=jax.devices()[:4])
    got = attended(arrays, lambda *args: kernels.splash(*args, mesh=mesh))
    np.testing.assert_allclose(got, attended(arrays, None), atol=2e-6)


def test_splash_refuses_windows(attended, arrays):
    with pytest.raises(ValueError, match="no sliding windows"):
        attended(arrays, alone, window=2)


def test_cudnn_is_asked_for_cudnn(attended, arrays, monkeypatch):
    asked = {}

    def record(q, k, v, *, mask, implementation):
        asked.update(q=q.shape, k=k.shape, mask=mask.shape, by=implementation)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    attended(arrays, kernels.cudnn)  # 5 queries and 9 keys a row: both are made even
    rows = P * G
    assert asked == {"q": (rows, 6, H, D), "k": (rows, 10, KV, D), "mask": (rows, 1, 6, 10), "by": "cudnn"}


def test_a_model_attends_by_the_kernel_it_names(make_config):
    plain = Model(make_config())
    params = plain.init(jax.random.key(0))
    tokens, valid = jnp.arange(12).reshape(2, 1, 6) % 7, np.ones((2, 1, 6), bool)
    want = plain.extend(params, tokens, valid)
    splash = Model(make_config(), attention="splash", mesh=sharding.mesh_of(params))
    np.testing.assert_allclose(splash.extend(params, tokens, valid), want, atol=2e-5)
    assert isinstance(splash.mesh, Mesh) and "pallas" in str(jax.make_jaxpr(splash.extend)(params, tokens, valid))
    other = sharding.make_mesh(data=2, devices=jax.devices()[:2])
    assert splash.on(other) == Model(make_config(), attention="splash", mesh=other)


def test_kernels_by_name():
    assert kernels.kernel("xla", None) is None and kernels.kernel("cudnn", None) is kernels.cudnn
    kernels.check("xla", "cpu")
    kernels.check("cudnn", "gpu")
    with pytest.raises(ValueError, match="'cudnn' runs on gpu alone.*on tpu"):
        kernels.check("cudnn", "tpu")
