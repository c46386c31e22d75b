"""Hugging Face directories: bit-for-bit round trips, memory, both spellings of config.json, named errors."""

import json
import pathlib
import tracemalloc

import huggingface_hub
import huggingface_hub.errors
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax import models, sharding
from rljax.models import hf, weights
from rljax.models.config import RopeScaling
from rljax.models.transformer import Model

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = RopeScaling(kind="linear", factor=2.0)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=32)
FAMILIES = {
    "llama tied": {},
    "llama untied": {"tie_embeddings": False, "rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 16, "rope_scaling": LINEAR},
    "qwen3": {
        "model_type": "qwen3",
        "qk_norm": True,
        "tie_embeddings": False,
        "rope_scaling": YARN,
        "sliding_window": 16,
        "sliding_layers": (False, True, False),
    },
}
LAYER_TENSORS = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
}  # fmt: skip
EXTRA_TENSORS = {
    "qwen2": {f"self_attn.{n}_proj.bias" for n in "qkv"},
    "qwen3": {f"self_attn.{n}_norm.weight" for n in "qk"},
}


@pytest.fixture
def saved(tmp_path, make_config, random_params):
    """A llama checkpoint, and what was saved in it."""
    model = Model(make_config())
    params = random_params(model)
    models.save(tmp_path / "model", model, params)
    return tmp_path / "model", model, params


def edit(folder, **changes):
    """Changes keys of config.json; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {k: v for k, v in config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_equals_import_bit_for_bit(family, dtype, tmp_path, make_config, random_params):
    model = Model(make_config(**FAMILIES[family]))
    params = random_params(model, dtype=dtype)
    models.save(tmp_path / "one", model, params)
    again, loaded = models.load(tmp_path / "one", dtype=dtype)
    assert again == model
    same(loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(dtype)}
    models.save(tmp_path / "two", again, loaded)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == dtype and one[name].tobytes() == two[name].tobytes(), name
    layer = LAYER_TENSORS | EXTRA_TENSORS.get(model.config.model_type, set())
    names = {f"model.layers.{i}.{name}" for i in range(3) for name in layer}
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    assert set(one) == names | (set() if model.config.tie_embeddings else {"lm_head.weight"})
    assert json.loads((tmp_path / "one/config.json").read_text())["torch_dtype"] == dtype


def test_tensors_are_stored_as_hugging_face_does(saved):
    folder, _, params = saved
    stored = load_file(folder / "model.safetensors")
    # Linear layers are [out, in] there and [in, out] here; layer 1 of the stack is model.layers.1.
    np.testing.assert_array_equal(stored["model.layers.1.self_attn.q_proj.weight"], params["layers"]["q"][1].T)
    np.testing.assert_array_equal(stored["model.layers.2.mlp.down_proj.weight"], params["layers"]["down"][2].T)
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], params["embed"])
    assert stored["model.layers.0.self_attn.k_proj.weight"].shape == (16, 16)


def test_bfloat16_files_load_as_float32_and_back(tmp_path, make_config, random_params):
    model = Model(make_config())
    params = random_params(model, dtype="bfloat16")
    models.save(tmp_path / "model", model, params)
    _, wide = models.load(tmp_path / "model")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    same(wide, jax.tree.map(lambda p: np.asarray(p).astype(np.float32), params))
    same(jax.tree.map(lambda p: np.asarray(p).astype(ml_dtypes.bfloat16), wide), params)


def test_a_tied_checkpoint_may_repeat_its_embedding_as_the_head(saved):
    folder, _, params = saved
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"]}, folder / "model.safetensors")
    same(models.load(folder)[1], params)


def split(folder):
    """Makes two files and an index of the one; returns the index's weight_map."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(stored), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: stored[n] for n in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_with_an_index(saved):
    folder, _, params = saved
    where = split(folder)
    model, loaded = models.load(folder)
    same(loaded, params)
    # Saving here replaces the shards: they would be read before the new weights.
    changed = jax.tree.map(lambda p: p + 1, loaded)
    models.save(folder, model, changed)
    same(models.load(folder)[1], changed)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002.safetensors is missing"):
        models.load(folder)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "index, told",
    [
        ("{", "index.json is not valid JSON"),
        ({"weights": {}}, "index.json: weight_map is no object"),
        ({"weight_map": []}, "index.json: weight_map is no object"),
        ({NORM: "model-00002-of-00002.safetensors"}, f"{NORM} in model-00002-of-00002.safetensors, which does not"),
        ({"model.gone.weight": "model-00001-of-00002.safetensors"}, "model.gone.weight in model-00001.*does not hold"),
        ({NORM: "../model-00001-of-00002.safetensors"}, rf"tensor {NORM} is in '\.\./model-00001"),
        ({NORM: 2}, f"tensor {NORM} is in 2, no "),
        ({NORM: "pytorch_model.bin"}, "is in 'pytorch_model.bin', no .*safetensors file"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_told(index, told, saved):
    folder, *_ = saved
    where = split(folder)
    if isinstance(index, dict) and not {"weights", "weight_map"} & set(index):
        index = {"weight_map": where | index}
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        models.load(folder)


def test_a_tensor_in_two_files_is_told(saved):
    folder, *_ = saved
    split(folder)
    file = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(file) | load_file(folder / "model-00001-of-00002.safetensors"), file)
    with pytest.raises(ValueError, match="tensor model.* lies in both .*00001-of-00002.* and .*00002-of-00002"):
        models.load(folder)


def test_large_models_are_saved_in_several_files(saved, monkeypatch):
    folder, model, params = saved
    whole = load_file(folder / "model.safetensors")
    monkeypatch.setattr(weights, "SHARD_BYTES", 8000)
    models.save(folder, model, params)
    files = sorted(folder.glob("*.safetensors"))
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert [f.name for f in files] == names and len(files) > 2
    tensors = [load_file(f) for f in files]
    assert all(sum(t.nbytes for t in part.values()) <= 8000 for part in tensors)
    assert {name: t.tobytes() for part in tensors for name, t in part.items()} == {
        name: t.tobytes() for name, t in whole.items()
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert index["weight_map"] == {n: f.name for f, part in zip(files, tensors, strict=True) for n in part}
    same(models.load(folder)[1], params)
    monkeypatch.undo()
    models.save(folder, model, params)
    assert [f.name for f in folder.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("stored, spread", [("float32", False), ("bfloat16", True)])
def test_loading_holds_one_tensor_of_the_file_in_host_memory(stored, spread, tmp_path, make_config, random_params):
    # Many layers, each much smaller than the embedding (2 MiB in float32), all of them together larger.
    config = make_config(
        vocab_size=4096, hidden_size=128, intermediate_size=512, num_layers=16, num_heads=8, head_dim=16,
        model_type="qwen2", qkv_bias=True,
    )  # fmt: skip
    model = Model(config)
    models.save(tmp_path / "m", model, random_params(model, dtype=stored))
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2) if spread else sharding.single_device_mesh()
    models.load(tmp_path / "m", mesh=mesh)  # compiles
    largest = 4096 * 128 * np.dtype(stored).itemsize
    tracemalloc.start()
    try:
        models.load(tmp_path / "m", mesh=mesh)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside numpy's bytes this counts objects of Python, of which a model of any size has as many.
    assert 0.9 * largest < peak < 1.1 * largest + 300_000, f"{peak:,} of {largest:,}"


def test_equal_parts_are_read_once(saved, monkeypatch):
    folder, *_ = saved
    read, calls = weights.Reader.read, []
    monkeypatch.setattr(weights.Reader, "read", lambda self, name, index: calls.append(name) or read(self, name, index))
    models.load(folder, mesh=sharding.make_mesh(data=4, fsdp=2))
    assert calls.count("model.embed_tokens.weight") == 2  # the halves of fsdp, which four devices have each
    assert calls.count("model.norm.weight") == 1


def test_each_device_gets_its_shard_and_the_whole_is_the_same(saved):
    folder, model, params = saved
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    _, spread = models.load(folder, mesh=mesh)
    same(spread, params)
    want = sharding.params_shardings(mesh, model.axes(), model.abstract_params())
    jax.tree.map(lambda p, s: p.sharding == s or pytest.fail(f"{p.sharding} is not {s}"), spread, want)
    assert spread["layers"]["q"].addressable_shards[0].data.shape == (
        3,
        8,
        16,
    )  # [layers, embed/fsdp, heads/tensor]
    assert spread["layers"]["attn_norm"].addressable_shards[0].data.shape == (3, 16)


# One model in the spelling of transformers 4.x and of 5.x: where the rotary numbers stand.
ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPELLINGS = {
    "4.x": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | ROPE, "rope_parameters": None},
    "4.x older": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | ROPE, "rope_parameters": None},
    "5.x": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | ROPE,
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_spellings_of_the_rotary_numbers(spelling, saved):
    folder, *_ = saved
    edit(folder, **SPELLINGS[spelling])
    config = hf.read_config(folder)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_rotary_numbers_without_scaling(saved):
    folder, *_ = saved
    edit(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 250_000})
    config = hf.read_config(folder)
    assert config.rope_theta == 250_000.0 and config.rope_scaling is None


def test_fields_are_read_as_given(saved):
    folder, *_ = saved
    edit(
        folder,
        head_dim=None,
        num_key_value_heads=None,
        rms_norm_eps=1e-3,
        rope_theta=None,
        rope_parameters=None,
    )
    config = hf.read_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps, config.rope_theta) == (4, 4, 1e-3, 1e4)


@pytest.mark.parametrize(
    "fields, window",
    [
        ({"use_sliding_window": False, "sliding_window": 4096}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, 64),
        ({"use_sliding_window": True, "sliding_window": None}, None),
    ],
)
def test_a_sliding_window_holds_only_where_it_is_used(fields, window, saved):
    folder, *_ = saved
    edit(folder, max_window_layers=None)
    edit(folder, model_type="qwen2", **fields)
    assert hf.read_config(folder).sliding_window == window
    edit(folder, model_type="llama")  # which never has one
    assert hf.read_config(folder).sliding_window is None


@pytest.mark.parametrize(
    "fields, told",
    [
        (
            {"model_type": "gemma"},
            "config.json: model_type='gemma' is not supported; known: llama, qwen2, qwen3",
        ),
        ({"model_type": None}, "config.json: model_type=None is not supported"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act='gelu' is not supported; known: silu"),
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks vocab_size, hidden_size"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "config.json: rope_scaling: rope_type='dynamic' is not supported; known: .*llama3, yarn",
        ),
        (
            {"intermediate_size": 99},
            r"model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape \(24, 16\), "
            r"config.json asks for \(99, 16\)",
        ),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, r"embed_tokens.weight has shape .*2147483647"),
        ({"num_hidden_layers": 10_000}, r"missing \['model.layers.3.*\(89973\)"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers=10001 is not a whole number from 1 to 10000"),
        ({"num_hidden_layers": 4}, r"missing \['model.layers.3.*\(9\), not expected none"),
        ({"num_hidden_layers": 2}, r"missing none \(0\), not expected \['model.layers.2.*\(9\)"),
        ({"model_type": "qwen3"}, r"missing \['model.layers.0.self_attn.k_norm.weight"),
        ({"tie_word_embeddings": False}, r"missing \['lm_head.weight'\] \(1\)"),
    ],
)
def test_what_does_not_fit_is_named(fields, told, saved):
    folder, *_ = saved
    edit(folder, **fields)
    with pytest.raises(ValueError, match=told):
        models.load(folder)


def test_broken_files_are_named(saved):
    folder, *_ = saved
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:5], b""):
        weights.write_bytes(part)
        with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
            models.load(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        models.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        models.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        models.load(folder)


def test_other_dtypes_than_those_of_a_decoder_are_told(saved):
    folder, *_ = saved
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].astype(np.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: tensor model.norm.weight is I8, known: F32, F16, BF16"):
        models.load(folder)


def test_half_precision_files_are_read(saved):
    folder, _, params = saved
    stored = load_file(folder / "model.safetensors")
    save_file({name: t.astype(np.float16) for name, t in stored.items()}, folder / "model.safetensors")
    same(models.load(folder)[1], jax.tree.map(lambda p: np.asarray(p).astype(np.float16).astype(np.float32), params))


def test_pickled_weights_are_not_read(saved):
    folder, *_ = saved
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is pickled Python.*convert it to safetensors"):
        models.load(folder)


def test_a_padded_vocabulary_is_stripped_on_export(tmp_path, make_config, random_params):
    model = Model(make_config(vocab_size=29, tie_embeddings=False))
    params = random_params(model)
    models.save(tmp_path / "plain", model, params)
    padded = params | {
        "embed": jnp.pad(params["embed"], ((0, 3), (0, 0)), constant_values=7.0),
        "head": jnp.pad(params["head"], ((0, 0), (0, 3)), constant_values=7.0),
    }
    models.save(tmp_path / "padded", model, padded)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "padded"))
    assert two["lm_head.weight"].shape == two["model.embed_tokens.weight"].shape == (29, 16)
    assert {n: t.tobytes() for n, t in one.items()} == {n: t.tobytes() for n, t in two.items()}
    with pytest.raises(ValueError, match=r"parameter norm has shape \(17,\), its config asks for \(16,\)"):
        models.save(tmp_path / "wrong", model, params | {"norm": jnp.ones(17)})
    assert not (tmp_path / "wrong").exists()


def test_ids_of_special_tokens_and_other_keys_survive_an_export(saved, tmp_path):
    folder, *_ = saved
    edit(folder, eos_token_id=[1, 2], bos_token_id=0, initializer_range=0.02, transformers_version="4.40.0")
    models.save(tmp_path / "out", *models.load(folder))
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"], written["initializer_range"]) == ([1, 2], 0, 0.02)
    assert "transformers_version" not in written


def test_an_unknown_name_lists_what_is_shipped_and_how_to_get_others(tmp_path, monkeypatch):
    (tmp_path / "shipped-one").mkdir()
    monkeypatch.setattr(hf, "ASSETS", tmp_path)
    assert hf.resolve("shipped-one") == tmp_path / "shipped-one"
    assert hf.public_name("shipped-one") == str(tmp_path / "shipped-one")
    assert hf.public_name("org/model") == "org/model"  # not fetched for its name
    for error in (OSError("no network"), huggingface_hub.errors.HFValidationError("no name")):

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(FileNotFoundError, match="'org/name'.*shipped-one.*download org/name --local-dir DIR"):
            models.load("org/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # not asked for what is no name of the hub
    for path in ("name", "/nowhere/model", "./org/name", "a/b/c", "../b"):
        with pytest.raises(FileNotFoundError, match="is no directory and is no shipped checkpoint"):
            models.load(path)


def test_a_name_of_the_hub_is_fetched_without_pickles_or_code(saved, monkeypatch):
    folder, _, params = saved
    repository = [
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "generation_config.json",
        "chat_template.jinja", "merges.txt", "pytorch_model.bin", "modeling_x.py", "original/params.json",
        "original/consolidated.00.pth", "onnx/model.safetensors", "model.gguf",
    ]  # fmt: skip

    def download(name, *, allow_patterns, ignore_patterns):
        kept = huggingface_hub.utils.filter_repo_objects(
            repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert (name, list(kept)) == ("Qwen/Qwen2.5-0.5B", repository[:7])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(models.load("Qwen/Qwen2.5-0.5B")[1], params)


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("where", ["weights", "config", "rename"])
def test_a_save_that_fails_half_way_leaves_nothing_and_loses_nothing(where, saved, monkeypatch):
    folder, model, params = saved

    def fail(*args, **kwargs):
        if where == "weights":
            (args[0] / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    real = hf.os.replace

    def fail_last_rename(source, target):
        if pathlib.Path(target) in (folder, folder.parent / "new") and "-old-" not in pathlib.Path(source).name:
            raise OSError("no space left")
        real(source, target)

    if where == "rename":
        monkeypatch.setattr(hf.os, "replace", fail_last_rename)
    else:
        module, name = {"weights": (weights, "write"), "config": (hf, "write_config")}[where]
        monkeypatch.setattr(module, name, fail)
    changed = jax.tree.map(lambda p: p + 1, params)
    for target in (folder.parent / "new", folder):
        with pytest.raises(OSError, match="no space left"):
            models.save(target, model, changed)
    monkeypatch.undo()
    same(models.load(folder)[1], params)
    assert [name for name in leftovers(folder.parent) if "-old-" not in name] == ["model"]


def test_saving_over_a_directory_keeps_its_other_files(saved):
    folder, model, params = saved
    (folder / "tokenizer.json").write_text("{}")
    (folder / "extra").mkdir()
    (folder / "extra/notes.txt").write_text("kept")
    changed = jax.tree.map(lambda p: p + 1, params)
    models.save(folder, model, changed)
    same(models.load(folder)[1], changed)
    assert (folder / "tokenizer.json").read_text() == "{}" and (folder / "extra/notes.txt").read_text() == "kept"
    assert leftovers(folder.parent) == ["model"]


def test_save_through_a_link_writes_where_it_leads(make_config, tmp_path):
    model = Model(make_config())
    params = jax.jit(model.init)(jax.random.key(0))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    for _ in range(2):
        hf.save(tmp_path / "link", model, params)
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["config.json", "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "link")[1], params)
