"""Generated problems of reasoning-gym (extra gym); its absence is told without it."""

import os
import subprocess
import sys
import types

import pytest

from rljax import tasks
from rljax.rewards import RewardPool


def block(**changes):
    """A config's task block."""
    base = {
        "name": "reasoning_gym", "mix": "leg_counting", "options": "", "grader": "", "format": "boxed",
        "length_free": 0, "length_max": 0, "template": "", "stop": "", "seed": 0, "train_prompts": 6, "eval_prompts": 3,
    }  # fmt: skip
    return types.SimpleNamespace(**base | changes)


def prompts(examples):
    return [example["prompt"] for example in examples]


def test_a_missing_package_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs the package reasoning-gym; install it: pip install 'reasoning-gym>="):
        tasks.load(block())


@pytest.fixture(scope="module")
def gym():
    pytest.importorskip("reasoning_gym")
    from rljax.tasks import gym

    return gym


@pytest.fixture(scope="module")
def task(gym):
    return tasks.load(block(grader="own:0.75+format:0.25", template="Q: {prompt}"))


def questions(entries):
    return [entry["question"] for _, entry in entries]


def test_problems_are_of_the_seed_and_disjoint(gym):
    problems = gym.Problems("leg_counting", "")
    one, again, other = (problems.draw("train", 6, seed, set()) for seed in (0, 0, 1))
    assert one == again and len(set(questions(one))) == 6
    assert not set(questions(one)) & set(questions(other + problems.draw("eval", 6, 0, set())))
    assert problems.draw("train", 9, 0, set())[:6] == one
    assert questions(problems.draw("train", 5, 0, {questions(one)[0]})) == questions(one)[1:]


def test_a_task_has_as_many_as_asked_for(task):
    assert (len(task.train), len(task.eval), task.name, task.dropped) == (6, 3, "reasoning_gym", {})
    assert len(set(prompts(task.train + task.eval))) == 9
    assert all(prompt.startswith("Q: ") and "legs" in prompt for prompt in prompts(task.train))


def test_the_answer_is_taken_from_tag_or_box_or_whole(task):
    example = task.eval[0]
    right, wrong = example["answer"], str(int(example["answer"]) + 1)
    completions = {
        right: 1.0,
        f"it is <answer>{right}</answer>": 1.0,
        rf"it is \boxed{{{right}}}, not 5.": 1.0,
        rf"\boxed{{{wrong}}} <answer>{right}</answer>": 1.0,
        f"<answer>{wrong}</answer>": 0.0,
        "": 0.0,
    }
    assert example["judge"] == "own" and "judge" not in task.train[0]
    assert {text: task.grade(text, example) for text in completions} == completions


def test_an_answer_that_the_scorer_raises_on_is_wrong(gym):
    problems = gym.Problems("prime_factorization", "")
    ((name, entry),) = problems.draw("train", 1, 0, set())
    datasets = problems.datasets(0, "train", 1)
    with pytest.raises(ValueError, match="invalid literal for int"):
        datasets[name].score_answer("no idea", entry)
    score = gym.Score(datasets, [(name, entry)])
    assert [score(text, {"entry": 0}) for text in (entry["answer"], "no idea")] == [1.0, 0.0]


def test_a_mix_of_generators_with_options(gym):
    problems = gym.Problems("chain_sum:3,leg_counting", FEW)
    entries = problems.draw("train", 40, 0, set())
    examples = [problems.example(i, *entry, "{prompt}") for i, entry in enumerate(entries)]
    counts = {kind: [e["kind"] for e in examples].count(kind) for kind in ("chain_sum", "leg_counting")}
    assert sum(counts.values()) == 40 and counts["chain_sum"] == pytest.approx(30, abs=8)
    sums = prompts(e for e in examples if e["kind"] == "chain_sum")
    assert all(len([char for char in prompt if char.isdigit()]) == 2 for prompt in sums)


def test_the_score_is_part_of_a_sum_and_reaches_the_workers(task):
    train, held_out = task.train[0], task.eval[0]
    items = [(train["answer"], train), (rf"\boxed{{{train['answer']}}}", train), (held_out["answer"], held_out)]
    with RewardPool(task.grade, workers=1, cpu_seconds=10.0, memory_mb=1024) as pool:
        scores = pool.score(*map(list, zip(*items, strict=True)))
    assert scores.rewards.tolist() == [0.75, 1.0, 1.0] and scores.errors == 0


@pytest.mark.slow  # two more interpreters
def test_problems_do_not_depend_on_how_texts_hash(gym):
    code = (
        "from rljax.tasks import gym\n"
        "print(gym.drawn('isomorphic_strings,ransom_note,polynomial_multiplication', '', seed=0, train=9, held_out=3))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != b""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mix": ""}, "needs the name of a generator in task.mix, or several with weights; known: .*leg_counting"),
        ({"mix": "leg_count"}, r"no generator 'leg_count' \(did you mean 'leg_counting'\?\); known: .*chain_sum"),
        ({"options": "{"}, "task.options='{' is not JSON"),
        ({"options": "[]"}, "must hold an object by generator"),
        ({"options": '{"max_animals": 3}'}, "must hold an object by generator"),
        ({"options": '{"chain_sum": {}}'}, r"task.options has 'chain_sum', which is not in task.mix \(leg_counting\)"),
        ({"options": '{"leg_counting": {"animals": 3}}'}, "leg_counting has no option 'animals'; known: min_animals"),
        ({"options": '{"leg_counting": {"seed": 3}}'}, "leg_counting has no option 'seed'"),
        ({"options": '{"leg_counting": {"min_animals": 0}}'}, "is refused by leg_counting"),
    ],
)
def test_what_is_wrong_is_told(gym, changes, told):
    with pytest.raises(ValueError, match=told):
        tasks.load(block(**changes))


def test_answers_that_the_reward_cannot_read_are_told(gym, monkeypatch):
    entry = {"question": "x", "answer": "3", "metadata": {}}
    monkeypatch.setattr(gym, "drawn", lambda *_, **__: ([("leg_counting", entry)], [("leg_counting", entry)]))
    with pytest.raises(ValueError, match="task.grader='choice' cannot read the answers of task.mix='leg_counting'"):
        tasks.load(block(grader="choice"))


FEW = '{"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}'
TOO_FEW = r"gave \d+ distinct train problems in 3700 draws, of 900 asked for; .*task.train_prompts"


def test_fewer_problems_than_asked_for_is_told(gym):
    with pytest.raises(ValueError, match=TOO_FEW):
        gym.Problems("chain_sum", FEW).draw("train", 900, 0, set())


@pytest.mark.slow  # one more interpreter
def test_what_the_other_interpreter_refuses_is_told(gym):
    with pytest.raises(ValueError, match=TOO_FEW):
        tasks.load(block(mix="chain_sum", options=FEW, train_prompts=900))
