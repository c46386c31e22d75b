"""SIGTERM wherever a run may be: it ends with what is whole on disk, and goes on as if nothing had been."""

import collections
import contextlib
import dataclasses
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from rljax import ahead, checkpoint, learner, main, preemption, rewards, sampling, train
from rljax.models import hf

ROOT = pathlib.Path(__file__).parent.parent


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


# ---- the signal


@pytest.fixture
def earlier():
    """What SIGTERM did before: it counts."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_noted_and_raised_at_the_next_safe_point(earlier):
    preemption.check()  # nobody watches
    with preemption.watching():
        preemption.check()
        assert not preemption.requested()
        sigterm()
        assert preemption.requested()
        with pytest.raises(preemption.Preempted):
            preemption.check()
    assert not preemption.requested() and not earlier
    sigterm()
    assert earlier == [1]


def test_a_second_signal_does_what_the_first_would_have_done(earlier, monkeypatch):
    with preemption.watching():
        sigterm()
        sigterm()  # a process group's and a launcher's, at once
        assert not earlier
        monkeypatch.setattr(preemption, "ONE_SIGNAL", 0.0)
        sigterm()
        assert earlier == [1]


def test_a_signal_after_the_end_changes_nothing(earlier):
    preemption.over()
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and not preemption.requested()


def test_another_process_that_was_told_ends_this_one_too():
    with preemption.watching(anywhere=lambda flag: True):
        assert not preemption.requested()
        with pytest.raises(preemption.Preempted):
            preemption.check()


def test_a_thread_that_is_told_ends_as_with_the_signal(earlier):
    preemption.tell()  # nobody watches
    with preemption.watching():
        preemption.check()
        preemption.tell()
        with pytest.raises(preemption.Preempted):
            preemption.check()
    assert not preemption.requested() and not earlier


def test_waiting_for_rewards_ends_with_the_signal(tmp_path):
    """A grader that would take a minute; what the other processes are told is None."""

    def slow(completion, example):
        time.sleep(60)

    told = []

    def gather(value):
        told.append(value)
        return [value]

    pool = rewards.RewardPool(slow, workers=1, cpu_seconds=60.0, memory_mb=1024)
    share = rewards.Share(index=0, count=1, gather=gather)
    with pool, preemption.watching():
        scorer = rewards.StreamingScorer(pool, None, None, share)
        scorer._parts.append((np.array([0]), pool.submit(["x"], [{}])))
        sigterm()
        start = time.monotonic()
        with pytest.raises(preemption.Preempted):
            scorer.result(1)
        assert time.monotonic() - start < 10 and told == [None]


def test_the_command_ends_with_status_75_and_one_line(monkeypatch, capsys):
    def run(config, workdir):
        raise preemption.Preempted("preempted: step 3 is saved")

    monkeypatch.setitem(main.MODES, "train", run)
    assert main.main(["main", f"--config={ROOT / 'configs/grpo.py'}"]) == preemption.EXIT_STATUS == 75
    assert capsys.readouterr().err == "preempted: step 3 is saved\n"
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # the others say nothing
    assert main.main(["main", f"--config={ROOT / 'configs/grpo.py'}"]) == 75
    assert capsys.readouterr().err == ""


# ---- the run


@dataclasses.dataclass
class Told:
    """Sends SIGTERM to this process at a place of a run: when `place` is reached for the `nth` time at `step`."""

    place: str
    step: int
    nth: int = 1
    at: tuple = ("", -1)  # the stage that is under way, and the state's step
    seen: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def here(self, place):
        self.seen[place, self.at[1]] += 1
        if (place, *self.at[1:]) == (self.place, self.step) and self.seen[place, self.step] == self.nth:
            sigterm()

    def watched(self, function, place=None, stage=None):
        def call(*args, **options):
            if stage is not None:
                self.at = (stage, args[1].step)
            self.here(self.at[0] if place is None else place)
            return function(*args, **options)

        return call

    @contextlib.contextmanager
    def running(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "collect", self.watched(ahead.collect, "step", "rollout"))
            patch.setattr(train, "held_out", self.watched(train.held_out, "start", "evaluation"))
            patch.setattr(sampling, "_decode_segment", self.watched(sampling._decode_segment))
            patch.setattr(rewards.StreamingScorer, "_own", self.watched(rewards.StreamingScorer._own, "reward"))
            patch.setattr(learner, "metrics", self.watched(learner.metrics, "update"))  # the update is dispatched
            patch.setattr(checkpoint.Checkpointer, "save", self.watched(checkpoint.Checkpointer.save, "save"))
            yield


CHANGES = {
    "budget.rule": "cero", "budget.rollouts": 48, "budget.epochs": 4, "cero.eta": 1.0, "cero.step_theta": 0.02,
    "cero.step_mu": 0.01, "rollout.segment": 2, "checkpoint.every": 2, "rewards.cpu_seconds": 20.0,
}  # fmt: skip
LAST = 3


def play(config, folder):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train.run(config, folder)
    return said.getvalue()


@pytest.fixture(scope="module")
def straight(run_config, tmp_path_factory, few_devices):
    folder = tmp_path_factory.mktemp("straight") / "run"
    play(run_config(CHANGES), folder)
    return folder


PLACES = {
    "evaluation before the first step": ("evaluation", 0, 0),
    "first rollout": ("rollout", 0, 0),
    "rollout": ("rollout", 1, 1),
    "reward": ("reward", 1, 1),
    "update": ("update", 1, 2),
    "save": ("save", 2, 2),
    "evaluation": ("evaluation", 2, 2),
    "last evaluation": ("evaluation", LAST, LAST),
    "last save": ("save", LAST, LAST),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_told_anywhere_a_run_goes_on_bit_for_bit(straight, left, run_config, tmp_path, name):
    place, step, saved = PLACES[name]
    folder, config = tmp_path / "run", run_config(CHANGES)
    with Told(place, step).running(), pytest.raises(preemption.Preempted) as told:
        play(config, folder)
    assert str(told.value) == f"preempted: step {saved} is saved; the same command goes on from there"
    assert max(int(path.name) for path in (folder / "checkpoints").iterdir()) == saved
    assert not (folder / "summary.json").exists()
    said = play(config, folder)
    assert f"at step {saved}" in said or "nothing left to train" in said
    assert left(folder) == left(straight)
    (_, mine), (_, theirs) = (hf.load(run / "model") for run in (folder, straight))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(mine), jax.device_get(theirs))


@pytest.mark.slow
def test_told_twice_in_one_evaluation_nothing_is_lost(straight, left, run_config, tmp_path):
    folder, config = tmp_path / "run", run_config(CHANGES)
    for nth in (1, 2):
        with Told("evaluation", 2, nth).running(), pytest.raises(preemption.Preempted, match="step 2 is saved"):
            play(config, folder)
    play(config, folder)
    assert left(folder) == left(straight)


# ---- as processes

COMMAND = (
    "--config=configs/full.py:tiny", "--config.budget.rollouts=512", "--config.rollout.prompts=8",
    "--config.rollout.samples=8", "--config.pods.keep=4", "--config.rollout.lanes=8", "--config.rollout.slots=8",
    "--config.task.train_prompts=64", "--config.task.eval_prompts=16", "--config.eval.every=4",
    "--config.checkpoint.every=3", "--config.budget.epochs=2", "--config.rollout.segment=2",
)  # fmt: skip


def start(folder):
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "rljax.main", *COMMAND, f"--workdir={folder}"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_process_group_that_is_told_again_and_again_leaves_what_an_untold_run_leaves(left, tmp_path):
    """SIGTERM to the group of the run's process, as SLURM sends it; the grading processes live on to end the step."""
    process = start(tmp_path / "straight")
    assert process.wait(600) == 0
    folder, statuses = tmp_path / "run", []
    while not statuses or statuses[-1] == preemption.EXIT_STATUS:
        process = start(folder)  # in a group of its own
        lines = len((folder / "metrics.jsonl").read_text().splitlines()) if (folder / "metrics.jsonl").exists() else 0
        while process.poll() is None:
            time.sleep(0.05)
            file = folder / "metrics.jsonl"
            if file.exists() and len(file.read_text().splitlines()) >= lines + 2:
                time.sleep(0.2 * len(statuses))
                os.killpg(process.pid, signal.SIGTERM)
                break
        _, err = process.communicate(timeout=600)
        statuses.append(process.returncode)
        if process.returncode:
            assert process.returncode == preemption.EXIT_STATUS, (statuses, err)
            assert re.search(r"^preempted: step \d+ is saved; the same command goes on from there$", err, re.M), err
        assert len(statuses) < 12
    assert statuses.count(preemption.EXIT_STATUS) >= 2 and statuses[-1] == 0
    assert left(folder) == left(tmp_path / "straight")
    both = ((run / "model" / "model.safetensors").read_bytes() for run in (folder, tmp_path / "straight"))
    assert next(both) == next(both)
    shutil.rmtree(folder)
