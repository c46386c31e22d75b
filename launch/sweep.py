"""Searches over config keys and seeds: many runs, a table, a plot and the best config.

    python launch/sweep.py configs/sweeps/learning_rate.py --jobs=2

The sweep file is Python, with these names and no other capitals; configs/sweeps/learning_rate.py is one:

    CONFIG = "configs/cero.py:tiny"     # what all runs start from, as --config of rljax.main
    GRID = {                            # every combination of the values; the last key changes fastest
        "learner.learning_rate": [1e-4, 3e-4, 1e-3],
        ("rollout.samples", "rollout.slots"): [(8, 8), (16, 16)],   # keys that change together
    }
    RANDOM = {                          # or, in GRID's place: TRIALS different draws
        "learner.learning_rate": ("log", 1e-5, 1e-3),               # uniform in the logarithm
        "loss.clip_low": ("uniform", 0.1, 0.3),
        "learner.minibatches": ("int", 1, 4),                       # both ends included
        "loss.aggregate": ("choice", ["token", "sequence"]),
    }
    TRIALS = 8
    DRAW_SEED = 0                       # of the draws (default 0); more trials keep the earlier ones
    SEEDS = [0, 1, 2]                   # each setting runs once a seed (default [0])
    METRIC = "accuracy"                 # that the best has most of: accuracy (greedy; default) | avg_at_k | gain
    FIXED = {"budget.rollouts": 40_960} # values for all runs; --config.KEY=VALUE on the command line does the same

Every run has a folder under --workdir, named after its values and its seed. Start the same command again after an
interruption: finished runs are skipped, begun ones resume, failed ones (failure.json says why) are tried again. The
results so far are in sweep.json and sweep.html there, the best setting first: the one with the most finished seeds,
and of those the largest mean. Exit status: 0 all runs finished; 1 some did not; 2 refused, nothing was started;
75 or 130 stopped by SIGTERM or Ctrl-C, the same command goes on. No jax here: the sweep itself starts at once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import rich.console
import rich.table

from rljax import config as config_lib
from rljax import main as main_lib
from rljax import preemption, sweeps
from rljax.config import ConfigError
from rljax.report import sweep as sweep_page
from rljax.sweeps import Estimate, Point, Row, Spec

PROGRAM = (sys.executable, *sweeps.PROGRAM)
PREEMPTED = preemption.EXIT_STATUS  # of a run, and of the sweep itself, that is to be started again
MOST_RESTARTS = 20  # of one run, after exit status 75
# Keys that may differ between the tries of a run: it would be measured alike.
MAY_DIFFER = tuple(key for key in config_lib.MAY_DIFFER if not key.startswith("eval."))
LENGTH = ("budget.rollouts", "budget.epochs")
POLL_S = 0.1
GRACE_S = 120.0  # after SIGTERM, until runs are killed: time to save a checkpoint
CORES_A_RUN, GIB_A_RUN = 2, 4.0  # of --jobs=0, without an accelerator
TPU = (pathlib.Path("/dev/accel0"), pathlib.Path("/dev/vfio/0"))  # a host's chips belong to one process
TITLES = {"accuracy": "greedy accuracy", "avg_at_k": "avg@k", "gain": "gain", "seconds": "seconds"}


def main(argv: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Runs the command line and returns its exit status. program: what the runs' arguments are given to."""
    options, rest = _parser().parse_known_args(list(argv[1:]))
    try:
        return _sweep(options, rest, program)
    except (ValueError, OSError) as error:  # a ConfigError is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while nothing runs; while runs do, Runs takes the signal
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="python launch/sweep.py FILE.py [--workdir=DIR] [--jobs=N] [--config.KEY=VALUE]"
        " [--print | --point=K | --report]",
    )  # fmt: skip
    parser.add_argument("file", type=pathlib.Path, help="the sweep file")
    parser.add_argument("--workdir", type=pathlib.Path, help="folder of the runs' folders (default: runs/sweep-FILE)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time; 0: as many as cores, memory and GPUs allow (default: 1)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print the commands of unfinished runs, one a line, only")
    what.add_argument("--point", type=int, metavar="K", help="only run number K, from 0: a task of a scheduler's array")
    what.add_argument(
        "--report", action="store_true", help="start nothing; table, sweep.json, sweep.html of what is there"
    )
    return parser


def _sweep(options: argparse.Namespace, rest: Sequence[str], program: Sequence[str]) -> int:
    wrong = [arg for arg in rest if not re.match(r"--config\.[^=]+=", arg)]
    if wrong:
        raise ConfigError(f"unknown argument {wrong[0]!r}; values for all runs are given as --config.KEY=VALUE")
    spec = sweeps.read(options.file, rest)
    folder = options.workdir if options.workdir is not None else pathlib.Path("runs") / f"sweep-{options.file.stem}"
    points = sweeps.points(spec)
    check(points, folder)
    chosen = points if options.point is None else [p for p in points if p.number == options.point]
    if not chosen:
        raise ConfigError(f"--point={options.point} is no run of this sweep; it has {len(points)}, from 0")
    todo = [point for point in chosen if sweeps.measures(folder / point.name) is None]
    if options.print:
        for point in todo:
            print(sweeps.line(point.args, f"--workdir={folder / point.name}"))
        return 0
    stopped = None
    if options.report:
        if not folder.is_dir():
            raise ConfigError(f"--workdir={folder} does not exist; name the folder of a sweep that was started")
    else:
        _say(f"{folder}: {len(chosen)} of {len(points)} runs, {len(chosen) - len(todo)} of them finished before")
        if todo:
            devices = gpus(os.environ)
            stopped = Runs(folder, program, at_a_time(options.jobs, len(todo), devices), devices).all(todo)
    rows = write(spec, points, folder)
    if options.point is None:
        _show(spec, rows, folder)
    if stopped is not None:
        _say("stopped; the same command goes on from here")
        return 130 if stopped == signal.SIGINT else PREEMPTED
    return 1 if any(sweeps.measures(folder / point.name) is None for point in chosen) else 0


def check(points: Sequence[Point], folder: pathlib.Path) -> None:
    """Raises ConfigError where a point's config is refused, or its folder holds a run of another config."""
    for point in points:
        try:
            config = main_lib.parse(["sweep", *point.args]).config
            assert config is not None  # of mode train
            sweeps.check_arrival(point, config)
        except ConfigError as error:
            raise ConfigError(f"run {point.number} of the sweep, {point.name}: {error}") from error
        where = folder / point.name
        if (where / "metrics.jsonl").exists() and (where / "config.json").exists():
            saved = sweeps.read_json(where / "config.json")
            found = config_lib.differences(config, saved, ignore=MAY_DIFFER)
            # differences() lets a run be prolonged; here it would be taken for finished.
            before, now = config_lib.flatten(saved), config_lib.flat(config)
            found |= {key: (before.get(key), now[key]) for key in LENGTH if before.get(key) != now[key]}
            if found:
                listed = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in found.items())
                raise ConfigError(f"{where} holds a run of another config: {listed}. Name another --workdir")


# ---- how many at a time


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; none where jax is kept to other platforms."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not re.search("cuda|gpu", platforms):
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    files = (re.fullmatch(r"nvidia(\d+)", path.name) for path in pathlib.Path("/dev").glob("nvidia*"))
    return sorted((match.group(1) for match in files if match), key=int)


def at_a_time(jobs: int, runs: int, devices: Sequence[str]) -> int:
    """How many of the runs go on at once. Raises ConfigError where --jobs asks for more than there are GPUs."""
    if jobs < 0:
        raise ConfigError(f"--jobs={jobs} is less than 0; give a number of runs, or 0 for as many as fit")
    if devices and jobs > len(devices):
        raise ConfigError(f"--jobs={jobs} is more than the {len(devices)} GPUs here; give at most that, or 0")
    if jobs == 0:
        jobs = 1 if any(path.exists() for path in TPU) else fitting(devices, available_cores(), available_gib())
    return min(jobs, runs)


def fitting(devices: Sequence[str], cores: int, gib: float) -> int:
    """Runs that fit: one a GPU; without any, by CORES_A_RUN and GIB_A_RUN; at least 1."""
    return len(devices) if devices else max(1, min(cores // CORES_A_RUN, int(gib / GIB_A_RUN)))


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    cores = os.cpu_count()
    return 1 if cores is None else cores


def available_gib() -> float:
    """Memory that is free for new processes; all that the machine has where it does not say."""
    file = pathlib.Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.is_file() else None
    free = int(found.group(1)) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")  # a container's
    bound = limit.read_text().strip() if limit.is_file() else "max"
    return min(free, int(bound) if bound.isdigit() else free) / 2**30


# ---- running


@dataclasses.dataclass
class Run:
    """A run under way. log: its stderr.txt, locked as long as the run lives; said: where this try's part begins."""

    point: Point
    slot: int
    log: BinaryIO
    process: subprocess.Popen
    said: int
    restarts: int = 0


class Runs:
    """Runs points as local processes, `jobs` at a time, each with its share of the GPUs."""

    def __init__(self, folder: pathlib.Path, program: Sequence[str], jobs: int, devices: Sequence[str]):
        self._folder, self._program, self._jobs, self._devices = folder, tuple(program), jobs, devices
        self._running: list[Run] = []

    def all(self, points: Sequence[Point]) -> int | None:
        """Runs the points; returns the number of the signal that stopped it, if one did.

        The first SIGINT, SIGTERM or SIGHUP asks the runs to stop; a second one, or GRACE_S, kills them.
        """
        waiting, free, deadline = collections.deque(points), list(range(self._jobs)), None
        with _signals() as signals:
            try:
                while self._running or (waiting and not signals):
                    while waiting and free and not signals:
                        self._begin(waiting.popleft(), free)
                    if signals and deadline is None:
                        deadline = time.monotonic() + GRACE_S
                        self._ask_to_stop()
                    if deadline is not None and (len(signals) > 1 or time.monotonic() > deadline):
                        self._kill()
                    for run in [run for run in self._running if run.process.poll() is not None]:
                        self._end(run, free, stopping=bool(signals))
                    time.sleep(POLL_S)
            finally:
                self._kill()
        return signals[0] if signals else None

    def _begin(self, point: Point, free: list[int]) -> None:
        folder = self._folder / point.name
        folder.mkdir(parents=True, exist_ok=True)
        log = open(folder / "stderr.txt", "ab")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run inherits it: an orphan of a killed sweep holds it
        except BlockingIOError:
            log.close()
            _say(f"{point.name}: already running in another process, which is left to it")
            return
        (folder / sweeps.FAILURE_FILE).unlink(missing_ok=True)
        slot, said = free.pop(0), log.tell()  # before the run, whose writing moves it
        _say(f"{point.name}: started")
        self._running.append(Run(point, slot, log, self._start(point, slot, log), said))

    def _start(self, point: Point, slot: int, log: BinaryIO) -> subprocess.Popen:
        folder, env = self._folder / point.name, dict(os.environ)
        if self._devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[slot :: self._jobs])
        with open(folder / "stdout.txt", "ab") as out:
            # In a session of its own: Ctrl-C reaches the sweep alone, which then lets the runs save.
            return subprocess.Popen(
                (*self._program, *point.args, f"--workdir={folder}"), env=env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            )  # fmt: skip

    def _end(self, run: Run, free: list[int], *, stopping: bool) -> None:
        """Notes how a process ended: finished, to be started again, stopped, or failed."""
        status, name = run.process.returncode, run.point.name
        if status == PREEMPTED and not stopping and run.restarts < MOST_RESTARTS:
            run.restarts += 1
            _say(f"{name}: preempted, started again")
            run.process = self._start(run.point, run.slot, run.log)
            return
        self._running.remove(run)
        free.append(run.slot)
        run.log.close()
        try:
            found = sweeps.measures(self._folder / name) if status == 0 else None
            error = None if status else "ended without a summary.json"
        except ValueError as broken:
            found, error = None, str(broken)
        if found is not None:
            _say(f"{name}: finished, greedy accuracy {found['accuracy']:.3f}, {found['seconds']:.0f} s")
        elif stopping:
            _say(f"{name}: stopped")
        else:
            self._fail(run, error if error is not None else _why(status, self._folder / name / "stderr.txt", run.said))

    def _fail(self, run: Run, error: str) -> None:
        told = json.dumps({"status": run.process.returncode, "error": error}, indent=2) + "\n"
        write_whole(self._folder / run.point.name / sweeps.FAILURE_FILE, told)
        _say(f"{run.point.name}: failed: {error}")

    def _ask_to_stop(self) -> None:
        _say(f"stopping {len(self._running)} runs; once more kills them")
        for run in self._running:
            run.process.terminate()

    def _kill(self) -> None:
        """Kills runs with the processes that they started."""
        for run in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came to stop this process, in a list that grows."""
    came: list[int] = []
    times: list[float] = []

    def note(number: int, _) -> None:
        times.append(time.monotonic())
        # A scheduler's two SIGTERMs, to the process and to its group, are one.
        if not came or number != signal.SIGTERM or times[-1] - times[0] > preemption.ONE_SIGNAL:
            came.append(number)

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _why(status: int, log: pathlib.Path, start: int) -> str:
    """The last line on stderr since `start`, behind how the process ended."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on stderr")
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{how}: {said[:500]}"


# ---- results


def write(spec: Spec, points: Sequence[Point], folder: pathlib.Path) -> list[Row]:
    """Writes sweep.json and sweep.html of the finished runs into the folder; returns the settings, best first."""
    outcomes = sweeps.outcomes(points, folder)
    rows = sweeps.ranked(outcomes, spec.metric)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "sweep.json", json.dumps(sweeps.record(spec, rows, outcomes), indent=2) + "\n")
    write_whole(folder / "sweep.html", sweep_page.page(spec, rows, outcomes))
    return rows


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file at once: a reader, or another task of an array, meets the old one or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _show(spec: Spec, rows: Sequence[Row], folder: pathlib.Path) -> None:
    """The table of settings and the best command, on stdout."""
    table = rich.table.Table(title="final results, mean ± 95% interval over seeds (of two: ± half their distance)")
    for key in spec.keys:
        table.add_column(key, overflow="fold")
    for title in ("seeds", *TITLES.values()):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [sweeps.text(value) for value in row.setting.values()]
        numbers = [_cell(row.estimates[name], name) if row.estimates else "-" for name in TITLES]
        table.add_row(*cells, f"{row.finished} of {row.planned}", *numbers)
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=160)  # a file or a pipe has no width to keep to
    console.print(table)
    best = sweeps.best(spec, rows)
    _say(f"best by {spec.metric}: {best}" if best is not None else "no run has finished")
    _say(f"plot: {folder / 'sweep.html'}")


def _cell(estimate: Estimate, name: str) -> str:
    form = ",.0f" if name == "seconds" else "z.3f"
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.mean:{form}}" + (f" ± {half:{form}}" if len(estimate.seeds) > 1 else "")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # after SIGHUP there is no terminal, and the runs are still to be stopped
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
