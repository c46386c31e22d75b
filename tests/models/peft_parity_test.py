"""Exported adapters in the package peft on torch: the same logits."""

import importlib.util

import jax
import numpy as np
import pytest

from rljax import models
from rljax.models import lora, peft
from rljax.models.transformer import Model, attach_lora

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("peft") is None,
        reason="torch or peft is missing; run: pip install -e '.[parity]'",
    ),
]


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_peft_reads_exported_adapters(make_config, targets, tmp_path):
    import peft as peft_package
    import torch
    import transformers

    base = Model(make_config(vocab_size=64, hidden_size=32, head_dim=16, tie_embeddings=False))
    params = base.init(jax.random.key(0))
    models.save(tmp_path / "base", base, params)
    model, params = attach_lora(base, params, lora.Lora(3, 6.0, targets), jax.random.key(1))
    layers = dict(params["layers"])
    for i, name in enumerate(n for n in params["layers"] if n.endswith("_lora_b")):
        layers[name] = jax.random.normal(jax.random.key(i), layers[name].shape)
    params = params | {"layers": layers}
    peft.save(tmp_path / "adapter", model, params, base=str(tmp_path / "base"))

    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    adapted = peft_package.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    tokens = np.arange(20).reshape(2, 10) % 64
    with torch.inference_mode():
        theirs = adapted(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(models.logits(model, params, tokens))
    assert np.abs(ours - np.asarray(models.logits(base, lora.split(params)[1], tokens))).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
