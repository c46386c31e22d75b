"""Kept rollouts → TrainBatch at a declared static shape, on the mesh."""

from __future__ import annotations

import dataclasses

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


def buckets(limit: int, least: int = 32) -> list[int]:
    """The declared widths, ascending: what `bucket` returns of sizes up to the limit."""
    widths = [bucket(1, limit, least)]
    while widths[-1] < limit:
        widths.append(bucket(widths[-1] + 1, limit, least))
    return widths


def dense(rollouts: Rollouts, values: np.ndarray, num_prompts: int, samples: int, fill) -> np.ndarray:
    """values[R] of ragged groups → [P, n], `fill` where a prompt has no such sample."""
    out = np.full((num_prompts, samples), fill, np.asarray(values).dtype)
    out[rollouts.group, rollouts.sample] = values
    return out


def concatenate(rounds: list[tuple[Prompts, Rollouts, np.ndarray]]) -> tuple[Prompts, Rollouts, np.ndarray]:
    """Prompts, rollouts and rewards of several rounds as those of one; the groups are numbered on."""
    prompts, rollouts, rewards = zip(*rounds, strict=True)
    starts = np.cumsum([0, *map(len, prompts)])
    moved = [dataclasses.replace(r, group=r.group + s) for r, s in zip(rollouts, starts, strict=False)]
    joined = Prompts(
        ids=np.concatenate([p.ids for p in prompts]),
        draws=np.concatenate([p.draws for p in prompts]),
        tokens=sum((p.tokens for p in prompts), ()),
        examples=sum((p.examples for p in prompts), ()),
    )
    fields = [f.name for f in dataclasses.fields(Rollouts)]
    rows = Rollouts(**{name: np.concatenate([getattr(r, name) for r in moved]) for name in fields})
    return joined, rows, np.concatenate(rewards)


def take(
    prompts: Prompts, rollouts: Rollouts, rewards: np.ndarray, groups: np.ndarray
) -> tuple[Prompts, Rollouts, np.ndarray]:
    """The prompts at `groups` (ascending), their rollouts and the rewards of these."""
    number = np.full(len(prompts), -1, rollouts.group.dtype)
    number[groups] = np.arange(len(groups))
    rows = number[rollouts.group] >= 0
    kept = {f.name: getattr(rollouts, f.name)[rows] for f in dataclasses.fields(Rollouts)}
    chosen = Prompts(
        ids=prompts.ids[groups],
        draws=prompts.draws[groups],
        tokens=tuple(prompts.tokens[i] for i in groups),
        examples=tuple(prompts.examples[i] for i in groups),
    )
    return chosen, Rollouts(**kept | {"group": number[kept["group"]]}), rewards[rows]


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
    halve: bool = False,
) -> TrainBatch:
    """Gathers the kept rows, every array by the same indices, and puts them on the mesh, split by prompt.

    advantages float32[P, K], indices int32[P, K] (sample of the prompt), kept bool[P, K]: down_sampling's.
    num_prompts: the declared P; fewer prompts (a budget's last step) are filled with padding of length 0.
    halve: where at most half as many prompts have an advantage other than 0, the batch is of these alone, of P / 2.
    """
    P, K = indices.shape
    samples = int(max(rollouts.sample.max(), indices.max())) + 1
    row_of = dense(rollouts, np.arange(len(rollouts)), P, samples, -1)
    rows = np.where(kept, np.take_along_axis(row_of, indices, axis=1), -1)
    T = bucket(int(rollouts.lengths.max()), max_new_tokens)
    S = bucket(max(len(t) for t in prompts.tokens), max_prompt_tokens)
    there = rows >= 0
    tokens, logprobs, top_ids, top_logprobs = (
        np.where(there.reshape(*there.shape, *[1] * (a.ndim - 1)), _width(a, T)[rows], 0)
        for a in (rollouts.tokens, rollouts.logprobs, rollouts.top_ids, rollouts.top_logprobs)
    )
    prompt_tokens = np.zeros((P, S), np.int32)
    for i, ids in enumerate(prompts.tokens):
        prompt_tokens[i, : len(ids)] = ids
    arrays = dict(
        prompt_tokens=prompt_tokens,
        prompt_lengths=np.array([len(t) for t in prompts.tokens], np.int32),
        tokens=tokens,
        lengths=np.where(rows >= 0, rollouts.lengths[rows], 0),
        sampler_logprobs=logprobs,
        advantages=np.where(rows >= 0, np.asarray(advantages, np.float32), 0),
        draws=prompts.draws.astype(np.uint32),
        samples=np.where(rows >= 0, indices, 0).astype(np.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    taught, silent = np.flatnonzero(arrays["advantages"].any(axis=1)), None
    if halve and len(taught) <= num_prompts // 2:
        num_prompts //= 2
        if not len(taught):  # one that has rows, if any has: the whole batch makes an update then, and so must this
            taught = np.argmax(arrays["lengths"].any(axis=1), keepdims=True)
        left = np.delete(arrays["lengths"], taught, axis=0).ravel()
        silent = np.pad(left, (0, 2 * num_prompts * K - len(left))).reshape(num_prompts, -1)
        arrays = {name: value[taught] for name, value in arrays.items()}
    pad = num_prompts - len(arrays["lengths"])
    padded = {name: np.pad(value, [(0, pad)] + [(0, 0)] * (value.ndim - 1)) for name, value in arrays.items()}
    return sharding.put_by_prompt(mesh, TrainBatch(**padded, silent_lengths=silent))


def _width(rows: np.ndarray, width: int) -> np.ndarray:
    """[R, T, …] cut or zero-padded to [R, width, …]; nothing past the longest length is cut."""
    return np.pad(rows[:, :width], ((0, 0), (0, max(0, width - rows.shape[1]))) + ((0, 0),) * (rows.ndim - 2))
