"""What a run says on the terminal: tables at its start and end, a line a step, samples, a progress bar."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import rich.cells
import rich.console
import rich.progress
import rich.text

from rljax.metrics import Clock, plain, writes

# Columns of a step line: title, width, and metric with its format; None where the line is given the value.
STEP_COLUMNS = (
    ("step", 6, None),
    ("reward", 7, ("train/reward_mean", "z.3f")),
    ("effective", 9, ("cero/effective_prompt_ratio", ".0%")),
    ("budget", 7, None),
    ("tokens/s", 8, ("rollouts/tokens_per_s", ",.0f")),
    ("loss", 9, ("train/loss", "z.3g")),
    ("grad norm", 9, ("train/grad_norm", ".3g")),
    ("time left", 9, None),
)
EVALUATION_METRICS = ("eval/accuracy", "eval/avg_at_k", "eval/pass_at_k", "eval/maj_at_k")
HEADER_EVERY = 20  # step lines
WINDOW = 20  # steps over which the time left is estimated
PLAIN_WIDTH = 80  # columns of the table of samples where stdout is no terminal


class Console(contextlib.AbstractContextManager):
    """The run's words on stdout: tables at start and end, a line a step and a progress bar under them.

    Where stdout is no terminal (a file, a pipe, a notebook) there is no bar and no control code, only lines.
    Says nothing on processes other than 0; build it after jax.distributed is initialized. Use it as a context
    manager: an exception then takes the bar off the terminal.

    Args:
        file: where to write; default sys.stdout.
        clock: what time it is.
    """

    def __init__(self, file: TextIO | None = None, clock: Clock = time.monotonic):
        out = sys.stdout if file is None else file
        self._live = out.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self._quiet = not writes()
        self._clock = clock
        self._rich = rich.console.Console(
            file=out,
            force_terminal=self._live,  # not by environment variables
            force_jupyter=False,
            color_system="auto" if self._live else None,
        )
        self._progress: rich.progress.Progress | None = None
        self._points: collections.deque[tuple[float, float]] = collections.deque(maxlen=WINDOW)
        self._lines = 0  # of steps
        self._since_header = 0
        self._step = 0

    def start(self, title: str, rows: Sequence[tuple[str, str]], fraction: float = 0.0) -> None:
        """Prints the start-up table and shows the bar. `fraction` of the run was done before, by resume."""
        if self._quiet:
            return
        self._print(title, style="bold")
        self._table(rows)
        self._points.append((self._clock(), fraction))
        if self._live:
            bar = rich.progress.BarColumn(bar_width=None)
            columns = ("{task.description}", bar, "{task.fields[status]}")
            self._progress = rich.progress.Progress(
                *columns, console=self._rich, transient=True, expand=True, refresh_per_second=4
            )
            self._progress.add_task("starting", total=None, status="")  # pulses until the first step is done
            self._progress.start()

    def stage(self, name: str) -> None:
        """Shows on the bar what the run is at: a stage of its next step."""
        if self._progress is not None:
            before = f"step {self._step + 1}" if self._lines else "starting"
            self._progress.update(self._progress.task_ids[0], description=f"{before} {name:7}", refresh=True)

    def step(self, step: int, total_fraction: float, metrics: Mapping[str, Any]) -> None:
        """Prints the line of a step; `total_fraction` in [0, 1] is the share of the run's budget spent."""
        if self._quiet:
            return
        left = _duration(self._seconds_left(total_fraction))
        cells = {"step": str(step), "budget": f"{total_fraction:.1%}", "time left": left}
        for title, _, metric in STEP_COLUMNS:
            if metric is not None:
                cells[title] = _number(metric[0], metrics.get(metric[0]), metric[1])
        if self._since_header % HEADER_EVERY == 0:
            self._print("  ".join(title.rjust(width) for title, width, _ in STEP_COLUMNS), style="bold")
        self._since_header += 1
        self._lines += 1
        self._step = step
        self._print("  ".join(cells[title].rjust(width) for title, width, _ in STEP_COLUMNS))
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                description=f"step {step}",
                total=1.0,
                completed=total_fraction,
                status=f"{total_fraction:.0%} of the budget, {cells['tokens/s']} tokens/s, {left} left",
            )

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Prints rollouts (records.of_rollouts), a line each: prompt, completion, reward, kept, accepted share.

        The share is the mean probability of a token to be accepted; "-" where there is none, and without a column
        where no row has one. Long texts lose their middle. Nothing is printed of no samples.
        """
        if self._quiet or not samples:
            return
        shares = [_mean(sample.get("acceptance")) for sample in samples]
        with_share = any(share is not None for share in shares)
        numbers = [("reward", 7), ("kept", 4), *([("accepted", 8)] if with_share else [])]
        room = (self._rich.width if self._live else PLAIN_WIDTH) - sum(width + 2 for _, width in numbers) - 2
        widths = room * 2 // 5, room - room * 2 // 5
        rows = [["prompt", "completion", *(title for title, _ in numbers)]]
        for sample, share in zip(samples, shares, strict=True):
            row = [_one_line(sample["prompt"]), _one_line("".join(sample["tokens"]))]
            row += [_number("reward", sample["reward"], "z.3g"), "yes" if sample["kept"] else "no"]
            rows.append([*row, *(["-" if share is None else f"{share:.0%}"] if with_share else [])])
        self._print("")
        self._print(f"samples of step {step}")
        for row in rows:
            texts = [_fit(text, width) for text, width in zip(row, widths, strict=False)]
            cells = [text.rjust(width) for text, (_, width) in zip(row[2:], numbers, strict=True)]
            self._print("  ".join([*texts, *cells]), style="bold" if row is rows[0] else "")
        self._print("")

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints the line of an evaluation made after `step` training steps; nothing where the metrics hold none."""
        if self._quiet or not any(name in metrics for name in EVALUATION_METRICS):
            return
        titles = {name: name.removeprefix("eval/").replace("_at_", "@") for name in EVALUATION_METRICS}
        parts = [f"{titles[name]} {_number(name, metrics[name], 'z.3f')}" for name in titles if name in metrics]
        self._print(f"eval at step {step}: {', '.join(parts)}", style="cyan")

    def say(self, text: str, style: str = "") -> None:
        """Prints a line."""
        if not self._quiet:
            self._print(text, style=style)

    def table(self, rows: Sequence[Sequence[str]], titles: Sequence[str] = ()) -> None:
        """Prints aligned columns, under titles if there are any."""
        if not self._quiet:
            self._table(rows, titles)

    def warn(self, *texts: str) -> None:
        """Prints warnings among the lines."""
        for text in () if self._quiet else texts:
            self._print(f"warning: {text}", style="yellow")

    def finish(
        self,
        rows: Sequence[tuple[str, Any, Any]],
        stage_seconds: Mapping[str, float],
        folder: str | os.PathLike,
    ) -> None:
        """Takes the bar off; prints (name, before, after) rows, the time by stage, and the run folder's path.

        Numbers among `rows` are shown with three decimals, strings as they are.
        """
        self.close()
        if self._quiet:
            return
        cells = [[x if isinstance(x, str) else _number(row[0], x, "z.3f") for x in row] for row in rows]
        total = math.fsum(stage_seconds.values())
        times = [*stage_seconds.items(), ("all", total)]
        shares = [(stage, f"{s:,.1f}", f"{s / total:.0%}" if total > 0 else "-") for stage, s in times]
        self._print("")
        self._table(cells, titles=("", "before", "after"))
        self._table(shares, titles=("stage", "seconds", "share"))
        self._print(f"run folder: {os.fspath(folder)}")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar off the terminal; lines may still follow."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, line: str, style: str = "") -> None:
        self._rich.print(rich.text.Text(line, style=style), soft_wrap=True)

    def _table(self, rows: Sequence[Sequence[str]], titles: Sequence[str] = ()) -> None:
        """Aligned columns, numbers (those under a title) to the right; cells are never cut or folded."""
        lines = [titles, *rows] if titles else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [cell.rjust(w) if titles else cell.ljust(w) for cell, w in zip(line, widths, strict=True)]
            cells[0] = line[0].ljust(widths[0])
            self._print("  ".join(cells).rstrip(), style="bold" if line is titles else "")
        self._print("")

    def _seconds_left(self, fraction: float) -> float | None:
        """Remaining fraction / rate over the window; None where no rate is known.

        The first step compiles and does not count: the window begins at its end.
        """
        if not self._lines:
            self._points.clear()
        self._points.append((self._clock(), fraction))
        (start, before), (now, _) = self._points[0], self._points[-1]
        return (now - start) * (1 - fraction) / (fraction - before) if fraction > before else None


def _number(name: str, value: Any, form: str) -> str:
    number = plain(name, value)
    return "-" if number is None else format(number, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _mean(values: Sequence[float] | None) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _one_line(text: str) -> str:
    """The text without what moves a cursor: a model's output may hold any control code."""
    return "".join("↵" if c == "\n" else c if c.isprintable() else "·" for c in text)


def _fit(text: str, width: int) -> str:
    """The text in so many columns of a terminal: padded, or with an ellipsis for its middle."""
    if rich.cells.cell_len(text) <= width:
        return rich.cells.set_cell_size(text, width)
    head = (width - 1) // 3
    end = rich.cells.set_cell_size(text[::-1], width - 1 - head)[::-1]
    return f"{rich.cells.set_cell_size(text, head)}…{end}"
