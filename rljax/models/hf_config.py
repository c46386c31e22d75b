"""config.json of transformers 4.x and 5.x ↔ ModelConfig. What is malformed is told by file and key."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, NoReturn

from rljax.models.config import MAX_SIZE, ROPE_KINDS, ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# What transformers takes for a key that config.json leaves out.
_ALL = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False, "use_sliding_window": False}
_QWEN = _ALL | {"max_position_embeddings": 32_768, "max_window_layers": 28}
_DEFAULTS = {
    "llama": _ALL | {"max_position_embeddings": 2048},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
# What a model of these families may say only so, beside its absence.
_ONLY = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
_NOT_KEPT = ("transformers_version", "_name_or_path", "auto_map")  # of the source alone
_MAX_LAYERS = 10_000  # more is no model but a broken file, and each is to be listed
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names the file, if it holds something else."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not valid JSON: {e}; fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a JSON {type(content).__name__}, not an object; fetch it again")
    return content


class _Keys:
    """An object of config.json, read by type. A key that is null counts as left out and takes its default."""

    def __init__(self, content: Any, where: str, defaults: dict[str, Any]):
        if not isinstance(content, dict):
            raise ValueError(f"{where} is {content!r}, not an object")
        self.given = {key: value for key, value in content.items() if value is not None}
        self.where, self.defaults = where, defaults

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise ValueError(f"{self.where}: {key}={self.get(key)!r} is not {expected}")

    def get(self, key: str) -> Any:
        if key not in self.given and key not in self.defaults:
            raise ValueError(f"{self.where} lacks {key}")
        return self.given[key] if key in self.given else self.defaults[key]

    def size(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else self.refuse(key, "true or false")


def read_config(folder: pathlib.Path) -> ModelConfig:
    """config.json of transformers 4.x (rope_theta, rope_scaling) or 5.x (rope_parameters) → ModelConfig.

    Raises FileNotFoundError if there is none, and ValueError, which names the file and the key, for what is
    missing, malformed or not supported.
    """
    file = pathlib.Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; a checkpoint has config.json beside its weights")
    content = read_json(file)
    if {"rollout", "budget"} <= content.keys():
        raise ValueError(f"{file} is that of a run; the run's trained model is the folder {folder}/model")
    return from_dict(content, str(file))


def from_dict(content: dict[str, Any], where: str) -> ModelConfig:
    """What config.json says → ModelConfig. where: the file, for messages. Raises ValueError as read_config."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"{where}: model_type={kind!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    c = _Keys(content, where, _DEFAULTS[kind])
    _check(c, kind)
    c.defaults = {"num_key_value_heads": c.size("num_attention_heads")} | c.defaults
    c.defaults = {"head_dim": c.size("hidden_size") // c.size("num_attention_heads")} | c.defaults
    # transformers 5 lets an older spelling beside the newer one win.
    spelling = "rope_scaling" if c.given.get("rope_scaling", {}) != {} else "rope_parameters"
    defaults = _ROPE_DEFAULTS | {"rope_theta": c.number("rope_theta")}
    defaults |= {"original_max_position_embeddings": c.size("max_position_embeddings")}
    rope = _Keys(c.given.get(spelling, {}), f"{where}: {spelling}", defaults)
    window, sliding_layers = _sliding_window(c, kind)
    fields = {
        "model_type": kind,
        "vocab_size": c.size("vocab_size"),
        "hidden_size": c.size("hidden_size"),
        "intermediate_size": c.size("intermediate_size"),
        "num_layers": c.size("num_hidden_layers", most=_MAX_LAYERS),
        "num_heads": c.size("num_attention_heads"),
        "num_kv_heads": c.size("num_key_value_heads"),
        "head_dim": c.size("head_dim"),
        "rope_theta": rope.number("rope_theta"),
        "norm_eps": c.number("rms_norm_eps"),
        "tie_embeddings": c.flag("tie_word_embeddings"),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "max_positions": c.size("max_position_embeddings"),
        "sliding_window": window,
        "sliding_layers": sliding_layers,
    }
    scaling = _rope_scaling(rope, fields["max_positions"])
    try:
        config = ModelConfig(**fields, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    written = write_config(config, "")
    others = {k: v for k, v in content.items() if k not in written and k not in _NOT_KEPT}
    return dataclasses.replace(config, other_keys=json.dumps(others, ensure_ascii=False))


def _check(c: _Keys, kind: str) -> None:
    """Refuses what is missing, and the variants of a family that this decoder does not compute."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [k for k in needed if k not in c.given]
    if missing:
        raise ValueError(f"{c.where} lacks {', '.join(missing)}")
    only = _ONLY if kind == "qwen2" else _ONLY | {"attention_bias": False}  # qwen2's are on whatever this says
    for key, value in only.items():
        if key in c.given and c.given[key] != value:
            known = value if isinstance(value, str) else json.dumps(value)
            raise ValueError(f"{c.where}: {key}={c.given[key]!r} is not supported; known: {known}")


def _sliding_window(c: _Keys, kind: str) -> tuple[int | None, tuple[bool, ...] | None]:
    """(window or None, which layers have it or None for all). Qwen's first max_window_layers layers have none.

    Llama never has one: transformers' takes no notice of these keys.
    """
    if kind == "llama" or "sliding_window" not in c.given or not c.flag("use_sliding_window"):
        return None, None
    layers, types = c.size("num_hidden_layers", most=_MAX_LAYERS), c.given.get("layer_types")
    if types is None:
        first = c.size("max_window_layers", least=0)
        sliding = tuple(i >= first for i in range(layers)) if first < layers else ()
    elif not isinstance(types, list) or len(types) != layers or any(t not in _LAYER_TYPES for t in types):
        c.refuse("layer_types", f"a list of {layers} names, one a layer; known: {', '.join(_LAYER_TYPES)}")
    else:
        sliding = tuple(t == _LAYER_TYPES[1] for t in types)
    window = c.size("sliding_window")
    return (None, None) if not any(sliding) else (window, None if all(sliding) else sliding)


def _rope_scaling(rope: _Keys, max_positions: int) -> dict[str, Any] | None:
    """Arguments of RopeScaling, or None where there is no scaling."""
    kind = rope.given.get("rope_type", rope.given.get("type", "default"))
    nested = [key for key in rope.given if isinstance(rope.given[key], dict)]
    if nested:
        rope.refuse(nested[0], "a number; one scaling for all layers is supported")
    if "partial_rotary_factor" in rope.given and rope.given["partial_rotary_factor"] != 1:
        rope.refuse("partial_rotary_factor", "1, the only one supported")
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ValueError(f"{rope.where}: rope_type={kind!r} is not supported; known: default, {', '.join(ROPE_KINDS)}")
    out: dict[str, Any] = {"kind": kind}
    if kind != "linear":
        out["original_max_positions"] = rope.size("original_max_position_embeddings")
    if kind == "yarn":
        rope.defaults = rope.defaults | {"factor": max_positions / out["original_max_positions"]}
        out |= {key: rope.number(key) for key in ("beta_fast", "beta_slow")} | {"truncate": rope.flag("truncate")}
        # Zero says as little as null: so has transformers it.
        given = [key for key in ("mscale", "mscale_all_dim") if rope.given.get(key, 0) != 0]
        given += ["attention_factor"] if "attention_factor" in rope.given else []
        out |= {key: rope.number(key) for key in given}
    if kind == "llama3":
        out |= {key: rope.number(key) for key in ("low_freq_factor", "high_freq_factor")}
    return out | {"factor": rope.number("factor")}


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """ModelConfig → config.json that transformers 4.x and 5.x both read."""
    rope = _rope_written(config.rope_scaling)
    out = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.model_type != "llama":
        out |= _window_written(config)
    return out | json.loads(config.other_keys)


def _window_written(config: ModelConfig) -> dict[str, Any]:
    sliding = (config.sliding_window is not None,) * config.num_layers
    sliding = sliding if config.sliding_layers is None else config.sliding_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        # Releases that know no layer_types have the window in all layers from this one on.
        "max_window_layers": sliding.index(True) if True in sliding else config.num_layers,
        "layer_types": [_LAYER_TYPES[int(s)] for s in sliding],
    }


def _rope_written(s: RopeScaling | None) -> dict[str, Any]:
    """The keys that both spellings share."""
    if s is None:
        return {"rope_type": "default"}
    out: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind != "linear":
        out["original_max_position_embeddings"] = s.original_max_positions
    if s.kind == "llama3":
        out |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        out |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
        optional = {k: getattr(s, k) for k in ("attention_factor", "mscale", "mscale_all_dim")}
        out |= {key: value for key, value in optional.items() if value is not None}
    return out
