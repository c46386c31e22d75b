"""Eight virtual CPU devices for every test, and the tiny random models that several files share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

from rljax.models.config import ModelConfig
from rljax.models.transformer import Model


def random_config(**changes) -> ModelConfig:
    """A decoder small enough to compile in a second, with grouped heads and an odd number of layers."""
    base = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "max_positions": 128,
    }
    return ModelConfig(**base | changes)


@pytest.fixture(scope="session")
def make_config():
    return random_config


@pytest.fixture(scope="session")
def random_model():
    """(model, float32 params) of random_config(), its weights large enough for the samples to differ."""
    model = Model(random_config())
    return model, jax.tree.map(lambda p: 2 * p if p.ndim == 3 else p, model.init(jax.random.key(0)))
