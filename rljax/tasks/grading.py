"""Verifying answers: from a completion's text to a reward of 0.0 or 1.0.

Every function works in any thread or process and uses no signals. None of them can stop a computation that
never ends: :class:`rljax.rewards.RewardPool` runs graders in processes that it can kill.
math-verify (and sympy under it, about a second to import) is imported at the first use, or by ``warm_up``.
"""

from __future__ import annotations

import cmath
import functools
import itertools
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_ANSWER_CHARS = 1000  # a longer answer is not sent to the parser, whose time grows faster than its input
MAX_DEPTH = 40  # of brackets; the parser takes seconds for hundreds
MAX_BITS = 100_000  # of a number in an answer; comparing larger ones takes seconds to forever

# an escaped character is one token, so that \{ and \} do not count as braces
_BOX_TOKEN = re.compile(r"\\{1,2}boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
# a minus right after a term is an operator, not a sign: the last number of "7-3" is 3
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?(?<![\w.])"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}\b)?(?:/[0-9]+)?"
)
_LATEX_FRACTION = re.compile(
    r"((?<![\w.])[0-9]+)?\s*\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"  # perhaps a mixed number
)
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\s*\\!|\{,\})\s*(?=[0-9]{3}(?![0-9]))")
_TRAILING = re.compile(r"(?:\\[,;:! ]|[.,;\s])+\Z")  # punctuation, and LaTeX's spaces
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_LETTERS_ONLY = re.compile(r"(?:[^\W\d_]|[-\s,.;:'’&])+")  # of any alphabet, and what stands between words
_WORD = re.compile(r"[^\W\d_]{2,}")


def last_box(text: str) -> str | None:
    """The content of the complete, non-empty box that opens last; one pass over the text."""
    opened: list[int | None] = []  # per open brace: where its box's content starts, None for a plain brace
    last_start, content = -1, None
    for token in _BOX_TOKEN.finditer(text):
        if token.group() == "}":
            start = opened.pop() if opened else None
            if start is not None and start > last_start and (inside := text[start : token.start()].strip()):
                last_start, content = start, inside
        elif token.group() == "{":
            opened.append(None)
        elif "boxed" in token.group():
            opened.append(token.end())
    return content


def last_tag(text: str) -> str | None:
    """The content of the last ``<answer>...</answer>`` that is not empty."""
    tags = [content.strip() for content in _ANSWER_TAG.findall(text)]
    return [content for content in tags if content][-1] if any(tags) else None


def marked_answer(completion: str) -> str | None:
    """The answer that the completion marks as such: a box, an answer tag or a line after "####"."""
    for find in (last_box, last_tag):
        found = find(completion)
        if found is not None:
            return found
    _, hashes, tail = completion.rpartition("####")
    line = tail.split("\n", 1)[0].strip() if hashes else ""
    return line if line else None


def extract_answer(completion: str) -> str | None:
    """The final answer in a completion's text, as written; None if there is none.

    The first of these that the completion holds:
      1. the content of its last complete ``\\boxed{...}``, braces balanced (``\\{``, ``\\}`` do not count);
      2. the content of its last ``<answer>...</answer>``;
      3. the line after its last ``####``;
      4. its last number (``-1,234.5``, ``1e-3`` or ``1/6``).
    An empty or unfinished mark is passed over.
    """
    marked = marked_answer(completion)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(completion.replace("−", "-"))
    return numbers[-1] if numbers else None


def _latex_plain(text: str) -> str:
    """One kind of minus, and thousands without LaTeX's separators: ``29,\\!322`` is ``29322``."""
    text = _LATEX_THOUSANDS.sub("", text.replace("−", "-"))
    return text.replace("\\!", "").replace("{,}", ",")


def _plain_numbers(text: str) -> str:
    """Text with LaTeX's numbers written plainly: ``1\\frac{1}{2}`` is ``3/2``."""

    def quotient(match: re.Match) -> str:
        whole, top, bottom = match.groups()
        return f"{int(whole) * int(bottom) + int(top) if whole else top}/{bottom}"

    return _LATEX_FRACTION.sub(quotient, _latex_plain(text))


def _fraction(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else, or None."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = _plain_numbers(text).strip()
    if not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    divisor = Fraction(bottom) if bottom else Fraction(1)
    return Fraction(top) / divisor if divisor else None


def _text(answer: str) -> str:
    """An answer without the marks around it: dollar signs, LaTeX text commands, spaces, a full stop."""
    answer = TEXT_COMMAND.sub(r"\1", answer.replace("\\!", "").strip())
    answer = answer.removesuffix(".").strip()
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$")
    return " ".join(answer.split())


def _gold_answer(gold: str | float) -> str:
    """A gold answer as text; the content of its box if it is boxed, the part after "####" if it has one."""
    marked = marked_answer(str(gold))
    return str(gold).strip() if marked is None else marked


def is_words(gold: str | float) -> bool:
    """Whether a gold answer is words, not mathematics: "Cairo", ``\\text{two lines}``, "no".

    It holds letters, spaces and punctuation alone, and a word: two letters or more with a vowel (three beside a
    hyphen, which may be a minus), four or more without one, or two of another alphabet. "xy", "CD" and "x" are
    products and names of mathematics.
    """
    text = _text(_gold_answer(gold))
    least = 3 if "-" in text else 2
    return _LETTERS_ONLY.fullmatch(text) is not None and any(
        len(word) >= 4 or not word.isascii() or (len(word) >= least and not set("aeiou").isdisjoint(word.lower()))
        for word in _WORD.findall(text)
    )


def _grade_text(completion: str, gold: str | float, fold: Callable[[str], str]) -> float:
    marked = marked_answer(completion)
    return float(fold(_text(completion if marked is None else marked)) == fold(_text(_gold_answer(gold))))


@functools.cache
def _math_verify() -> Any:
    import math_verify

    # it warns, once a process, that its own timeouts (SIGALRM, main thread only) are off; that is meant
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


def _depth(text: str) -> int:
    """How deep its brackets nest."""
    steps = ((char in "([{") - (char in ")]}") for char in text)
    return max(itertools.accumulate(steps), default=0)


@functools.lru_cache(maxsize=1024)  # a gold is read once for all samples of its prompt
def _parse(answer: str) -> tuple:
    """math-verify's readings of an answer that are mathematics; () if there is none or it is too large."""
    if len(answer) > MAX_ANSWER_CHARS:
        return ()
    answer = _TRAILING.sub("", answer.strip().strip("$"))
    answer = re.sub(r"\s*([-+*/=])\s*", r"\1", _latex_plain(answer))
    if not answer or _depth(answer) > MAX_DEPTH:
        return ()
    readings = _math_verify().parse(f"\\boxed{{{answer}}}", fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(reading for reading in readings if _log2_bound(reading) <= MAX_BITS)


@functools.lru_cache(maxsize=4096)  # samples of one prompt often agree
def _equal(answer: str, gold: str) -> bool:
    readings = _parse(answer)
    gold_readings = _parse(gold) if readings else ()
    return any(
        _math_verify().verify(gold_reading, reading, timeout_seconds=None)
        for gold_reading, reading in itertools.product(gold_readings, readings)
        if not _differ(gold_reading, reading)
    )


def _differ(a: Any, b: Any) -> bool:
    """Whether two readings are for certain unequal: exact expressions of unlike values at one point.

    math-verify would find the same by simplifying their difference, in tens of times the time.
    """
    import sympy

    inexact = (sympy.Float, sympy.UnevaluatedExpr)  # decimals are compared rounded, and percent with numbers
    for expr in (a, b):
        if not isinstance(expr, sympy.Expr) or isinstance(expr, sympy.Symbol) or expr.has(*inexact):
            return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Rational(sympy.prime(10 + i), 31) for i, symbol in enumerate(symbols)}
    try:
        x, y = (complex(expr.subs(point).evalf()) for expr in (a, b))
    except Exception:  # sympy raises anything; where it has no value there, math-verify decides
        return False
    return cmath.isfinite(x) and cmath.isfinite(y) and abs(x - y) > 1e-6 * max(1.0, abs(x), abs(y))


def _log2_bound(expr: Any) -> float:
    """An upper bound on log2 of the largest number that evaluating an unevaluated expression meets."""
    import sympy

    if isinstance(expr, sympy.MatrixBase):
        return max((_log2_bound(entry) for entry in expr.flat()), default=0.0)
    if isinstance(expr, sympy.Rational):
        return float(max(abs(expr.p).bit_length(), expr.q.bit_length()))
    bounds = [_log2_bound(arg) for arg in expr.args]
    if not bounds:
        return 2.0  # a symbol, or a constant like pi
    if isinstance(expr, (sympy.Pow, sympy.factorial, sympy.factorial2, sympy.binomial)):
        # b**e has log2(b) * e bits; n! and a binomial coefficient of n have at most log2(n) * n
        power = bounds[1] if isinstance(expr, sympy.Pow) else bounds[0]
        return max(*bounds, bounds[0] * 2.0**power) if power < 64 else math.inf
    return sum(bounds) if isinstance(expr, sympy.Mul) else max(bounds) + math.log2(len(bounds))


def warm_up() -> None:
    """Import math-verify and fill its parser's tables, about a second of CPU, once for all later gradings."""
    for answer in (r"\frac{1}{6}", r"3\sqrt{2}", "(1, 2)", r"x^2+1", r"\{1, 2\}", r"10^\circ"):
        _equal(answer, answer + "+0")


_RELATION = re.compile(r"[\s$]*(?:\\(?:neq?|not|geq?|gt|leq?|lt)(?![a-zA-Z])|[<>≠≥≤])")


def grade_math(completion: str, gold: str | float) -> float:
    """1.0 if the completion's answer equals the gold answer as mathematics, else 0.0.

    Args:
        completion: text; its answer is what :func:`extract_answer` finds: what it marks (box, answer tag or "####"),
            else its last number.
        gold: the right answer, as LaTeX, plain text or a number, with or without ``\\boxed{}``.

    A gold answer that :func:`is_words` is compared as text instead, whatever the case, with what the completion marks,
    else with all of it.

    Equal texts and equal plain numbers are decided at once; the rest by math-verify, without its timeouts
    (they need the main thread). An answer longer than ``MAX_ANSWER_CHARS``, nested deeper than
    ``MAX_DEPTH`` or with a number of more than ``MAX_BITS`` bits scores 0.0 uncompared. Others may still take
    long: grade model output in the pool.
    """
    if is_words(gold):
        return _grade_text(completion, gold, str.casefold)
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    gold = _gold_answer(gold)
    if _text(answer) == _text(gold):
        return 1.0
    if _RELATION.match(answer) and not _RELATION.match(gold):
        return 0.0  # "\\neq 4" and "> 4", of which math-verify sees the 4
    number, gold_number = _fraction(_text(answer)), _fraction(_text(gold))
    if number is not None and gold_number is not None:
        if number == gold_number:
            return 1.0
        if number.denominator == gold_number.denominator == 1:
            return 0.0
    return float(_equal(answer, gold))


def gold_parses(gold: str | float) -> bool:
    """Whether a gold answer can be graded by :func:`grade_math`: words, or mathematics of a sane size."""
    if is_words(gold):
        return True
    gold = _gold_answer(gold)
    return _fraction(_text(gold)) is not None or bool(_parse(gold))


def drop_unparsable(examples: list[dict]) -> tuple[list[dict], list[int]]:
    """Examples whose "answer" :func:`gold_parses`, and the indices of those removed.

    To be called when the data is built: no completion could ever score on such a row.
    """
    bad = [index for index, example in enumerate(examples) if not gold_parses(example["answer"])]
    removed = set(bad)
    return [example for index, example in enumerate(examples) if index not in removed], bad


def grade_exact(completion: str, gold: str) -> float:
    """1.0 if the answer's text is the gold's text, else 0.0; case counts.

    The answer is what the completion marks (box, answer tag or "####"), else the whole completion. Outer
    spaces, runs of spaces, dollar signs, LaTeX text commands and a final full stop do not count.
    """
    return _grade_text(completion, gold, str)


def _number(answer: str) -> Fraction | None:
    """The last number in an answer."""
    numbers = _NUMBER.findall(_plain_numbers(answer)) if len(answer) <= MAX_ANSWER_CHARS else []
    return _fraction(numbers[-1]) if numbers else None


def holds_number(gold: str | float) -> bool:
    """Whether a gold answer can be graded by :func:`grade_numeric`."""
    return _number(_gold_answer(gold)) is not None


def grade_numeric(completion: str, gold: str | float, *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> float:
    """1.0 if the last number of the completion's answer equals the gold number, else 0.0.

    The answer is what the completion marks (box, answer tag or "####"), else its last number.
    |answer - gold| <= max(rel_tol * |gold|, abs_tol), in exact arithmetic: "0.5" and "1/2" are equal.
    Units, currency and percent signs around the number are passed over.

    Raises:
        ValueError: the gold holds no number.
    """
    gold_number = _number(_gold_answer(gold))
    if gold_number is None:
        raise ValueError(f"gold answer {gold!r} holds no number: use another grader or drop the row")
    answer = extract_answer(completion)
    number = None if answer is None else _number(answer)
    if number is None:
        return 0.0
    allowed = max(Fraction(rel_tol) * abs(gold_number), Fraction(abs_tol))
    return float(abs(number - gold_number) <= allowed)


def format_reward(completion: str, *, prompt_end: str = "", tags: tuple[str, ...] = ("think", "answer")) -> float:
    """1.0 if the completion is ``<tag>...</tag>`` for each of ``tags`` in order and nothing else, else 0.0.

    Args:
        prompt_end: the end of the rendered prompt. Chat templates of reasoning models write the first
            opening tag themselves; the completion then starts inside it, and the tag counts as present.
        tags: names without brackets; each must open and close exactly once, with something inside.
    """
    opening = f"<{tags[0]}>"
    text = opening + completion if prompt_end.rstrip().endswith(opening) else completion
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    blocks = r"\s*".join(rf"<{re.escape(tag)}>(?!\s*</).*?</{re.escape(tag)}>" for tag in tags)
    return float(re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL) is not None)
