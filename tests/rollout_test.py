"""A config's settings on their way into the engine."""

import dataclasses

import jax
import numpy as np
import pytest

from rljax import rollout, sampling, sharding
from rljax.types import Prompts


@pytest.mark.parametrize(
    "sizes, devices, want",
    [
        ({"lanes": 8, "slots": 4}, 1, (8, 4)),
        ({"lanes": 8, "slots": 16}, 1, (8, 16)),
        ({"lanes": 64, "slots": 32}, 1, (12, 16)),  # a step has 12 prompts × 16 samples
        ({"lanes": 64, "slots": 32}, 8, (16, 16)),  # and 12 do not divide over 8 devices
    ],
)
def test_no_lane_or_slot_that_a_step_cannot_fill_is_decoded(sizes, devices, want, run_config, monkeypatch):
    calls = []
    monkeypatch.setattr(sampling, "generate", lambda *args, **given: calls.append(given))
    base = {"rollout.prompts": 12, "rollout.samples": 16, "budget.rollouts": 192}
    options = run_config(base | {f"rollout.{name}": size for name, size in sizes.items()}).rollout
    mesh = sharding.make_mesh(data=devices, devices=jax.devices()[:devices])
    params = jax.device_put(np.zeros(8), sharding.replicated(mesh))
    prompts = Prompts(ids=np.arange(2), draws=np.arange(2), tokens=([1], [2]), examples=({}, {}))
    rollout.generate(None, params, prompts, np.ones(2, int), key=jax.random.key(0), options=options, stop_ids=(0,))
    assert (calls[0]["lanes"], calls[0]["slots"]) == want
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "segment", "columns")
    assert {name: calls[0][name] for name in names} == {name: dataclasses.asdict(options)[name] for name in names}
