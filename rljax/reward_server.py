"""The processes behind rljax.rewards: a server that forks graders, watches them and replaces them.

    the run ──jobs──▶ server ──chunks──▶ workers

The server is a fresh interpreter with one thread. It loads the grader once and forks the workers from itself,
so that a new worker costs milliseconds and no import. Results stand in memory shared with the workers; when
one dies, only the item that it was at is lost, and its successor goes on with the next.
The server runs no ``__main__`` module again (multiprocessing's forkserver does, and with it whatever that
imports: jax), and ends with all its workers when the run ends, however that ends. This module imports nothing
else of rljax, and no jax.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import mmap
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn, SupportsFloat

import cloudpickle

CHUNK = 32  # most items in one message to a worker
SCORED, UNSCORABLE, ERROR, TIMEOUT = range(4)  # what became of an item
MAX_REWARD = 1e18  # beyond, the variance of a group is no float32
SPARE_MB = 64  # that a grader has at least, on top of its imports
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Grade = Callable[[str, dict], float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """See rljax.rewards.RewardPool. Raises ValueError for one that is not positive."""

    workers: int
    cpu_seconds: float
    wall_seconds: float
    memory_mb: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"rewards.{name} = {value}: must be above 0")


def main(fd: int) -> None:
    """Serves until told to stop, or until the other end of the socket ``fd`` is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a preempted run may need rewards to end its step. Not SIG_IGN, which the programs that a grader
        # starts would inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # rewards.py started this with it blocked
    link = Connection(fd)
    payload, limits = link.recv()
    try:
        grade = cloudpickle.loads(payload)
        if "rljax.tasks.grading" in sys.modules:
            sys.modules["rljax.tasks.grading"].warm_up()  # here, and not in each worker on an item's time
        if "jax" in sys.modules:
            raise ImportError("the grader's module imports jax; move it to a module that does not")
        _check_memory(limits.memory_mb)
    except Exception:
        link.send(traceback.format_exc())
        return
    gc.freeze()  # a collection in a worker then copies none of the shared pages
    server = _Server(link, grade, limits)
    link.send(None)
    try:
        server.run()
    finally:
        for worker in server.workers:
            worker.kill()


def _check_memory(memory_mb: int) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used_mb = int(file.read().split()[0]) * mmap.PAGESIZE >> 20
        if memory_mb < used_mb + SPARE_MB:
            raise ValueError(
                f"rewards.memory_mb = {memory_mb}: the grader's imports alone take {used_mb} MB of address "
                f"space; give at least {used_mb + SPARE_MB}"
            )


@dataclasses.dataclass
class _Chunk:
    """Up to CHUNK rows of a job. offset: of its first row in the job. start: the first item not graded."""

    job: int
    offset: int
    size: int
    payload: bytes
    start: int = 0
    error: str | None = None


class _Server:
    """Hands chunks to idle workers, passes results on, replaces workers that die or overrun."""

    def __init__(self, link: Connection, grade: Grade, limits: Limits):
        self.link, self.grade, self.limits = link, grade, limits
        self.waiting: deque[_Chunk] = deque()
        self.workers: list[_Worker] = []
        for _ in range(limits.workers):
            self.workers.append(_Worker(self))

    def run(self) -> None:
        while True:
            for worker in self.workers:
                if worker.chunk is None and self.waiting:
                    worker.take(self.waiting.popleft())
            times = [worker.seconds_left() for worker in self.workers if worker.chunk is not None]
            ready = wait([self.link, *(worker.conn for worker in self.workers)], min(times, default=None))
            if self.link in ready and not self._receive():
                return
            for worker in self.workers:
                if worker.conn in ready:
                    self._hear(worker)
                elif worker.chunk is not None and worker.seconds_left() <= 0:
                    self._replace(worker, overran=worker.board.index)

    def _receive(self) -> bool:
        """Queues a job's chunks. False if the run wants no more, or is gone."""
        try:
            message = self.link.recv()
        except (EOFError, OSError):
            return False
        if message is None:
            return False
        job, chunks = message
        self.waiting.extend(_Chunk(job, *chunk) for chunk in chunks)
        return True

    def _hear(self, worker: _Worker) -> None:
        """A worker sends the first traceback of a chunk when it happens, and None at the chunk's end."""
        try:
            error = worker.conn.recv()
        except (EOFError, OSError):
            self._replace(worker, overran=None)
            return
        chunk = worker.chunk
        assert chunk is not None  # it speaks of nothing else
        if error is None:
            self._finish(worker, chunk)
        else:
            chunk.error = error

    def _replace(self, worker: _Worker, overran: int | None) -> None:
        """A new process for a worker that has died, or that spends too long at the item ``overran``."""
        worker.kill()
        chunk = worker.chunk
        if chunk is not None:
            chunk.start = worker.board.index
            # where it got past the slow item just before the kill, no item is at fault
            if chunk.start < chunk.size and overran in (None, chunk.start):
                worker.board.set(chunk.start, 0.0, TIMEOUT)
                chunk.start += 1
        worker.start()
        if chunk is not None and chunk.start < chunk.size:
            worker.take(chunk)
        elif chunk is not None:
            self._finish(worker, chunk)

    def _finish(self, worker: _Worker, chunk: _Chunk) -> None:
        worker.chunk = None
        self.link.send((chunk.job, chunk.offset, *worker.board.results(chunk.size), chunk.error))


class _Board:
    """Memory shared with one worker: the item it is at, since when, and each item's reward and outcome."""

    def __init__(self):
        self.cells = memoryview(mmap.mmap(-1, 8 * (2 + 2 * CHUNK))).cast("d")

    @property
    def index(self) -> int:
        return int(self.cells[0])

    @property
    def since(self) -> float:
        return self.cells[1]

    def begin(self, index: int) -> None:
        self.cells[1] = time.monotonic()  # the time first: no one must see a new item with an old time
        self.cells[0] = index

    def set(self, index: int, reward: float, outcome: int) -> None:
        self.cells[2 + index] = reward
        self.cells[2 + CHUNK + index] = outcome

    def results(self, size: int) -> tuple[bytes, bytes]:
        return self.cells[2 : 2 + size].tobytes(), self.cells[2 + CHUNK : 2 + CHUNK + size].tobytes()


class _Worker:
    """The server's side of one worker process."""

    def __init__(self, server: _Server):
        self.server = server
        self.board = _Board()
        self.chunk: _Chunk | None = None
        self.start()

    def start(self) -> None:
        self.conn, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            others = [worker.conn for worker in self.server.workers if worker is not self]
            _run_worker(theirs, [self.server.link, self.conn, *others], self.board, self.server)
        theirs.close()

    def take(self, chunk: _Chunk) -> None:
        self.chunk = chunk
        self.board.begin(chunk.start)
        try:
            self.conn.send((chunk.start, chunk.payload))
        except OSError:
            pass  # it has died; the closed pipe is noticed next

    def seconds_left(self) -> float:
        return self.board.since + self.server.limits.wall_seconds - time.monotonic()

    def kill(self) -> None:
        """Ends it, with every process that its grader started."""
        for kill in (os.killpg, os.kill):  # it may not have had the time to make a group of its own
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(self.pid, 0)
        self.conn.close()


# ---- in the worker process


def _run_worker(conn: Connection, inherited: list[Connection], board: _Board, server: _Server) -> NoReturn:
    """Grades chunks until the server's end of ``conn`` closes."""
    status = 1
    try:
        for connection in inherited:  # or no one would notice that the server, or a worker, is gone
            connection.close()
        _set_limits(server.limits)
        while True:
            start, payload = conn.recv()
            _grade_chunk(conn, board, server, start, payload)
            conn.send(None)
    except (EOFError, BrokenPipeError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # whatever happens, the server's own stack must not go on in this process


def _set_limits(limits: Limits) -> None:
    os.setpgid(0, 0)  # so that the grader's own subprocesses can be killed with it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside C code
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # dies even with a server that is killed
        limit, (_, hard) = int(limits.memory_mb) << 20, resource.getrlimit(resource.RLIMIT_AS)
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _grade_chunk(conn: Connection, board: _Board, server: _Server, start: int, payload: bytes) -> None:
    completions, examples = pickle.loads(payload)
    reported = False
    for index in range(start, len(completions)):
        board.begin(index)
        # CPU time, by the millisecond (RLIMIT_CPU counts whole seconds); at its end SIGPROF kills the process
        signal.setitimer(signal.ITIMER_PROF, server.limits.cpu_seconds)
        try:
            board.set(index, *_outcome(server.grade(completions[index], examples[index])))
        except MemoryError:
            board.set(index, 0.0, TIMEOUT)
        except BaseException:  # a grader may raise anything, SystemExit and math-verify's timeout included
            board.set(index, math.nan, ERROR)
            if not reported:
                conn.send(traceback.format_exc())
                reported = True
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    board.begin(len(completions))


def _outcome(grade: object) -> tuple[float, int]:
    if grade is None:
        return math.nan, UNSCORABLE
    if not isinstance(grade, SupportsFloat):
        raise TypeError(f"the grader returned {grade!r}: neither a number nor None")
    reward = float(grade)
    return (reward, SCORED) if abs(reward) <= MAX_REWARD else (math.nan, UNSCORABLE)
