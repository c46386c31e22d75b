"""Peaks of small programs, counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from rljax.plan import memory, operations

KIB = 1024
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)  # 1 KiB
STACK = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)


def peak(function, *arguments, donated=()) -> int:
    program = operations.of(jax.make_jaxpr(function)(*arguments), lambda shape, size: size)
    return memory.peak(program, donated).bytes


def test_elementwise_operations_are_fused_into_a_reduction():
    assert peak(lambda x: jnp.sum(jnp.sin(x * 2 + 1)), W) == 4


def test_a_product_is_an_array_and_so_is_what_it_reads():
    assert peak(lambda x, w: (x @ w) @ w, W, W) == 2 * KIB
    assert peak(lambda x, w: jnp.tanh(x @ w) @ w, W, W) == 2 * KIB  # tanh takes its operand's place
    assert peak(lambda x, w: (x * 2) @ w, W, W) == 2 * KIB  # x is an argument, and no place to write to
    assert peak(lambda x, w: jnp.reshape(x @ w, (256,)).reshape(16, 16) @ w, W, W) == 2 * KIB  # views take nothing


def test_what_is_used_later_stays():
    def residual(x, w):
        h = x @ w
        return (h @ w) @ w + h

    assert peak(residual, W, W) == 3 * KIB  # h and two products


def test_a_donated_argument_is_written_over():
    def update(state, gradient):
        return state - 0.1 * (gradient @ gradient)

    assert peak(update, W, W, donated=[0]) == 1 * KIB


def test_a_chain_of_elementwise_operations_holds_its_inputs_and_outputs_alone():
    """As an optimizer's: moments and parameters of each leaf are written over, whatever is between them."""

    def update(state, gradients):
        factor = 1 / jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        mu = [0.9 * m + 0.1 * g * factor for (m, _), g in zip(state, gradients, strict=True)]
        return [(m, w - m / (jnp.sqrt(m * m) + 1e-8)) for m, (_, w) in zip(mu, state, strict=True)]

    state = [(W, W), (STACK, STACK)]
    assert peak(update, state, [W, STACK], donated=range(4)) < 64  # the factor, and what it is computed from


def test_a_branch_holds_its_peak_and_writes_over_what_ends_there():
    def update(state, gradient):
        change = gradient @ gradient
        return jax.lax.cond(jnp.sum(gradient) > 0, lambda s, g: s - 0.1 * g, lambda s, g: s, state, change)

    assert peak(update, W, W, donated=[0]) <= 1 * KIB + 8  # the change, and what chooses
    assert peak(update, W, W) <= 1 * KIB + 8  # the result takes the change's place

    def inside(state, gradient):
        def product(s, g):
            return s - (g @ g) @ g

        return jax.lax.cond(jnp.sum(gradient) > 0, product, lambda s, g: s + g, state, gradient)

    assert 2 * KIB <= peak(inside, W, W, donated=[0]) <= 2 * KIB + 8  # of the larger branch: both products

    def read_again(state, gradient):
        return jnp.sum(update(state, gradient) @ state)

    # What is read after the branch is not written over: the result, in the change's place, and the product.
    assert 2 * KIB <= peak(read_again, W, W, donated=[0]) <= 2 * KIB + 8


def test_a_loop_adds_its_bodys_peak_once():
    def forward(x, ws):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    # The result, the layer's slice of the weights, and the product.
    assert peak(forward, W, STACK) == 3 * KIB


def test_the_backward_pass_holds_what_rematerialisation_leaves():
    def loss(remat):
        def layer(h, w):
            return jnp.tanh(jnp.tanh(h @ w) @ w), None

        layer = jax.checkpoint(layer) if remat else layer
        return lambda x, ws: jnp.sum(jax.lax.scan(layer, x, ws)[0])

    plain, less = (peak(jax.grad(loss(remat), argnums=1), W, STACK) for remat in (False, True))
    # 3 layers: inputs of both products and both tanh's results; less: the layers' inputs alone.
    assert plain - less >= 3 * KIB and less >= 6 * KIB  # 3 inputs, 3 gradients


def test_outputs_of_a_scan_that_nothing_reads_are_not_made():
    def forward(x, ws):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h @ h), x, ws)[0]

    assert peak(forward, W, STACK) == 3 * KIB


def test_arrays_like_parameters_count_as_they_are_split():
    def size(shape, traced):
        return traced // 2 if shape == (3, 16, 16) else traced

    program = operations.of(jax.make_jaxpr(lambda x: jnp.cumsum(x, axis=0) @ x)(STACK), size)
    assert memory.peak(program).bytes == 3 * KIB


@pytest.mark.parametrize("rows", [1, 5])
def test_flops_are_of_products(rows):
    x = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    program = operations.of(jax.make_jaxpr(lambda x, w: jnp.exp(x @ w))(x, W), lambda shape, size: size)
    assert [op.flops for op in program.operations if op.flops] == [2 * rows * 16 * 16]
