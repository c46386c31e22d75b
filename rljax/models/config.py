"""The shape of a decoder, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings. kind: "linear", or "llama3" (2407.21783, section 3.4.2)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One pre-norm decoder with rotary embeddings and a gated MLP: Llama 3, SmolLM2, Qwen2/2.5, Qwen3."""

    model_type: str  # llama | qwen2 | qwen3: what config.json says and which tensors exist
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of features")

    def inverse_frequencies(self) -> np.ndarray:
        """float32[head_dim / 2]: radians a position for each pair of features."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim
        freqs = (1.0 / np.float32(self.rope_theta) ** exponents).astype(np.float32)
        s = self.rope_scaling
        if s is None:
            return freqs
        if s.kind == "linear":
            return freqs / np.float32(s.factor)
        if s.kind == "llama3":
            # Long wavelengths are stretched by `factor`, short ones kept, those between blended.
            rotations = s.original_max_positions * freqs / (2 * np.pi)
            blend = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            blend = np.clip(blend, 0.0, 1.0)
            return ((1 - blend) * freqs / s.factor + blend * freqs).astype(np.float32)
        raise ValueError(f"rope scaling {s.kind!r} is not known; known: linear, llama3")
