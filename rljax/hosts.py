"""The processes of a run on several hosts: how they find each other, and what they tell each other.

All of them run the same program on the same mesh (jax.distributed). What happens on the host (prompts, counts, the
engine's board, advantages) is the same in each, computed from the same values; arrays are split over the mesh, and
each process places the part of its own devices. Only grading is divided: each process scores the rollouts of its own
prompts, and the rewards are gathered, so that every process counts each of them once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

import rljax
from rljax import config as config_lib
from rljax import preemption
from rljax.options import Config, HostsOptions
from rljax.rewards import Share


class HostsError(RuntimeError):
    """The processes of a run could not come together, or do not run the same thing."""


OWN = ("hosts.coordinator", "hosts.index")  # keys that may differ: an address has several names
LEAVING_S = 8.0  # in which the others must leave too, where a process fails; else it goes without them
ENDING_S = 30  # that jax waits at the end for the others
VISIBLE_S = 30.0  # in which a network's file system shows a new file on all hosts


@contextlib.contextmanager
def joined(config: Config, workdir: pathlib.Path, mode: str) -> Iterator[None]:
    """Inside, the processes that config.hosts speaks of are connected and do the same. Before anything of jax.

    Raises HostsError where their configs, folders or releases differ, with the names of what does. A process that
    fails alone says why and ends without the others, which end when they miss it (hosts.heartbeat_timeout).
    """
    if not connect(config.hosts):
        yield
        return
    try:
        ours = {key: value for key, value in config_lib.flat(config).items() if key not in OWN}
        ours |= {"--workdir": str(workdir), "--mode": mode, "rljax": rljax.__version__, "jax": jax.__version__}
        with _unsaid():
            compare(ours)
        try:
            yield
        except preemption.Preempted:
            multihost_utils.sync_global_devices("preempted")
            raise
        multihost_utils.sync_global_devices("done")
    except BaseException as error:
        _leave(error)
        raise


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Inside, nothing reaches standard output: Gloo, between CPUs, prints a line there as all processes connect."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C and C++ hold back
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _leave(error: BaseException) -> None:
    """Returns if all processes leave now; otherwise tells the error and ends this one, whatever the others wait for."""
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVING_S)
    if not leaving.is_alive():
        return
    if isinstance(error, jax.errors.JaxRuntimeError):
        told = (str(error).splitlines() + [""])[0]
        _end(
            f"host {jax.process_index()} of {jax.process_count()} has lost the others: {told}. One of them has ended,"
            " and says itself why, or the network has; the same command goes on from the last checkpoint"
        )
    _end("".join(traceback.format_exception(error)))


def _end(message: str) -> NoReturn:
    """Ends this process with status 1, without what jax does at an exit: it would wait for the others, and abort."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def connect(options: HostsOptions) -> bool:
    """Whether there are other processes; if so, jax.distributed is initialised with them.

    Ends the process where they do not come together in hosts.start_timeout, with what it waited for.
    """
    if not options.cluster and not options.coordinator:
        return False
    # Its handler of SIGTERM would take the place of preemption.py's.
    jax.config.update("jax_enable_preemption_service", False)
    explicit: dict[str, Any] = {
        "coordinator_address": options.coordinator,
        "num_processes": options.count,
        "process_id": options.index,
        "cluster_detection_method": "deactivate",
    }
    found: dict[str, Any] = {"cluster_detection_method": options.cluster} if options.cluster else explicit
    who = "this process" if options.cluster else f"process {options.index} of {options.count}"
    where = options.coordinator if options.coordinator else f"hosts.cluster = {options.cluster!r}"
    # jax aborts the process when its own time is over, and no handler of exceptions would see it.
    late = threading.Timer(
        options.start_timeout,
        _end,
        [
            f"error: {who} did not find all others of the run through {where} in hosts.start_timeout"
            f" = {options.start_timeout} s. Check that all of them were started, and that they reach process 0 at its"
            " address and port"
        ],
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=options.start_timeout + ENDING_S,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
            shutdown_timeout_seconds=ENDING_S,
        )
    except Exception as error:  # jax has no class of its own for any of it
        told = (str(error).splitlines() + [""])[0]
        raise HostsError(
            f"the processes of the run cannot meet at {where} ({type(error).__name__}: {told}); correct that"
        ) from error
    finally:
        late.cancel()
    return jax.process_count() > 1


def compare(ours: dict[str, Any]) -> None:
    """Raises HostsError in every process where the values differ anywhere, with their names. All of them call it."""
    text = json.dumps(ours, sort_keys=True)
    if len(set(gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    everyone = gather(ours)
    names = [name for name in ours if any(name not in other or other[name] != ours[name] for other in everyone)]
    names += [name for other in everyone for name in other if name not in ours]
    listed = "; ".join(
        f"{name} is {', '.join(f'{other.get(name)!r} on host {i}' for i, other in enumerate(everyone))}"
        for name in dict.fromkeys(names)
    )
    raise HostsError(f"the {len(everyone)} hosts do not run the same: {listed}. Start all with the same command")


def check_shared(file: pathlib.Path) -> None:
    """Raises HostsError in every process where one does not see the file that process 0 wrote. All of them call it."""
    gather(None)  # it is written now
    deadline = time.monotonic() + VISIBLE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [index for index, seen in enumerate(gather(file.exists())) if not seen]
    if blind:
        raise HostsError(
            f"host {', '.join(map(str, blind))} of {jax.process_count()} does not see {file}, which host 0 wrote;"
            " give a --workdir in a file system that all hosts share"
        )


def anywhere(flag: bool) -> bool:
    """Whether the flag is up in any process. All of them call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array([flag], np.int32)).any())


def gather(value: Any) -> list:
    """Each process's value (plain JSON data), in the order of their numbers. All of them call it."""
    if jax.process_count() == 1:
        return [value]
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(own)], np.int32)).ravel()
    width = 1 << int(sizes.max()).bit_length()  # few widths, so that few programs are compiled
    rows = multihost_utils.process_allgather(np.pad(own, (0, width - len(own))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def share() -> Share:
    """This process's share of the grading."""
    return Share(index=jax.process_index(), count=jax.process_count(), gather=gather)
