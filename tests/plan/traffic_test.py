"""Bytes that devices send, counted by hand for a small decoder."""

import dataclasses

import pytest

from configs import default
from rljax import config as config_lib
from rljax import sharding
from rljax.plan import programs, traffic

# Of random_config(): bytes in float32 of a layer's matrices, of its norms, and of the embedding (which is the head).
MATRICES = 4 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24)
NORMS, LAYERS, EMBED, LAST_NORM = 4 * 2 * 16, 3, 4 * 32 * 16, 4 * 16


def local(make_config, changes, **axes) -> programs.Local:
    config = default.get_config()
    small = {"rollout.prompts": 8, "rollout.samples": 2, "rollout.slots": 2, "rollout.lanes": 8}
    config.update_from_flattened_dict(
        small | {"rollout.max_prompt_tokens": 6, "rollout.max_new_tokens": 5, "rollout.segment": 5} | changes
    )
    actor = dataclasses.replace(make_config(), num_layers=1) if "actor.path" in changes else None
    mesh = sharding.abstract_mesh(**{"data": 1, "fsdp": 1, "tensor": 1} | axes, devices=2)
    return programs.local(config_lib.resolve(config), make_config(), actor, mesh)


def test_parameters_are_gathered_and_their_gradients_scattered(make_config):
    """Once forwards and once backwards, a half each time: the other half is the device's own."""
    sent = traffic.update(local(make_config, {}, fsdp=2))
    split, whole = LAYERS * MATRICES + EMBED, LAYERS * NORMS + LAST_NORM
    assert sent == {
        ("update", ("fsdp",), "all-gather"): 2 * split / 2,
        ("update", ("fsdp",), "reduce-scatter"): split / 2,
        ("update", ("fsdp",), "all-reduce"): 2 * whole / 2,
    }
    twice = traffic.update(local(make_config, {"learner.micro_batches": 2}, fsdp=2))
    assert twice == {key: 2 * size for key, size in sent.items()}


def test_whole_gradients_are_reduced_over_the_data_axis(make_config):
    sent = traffic.update(local(make_config, {}, data=2))
    assert sent == {("update", ("data",), "all-reduce"): 2 * (LAYERS * (MATRICES + NORMS) + EMBED + LAST_NORM) / 2}


@pytest.mark.parametrize("remat, sums", [("none", 4), ("dots", 4), ("layer", 5)])
def test_activations_are_reduced_over_the_tensor_axis(make_config, remat, sums):
    """After o and down, before q, k, v and gate, up on the way back; and o again where a layer is computed again."""
    sent = traffic.update(local(make_config, {"model.remat": remat}, tensor=2))
    activation = 4 * 16 * 8 * (6 + 2 * 5)  # [tokens, hidden]
    assert sent == {("update", ("tensor",), "all-reduce"): 2 * (sums * LAYERS + 2) * activation / 2}


def test_an_actor_decodes_with_its_own_parameters(make_config):
    own = local(make_config, {"actor.path": "another", "jackpot.rule": "obrs"}, fsdp=2)
    sent = traffic.rollout(own, steps=10, prefills=3)
    layer = MATRICES / 2
    assert sent == {
        ("prefill", ("fsdp",), "all-gather"): 3 * (layer + EMBED / 2),
        ("decode", ("fsdp",), "all-gather"): 10 * (layer + EMBED / 2),
    }
    assert traffic.passes(own.config) == {"policy": (1, 1), "actor": (1, 1), "reference": (0, 0)}


def test_one_device_sends_nothing(make_config):
    config = config_lib.resolve(default.get_config())
    one = sharding.abstract_mesh(data=1, fsdp=1, tensor=1, devices=1)
    own = programs.local(config, make_config(), None, one)
    assert traffic.update(own) == traffic.rollout(own, 5, 5) == {}
