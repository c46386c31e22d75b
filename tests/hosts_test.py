"""Several processes that are one run: what they tell each other, what they leave, and what ends them."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from rljax import hosts, rewards

ROOT = pathlib.Path(__file__).parent.parent
SMALL = (
    "--config=configs/full.py:tiny", "--config.budget.rollouts=384", "--config.rollout.prompts=8",
    "--config.rollout.samples=8", "--config.pods.keep=4", "--config.rollout.lanes=8", "--config.rollout.slots=8",
    "--config.task.train_prompts=64", "--config.task.eval_prompts=15", "--config.eval.every=3",
    "--config.checkpoint.every=2", "--config.checkpoint.keep=9", "--config.budget.epochs=2",
    "--config.hosts.heartbeat_timeout=10", "--config.eval.samples=2",
)  # fmt: skip
# One device a process; little of the time of these runs is worth optimising, and most of it is compilation.
ENV = os.environ | {
    "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHON": sys.executable,
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    ENV["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))


# ---- in one process


def test_alone_there_is_nobody_to_ask():
    assert hosts.gather({"a": float("inf")}) == [{"a": float("inf")}]
    assert hosts.anywhere(True) and not hosts.anywhere(False)
    assert (hosts.share().index, hosts.share().count) == (0, 1)


def others(monkeypatch, *values):
    """The next values that gather gives, one a call."""
    left = list(values)
    monkeypatch.setattr(hosts, "gather", lambda own: [own, left.pop(0)])


def test_what_differs_is_told_by_name_and_host(monkeypatch):
    others(monkeypatch, "another hash", {"seed": 1, "--workdir": "w"})
    told = r"2 hosts do not run the same: seed is 0 on host 0, 1 on host 1; loss is 2 on host 0, None on host 1\. Start"
    with pytest.raises(hosts.HostsError, match=told):
        hosts.compare({"seed": 0, "--workdir": "w", "loss": 2})


def test_a_folder_that_another_host_does_not_see_is_told(monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    others(monkeypatch, None, True, None, False)
    hosts.check_shared(file)
    with pytest.raises(hosts.HostsError, match=r"host 1 of 1 does not see .*config\.json, which host 0 wrote; give"):
        hosts.check_shared(file)


class Text:
    def prefilled(self, tokens):
        return ""

    def completion(self, ids):
        return str(ids[0])


def test_each_process_scores_its_prompts_and_all_count_each_rollout_once():
    """Three processes in turn, each with the others' answers; five prompts do not divide over them."""
    from rljax.types import Prompts, Rollouts

    R, none = 10, np.zeros((10, 1, 0), np.float32)
    group = np.repeat(np.arange(5, dtype=np.int32), 2)
    rollouts = Rollouts(
        tokens=np.arange(R, dtype=np.int32)[:, None], logprobs=np.zeros((R, 1), np.float32),
        lengths=np.ones(R, np.int32), group=group, sample=np.tile([0, 1], 5).astype(np.int32),
        truncated=np.zeros(R, bool), top_ids=none, top_logprobs=none,
    )  # fmt: skip
    examples = tuple({"id": i} for i in range(5))
    prompts = Prompts(ids=np.arange(5), draws=np.arange(5), tokens=([1],) * 5, examples=examples)
    graded = []

    def grade(completion, example):
        graded.append((int(completion), example["id"]))
        return None if completion == "3" else float(completion) / 4

    class Pool:
        def submit(self, completions, examples):
            values = [grade(*pair) for pair in zip(completions, examples, strict=True)]
            done = rewards.Future()
            scores = np.array([np.nan if v is None else v for v in values], np.float32)
            done.set_result(
                rewards.Scores(rewards=scores, unscorable=values.count(None), errors=0, timeouts=0, first_error=None)
            )
            return done

    answers = {}

    def results(gather):
        out = []
        for index in range(3):
            share = rewards.Share(index=index, count=3, gather=lambda own, index=index: gather(index, own))
            scorer = rewards.StreamingScorer(Pool(), Text(), prompts, share)
            scorer(rollouts, np.array([9, 1, 2]))
            scorer(rollouts, np.array([0, 3, 4, 5, 6, 7, 8]))
            with contextlib.suppress(ZeroDivisionError):
                out.append(scorer.result(R))
            assert scorer.texts == {i: str(i) for i in range(R)}
        return out

    def remember(index, own):
        answers[index] = json.loads(json.dumps(own))
        raise ZeroDivisionError

    assert not results(remember)
    assert sorted(graded) == [(row, row // 2) for row in range(R)]
    wanted = np.arange(R, dtype=np.float32) / 4
    wanted[3] = np.nan
    for scores in results(lambda index, own: [answers[i] for i in range(3)]):
        np.testing.assert_array_equal(scores.rewards, wanted)
        assert scores.unscorable == 1 and scores.errors == scores.timeouts == 0


# ---- two processes

TALK = """
import sys
from rljax import hosts
from rljax.options import HostsOptions

port, index = sys.argv[1], int(sys.argv[2])
options = HostsOptions(
    cluster="", coordinator=f"127.0.0.1:{port}", count=2, index=index, start_timeout=60, heartbeat_timeout=10
)
assert hosts.connect(options)
assert hosts.gather({"of": [index, float("nan")][:1], "long": "x" * 300 * index}) == [
    {"of": [0], "long": ""}, {"of": [1], "long": "x" * 300}
]
assert hosts.anywhere(index == 1) and not hosts.anywhere(False)
import jax, numpy as np
from rljax import sharding
mesh = sharding.make_mesh(data=2)
values = {"a": np.arange(12, dtype=np.int32).reshape(4, 3), "b": np.array([True, False])}
there = sharding.put_by_prompt(mesh, values)
assert not there["a"].is_fully_addressable and sharding.writes(there) == (index == 0) and sharding.writes(values)
jax.tree.map(np.testing.assert_array_equal, sharding.fetch(there), values)
np.testing.assert_array_equal(sharding.fetch(there["a"][1:]), values["a"][1:])
hosts.compare({"seed": 0})
try:
    hosts.compare({"seed": 3 + index})
except hosts.HostsError as error:
    print(error)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finish(processes, timeout=300):
    """(status, stdout, stderr) of each; none is left running."""
    deadline = time.monotonic() + timeout
    try:
        out = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, out, strict=True)]


def begin(*command, **env):
    return subprocess.Popen(
        command, cwd=ROOT, env=ENV | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_two_processes_talk():
    port = str(free_port())
    ended = finish([begin(sys.executable, "-c", TALK, port, str(i)) for i in range(2)], timeout=100)
    for status, out, err in ended:
        assert status == 0, err
        told = "the 2 hosts do not run the same: seed is 3 on host 0, 4 on host 1. Start all with the same command"
        assert [line for line in out.splitlines() if not line.startswith("[Gloo]")] == [told]


# ---- runs


def process(folder, port, index, count, *more):
    where = (f"--config.hosts.coordinator=127.0.0.1:{port}", f"--config.hosts.count={count}")
    args = (*SMALL, f"--workdir={folder}", *where, f"--config.hosts.index={index}", *more)
    return begin(sys.executable, "-m", "rljax.main", *args)


def together(folder, count, *more):
    """`count` processes by launch/local.sh, to their end."""
    return finish([begin("launch/local.sh", str(count), *SMALL, f"--workdir={folder}", *more)])[0]


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def posterior(folder, step):
    """The allocator's state in a checkpoint."""
    reader = ocp.PyTreeCheckpointer()
    path = folder / "checkpoints" / str(step) / "arrays"
    tree = reader.metadata(path).item_metadata.tree
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
    found = reader.restore(path, restore_args=how)
    return {name: value for name, value in found.items() if name.startswith("budget.")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    status, _, err = finish([begin(sys.executable, "-m", "rljax.main", *SMALL, f"--workdir={folder}")])[0]
    assert status == 0, err
    return folder


def assert_same_run(folder, alone):
    """The same tokens, rewards and posterior; metrics but for rounding, and all but those of the clock."""
    names = sorted(path.relative_to(alone) for path in alone.rglob("*.jsonl"))
    assert names == sorted(path.relative_to(folder) for path in folder.rglob("*.jsonl")) and len(names) >= 5
    for name in names:
        if name.name not in ("metrics.jsonl", "samples.jsonl"):
            assert lines(folder, name) == lines(alone, name), name
    for mine, theirs in zip(lines(folder), lines(alone), strict=True):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            if not key.startswith("time/") and not key.endswith("_per_s"):
                assert mine[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), (mine["step"], key)
    steps = sorted(int(path.name) for path in (alone / "checkpoints").iterdir())
    assert steps == sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    mine, theirs = (posterior(run, steps[-1]) for run in (folder, alone))
    assert mine.keys() == theirs.keys() and {"budget.alpha", "budget.beta"} <= mine.keys()
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("count, mesh", [(2, {"data": 2}), (4, {"data": 1, "fsdp": 2, "tensor": 2})])
def test_several_processes_train_as_one(alone, tmp_path, count, mesh):
    """CERO, Jackpot's actor and PODS, six steps: the same run, and one process that writes it."""
    folder = tmp_path / "run"
    status, out, err = together(folder, count, *(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()))
    assert status == 0, err
    assert out.count("run folder:") == 1
    assert_same_run(folder, alone)
    from safetensors.numpy import load_file

    mine, theirs = (load_file(run / "model" / "model.safetensors") for run in (folder, alone))
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], atol=2e-3, err_msg=name)
    assert (folder / "model" / "tokenizer.json").read_bytes() == (alone / "model" / "tokenizer.json").read_bytes()


def wait_for_step(folder, step, processes, timeout=240):
    start = time.monotonic()
    while not (folder / "metrics.jsonl").exists() or len(lines(folder)) <= step:
        assert all(process.poll() is None for process in processes), [p.communicate()[1] for p in processes]
        assert time.monotonic() - start < timeout
        time.sleep(0.05)


@pytest.mark.slow
def test_one_host_is_told_and_all_stop_at_the_same_step(alone, tmp_path):
    """Then as many go on where they stopped."""
    folder, port = tmp_path / "run", free_port()
    processes = [process(folder, port, index, 2) for index in range(2)]
    wait_for_step(folder, 1, processes)
    processes[1].send_signal(signal.SIGTERM)
    ended = finish(processes)
    assert [status for status, _, _ in ended] == [75, 75], ended
    assert [len(re.findall(r"preempted: step \d+ is saved", err)) for _, _, err in ended] == [1, 0]
    status, _, err = together(folder, 2)
    assert status == 0, err
    runs = [path.name for path in (folder / "checkpoints").iterdir()]
    assert set(runs) >= {path.name for path in (alone / "checkpoints").iterdir()}
    for name in ("rollouts.jsonl", "eval/000003.jsonl"):
        assert lines(folder, name) == lines(alone, name)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_host_ends_the_others_and_another_number_goes_on(alone, tmp_path, dead):
    folder, port = tmp_path / "run", free_port()
    processes = [process(folder, port, index, 2) for index in range(2)]
    wait_for_step(folder, 3, processes)
    processes[dead].kill()
    start = time.monotonic()
    ended = finish(processes)
    assert time.monotonic() - start < 60
    status, _, err = ended[1 - dead]
    assert status not in (0, 75)
    assert re.search("has lost the others: .*One of them has ended|likely indicates that another task died", err), err
    status, _, err = finish([begin(sys.executable, "-m", "rljax.main", *SMALL, f"--workdir={folder}")])[0]
    assert status == 0, err
    assert_same_run(folder, alone)


@pytest.mark.slow
def test_hosts_with_other_configs_end_at_once(tmp_path):
    port = free_port()
    mine, theirs = ("--config.loss.clip_low=0.1",), ("--config.seed=1",)
    ended = finish([process(tmp_path / "run", port, 0, 2, *mine), process(tmp_path / "run", port, 1, 2, *theirs)], 60)
    for status, _, err in ended:
        assert status == 2
        assert "seed is 0 on host 0, 1 on host 1; loss.clip_low is 0.1 on host 0, 0.2 on host 1" in err, err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_coordinator_or_a_host_that_never_comes_is_told_by_its_address(tmp_path, index):
    port = free_port()
    ended = finish([process(tmp_path / "run", port, index, 2, "--config.hosts.start_timeout=5")], 60)
    status, _, err = ended[0]
    assert status == 1 and f"127.0.0.1:{port}" in err and "hosts.start_timeout = 5 s" in err, err


@pytest.mark.slow
def test_what_does_not_divide_over_the_hosts_is_told_by_its_numbers(tmp_path):
    status, _, err = together(tmp_path / "run", 2, "--config.rollout.lanes=7")
    assert status == 2 and "rollout.lanes = 7 does not divide over the 2 devices" in err, err
    status, _, err = together(tmp_path / "other", 2, "--config.mesh.data=3")
    assert status == 2 and "mesh.data=3 × mesh.fsdp=1 × mesh.tensor=1 = 3 does not equal" in err, err
