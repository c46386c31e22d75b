"""What a run leaves behind: metrics.jsonl, TensorBoard events, summary.json.

Every process calls everything with the same values; only process 0 writes. What is gated by process is I/O
alone: the files' values are turned into plain numbers before the gate, on every process.

Metric names are flat, `part/name`: `train/reward_mean`, `time/rollout_s`, `eval/accuracy`. A value is a
number, a 0-d array, a bool, a str or None. NaN and infinities become null: JSON has no others.
"""

from __future__ import annotations

import contextlib
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
Clock = Callable[[], float]  # seconds, monotonic


def writes() -> bool:
    """Whether this process does the run's I/O: process 0 of jax.distributed."""
    return jax.process_index() == 0


# ---- files


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends one JSON object a step to folder/metrics.jsonl, and its numbers to TensorBoard event files.

    Args:
        folder: the run folder, made if missing.
        resume_step: the step that the run was restored to. Lines and events of later steps are removed, so
            that no step stands twice, and a half-written last line. None, a run from its start, removes all.

    Usable as a context manager, which closes it. Raises ValueError where a line of an existing metrics.jsonl,
    other than a half-written last one, is no metrics object.
    """

    def __init__(self, folder: str | os.PathLike, resume_step: int | None = None):
        self._path = pathlib.Path(folder) / METRICS_FILE
        self._last_step = -1 if resume_step is None else operator.index(resume_step)
        self._file: TextIO | None = None
        self._events: tensorboardX.SummaryWriter | None = None
        if not writes():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            kept = [line for line in read_metrics(folder) if line["step"] <= self._last_step]
            _replace(self._path, "".join(_json_line(line) for line in kept))
        self._file = open(self._path, "a", encoding="utf-8")
        # tensorboardX names an event file by the second and overwrites one of the same name.
        self._events = tensorboardX.SummaryWriter(
            str(self._path.parent), purge_step=self._last_step + 1, filename_suffix=f".{time.time_ns()}"
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the one line of `step`, flushed; training and evaluation metrics of a step come in one dict.

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
        if self._file is None or self._events is None:
            return
        self._file.write(_json_line({"step": step, **values}))
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None and self._events is not None:
            self._file.close()
            self._events.close()


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects of folder/metrics.jsonl in order, without a half-written last line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another line is no JSON object with an integer "step"; names the file and the line.
    """
    path = pathlib.Path(folder) / METRICS_FILE
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            operator.index(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # no line end: cut off by a kill; or the empty rest after the last line
                break
            raise ValueError(f"{path}, line {number} is no metrics object: {line[:80]!r}") from error
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
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(_to_json(METRICS_FILE, record), allow_nan=False) + "\n"


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
    """

    def __init__(self, seconds: Mapping[str, float] | None = None, clock: Clock = time.monotonic):
        self._clock = clock
        self._total = dict(seconds) if seconds is not None else {}
        self._lap: dict[str, float] = {}
        self._lap_start = clock()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if stage == "step":
            raise ValueError('a stage cannot be named "step": time/step_s is the whole step')
        start = self._clock()
        try:
            yield
        finally:
            took = self._clock() - start
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
