"""A plan's bytes against those of the compiled programs, of models that are shipped or known, on one CPU device.

On a CPU the compiler holds some arrays that an accelerator's would fuse; both stay within the margin. It also orders
independent operations so that they can run beside each other; accelerators' compilers order them for memory, and so it
does where a test says BY_MEMORY.
"""

import dataclasses

import jax
import pytest

from configs import default, jackpot, presets
from rljax import config as config_lib
from rljax import sampling, sharding
from rljax.models import hf, published
from rljax.plan import memory, programs

MARGIN = 0.15
SMOLLM2 = published.config("HuggingFaceTB/SmolLM2-135M-Instruct")
TINY, ACTOR = (hf.read_config(hf.resolve(name)) for name in ("tiny-policy", "tiny-actor"))
BY_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
ONE = sharding.abstract_mesh(data=1, fsdp=1, tensor=1, devices=1)


def local(preset="tiny", changes=None, get=default.get_config, actor=None) -> programs.Local:
    c = get()
    presets.apply(c, preset)
    c.update_from_flattened_dict(changes if changes is not None else {})
    return programs.local(config_lib.resolve(c), SMOLLM2 if preset == "smollm2" else TINY, actor, ONE)


def check(traced, program, overwritten, options=None) -> None:
    """Arguments and temporaries, and outputs that are no overwritten argument."""
    found = traced.lower().compile(compiler_options=options).memory_analysis()
    arguments = found.argument_size_in_bytes
    real = arguments + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    planned = arguments + memory.peak(program, overwritten).bytes
    print(f"\nplanned {planned / 1e6:.1f} MB, compiled {real / 1e6:.1f} MB: {planned / real - 1:+.1%}")
    assert (1 - MARGIN) * real <= planned <= (1 + MARGIN) * real


def check_update(own: programs.Local, options=None) -> None:
    step, arguments = programs.update_call(own)
    check(jax.jit(step, donate_argnums=0).trace(*arguments), *programs.update(own), options)


def check_rollout(own: programs.Local) -> None:
    model, params = programs.behaviour(own)
    columns = min(own.config.rollout.columns, own.config.rollout.max_new_tokens)
    shape = programs.shape(own, columns)
    check(sampling.trace_decode(model, params, shape), *programs.decode(own, columns))
    check(sampling.trace_prefill(model, params, shape, shape.lanes), *programs.prefill(own, columns))


def test_the_rollouts_of_the_shipped_model():
    check_rollout(local())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_the_update_of_the_shipped_model(remat):
    check_update(local(changes={"model.remat": remat}))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_the_update_of_the_shipped_model_on_a_mesh(axes):
    """Each of eight devices holds what is planned for one."""
    mesh, whole = sharding.make_mesh(**axes), local()
    whole = dataclasses.replace(whole, policy=whole.policy.on(mesh))
    step, (state, frozen, batch, reference, key) = programs.update_call(whole)
    where = sharding.params_shardings(mesh, whole.policy.axes(), state.params)
    everywhere = sharding.replicated(mesh)
    opt_where = sharding.like_params(state.opt_state, where, mesh)
    state_where = dataclasses.replace(state, params=where, opt_state=opt_where, updates=everywhere)

    def put(tree, places):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places)

    arguments = put(state, state_where), frozen, put(batch, sharding.by_prompt(mesh, batch)), reference, key
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(state_where, everywhere))
    own = programs.local(whole.config, TINY, None, mesh)
    check(compiled.trace(*arguments), *programs.update(own))


@pytest.mark.slow
def test_an_update_of_policy_and_actor():
    """Their passes are independent, so that the order counts; see above."""
    check_update(local(get=jackpot.get_config, actor=ACTOR), BY_MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_the_update_of_smollm2(remat):
    check_update(local("smollm2", {"model.remat": remat}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"learner.minibatches": 2, "learner.micro_batches": 2}, {"learner.optimizer": "adafactor"}]
)
def test_the_update_of_smollm2_by_what_the_optimizer_holds(changes):
    check_update(local("smollm2", {"model.remat": "layer"} | changes), BY_MEMORY)


@pytest.mark.slow
def test_the_rollouts_of_smollm2():
    check_rollout(local("smollm2"))
