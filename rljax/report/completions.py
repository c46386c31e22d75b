"""Completions as text: of held-out prompts before and after training, and of rollouts with their acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from rljax.report import records, words
from rljax.report.folders import Group
from rljax.report.sections import name
from rljax.report.words import escape

LONGEST = 4000  # characters of a text that are shown


def completions(groups: Sequence[Group]) -> str:
    """Held-out prompts with their greedy completion before and after, of the first run of each group."""
    out = []
    for i, group in enumerate(groups):
        run = next((run for run in group.runs if records.changes(run)), None)
        if run is None:
            continue
        found = records.changes(run)
        total = sum(map(len, found.values()))
        counts = ", ".join(f"{len(members):,} {kind}" for kind, members in found.items())
        first, last = sorted(run.evals)
        shown = [
            _change(kind, change, first, last)
            for kind, most in records.KINDS_OF_CHANGE.values()
            for change in found[kind][:most]
        ]
        title = f"{name(groups, i)} <small>seed {run.seed}: of {total:,} held-out prompts, {counts}</small>"
        opened = " open" if not out else ""
        out.append(
            f'<details class="group"{opened}><summary>{title}</summary>'
            f'<div class="changes">{"".join(shown)}</div></details>'
        )
    return "".join(out)


def _change(kind: str, change: records.Change, first: int, last: int) -> str:
    example = change.example
    answer = (
        f'<p class="answer">right answer: <code>{escape(example["answer"])}</code></p>' if example.get("answer") else ""
    )
    of = f" · {escape(example['kind'])}" if "kind" in example else ""
    return (
        f'<article class="change"><h3>{kind}{of}</h3>'
        f'<pre class="prompt">{escape(_cut(str(example["prompt"])))}</pre>{answer}'
        f'<div class="pair">{_answer(f"before, step {first:,}", change.before)}'
        f"{_answer(f'after, step {last:,}', change.after)}</div></article>"
    )


def _answer(title: str, answers: list[dict]) -> str:
    greedy, sampled = answers[0], answers[1:]
    right = records.is_right(greedy)
    mark = '<span class="right">✓ right</span>' if right else '<span class="wrong">✗ wrong</span>'
    cut = ", cut at the limit" if greedy["truncated"] else ""
    others = f"; {sum(map(records.is_right, sampled))} of {len(sampled)} samples right" if sampled else ""
    return (
        f'<div class="answered {"good" if right else "bad"}"><p>{title}: {mark}</p>'
        f"<pre>{escape(_cut(greedy['text']))}</pre>"
        f"<p><small>{words.plural(greedy['tokens'], 'token')}{cut}{others}</small></p></div>"
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} more characters)"


def acceptance(groups: Sequence[Group]) -> str:
    """Rollouts of the first and the last recorded step, their tokens shaded by the probability of rejection."""
    out = []
    for i, group in enumerate(groups):
        lines = [line for run in group.runs[:1] for line in run.samples]
        steps = sorted({line["step"] for line in lines})
        chosen = [line for step in dict.fromkeys(steps[:1] + steps[-1:]) for line in lines if line["step"] == step]
        out += [_sample(groups, i, line) for line in chosen[:8]]
    key = (
        '<p class="key">Shading: <span class="token" style="--r:0%">accepted for certain</span> '
        '<span class="token low" style="--r:50%">half the time</span> '
        '<span class="token low" style="--r:100%">always rejected</span>; underlined below one half.</p>'
    )
    return f'{key}<div class="changes">{"".join(out)}</div>' if out else ""


def _sample(groups: Sequence[Group], i: int, line: dict) -> str:
    shares = line.get("acceptance")
    pieces = [escape(piece) for piece in line["tokens"]]
    if shares is not None:
        pieces = [
            f'<span class="token{" low" if a < 0.5 else ""}" style="--r:{100 * (1 - a):.0f}%" '
            f'title="accepted with probability {a:.2f}">{piece}</span>'
            for piece, a in zip(pieces, shares, strict=True)
        ]
    reward = "no reward" if line["reward"] is None else f"reward {words.number(line['reward'])}"
    mean = "" if not shares else f", mean acceptance {words.share(sum(shares) / len(shares))}"
    return (
        f'<article class="change"><h3>{name(groups, i)} <small>step {line["step"]:,}</small></h3>'
        f'<pre class="prompt">{escape(_cut(line["prompt"]))}</pre><pre class="tokens">{"".join(pieces)}</pre>'
        f"<p><small>{reward}, {'kept' if line['kept'] else 'not kept'}{mean}</small></p></article>"
    )
