"""The stream of training prompts: seeded, endless, and resumable from one integer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rljax.tokenizer import Tokenizer
from rljax.types import Prompts


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
    """Tokenised prompts of a data set.

    examples, tokens: M each. dropped: prompts left out because they were longer than the limit.
    """

    examples: tuple[dict, ...]
    tokens: tuple[list[int], ...]
    dropped: int

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, ids: np.ndarray, draws: np.ndarray) -> Prompts:
        """Prompts of the data set's `ids` int[P], drawn as `draws` int[P]."""
        return Prompts(
            ids=np.asarray(ids, np.int64),
            draws=np.asarray(draws, np.int64),
            tokens=tuple(self.tokens[i] for i in ids),
            examples=tuple(self.examples[i] for i in ids),
        )

    def all(self) -> Prompts:
        return self.take(np.arange(len(self)), np.arange(len(self)))


def conversation(prompt: str, system: str) -> list[dict[str, str]]:
    """The chat messages that ask for an answer to a prompt, after a system message unless that is ""."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": prompt}]


def encode(
    examples: list[dict], tokenizer: Tokenizer, max_tokens: int, what: str, *, chat: bool, system: str
) -> PromptSet:
    """Tokenises prompts; one longer than max_tokens is dropped and counted, never cut into another task.

    An example's "prompt" is text. chat: it is rendered as a conversation by the tokenizer's template.
    Raises ValueError, with their lengths, if nothing is left.
    """
    kept, tokens, lengths = [], [], []
    for example in examples:
        prompt = example["prompt"]
        ids = tokenizer.chat(conversation(prompt, system)) if chat else tokenizer.encode(prompt)
        lengths.append(len(ids))
        if 0 < len(ids) <= max_tokens:
            kept.append(example)
            tokens.append(ids)
    if not kept:
        lengths.sort()
        shortest, middle, longest = lengths[0], lengths[len(lengths) // 2], lengths[-1]
        raise ValueError(
            f"none of the {len(examples)} {what} prompts has 1 to {max_tokens} tokens (the shortest has {shortest}, the"
            f" median {middle}, the longest {longest}); raise rollout.max_prompt_tokens to {longest}"
        )
    return PromptSet(tuple(kept), tuple(tokens), len(examples) - len(kept))


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """An order over a prompt set: one permutation an epoch, a function of (seed, epoch) alone.

    The state of the stream is the number of draws so far, which the caller keeps.
    """

    prompts: PromptSet
    seed: int

    def take(self, start: int, count: int) -> Prompts:
        """Draws start … start + count - 1."""
        draws = np.arange(start, start + count)
        M = len(self.prompts)
        ids = np.array([self._order(int(d) // M)[int(d) % M] for d in draws], np.int64)
        return self.prompts.take(ids, draws)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a stream lives as long as its run
    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts))
