"""The values that travel between stages: frozen, and nothing but arrays and plain data.

Axis letters used in every docstring and comment of rljax:
    P prompts of a step      G samples of one prompt     R all rollouts of a step (groups may be ragged)
    K rollouts kept a prompt S prompt tokens (padded)    T completion tokens (padded)
    V vocabulary             L layers                    B rows of a plain [B, S] batch
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

Array = jax.Array | np.ndarray


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass that jax treats as a pytree of all its fields."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [f.name for f in dataclasses.fields(made)]
    return jax.tree_util.register_dataclass(made, data_fields=names, meta_fields=[])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """P prompts drawn from the stream; host data.

    ids: int64[P], the prompt's index in its data set.
    draws: int64[P], the running number of each prompt in the stream. Random keys come from it, so that
        the same question drawn twice gets fresh samples.
    tokens: P lists of token ids, unpadded.
    examples: P task examples (dicts) that the grader sees.
    """

    ids: np.ndarray
    draws: np.ndarray
    tokens: tuple[list[int], ...]
    examples: tuple[dict, ...]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """R completions of P prompts, sorted by (group, sample); host arrays. Rows may be ragged a group.

    tokens: int32[R, T], completion ids as sampled, 0 past `lengths`; a stop id is part of the completion.
    logprobs: float32[R, T], log-probability of each sampled token under the distribution sampled from.
    lengths: int32[R]. Masks come from it, never from a pad id.
    group: int32[R], which of the P prompts. sample: int32[R], which sample of that prompt.
    truncated: bool[R], ended by the token limit and not by a stop id.
    top_ids, top_logprobs: int32/float32[R, T, k] of the most likely tokens, k = 0 where not asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    group: np.ndarray
    sample: np.ndarray
    truncated: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)


@pytree
class TrainBatch:
    """Kept rollouts at a declared static shape; what the learner sees.

    prompt_tokens: int32[P, S], right-padded. prompt_lengths: int32[P]; 0 marks a padding prompt.
    tokens: int32[P, K, T], right-padded completions. lengths: int32[P, K]; 0 marks a padding row.
    sampler_logprobs: float32[P, K, T], recorded by the sampler.
    advantages: float32[P, K].
    draws: uint32[P], samples: int32[P, K]: the coordinates of each row's random keys.
    top_ids, top_logprobs: int32/float32[P, K, T, k] of the sampler's most likely tokens, k = 0 where not recorded.
    silent_lengths: int32[P, 2K], of rows that were left out since their advantages are 0. They add nothing to the
        gradient, but count in what it is divided by. None: no row was.
    """

    prompt_tokens: Array
    prompt_lengths: Array
    tokens: Array
    lengths: Array
    sampler_logprobs: Array
    advantages: Array
    draws: Array
    samples: Array
    top_ids: Array
    top_logprobs: Array
    silent_lengths: Array | None = None


@pytree
class LearnerState:
    """Trained parameters, optimizer state and the int32 count of updates made.

    params: what the optimizer moves: the whole model, or its adapters beside `frozen`.
    frozen: the rest of the model's parameters, which no step changes and no checkpoint holds; None without adapters.
    actor: the LearnerState of the model that makes the rollouts, where it is another one than the policy.
    """

    params: Any
    opt_state: Any
    updates: Array
    frozen: Any = None
    actor: LearnerState | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that resuming a run needs, bit for bit.

    learner: device arrays. budget: the allocator's state (a pytree of arrays; () for uniform allocation).
    draws: prompts taken from the stream so far. step: training steps done.
    totals: running sums that summary.json reports (plain JSON data).
    behaviour: parameters, on the rollouts' mesh, that make the next step's rollouts, where these are older than the
        learner's (rollout.staleness); else None.
    """

    learner: LearnerState
    budget: Any
    draws: int
    step: int
    totals: dict
    behaviour: Any = None
