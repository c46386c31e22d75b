"""Published models: each config.json gives the parameter count that its authors state, and survives an export."""

import json
import math

import jax
import pytest

from rljax.models import hf_config, published
from rljax.models.transformer import Model

COUNTS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


@pytest.mark.parametrize("name", published.CONFIGS)
def test_parameter_counts(name):
    plain = name.removesuffix("-2507").removesuffix("-Base").removesuffix("-Instruct")
    count = COUNTS[name] if name in COUNTS else COUNTS[plain]
    shapes = jax.tree.leaves(Model(published.config(name)).abstract_params())
    assert sum(math.prod(leaf.shape) for leaf in shapes) == count


@pytest.mark.parametrize("name", published.CONFIGS)
def test_an_export_says_the_same(name):
    config = published.config(name)
    again = json.loads(json.dumps(hf_config.write_config(config, "bfloat16")))
    assert hf_config.from_dict(again, "again") == config
    source = published.CONFIGS[name]
    kept = ("bos_token_id", "eos_token_id", "torch_dtype", "rope_theta", "tie_word_embeddings", "vocab_size")
    assert {key: again[key] for key in kept} == {key: source[key] for key in kept}


def test_details():
    llama, math7b = published.config("meta-llama/Llama-3.2-3B-Instruct"), published.config("Qwen/Qwen2.5-Math-7B")
    assert llama.rope_scaling is not None and (llama.rope_scaling.kind, llama.rope_scaling.factor) == ("llama3", 32.0)
    assert (math7b.rope_theta, math7b.max_positions, math7b.sliding_window) == (1e4, 4096, None)
    assert published.config("Qwen/Qwen3-4B").qk_norm and not published.config("Qwen/Qwen3-4B").qkv_bias
    with pytest.raises(ValueError, match="'nobody/none' is not known; known: Qwen/Qwen2.5-0.5B"):
        published.config("nobody/none")
