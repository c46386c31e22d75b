"""Generated arithmetic: splits that share no operand pair, right answers, reproducible problems."""

import ast
import itertools
import operator
import random
import re

import pytest

from rljax.tasks import arithmetic

EVERY_KIND = ",".join(arithmetic.KINDS)


def operands(prompt):
    return [int(n) for n in re.findall(r"\d+", prompt)]


def pairs(prompt):
    return {frozenset(pair) for pair in itertools.pairwise(operands(prompt))}


def left_to_right(prompt):
    """The value by Python's own parser; it binds * first, which no kind mixes with + or -."""
    assert prompt.endswith("=") and not ("*" in prompt and re.search("[+-]", prompt))
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node):
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        return node.value

    return value(ast.parse(prompt[:-1], mode="eval").body)


@pytest.fixture(scope="module")
def drawn():
    """2,000 problems of every split over every kind (problems() gives distinct ones, draw() any number)."""
    out = {}
    for split in arithmetic.SPLITS:
        rng = random.Random(f"test/{split}")
        kinds = [kind for kind in arithmetic.KINDS for _ in range(200)]
        out[split] = [(kind, arithmetic.text(*arithmetic.draw(kind, (split,), rng))) for kind in kinds]
    return out


def test_splits_share_no_operand_pair_in_either_order(drawn):
    seen = {split: set().union(*(pairs(prompt) for _, prompt in rows)) for split, rows in drawn.items()}
    assert all(len(found) > 100 for found in seen.values())
    for a, b in itertools.combinations(seen, 2):
        assert not seen[a] & seen[b], f"{a} and {b}"


def test_the_split_of_a_pair_does_not_depend_on_its_order_and_shares_are_as_declared():
    rng = random.Random(0)
    count = dict.fromkeys(arithmetic.SPLITS, 0)
    for _ in range(20_000):
        a, b = rng.randint(0, 999), rng.randint(0, 999)
        assert arithmetic.split_of(a, b) == arithmetic.split_of(b, a)
        count[arithmetic.split_of(a, b)] += 1
    assert count["warm"] / 20_000 == pytest.approx(0.70, abs=0.02)
    assert count["train"] / 20_000 == pytest.approx(0.18, abs=0.02)
    assert count["eval"] / 20_000 == pytest.approx(0.12, abs=0.02)


def test_answers_are_right_and_never_negative(drawn):
    for rows in drawn.values():
        for _, prompt in rows:
            terms, ops = operands(prompt), re.findall(r"[-+*]", prompt)
            assert arithmetic.evaluate(terms, ops) == left_to_right(prompt) >= 0, prompt


def test_kinds_are_what_their_names_say(drawn):
    digits = {"add1": 1, "sub1": 1, "add2": 2, "sub2": 2, "add3": 3, "sub3": 3}
    for kind, prompt in drawn["train"]:
        terms, ops = operands(prompt), re.findall(r"[-+*]", prompt)
        assert len(terms) == (3 if kind == "chain" else 2)
        if kind in digits:
            assert ops == ["+" if kind.startswith("add") else "-"]
            assert all(len(str(t)) == digits[kind] for t in terms)
        if kind.startswith("mul"):
            assert ops == ["*"] and all(t >= 2 for t in terms)


def test_problems_are_distinct_right_and_reproducible():
    one = arithmetic.problems("train", 1000, "", 7)
    assert one == arithmetic.problems("train", 1000, "", 7)
    assert len({e["prompt"] for e in one}) == len(one) == 1000
    assert {e["kind"] for e in one} == set(arithmetic.parse_mix(""))
    for e in one:
        assert e["answer"] == str(left_to_right(e["prompt"])) and e["kind"] in arithmetic.KINDS
    assert one != arithmetic.problems("train", 1000, "", 8)
    assert arithmetic.problems("train", 10, "", 7) == one[:10]


def test_the_mix_decides_the_shares():
    kinds = [e["kind"] for e in arithmetic.problems("warm", 1000, "add3:3,sub3:1", 0)]
    assert set(kinds) == {"add3", "sub3"} and kinds.count("add3") == pytest.approx(750, abs=60)
    assert arithmetic.parse_mix("add2: 2, mul21") == {"add2": 2.0, "mul21": 1.0}


@pytest.mark.parametrize(
    "mix, told",
    [
        ("add9:1", r"no kind 'add9' \(did you mean 'add.'\?\); known: add1"),
        ("add2:much", "the weight 'much' of add2 is not a number"),
        ("add2:0", "the weight of add2 must be above 0"),
        ("add2:-1", "the weight of add2 must be above 0"),
        ("add2:nan", "the weight of add2 must be above 0"),
        ("add2:inf", "the weight of add2 must be"),
        ("add2:1,add2:3", "add2 stands twice"),
        ("add2:1,", "no kind ''"),
    ],
)
def test_a_bad_mix_is_told(mix, told):
    with pytest.raises(ValueError, match=told):
        arithmetic.problems("train", 1, mix, 0)


def test_more_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="fewer than 50 distinct eval problems.*task.eval_prompts"):
        arithmetic.problems("eval", 50, "mul1", 0)


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("85", 1.0),
        (" 85\n", 1.0),
        ("86", 0.0),
        ("085", 0.0),
        ("85.", 0.0),
        ("the answer is 85", 0.0),
        ("", 0.0),
    ],
)
def test_grade_takes_the_answer_and_nothing_else(completion, reward):
    assert arithmetic.grade(completion, {"prompt": "37+48=", "answer": "85"}) == reward


def test_make_gives_a_task_whose_sets_are_disjoint():
    task = arithmetic.make(seed=0, train_prompts=300, eval_prompts=100, mix=EVERY_KIND, shots=0)
    assert task.stop == ""
    assert (task.name, len(task.train), len(task.eval)) == ("arithmetic", 300, 100)
    train, held_out = (set().union(*(pairs(e["prompt"]) for e in part)) for part in (task.train, task.eval))
    assert not train & held_out
    assert all(task.grade(e["answer"], e) == 1.0 for e in task.eval)


def test_few_shot_prompts_show_solved_problems_of_the_same_kind():
    task = arithmetic.make(seed=0, train_prompts=200, eval_prompts=100, mix="add1,mul1,sub2,chain", shots=4)
    assert task.stop == "\n"
    held_out = set()
    for split, examples in (("train", task.train), ("eval", task.eval)):
        assert len({e["prompt"] for e in examples}) == len(examples)
        for e in examples:
            *lines, question = e["prompt"].split("\n")
            assert len(set(lines)) == 4 and question.endswith(" =") and question not in e["prompt"][: -len(question)]
            for line in lines:
                problem, _, answer = line.rpartition(" = ")
                assert answer == str(left_to_right(problem + "="))
                assert len(re.findall(r"[-+*]", problem)) == len(re.findall(r"[-+*]", question))
                held_out |= {pair for pair in pairs(problem) if arithmetic.split_of(min(pair), max(pair)) == "eval"}
            assert e["answer"] == str(left_to_right(question))
            asked = {arithmetic.split_of(min(pair), max(pair)) for pair in pairs(question)}
            assert asked == {"eval"} if split == "eval" else "eval" not in asked
    assert not held_out  # no line shows a held-out problem


def test_the_few_shot_problems_of_training_take_the_pairs_of_the_warm_start():
    questions = [e["prompt"].split("\n")[-1] for e in arithmetic.problems("train", 300, "add1", 0, shots=2)]
    splits = {arithmetic.split_of(min(pair), max(pair)) for q in questions for pair in pairs(q)}
    assert splits == {"warm", "train"}
    assert len(set(questions)) < len(questions)  # 88 pairs are too few: problems come again, after other lines


def test_more_shots_than_there_are_problems_is_an_error():
    with pytest.raises(ValueError, match="task.shots=90: fewer distinct mul1 problems to show"):
        arithmetic.problems("train", 1, "mul1", 0, shots=90)
