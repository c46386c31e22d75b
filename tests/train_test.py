"""The whole loop on a tiny random model: what a run leaves, how it resumes, and what it refuses."""

import contextlib
import dataclasses
import functools
import io
import json
import logging
import pathlib
import shutil
import signal
import sys
import types

import jax
import numpy as np
import pytest

from rljax import ahead, checkpoint, claims, evaluate, preemption, rollout, runs, tokenizer, train
from rljax import step as step_lib
from rljax.config import ConfigError
from rljax.models import hf, lora

ALGORITHMS = {
    "grpo": {},
    "pods": {"pods.rule": "max_variance", "pods.keep": 2},
    "cero": {
        "budget.rule": "cero", "budget.epochs": 4, "cero.eta": 1.0, "cero.step_theta": 0.02,
        "cero.step_mu": 0.01,
    },
    "lora": {"lora.rank": 2, "learner.learning_rate": 0.1},
}  # fmt: skip
# Adapters pass through the same loop; their own arithmetic is in learner_trained_test and models/lora_test.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "lora" else name for name in ALGORITHMS]
ADAPTERS = lora.Lora(2, 32.0, ("q", "k", "v", "o", "gate", "up", "down"))
LAST = 6  # steps of 4 prompts × 4 rollouts that the budget of 96 allows; three are an epoch of 12 prompts


pytestmark = pytest.mark.usefixtures("few_devices")


class Stopped(Exception):
    """The machine went away."""


@dataclasses.dataclass
class Record:
    """One call of train.run, and what passed through it."""

    folder: object
    output: str
    summary: dict | None
    states: dict  # step → RunState on the host, of each save
    calls: list  # (draws, ids, tokens) of every call of the engine

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def listening(stop_after, states, calls):
    """Records saves and rollouts; raises Stopped after so many training steps."""
    save, generate, step = checkpoint.Checkpointer.save, rollout.generate, train.train_step

    def saving(self, number, state):
        learner, budget = jax.tree.map(np.array, (state.learner, state.budget))  # copies: it will be donated
        states[number] = dataclasses.replace(state, learner=learner, budget=budget)
        save(self, number, state)

    def generating(model, params, prompts, counts, **options):
        out = generate(model, params, prompts, counts, **options)
        calls.append((prompts.draws, prompts.ids, out.tokens))
        return out

    def stepping(parts, state, *rest):
        if state.step == stop_after:
            raise Stopped
        return step(parts, state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "save", saving)
        patch.setattr(rollout, "generate", generating)
        patch.setattr(train, "train_step", stepping)
        yield


def play(config, folder, stop_after=None) -> Record:
    states, calls, output, summary = {}, [], io.StringIO(), None
    with listening(stop_after, states, calls), contextlib.redirect_stdout(output):
        if stop_after is None:
            summary = train.run(config, folder)
        else:
            with pytest.raises(Stopped):
                train.run(config, folder)
    return Record(folder, output.getvalue(), summary, states, calls)


@pytest.fixture(scope="module")
def straight(run_config, tmp_path_factory):
    """straight(name): the run of an algorithm from start to end, made once."""
    return functools.cache(lambda name: play(run_config(ALGORITHMS[name]), tmp_path_factory.mktemp(name) / "run"))


def timeless(record: dict) -> dict:
    """Without what the clock decides."""
    return {k: v for k, v in record.items() if not k.startswith("time/") and not k.endswith(("_s", "_per_s"))}


def assert_same_state(a, b):
    left, right = (dataclasses.replace(s, totals=timeless(s.totals)) for s in (a, b))
    assert (left.draws, left.step, left.totals) == (right.draws, right.step, right.totals)
    jax.tree.map(np.testing.assert_array_equal, (left.learner, left.budget), (right.learner, right.budget))


# ---- what a run leaves


@pytest.mark.parametrize("name", NAMES)
def test_run_folder(straight, run_config, name):
    run = straight(name)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["rollout"]["samples"] == 4 and config["pods"]["keep"] == (2 if name == "pods" else 4)
    lines = run.lines()
    steps = len(lines) - 1
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert steps == LAST
    expected = {
        "time/rollout_s", "time/reward_s", "time/update_s", "time/step_s", "rollouts/total", "rollouts/truncated",
        "rollouts/tokens_per_s", "train/reward_mean", "train/loss", "train/clip_frac", "train/grad_norm",
        "train/logprob_gap", "train/unscorable", "pods/variance", "pods/kept", "cero/effective_prompt_ratio",
        "cero/spent",
    }  # fmt: skip
    for line in lines[1:]:
        assert expected <= set(line), expected - set(line)
        assert line["train/logprob_gap"] < 1e-5 and line["train/ratio_max"] == 1
        assert line["pods/kept"] == (8 if name == "pods" else 16)
    assert ("cero/mu" in lines[-1]) == (name == "cero")
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4, 6]
    assert any(line["train/grad_norm"] > 0 for line in lines[1:])
    rate = config["learner"]["learning_rate"]
    rates = [line["train/learning_rate"] for line in lines[1:]]
    assert rates == pytest.approx([rate / 3, rate * 2 / 3, *[rate] * (LAST - 2)])
    assert all(0 < line["rollouts/entropy"] < 6 for line in lines[1:])  # of 257 tokens: at most 5.5
    assert_recorded(run, lines)
    assert list(run.folder.glob("events.out.tfevents*"))
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["5", "6"]


def assert_recorded(run, lines):
    """The lines of single prompts and rollouts say what the metrics of their step do."""
    rollouts, samples = (
        [json.loads(line) for line in (run.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("rollouts", "samples")
    )
    assert [record["step"] for record in rollouts] == list(range(1, LAST + 1))
    draws = [draws for draws, ids, _ in run.calls if len(ids) == 4]  # of the steps' prompts
    for record, line, drawn in zip(rollouts, lines[1:], draws, strict=True):
        prompts = record["prompts"]
        rewards = [(float(reward), count) for p in prompts for reward, count in p["rewards"].items()]
        assert sum(p["rollouts"] for p in prompts) == sum(count for _, count in rewards) == line["rollouts/step"]
        assert sum(reward * count for reward, count in rewards) / line["rollouts/step"] == line["train/reward_mean"]
        assert sum(sum(p["kept"].values()) for p in prompts) == line["pods/kept"]
        assert [p["epoch"] for p in prompts] == (drawn // 12).tolist()
        assert all(p["kind"] == f"k{p['id'] % 2}" for p in prompts)
    assert [sample["step"] for sample in samples] == [1] * 4 + [LAST] * 4
    assert all(sample["prompt"].startswith("t") and sample["tokens"] for sample in samples)
    assert f"samples of step {LAST}" in run.output


@pytest.mark.parametrize("name", NAMES)
def test_summary_and_model(straight, name):
    run = straight(name)
    lines = run.lines()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(run.summary))
    assert summary["steps"] == LAST and summary["rollouts_total"] == lines[-1]["rollouts/total"] == 96
    assert summary["wall_s"] == pytest.approx(sum(line["time/step_s"] for line in lines))
    assert set(summary["stage_s"]) == {"prompts", "eval", "rollout", "reward", "update", "budget"}
    assert sum(summary["stage_s"].values()) <= summary["wall_s"]
    evals = [{"step": x["step"], "accuracy": x["eval/accuracy"], "avg_at_k": x["eval/avg_at_k"]}
             for x in lines if "eval/accuracy" in x]  # fmt: skip
    best = max(evals, key=lambda e: (e["accuracy"], -e["step"]))
    assert summary["eval"] == {"first": evals[0], "last": evals[-1], "best": best}
    model, params = hf.load(run.folder / "model")
    learned = run.states[LAST].learner
    if name == "lora":
        learned = dataclasses.replace(learned, params=lora.merged(lora.whole(learned), ADAPTERS))
    assert (run.folder / "adapter" / "adapter_model.safetensors").exists() == (name == "lora")
    if name == "lora":
        adapter = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
        assert pathlib.Path(adapter["base_model_name_or_path"], "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), learned.params)
    assert tokenizer.load(run.folder / "model").stop_ids[-1] == 256
    for words in ("eval at step 0", "before", "after", "seconds", f"run folder: {run.folder}"):
        assert words in run.output


@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_evaluating_the_run_folder_gives_its_last_evaluation(straight, run_config, name, tmp_path, capsys):
    """The newest checkpoint's: the same prompts, keys and completions. Elsewhere it is the model's before training."""
    run, config = straight(name), run_config(ALGORITHMS[name])
    before = sorted(p.name for p in run.folder.iterdir())
    for folder, step, which in ((run.folder, LAST, "last"), (tmp_path, 0, "first")):
        (out,) = evaluate.run(config, folder).values()
        entry = run.summary["eval"][which]
        assert out["measures"]["accuracy"]["value"] == pytest.approx(entry["accuracy"], abs=1e-6)
        assert out["measures"]["avg@2"]["value"] == pytest.approx(entry["avg_at_k"], abs=1e-6)
        stem = "rljax_test_tasks_parity_task" + ("-000006" if step else "")
        assert json.loads((folder / "eval" / f"{stem}.json").read_text()) == out
        assert (out["samples"], out["seed"], out["task_options"]["eval_prompts"]) == (2, 0, 5)
        assert ("no checkpoint in" in out["model"]) == (step == 0)
        lines = (folder / "eval" / f"{stem}.jsonl").read_text()
        assert lines == (run.folder / "eval" / f"{step:06}.jsonl").read_text() and len(lines.splitlines()) == 5
    assert sorted(p.name for p in run.folder.iterdir()) == before
    assert "pass@2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"another model: lora.rank is \d there and 3 here"):
        evaluate.run(run_config(ALGORITHMS[name] | {"lora.rank": 3}), run.folder)


@pytest.mark.slow
def test_updates_without_silent_prompts_are_those_of_whole_batches(run_config, monkeypatch, tmp_path):
    """Half of the task's prompts are always or never solved: most batches of the run go without them."""
    # With a large eps Adam does not blow rounding up where a gradient is nearly 0.
    config = run_config({"learner.adam_eps": 0.1, "budget.rollouts": 48, "eval.every": 0})
    less = play(config, tmp_path / "less")
    assert sum(line["train/prompts"] <= 2 for line in less.lines()[1:]) >= 2
    monkeypatch.setattr(step_lib, "may_halve", lambda *_: False)
    whole = play(config, tmp_path / "whole")
    for a, b in zip(less.lines()[1:], whole.lines()[1:], strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
        assert (a["train/loss"], a["train/reward_mean"]) == pytest.approx((b["train/loss"], b["train/reward_mean"]))
        assert a["train/tokens"] < b["train/tokens"] or a["train/prompts"] > 2
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, less.states[3].learner.params, whole.states[3].learner.params)


def test_every_parameter_is_trained(straight):
    start, end = (straight("grpo").states[step].learner for step in (1, LAST))
    assert int(end.updates) == LAST
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), start.params, end.params)
    assert all(m > 0 for m in jax.tree.leaves(moved))


@pytest.mark.parametrize("name", NAMES)
def test_prompts_follow_the_stream(straight, name):
    """Every step draws on; the set of 12 is visited once an epoch; CERO's state counts what was made."""
    run = straight(name)
    steps = [(draws, ids) for draws, ids, _ in run.calls if len(ids) == 4]
    draws, ids = (np.concatenate(x) for x in zip(*steps, strict=True))
    assert len(steps) == LAST and (np.diff(draws) > 0).all()
    if name != "cero":
        np.testing.assert_array_equal(draws, np.arange(24))
        assert sorted(ids[:12]) == sorted(ids[12:]) == list(range(12)) and list(ids[:12]) != list(ids[12:])
        assert [run.states[step].draws for step in range(1, LAST + 1)] == [4, 8, 12, 16, 20, 24]
    else:
        assert [int(run.states[step].budget.spent) for step in (1, LAST)] == [16, 96]
        state = run.states[LAST].budget
        np.testing.assert_array_equal(state.rollouts, 4 * np.bincount(ids, minlength=12))
        np.testing.assert_array_equal(state.alpha + state.beta - 2, state.rollouts)


# ---- resuming


def resume(run_config, name, folder, stop_after, every):
    """(record before, record after, lines at the stop) of a run that was stopped and started again."""
    config = run_config(ALGORITHMS[name] | {"checkpoint.every": every})
    before = play(config, folder, stop_after=stop_after)
    lines = before.lines()
    return before, play(config, folder), lines


@pytest.mark.parametrize(
    "name, stop_after, every",
    [("grpo", 3, 3), ("cero", 3, 3), ("pods", 5, 2), pytest.param("lora", 3, 3, marks=pytest.mark.slow)],
)
def test_resumed_run_is_the_straight_one(straight, run_config, tmp_path, name, stop_after, every):
    """After step 3, an epoch's end, or lost in step 6 and restored to step 4; equal bit for bit."""
    whole = straight(name)
    before, after, lines = resume(run_config, name, tmp_path / "run", stop_after, every)
    restored = stop_after // every * every
    assert [line["step"] for line in lines] == list(range(stop_after + 1))
    assert "resumed" in after.output and f"at step {restored}" in after.output
    for states in (before.states, after.states):
        for step, state in states.items():
            assert_same_state(state, whole.states[step])
    assert max(after.states) == LAST
    assert [timeless(line) for line in after.lines()] == [timeless(line) for line in whole.lines()]
    for mine, theirs in zip(after.calls, whole.calls[-len(after.calls) :], strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    assert timeless(after.summary) == timeless(whole.summary)
    for file in ("rollouts.jsonl", "samples.jsonl"):
        assert (after.folder / file).read_bytes() == (whole.folder / file).read_bytes(), file


@pytest.mark.parametrize("stage", ["collect", pytest.param("held_out", marks=pytest.mark.slow)])
def test_a_run_that_is_told_to_end_goes_on_bit_for_bit(straight, run_config, monkeypatch, tmp_path, stage):
    """SIGTERM in the rollouts after step 2, or in its evaluation, before its line is written (preemption_test.py)."""
    whole, folder, told, module = straight("cero"), tmp_path / "run", [], ahead if stage == "collect" else train
    real = getattr(module, stage)

    def telling(parts, state, *rest):
        if state.step == 2 and not told:
            told.append(signal.raise_signal(signal.SIGTERM))
        return real(parts, state, *rest)

    monkeypatch.setattr(module, stage, telling)
    config = run_config(ALGORITHMS["cero"] | {"checkpoint.every": 4})
    with pytest.raises(preemption.Preempted, match="step 2 is saved"):
        play(config, folder)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2"]
    after = play(config, folder)
    assert [timeless(line) for line in after.lines()] == [timeless(line) for line in whole.lines()]
    assert timeless(after.summary) == timeless(whole.summary)
    assert_same_state(after.states[LAST], whole.states[LAST])
    for name in ("rollouts.jsonl", "samples.jsonl", "eval/000002.jsonl"):
        assert (folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


def test_finished_run_trains_nothing_and_says_so(straight, run_config, tmp_path):
    whole = straight("cero")
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    again = play(run_config(ALGORITHMS["cero"]), folder)
    assert "nothing left to train: step 6, 96 of 96 rollouts" in again.output
    assert not again.calls and not again.states
    for name in ("metrics.jsonl", "summary.json", "config.json", "model/model.safetensors"):
        assert (folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["5", "6"]


def test_a_longer_budget_continues_a_finished_uniform_run(straight, run_config, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight("grpo").folder, folder)
    more = play(run_config(ALGORITHMS["grpo"] | {"budget.rollouts": 112}), folder)
    assert more.summary["steps"] == 7 and list(more.states) == [7]
    assert [line["step"] for line in more.lines()] == list(range(8))


def test_workdir_of_another_config_is_refused_by_key(straight, run_config, tmp_path):
    folder = straight("grpo").folder
    kept = (folder / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"another config: loss\.clip_low was 0\.2, is now 0\.1"):
        train.run(run_config({"loss.clip_low": 0.1}), folder)
    assert (folder / "config.json").read_text() == kept
    with pytest.raises(ConfigError, match=r"budget\.rule was 'uniform', is now 'cero'"):
        claims.check(run_config(ALGORITHMS["cero"]), folder)
    other = {"mesh.data": 2, "eval.every": 3, "checkpoint.keep": 5, "name": "x", "learner.micro_batches": 2}
    shutil.copytree(folder, tmp_path / "run")
    claims.check(run_config(other), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        claims.check(run_config(), tmp_path / "run")


# ---- rewards that fail


def test_unscorable_rewards_are_counted_and_carry_no_gradient(run_config, tiny_tasks, tmp_path):
    changes = {"task.name": f"{tiny_tasks}:faulty_task", "budget.rollouts": 32, "checkpoint.every": 0}
    run = play(run_config(changes), tmp_path / "run")
    lines = run.lines()[1:]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert 0 < line["train/grader_errors"] <= line["train/unscorable"] < 16
        assert line["pods/kept"] == 16 - line["train/unscorable"]
        assert np.isfinite(line["train/loss"]) and 0 < line["train/reward_mean"] < 1
        assert "KeyError: 'no such unit'" in line["train/first_error"]
    errors, unscorable = (sum(x[f"train/{name}"] for x in lines) for name in ("grader_errors", "unscorable"))
    assert errors < unscorable
    assert "could not be scored" in run.output and "no such unit" in run.output


def test_a_grader_that_scores_nothing_ends_the_run_and_changes_nothing(run_config, tiny_tasks, tmp_path):
    changes = {"task.name": f"{tiny_tasks}:hopeless_task", "budget.rollouts": 32}
    config = run_config(changes)
    run = play(config, tmp_path / "run")
    assert [line["train/reward_mean"] for line in run.lines()[1:]] == [None, None]
    assert [line["train/unscorable"] for line in run.lines()[1:]] == [16, 16]
    _, params = hf.load(config.model.path)
    jax.tree.map(np.testing.assert_array_equal, run.states[2].learner.params, jax.device_get(params))


# ---- refusals


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"model.path": "nowhere/model"}, FileNotFoundError, r"model\.path='nowhere/model'.*hf download"),
        ({"task.name": "rljax_test_tasks:empty_task"}, ValueError, "task 'empty' has no training prompts"),
        ({"task.name": "rljax_test_tasks:lacking_task"}, ValueError, r"example 0 lacks field 'answer'"),
        ({"rollout.max_prompt_tokens": 1}, ValueError, r"training prompts has 1 to 1 tokens \(.*raise rollout\.max"),
        ({"mesh.data": 8, "rollout.lanes": 8}, ValueError, r"rollout\.prompts / .* = 4 does not divide over the 8"),
        ({"mesh.data": 4, "learner.micro_batches": 2}, ValueError, r"micro_batches\) = 2 does not divide over the 4"),
        ({"mesh.fsdp": 2, "rollout.lanes": 3}, ValueError, r"rollout\.lanes = 3 does not divide over the 2 devices"),
        ({"mesh.fsdp": 3, "rollout.prompts": 3, "rollout.lanes": 3}, ValueError, r"embed: dimension .* of size 16"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_leaves_nothing(run_config, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train.run(run_config(changes), tmp_path / "runs" / "run")
    assert list(tmp_path.iterdir()) == []


# ---- devices


def test_eight_devices_give_one_devices_numbers(straight, run_config, tmp_path):
    """mesh data 2, fsdp 2, tensor 2, and two micro-batches: the same tokens and rewards, nearly equal parameters."""
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "budget.rollouts": 32}
    run, alone = play(run_config(mesh), tmp_path / "run"), straight("grpo")
    for mine, theirs in zip(run.calls[:3], alone.calls[:3], strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    for mine, theirs in zip(run.lines()[1:], alone.lines()[1:3], strict=True):
        for name in ("train/reward_mean", "train/loss", "train/grad_norm", "rollouts/tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    jax.tree.map(close, run.states[2].learner.params, alone.states[2].learner.params)


def test_nothing_compiles_after_the_first_step(run_config, tmp_path, caplog):
    """Ragged lengths, prompts of several lengths, evaluations between, a last step of fewer rollouts."""
    seen, step = [], train.train_step

    def stepping(*args):
        seen.append(len(caplog.records))
        return step(*args)

    with pytest.MonkeyPatch.context() as patch, jax.log_compiles(), caplog.at_level(logging.WARNING):
        patch.setattr(train, "train_step", stepping)
        run = play(run_config({"checkpoint.every": 0, "budget.rollouts": 58} | ALGORITHMS["cero"]), tmp_path / "run")
    assert [line["rollouts/step"] for line in run.lines()[1:]] == [16, 16, 16, 10]
    messages = [record.getMessage() for record in caplog.records]
    update = "Compiling jit(train_step)"
    assert any(m.startswith(update) for m in messages[: seen[1]])
    # A batch is whole or half; each of the two compiles when it is first met.
    assert sum(m.startswith(update) for m in messages) <= 2
    compiled = [m for m in messages[seen[1] :] if m.startswith("Compiling") and not m.startswith(update)]
    assert not compiled, compiled


def test_a_broken_update_is_told_and_never_saved(run_config, tmp_path, tiny_checkpoint):
    """NaN in one weight: the run ends at its first step, and leaves no checkpoint of it."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    model, params = hf.load(tiny_checkpoint)
    params["norm"] = params["norm"].at[0].set(np.nan)
    hf.save(broken, model, params)
    with pytest.raises(FloatingPointError, match="train/loss is nan at step 1; nothing of this step is saved"):
        train.run(run_config({"model.path": str(broken)}), tmp_path / "run")
    assert not list((tmp_path / "run/checkpoints").glob("[0-9]*"))


def test_a_run_folder_without_its_config_is_refused(straight, run_config, tmp_path):
    shutil.copytree(straight("grpo").folder, tmp_path / "run")
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match="holds a run without its config.json; name another folder"):
        train.run(run_config({"seed": 9}), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text('{"precious": 1}')
    with pytest.raises(ConfigError, match="is not the config of a run"):
        train.run(run_config(), tmp_path / "mine")
    assert (tmp_path / "mine/config.json").read_text() == '{"precious": 1}'
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be"):
        train.run(run_config(), tmp_path / "file")


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"rollout.max_prompt_tokens": 200}, "= 204, but .* has 128 positions; lower them"),
        ({"jackpot.rule": "obrs", "actor.dtype": "int8", "jackpot.top_k": 999}, "jackpot.top_k = 999 is more than"),
    ],
)
def test_more_than_the_model_has_is_refused_before_anything_runs(run_config, tmp_path, changes, told):
    with pytest.raises(ValueError, match=told):
        train.run(run_config(changes), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_an_actor_of_another_tokenizer_is_refused(run_config, tmp_path, actor_checkpoint):
    other = tmp_path / "other"
    shutil.copytree(actor_checkpoint, other)
    file = other / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="have tokenizers of unlike vocabularies"):
        train.run(run_config({"actor.path": str(other)}), tmp_path / "run")


def test_an_unreadable_checkpoint_is_named(straight, run_config, tmp_path):
    shutil.copytree(straight("grpo").folder, tmp_path / "run")
    last = max(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir())
    shutil.rmtree(tmp_path / f"run/checkpoints/{last}/arrays")
    with pytest.raises(checkpoint.CheckpointError, match=f"step {last} .* cannot be read .*Delete the folder {last}"):
        train.run(run_config(ALGORITHMS["grpo"]), tmp_path / "run")


def test_epochs_that_end_before_the_budget_are_told(run_config):
    config = run_config()  # 96 rollouts in steps of 16

    def after(spent):
        return runs.unspent(config, types.SimpleNamespace(totals={"rollouts": spent}))

    assert after(96) is after(80) is None
    assert after(79) == (
        "79 of 96 rollouts were spent when the 3 epochs were over; raise budget.epochs to spend the rest"
    )


def test_wandb_that_is_not_installed_is_refused_at_the_start(run_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails
    with pytest.raises(ConfigError, match=r"metrics.wandb = 'math' needs .*pip install 'rljax\[wandb\]'"):
        train.run(run_config({"metrics.wandb": "math"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
