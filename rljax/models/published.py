"""config.json of published models that the papers train, so that their shapes are known without a network."""

from __future__ import annotations

from typing import Any

from rljax.models import hf_config
from rljax.models.config import ModelConfig

# Each as its repository has it, but for keys that say nothing of the decoder or its special tokens.
_QWEN25: dict[str, Any] = {
    "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "vocab_size": 151_936,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True, "use_sliding_window": False,
    "sliding_window": 32_768, "max_window_layers": 28, "bos_token_id": 151_643, "eos_token_id": 151_643,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN25_05B = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2,
}  # fmt: skip
_QWEN25_15B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2,
}  # fmt: skip
_QWEN25_3B = {
    "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
_QWEN25_7B = {
    "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
}  # fmt: skip
_MATH = {"rope_theta": 10_000.0, "max_position_embeddings": 4096, "sliding_window": 4096}
_DISTILL = _MATH | {
    "max_position_embeddings": 131_072, "tie_word_embeddings": False, "bos_token_id": 151_646,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_scaling": None,
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960,
    "attention_bias": False, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
    "bos_token_id": 151_643, "eos_token_id": 151_645, "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN3_17B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
_QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
_QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
_BASE = {"max_position_embeddings": 32_768, "eos_token_id": 151_643}
_LLAMA32: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009], "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA32_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
_LLAMA32_3B = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100_000, "vocab_size": 49_152,
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "rope_scaling": None, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
_INSTRUCT = {"eos_token_id": 151_645}

# The model's name on the hub → its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25 | _QWEN25_05B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25 | _QWEN25_05B | _INSTRUCT,
    "Qwen/Qwen2.5-1.5B": _QWEN25 | _QWEN25_15B | {"max_position_embeddings": 131_072},
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25 | _QWEN25_15B | _INSTRUCT,
    "Qwen/Qwen2.5-3B": _QWEN25 | _QWEN25_3B,
    "Qwen/Qwen2.5-3B-Instruct": _QWEN25 | _QWEN25_3B | _INSTRUCT,
    "Qwen/Qwen2.5-7B": _QWEN25 | _QWEN25_7B | {"max_position_embeddings": 131_072},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25 | _QWEN25_7B | _INSTRUCT,
    "Qwen/Qwen2.5-Math-1.5B": _QWEN25 | _QWEN25_15B | _MATH,
    "Qwen/Qwen2.5-Math-7B": _QWEN25 | _QWEN25_7B | _MATH,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN25 | _QWEN25_15B | _DISTILL,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN25 | _QWEN25_7B | _DISTILL,
    "Qwen/Qwen3-1.7B": _QWEN3 | _QWEN3_17B,
    "Qwen/Qwen3-1.7B-Base": _QWEN3 | _QWEN3_17B | _BASE,
    "Qwen/Qwen3-4B": _QWEN3 | _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3 | _QWEN3_4B | _BASE,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3 | _QWEN3_4B | {"rope_theta": 5_000_000, "max_position_embeddings": 262_144},
    "Qwen/Qwen3-8B": _QWEN3 | _QWEN3_8B,
    "Qwen/Qwen3-8B-Base": _QWEN3 | _QWEN3_8B | _BASE,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA32 | _LLAMA32_1B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA32 | _LLAMA32_3B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
}


def config(name: str) -> ModelConfig:
    """The shape of a model by its name on the hub. Raises ValueError, which lists the known names."""
    if name not in CONFIGS:
        raise ValueError(f"the shape of {name!r} is not known; known: {', '.join(CONFIGS)}")
    return hf_config.from_dict(CONFIGS[name], name)
