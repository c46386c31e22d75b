"""Answers found and compared: values by hand. The pool's part of faults 24 is in tests/rewards_test.py."""

import subprocess
import sys
import threading
import time

import pytest

from rljax import tasks
from rljax.rewards import RewardPool
from rljax.tasks import base, grading


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{\frac{1}{6}}.", r"\frac{1}{6}"),
        (r"\boxed{1}, no: \boxed{ 2 }", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),  # the last complete one
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \right.}", r"\left\{x \right."),  # an escaped brace does not count
        (r"in \boxed{}: 5", "5"),  # an empty box is no answer
        (r"\boxed{\boxed{3}}", "3"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{1} <answer>2</answer> #### 3", "1"),
        ("<answer>2</answer> #### 3", "2"),
        ("<answer>1</answer> <answer> 2\n</answer>", "2"),
        ("<answer>no <answer>5</answer>", "5"),
        ("<answer>4", "4"),
        ("3 of 4\n#### 1,234\nfive 5", "1,234"),
        ("#### \nso 9", "9"),
        ("3 + 4 = 7.", "7"),
        ("7-3", "3"),  # a minus between two terms
        ("x = -3.5", "-3.5"),
        ("it is −2", "-2"),
        ("$1,234,567 in all", "1,234,567"),
        ("p = 1/6", "1/6"),
        ("about 1.5e-3", "1.5e-3"),
        ("or .5", ".5"),
        ("x2 is not a number", None),
        ("none", None),
        ("", None),
    ],
)
def test_extract_answer(completion, answer):
    assert grading.extract_answer(completion) == answer


@pytest.mark.parametrize("unit", [r"\boxed{", "<answer>", "\\", "9", "1,", "{", "#### \n", "(("])
def test_extract_answer_takes_linear_time(unit):
    started = time.process_time()
    grading.extract_answer(unit * 20_000)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (r"\boxed{\frac{1}{6}}", "1/6", 1.0),
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed{0.333333}", "1/3", 1.0),
        (r"\boxed{\dfrac{3}{2}}", r"1\frac{1}{2}", 1.0),
        (r"\boxed{-\frac{1}{2}}", "0.5", 0.0),
        ("She has $1,200.", "#### 1200", 1.0),
        ("142", 142.0, 1.0),  # a gold that is a number
        ("12", "13", 0.0),
        (r"\boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"\boxed{x^2+2x+2}", r"(x+1)^2", 0.0),
        (r"\boxed{\sin^2 x + \cos^2 x + y}", "y + 1", 1.0),
        (r"\boxed{\sin^2 x + \cos^2 x + y}", "x + 1", 0.0),
        (r"\boxed{\sqrt{5+2\sqrt{6}}}", r"\sqrt{2}+\sqrt{3}", 1.0),
        (r"\boxed{1 + 2i}", "1 - 2i", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\frac{1}{29322216}}", r"\dfrac{1}{29,\!322,\!216}", 1.0),
        (r"\boxed{1{,}234x}", "1234x", 1.0),
        (r"\boxed{\frac{1}{2}\,}.", r"\frac{1}{2}\;", 1.0),
        (r"\boxed{3!\!}", "6", 1.0),
        (r"\boxed{05:00}", r"05\!:\!00", 1.0),
        (r"\boxed{\frac{1}{0}}", r"\frac{2}{3}", 0.0),
        (r"\boxed{2, 1}", "1, 2", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{[0,1)}", "[0, 1]", 0.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"\boxed{2^{10}}", "1024", 1.0),
        (r"\boxed{10!}", "3628800", 1.0),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
        ("Cairo", "Cairo", 1.0),  # words are text, whatever the case
        (r"It is \boxed{\text{cairo}} 3", "Cairo", 1.0),
        ("It is Cairo.", "Cairo", 0.0),  # without a mark the whole completion is the answer
        (r"\boxed{on}", "no", 0.0),
        ("No.", "no", 1.0),
        (r"\boxed{two  lines}", r"\text{two lines}", 1.0),
        (r"\boxed{four}", r"\mbox{four}", 1.0),
        (r"\boxed{CABD}", r"\text{CBAD}", 0.0),
        (r"\boxed{yx}", "xy", 1.0),  # a product
        (r"\boxed{DC}", "CD", 1.0),  # a segment
        (r"\boxed{北京}", "北京", 1.0),
        (r"\boxed{\frac{}", "1", 0.0),
        ("no idea", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_grade_math(completion, gold, reward):
    assert grading.grade_math(completion, gold) == reward


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        r"\sqrt{9^{9^9}}",
        r"2^{-9^{9^9}}",
        r"9^{9 \cdot 10^8}",
        "(10^9)!",
        "10^{100000}",
        r"\begin{pmatrix} 9^{9^{9}} \\ 2 \end{pmatrix}",
        "(" * 400 + "1" + ")" * 400,
        "{" * 400 + "1" + "}" * 400,
        "1+" * 5000 + "1",
    ],
    ids=lambda answer: answer[:20],
)
def test_an_answer_too_large_to_compare_scores_zero_at_once(answer):
    grading.warm_up()
    started = time.process_time()
    assert grading.grade_math(rf"\boxed{{{answer}}}", "3") == 0.0
    assert time.process_time() - started < 2.0


def test_grade_math_works_in_any_thread():
    # math-verify's own timeouts raise outside the main thread (faults 24)
    rewards = {}

    def grade(number):
        right, wrong = rf"\boxed{{x+\frac{{{number}}}{{97}}}}", rf"\boxed{{x+\frac{{{number}}}{{89}}}}"
        rewards[number] = [grading.grade_math(text, f"{number}/97 + x") for text in (right, wrong)]

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {number: [1.0, 0.0] for number in range(1, 9)}


def test_math_verify_with_its_own_timeouts_works_in_a_worker():
    # its timeouts are SIGALRM, which only a main thread may set; a grader of one's own may use them
    def grade(completion, example):
        import math_verify

        gold = math_verify.parse(example["answer"], parsing_timeout=20)
        return float(math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=1), timeout_seconds=20))

    endless = r"\boxed{\binom{90000000}{45000000}}"
    with RewardPool(grade, workers=1, cpu_seconds=60.0, memory_mb=2048) as pool:
        scores = pool.score([r"\boxed{\frac{1}{6}}", endless, r"\boxed{1/6}"], [{"answer": r"\boxed{2/12}"}] * 3)
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0]
    assert (scores.errors, scores.timeouts) == (0, 0)  # math-verify itself gave the endless one up


def test_gold_that_does_not_parse_is_dropped_and_counted():
    golds = ["3", r"\frac{", "", r"\text{Evelyn}", "x +", "#### 7", r"\boxed{1/2}", "9^{9^{9}}", 4.0]
    kept, dropped = grading.drop_unparsable([{"prompt": "q", "answer": gold} for gold in golds])
    assert dropped == [1, 2, 4, 7]
    assert [example["answer"] for example in kept] == ["3", r"\text{Evelyn}", "#### 7", r"\boxed{1/2}", 4.0]
    assert [grading.gold_parses(gold) for gold in golds[:2]] == [True, False]


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ("Cairo", True),
        ("no", True),
        (r"$\text{New York}$", True),
        ("Softball, Kickball", True),
        ("well-known", True),
        ("LQSX", True),
        ("São", True),
        ("xy", False),
        ("CD", False),
        ("ab-c", False),  # a difference
        ("10 cm", False),
        (r"\pi", False),
        ("x", False),
        ("", False),
        (3.0, False),
    ],
)
def test_which_golds_are_words(gold, words):
    assert grading.is_words(gold) == words
    assert grading.gold_parses(gold) == (gold != "")


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (" Paris. ", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("It is Paris", "Paris", 0.0),  # without a mark the whole completion is the answer
        (r"It is \boxed{\text{New  York}}", "New York", 1.0),
        ("<answer>$12$</answer>", "12", 1.0),
        ("12.0", "12", 0.0),
    ],
)
def test_grade_exact(completion, gold, reward):
    assert grading.grade_exact(completion, gold) == reward


@pytest.mark.parametrize(
    ("completion", "gold", "tolerance", "reward"),
    [
        ("12", "12.0", {}, 1.0),
        ("so 1/2", 0.5, {}, 1.0),
        ("$1,200.50 each", "1200.5", {}, 1.0),
        (r"\boxed{1{,}200 \text{ cm}}", "1200", {}, 1.0),
        (r"\boxed{-\frac{1}{2}}", "-.5", {}, 1.0),
        (r"\boxed{1\frac{1}{2}}", "1.5", {}, 1.0),
        ("50%", "50", {}, 1.0),
        ("3.14", "3.14159", {}, 0.0),
        ("3.14", "3.14159", {"abs_tol": 0.002}, 1.0),
        ("3.14", "3.14159", {"abs_tol": 0.001}, 0.0),
        ("99", "100", {"rel_tol": 0.01}, 1.0),
        ("98.9", "100", {"rel_tol": 0.01}, 0.0),
        ("none", "5", {}, 0.0),
        ("1/0", "5", {}, 0.0),
        ("9" * 5000, "5", {}, 0.0),
    ],
)
def test_grade_numeric(completion, gold, tolerance, reward):
    assert grading.grade_numeric(completion, gold, **tolerance) == reward


def test_gold_of_the_wrong_kind_is_an_error():
    with pytest.raises(ValueError, match="'many' holds no number"):
        grading.grade_numeric("3", "many")
    assert not grading.holds_number("many") and grading.holds_number("so many: 3")


@pytest.mark.parametrize(
    ("completion", "prompt_end", "reward"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", "", 1.0),
        ("a</think><answer>b</answer>", "<|assistant|><think>\n", 1.0),  # the template wrote the opening tag
        ("a</think><answer>b</answer>", "", 0.0),
        ("<think>a</think><answer>b</answer>", "<think>", 0.0),  # opened twice
        ("<think> </think><answer>b</answer>", "", 0.0),
        ("<think>a</think><answer>b</answer> and more", "", 0.0),
        ("<think>a</think><answer>b", "", 0.0),
        ("<answer>b</answer><think>a</think>", "", 0.0),
        ("<think>a\n</think><answer><b></answer>", "", 1.0),
    ],
)
def test_format_reward(completion, prompt_end, reward):
    assert grading.format_reward(completion, prompt_end=prompt_end) == reward


def test_format_reward_with_other_tags():
    assert grading.format_reward("<plan>a</plan>", tags=("plan",)) == 1.0
    assert grading.format_reward("<think>a</think>", tags=("plan",)) == 0.0


ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval": []}, "task 'sums', eval: empty data set"),
        ({"train": [ROW, {"prompt": "1+2="}]}, "task 'sums', train: example 1 lacks field 'answer'"),
        ({"eval": [{"answer": "2"}]}, "task 'sums', eval: example 0 lacks field 'prompt'"),
        ({"eval": ["1+1="]}, "task 'sums', eval: example 0 is a str"),
        ({"train": [{"prompt": 3, "answer": 3}]}, "example 0 has the prompt 3"),
        ({"grade": None}, "grade is None"),
    ],
)
def test_a_task_with_bad_data_is_an_error_that_says_where(change, message):
    parts = {"name": "sums", "train": [ROW], "eval": [ROW], "grade": grading.grade_exact} | change
    with pytest.raises(ValueError, match=message):
        base.Task(**parts)


class Block:
    """A config's task block."""

    def __init__(self, name, **fields):
        self.name = name
        self.__dict__.update(fields)


def test_load_finds_tasks_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        "from rljax.tasks.base import Task\n"
        "from rljax.tasks.grading import grade_exact\n"
        "def grade(completion, example):\n    return grade_exact(completion, example['answer'])\n"
        "def make(config):\n"
        "    rows = [{'prompt': 'p', 'answer': str(config.seed)}]\n"
        "    return Task(name='mine', train=rows, eval=rows, grade=grade)\n"
        "def broken(config):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = tasks.load(Block("my_task:make", seed=7))
    assert (task.name, task.train[0]["answer"], task.grade("7", task.train[0])) == ("mine", "7", 1.0)
    with pytest.raises(ValueError, match="my_task:broken' returned a int"):
        tasks.load(Block("my_task:broken"))
    with pytest.raises(ValueError, match="my_task has no function 'other'"):
        tasks.load(Block("my_task:other"))
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        tasks.load(Block("nowhere.task:make"))
    with pytest.raises(ValueError, match="task.name='sums' is unknown; known: .*arithmetic"):
        tasks.load(Block("sums"))
    task = tasks.load(Block("arithmetic", seed=0, train_prompts=5, eval_prompts=3, mix="add1:1", shots=0))
    assert (len(task.train), len(task.eval)) == (5, 3)


def test_importing_tasks_imports_neither_jax_nor_sympy():
    code = (
        "import sys, rljax.tasks.grading as grading\n"
        "assert grading.grade_math('3', '3') == 1.0\n"
        "print({'jax', 'sympy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("answer", [r"\neq 4", r"\ne 4", r"\not 4", "> 4", r"$\ge 4$", "≥4", r"\lt 4"])
def test_what_is_related_to_the_answer_is_not_the_answer(answer):
    assert grading.grade_math(rf"\boxed{{{answer}}}", "4") == 0.0
    assert grading.grade_math(rf"\boxed{{{answer}}}", answer) == 1.0


def test_commands_that_begin_like_relations_are_none():
    assert grading.grade_math(r"\boxed{\left(1, 2\right)}", "(1,2)") == 1.0
    assert grading.grade_math(r"\boxed{x \ge 4}", r"x \geq 4") == 1.0
