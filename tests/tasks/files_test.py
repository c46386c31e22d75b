"""Tasks of data files: which rows, which gold, which prompt; and the real files of ../shared/data, where they are."""

import dataclasses
import json
import pathlib
from typing import Any

import cloudpickle
import pyarrow
import pytest
from pyarrow import parquet

from rljax import options, tasks
from rljax.tasks import files, grading, records

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"


@dataclasses.dataclass
class Block:
    """A config's task block."""

    name: str
    path: str
    eval_path: str = ""
    prompt_field: str = ""
    answer_field: str = ""
    kind_field: str = ""
    choices_field: str = ""
    gold: str = ""
    grader: str = ""
    format: str = "boxed"
    length_free: int = 0
    length_max: int = 0
    template: str = ""
    stop: str = ""
    seed: int = 0
    train_prompts: int = 0
    eval_prompts: int = 2


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def sums(count, **more):
    return [{"prompt": f"{i}+1", "answer": i + 1, **more} for i in range(count)]


def prompts(examples):
    return [example["prompt"] for example in examples]


def test_the_names_are_those_of_the_layouts():
    assert set(tasks.TASKS) - {"arithmetic", "reasoning_gym"} == set(files.LAYOUTS) == set(options.FILE_TASKS)


@pytest.mark.parametrize(
    ("name", "row", "prompt", "answer", "completion"),
    [
        ("file", {"prompt": "1+1", "answer": 2.0}, "1+1", "2", "so 2"),
        ("gsm8k", {"question": "How many?", "answer": "3*400 = 1200\n#### 1,200"}, "How many?", "1,200", "$1200"),
        ("math", {"problem": "p", "answer": r"\frac{1}{2}"}, "p", r"\frac{1}{2}", r"\boxed{0.5}"),
        ("aime", {"problem": "p", "answer": "033"}, "p", "033", r"\boxed{33}"),
        ("amc", {"problem": "p", "answer": 142.0}, "p", "142", r"\boxed{142}"),
        (
            "dapo_math",
            {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "34", "style": "rule"}},
            "p",
            "34",
            "Answer: 34",
        ),
    ],
)
def test_named_tasks_know_their_fields(tmp_path, name, row, prompt, answer, completion):
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    other = jsonl(tmp_path / "b.jsonl", [json.loads(json.dumps(row).replace(json.dumps(prompt), '"other"'))])
    task = tasks.load(Block(name, path, eval_path=other))
    (example,) = task.train
    assert example["prompt"].startswith(prompt) and example["answer"] == answer
    assert ("boxed" in example["prompt"]) == (name not in ("file", "dapo_math"))
    assert (task.grade(completion, example), task.grade("7", example)) == (1.0, 0.0)
    assert task.name == name and task.dropped == {} and prompts(task.eval)[0].startswith("other")


def test_fields_gold_grader_template_and_stop_may_be_given(tmp_path):
    rows = [{"q.text": f"Capital {i}?", "a": [{"x": rf"It is \boxed{{City {i}}}."}]} for i in range(4)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    given: dict[str, Any] = {"prompt_field": "q.text", "answer_field": "a.0.x", "gold": "boxed", "grader": "exact"}
    task = tasks.load(Block("file", path, template="Q: {prompt}\nA: {x}", stop="\n", **given))
    numbers = sorted(int(example["answer"].removeprefix("City ")) for example in task.train + task.eval)
    assert numbers == [0, 1, 2, 3] and task.stop == "\n"
    (example, *_) = task.train
    assert example["prompt"] == f"Q: Capital {example['answer'][5:]}?\nA: {{x}}"
    assert (task.grade(example["answer"], example), task.grade(example["answer"].lower(), example)) == (1.0, 0.0)


def test_a_numeric_grader_takes_the_last_number(tmp_path):
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", sums(4)), grader="numeric"))
    example = task.train[0]
    assert task.grade(f"it is {example['answer']} apples", example) == 1.0


def test_the_grader_reaches_a_worker_by_reference(tmp_path):
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", sums(4))))
    assert len(cloudpickle.dumps(task.grade)) < 500


def test_the_held_out_share_is_disjoint_and_of_the_seed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", sums(20))
    one, again, other = (tasks.load(Block("file", path, eval_prompts=6, seed=seed)) for seed in (0, 0, 1))
    assert one.train == again.train and one.eval == again.eval and set(prompts(one.eval)) != set(prompts(other.eval))
    assert len(one.eval) == 6 and sorted(prompts(one.train + one.eval)) == sorted(prompts(sums(20)))
    assert prompts(one.eval) == [prompt for prompt in prompts(sums(20)) if prompt in prompts(one.eval)]  # its order
    fewer = tasks.load(Block("file", path, eval_prompts=6, train_prompts=5))
    assert fewer.eval == one.eval and fewer.train == one.train[:5]
    assert fewer.dropped == {"over task.train_prompts": 9}


def test_a_held_out_file_takes_its_prompts_from_training(tmp_path):
    path, eval_path = jsonl(tmp_path / "a.jsonl", sums(10)), jsonl(tmp_path / "b.jsonl", sums(4))
    task = tasks.load(Block("file", path, eval_path=eval_path, eval_prompts=3, train_prompts=5))
    assert set(prompts(task.eval)) < {"0+1", "1+1", "2+1", "3+1"} and len(task.eval) == 3
    assert set(prompts(task.train)) < {f"{i}+1" for i in range(4, 10)} and len(task.train) == 5
    assert task.dropped == {
        "in task.eval_path too": 4, "over task.eval_prompts": 1, "over task.train_prompts": 1
    }  # fmt: skip
    everything = tasks.load(Block("file", path, eval_path=eval_path, eval_prompts=0))
    assert len(everything.train) == 6 and prompts(everything.eval) == prompts(sums(4))


def test_repeated_prompts_and_bad_golds_are_left_out_and_counted(tmp_path):
    bad = [{"prompt": "x", "answer": r"\frac{"}, {"prompt": "y", "answer": ""}, {"prompt": "z", "answer": None}]
    nameless = [{"prompt": " ", "answer": "1"}, {"prompt": None, "answer": "1"}]
    path = jsonl(tmp_path / "a.jsonl", [*sums(6), *bad, *nameless, *sums(3)])
    task = tasks.load(Block("file", path))
    assert sorted(prompts(task.train + task.eval)) == [f"{i}+1" for i in range(6)]
    assert task.dropped == {
        "whose prompt stands twice": 3, "without a prompt": 2, "whose gold answer does not parse": 3
    }  # fmt: skip
    texts = jsonl(tmp_path / "b.jsonl", [*sums(3), {"prompt": "x", "answer": "no number"}])
    assert tasks.load(Block("file", texts, grader="numeric")).dropped == {"whose gold answer does not parse": 1}
    assert tasks.load(Block("file", texts, grader="exact")).dropped == {}
    hashes = jsonl(tmp_path / "c.jsonl", [{"prompt": f"{i}", "answer": f"1\n#### {i}"} for i in range(3)] + sums(1))
    assert tasks.load(Block("file", hashes, gold="hash")).dropped == {"whose gold answer does not parse": 1}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ([{"level": "Level 1"}, {"level": "Level 2"}, {"level": "Level 2"}], {"Level_1", "Level_2"}),
        ([{"difficulty": 2.0}, {"difficulty": 4.625}, {"difficulty": 5.0}], {"2", "5"}),
        ([{"kind": "a", "level": 1}, {"kind": "a", "level": 2}, {"kind": "a", "level": 3}], {"1", "2", "3"}),
        ([{"kind": "a"}, {"kind": "b"}, {}], {None}),
        ([{"kind": ["a"]}, {"kind": ["b"]}, {"kind": []}], {None}),
        ([{"kind": str(i)} for i in range(21)], {None}),  # no grouping
    ],
)
def test_a_field_that_groups_the_results_is_the_kind(tmp_path, fields, kinds):
    rows = [row | more for row, more in zip(sums(len(fields)), fields, strict=True)]
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", rows), eval_prompts=1))
    assert {example.get("kind") for example in task.train + task.eval} == kinds


def test_a_field_that_is_named_groups_the_results(tmp_path):
    rows = [row | {"about": {"topic": topic}} for row, topic in zip(sums(4), (" a b", 3, None, 2.0), strict=True)]
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", rows), kind_field="about.topic"))
    kinds = {example["prompt"]: example.get("kind") for example in task.train + task.eval}
    assert kinds == {"0+1": "a_b", "1+1": "3", "2+1": None, "3+1": "2"}


def test_golds_that_are_words_are_graded_as_text(tmp_path):
    answers = {"Egypt?": "Cairo", "Rain?": False, "7?": 7}
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", rows), eval_prompts=1))
    assert task.dropped == {}
    rewards = {
        example["prompt"]: [task.grade(text, example) for text in ("Cairo", "cairo.", r"\boxed{False}", "so 7")]
        for example in task.train + task.eval
    }
    assert rewards == {"Egypt?": [1, 1, 0, 0], "Rain?": [0, 0, 1, 0], "7?": [0, 0, 0, 1]}


def test_numbers_of_a_file_are_golds_as_they_are(tmp_path):
    numbers = [1e23, 142.0, 0.1, 10**25, 2.0**53, True]
    rows = [{"prompt": f"{i}", "answer": number} for i, number in enumerate(numbers)]
    task = tasks.load(Block("file", jsonl(tmp_path / "a.jsonl", rows)))
    golds = {example["prompt"]: example["answer"] for example in task.train + task.eval}
    assert [golds[f"{i}"] for i in range(6)] == ["1e+23", "142", "0.1", "1" + "0" * 25, "9007199254740992.0", "true"]
    assert task.grade("1" + "0" * 23, {"answer": golds["0"]}) == 1.0


def test_held_out_answers_are_judged_by_the_main_grader_alone(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", sums(6))
    task = tasks.load(Block("file", path, grader="math:0.9+format:0.1"))
    for completion, in_training, held_out in (("{}", 0.9, 1), (r"\boxed{{{}}}", 1, 1), (r"\boxed{{0{}1}}", 0.1, 0)):
        for examples, reward in ((task.train, in_training), (task.eval, held_out)):
            example = examples[0]
            assert task.grade(completion.format(example["answer"]), example) == pytest.approx(reward)
    assert {example["judge"] for example in task.eval} == {"math"} and "judge" not in task.train[0]
    plain = tasks.load(Block("file", path, grader="math"))
    assert "judge" not in plain.eval[0]


METALS = {
    "list": {"choices": ["tin", "iron", "zinc"], "answer": 1},
    "labels": {"choices": {"text": ["tin", "iron", "zinc"], "label": ["A", "B", "C"]}, "answer": "B"},
    "letters": {"options": {"A": "tin", "B": "iron", "C": "zinc"}, "answer": "iron"},
    "fields": {"A": "tin", "B": "iron", "C": "zinc", "answer": "b"},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("row", METALS.values(), ids=METALS)
def test_multiple_choice(tmp_path, row, suffix):
    rows = [{"question": question, **row} for question in ("Which rusts?", "Which corrodes?")]
    path = str(tmp_path / f"a{suffix}")
    if suffix == ".jsonl":
        jsonl(tmp_path / "a.jsonl", rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = tasks.load(Block("choice", path, eval_prompts=1))
    (example,) = task.train
    assert example["prompt"].startswith("Which ") and "?\nA. tin\nB. iron\nC. zinc\n\nThink" in example["prompt"]
    assert (example["answer"], example["letters"]) == ("B", "ABC")
    completions = (r"\boxed{B}", "The answer is (b).", "A", "D", "iron")
    assert [task.grade(text, example) for text in completions] == [1, 1, 0, 0, 0]


def test_rows_without_choices_or_a_right_one_are_left_out_and_counted(tmp_path):
    choices = {"text": ["tin", "iron"], "label": ["A", "B"]}
    none = {"text": [], "label": []}
    rows = [
        {"question": f"{i}?", "choices": what, "answerKey": key, "answer": "", "details": {"level": f"L{i % 2}"}}
        for i, (what, key) in enumerate([(choices, "A"), (choices, "B"), (none, ""), (choices, "E"), (choices, "")])
    ]
    task = tasks.load(Block("sciknoweval", jsonl(tmp_path / "a.jsonl", rows), eval_prompts=1))
    assert {example["kind"]: example["answer"] for example in task.train + task.eval} == {"L0": "A", "L1": "B"}
    assert task.dropped == {"without choices": 1, "whose gold answer is no choice": 2}
    with pytest.raises(ValueError, match="a.jsonl, line 1 has none of the fields choices, options or A, B"):
        tasks.load(Block("choice", jsonl(tmp_path / "a.jsonl", [{"question": "x", "answer": "A"}])))


@pytest.mark.parametrize(
    ("rows", "changes", "told"),
    [
        (
            [*sums(2), {"prompt": "x"}],
            {},
            r"a.jsonl, line 3 has no field 'answer' \(task.answer_field\); it has prompt",
        ),
        (sums(3), {"name": "gsm8k"}, r"line 1 has no field 'question' \(task.prompt_field\); it has prompt, answer"),
        (sums(3), {"prompt_field": "prompt.0.content"}, "line 1 has no field 'prompt.0.content'"),
        ([{"prompt": [{"content": "x"}], "answer": 1}], {}, "'prompt' .* is a list, not text; name .* prompt.0"),
        ([{"prompt": "x\ud800", "answer": "1"}], {}, "'prompt' .* holds a lone surrogate"),
        ([{"prompt": "x", "answer": {"a": 1}}], {}, "'answer' .* is a dict, not text; name .* answer.name"),
        ([{"prompt": f"{i}", "answer": "no"} for i in range(3)], {"grader": "numeric"}, "can read none of the 3.*'no'"),
        (sums(3), {"gold": "boxed"}, "can read none of the 3 gold answers .task.gold='boxed'.*such as None"),
        (sums(3), {"eval_prompts": 3}, "leaves no training prompt beside 3 held out; lower task.eval_prompts"),
        ([], {}, "a.jsonl has no row with a prompt"),
        (sums(3), {"gold": "last"}, "task.gold='last' is unknown; known: as_is, hash, boxed"),
        (sums(3), {"grader": "judge"}, "task.grader='judge': no grader 'judge'; known: math, exact, numeric, choice"),
        (sums(3), {"grader": "own"}, "task.grader=own is a grader that a task brings along; this one has none"),
        (sums(3), {"grader": "math+length"}, "task.length_max=0 is not above task.length_free=0"),
        (sums(3), {"choices_field": "answer"}, "task.grader='math' does not grade the letters of multiple choice"),
        (sums(3), {"kind_field": "topic"}, r"line 1 has no field 'topic' \(task.kind_field\); it has prompt, answer"),
        (sums(21), {"kind_field": "answer"}, "task.kind_field='answer' has 21 values; .* at most 20"),
        ([{"prompt": "x", "answer": float("nan")}], {}, "line 1: the field 'answer' .* is nan, which is no number"),
        (sums(3), {"template": "Q:"}, "task.template='Q:' lacks {prompt}"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, rows, changes, told):
    with pytest.raises(ValueError, match=told):
        tasks.load(dataclasses.replace(Block("file", jsonl(tmp_path / "a.jsonl", rows)), **changes))


UNREAD = [  # the rows that are listed as unparseable, each with its gold; the first two are null
    ("math_train.json, row 887", ""),
    ("math_train.json, row 1010", ""),
    ("math_train.json, row 5329", ""),
    ("math_train.json, row 5331", ""),
    ("math_train.json, row 6924", r"\sin^2 t"),
]
REAL = [
    ("gsm8k", "gsm8k_train.jsonl", 7473),
    ("gsm8k", "gsm8k_test.jsonl", 1319),
    ("math", "math_test.json", 500),
    ("aime", "aime_train.json", 975),
    ("aime", "aime_test.json", 30),
    ("amc", "amc_test.json", 83),
    pytest.param("math", "math_train.json", 7474, marks=pytest.mark.slow),  # half a minute
]


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the project")
@pytest.mark.parametrize(("name", "file", "count"), REAL)
def test_real_golds_score_one_against_themselves(name, file, count):
    layout, path = files.LAYOUTS[name], str(DATA / file)
    unread = []
    rows = list(records.read(path))
    for place, row in rows:
        gold = files.gold_of(row, layout, place)
        if gold and grading.gold_parses(gold):
            # the second is another text, and goes through math-verify; a time of day ("05:00") is but text
            other = name == "math" and ":" not in gold and not grading.is_words(gold)
            for answer in (gold, rf"\displaystyle {gold}" if other else gold):
                assert grading.grade_math(f"It is $\\boxed{{{answer}}}$.", gold) == 1.0, place
        else:
            unread.append((pathlib.Path(place).name, gold))
    assert len(rows) == count and unread == [entry for entry in UNREAD if entry[0].startswith(file)]
    assert len(unread) <= 0.005 * count


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the project")
def test_gsm8k_is_loaded_whole(tmp_path):
    task = tasks.load(
        Block("gsm8k", str(DATA / "gsm8k_train.jsonl"), eval_path=str(DATA / "gsm8k_test.jsonl"), eval_prompts=0)
    )
    assert (len(task.train), len(task.eval), task.dropped) == (7473, 1319, {})
