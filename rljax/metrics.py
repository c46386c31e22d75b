"""What a run leaves behind: metrics.jsonl and other files of JSON lines, TensorBoard events, summary.json.

Every process calls everything with the same values; only process 0 writes. What is gated by process is I/O
alone: the files' values are turned into plain numbers before the gate, on every process.

Metric names are flat, `part/name`: `train/reward_mean`, `time/rollout_s`, `eval/accuracy`. A value is a
number, a 0-d array, a bool, a str or None. NaN and infinities become null: JSON has no others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import operator
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
RECORD_FILES = {"rollouts": "rollouts.jsonl", "samples": "samples.jsonl"}  # rljax/records.py
WANDB_FILE = "wandb.json"  # which run of Weights & Biases goes on when this one is resumed
Clock = Callable[[], float]  # seconds, monotonic


def writes() -> bool:
    """Whether this process does the run's I/O: process 0 of jax.distributed."""
    return jax.process_index() == 0


# ---- files


class StepLines:
    """A file of JSON objects, each of a step, appended in order.

    Opened, it loses the lines of steps after `last_step`, so that a resumed run leaves no step twice, and a
    half-written last line; `past` is what stays. Made at the first append. Of process 0.

    Raises ValueError where a line of an existing file, other than a half-written last one, is no such object.
    """

    def __init__(self, path: pathlib.Path, last_step: int):
        self._path = path
        self._file: TextIO | None = None
        self.past: list[dict[str, Any]] = []
        if path.exists():
            self.past = [line for line in read_lines(path) if line["step"] <= last_step]
            _replace(path, "".join(_json_line(path.name, line) for line in self.past))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes the records, flushed."""
        if self._file is None and records:
            self._file = open(self._path, "a", encoding="utf-8")
        if self._file is not None:
            self._file.write("".join(_json_line(self._path.name, record) for record in records))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends one JSON object a step to folder/metrics.jsonl, and its numbers to TensorBoard event files.

    Beside them it appends the records of single prompts and rollouts to RECORD_FILES, and sends the numbers to
    Weights & Biases where it is asked for.

    Args:
        folder: the run folder, made if missing.
        resume_step: the step that the run was restored to. Lines and events of later steps are removed, so
            that no step stands twice, and a half-written last line. None, a run from its start, removes all.
        wandb: what wandb.init is given, such as {"project": "math", "config": {…}}; None is off. A resumed run goes
            on in the same run there, which takes no step twice.

    Attributes:
        past: the lines of metrics.jsonl that a resumed run goes on from; on process 0 only.

    Usable as a context manager, which closes it. Raises ValueError where a line of an existing file, other than a
    half-written last one, is no object of a step.
    """

    def __init__(
        self, folder: str | os.PathLike, resume_step: int | None = None, *, wandb: Mapping[str, Any] | None = None
    ):
        self._last_step = -1 if resume_step is None else operator.index(resume_step)
        self._lines: StepLines | None = None
        self._events: tensorboardX.SummaryWriter | None = None
        self._wandb: Any = None
        self.past: list[dict[str, Any]] = []
        if not writes():
            return
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._lines = StepLines(path / METRICS_FILE, self._last_step)
        self._records = {name: StepLines(path / file, self._last_step) for name, file in RECORD_FILES.items()}
        self.past = self._lines.past
        # tensorboardX names an event file by the second and overwrites one of the same name.
        self._events = tensorboardX.SummaryWriter(
            str(path), purge_step=self._last_step + 1, filename_suffix=f".{time.time_ns()}"
        )
        if wandb is not None:
            self._wandb = _start_wandb(path, wandb, resume_step is not None)

    def write(
        self, step: int, metrics: Mapping[str, Any], records: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    ) -> None:
        """Writes the one line of `step`, flushed; training and evaluation metrics of a step come in one dict.

        records: {"rollouts": […], "samples": […]}, lines of RECORD_FILES without their step; written before the
        line of metrics, so that a step that has this has those.

        Raises:
            ValueError: the step is not after the last one written; a metric is named "step".
            TypeError: a value that is no scalar; names it.
        """
        step = operator.index(step)
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} come after those of step {self._last_step}; "
                f"a step is written once, and in order"
            )
        if "step" in metrics:
            raise ValueError('a metric is named "step"; the step is an argument of its own')
        values = {name: plain(name, value) for name, value in metrics.items()}
        self._last_step = step
        if self._lines is None or self._events is None:
            return
        for name, lines in ({} if records is None else records).items():
            self._records[name].append([{"step": step, **line} for line in lines])
        self._lines.append([{"step": step, **values}])
        numbers = {k: v for k, v in values.items() if isinstance(v, (bool, int, float)) and math.isfinite(v)}
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lines is not None and self._events is not None:
            for lines in (self._lines, *self._records.values()):
                lines.close()
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(folder: pathlib.Path, options: Mapping[str, Any], resumed: bool) -> Any:
    """A run of Weights & Biases: a new one, or of a resumed run that which its folder names."""
    file, before = folder / WANDB_FILE, {}
    if resumed and file.exists():
        before = {"id": json.loads(file.read_text(encoding="utf-8"))["id"], "resume": "allow"}
    run = importlib.import_module("wandb").init(dir=str(folder), **options, **before)
    write_json(file, {"id": run.id})
    return run


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects of folder/metrics.jsonl, as `read_lines` gives them."""
    return read_lines(pathlib.Path(folder) / METRICS_FILE)


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines in order, each of a step, without a half-written last line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another line is no JSON object with an integer "step"; names the file and the line.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            operator.index(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # no line end: cut off by a kill; or the empty rest after the last line
                break
            raise ValueError(f"{path}, line {number} is no {path.stem} object: {line[:80]!r}") from error
        records.append(record)
    return records


def write_summary(folder: str | os.PathLike, summary: Mapping[str, Any]) -> None:
    """Writes folder/summary.json as `write_json` does."""
    write_json(pathlib.Path(folder) / SUMMARY_FILE, summary)


def write_json(path: str | os.PathLike, value: Mapping[str, Any]) -> None:
    """Writes `value` as strictly valid JSON, at once or not at all; on process 0 only.

    Raises TypeError where a leaf is neither a scalar nor None, or a key is no str; names it.
    """
    path = pathlib.Path(path)
    text = json.dumps(_to_json(path.name, value), indent=2, allow_nan=False) + "\n"
    if writes():
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)


def write_lines(path: str | os.PathLike, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records as JSON lines, at once or not at all; on process 0 only."""
    path = pathlib.Path(path)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if writes():
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)


def _replace(path: pathlib.Path, text: str) -> None:
    """Puts `text` in the place of `path` in one step: a reader or a kill meets the old file or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # a lone surrogate, which a task's own text may hold, becomes its JSON escape
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _json_line(file: str, record: Mapping[str, Any]) -> str:
    return json.dumps(_to_json(file, record), allow_nan=False) + "\n"


def _to_json(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; JSON keys must be str")
        return {key: _to_json(f"{name}: {key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(f"{name}[{i}]", item) for i, item in enumerate(value)]
    value = plain(name, value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(name: str, value: Any) -> bool | int | float | str | None:
    """A Python scalar of the same value; waits for a device array."""
    if value is None or isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.ndim == 0:
        scalar = np.asarray(value)
        if scalar.dtype.kind in "biu":
            return scalar.item()
        if jnp.issubdtype(scalar.dtype, jnp.floating):  # bfloat16 included
            return float(scalar)
    shape = f" of shape {np.shape(value)}" if isinstance(value, (np.ndarray, jax.Array)) else ""
    raise TypeError(f"{name} is a {type(value).__name__}{shape}; only scalars can be written")


# ---- time


class Stages:
    """Wall seconds by stage: `with stages("rollout"): ...`. Of one thread; a stage may not be named "step".

    JAX returns before its work is done: a stage that dispatches must also fetch or block on its result, or
    the next stage is charged for it. Nested stages each count their own whole time.

    Args:
        seconds: what earlier parts of a resumed run took, by stage.
        clock: what time it is.
        begun: told the name of each stage as it begins.
    """

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        clock: Clock = time.monotonic,
        begun: Callable[[str], None] | None = None,
    ):
        self._clock = clock
        self._begun = begun
        self._total = dict(seconds) if seconds is not None else {}
        self._lap: dict[str, float] = {}
        self._lap_start = clock()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if stage == "step":
            raise ValueError('a stage cannot be named "step": time/step_s is the whole step')
        if self._begun is not None:
            self._begun(stage)
        start = self._clock()
        try:
            yield
        finally:
            self.add({stage: self._clock() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Counts what another thread took, by stage, to the lap: it passed beside the stages of this one."""
        for stage, took in seconds.items():
            self._total[stage] = self._total.get(stage, 0.0) + took
            self._lap[stage] = self._lap.get(stage, 0.0) + took

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far (`stage_s` of summary.json), in the order in which they first ran."""
        return dict(self._total)

    def lap(self) -> dict[str, float]:
        """`time/STAGE_s` of each stage since the last lap, and `time/step_s`, all that passed since then."""
        now = self._clock()
        times = {f"time/{stage}_s": seconds for stage, seconds in self._lap.items()}
        times["time/step_s"] = now - self._lap_start
        self._lap, self._lap_start = {}, now
        return times
