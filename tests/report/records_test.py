"""Counts of rollouts, rewards and answers, by hand."""

import numpy as np

from rljax.report import folders, records


def test_rollouts_are_counted_by_kind_and_epoch(group):
    found = records.by_kind(group)  # add: 7 of 8 right; mul: 4 of 8
    assert found.rows == ["add (87.5% right)", "mul (50.0% right)"]
    assert found.columns == ["1", "2"] and found.cells == [[4, 4], [4, 4]]


def test_rollouts_are_counted_by_what_was_known_of_their_prompt(group):
    found = records.by_success(group)
    # Prompt 7 comes again after 3 right of 4: Beta(1 + 3, 1 + 1), mean 4/6. 8 and 9 come once.
    assert found.rows == [records.UNSEEN, "60–80% right"]
    assert found.cells == [[8, 4], [0, 4]]


def test_prompts_that_came_once_have_no_earlier_success(make_run):
    line = {"step": 1, "prompts": [{"id": 7, "epoch": 0, "kind": "add", "rollouts": 6, "rewards": {}, "kept": {}}]}
    (group,) = folders.grouped([folders.read(make_run(everything=True, rollouts=[line]))])
    assert records.by_success(group) is None and records.by_kind(group) is not None


def test_rollouts_of_several_seeds_are_averaged(make_run):
    only_seven = [
        {"step": 1, "prompts": [{"id": 7, "epoch": 0, "kind": "add", "rollouts": 6, "rewards": {}, "kept": {}}]}
    ]
    first, second = make_run("a", everything=True), make_run("b", everything=True, rollouts=only_seven, seed=1)
    (both,) = folders.grouped([folders.read(first), folders.read(second)])
    assert records.by_kind(both).cells == [[5, 2], [2, 2]]


def test_kept_rewards_are_shares_of_all_and_of_the_kept(group):
    found = records.kept_rewards(group)
    assert found.bins == ["0", "1"] and (found.num_made, found.num_kept) == (16, 8)
    assert found.made == [5 / 16, 11 / 16] and found.kept == [3 / 8, 5 / 8]


def test_many_rewards_are_ten_bins(make_run):
    counts = {"rollouts": 21, "rewards": {str(i): 1 for i in range(21)}, "kept": {"20": 1}}
    line = {"step": 1, "prompts": [{"id": 0, "epoch": 0} | counts]}
    (group,) = folders.grouped([folders.read(make_run(everything=True, rollouts=[line]))])
    assert records.by_kind(group) is None  # prompts without a kind
    found = records.kept_rewards(group)
    assert found.bins == ["0", "2", "4", "6", "8", "10", "12", "14", "16", "18"]
    np.testing.assert_allclose(found.made, [*[2 / 21] * 9, 3 / 21])
    assert found.kept == [0] * 9 + [1]


def test_held_out_prompts_are_sorted_by_what_training_changed(group):
    found = records.changes(group.runs[0])  # right before 0 1 1 0, after 1 1 0 0
    prompts = {kind: [int(c.example["answer"]) for c in members] for kind, members in found.items()}
    assert prompts == {"turned right": [0], "turned wrong": [2], "stayed right": [1], "stayed wrong": [3]}


def test_accuracy_by_kind_starts_with_the_easiest(group):
    found = records.accuracy_by_kind(group)
    assert found == (["add", "mul"], ["0", "2"], [[0.5, 1.0], [0.0, 0.5]])
