"""Tasks whose problems stand in a data file: a few known by name, and "file" for any other."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from rljax.tasks import grading, records
from rljax.tasks.base import Task

KINDS = ("kind", "level", "type", "difficulty")  # fields that may group the results
MAX_KINDS = 20  # values of such a field; one of more is no grouping
BOXED = "{prompt}\n\nThink step by step, and end with the final answer in \\boxed{}."


def _after_hash(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


# How the gold answer is taken from the text of its field; None where the field has none.
GOLDS: dict[str, Callable[[str], str | None]] = {
    "as_is": str.strip,
    "hash": _after_hash,
    "boxed": grading.last_box,
}


class Grader(NamedTuple):
    """grade: (completion, gold) → reward. reads: whether it can grade against a gold answer at all."""

    grade: Callable[[str, str], float]
    reads: Callable[[str], bool]


GRADERS: dict[str, Grader] = {
    "math": Grader(grading.grade_math, grading.gold_parses),
    "exact": Grader(grading.grade_exact, bool),
    "numeric": Grader(grading.grade_numeric, grading.holds_number),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a row of a data file has its parts, and how they are used.

    prompt, answer: fields; a dot goes into an object or, with a number, into a list: "prompt.0.content".
    gold: a key of GOLDS. grader: a key of GRADERS. template: what the model is given, with "{prompt}".
    """

    prompt: str
    answer: str
    gold: str
    grader: str
    template: str

    def __post_init__(self) -> None:
        for key, value, known in (("gold", self.gold, GOLDS), ("grader", self.grader, GRADERS)):
            if value not in known:
                raise ValueError(f"task.{key}={value!r} is unknown; known: {', '.join(known)}")
        if "{prompt}" not in self.template:
            raise ValueError(f"task.template={self.template!r} lacks {{prompt}}, the place of the problem; add it")


_PROBLEM = Layout(prompt="problem", answer="answer", gold="as_is", grader="math", template=BOXED)
LAYOUTS: dict[str, Layout] = {
    "file": Layout(prompt="prompt", answer="answer", gold="as_is", grader="math", template="{prompt}"),
    "gsm8k": Layout(prompt="question", answer="answer", gold="hash", grader="math", template=BOXED),
    "math": _PROBLEM,
    "aime": _PROBLEM,
    "amc": _PROBLEM,
    # BytedTsinghua-SIA/DAPO-Math-17k; its prompts say themselves how to answer
    "dapo_math": Layout(
        prompt="prompt.0.content",
        answer="reward_model.ground_truth",
        gold="as_is",
        grader="math",
        template="{prompt}",
    ),
}


def from_config(config: Any) -> Task:
    """The task of a config's ``task`` block: its ``name`` is a key of LAYOUTS, which fills in what is ""."""
    given = {
        "prompt": config.prompt_field,
        "answer": config.answer_field,
        "gold": config.gold,
        "grader": config.grader,
        "template": config.template,
    }
    layout = dataclasses.replace(LAYOUTS[config.name], **{key: value for key, value in given.items() if value})
    return make(
        name=config.name,
        layout=layout,
        path=config.path,
        eval_path=config.eval_path,
        train_prompts=config.train_prompts,
        eval_prompts=config.eval_prompts,
        seed=config.seed,
        stop=config.stop,
    )


def make(
    *,
    name: str,
    layout: Layout,
    path: str,
    eval_path: str,
    train_prompts: int,
    eval_prompts: int,
    seed: int,
    stop: str,
) -> Task:
    """The problems of a data file, or of one for training and one held out.

    No prompt stands twice, nor both in training and held out (then it is held out). Rows whose gold answer the
    grader cannot read are left out; ``Task.dropped`` counts all that is left out, by reason.

    Args:
        path, eval_path: see records.read. With eval_path = "", eval_prompts rows of path are held out.
        train_prompts, eval_prompts: at most that many, chosen by the seed; 0 is all there are.

    Raises:
        ValueError: a row lacks a field or has the wrong type there (with file and line); nothing is left.
        FileNotFoundError: no such file.
    """
    dropped: collections.Counter[str] = collections.Counter()
    train = _Pool(path, layout, f"{seed}/train", dropped)
    if eval_path:
        held_out = _Pool(eval_path, layout, f"{seed}/eval", dropped)
        dropped["in task.eval_path too"] = train.remove(held_out.rows)
        held = held_out.take(eval_prompts)
        dropped["over task.eval_prompts"] = len(held_out.rows)
    else:
        held = train.take(eval_prompts)
    chosen = train.take(train_prompts)
    dropped["over task.train_prompts"] = len(train.rows)
    if not chosen:
        raise ValueError(
            f"task.path={path!r} leaves no training prompt beside {len(held):,} held out; "
            "lower task.eval_prompts, or give task.eval_path"
        )
    return Task(
        name=name,
        train=[_example(row, layout) for row in chosen],
        eval=[_example(row, layout) for row in held],
        grade=functools.partial(grade, grader=layout.grader),
        stop=stop,
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def grade(completion: str, example: dict, *, grader: str) -> float:
    """The reward of a completion by the grader of that name against ``example["answer"]``."""
    return GRADERS[grader].grade(completion, example["answer"])


def gold_of(row: dict, layout: Layout, place: str) -> str | None:
    """The gold answer in a data file's row, or None. place: of the row, for messages."""
    return GOLDS[layout.gold](_text(row, layout.answer, "task.answer_field", place))


class _Row(NamedTuple):
    prompt: str
    gold: str | None
    kind: str | None


def _example(row: _Row, layout: Layout) -> dict:
    example = {"prompt": layout.template.replace("{prompt}", row.prompt), "answer": row.gold}
    return example if row.kind is None else example | {"kind": row.kind}


class _Pool:
    """The rows of a data file that are not yet chosen, in an order of the seed's."""

    def __init__(self, path: str, layout: Layout, seed: str, dropped: collections.Counter[str]):
        self.path, self.layout, self.dropped = path, layout, dropped
        rows: dict[str, tuple[str, str | None, dict]] = {}
        for place, fields in records.read(path):
            prompt = _text(fields, layout.prompt, "task.prompt_field", place)
            gold = gold_of(fields, layout, place)
            if not prompt:
                dropped["without a prompt"] += 1
            elif prompt in rows:
                dropped["whose prompt stands twice"] += 1
            else:
                rows[prompt] = prompt, gold, {name: fields[name] for name in KINDS if name in fields}
        if not rows:
            raise ValueError(f"data file {path} has no row with a prompt; name one that has")
        kind = _kind_field([fields for _, _, fields in rows.values()])
        found = [_Row(prompt, gold, _label(fields[kind]) if kind else None) for prompt, gold, fields in rows.values()]
        self.rows = random.Random(seed).sample(found, len(found))

    def remove(self, others: list[_Row]) -> int:
        """Leaves out rows whose prompt the others have too; returns how many."""
        known, before = {row.prompt for row in others}, len(self.rows)
        self.rows = [row for row in self.rows if row.prompt not in known]
        return before - len(self.rows)

    def take(self, count: int) -> list[_Row]:
        """Chooses `count` rows that the grader can grade, or all; passes over the others, and counts them.

        Raises ValueError where there is none.
        """
        reads = GRADERS[self.layout.grader].reads
        chosen, unread = [], []
        while self.rows and not (count and len(chosen) == count):
            row = self.rows.pop()
            (chosen if row.gold and reads(row.gold) else unread).append(row)
        self.dropped["whose gold answer does not parse"] += len(unread)
        if not chosen and unread:
            raise ValueError(
                f"{self.path}: task.grader={self.layout.grader!r} can read none of the {len(unread):,} gold answers "
                f"(task.gold={self.layout.gold!r}), such as {unread[0].gold!r}; check task.answer_field and these"
            )
        return chosen


def _text(row: dict, field: str, key: str, place: str) -> str:
    """The text, or the number as text, of a row's field; "" where it is null."""
    value: Any = row
    if field in row:
        value = row[field]
    else:
        for part in field.split("."):
            try:
                value = value[int(part) if isinstance(value, list) else part]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"{place} has no field {field!r} ({key}); it has {', '.join(row)}") from None
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{place}: the field {field!r} ({key}) is a {type(value).__name__}, not text; "
            f"name a part of it, such as {field}.{'0' if isinstance(value, list) else 'name'}"
        )
    text = str(value).strip()
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"{place}: the field {field!r} ({key}) holds a lone surrogate, which is no text; mend it")
    return text


def _kind_field(rows: list[dict]) -> str | None:
    """The first of KINDS that every row has, with 2 to MAX_KINDS labels."""
    for name in KINDS:
        if all(isinstance(row.get(name), str | int | float) for row in rows):
            if 2 <= len({_label(row[name]) for row in rows}) <= MAX_KINDS:
                return name
    return None


def _label(value: str | float) -> str:
    """A name of a kind that can be part of a metric's name; a number is rounded to a whole one."""
    return re.sub(r"\W+", "_", value.strip()) if isinstance(value, str) else f"{value:.0f}"
