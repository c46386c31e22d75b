"""The grading pool: right rewards in order, whatever the grader does, and no process left behind.

Graders stand inside functions, so that cloudpickle carries them by value, as it does a notebook's.
"""

import ctypes
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import numpy as np
import pytest

from rljax import rewards
from rljax import types as rljax_types
from rljax.rewards import RewardPool
from rljax.tasks.grading import grade_math

ROOT = pathlib.Path(__file__).parents[1]
LIMITS = {"workers": 2, "cpu_seconds": 2.0, "memory_mb": 1024}


def pool_of(grade, **changes):
    return RewardPool(grade, **(LIMITS | changes))


def commands():
    """A grader that does what the completion says."""

    def burn(seconds=math.inf):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def terminate():
        child = subprocess.Popen(["sleep", "100"])
        child.terminate()
        return child.wait(5)

    def grade(completion, example):
        command, _, value = completion.partition(" ")
        return {
            "score": lambda: float(value),
            "sleep": lambda: time.sleep(float(value)),
            "burn": burn,  # Python code
            "work": lambda: burn(float(value)),
            "power": lambda: 0.0 * (9 ** (9**9)),  # one C call, which no signal handler interrupts
            "memory": lambda: float(len(bytearray(4 << 30))),
            "exit": lambda: os._exit(3),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "crash": lambda: ctypes.string_at(0),
            "stop": lambda: sys.exit("enough"),
            "raise": lambda: 1 / 0,
            "none": lambda: None,
            "nan": lambda: math.nan,
            "inf": lambda: -math.inf,
            "huge": lambda: 1e39,  # infinite in float32
            "text": lambda: "1.0",
            "true": lambda: True,
            "array": lambda: __import__("numpy").float32(0.5),
            "pid": lambda: os.getpid(),
            "server": lambda: os.getppid(),
            "child": lambda: subprocess.Popen(["sleep", "100"]).pid,
            "terminate": terminate,
            "jax": lambda: float("jax" in sys.modules),
        }[command]()

    return grade


def run(lines, **changes):
    with pool_of(commands(), **changes) as pool:
        return pool.score(lines, [{}] * len(lines))


def gone(pid, seconds=30.0):
    """Whether a process is no more, or is a zombie, within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(int(pid), 0)
            status = pathlib.Path(f"/proc/{int(pid)}/stat")
            if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_rewards_come_in_the_order_of_the_rows():
    def grade(completion, example):
        time.sleep(0.02 * (int(completion) % 7 == 0))  # so that chunks end out of order
        return int(completion) - example["minus"]

    with pool_of(grade) as pool:
        scores = pool.score([str(i) for i in range(150)], [{"minus": i % 3} for i in range(150)])
    assert scores.rewards.dtype == np.float32
    np.testing.assert_array_equal(scores.rewards, [i - i % 3 for i in range(150)])
    assert (scores.unscorable, scores.errors, scores.timeouts, scores.first_error) == (0, 0, 0, None)


def test_unscorable_rows_are_nan_and_counted():
    # faults 10: the step lives on, and the mean of the scored rows is 2/3
    lines = ["score 1", "score 0", "nan", "score 1", "none", "inf", "huge", "raise", "text", "stop", "true"]
    scores, nan = run(lines), math.nan
    np.testing.assert_array_equal(scores.rewards, [1, 0, nan, 1, nan, nan, nan, nan, nan, nan, 1])
    assert np.nanmean(scores.rewards[:4]) == pytest.approx(2 / 3)
    assert (scores.unscorable, scores.errors, scores.timeouts) == (7, 3, 0)


def test_the_first_traceback_is_kept():
    scores = run(["score 1", "raise", "text"], workers=1)
    assert "ZeroDivisionError" in scores.first_error
    assert "neither a number nor None" in run(["array", "text"]).first_error


@pytest.mark.parametrize("bad", ["exit", "kill", "crash", "memory"])
def test_a_bad_item_costs_itself_alone(bad):
    # one worker and one chunk: the items after the bad ones come to its successors
    lines = ["score 1"] * 9 + [bad] + ["score 2"] * 9 + [bad, bad] + ["score 3"] * 9 + [bad]
    scores = run(lines, workers=1)
    np.testing.assert_array_equal(scores.rewards, [1] * 9 + [0] + [2] * 9 + [0, 0] + [3] * 9 + [0])
    assert (scores.unscorable, scores.errors, scores.timeouts) == (0, 0, 4)


@pytest.mark.parametrize(
    ("bad", "limits"),
    [
        ("sleep 100", {"wall_seconds": 1.0}),
        ("burn", {"cpu_seconds": 0.3, "wall_seconds": 60.0}),
        ("power", {"cpu_seconds": 0.3, "wall_seconds": 60.0}),
        ("burn", {"cpu_seconds": 100.0, "wall_seconds": 1.0}),
    ],
)
def test_an_item_over_a_limit_scores_zero_in_time(bad, limits):
    started = time.monotonic()
    scores = run(["score 1", bad, "score 2", bad, "score 3"], workers=1, **limits)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 2, 0, 3])
    assert (scores.unscorable, scores.timeouts) == (0, 2)
    assert time.monotonic() - started < 60.0


def test_limits_are_an_items_and_not_a_chunks():
    # each chunk of 32 takes 1.3 s, each of two 0.6 s of CPU
    scores = run(["sleep 0.04"] * 128, workers=1, wall_seconds=1.2)
    assert (scores.timeouts, scores.unscorable) == (0, 128)
    scores = run(["work 0.3"] * 5, workers=1, cpu_seconds=0.5, wall_seconds=60.0)
    assert (scores.timeouts, scores.unscorable) == (0, 5)


def test_mathematics_that_never_ends():
    # faults 24, and an answer that the bounds of grade_math let through: parsing it expands it
    answers = [r"\frac{1}{6}", "9^{9^{9^{9}}}", r"\binom{90000000}{45000000}", r"\frac{2}{12}", "6"]
    completions = [rf"\boxed{{{answer}}}" for answer in answers]
    grade = lambda completion, example: grade_math(completion, example["answer"])  # noqa: E731
    with pool_of(grade, workers=1, cpu_seconds=1.0, wall_seconds=60.0) as pool:
        scores = pool.score(completions, [{"answer": "1/6"}] * 5)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0, 1, 0])
    assert (scores.timeouts, scores.unscorable) == (1, 0)


def test_submissions_run_while_the_caller_goes_on(tmp_path):
    def grade(completion, example):
        while not os.path.exists(example["go"]):
            time.sleep(0.01)
        return float(completion)

    with pool_of(grade) as pool:
        example = {"go": str(tmp_path / "go")}
        futures = [pool.submit([str(number)], [example]) for number in range(4)]
        assert not any(future.done() for future in futures)
        (tmp_path / "go").touch()
        assert [future.result().rewards.tolist() for future in futures] == [[0], [1], [2], [3]]


def test_submissions_from_several_threads():
    with pool_of(commands()) as pool:
        results = {}

        def ask(number):
            results[number] = pool.score([f"score {number}"] * 50, [{}] * 50).rewards.tolist()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [number] * 50 for number in range(8)}


def test_no_rows():
    scores = run([])
    assert scores.rewards.shape == (0,) and scores.rewards.dtype == np.float32


def test_rows_scored_as_they_end_keep_their_place_and_take_their_own_prompt():
    tokenizer = types.SimpleNamespace(
        completion=lambda ids: "".join(chr(96 + i) for i in ids if i != 26), prefilled=lambda prompt: ""
    )
    prompts = rljax_types.Prompts(
        ids=np.array([5, 3]),
        draws=np.array([0, 1]),
        tokens=([1], [2]),
        examples=({"prompt": "p", "answer": "ab"}, {"prompt": "q", "answer": "a"}),
    )
    rollouts = rljax_types.Rollouts(
        tokens=np.array([[1, 2, 26, 0], [1, 26, 0, 0], [1, 2, 2, 2], [1, 26, 2, 2]], np.int32),
        logprobs=np.zeros((4, 4), np.float32),
        lengths=np.array([3, 2, 4, 2], np.int32),
        group=np.array([0, 0, 0, 1], np.int32),
        sample=np.array([0, 1, 2, 0], np.int32),
        truncated=np.array([False, False, True, False]),
        top_ids=np.zeros((4, 4, 0), np.int32),
        top_logprobs=np.zeros((4, 4, 0), np.float32),
    )
    with pool_of(lambda completion, example: float(completion == example["answer"])) as pool:
        scorer = rewards.StreamingScorer(pool, tokenizer, prompts)
        scorer(rollouts, np.array([3, 0]))
        with pytest.raises(ValueError, match="of 4 rollouts 2 were never submitted"):
            scorer.result(4)
        scorer(rollouts, np.array([2, 1]))
        scores = scorer.result(4)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0, 1])


# ---- what the processes import, and how they end


def script(body, *arguments, module=False, cwd, **popen):
    """Starts Python on a script, as a file or by ``python -m package.main``, with its output in a pipe."""
    package = pathlib.Path(cwd) / "package"
    package.mkdir()
    (package / "main.py").write_text(textwrap.dedent(body))
    command = ["-m", "package.main"] if module else ["package/main.py"]
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        **popen,
    )


@pytest.mark.parametrize("module", [True, False], ids=["python -m", "a script"])
def test_workers_import_no_jax(tmp_path, module):
    # no `if __name__ == "__main__"` either: the module must not be run again
    process = script(
        """
        import sys
        import jax
        from rljax.rewards import RewardPool

        jax.numpy.zeros(3).block_until_ready()
        def grade(completion, example):
            return len({"jax", "jaxlib"} & set(sys.modules))

        with RewardPool(grade, workers=2, cpu_seconds=2.0, memory_mb=1024) as pool:
            print(pool.score(["", ""], [{}, {}]).rewards.tolist(), "jax" in sys.modules)
        """,
        module=module,
        cwd=tmp_path,
    )
    assert process.communicate(timeout=120)[0] == "[0.0, 0.0] True\n"


def test_workers_of_this_very_process_import_no_jax():
    assert "jax" in sys.modules
    assert run(["jax", "jax"]).rewards.tolist() == [0, 0]


def test_closing_ends_every_process():
    pool = pool_of(commands())
    pids = pool.score(["server", "pid", "child"], [{}] * 3).rewards
    hanging = pool.submit(["sleep 100"], [{}])
    pool.close()
    assert all(gone(pid, seconds=5.0) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        hanging.result(timeout=30.0)
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.submit(["score 1"], [{}])
    pool.close()


def test_a_pool_that_is_dropped_ends_its_processes():
    pool = pool_of(commands())
    pids = pool.score(["server", "pid"], [{}] * 2).rewards
    del pool
    assert all(gone(pid) for pid in pids)


def test_a_killed_item_leaves_no_child(tmp_path):
    # the item starts a process and hangs: both go
    def grade(completion, example):
        if completion == "hang":
            with open(example["file"], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "100"]).pid))
            time.sleep(100)
        return float(open(example["file"]).read())

    with pool_of(grade, workers=1, wall_seconds=2.0) as pool:
        scores = pool.score(["hang", "read"], [{"file": str(tmp_path / "pid")}] * 2)
        assert scores.timeouts == 1
        assert gone(scores.rewards[1])


HANGING = """
    import os, sys, time
    from rljax.rewards import RewardPool

    def grade(completion, example):
        if completion == "hang":
            time.sleep(100)
        return os.getpid() if completion == "worker" else os.getppid()

    pool = RewardPool(grade, workers=2, cpu_seconds=50.0, memory_mb=1024)
    print(*pool.score(["worker", "server"], [{}, {}]).rewards.astype(int), flush=True)
    pool.submit(["hang"] * 4, [{}] * 4)
    if sys.argv[1] == "wait":
        time.sleep(100)
"""


def test_the_end_of_the_interpreter_ends_every_process(tmp_path):
    process = script(HANGING, "exit", cwd=tmp_path)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert all(gone(pid) for pid in output.split())


def test_a_killed_run_leaves_no_process(tmp_path):
    process = script(HANGING, "wait", cwd=tmp_path)
    pids = process.stdout.readline().split()
    assert len(pids) == 2 and not any(gone(pid, seconds=0.1) for pid in pids)
    process.kill()
    process.wait()
    process.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_signals_to_the_group_of_the_run_do_not_stop_grading():
    # a preempted run gets SIGTERM, often with all its processes, and still has a step to end
    with pool_of(commands(), workers=1) as pool:
        server, worker = pool.score(["server", "pid"], [{}, {}]).rewards
        for pid in (server, worker):
            os.kill(int(pid), signal.SIGTERM)
            os.kill(int(pid), signal.SIGINT)
        # the processes that a grader starts can be terminated all the same
        assert pool.score(["score 1", "pid", "terminate"], [{}] * 3).rewards.tolist() == [1, worker, -15]


def test_a_server_that_dies_is_an_error_and_not_a_hang():
    with pool_of(commands(), workers=1) as pool:
        server, worker = pool.score(["server", "pid"], [{}, {}]).rewards
        hanging = pool.submit(["sleep 100"], [{}])
        time.sleep(0.5)  # the worker is in it by now, and does not look at its pipe
        os.kill(int(server), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="died"):
            hanging.result(timeout=30.0)
        with pytest.raises(RuntimeError, match="make another pool"):
            pool.score(["score 1"], [{}])
        assert gone(worker) or sys.platform != "linux"


# ---- mistakes


def test_a_grader_that_cannot_be_loaded_says_why(tmp_path, monkeypatch):
    (tmp_path / "bad_grader.py").write_text(
        "import os\n"
        "if 'RLJAX_TEST' not in os.environ: raise OSError('no disk')\n"
        "def grade(completion, example): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RLJAX_TEST", "1")
    import bad_grader

    monkeypatch.delenv("RLJAX_TEST")
    with pool_of(bad_grader.grade) as pool, pytest.raises(RuntimeError, match="no disk"):
        pool.submit(["a"], [{}])


def test_a_graders_module_that_imports_jax_is_refused(tmp_path, monkeypatch):
    (tmp_path / "jax_grader.py").write_text("import jax\ndef grade(completion, example): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import jax_grader

    with pool_of(jax_grader.grade) as pool, pytest.raises(RuntimeError, match="imports jax; move it"):
        pool.ready()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"workers": 0}, "rewards.workers = 0"),
        ({"cpu_seconds": 0.0}, "rewards.cpu_seconds = 0"),
        ({"memory_mb": -1}, "rewards.memory_mb = -1"),
        ({"wall_seconds": 0.0}, "rewards.wall_seconds = 0"),
    ],
)
def test_a_limit_that_is_not_positive_is_an_error(limits, message):
    with pytest.raises(ValueError, match=message):
        pool_of(commands(), **limits)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_less_memory_than_the_imports_take_is_an_error():
    with pool_of(commands(), memory_mb=16) as pool, pytest.raises(RuntimeError, match="memory_mb = 16: the"):
        pool.ready()


def test_rows_and_examples_of_unlike_number_are_an_error():
    with pool_of(commands()) as pool, pytest.raises(ValueError, match="2 completions, 1 examples"):
        pool.submit(["score 1", "score 2"], [{}])
