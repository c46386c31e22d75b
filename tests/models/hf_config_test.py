"""config.json: every scaling and window in both spellings, keys kept for an export, errors by file and key."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.models import hf_config
from rljax.models.config import RopeScaling

LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def read(tmp_path, content):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return hf_config.read_config(tmp_path)


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn"} | YARN},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn"} | YARN},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5} | YARN},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn"} | YARN, "rope_parameters": {"rope_type": "default"}},
])  # fmt: skip
def test_yarn_in_every_spelling(spelling, tmp_path):
    config = read(tmp_path, LLAMA | spelling)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_positions=32)


@pytest.mark.parametrize(
    "keys, fields",
    [
        ({"factor": 4.0}, {"original_max_positions": 128}),  # max_position_embeddings
        ({"original_max_position_embeddings": 32, "factor": None}, {"original_max_positions": 32}),  # 128 / 32
        (YARN | {"beta_fast": 16, "beta_slow": None}, {"original_max_positions": 32, "beta_fast": 16.0}),
        (YARN | {"truncate": False}, {"original_max_positions": 32, "truncate": False}),
        (YARN | {"attention_factor": 1.2}, {"original_max_positions": 32, "attention_factor": 1.2}),
        (YARN | {"mscale": 0, "mscale_all_dim": 0.5}, {"original_max_positions": 32, "mscale_all_dim": 0.5}),
    ],
)
def test_what_yarn_may_leave_out(keys, fields, tmp_path):
    config = read(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "yarn"} | keys})
    assert config.rope_scaling == RopeScaling(kind="yarn", factor=4.0, **fields)


@pytest.mark.parametrize("scaling", [
    RopeScaling(kind="yarn", factor=4.0, original_max_positions=32, beta_fast=20.0, truncate=False, mscale=0.7,
                mscale_all_dim=0.9),
    RopeScaling(kind="yarn", factor=2.5, original_max_positions=64, attention_factor=1.5),
    RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0, original_max_positions=64),
    RopeScaling(kind="linear", factor=3.0),
])  # fmt: skip
def test_both_spellings_that_are_written_are_read(scaling, make_config, tmp_path):
    config = make_config(rope_scaling=scaling, rope_theta=3e4)
    written = hf_config.write_config(config, "float32")
    for spelling in ("rope_scaling", "rope_parameters"):
        assert read(tmp_path, written | {spelling: None}) == config


@pytest.mark.parametrize(
    "fields, layers, written",
    [
        ({"max_window_layers": 1}, (False, True, True), 1),
        ({"max_window_layers": 0}, None, 0),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (True, False, False), 0),
    ],
)
def test_a_window_in_some_layers(fields, layers, written, tmp_path):
    config = read(tmp_path, QWEN | fields)
    assert (config.sliding_window, config.sliding_layers) == (8, layers)
    out = hf_config.write_config(config, "float32")
    assert out["max_window_layers"] == written
    assert read(tmp_path, out) == config
    if "layer_types" not in fields:  # what older releases write and read
        assert read(tmp_path, {key: value for key, value in out.items() if key != "layer_types"}) == config


def test_other_keys_come_back_with_an_export(tmp_path):
    others = {"eos_token_id": [1, 2], "bos_token_id": None, "initializer_range": 0.02, "título": "ñ"}
    gone = {"transformers_version": "4.40.0", "_name_or_path": "x", "auto_map": {"AutoModel": "evil.Model"}}
    config = read(tmp_path, LLAMA | others | gone | {"torch_dtype": "float16"})
    written = hf_config.write_config(config, "bfloat16")
    assert {key: written[key] for key in others} == others
    assert not set(written) & set(gone) and written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert config == read(tmp_path, LLAMA)  # they are no part of the decoder


def test_defaults_are_transformers(tmp_path):
    config = read(tmp_path, {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"})
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 4, 2048)
    assert (config.norm_eps, config.rope_theta, config.tie_embeddings) == (1e-6, 1e4, False)
    assert read(tmp_path, LLAMA | {"model_type": "qwen3"}).head_dim == 128


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "content, told",
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe\x00".decode("latin1"), "is not valid JSON"),
        ("[1]", "holds a JSON list, not an object"),
        (LLAMA | {"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
        (LLAMA | {"hidden_size": "16"}, "hidden_size='16' is not a whole number from 1"),
        (LLAMA | {"hidden_size": 16.0}, "hidden_size=16.0 is not a whole number"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads=0 is not a whole number from 1"),
        (LLAMA | {"vocab_size": -32}, "vocab_size=-32 is not a whole number"),
        (LLAMA | {"vocab_size": 10**30}, "vocab_size=10+ is not a whole number from 1 to 2147483647"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers=True is not a whole number"),
        (LLAMA | {"num_key_value_heads": 3}, "=4 is not a multiple of num_key_value_heads=3"),
        (LLAMA | {"head_dim": 5}, "head_dim=5 is odd"),
        (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps='small' is not a positive number"),
        (LLAMA | {"rope_theta": -1}, "rope_theta=-1 is not a positive number"),
        (LLAMA | {"rope_theta": float("nan")}, "rope_theta=nan is not a positive number"),
        (LLAMA | {"rope_theta": 10**400}, "rope_theta=10+ is not a positive number"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        (LLAMA | {"rope_scaling": 4.0}, "rope_scaling is 4.0, not an object"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling lacks factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling: factor='2' is not a"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; known: default, linear"),
        (LLAMA | {"rope_scaling": {"rope_type": 3}}, "rope_type=3 is not supported"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention=.* one scaling"),
        (LLAMA | {"rope_parameters": ROPE | {"low_freq_factor": 4}}, "config.json: high_freq_factor=4.0 is not above"),
        (LLAMA | {"rope_parameters": {k: v for k, v in ROPE.items() if k != "factor"}}, "rope_parameters lacks factor"),
        (
            LLAMA | {"rope_parameters": ROPE | {"original_max_position_embeddings": 0}},
            "rope_parameters: original_max_position_embeddings=0 is not a whole number from 1",
        ),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (LLAMA | {"attention_bias": True}, "attention_bias=True is not supported; known: false"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True is not supported; known: false"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported; known: null"),
        ({"rollout": {}, "budget": {}}, "is that of a run; the run's trained model is the folder .*/model"),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types=.* a list of 3 names"),
        (QWEN | {"layer_types": ["full_attention", "chunked", []]}, "known: full_attention, sliding_attention"),
        (QWEN | {"sliding_window": 0, "max_window_layers": 0}, "sliding_window=0 is not a whole number"),
        (QWEN | {"max_window_layers": "all"}, "max_window_layers='all' is not a whole number from 0"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_told_by_file_and_key(content, told, tmp_path):
    with pytest.raises(ValueError, match=told) as e:
        read(tmp_path, content)
    assert str(tmp_path / "config.json") in str(e.value).splitlines()[0]


# What a wrong program might write under any key; some of it is right, and some of it is enormous.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=4,
)
KEYS = sorted(LLAMA | ROPE | {k: 0 for k in hf_config.write_config(hf_config.from_dict(QWEN, ""), "")})


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3), family=st.sampled_from([0, 1]))
def test_any_value_under_any_key_is_read_or_told(changes, family):
    try:
        hf_config.from_dict((LLAMA, QWEN)[family] | changes, "FILE")
    except ValueError as e:
        assert str(e).startswith("FILE")
