"""Tasks whose problems stand in a data file: a few known by name, and "file" and "choice" for any other."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from rljax.tasks import choices as choices_lib
from rljax.tasks import graders, grading, kinds, records
from rljax.tasks.base import Task
from rljax.tasks.graders import Reward

BOXED = "{prompt}\n\nThink step by step, and end with the final answer in \\boxed{}."
LETTERED = "{prompt}\n\nThink step by step, and end with the letter of the right choice in \\boxed{}."


def _after_hash(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


# How the gold answer is taken from the text of its field; None where the field has none.
GOLDS: dict[str, Callable[[str], str | None]] = {
    "as_is": str.strip,
    "hash": _after_hash,
    "boxed": grading.last_box,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a row of a data file has its parts, and how they are used.

    prompt, answer: fields; a dot goes into an object or, with a number, into a list: "prompt.0.content".
    kind: the field that groups the results; "": the first of kinds.FIELDS that does.
    choices: the field of a multiple-choice row's choices, as choices.of_row takes it; None: no multiple choice.
    gold: a key of GOLDS. grader: as graders.reward takes it. template: what the model is given, with "{prompt}".
    """

    prompt: str
    answer: str
    gold: str
    grader: str
    template: str
    kind: str = ""
    choices: str | None = None

    def __post_init__(self) -> None:
        if self.gold not in GOLDS:
            raise ValueError(f"task.gold={self.gold!r} is unknown; known: {', '.join(GOLDS)}")
        if "{prompt}" not in self.template:
            raise ValueError(f"task.template={self.template!r} lacks {{prompt}}, the place of the problem; add it")


_PROBLEM = Layout(prompt="problem", answer="answer", gold="as_is", grader="math", template=BOXED)
_CHOICE = Layout(prompt="question", answer="answer", gold="as_is", grader="choice", template=LETTERED, choices="")
LAYOUTS: dict[str, Layout] = {
    "file": Layout(prompt="prompt", answer="answer", gold="as_is", grader="math", template="{prompt}"),
    "choice": _CHOICE,
    # hicai-zju/SciKnowEval (arXiv 2406.09098); its rows without choices are left out
    "sciknoweval": dataclasses.replace(_CHOICE, answer="answerKey", choices="choices", kind="details.level"),
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
        "kind": config.kind_field,
        "choices": config.choices_field,
        "gold": config.gold,
        "grader": config.grader,
        "template": config.template,
    }
    layout = dataclasses.replace(LAYOUTS[config.name], **{key: value for key, value in given.items() if value})
    return make(
        name=config.name,
        layout=layout,
        reward=graders.from_config(config, layout.grader),
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
    reward: Reward,
    path: str,
    eval_path: str,
    train_prompts: int,
    eval_prompts: int,
    seed: int,
    stop: str,
) -> Task:
    """The problems of a data file, or of one for training and one held out.

    No prompt stands twice, nor both in training and held out (then it is held out). Rows whose gold answer a grader
    of the reward cannot read are left out, and of multiple choice those without choices; ``Task.dropped`` counts all
    that is left out, by reason. Held-out examples come in the file's order, and are judged by the reward's main grader
    alone.

    Args:
        path, eval_path: see records.read. With eval_path = "", eval_prompts rows of path are held out. With path = ""
            there is nothing to train on.
        train_prompts, eval_prompts: at most that many, chosen by the seed; 0 is all there are.

    Raises:
        ValueError: a row lacks a field or has the wrong type there (with file and line); nothing is left.
        FileNotFoundError: no such file.
    """
    if layout.choices is not None and "choice" not in reward.weights:
        raise ValueError(
            f"task.grader={layout.grader!r} does not grade the letters of multiple choice; set it to choice, or to a "
            "sum with it, or unset task.choices_field"
        )
    dropped: collections.Counter[str] = collections.Counter()
    train = _Pool(path, layout, reward, f"{seed}/train", dropped) if path else None
    if eval_path:
        held_out = _Pool(eval_path, layout, reward, f"{seed}/eval", dropped)
        dropped["in task.eval_path too"] = 0 if train is None else train.remove(held_out.rows)
        held = held_out.take(eval_prompts)
        dropped["over task.eval_prompts"] = len(held_out.rows)
    elif train is not None:
        held = train.take(eval_prompts)
    else:
        raise ValueError("task.path and task.eval_path are both empty; name a data file")
    chosen = [] if train is None else train.take(train_prompts)
    dropped["over task.train_prompts"] = 0 if train is None else len(train.rows)
    if train is not None and not chosen:
        raise ValueError(
            f"task.path={path!r} leaves no training prompt beside {len(held):,} held out; "
            "lower task.eval_prompts, or give task.eval_path"
        )
    return Task(
        name=name,
        train=[_example(row, layout) for row in chosen],
        eval=reward.judged([_example(row, layout) for row in sorted(held, key=lambda row: row.number)]),
        grade=reward,
        stop=stop,
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def gold_of(row: dict, layout: Layout, place: str) -> str | None:
    """The gold answer in a data file's row, or None. place: of the row, for messages."""
    return GOLDS[layout.gold](records.text(row, layout.answer, "task.answer_field", place))


class _Row(NamedTuple):
    """A row as it is used; letters: of its choices, "" where it has none."""

    prompt: str
    gold: str | None
    letters: str
    fields: dict  # that may group the results
    kind: str = ""
    number: int = 0  # of the row in the file


def _read(fields: dict, layout: Layout, place: str) -> _Row | None:
    """What a row of a data file gives; None where it is to be of multiple choice and has no choices."""
    prompt, letters = records.text(fields, layout.prompt, "task.prompt_field", place), ""
    gold = gold_of(fields, layout, place)
    if layout.choices is not None:
        offered = choices_lib.of_row(fields, layout.choices, place)
        if not offered:
            return None
        prompt, letters = prompt and choices_lib.lettered(prompt, offered), choices_lib.LETTERS[: len(offered)]
        if layout.gold == "as_is" and gold:  # a number is another thing than its digits here
            gold = records.value(fields, layout.answer, "task.answer_field", place)
        gold = choices_lib.gold_letter(offered, gold)
    if layout.kind:
        return _Row(prompt, gold, letters, {layout.kind: _group(fields, layout.kind, place)})
    return _Row(prompt, gold, letters, {name: fields[name] for name in kinds.FIELDS if name in fields})


def _group(fields: dict, field: str, place: str) -> str | float:
    """What groups a row's results: a number or a text."""
    found = records.value(fields, field, "task.kind_field", place)
    number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if number else records.text(fields, field, "task.kind_field", place)


def _example(row: _Row, layout: Layout) -> dict:
    example = {"prompt": layout.template.replace("{prompt}", row.prompt), "answer": row.gold}
    more = {"letters": row.letters, "kind": row.kind}
    return example | {name: value for name, value in more.items() if value}


class _Pool:
    """The rows of a data file that are not yet chosen, in an order of the seed's."""

    def __init__(self, path: str, layout: Layout, reward: Reward, seed: str, dropped: collections.Counter[str]):
        self.path, self.layout, self.reward, self.dropped = path, layout, reward, dropped
        rows: dict[str, _Row] = {}
        for place, fields in records.read(path):
            row = _read(fields, layout, place)
            if row is None:
                dropped["without choices"] += 1
            elif not row.prompt:
                dropped["without a prompt"] += 1
            elif row.prompt in rows:
                dropped["whose prompt stands twice"] += 1
            else:
                rows[row.prompt] = row._replace(number=len(rows))
        if not rows:
            what = "a prompt" if layout.choices is None else "a prompt and choices"
            raise ValueError(f"data file {path} has no row with {what}; name one that has")
        found = _with_kinds(list(rows.values()), layout.kind, path)
        self.rows = random.Random(seed).sample(found, len(found))

    def remove(self, others: list[_Row]) -> int:
        """Leaves out rows whose prompt the others have too; returns how many."""
        known, before = {row.prompt for row in others}, len(self.rows)
        self.rows = [row for row in self.rows if row.prompt not in known]
        return before - len(self.rows)

    def take(self, count: int) -> list[_Row]:
        """Chooses `count` rows that the reward can grade, or all; passes over the others, and counts them.

        Raises ValueError where there is none.
        """
        chosen, unread = [], []
        while self.rows and not (count and len(chosen) == count):
            row = self.rows.pop()
            (chosen if row.gold and self.reward.reads(row.gold) else unread).append(row)
        why = "whose gold answer does not parse" if self.layout.choices is None else "whose gold answer is no choice"
        self.dropped[why] += len(unread)
        if not chosen and unread:
            raise ValueError(
                f"{self.path}: task.grader={self.layout.grader!r} can read none of the {len(unread):,} gold answers "
                f"(task.gold={self.layout.gold!r}), such as {unread[0].gold!r}; check task.answer_field and these "
                "(task.grader=exact compares any text)"
            )
        return chosen


def _with_kinds(rows: list[_Row], field: str, path: str) -> list[_Row]:
    """The rows with the kind of a field, or of the first that groups them where field is ""."""
    name = field if field else kinds.field_of([row.fields for row in rows])
    if name is None:
        return rows
    labels = [kinds.label(row.fields[name]) for row in rows]
    if len(set(labels)) > kinds.MAX_KINDS:
        raise ValueError(
            f"{path}: task.kind_field={field!r} has {len(set(labels)):,} values; results are grouped by at most "
            f"{kinds.MAX_KINDS}; name another field"
        )
    return [row._replace(kind=label) for row, label in zip(rows, labels, strict=True)]
