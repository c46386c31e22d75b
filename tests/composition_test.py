"""CERO, Jackpot and PODS in every combination, and the actor's forms: two steps of the whole loop each."""

import itertools
import json

import numpy as np
import pytest

from rljax import train

pytestmark = pytest.mark.usefixtures("few_devices")

METHODS = {
    "cero": {"budget.rule": "cero"},
    "jackpot": {"jackpot.rule": "obrs", "jackpot.top_k": 4},
    "pods": {"pods.rule": "max_variance", "pods.keep": 2},
}
SUBSETS = [
    pytest.param(names, id="+".join(names) if names else "grpo", marks=[pytest.mark.slow] if 0 < size < 3 else [])
    for size in range(4)
    for names in itertools.combinations(METHODS, size)
]
FORMS = {
    "int8": {"actor.dtype": "int8", "jackpot.table": "sampler"},
    "bfloat16": {"actor.dtype": "bfloat16"},
    "stale": {"jackpot.target": "new", "learner.minibatches": 2, "learner.epochs": 2},
}
SHARED = ("train/loss", "train/reward_mean", "pods/kept", "cero/effective_prompt_ratio", "cero/spent", "rollouts/total")


@pytest.fixture
def run(run_config, tmp_path):
    """run(changes) → the metrics of two steps."""

    def two_steps(changes):
        config = run_config({"budget.rollouts": 32, "eval.every": 0, "checkpoint.every": 0} | changes)
        train.run(config, tmp_path / "run")
        return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]

    return two_steps


@pytest.mark.parametrize("names", SUBSETS)
def test_every_subset_runs_with_one_set_of_metrics(run, actor_checkpoint, names):
    changes = {key: value for name in names for key, value in METHODS[name].items()}
    if "jackpot" in names:
        changes["actor.path"] = actor_checkpoint
    _, *lines = run(changes)
    assert len(lines) == 2
    for line in lines:
        assert all(np.isfinite(line[name]) for name in SHARED)
        assert ("jackpot/acceptance" in line) == ("jackpot" in names) == ("actor/distill_kl" in line)
        assert ("cero/mu" in line) == ("cero" in names)
        if "jackpot" in names:
            assert 0 < line["jackpot/acceptance"] < 1 and line["jackpot/kl_after"] < line["jackpot/kl_before"]
            assert line["train/tokens"] < line["rollouts/tokens"]  # the accepted ones
            assert line["actor/logprob_gap"] < 1e-4  # its rollouts are its own
    assert ("eval/actor_accuracy" in lines[-1]) == ("jackpot" in names)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_actor_that_are_the_policy(run, form):
    """A copy in fewer bits and an older self differ little from the policy: most tokens are accepted."""
    *_, line = run(METHODS["jackpot"] | FORMS[form] | {"learner.learning_rate": 1e-3})
    assert 0.9 < line["jackpot/acceptance"] <= 1
    assert line["train/logprob_gap"] > 0
    assert "actor/loss" not in line
    if form == "int8":
        assert "jackpot/kl_before" not in line  # the sampler's table does not know it


def test_dynamic_sampling_draws_on_until_groups_carry_signal(run):
    """Half of the task's prompts never do: a step of 4 groups needs several rounds, and learns from mixed ones."""
    _, *lines = run({"rollout.max_rounds": 4, "budget.rollouts": 96, "budget.epochs": 9})
    assert max(line["rollouts/rounds"] for line in lines) > 1
    for line in lines:
        assert line["rollouts/step"] == 16 * line["rollouts/rounds"]
        learned = (line["rollouts/step"] - line["rollouts/discarded"]) // 4
        cut_short = line["rollouts/rounds"] == 4 or line["rollouts/total"] == 96
        assert learned == 4 or cut_short and 1 <= learned <= 4
        assert line["rollouts/rounds"] == 1 or line["pods/variance"] > 0.1  # no group of equal rewards
    assert lines[-1]["rollouts/total"] == 96
