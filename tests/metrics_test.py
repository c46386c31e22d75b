import json
import re
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from rljax.metrics import MetricsWriter, Stages, read_metrics, write_json, write_lines, write_summary


def lines_of(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def scalars_shown(folder):
    """(name, step) → value as TensorBoard shows it: a session start at s hides earlier steps ≥ s."""
    shown = {}
    for path in sorted(folder.glob("*.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            shown |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return shown


def test_a_step_is_one_strict_json_line(tmp_path):
    metrics = {
        "train/reward_mean": jnp.float32(0.5),
        "train/loss": float("nan"),
        "train/grad_norm": np.float64("inf"),
        "train/clip_frac": jnp.bfloat16(0.25),
        "cero/spent": np.int64(2**40),
        "train/skipped": np.bool_(True),
        "rollouts/total": 512,
        "pods/rule": 'max "variance"',
        "eval/accuracy": None,
    }
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(0, metrics)
        (line,) = lines_of(tmp_path / "run")  # flushed, not only on close
        writer.write(2, {})
    assert strict(line) == {
        "step": 0,
        "train/reward_mean": 0.5,
        "train/loss": None,
        "train/grad_norm": None,
        "train/clip_frac": 0.25,
        "cero/spent": 2**40,
        "train/skipped": True,
        "rollouts/total": 512,
        "pods/rule": 'max "variance"',
        "eval/accuracy": None,
    }
    assert read_metrics(tmp_path / "run") == [strict(line), {"step": 2}]


def test_tensorboard_has_each_finite_number(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"train/loss": -0.5, "train/kl_ref": float("nan"), "pods/rule": "all", "cero/spent": 7})
    assert scalars_shown(tmp_path) == {("train/loss", 3): -0.5, ("cero/spent", 3): 7.0}


@pytest.mark.parametrize("cut", ["", '{"step": 5, "train/lo', '{"step"', "{"])
def test_resume_keeps_each_step_once(tmp_path, cut):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 5):
            writer.write(step, {"train/loss": float(step), "third": 1 / 3})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(cut)
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        with pytest.raises(ValueError, match="metrics of step 2 come after those of step 2"):
            writer.write(2, {"train/loss": 0.0})
        writer.write(3, {"train/loss": 30.0})
    assert [strict(line) for line in lines_of(tmp_path)] == [
        {"step": 1, "train/loss": 1.0, "third": 1 / 3},
        {"step": 2, "train/loss": 2.0, "third": 1 / 3},
        {"step": 3, "train/loss": 30.0},
    ]
    losses = {step: value for (name, step), value in scalars_shown(tmp_path).items() if name == "train/loss"}
    assert losses == {1: 1.0, 2: 2.0, 3: 30.0}
    assert not list(tmp_path.glob("*.tmp"))


def test_records_are_cut_at_resume_as_metrics_are(tmp_path):
    def records(step):
        samples = [{"text": f"{step}{x} é\ud800"} for x in "ab"] if step % 2 else []
        return {"rollouts": [{"prompts": [{"id": step}]}], "samples": samples}

    with MetricsWriter(tmp_path) as writer:
        assert writer.past == []
        for step in range(1, 5):
            writer.write(step, {"train/loss": float(step)}, records(step))
        rows = (tmp_path / "rollouts.jsonl").read_text().splitlines()  # flushed, not only on close
        assert [strict(row) for row in rows] == [{"step": s, "prompts": [{"id": s}]} for s in range(1, 5)]
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 5, "te')
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        assert [line["step"] for line in writer.past] == [1, 2]
        writer.write(3, {}, records(3))
    for name, steps in {"metrics": [1, 2, 3], "rollouts": [1, 2, 3], "samples": [1, 1, 3, 3]}.items():
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [strict(line)["step"] for line in lines] == steps, name
    assert strict(lines[3]) == {"step": 3, "text": "3b é\ud800"}
    with MetricsWriter(tmp_path):
        pass
    assert [(tmp_path / f"{name}.jsonl").read_text() for name in ("metrics", "rollouts", "samples")] == [""] * 3


def test_a_damaged_line_of_records_is_named(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n{\n{"step": 3}\n')
    with pytest.raises(ValueError, match=re.escape("rollouts.jsonl, line 2 is no rollouts object: '{'")):
        MetricsWriter(tmp_path, resume_step=3)


def test_nothing_is_made_of_no_records(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {}, {"rollouts": [], "samples": []})
    assert not (tmp_path / "rollouts.jsonl").exists() and not (tmp_path / "samples.jsonl").exists()


def test_wandb_gets_every_number_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(("init", options))
        log, finish = (lambda *a, **k: calls.append(("log", *a, k))), (lambda: calls.append(("finish",)))
        return types.SimpleNamespace(id="abc", log=log, finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    options = {"project": "math", "config": {"seed": 1}}
    with MetricsWriter(tmp_path, wandb=options) as writer:
        writer.write(2, {"train/loss": jnp.float32(0.5), "train/first_error": "x", "train/kl_ref": float("nan")})
    with MetricsWriter(tmp_path, resume_step=2, wandb=options):
        pass
    with MetricsWriter(tmp_path, wandb=options):  # anew
        pass
    own = {"dir": str(tmp_path), **options}
    assert calls == [
        ("init", own), ("log", {"train/loss": 0.5}, {"step": 2}), ("finish",),
        ("init", own | {"id": "abc", "resume": "allow"}), ("finish",),
        ("init", own), ("finish",),
    ]  # fmt: skip


def test_a_run_begun_anew_has_no_old_steps(tmp_path):
    for value in (1.0, 2.0):  # both within a second: the event files must not overwrite each other
        with MetricsWriter(tmp_path) as writer:
            writer.write(0, {"train/loss": value})
    assert read_metrics(tmp_path) == [{"step": 0, "train/loss": 2.0}]
    assert scalars_shown(tmp_path) == {("train/loss", 0): 2.0}
    assert len(list(tmp_path.glob("*.tfevents.*"))) == 2


def test_a_kill_while_truncating_keeps_the_old_file(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.write(2, {"train/loss": 2.0})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, resume_step=1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "7", '{"loss": 1}', '{"step": null}', ""])
def test_a_damaged_line_is_named_not_dropped(tmp_path, line):
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/metrics.jsonl, line 2 is no metrics object")):
        MetricsWriter(tmp_path, resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == text


@pytest.mark.parametrize(
    "step, metrics, error, message",
    [
        (1, {}, ValueError, "metrics of step 1 come after those of step 1"),
        (0, {}, ValueError, "metrics of step 0 come after those of step 1"),
        (2, {"step": 2}, ValueError, 'named "step"'),
        (2, {"train/rewards": np.zeros(3)}, TypeError, r"train/rewards is a ndarray of shape \(3,\)"),
        (2, {"train/parts": {"a": 1}}, TypeError, "train/parts is a dict"),
        (1.5, {}, TypeError, "integer"),
    ],
    ids=["twice", "back", "step", "vector", "dict", "fraction"],
)
def test_what_cannot_be_written_leaves_no_line(tmp_path, step, metrics, error, message):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {})
        with pytest.raises(error, match=message):
            writer.write(step, metrics)
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_other_processes_write_nothing_but_take_the_same_path(tmp_path, other_process):
    with MetricsWriter(tmp_path / "run", resume_step=4) as writer:
        writer.write(5, {"train/loss": jnp.float32(1)})
        with pytest.raises(TypeError, match="train/rewards"):  # values are fetched before the gate
            writer.write(6, {"train/rewards": np.zeros(3)})
        with pytest.raises(ValueError, match="come after"):
            writer.write(5, {})
    write_summary(tmp_path / "run", {"steps": 1})
    with pytest.raises(TypeError, match=r"a\.json: x is a set"):
        write_json(tmp_path / "run" / "a.json", {"x": {1}})
    assert not (tmp_path / "run").exists()


def test_summary_is_whole_and_strict(tmp_path):
    write_summary(tmp_path / "run", {"eval": {"first": {"step": 0, "accuracy": np.float32(0.25)}}})
    write_summary(tmp_path / "run", {"wall_s": float("inf"), "stages": ("a", jnp.int32(3)), "x": [{"y": np.nan}]})
    assert strict((tmp_path / "run" / "summary.json").read_text()) == {
        "wall_s": None,
        "stages": ["a", 3],
        "x": [{"y": None}],
    }
    with pytest.raises(TypeError, match=r"summary\.json: eval has the key 4"):
        write_summary(tmp_path / "run", {"eval": {4: 1}})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_a_kill_in_mid_write_keeps_the_old_summary(tmp_path, monkeypatch):
    write_summary(tmp_path, {"steps": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_summary(tmp_path, {"steps": 2})
    assert strict((tmp_path / "summary.json").read_text()) == {"steps": 1}


def test_stages_by_step_and_in_all(make_clock):
    clock, begun = make_clock(), []
    stages = Stages({"rollout": 100.0}, clock=clock, begun=begun.append)
    for took in (3.0, 4.0):
        with stages("rollout"):
            clock.now += took
    with pytest.raises(RuntimeError), stages("update"):
        clock.now += 2.0
        raise RuntimeError
    clock.now += 1.0
    assert stages.lap() == {"time/rollout_s": 7.0, "time/update_s": 2.0, "time/step_s": 10.0}
    with stages("outer"):
        clock.now += 1.0
        with stages("update"):
            clock.now += 5.0
    assert stages.lap() == {"time/outer_s": 6.0, "time/update_s": 5.0, "time/step_s": 6.0}
    assert stages.lap() == {"time/step_s": 0.0}
    assert stages.seconds == {"rollout": 107.0, "update": 7.0, "outer": 6.0}
    assert begun == ["rollout", "rollout", "update", "outer", "update"]
    clock.now += 2.0
    stages.add({"rollout": 9.0})  # another thread's, which took longer than the step that waited for it
    assert stages.lap() == {"time/rollout_s": 9.0, "time/step_s": 2.0} and stages.seconds["rollout"] == 116.0
    with pytest.raises(ValueError, match="time/step_s"), stages("step"):
        pass


def test_lone_surrogates_of_a_task_are_written_as_escapes(tmp_path):
    records = [{"prompt": "a\ud800é", "answer": "1"}]
    write_lines(tmp_path / "lines.jsonl", records)
    text = (tmp_path / "lines.jsonl").read_text(encoding="utf-8")
    assert text == '{"prompt": "a\\ud800é", "answer": "1"}\n' and json.loads(text) == records[0]
