"""Hugging Face directories: bit-for-bit round trips, both spellings of config.json, named errors."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax import models, sharding
from rljax.models import hf
from rljax.models.config import RopeScaling
from rljax.models.transformer import Model

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = RopeScaling(kind="linear", factor=2.0)
FAMILIES = {
    "llama tied": {},
    "llama untied": {"tie_embeddings": False, "rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 16, "rope_scaling": LINEAR},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "tie_embeddings": False},
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
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.q_proj.weight"], params["layers"]["q"][1].T
    )
    np.testing.assert_array_equal(
        stored["model.layers.2.mlp.down_proj.weight"], params["layers"]["down"][2].T
    )
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


def test_shards_with_an_index(saved):
    folder, _, params = saved
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(stored), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: stored[n] for n in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model, loaded = models.load(folder)
    same(loaded, params)
    # Saving here replaces the shards: they would be read before the new weights.
    changed = jax.tree.map(lambda p: p + 1, loaded)
    models.save(folder, model, changed)
    same(models.load(folder)[1], changed)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002.safetensors is missing"):
        models.load(folder)


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


def test_a_window_in_some_layers_is_an_error(saved):
    folder, *_ = saved
    edit(folder, model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(ValueError, match="config.json: sliding_window is on in 2 of 3 layers"):
        models.load(folder)


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
            {"rope_scaling": {"rope_type": "yarn"}},
            "config.json: rope_type='yarn' is not supported; known: .*llama3",
        ),
        ({"intermediate_size": 99}, r"mlp\.\w+_proj.weight has shape .*24.* config.json asks for .*99"),
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


def test_an_unknown_name_lists_what_is_shipped_and_how_to_get_others(tmp_path, monkeypatch):
    (tmp_path / "shipped-one").mkdir()
    monkeypatch.setattr(hf, "ASSETS", tmp_path)
    assert hf.resolve("shipped-one") == tmp_path / "shipped-one"
    with pytest.raises(FileNotFoundError, match="'org/name'.*shipped-one.*download org/name --local-dir DIR"):
        models.load("org/name")


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("where", ["weights", "config", "rename"])
def test_a_save_that_fails_half_way_leaves_nothing_and_loses_nothing(where, saved, monkeypatch):
    folder, model, params = saved

    def fail(*args, **kwargs):
        if where == "weights":
            pathlib.Path(args[1]).write_bytes(b"half")
        raise OSError("no space left")

    real = hf.os.replace

    def fail_last_rename(source, target):
        if (
            pathlib.Path(target) in (folder, folder.parent / "new")
            and "-old-" not in pathlib.Path(source).name
        ):
            raise OSError("no space left")
        real(source, target)

    if where == "rename":
        monkeypatch.setattr(hf.os, "replace", fail_last_rename)
    else:
        monkeypatch.setattr(hf, {"weights": "save_file", "config": "write_config"}[where], fail)
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
    assert (folder / "tokenizer.json").read_text() == "{}" and (
        folder / "extra/notes.txt"
    ).read_text() == "kept"
    assert leftovers(folder.parent) == ["model"]
