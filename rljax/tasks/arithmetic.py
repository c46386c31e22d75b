"""Arithmetic of mixed difficulty, generated: "37+48=" → "85", graded by exact match.

A problem's operand pairs decide its split: a pair belongs to the warm start, to training or to the held-out
set, whatever the operator and the order, so no split ever sees another's pairs.

For a language model that has read about arithmetic, a prompt is few-shot: solved problems of the same kind stand
before it, a line each ("37 + 48 = 85"), and a newline ends the completion. There is no warm start then, and its
pairs are for training too.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable

from rljax.tasks import terms as terms_lib
from rljax.tasks.base import Task

# Percent of all unordered operand pairs. The warm start is launch/make_tiny.py's.
SPLITS = {"warm": range(0, 70), "train": range(70, 88), "eval": range(88, 100)}

Terms = tuple[list[int], list[str]]  # operands, and the operators between them


def _sum(digits: int, op: str) -> Callable[[random.Random], Terms]:
    low, high = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1

    def draw(rng: random.Random) -> Terms:
        a, b = rng.randint(low, high), rng.randint(low, high)
        return ([max(a, b), min(a, b)] if op == "-" else [a, b]), [op]

    return draw


def _product(low_a: int, high_a: int, low_b: int, high_b: int) -> Callable[[random.Random], Terms]:
    def draw(rng: random.Random) -> Terms:
        return [rng.randint(low_a, high_a), rng.randint(low_b, high_b)], ["*"]

    return draw


def _chain(rng: random.Random) -> Terms:
    """Three terms whose running result stays non-negative."""
    while True:
        terms = [rng.randint(2, 99) for _ in range(3)]
        ops = [rng.choice("+-") for _ in range(2)]
        first = terms[0] + terms[1] if ops[0] == "+" else terms[0] - terms[1]
        if first >= 0 and (ops[1] == "+" or first >= terms[2]):
            return terms, ops


KINDS: dict[str, Callable[[random.Random], Terms]] = {
    "add1": _sum(1, "+"),
    "sub1": _sum(1, "-"),
    "mul1": _product(2, 9, 2, 9),
    "add2": _sum(2, "+"),
    "sub2": _sum(2, "-"),
    "add3": _sum(3, "+"),
    "sub3": _sum(3, "-"),
    "mul21": _product(11, 99, 2, 9),
    "mul22": _product(11, 99, 11, 99),
    "chain": _chain,
}
DEFAULT_MIX = "add2:8,add3:3,sub3:2,chain:2,mul21:1"


def split_of(a: int, b: int) -> str:
    """The split that owns the unordered operand pair {a, b}."""
    bucket = zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % 100
    return next(name for name, part in SPLITS.items() if bucket in part)


def evaluate(terms: list[int], ops: list[str]) -> int:
    """Left to right; kinds mix no precedence."""
    value = terms[0]
    for op, term in zip(ops, terms[1:], strict=True):
        value = {"+": value + term, "-": value - term, "*": value * term}[op]
    return value


def draw(kind: str, splits: tuple[str, ...], rng: random.Random) -> Terms:
    """A problem of a kind all of whose neighbouring operand pairs belong to the splits."""
    while True:
        terms, ops = KINDS[kind](rng)
        if all(split_of(a, b) in splits for a, b in itertools.pairwise(terms)):
            return terms, ops


def text(terms: list[int], ops: list[str], space: str = "") -> str:
    """ "37+48=", with `space` around each sign but the last, which it only precedes."""
    signs = zip(ops, terms[1:], strict=True)
    return str(terms[0]) + "".join(f"{space}{op}{space}{term}" for op, term in signs) + f"{space}="


def few_shot(kind: str, terms: list[int], ops: list[str], shots: int, rng: random.Random) -> str:
    """The problem after `shots` other solved ones of its kind, none of the held-out split."""
    lines: dict[str, str] = {}
    question = text(terms, ops, " ")
    for _ in range(200 * shots + 1000):
        if len(lines) == shots:
            return "".join(lines.values()) + question
        shown = draw(kind, ("warm", "train"), rng)
        if (line := text(*shown, " ")) != question:
            lines[line] = f"{line} {evaluate(*shown)}\n"
    raise ValueError(f"task.shots={shots}: fewer distinct {kind} problems to show ({len(lines)} found); ask for fewer")


def parse_mix(mix: str) -> dict[str, float]:
    """ "add2:3,mul21:1" → {"add2": 3.0, "mul21": 1.0}; "" is DEFAULT_MIX. Raises ValueError if malformed."""
    return terms_lib.parse(mix if mix else DEFAULT_MIX, ",", KINDS, key="task.mix", what="kind")


def problems(split: str, count: int, mix: str, seed: int, shots: int = 0) -> list[dict]:
    """`count` distinct examples {prompt, answer, kind} of a split, reproducible from the seed.

    shots: solved problems before each; the same problem may then stand after others again.
    """
    splits = ("warm", "train") if shots and split == "train" else (split,)
    rng = random.Random(f"{seed}/{split}")
    weights = parse_mix(mix)
    kinds, shares = list(weights), list(weights.values())
    examples: dict[str, dict] = {}
    for _ in range(200 * count + 1000):
        if len(examples) == count:
            return list(examples.values())
        kind = rng.choices(kinds, shares)[0]
        terms, ops = draw(kind, splits, rng)
        prompt = few_shot(kind, terms, ops, shots, rng) if shots else text(terms, ops)
        examples.setdefault(prompt, {"prompt": prompt, "answer": str(evaluate(terms, ops)), "kind": kind})
    raise ValueError(
        f"task.mix={mix!r} has fewer than {count} distinct {split} problems ({len(examples)} found); "
        f"ask for fewer (task.{split}_prompts) or add kinds"
    )


def grade(completion: str, example: dict) -> float:
    """1.0 if the completion is the answer and nothing else, 0.0 otherwise."""
    return float(completion.strip() == example["answer"])


def make(*, seed: int, train_prompts: int, eval_prompts: int, mix: str, shots: int) -> Task:
    return Task(
        name="arithmetic",
        train=problems("train", train_prompts, mix, seed, shots),
        eval=problems("eval", eval_prompts, mix, seed, shots),
        grade=grade,
        stop="\n" if shots else "",
    )
