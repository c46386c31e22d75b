"""Whose a run folder is: of one config, of one run at a time, and of none that was refused at its start."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator

from rljax import config as config_lib
from rljax import hosts, metrics
from rljax.config import ConfigError
from rljax.options import Config
from rljax.runs import CONFIG_FILE

LOCK_FILE = ".lock"  # names the process of the folder's run; that it is locked, and not that it is there, says so
PATIENCE_S = 1.0  # for a lock that a run which is being killed, or one that only looks, has yet
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # a file system's, of some networks


def check(config: Config, workdir: pathlib.Path) -> None:
    """Raises ConfigError where a run of this config could not go on or begin in the folder, and writes nothing.

    All processes of the run call this, and all raise. What is wrong: a run of another config (with the keys that
    differ), a run that is at work there, a folder that cannot be written to, an unreadable file, or what is asked for
    and not installed. A folder with neither metrics nor checkpoints is new.
    """
    with _together():
        _check_wandb(config)
        _check_config(config, workdir)
        there = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"--workdir={workdir} cannot be written to ({there}); name another folder")
        if metrics.writes() and (workdir / LOCK_FILE).exists():
            with contextlib.closing(_Lock(workdir)):
                pass


@contextlib.contextmanager
def held(config: Config, workdir: pathlib.Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Inside, the folder is this run's: process 0 holds its lock, however that ends, and config.json is there.

    All processes of the run call this, once nothing more can be refused, and raise together: what `check` does,
    and hosts.HostsError where one does not see the folder. warn: told of a file system without locks.
    """
    with contextlib.ExitStack() as stack:
        with _together():
            if metrics.writes():
                try:
                    workdir.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(contextlib.closing(_Lock(workdir)))
                    _check_config(config, workdir)  # another run may have come and gone since
                    lock.sign()
                    metrics.write_json(workdir / CONFIG_FILE, config_lib.to_dict(config))
                except OSError as error:
                    raise ConfigError(f"--workdir={workdir} cannot be written to ({error}); name another") from error
                if lock.missing is not None:
                    warn(
                        f"{workdir} is in a file system without locks ({lock.missing}): a second run that is started"
                        " in it would not be refused"
                    )
        hosts.check_shared(workdir / CONFIG_FILE)
        yield


class _Lock:
    """The lock of a run folder, taken; ConfigError, with the holder, where another process has it.

    missing: why there is none, where the file system knows no locks. Processes that are started later do not inherit
    it, so that it ends with this process, however that ends.
    """

    def __init__(self, folder: pathlib.Path):
        self.missing: str | None = None
        self._file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                holder = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
                self.close()
                raise ConfigError(
                    f"--workdir={folder} has another run in it: {holder or 'a process that has just begun'}. Wait for"
                    " its end or stop it, or name another folder"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.missing = str(error)
                return

    def sign(self) -> None:
        """Writes into the file who has it."""
        now = datetime.datetime.now().isoformat(" ", "seconds")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A ConfigError that is raised inside, by any process of the run, is raised in all of them."""
    wrong = None
    try:
        yield
    except ConfigError as error:
        wrong = str(error)
    told = next((text for text in hosts.gather(wrong) if text is not None), None)
    if told is not None:
        raise ConfigError(told)


def _check_config(config: Config, workdir: pathlib.Path) -> None:
    file = workdir / CONFIG_FILE
    begun = (workdir / metrics.METRICS_FILE).exists() or any(workdir.glob("checkpoints/*"))
    if begun and not file.exists():
        raise ConfigError(f"--workdir={workdir} holds a run without its {CONFIG_FILE}; name another folder")
    if not file.exists():
        return
    saved = config_lib.read_saved(file)
    found = config_lib.differences(config, saved) if begun else {}
    if found:
        listed = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, (old, new) in found.items())
        other_release = all(config_lib.ABSENT in pair for pair in found.values())
        back = "go on with the release of rljax that began it" if other_release else "change these back"
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config: {listed}. Name another folder, or {back}"
        )


def _check_wandb(config: Config) -> None:
    if not config.metrics.wandb:
        return
    try:
        importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"metrics.wandb = {config.metrics.wandb!r} needs Weights & Biases, which is not installed; run"
            " pip install 'rljax[wandb]' (or pip install wandb), or set metrics.wandb to ''"
        ) from error
