"""Adapters: the same model at first, only they learn, and merged they are the model that learned."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rljax.models import logits, lora, peft
from rljax.models.transformer import Model, attach_lora
from rljax.types import LearnerState

ALL = lora.Lora(rank=3, alpha=6.0, targets=("q", "k", "v", "o", "gate", "up", "down"))


@pytest.fixture
def base(make_config):
    model = Model(make_config(num_layers=2))
    return model, model.init(jax.random.key(0))


def random_b(params):
    """The same parameters with adapters that do something."""
    layers = dict(params["layers"])
    for i, name in enumerate(n for n in params["layers"] if n.endswith("_lora_b")):
        layers[name] = jax.random.normal(jax.random.key(i), layers[name].shape) * 0.3
    return params | {"layers": layers}


TOKENS = np.arange(12).reshape(2, 6) % 7


def test_new_adapters_change_nothing(base):
    model, params = base
    adapted, own = attach_lora(model, params, ALL, jax.random.key(1))
    np.testing.assert_array_equal(logits(adapted, own, TOKENS), logits(model, params, TOKENS))
    assert own["embed"] is params["embed"]  # not copied


def test_shapes_and_the_size_of_a(base):
    model, params = base
    wide = lora.Lora(rank=200, alpha=1.0, targets=("q", "down"))
    trained, _ = lora.split(attach_lora(model, params, wide, jax.random.key(1))[1])
    c = model.config
    shapes = {name: w.shape for name, w in trained["layers"].items()}
    assert shapes == {
        "q_lora_a": (2, c.hidden_size, 200), "q_lora_b": (2, 200, c.num_heads * c.head_dim),
        "down_lora_a": (2, c.intermediate_size, 200), "down_lora_b": (2, 200, c.hidden_size),
    }  # fmt: skip
    assert float(jnp.std(trained["layers"]["q_lora_a"])) == pytest.approx(c.hidden_size**-0.5, rel=0.05)
    assert not trained["layers"]["q_lora_b"].any()


@pytest.mark.parametrize("targets", [("v",), ALL.targets])
def test_merged_weights_are_the_adapted_model(base, targets):
    model, params = base
    adapters = dataclasses.replace(ALL, targets=targets)
    adapted, own = attach_lora(model, params, adapters, jax.random.key(1))
    own = random_b(own)
    got = logits(adapted, own, TOKENS)
    assert float(jnp.abs(got - logits(model, params, TOKENS)).max()) > 0.05
    np.testing.assert_allclose(got, logits(model, lora.merged(own, adapters), TOKENS), atol=2e-5)


def test_alpha_over_rank_scales(base):
    """By hand: W + α/r · A B of one projection."""
    model, params = base
    adapters = lora.Lora(rank=2, alpha=8.0, targets=("up",))
    own = random_b(attach_lora(model, params, adapters, jax.random.key(1))[1])
    a, b = (np.asarray(own["layers"][f"up_lora_{half}"][1], np.float64) for half in "ab")
    want = np.asarray(params["layers"]["up"][1], np.float64) + 4.0 * a @ b
    np.testing.assert_allclose(lora.merged(own, adapters)["layers"]["up"][1], want, atol=1e-5)


def test_split_and_join_are_inverse_and_without_adapters_nothing(base):
    model, params = base
    assert lora.split(params) == (params, None)
    _, own = attach_lora(model, params, ALL, jax.random.key(1))
    trained, frozen = lora.split(own)
    assert jax.tree.structure(frozen) == jax.tree.structure(params)
    assert jax.tree.structure(lora.join(trained, frozen)) == jax.tree.structure(own)
    state = LearnerState(params=trained, frozen=frozen, opt_state=(), updates=0)
    jax.tree.map(np.testing.assert_array_equal, lora.whole(state), own)


def test_adapters_in_the_format_of_peft(base, tmp_path):
    model, params = base
    adapters = lora.Lora(rank=3, alpha=6.0, targets=("q", "down"))
    adapted, own = attach_lora(model, params, adapters, jax.random.key(1))
    own = random_b(own)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old").touch()
    peft.save(tmp_path / "adapter", adapted, own, base="some/model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    files = sorted(p.name for p in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6.0, "some/model")
    assert config["target_modules"] == ["down_proj", "q_proj"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    stem = "base_model.model.model.layers.1.mlp.down_proj"
    np.testing.assert_array_equal(tensors[f"{stem}.lora_A.weight"], own["layers"]["down_lora_a"][1].T)
    np.testing.assert_array_equal(tensors[f"{stem}.lora_B.weight"], own["layers"]["down_lora_b"][1].T)
