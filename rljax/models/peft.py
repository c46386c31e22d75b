"""Adapters as a directory that the package peft loads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
from safetensors.numpy import save_file

from rljax import sharding
from rljax.models import hf, weights
from rljax.models.transformer import Model


def save(path: str | os.PathLike, model: Model, params, *, base: str) -> None:
    """Writes the adapters of `params`; the directory appears whole or not at all, in place of an older one.

    Of parameters on several hosts, which all call this, the first host writes.
    base: what adapter_config.json names as the model that they belong to. Raises ValueError for a model without them.
    """
    adapters = model.lora
    if adapters is None:
        raise ValueError(f"{path}: the model has no adapters to save; save the model itself (models.hf)")
    names = hf.tensor_names(model.config).items()
    adapted = {key: (leaf[-1], layer) for key, (leaf, layer, _, _) in names if leaf[-1] in adapters.targets}
    tensors = {}
    for key, (name, layer) in adapted.items():
        for half in "ab":  # peft stores [r, in] and [out, r]
            matrix = np.asarray(sharding.fetch(params["layers"][f"{name}_lora_{half}"][layer])).T
            own = f"base_model.model.{key.removesuffix('.weight')}.lora_{half.upper()}.weight"
            tensors[own] = np.ascontiguousarray(matrix)
    if not sharding.writes(params):
        return
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": sorted({key.split(".")[-2] for key in adapted}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with weights.new_folder(pathlib.Path(path).resolve()) as folder:  # a link stays a link
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
