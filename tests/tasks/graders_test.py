"""Rewards by name and their weighted sums; values by hand."""

import cloudpickle
import pytest

from rljax.rewards import RewardPool
from rljax.tasks import graders

EXAMPLE = {"prompt": "1+1", "answer": "2"}
THOUGHT = "<think>1 and 1</think> It is "


@pytest.mark.parametrize(
    ("spec", "completion", "value"),
    [
        ("math", r"\boxed{\frac{4}{2}}", 1.0),
        ("math:2", "so 2", 2.0),
        ("exact", "2", 1.0),
        ("exact", "so 2", 0.0),
        ("numeric", "2 apples", 1.0),
        ("format", "so 2", 0.0),
        ("format", r"so \boxed{3}", 1.0),
        ("math:0.9+format:0.1", r"\boxed{2}", 1.0),
        ("math:0.9+format:0.1", "so 2", 0.9),
        ("math:0.9+format:0.1", r"\boxed{3}", 0.1),
        ("math:0.9+format:0.1", "so 3", 0.0),
        ("math+length:0.5", "2" + " " * 9, 1.5),  # 10 characters
        ("math+length:0.5", "2" + " " * 14, 1.25),
        ("math+length:0.5", "2" + " " * 19, 1.0),
        ("math+length:0.5", "2" + " " * 99, 1.0),
    ],
)
def test_rewards(spec, completion, value):
    reward = graders.reward(spec, length_free=10, length_max=20)
    assert reward(completion, EXAMPLE) == pytest.approx(value)


@pytest.mark.parametrize(
    ("form", "completion", "kept"),
    [
        ("boxed", r"\boxed{1", False),
        ("boxed", r"no \boxed{}", False),
        ("boxed", r"\boxed{1} or so", True),
        ("think", THOUGHT + "2", True),
        ("think", "\n" + THOUGHT + "2\n", True),
        ("think", "It is 2", False),
        ("think", "Well, " + THOUGHT + "2", False),
        ("think", "<think> </think> 2", False),
        ("think", "<think>2</think>", False),  # no answer after it
        ("think", "<think>2", False),
        ("think", THOUGHT + THOUGHT + "2", False),
        ("think_answer", "<think>a</think><answer>2</answer>", True),
        ("think_answer", THOUGHT + "2", False),
        ("regex:^[0-9]+$", "22", True),
        ("regex:^[0-9]+$", "so 22", False),
        ("regex:first.*second", "first\nand second", True),
    ],
)
def test_forms(form, completion, kept):
    assert graders.reward("format", form=form)(completion, EXAMPLE) == float(kept)


def test_choices_and_the_tasks_own_grader():
    choice = graders.reward("choice+format")
    assert choice(r"\boxed{E}", {"answer": "E", "letters": "ABCDE"}) == 2.0
    assert choice(r"\boxed{E}", {"answer": "B", "letters": "ABCD"}) == 1.0
    assert graders.reward("choice")("answer: F", {"answer": "F"}) == 1.0  # letters to J where a row says nothing
    own = graders.reward("own:0.5+format:0.5", own=lambda completion, example: 0.5)
    assert own("x", EXAMPLE) == 0.25
    assert graders.reward("own+format", own=lambda completion, example: None)("x", EXAMPLE) is None


def test_held_out_examples_are_judged_by_the_first_grader():
    reward = graders.reward("math:0.5+format:0.5")
    (held_out,) = reward.judged([EXAMPLE])
    assert held_out == EXAMPLE | {"judge": "math"}
    assert [reward("so 2", held_out), reward("so 2", EXAMPLE), reward(r"\boxed{3}", held_out)] == [1.0, 0.5, 0.0]
    assert graders.reward("math:0.5").judged([EXAMPLE]) == [held_out]  # accuracy is 1, not 0.5
    assert graders.reward("math").judged([EXAMPLE]) == graders.reward("math:1").judged([EXAMPLE]) == [EXAMPLE]


@pytest.mark.parametrize(
    ("spec", "gold", "readable"),
    [
        ("math", "1/2", True),
        ("math", "Cairo", True),
        ("math", r"\frac{", False),
        ("math", None, False),
        ("math+format", r"\frac{", False),
        ("exact", r"\frac{", True),
        ("exact", "", False),
        ("numeric", "3 cm", True),
        ("numeric", "Cairo", False),
        ("choice", "C", True),
        ("choice", "c", False),
        ("choice", "", False),
        ("format+length", None, True),
    ],
)
def test_which_golds_a_reward_reads(spec, gold, readable):
    assert graders.reward(spec, length_max=9).reads(gold) == readable


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"spec": "judge"}, "task.grader='judge': no grader 'judge'; known: math, exact, numeric, choice, own"),
        ({"spec": "math:0"}, "task.grader='math:0': the weight of math must be above 0"),
        ({"spec": "math+math"}, "math stands twice"),
        ({"spec": "own"}, "task.grader=own is a grader that a task brings along; this one has none"),
        ({"spec": "length", "length_max": 9}, "task.grader begins with `length`; put the grader of the answer first"),
        ({"spec": "math+length"}, "task.length_max=0 is not above task.length_free=0"),
        ({"spec": "math+length", "length_free": 9, "length_max": 9}, "task.length_max=9 is not above"),
        ({"spec": "math", "form": "box"}, "task.format='box' is unknown; known: boxed, think, think_answer, regex:"),
        ({"spec": "math", "form": "regex:("}, r"task.format='regex:\(' is no regular expression"),
    ],
)
def test_what_is_wrong_is_told(arguments, told):
    with pytest.raises(ValueError, match=told):
        graders.reward(**arguments)


def test_a_sum_reaches_the_workers():
    reward = graders.reward("exact:0.5+format:0.25", form="regex:^.$")
    assert len(cloudpickle.dumps(reward)) < 500
    with RewardPool(reward, workers=1, cpu_seconds=10.0, memory_mb=2048) as pool:
        scores = pool.score(["2", "3", "#### 2"], [EXAMPLE] * 3)
    assert scores.rewards.tolist() == [0.75, 0.25, 0.5] and scores.errors == 0


@pytest.mark.parametrize(
    ("completion", "example", "answer"),
    [
        ("The answer is (b)", {"answer": "A", "letters": "ABCD"}, "B"),
        ("no idea", {"answer": "A", "letters": "ABCD"}, None),
        (r"\boxed{1/2}, not 3", EXAMPLE, "1/2"),
        ("so 3", EXAMPLE, "3"),
        (" Cairo ", EXAMPLE, "Cairo"),
    ],
)
def test_what_a_completion_votes_for(completion, example, answer):
    assert graders.vote(completion, example) == answer
