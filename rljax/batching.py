"""Kept rollouts → TrainBatch at a declared static shape, on the mesh."""

from __future__ import annotations

import numpy as np

from rljax import sharding
from rljax.types import Prompts, Rollouts, TrainBatch


def bucket(size: int, limit: int, least: int = 32) -> int:
    """The smallest declared width ≥ size: least, 2 least, 4 least, … and limit itself.

    Raises ValueError if size is above the limit.
    """
    if size > limit:
        raise ValueError(f"{size} tokens do not fit the limit of {limit}")
    width = min(least, limit)
    while width < size:
        width = min(2 * width, limit)
    return width


def dense(rollouts: Rollouts, values: np.ndarray, num_prompts: int, samples: int, fill) -> np.ndarray:
    """values[R] of ragged groups → [P, n], `fill` where a prompt has no such sample."""
    out = np.full((num_prompts, samples), fill, np.asarray(values).dtype)
    out[rollouts.group, rollouts.sample] = values
    return out


def pack(
    prompts: Prompts,
    rollouts: Rollouts,
    advantages: np.ndarray,
    indices: np.ndarray,
    kept: np.ndarray,
    *,
    num_prompts: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    mesh,
) -> TrainBatch:
    """Gathers the kept rows, every array by the same indices, and puts them on the mesh, split by prompt.

    advantages float32[P, K], indices int32[P, K] (sample of the prompt), kept bool[P, K]: down_sampling's.
    num_prompts: the declared P; fewer prompts (a budget's last step) are filled with padding of length 0.
    """
    P, K = indices.shape
    samples = int(max(rollouts.sample.max(), indices.max())) + 1
    row_of = dense(rollouts, np.arange(len(rollouts)), P, samples, -1)
    rows = np.where(kept, np.take_along_axis(row_of, indices, axis=1), -1)
    T = bucket(int(rollouts.lengths.max()), max_new_tokens)
    S = bucket(max(len(t) for t in prompts.tokens), max_prompt_tokens)
    there = (rows >= 0)[:, :, None]
    tokens, logprobs = (
        np.where(there, _width(a, T)[rows], 0) for a in (rollouts.tokens, rollouts.logprobs)
    )
    prompt_tokens = np.zeros((P, S), np.int32)
    for i, ids in enumerate(prompts.tokens):
        prompt_tokens[i, : len(ids)] = ids
    batch = TrainBatch(
        prompt_tokens=prompt_tokens,
        prompt_lengths=np.array([len(t) for t in prompts.tokens], np.int32),
        tokens=tokens,
        lengths=np.where(rows >= 0, rollouts.lengths[rows], 0),
        sampler_logprobs=logprobs,
        advantages=np.where(rows >= 0, np.asarray(advantages, np.float32), 0),
        draws=prompts.draws.astype(np.uint32),
        samples=np.where(rows >= 0, indices, 0).astype(np.int32),
    )
    pad = num_prompts - P
    padded = TrainBatch(**{
        name: np.pad(value, [(0, pad)] + [(0, 0)] * (value.ndim - 1)) for name, value in vars(batch).items()
    })  # fmt: skip
    return sharding.put_by_prompt(mesh, padded)


def _width(rows: np.ndarray, width: int) -> np.ndarray:
    """[R, T] cut or zero-padded to [R, width]; nothing past the longest length is cut."""
    return np.pad(rows[:, :width], ((0, 0), (0, max(0, width - rows.shape[1]))))
