"""Prompts and counts → rollouts: the engine, run with a config's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from rljax import sampling, sharding
from rljax.models import Model
from rljax.options import RolloutOptions
from rljax.types import Prompts, Rollouts


def generate(
    model: Model,
    params,
    prompts: Prompts,
    counts: np.ndarray,
    *,
    key: jax.Array,
    options: RolloutOptions,
    stop_ids: Sequence[int],
    temperature: float | Sequence[float] | None = None,
    lanes: int | None = None,
    slots: int | None = None,
    top_logprobs: int = 0,
    on_finished: Callable[[Rollouts, np.ndarray], None] | None = None,
) -> Rollouts:
    """counts[P] completions of each prompt, by the options' limits, temperature and lanes × slots.

    Lanes and slots that a step of options.prompts × options.samples could never fill are left out.
    temperature, lanes, slots: instead of the options' (evaluation has others). on_finished: sampling.generate.
    """
    most = options.decoding(sharding.size(sharding.mesh_of(params), "prompts"))
    return sampling.generate(
        model,
        params,
        prompts.tokens,
        num_samples=counts,
        max_new_tokens=options.max_new_tokens,
        key=key,
        temperature=options.temperature if temperature is None else temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_ids=stop_ids,
        draws=prompts.draws,
        lanes=most[0] if lanes is None else lanes,
        slots=most[1] if slots is None else slots,
        segment=options.segment,
        columns=options.columns,
        prompt_capacity=options.max_prompt_tokens,
        top_logprobs=top_logprobs,
        on_finished=on_finished,
    )
