"""Decoders in the Hugging Face format: load, save, logits."""

from rljax.models.hf import load, save
from rljax.models.transformer import KV, Model, Prefix, logits

__all__ = ["KV", "Model", "Prefix", "load", "logits", "save"]
