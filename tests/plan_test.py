"""Planned bytes are those that a learner really holds on a device."""

import dataclasses

import jax
import pytest

from configs import default
from rljax import config as config_lib
from rljax import learner, plan, sharding
from rljax.models.lora import Lora
from rljax.models.transformer import Model


def resolved(changes=None) -> config_lib.Config:
    config = default.get_config()
    config.update_from_flattened_dict(changes if changes is not None else {})
    return config_lib.resolve(config)


def held(tree) -> int:
    """Bytes of a tree's arrays on the first device."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first)


@pytest.mark.parametrize(
    "axes, adapters, options",
    [
        ({"data": 2, "fsdp": 4}, None, {}),
        ({"data": 1, "fsdp": 2, "tensor": 4}, Lora(2, 4.0, ("q", "down")), {"moment_dtype": "bfloat16"}),
        ({"data": 1, "fsdp": 8}, None, {"optimizer": "adafactor", "weight_decay": 0.1}),
    ],
)
def test_bytes_of_a_learner(make_config, axes, adapters, options):
    mesh = sharding.make_mesh(**axes)
    config = resolved({f"learner.{key}": value for key, value in options.items()})
    model = Model(make_config(), lora=adapters)
    where = sharding.params_shardings(mesh, model.axes(), model.abstract_params())
    params = jax.jit(model.init, out_shardings=where)(jax.random.key(0))
    assert plan.count(model) == sum(leaf.size for leaf in jax.tree.leaves(params))
    state = learner.init(params, learner.make_optimizer(config.learner, total_updates=3))
    planned = plan.learner_bytes(model, config.learner, mesh, "float32")
    assert planned.parameters == held(state.params) + held(state.frozen)
    assert planned.trained == planned.gradients == held(state.params)
    assert planned.optimizer == held(state.opt_state)
    assert planned.total == planned.parameters + planned.optimizer + planned.gradients


def test_micro_batches_accumulate_in_float32(make_config):
    model, mesh = Model(make_config()), sharding.single_device_mesh()
    once, twice = (resolved({"learner.micro_batches": n}).learner for n in (1, 2))
    whole, halves = (plan.learner_bytes(model, options, mesh, "bfloat16") for options in (once, twice))
    assert halves.gradients == 2 * whole.gradients == 2 * whole.parameters


def test_a_run_holds_its_actor_and_its_reference(make_config):
    policy, mesh = make_config(), sharding.make_mesh(data=1, fsdp=8)
    actor = dataclasses.replace(policy, num_layers=1)
    plain = plan.state_bytes(resolved(), policy, mesh)
    both = plan.state_bytes(resolved({"loss.kl_coef": 0.1, "actor.path": "another"}), policy, mesh, actor)
    assert (plain.actor, plain.reference) == (None, 0) and plain.total == plain.policy.total
    assert both.policy == plain.policy and both.reference == plain.policy.parameters
    assert both.actor is not None and both.actor.parameters < both.policy.parameters
    assert both.total == plain.total + both.actor.total + both.reference
    changes = {"loss.kl_coef": 0.1, "lora.rank": 2, "lora.targets": "q"}
    adapted = plan.state_bytes(resolved(changes), policy, mesh)
    assert adapted.reference == adapted.policy.trained < 0.2 * adapted.policy.parameters


def test_a_parameter_that_does_not_divide_is_named(make_config):
    odd = Model(dataclasses.replace(make_config(), vocab_size=33))
    with pytest.raises(ValueError, match="embed: dimension 'vocab' of size 33 does not divide over 2 devices"):
        plan.learner_bytes(odd, resolved().learner, sharding.make_mesh(data=4, tensor=2), "float32")
