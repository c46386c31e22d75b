"""Rewards by name: graders of the answer, of form and of length, and weighted sums of them.

Where each looks in a completion:
    math     what it marks as its answer (the last ``\\boxed{}``, ``<answer>`` tag or line after "####"), else its
             last number; equal as mathematics. A gold answer of words is compared as text, whatever the case, with
             what is marked, else with the whole completion.
    exact    what it marks, else the whole completion; equal as text, and case counts.
    numeric  the last number of what it marks, else of the whole completion.
    choice   the letter in what it marks, else the one it announces ("the answer is B"): choices.extract_choice.
    own      the task's own grader (reasoning_gym).
    format   the whole completion has the form asked for: FORMS.
    length   the whole completion, in characters: 1 up to a length, falling to 0 at another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rljax.tasks import choices, grading, terms
from rljax.tasks.base import Grade

REGEX = "regex:"
JUDGE = "judge"  # field of a held-out example: the grader that grades it alone


def _reasons_first(completion: str) -> bool:
    text = completion.strip()
    thought = text.removeprefix("<think>").partition("</think>")[0]
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.startswith("<think>") and bool(thought.strip()) and not text.endswith("</think>")


# What `format` asks for, by name; "regex:PATTERN" asks that the pattern is found (re.search, "." is any character).
FORMS: dict[str, Callable[[str], bool]] = {
    "boxed": lambda completion: grading.last_box(completion) is not None,
    "think": _reasons_first,
    "think_answer": lambda completion: grading.format_reward(completion) == 1.0,
}


def check_form(form: str) -> None:
    """Raises ValueError where task.format is neither a key of FORMS nor "regex:" and a regular expression."""
    if form.startswith(REGEX):
        try:
            re.compile(form.removeprefix(REGEX))
        except re.error as error:
            raise ValueError(f"task.format={form!r} is no regular expression: {error}") from error
    elif form not in FORMS:
        raise ValueError(f"task.format={form!r} is unknown; known: {', '.join(FORMS)}, {REGEX}PATTERN")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """``(completion, example) -> Σ weight · grader``, each grader between 0 and 1; a task's ``grade``.

    weights: name of GRADERS → weight above 0; the first is the main one, whose accuracy evaluations report.
    form: what `format` asks for. length_free, length_max: characters up to which `length` is 1, and from which it is 0.
    own: what `own` stands for, or None.

    An example with the field "judge" is graded by the grader of that name alone.

    Raises:
        ValueError: see ``check_form``; lengths that leave nothing between them; `own` without one; `length` first.
    """

    weights: dict[str, float]
    form: str
    length_free: int
    length_max: int
    own: Grade | None

    def __post_init__(self) -> None:
        check_form(self.form)
        if "length" in self.weights and not 0 <= self.length_free < self.length_max:
            raise ValueError(
                f"task.length_max={self.length_max} is not above task.length_free={self.length_free}: the reward "
                "`length` is 1 up to the one and 0 from the other, in characters; set both"
            )
        if "own" in self.weights and self.own is None:
            raise ValueError("task.grader=own is a grader that a task brings along; this one has none: name another")
        if self.main == "length":
            raise ValueError("task.grader begins with `length`; put the grader of the answer first, such as math")

    @property
    def main(self) -> str:
        """The first grader."""
        return next(iter(self.weights))

    def __call__(self, completion: str, example: dict) -> float | None:
        if JUDGE in example:
            return GRADERS[example[JUDGE]].grade(self, completion, example)
        total = 0.0
        for name, weight in self.weights.items():
            value = GRADERS[name].grade(self, completion, example)
            if value is None:
                return None
            total += weight * value
        return total

    def reads(self, answer: str | None) -> bool:
        """Whether every grader can grade against this gold answer."""
        return all(GRADERS[name].reads(answer) for name in self.weights)

    def judged(self, examples: Sequence[dict]) -> list[dict]:
        """Held-out examples as the main grader alone grades them, so that an accuracy counts right answers."""
        if self.weights == {self.main: 1.0}:
            return list(examples)
        return [example | {JUDGE: self.main} for example in examples]


def reward(
    spec: str, *, form: str = "boxed", length_free: int = 0, length_max: int = 0, own: Grade | None = None
) -> Reward:
    """The :class:`Reward` of "math", or of "math:0.9+format:0.1". Raises ValueError where it is none."""
    weights = terms.parse(spec, "+", GRADERS, key="task.grader", what="grader")
    return Reward(weights=weights, form=form, length_free=length_free, length_max=length_max, own=own)


def from_config(config: Any, spec: str, own: Grade | None = None) -> Reward:
    """The Reward of a config's ``task`` block; spec: its grader, or the task's own where that is ""."""
    return reward(spec, form=config.format, length_free=config.length_free, length_max=config.length_max, own=own)


def vote(completion: str, example: dict) -> str | None:
    """What a completion answers, for a majority over samples; completions that agree give the same text.

    The chosen letter where the example has "letters", else the final answer, else the whole text. None is no answer.
    """
    if "letters" in example:
        return choices.extract_choice(completion, example["letters"])
    found = grading.extract_answer(completion)
    return completion.strip() if found is None else found


class Grader(NamedTuple):
    """grade: (reward, completion, example) → 0 … 1. reads: whether it can grade against a gold answer at all."""

    grade: Callable[[Reward, str, dict], float | None]
    reads: Callable[[str | None], bool]


def _against(grade: Callable[[str, str], float]) -> Callable[[Reward, str, dict], float]:
    return lambda _, completion, example: grade(completion, example["answer"])


def _choice(_: Reward, completion: str, example: dict) -> float:
    return choices.grade_choice(completion, example["answer"], letters=example.get("letters", choices.LETTERS[:10]))


def _own(reward: Reward, completion: str, example: dict) -> float | None:
    if reward.own is None:
        raise ValueError("this reward has no grader of its own")
    return reward.own(completion, example)


def _format(reward: Reward, completion: str, _: dict) -> float:
    if reward.form.startswith(REGEX):
        return float(re.search(reward.form.removeprefix(REGEX), completion, re.DOTALL) is not None)
    return float(FORMS[reward.form](completion))


def _length(reward: Reward, completion: str, _: dict) -> float:
    share = (reward.length_max - len(completion)) / (reward.length_max - reward.length_free)
    return min(1.0, max(0.0, share))


GRADERS: dict[str, Grader] = {
    "math": Grader(_against(grading.grade_math), lambda gold: bool(gold) and grading.gold_parses(gold)),
    "exact": Grader(_against(grading.grade_exact), bool),
    "numeric": Grader(_against(grading.grade_numeric), lambda gold: bool(gold) and grading.holds_number(gold)),
    "choice": Grader(_choice, lambda gold: gold is not None and len(gold) == 1 and gold in choices.LETTERS),
    "own": Grader(_own, lambda gold: True),
    "format": Grader(_format, lambda gold: True),
    "length": Grader(_length, lambda gold: True),
}
