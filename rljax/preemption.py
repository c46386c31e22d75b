"""Preemption: a SIGTERM is noted when it comes, and the run ends at its next safe point.

Safe points stand between segments of a rollout, between rewards and between steps. Nothing there is half done: the
step that is being made is abandoned, and the state before it is whole. An update is never abandoned, since it consumes
the state that it begins with.

Signals belong to a process, and so does what this module notes. jax's own reached_preemption_sync_point answers False
where there is but one process, and cannot be asked between rewards. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on where this one ended
ONE_SIGNAL = 1.0  # seconds within which a process group's signal and its launcher's are one


class Preempted(Exception):
    """The run was told to end; what it leaves is whole."""


@dataclasses.dataclass
class _Watch:
    """anywhere: whether a flag is up in any process of the run. told: when SIGTERM came (time.monotonic)."""

    anywhere: Callable[[bool], bool]
    told: float | None = None


_watches: list[_Watch] = []  # one at most


@contextlib.contextmanager
def watching(anywhere: Callable[[bool], bool] = bool) -> Iterator[None]:
    """Notes the first SIGTERM that comes inside; a second one does what SIGTERM did before.

    anywhere: of this process's flag, whether it is up in any process of the run. All of them call it at every `check`.
    Outside of the main thread, where Python sets no handlers, SIGTERM does what it did before.
    """
    watch = _Watch(anywhere)
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    before = signal.SIG_DFL if before is None else before  # None: a handler that is not Python's

    def note(number, frame):
        now = time.monotonic()
        if watch.told is None:
            watch.told = now
        elif now - watch.told > ONE_SIGNAL:
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)

    if main_thread:
        signal.signal(signal.SIGTERM, note)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def over() -> None:
    """All is written, and only the end of the process is left: a SIGTERM that comes now changes its status no more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def tell() -> None:
    """As if SIGTERM had come: what other threads of this process do ends at its next safe point."""
    for watch in _watches:
        if watch.told is None:
            watch.told = time.monotonic()


def requested() -> bool:
    """Whether this process was told to end. No safe point: other processes of the run may know nothing of it."""
    return any(watch.told is not None for watch in _watches)


def check() -> None:
    """A safe point: raises Preempted in every process of the run where one was told to end.

    All processes come here equally often. Does nothing where nobody watches.
    """
    if _watches and _watches[-1].anywhere(requested()):
        raise Preempted("the run was told to end")
