"""Rollouts on devices of their own, and by weights that are a step older while the step before is learned."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from rljax import ahead, learner, parts, preemption, rollout, sampling, sharding, tasks, train
from rljax.models import hf

APART = {"mesh.data": 1, "mesh.rollout_devices": 1}
STALE = {"rollout.staleness": 1, "loss.correction": "truncate"}
# Batches of three prompts are never halved: the update compiles once.
SHORT = {
    "rollout.prompts": 3, "budget.rollouts": 48, "rollout.segment": 2, "checkpoint.every": 2, "model.remat": "none",
}  # fmt: skip
CERO = {
    "budget.rule": "cero", "budget.epochs": 4, "cero.eta": 1.0, "cero.step_theta": 0.02, "cero.step_mu": 0.01,
}  # fmt: skip
LAST = 4  # steps of 3 prompts × 4 rollouts
SOON = 120.0  # seconds in which another thread begins what it is to do


@pytest.fixture(scope="module", autouse=True)
def two_sets_of_devices(few_devices):
    """The learner has the first devices that its mesh asks for, and the rollouts the first of the last four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "apart", lambda count: (None, jax.devices()[4 : 4 + count]))
        yield


class Killed(Exception):
    """The machine went away."""


@dataclasses.dataclass
class Watched:
    """What passed through a run: parameters on the host, and events in their order.

    made_by: of the engine, a call of each step. learned: of the learner before each update. kill: the step at whose
    update the run dies. told: (place, step) at which SIGTERM comes. meet: an update ends only after the next rollouts
    have begun. evaluated: by the engine; else without it, which is faster.
    """

    kill: int | None = None
    told: tuple[str, int] | None = None
    meet: bool = False
    evaluated: bool = False
    made_by: list = dataclasses.field(default_factory=list)
    learned: list = dataclasses.field(default_factory=list)
    threads: set = dataclasses.field(default_factory=set)
    begun: int = 0
    late: bool = False
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    step: int = 0

    def here(self, place, step):
        if self.told == (place, step):
            self.told = None
            os.kill(os.getpid(), signal.SIGTERM)
            while not preemption.requested():  # the main thread takes it, in its own time
                time.sleep(0.001)

    @contextlib.contextmanager
    def running(self):
        generate, decode, step, metrics, held = (
            rollout.generate, sampling._decode_segment, train.train_step, learner.metrics, train.held_out
        )  # fmt: skip

        def generating(model, params, *args, **options):
            if "temperature" not in options:  # an evaluation has its own
                self.made_by.append(jax.tree.map(np.array, params))
                self.threads.add(threading.current_thread().name.split("_")[0])
                with self.changed:
                    self.begun += 1
                    self.changed.notify_all()
            return generate(model, params, *args, **options)

        def decoding(*args, **options):
            if threading.current_thread() is not threading.main_thread():
                self.here("rollout", self.begun)
            return decode(*args, **options)

        def stepping(made, state, *rest):
            if state.step == self.kill:
                raise Killed
            self.step = state.step + 1
            self.learned.append(jax.tree.map(np.array, state.learner.params))
            return step(made, state, *rest)

        def measuring(sums):  # the update is dispatched, and its metrics are waited for
            self.here("update", self.step)
            if self.meet and self.step < LAST:
                with self.changed:
                    self.late |= not self.changed.wait_for(lambda: self.begun > self.step, SOON)
            return metrics(sums)

        def holding(made, state, *rest):
            self.here("evaluation", state.step)
            if self.evaluated:
                return held(made, state, *rest)
            preemption.check()
            entry = {"step": state.step, "accuracy": 0.5, "avg_at_k": 0.5}
            totals = state.totals | {"eval": {"first": entry, "last": entry, "best": entry}}
            return dataclasses.replace(state, totals=totals), {"eval/accuracy": 0.5}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "generate", generating)
            patch.setattr(sampling, "_decode_segment", decoding)
            patch.setattr(train, "train_step", stepping)
            patch.setattr(learner, "metrics", measuring)
            patch.setattr(train, "held_out", holding)
            yield


def play(config, folder, watched=None, raises=None):
    watched = Watched() if watched is None else watched
    with watched.running(), contextlib.redirect_stdout(io.StringIO()):
        with contextlib.nullcontext() if raises is None else pytest.raises(raises):
            train.run(config, folder)
    return watched


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder):
    return jax.device_get(hf.load(folder / "model")[1])


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def differ(a, b) -> bool:
    return any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def stale(run_config, tmp_path_factory):
    """(folder, what was watched) of a run with stale rollouts on a device of their own."""
    folder = tmp_path_factory.mktemp("stale") / "run"
    return folder, play(run_config(SHORT | APART | STALE), folder, Watched(meet=True))


# ---- staleness


@pytest.mark.slow
def test_rollouts_are_of_the_weights_before_the_update_beside_them(stale):
    """Of step s: those after update s - 2; and they begin before update s - 1 has ended, whatever the clock says."""
    folder, watched = stale
    assert watched.threads == {"rollouts"} and not watched.late
    assert len(watched.made_by) == len(watched.learned) == LAST
    same(watched.made_by[0], watched.learned[0])
    same(watched.made_by[1:], watched.learned[:-1])
    assert all(differ(a, b) for a, b in zip(watched.learned[:-1], watched.learned[1:], strict=True))


@pytest.mark.slow
def test_a_steps_metrics_tell_its_staleness_and_its_times(stale):
    """The importance ratio is to the log-probs that the sampler recorded: 1 only where the weights are the same."""
    folder, _ = stale
    steps = lines(folder)[1:]
    assert [line["rollouts/staleness"] for line in steps] == [0, 1, 1, 1]
    gaps = [line["train/logprob_gap"] for line in steps]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-4
    assert steps[0]["train/importance_max"] == pytest.approx(1, abs=1e-4) and steps[1]["train/importance_max"] > 1.001
    for line in steps:
        times = {name: line[f"time/{name}_s"] for name in ("rollout", "update", "wait", "step")}
        assert times["update"] + times["wait"] <= times["step"] and times["rollout"] > 0
        assert line["rollouts/tokens_per_s"] == line["rollouts/tokens"] / times["rollout"]


@pytest.mark.slow
def test_a_killed_run_makes_the_same_rollouts_again(stale, left, run_config, tmp_path):
    """Killed in step 3, it goes on from step 2's checkpoint, which has the weights that step 3's rollouts are of."""
    folder, config = tmp_path / "run", run_config(SHORT | APART | STALE)
    play(config, folder, Watched(kill=2), raises=Killed)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2"]
    after = play(config, folder)
    assert len(after.made_by) == LAST - 2
    same(after.made_by, stale[1].made_by[2:])
    assert left(folder) == left(stale[0])
    same(weights(folder), weights(stale[0]))


TOLD = {  # where SIGTERM comes, and the step that is saved
    "first rollout": ("rollout", 1, 0),
    "rollout beside an update": ("rollout", 3, 2),
    "update": ("update", 2, 2),
    "evaluation": ("evaluation", 2, 2),
    "last evaluation": ("evaluation", LAST, LAST),
}


@pytest.fixture(scope="module")
def whole(run_config, tmp_path_factory):
    """Folder of a run that nobody ends, with CERO, whose posterior is never stale."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    play(run_config(SHORT | CERO | APART | STALE), folder, Watched(evaluated=True))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_told_anywhere_a_run_goes_on_bit_for_bit(whole, left, run_config, tmp_path, name):
    place, step, saved = TOLD[name]
    folder, config = tmp_path / "run", run_config(SHORT | CERO | APART | STALE)
    play(config, folder, Watched(told=(place, step), evaluated=True), raises=preemption.Preempted)
    assert max(int(p.name) for p in (folder / "checkpoints").iterdir()) == saved
    play(config, folder, Watched(evaluated=True))
    assert left(folder) == left(whole)
    same(weights(folder), weights(whole))


def test_what_the_thread_raises_ends_the_run(run_config, tmp_path, monkeypatch):
    """In the rollouts of step 2; the line of step 1 is written, and no thread is left."""
    collect = ahead.collect

    def failing(made, state, *rest):
        if state.step == 1:
            raise OSError("no such device")
        return collect(made, state, *rest)

    monkeypatch.setattr(ahead, "collect", failing)
    play(run_config(SHORT | APART | STALE | {"checkpoint.every": 0}), tmp_path / "run", raises=OSError)
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1]
    assert not any(thread.name.startswith("rollouts") for thread in threading.enumerate())


@pytest.mark.slow
def test_without_learning_stale_rollouts_are_fresh_ones(left, run_config, tmp_path):
    runs, changes = {}, STALE | {"learner.learning_rate": 0.0, "task.shuffle_rewards": True, "rollout.max_rounds": 2}
    for staleness in (0, 1):
        folder = tmp_path / str(staleness)
        play(run_config(SHORT | CERO | APART | changes | {"rollout.staleness": staleness}), folder)
        runs[staleness] = left(folder)[0]
        for line in runs[staleness]["metrics.jsonl"][1:]:
            del line["rollouts/staleness"]
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"actor.path": None, "jackpot.rule": "obrs", "jackpot.table": "sampler", "jackpot.top_k": 4},
        {"actor.dtype": "int8", "loss.correction": "truncate", "lora.rank": 2},
    ],
    ids=["another model", "int8 with adapters"],
)
def test_the_actor_too_is_handed_over(left, run_config, actor_checkpoint, tmp_path, changes):
    """Its rollouts are of the actor's own weights; on one device the same run, here made by the same rule."""
    changes = {key: actor_checkpoint if value is None else value for key, value in changes.items()}
    folders = []
    for name, where in {"apart": APART, "one": {"mesh.data": 1}}.items():
        folder = tmp_path / name
        watched = play(run_config(SHORT | CERO | {"rollout.staleness": 1} | changes | where), folder)
        assert differ(watched.made_by[1], watched.made_by[2]) and not differ(watched.made_by[0], watched.made_by[1])
        folders.append(left(folder))
    assert folders[0] == folders[1]


# ---- devices of their own


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"mesh.data": 1, "mesh.fsdp": 2, "mesh.rollout_devices": 2, "mesh.rollout_tensor": 2},
        {"mesh.data": 1, "mesh.tensor": 2, "mesh.rollout_devices": 4, "mesh.rollout_tensor": 2, "lora.rank": 2},
    ],
    ids=str,
)
def test_on_devices_of_their_own_rollouts_are_those_of_one_mesh(run_config, tmp_path, where):
    common = SHORT | CERO | {"rollout.prompts": 4} | {key: value for key, value in where.items() if key == "lora.rank"}
    for name, changes in {"one": {"mesh.data": 1}, "apart": where}.items():
        play(run_config(common | changes), tmp_path / name, Watched(evaluated=True))
    for name in ("rollouts.jsonl", "samples.jsonl"):
        assert lines(tmp_path / "apart", name) == lines(tmp_path / "one", name)
    for a, b in zip(lines(tmp_path / "apart"), lines(tmp_path / "one"), strict=True):
        for name in b:
            if name.startswith(("train/", "rollouts/", "cero/", "eval/")) and not name.endswith("per_s"):
                assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, weights(tmp_path / "apart"), weights(tmp_path / "one"))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"rollout.lanes": 3}, r"rollout.lanes = 3 does not divide over the 2 .*\(mesh.rollout_devices / mesh.roll"),
        ({"rollout.prompts": 3}, r"rollout.prompts / .* = 3 does not divide over the 2 .*\(mesh.data × mesh.fsdp\)"),
        (STALE | {"mesh.rollout_devices": 0}, "on the same 2 devices, .* set mesh.rollout_devices, .* or rollout.stal"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(run_config, changes, told):
    with pytest.raises(ValueError, match=told):
        parts.make_meshes(run_config({"mesh.data": 2, "mesh.rollout_devices": 2} | changes))


def test_several_processes_are_refused(run_config, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="rollout_devices = 1 and rollout.staleness = 0 are of runs of one process"):
        parts.make_meshes(run_config(APART))


def test_a_model_that_does_not_divide_over_the_rollouts_devices_is_refused(run_config):
    config = run_config({"mesh.data": 1, "mesh.rollout_devices": 3, "mesh.rollout_tensor": 3})
    with pytest.raises(ValueError, match=r"does not divide over 3 devices \(mesh axes tensor\)"):
        parts.build(config, tasks.load(config.task), None)
