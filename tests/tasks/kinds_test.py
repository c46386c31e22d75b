"""What groups results: of examples without a "kind", a field that all of them have."""

import types

import pytest

from rljax import tasks
from rljax.tasks import kinds


def examples(**fields):
    return [{"prompt": f"{i}", "answer": "1", **dict(zip(fields, values, strict=True))}
            for i, values in enumerate(zip(*fields.values(), strict=True))]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"difficulty": [1, 2, 2]}, "difficulty"),
        ({"level": ["Level 1", "Level 2", "Level 2"], "type": ["a", "b", "b"]}, "level"),
        ({"level": ["one", "one", "one"], "type": ["a", "b", "b"]}, "type"),
        ({"difficulty": [1.1, 1.2, 0.9]}, None),  # one label
        ({"difficulty": [1, None, 2]}, None),
        ({"topic": ["a", "b", "c"]}, None),
    ],
)
def test_the_field_that_groups(fields, field):
    assert kinds.field_of(examples(**fields)) == field


def test_labels_can_be_parts_of_names():
    assert [kinds.label(value) for value in (" Level 5 ", 4.6, 3, "a/b")] == ["Level_5", "5", "3", "a_b"]


def test_both_sets_get_the_kind_of_one_field():
    train, held_out = kinds.add(examples(level=["x", "y"]), examples(level=["x"]))
    assert [e["kind"] for e in train + held_out] == ["x", "y", "x"]


def test_a_kind_of_their_own_stays():
    own = examples(kind=["x", "y"], level=[1, 2])
    assert kinds.add(own, own) == (own, own)


def test_a_users_task_is_grouped_by_its_difficulty(tmp_path, monkeypatch):
    (tmp_path / "graded_task.py").write_text(
        "from rljax.tasks.base import Task\n"
        "def make(config):\n"
        "    rows = [{'prompt': str(i), 'answer': i, 'difficulty': i % 3} for i in range(6)]\n"
        "    return Task(name='mine', train=rows[:3], eval=rows[3:], grade=lambda completion, example: 1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = tasks.load(types.SimpleNamespace(name="graded_task:make"))
    assert [example["kind"] for example in task.eval] == ["0", "1", "2"]
    assert task.train[1] == {"prompt": "1", "answer": 1, "difficulty": 1, "kind": "1"}
