"""The shape of a decoder; models/hf_config.py reads it from and writes it to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

MAX_SIZE = 2**31 - 1  # indices are int32
ROPE_KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings, by how often a pair turns over the original context.

    kind: "linear" slows every pair by `factor`. "llama3" (2407.21783, section 3.4.2) keeps pairs of more than
    high_freq_factor turns and slows those of fewer than low_freq_factor. "yarn" (2309.00071, section 3) keeps
    those of more than beta_fast, slows those of fewer than beta_slow, and makes queries and keys longer by
    `magnitude`. truncate: yarn's two limits are rounded outwards to whole pairs.
    attention_factor, mscale, mscale_all_dim: yarn's magnitude, where it is not the paper's.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope scaling {self.kind!r} is not known; known: {', '.join(ROPE_KINDS)}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}"
            )
        if self.kind == "yarn" and not self.beta_fast > self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} is not above beta_slow={self.beta_slow}")

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by: 0.1 ln(factor) + 1 for yarn unless it says otherwise, else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def scaled(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale is not None and self.mscale_all_dim is not None:
            return scaled(self.mscale) / scaled(self.mscale_all_dim)
        return scaled(1.0)


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
    sliding_layers: tuple[bool, ...] | None = None  # the layers that have the window; None: all
    # What else config.json says (ids of special tokens, …), as JSON: an export gives it back. No part of the decoder.
    other_keys: str = dataclasses.field(default="{}", compare=False, repr=False)

    def __post_init__(self):
        sizes = {
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_positions,
        }  # fmt: skip
        wrong = [f"{key}={size}" for key, size in sizes.items() if not 1 <= size <= MAX_SIZE]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: a size is a whole number from 1 to {MAX_SIZE}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of features")
        if self.sliding_layers is not None and len(self.sliding_layers) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.sliding_layers)} of {self.num_layers} layers")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} is not above 1, which yarn needs")

    def inverse_frequencies(self) -> np.ndarray:
        """float32[head_dim / 2]: radians a position for each pair of features."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim
        freqs = (1.0 / np.float32(self.rope_theta) ** exponents).astype(np.float32)
        s = self.rope_scaling
        if s is None:
            return freqs
        if s.kind == "linear":
            return freqs / np.float32(s.factor)
        if s.kind == "yarn":
            slowed = self._slowed_by_yarn(s)
            return (freqs / s.factor * slowed + freqs * (1 - slowed)).astype(np.float32)
        # llama3: long wavelengths are stretched by `factor`, short ones kept, those between blended.
        rotations = s.original_max_positions * freqs / (2 * np.pi)
        blend = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return ((1 - blend) * freqs / s.factor + blend * freqs).astype(np.float32)

    def _slowed_by_yarn(self, s: RopeScaling) -> np.ndarray:
        """float32[head_dim / 2]: 0 for a pair that is kept, 1 for one that is slowed, a ramp between."""

        def pair(rotations: float) -> float:  # the (fractional) pair that turns so often over the original context
            return self.head_dim * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / log_theta

        log_theta = 2 * math.log(self.rope_theta)
        low, high = pair(s.beta_fast), pair(s.beta_slow)
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        width = high - low if high != low else 0.001
        pairs = np.arange(self.head_dim // 2, dtype=np.float32)
        return np.clip((pairs - low) / np.float32(width), 0.0, 1.0)

    def windows(self) -> int | np.ndarray | None:
        """Keys that a query sees, itself among them: of every layer, int32[L] by layer, or None for all keys."""
        if self.sliding_window is None or self.sliding_layers is None:
            return self.sliding_window
        return np.where(self.sliding_layers, self.sliding_window, MAX_SIZE).astype(np.int32)
