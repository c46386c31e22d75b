"""What a task is: prompts to train on, prompts to be judged on, and a grader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

FIELDS = ("prompt", "answer")

Grade = Callable[[str, dict], float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts and the function that grades their completions.

    name: shown in messages and reports.
    train, eval: examples, disjoint. Each is a dict of plain data with at least "prompt" (text) and "answer";
        "kind" (a label) is optional and groups the results; where no example has it, "level", "type" or "difficulty"
        (a label or a number) serves, if all have it.
    grade: ``(completion, example) -> reward``; None, NaN or infinity say that the row cannot be scored. It
        runs in a worker process, to which cloudpickle carries it: a function of an importable module, or one
        defined in a notebook or script. Its module must import no jax.
    stop: text that ends a completion, beside the tokenizer's own stop ids: a token that holds it is the last
        ("\n" after few-shot lines). The grader sees what stands before it. "" is none.
    dropped: rows removed when the data was built, counted by reason.

    Raises:
        ValueError: there is nothing held out, or an example lacks a field; names the task, the set and the index.
    """

    name: str
    train: list[dict]
    eval: list[dict]
    grade: Grade
    stop: str = ""
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.train:
            check_examples(self.train, where=f"task {self.name!r}, train")
        check_examples(self.eval, where=f"task {self.name!r}, eval")
        if not callable(self.grade):
            raise ValueError(f"task {self.name!r}: grade is {self.grade!r}, not a function of two arguments")


def check_examples(examples: list[dict], *, where: str, fields: tuple[str, ...] = FIELDS) -> None:
    """Refuses an empty data set, an example without one of ``fields``, and a prompt that is not text.

    Args:
        where: the file or the task and set, for the message.

    Raises:
        ValueError: says which.
    """
    if len(examples) == 0:
        raise ValueError(f"{where}: empty data set; give at least one example")
    for index, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise ValueError(f"{where}: example {index} is a {type(example).__name__}, not a dict")
        for field in fields:
            if field not in example:
                raise ValueError(
                    f"{where}: example {index} lacks field {field!r}; it has {', '.join(map(repr, example))}"
                )
        if "prompt" in fields and not (isinstance(example["prompt"], str) and example["prompt"]):
            raise ValueError(f"{where}: example {index} has the prompt {example['prompt']!r}, not a text")
