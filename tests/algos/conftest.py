"""Every value of tests/algos holds run plainly, under jit and under vmap."""

import jax
import jax.numpy as jnp
import pytest


def _vmapped(f):
    """f over a batch of two, zeros and the arguments; the result for the arguments."""

    def run(*args):
        batch = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), jnp.asarray(x)]), args)
        return jax.tree.map(lambda y: y[1], over_batch(*batch))

    over_batch = jax.jit(jax.vmap(f))
    return run


@pytest.fixture(params=["plain", "jit", "vmap"])
def run(request):
    """run(f) is f, jitted or vmapped; f takes arrays only."""
    return {"plain": lambda f: f, "jit": jax.jit, "vmap": _vmapped}[request.param]
