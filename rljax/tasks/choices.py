"""Multiple choice: a data file's row → lettered choices and the right letter; a completion → the letter it chooses."""

from __future__ import annotations

import functools
import re
import string
from typing import Any, NamedTuple

from rljax.tasks import grading, records

LETTERS = string.ascii_uppercase
FIELDS = ("choices", "options")  # where a row may have its choices; else in fields A, B, C …
KEY = "task.choices_field"


class Choice(NamedTuple):
    """One of a row's choices. label: what the row calls it, "" where it has no name for it."""

    label: str
    text: str


def of_row(row: dict, field: str, place: str) -> list[Choice]:
    """The choices of a row; [] where there are fewer than two.

    Args:
        field: where they are: a list of texts, or of objects {"label", "text"}; an object that maps letters to texts,
            or holds the lists "label" and "text"; "A,B,C,D" is one field a choice. "" looks for FIELDS, then for
            fields A, B, C …
        place: of the row, for messages.

    Raises:
        ValueError: no such field, or what is there is none of these.
    """
    if not field:
        named = [name for name in FIELDS if name in row]
        lettered = [letter for letter in LETTERS if letter in row]
        if not named and len(lettered) < 2:
            raise ValueError(
                f"{place} has none of the fields {', '.join(FIELDS)} or A, B …; it has {', '.join(row)}; name the"
                f" one of the choices by {KEY}"
            )
        field = named[0] if named else ",".join(lettered)
    if "," in field:
        names = [name.strip() for name in field.split(",")]
        choices = [Choice(name, records.text(row, name, KEY, place)) for name in names]
    else:
        choices = _listed(records.value(row, field, KEY, place), f"{place}: the field {field!r} ({KEY})")
    choices = [choice for choice in choices if choice.text]
    if len(choices) > len(LETTERS):
        raise ValueError(f"{place} has {len(choices)} choices; there are letters for {len(LETTERS)}")
    return _without_letters(choices) if len(choices) >= 2 else []


def _listed(value: Any, where: str) -> list[Choice]:
    if value is None:
        return []
    if isinstance(value, dict) and {"label", "text"} <= value.keys() and isinstance(value["text"], list):
        if not (isinstance(value["label"], list) and len(value["label"]) == len(value["text"])):
            raise ValueError(f"{where} has {len(value['text'])} texts and other labels: {value['label']!r}")
        value = [{"label": label, "text": text} for label, text in zip(value["label"], value["text"], strict=True)]
    elif isinstance(value, dict):
        value = [{"label": label, "text": text} for label, text in value.items()]
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a list of choices, or an object of them")
    return [_choice(entry, where) for entry in value]


def _choice(entry: Any, where: str) -> Choice:
    parts = entry if isinstance(entry, dict) else {"label": "", "text": entry}
    if not {"label", "text"} <= parts.keys():
        raise ValueError(f"{where} has a choice with {', '.join(parts)}; it must have label and text")
    return Choice(*(records.as_text(parts[name], f"{where}, a choice's {name}") for name in ("label", "text")))


def _without_letters(choices: list[Choice]) -> list[Choice]:
    """Without a letter before each text that is its own: "(A) iron", "(B) tin"."""
    found = [re.fullmatch(rf"\(?{letter}[).:]\s*(.+)", choice.text, re.DOTALL)
             for letter, choice in zip(LETTERS, choices, strict=False)]  # fmt: skip
    if not all(found):
        return choices
    return [Choice(choice.label, match.group(1)) for choice, match in zip(choices, found, strict=True) if match]


def lettered(question: str, choices: list[Choice]) -> str:
    """The question, and under it a line a choice: "A. iron"."""
    lines = [f"{letter}. {choice.text}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *lines])


def gold_letter(choices: list[Choice], gold: Any) -> str | None:
    """The letter of the right choice, or None where the gold answer names none of them, or several.

    gold: the first of these that fits: the choice's label or letter ("B", "b", "(B)", "B. tin"), its text (whatever
    the case, where no other has it), or its number from 0. A JSON number is a label or a number from 0, never a letter.
    """
    labels = [choice.label.casefold() for choice in choices]
    if not any(labels):
        labels = [letter.casefold() for letter in LETTERS[: len(choices)]]
    texts = [choice.text.casefold() for choice in choices]
    number = isinstance(gold, int | float) and not isinstance(gold, bool)
    said = records.as_text(gold, "the gold answer").casefold()
    bare = re.sub(r"\A\((\w+)\)\Z|\A(\w+)[).:]\Z", r"\1\2", said)
    with_text = [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)]
    spelled = re.sub(r"\A\(?(\w+)[).:]\s*", r"\1. ", said)
    for names, name in ((labels, bare), *(() if number else ((texts, said), (with_text, spelled)))):
        if name in names:
            return LETTERS[names.index(name)] if names.count(name) == 1 else None
    if re.fullmatch(r"[0-9]+", said) and int(said) < len(choices):
        return LETTERS[int(said)]
    return None


@functools.cache
def _choice_patterns(letters: str) -> tuple[re.Pattern, re.Pattern, re.Pattern]:
    """A letter chosen at a place, one after words that announce it, and a line that begins with one."""
    upper, either = re.escape(letters), re.escape(letters + letters.lower())
    nouns = re.escape("".join(letter for letter in letters if letter not in "AI"))  # those are words as well
    goes_on = r"\s+(?:(?:and|as|because|but|for|is|not|or|since)\b|[^a-z\s])"
    letter = (
        rf"[(\[]?(?:([{either}])(?=\s*[)\]]|[.,:;!?]*\s*(?:\n|\Z)|[.,:;](?=\s))"
        rf"|([{upper}])(?={goes_on})" + (rf"|([{nouns}])(?=\s))" if nouns else "|(?!))")
    )
    announced = (
        r"(?i:\banswer|\b(?:correct|right|best)\s(?:option|choice)|\b(?:choose|select|pick))"
        r"(?:\s?(?i:(?:would|must|should)\sbe|is|:|=))*\s?(?i:(?:option|choice|letter)\s)?"
    )
    lettered = rf"[(\[]?([{upper}])[)\].:](?:\s|\Z)"
    return re.compile(letter), re.compile(announced + letter), re.compile(lettered)


def extract_choice(completion: str, letters: str = "ABCD") -> str | None:
    """The letter of ``letters`` (upper case) that a completion chooses, or None.

    The first of these that the completion holds:
      1. a letter at the start of its marked answer (box, answer tag or "####");
      2. the last one announced: "the answer is (B)", "answer: b", "the correct option is B";
      3. a last line that is but the letter, in any case and brackets;
      4. a first or last line that begins with one, "B. Paris", where no other line does.
    An "A" or "I" that goes on as prose ("A dog") is a word, not a choice. "A or B" and "A, B" choose nothing.
    """
    chosen, announced, lettered = _choice_patterns(letters)
    marked = grading.marked_answer(completion)
    if marked is not None:
        found = chosen.match(_plain_prose(marked))
        if found:
            return None if _goes_on(found, letters) else found.group(found.lastindex).upper()
    text = _plain_prose(completion)
    found = [match for match in announced.finditer(text) if not _goes_on(match, letters)]
    said = [match.group(match.lastindex).upper() for match in found]
    if said:
        return said[-1]
    lines = text.splitlines() if text else [""]
    alone = re.fullmatch(rf"[(\[]?([{re.escape(letters + letters.lower())}])[)\].:]*", lines[-1])
    if alone:
        return alone.group(1).upper()
    begins = [(number, lettered.match(line)) for number, line in enumerate(lines)]
    begun = [(number, match.group(1)) for number, match in begins if match and not _goes_on(match, letters)]
    return begun[0][1] if len(begun) == 1 and begun[0][0] in (0, len(lines) - 1) else None


def _goes_on(match: re.Match[str], letters: str) -> bool:
    """Whether other letters follow the one that was found: "A or B", "A, B, C"."""
    after = match.string[max(match.end(group) for group in range(1, match.re.groups + 1)) :]  # one group has matched
    return (
        re.match(rf"[)\].:]*\s*(?:,|/|&|\bor\b|\band\b)[\s(\[]*(?:also |or |and )?[{re.escape(letters)}]\b", after)
        is not None
    )


def _plain_prose(text: str) -> str:
    """Text without emphasis, quotes, dollar signs and LaTeX's text commands; single spaces, no empty lines."""
    text = re.sub(r"[*$\"“”`]", "", grading.TEXT_COMMAND.sub(r"\1", text))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def grade_choice(completion: str, gold: str, *, letters: str = "ABCD") -> float:
    """1.0 if the completion chooses the gold letter (see :func:`extract_choice`), else 0.0.

    Raises:
        ValueError: the gold is not one of ``letters``.
    """
    if len(gold) != 1 or gold not in letters:
        raise ValueError(f"gold answer {gold!r} is not one letter of {letters!r}: fix the data or `letters`")
    return float(extract_choice(completion, letters) == gold)
