"""Tensors of safetensors files: read by slices, written by blocks, so that no whole model is in host memory.

A file is 8 bytes of length, a JSON header of that length, and the tensors' bytes. A model of several files has an
index beside them, which says where each tensor lies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rljax.models.hf_config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of the tensors in one file; a larger tensor has a file to itself

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Reader:
    """The tensors of a checkpoint directory; a context manager. Headers are read at once, data on demand.

    Raises FileNotFoundError for a missing file; ValueError, which names the file and the tensor, for a file that
    cannot be read, an index that does not fit its files, or a tensor that lies in two of them.
    """

    def __init__(self, folder: pathlib.Path):
        self.source = folder / INDEX if (folder / INDEX).is_file() else folder / SINGLE
        places = self._index() if self.source.name == INDEX else {}
        self._files, self._handles = {}, {}
        for name in sorted(set(places.values())) if places else [SINGLE]:
            file = folder / name
            handle = _open(file)
            self._handles[file] = handle
            for tensor in handle.keys():  # noqa: SIM118
                if tensor in self._files:
                    raise ValueError(
                        f"tensor {tensor} lies in both {self._files[tensor]} and {file}; remove one of them"
                    )
                self._files[tensor] = file
        for tensor, name in places.items():
            if self._files.get(tensor) != folder / name:
                raise ValueError(f"{self.source} places tensor {tensor} in {name}, which does not hold it")

    def _index(self) -> dict[str, str]:
        places = read_json(self.source).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{self.source}: weight_map is no object of tensors and their files; fetch it again")
        for tensor, name in places.items():
            if not isinstance(name, str) or pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{self.source}: tensor {tensor} is in {name!r}, no *.safetensors file beside the index"
                )
        return places

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        self._handles.clear()
        self._files.clear()

    def check(self, shapes: Mapping[str, tuple[int, ...]], whole: bool = True) -> None:
        """Compares with the tensors that config.json asks for (whole: all of them); ValueError names what is wrong."""
        # A tied checkpoint may repeat its embedding as lm_head; rotary buffers are derived from the config.
        ignored = {"lm_head.weight"} - set(shapes)
        extra = [n for n in self._files if n not in shapes and n not in ignored and "rotary_emb" not in n]
        extra = extra if whole else []
        missing = [n for n in shapes if n not in self._files]
        if missing or extra:
            raise ValueError(
                f"{self.source}: tensors do not fit config.json: missing {missing[:3] or 'none'}"
                f" ({len(missing)}), not expected {extra[:3] or 'none'} ({len(extra)})"
            )
        for name, shape in shapes.items():
            stored = self._slice(name)
            if tuple(stored.get_shape()) != tuple(shape):
                raise ValueError(
                    f"{self._files[name]}: tensor {name} has shape {tuple(stored.get_shape())}, "
                    f"config.json asks for {tuple(shape)}"
                )
            if stored.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{self._files[name]}: tensor {name} is {stored.get_dtype()}, known: {', '.join(DTYPES)}; "
                    "choose a checkpoint that is not quantised"
                )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor, in the file's dtype."""
        stored = self._slice(name)
        array = stored[index]
        dtype = DTYPES[stored.get_dtype()]
        return array if array.dtype == dtype else array.view(dtype)  # some releases hand bfloat16 over as its bits

    def _slice(self, name: str):
        return self._handles[self._files[name]].get_slice(name)


def _open(file: pathlib.Path):
    if not file.is_file():
        pickled = sorted(p.name for p in file.parent.glob("*.bin"))
        hint = f"; {pickled[0]} is pickled Python, which is not read: convert it to safetensors" if pickled else ""
        raise FileNotFoundError(f"{file} is missing; the checkpoint's weights are not complete{hint}")
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"{file} is not a readable safetensors file ({e}); fetch it again") from e


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `target` to write into, which takes its place at the end, or is gone if anything is raised.

    An older folder there is moved aside first and deleted last, and comes back if the new one cannot take its place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if not target.is_dir():
            os.replace(temporary, target)
            return
        old = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        os.replace(target, old)
        try:
            os.replace(temporary, target)
        except OSError:
            os.replace(old, target)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Source(NamedTuple):
    """A tensor to be written: blocks() gives its values in order, in arrays of its dtype."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: pathlib.Path | None, tensors: Mapping[str, Source]) -> None:
    """model.safetensors, or several of at most SHARD_BYTES and their index; one block is in memory at a time.

    folder: None only asks for all blocks in the same order, as the other hosts do whose arrays one host writes.
    """
    shards: list[dict[str, Source]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.size for t in shards[-1].values()) + tensor.size > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if folder is None:
        for tensor in (tensor for shard in shards for tensor in _aligned(shard).values()):
            for _ in tensor.blocks():
                pass
        return
    if len(shards) == 1:
        return _write_file(folder / SINGLE, shards[0])
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.size for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _aligned(tensors: dict[str, Source]) -> dict[str, Source]:
    """In an order in which all are aligned without gaps."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def _write_file(file: pathlib.Path, tensors: dict[str, Source]) -> None:
    tensors = _aligned(tensors)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for block in tensor.blocks():
                f.write(block.view(np.uint8).data)
