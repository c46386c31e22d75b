"""What a run says on the terminal: tables at its start and end, a line a step, a progress bar."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

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
        self._lines = 0

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

    def step(self, step: int, total_fraction: float, metrics: Mapping[str, Any]) -> None:
        """Prints the line of a step; `total_fraction` in [0, 1] is the share of the run's budget spent."""
        if self._quiet:
            return
        left = _duration(self._seconds_left(total_fraction))
        cells = {"step": str(step), "budget": f"{total_fraction:.1%}", "time left": left}
        for title, _, metric in STEP_COLUMNS:
            if metric is not None:
                cells[title] = _number(metric[0], metrics.get(metric[0]), metric[1])
        if self._lines % HEADER_EVERY == 0:
            self._print("  ".join(title.rjust(width) for title, width, _ in STEP_COLUMNS), style="bold")
        self._lines += 1
        self._print("  ".join(cells[title].rjust(width) for title, width, _ in STEP_COLUMNS))
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                description=f"step {step}",
                total=1.0,
                completed=total_fraction,
                status=f"reward {cells['reward']} eff. {cells['effective']} budget {total_fraction:.0%} "
                f"{cells['tokens/s']} tok/s {left} left",
            )

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints the line of an evaluation made after `step` training steps."""
        if self._quiet:
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

    def warn(self, text: str) -> None:
        """Prints a warning among the lines."""
        if not self._quiet:
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

        The first step compiles: its start is forgotten as soon as there is a second step.
        """
        if len(self._points) == 2 and self._lines == 1:
            self._points.popleft()
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
