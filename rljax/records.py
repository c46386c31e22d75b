"""What a run writes of single prompts and rollouts: rollouts.jsonl and samples.jsonl (read by report/folders.py)."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np

from rljax.tokenizer import Tokenizer
from rljax.types import Array, Prompts, Rollouts

MOST = 4  # rollouts of a step that are written out as text
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of the first bytes of a character


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """All rollouts of a step and what became of each; host data but for `acceptance`.

    prompts, rollouts: of every round. rewards: float32[R], NaN where a row could not be scored.
    place: int[R, 2], the row [p, k] of the kept rows [P, K] that a rollout is; -1 where it is not learned from.
    acceptance: float32[P, K, T], probability of each kept row's tokens to be accepted; None without Jackpot.
    set_size: training prompts, which an epoch visits once.
    """

    prompts: Prompts
    rollouts: Rollouts
    rewards: np.ndarray
    place: np.ndarray
    acceptance: Array | None
    set_size: int

    @property
    def kept(self) -> np.ndarray:
        return self.place[:, 0] >= 0


def places(prompts: Prompts, rollouts: Rollouts, learned: Prompts, indices: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """int[R, 2], Trace's `place`: where each rollout stands among the kept rows of the prompts learned from.

    indices, kept: [P, K] of `learned`, samples of each prompt and whether they count. A rollout is known by its
    prompt's draw and its sample, since both have other row numbers among those of all rounds.
    """
    rows = {(int(learned.draws[p]), int(indices[p, k])): (p, k) for p, k in np.argwhere(kept)}
    names = zip(prompts.draws[rollouts.group].tolist(), rollouts.sample.tolist(), strict=True)
    return np.array([rows.get(name, (-1, -1)) for name in names], np.int64).reshape(-1, 2)


def of_prompts(trace: Trace) -> dict:
    """The step's line of rollouts.jsonl: what each prompt was given, and numbers of rollouts by reward.

    A reward is written as the shortest decimal of its float32.
    """
    lines = []
    for group, (id, draw, example) in enumerate(
        zip(trace.prompts.ids, trace.prompts.draws, trace.prompts.examples, strict=True)
    ):
        mine = trace.rollouts.group == group
        kind = {"kind": str(example["kind"])} if "kind" in example else {}
        lines.append({
            "id": int(id), "epoch": int(draw) // trace.set_size, **kind, "rollouts": int(mine.sum()),
            "rewards": _counts(trace.rewards[mine]), "kept": _counts(trace.rewards[mine & trace.kept]),
        })  # fmt: skip
    return {"prompts": lines}


def _counts(rewards: np.ndarray) -> dict[str, int]:
    scored = np.sort(rewards[np.isfinite(rewards)].astype(np.float32))
    return dict(collections.Counter(np.format_float_positional(reward, trim="-") for reward in scored))


def of_rollouts(trace: Trace, tokenizer: Tokenizer, seed: tuple[int, ...], most: int = MOST) -> list[dict]:
    """Lines of samples.jsonl: rollouts drawn at random by `seed`, half of them from the kept ones where not all are.

    "prompt" is the task's text of it. "acceptance" stands only in those that have it: the kept ones, under Jackpot.
    """
    generator = np.random.default_rng(seed)
    pools = [np.flatnonzero(trace.kept), np.flatnonzero(~trace.kept)]
    order = [generator.permutation(pool) for pool in pools]
    wanted = max(most - most // 2, most - len(pools[1]))
    first = order[0][:wanted]
    rows = np.concatenate([first, order[1][: most - len(first)]])
    probabilities = None if trace.acceptance is None else np.asarray(jax.device_get(trace.acceptance))
    return [_sample(trace, tokenizer, int(row), probabilities) for row in rows]


def _sample(trace: Trace, tokenizer: Tokenizer, row: int, probabilities: np.ndarray | None) -> dict:
    length, kept, reward = int(trace.rollouts.lengths[row]), bool(trace.kept[row]), float(trace.rewards[row])
    accepted = {}
    if probabilities is not None and kept:
        p, k = trace.place[row]
        accepted = {"acceptance": [round(float(a), 4) for a in probabilities[p, k, :length]]}
    return {
        "prompt": str(trace.prompts.examples[trace.rollouts.group[row]]["prompt"]),
        "tokens": pieces(tokenizer, trace.rollouts.tokens[row, :length].tolist()),
        **accepted,
        "reward": reward if np.isfinite(reward) else None,
        "kept": kept,
    }


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of ids in pieces, one a token, special tokens included; "" where a token ends inside a character.

    Together they are the decoded text. The piece of a character is with the token that ends it.
    """

    def text(start: int, end: int) -> str:
        return tokenizer.inner.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    out, start, end = [], 0, 0  # ids[start:end] are the context in which the next ones are decoded
    for i in range(len(ids)):
        # Decoded after the token before it, since some tokenizers drop the space of a first token.
        before, now = text(start, end), text(start, i + 1)
        if now.endswith(_BROKEN) and i + 1 < len(ids) and i + 1 - end < 4:  # bytes of a character
            out.append("")
            continue
        out.append(now[len(before) :])
        start, end = end, i + 1
    return out
