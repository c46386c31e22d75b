"""Rewards: completions → float32[R], graded in worker processes that can be killed.

A grader meets model output, which may hang it, eat the memory or crash the interpreter, often inside C code
that no exception or thread can stop. Hence processes; rljax/reward_server.py is their side. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from rljax import preemption
from rljax.reward_server import CHUNK, ERROR, TIMEOUT, UNSCORABLE, Grade, Limits

if TYPE_CHECKING:
    from rljax.tokenizer import Tokenizer
    from rljax.types import Prompts, Rollouts

START_SECONDS = 120.0  # for the server to import the grader's modules
STOP_SECONDS = 5.0
POLL_SECONDS = 0.2  # between looks for a SIGTERM while rewards are waited for
SERVER_CODE = "import sys; sys.path[:] = {path!r}; from rljax.reward_server import main; main({fd})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of R completions, and what went wrong.

    rewards: float32[R]; NaN where the row cannot be scored.
    unscorable: rows that are NaN: the grader returned None, NaN or a number beyond ±1e18, or raised.
    errors: those of them where it raised.
    timeouts: rows scored 0.0 because grading went over a limit (CPU, wall clock, memory) or ended its worker
        (a crash).
    first_error: the traceback of one of the errors, or None.
    """

    rewards: np.ndarray
    unscorable: int
    errors: int
    timeouts: int
    first_error: str | None


class RewardPool:
    """Grades completions in a pool of worker processes; a context manager.

    Args:
        grade: ``(completion, example) -> float | None``. cloudpickle carries it: a function of an importable
            module, or one defined in a notebook or script. Its module is imported once, before the workers
            start; what the function imports when it is called counts as time of the item.
        workers: processes that grade.
        cpu_seconds: CPU time of one item; at the limit its worker is killed and the item scores 0.0.
        memory_mb: address space of a worker (Linux only). Beyond it Python raises MemoryError, and the item
            scores 0.0.
        wall_seconds: time on the clock of one item, for graders that wait; None is 10 × cpu_seconds.

    The constructor starts the processes and returns at once; ``ready`` and the first ``submit`` wait for
    them.

    Raises:
        ValueError: a limit that is not positive.
    """

    def __init__(
        self,
        grade: Grade,
        *,
        workers: int,
        cpu_seconds: float,
        memory_mb: int,
        wall_seconds: float | None = None,
    ):
        wall_seconds = 10 * cpu_seconds if wall_seconds is None else wall_seconds
        limits = Limits(workers=workers, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_mb=memory_mb)
        payload = cloudpickle.dumps(grade)
        self._workers = workers
        self._jobs: dict[int, _Job] = {}
        self._submitted = 0
        self._lock = threading.Lock()  # of the jobs and of the link's sending side
        self._reader: threading.Thread | None = None
        self._link, self._server = _start_server()
        # runs once: on close(), when the pool is collected, or when the interpreter exits
        self._stop = weakref.finalize(self, _stop_server, self._link, self._server, self._lock)
        self._link.send((payload, limits))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes and waits for them; open futures raise RuntimeError. May be called twice."""
        self._stop()
        if self._reader is not None:
            self._reader.join()

    def ready(self) -> None:
        """Waits until the workers have started.

        Raises:
            RuntimeError: the pool is closed, or the grader could not be loaded in its process (says why).
        """
        with self._lock:
            if not self._stop.alive:
                raise RuntimeError("the reward pool is closed: make another one")
            if self._reader is not None:
                return
            try:
                answered = self._link.poll(START_SECONDS)
                problem = self._link.recv() if answered else f"no answer in {START_SECONDS} s"
            except (EOFError, OSError):
                problem = f"its process ended with status {self._server.wait()}"
            if problem is None:
                arguments = (self._link, self._jobs, self._lock)
                self._reader = threading.Thread(target=_read, args=arguments, daemon=True, name="reward-pool")
                self._reader.start()
        if problem is not None:
            self.close()
            raise RuntimeError(f"the grader could not be started: {problem}")

    def submit(self, completions: Sequence[str], examples: Sequence[dict]) -> Future[Scores]:
        """Starts grading R completions, each with its example; ``.result()`` waits for their Scores.

        Several submissions may be under way at once; they are graded in order.

        Raises:
            ValueError: the lengths differ.
            RuntimeError: as ``ready``. ``.result()`` raises it if the pool ends before the job does.
        """
        if len(completions) != len(examples):
            raise ValueError(f"{len(completions)} completions, {len(examples)} examples: give one to each")
        self.ready()
        job = _Job(len(completions))
        if len(completions) == 0:
            job.future.set_result(job.scores())
            return job.future
        # four chunks a worker, so that a slow one does not leave the other workers idle
        size = min(CHUNK, math.ceil(len(completions) / (4 * self._workers)))
        chunks = []
        for start in range(0, len(completions), size):
            rows = slice(start, start + size)
            items = (list(completions[rows]), list(examples[rows]))
            chunks.append((start, len(items[0]), pickle.dumps(items, pickle.HIGHEST_PROTOCOL)))
        with self._lock:
            number, self._submitted = self._submitted, self._submitted + 1
            self._jobs[number] = job
            try:
                self._link.send((number, chunks))
            except OSError as error:
                del self._jobs[number]
                raise RuntimeError("the reward pool's server has ended: make another pool") from error
        return job.future

    def score(self, completions: Sequence[str], examples: Sequence[dict]) -> Scores:
        """``submit``, and wait."""
        return self.submit(completions, examples).result()


class _Job:
    """The rows of one submission, filled as its chunks come back."""

    def __init__(self, rows: int):
        self.future: Future[Scores] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.rewards = np.zeros(rows)
        self.outcomes = np.zeros(rows)
        self.left = rows
        self.first_error: str | None = None

    def add(self, start: int, rewards: bytes, outcomes: bytes, error: str | None) -> None:
        values = np.frombuffer(rewards)
        rows = slice(start, start + len(values))
        self.rewards[rows] = values
        self.outcomes[rows] = np.frombuffer(outcomes)
        self.left -= len(values)
        if self.first_error is None:
            self.first_error = error

    def scores(self) -> Scores:
        return Scores(
            rewards=self.rewards.astype(np.float32),
            unscorable=int(np.isin(self.outcomes, (UNSCORABLE, ERROR)).sum()),
            errors=int((self.outcomes == ERROR).sum()),
            timeouts=int((self.outcomes == TIMEOUT).sum()),
            first_error=self.first_error,
        )


def _start_server() -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    # threads of math libraries would not survive the server's forks, and their stacks count as memory
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with theirs, _sigterm_blocked():
        code = SERVER_CODE.format(path=[str(entry) for entry in sys.path], fd=theirs.fileno())
        server = subprocess.Popen(
            [sys.executable, "-u", "-c", code],  # unbuffered: what a grader prints outlives its worker
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches the run alone, which may need rewards to end its step
            env=env,
        )
    return ours, server


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Of a process started inside, SIGTERM waits until its handler stands and it unblocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_server(link: Connection, server: subprocess.Popen, lock: threading.Lock) -> None:
    with lock:
        try:
            link.send(None)
        except OSError:
            pass  # it has ended already
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()  # its workers end with it
        server.wait()


def _read(link: Connection, jobs: dict[int, _Job], lock: threading.Lock) -> None:
    """Fills jobs with results until the server ends; then fails those still open."""
    while True:
        try:
            number, *chunk = link.recv()
        except (EOFError, OSError):
            break
        job = jobs[number]
        job.add(*chunk)
        if job.left == 0:
            del jobs[number]
            job.future.set_result(job.scores())
    with lock:
        link.close()
        lost = list(jobs.values())
        jobs.clear()
    for job in lost:
        job.future.set_exception(RuntimeError("the reward pool was closed, or died, before the job's end"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Which of `count` processes this one is; each scores the prompts whose number modulo `count` is its `index`.

    gather: a value of plain JSON data → every process's, in order; all of them call it.
    """

    index: int
    count: int
    gather: Callable[[Any], list]


ALONE = Share(index=0, count=1, gather=lambda value: [value])


class StreamingScorer:
    """Scores rollouts as their rows end, while others decode; `sampling.generate` calls it between segments.

    pool: where they are graded. tokenizer: for the texts. prompts: whose examples the grader sees. share: of several
    processes that hold the same rollouts.
    """

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer, prompts: Prompts, share: Share = ALONE):
        self._pool, self._tokenizer, self._prompts, self._share = pool, tokenizer, prompts, share
        self._parts: list[tuple[np.ndarray, Future[Scores]]] = []
        self.texts: dict[int, str] = {}  # row → what the grader saw

    def __call__(self, rollouts: Rollouts, rows: np.ndarray) -> None:
        """Submits the rows (numbers in rollouts) that have just ended, of this process's share.

        A tag that the chat template opened for the answer (<think>) stands before the text.
        """
        ids = [rollouts.tokens[row, : rollouts.lengths[row]].tolist() for row in rows]
        groups = rollouts.group[rows].tolist()
        opened = {group: self._tokenizer.prefilled(self._prompts.tokens[group]) for group in set(groups)}
        texts = [opened[group] + self._tokenizer.completion(row) for group, row in zip(groups, ids, strict=True)]
        self.texts.update(zip(rows.tolist(), texts, strict=True))
        own = rows[rollouts.group[rows] % self._share.count == self._share.index]
        examples = [self._prompts.examples[rollouts.group[row]] for row in own]
        self._parts.append((own, self._pool.submit([self.texts[row] for row in own.tolist()], examples)))

    def result(self, num_rows: int) -> Scores:
        """Waits for all num_rows rows; the Scores of all processes in the rollouts' order.

        Raises ValueError if some never came, and preemption.Preempted where a run that watches was told to end.
        """
        everyone = self._share.gather(self._own())
        preemption.check()  # raises where one of them is None
        rewards, seen = np.full(num_rows, np.nan, np.float32), np.zeros(num_rows, int)
        scores = [part for parts in everyone for part in parts]
        for part in scores:
            rewards[part["rows"]] = part["rewards"]
            np.add.at(seen, part["rows"], 1)
        if not (seen == 1).all():
            raise ValueError(
                f"of {num_rows} rollouts {(seen == 0).sum()} were never submitted for scoring and "
                f"{(seen > 1).sum()} more than once; submit each row once"
            )
        return Scores(
            rewards=rewards,
            **{name: sum(part[name] for part in scores) for name in ("unscorable", "errors", "timeouts")},
            first_error=next((part["first_error"] for part in scores if part["first_error"] is not None), None),
        )

    def _own(self) -> list[dict] | None:
        """The Scores of this process's submissions, as plain data; None where it was told to end before they came."""
        for _, part in self._parts:
            while not wait([part], POLL_SECONDS).done:
                if preemption.requested():
                    return None
        scored = [(rows.tolist(), part.result()) for rows, part in self._parts]
        return [{"rows": rows} | dataclasses.asdict(part) | {"rewards": part.rewards.tolist()} for rows, part in scored]
