"""The "kind" of an example: the label by which results are grouped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = ("kind", "level", "type", "difficulty")  # that may group the results, the first that fits
MAX_KINDS = 20  # labels of such a field; one of more is no grouping


def field_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The first of FIELDS that every row has, with 2 to MAX_KINDS labels; None if none is."""
    for name in FIELDS:
        if all(isinstance(row.get(name), str | int | float) for row in rows):
            if 2 <= len({label(row[name]) for row in rows}) <= MAX_KINDS:
                return name
    return None


def label(value: str | float) -> str:
    """A name of a kind that can be part of a metric's name; a number is rounded to a whole one."""
    return re.sub(r"\W+", "_", value.strip()) if isinstance(value, str) else f"{value:.0f}"


def add(examples: Sequence[dict], others: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """Both sets with a "kind" from the first of FIELDS that groups them; as they are where one has it, or none does."""
    both = [*examples, *others]
    field = None if any("kind" in example for example in both) else field_of(both)
    if field is None:
        return list(examples), list(others)
    with_kind = [{**example, "kind": label(example[field])} for example in both]
    return with_kind[: len(examples)], with_kind[len(examples) :]
