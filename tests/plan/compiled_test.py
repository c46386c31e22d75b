"""A plan's bytes against those of the compiled programs, of models that are shipped or known, on one CPU device.

On a CPU the compiler holds some arrays that an accelerator's would fuse; both stay within the margin.
"""

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
ONE = sharding.abstract_mesh(data=1, fsdp=1, tensor=1, devices=1)


def local(preset="tiny", changes=None, get=default.get_config, actor=None) -> programs.Local:
    c = get()
    presets.apply(c, preset)
    c.update_from_flattened_dict(changes if changes is not None else {})
    return programs.local(config_lib.resolve(c), SMOLLM2 if preset == "smollm2" else TINY, actor, ONE)


def check(traced, program, overwritten, margin=MARGIN) -> None:
    """Arguments and temporaries, and outputs that are no overwritten argument."""
    found = traced.lower().compile().memory_analysis()
    arguments = found.argument_size_in_bytes
    real = arguments + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    planned = arguments + memory.peak(program, overwritten).bytes
    print(f"\nplanned {planned / 1e6:.1f} MB, compiled {real / 1e6:.1f} MB: {planned / real - 1:+.1%}")
    assert (1 - margin) * real <= planned <= (1 + margin) * real


def check_update(own: programs.Local, margin=MARGIN) -> None:
    step, arguments = programs.update_call(own)
    check(jax.jit(step, donate_argnums=0).trace(*arguments), *programs.update(own), margin)


def check_rollout(own: programs.Local) -> None:
    model, params = programs.behaviour(own)
    columns = min(own.config.rollout.columns, own.config.rollout.max_new_tokens)
    shape = programs.shape(own, columns)
    check(sampling.trace_decode(model, params, shape), *programs.decode(own, columns))
    check(sampling.trace_prefill(model, params, shape, shape.lanes), *programs.prefill(own, columns))


def test_the_update_of_the_shipped_model():
    check_update(local())


def test_the_rollouts_of_the_shipped_model():
    check_rollout(local())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_the_update_of_the_shipped_model_by_what_is_computed_again(remat):
    check_update(local(changes={"model.remat": remat}))


@pytest.mark.slow
def test_an_update_of_policy_and_actor():
    """Less exact than one model's: what of the two passes is alive together is the compiler's choice."""
    check_update(local(get=jackpot.get_config, actor=ACTOR), margin=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_the_update_of_smollm2(remat):
    check_update(local("smollm2", {"model.remat": remat}))


@pytest.mark.slow
def test_the_rollouts_of_smollm2():
    check_rollout(local("smollm2"))
