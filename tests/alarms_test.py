"""What is warned of, and when: at its beginning, and again only after it went away."""

import pytest

from rljax.alarms import AWAY, Alarms

FINE = {
    "rollouts/step": 16, "rollouts/truncated": 0.1, "rollouts/entropy": 1.0, "rollouts/epoch": 0.5,
    "cero/effective_prompt_ratio": 0.5, "cero/spent": 0.1, "train/reward_mean": 0.5, "train/logprob_gap": 1e-3,
    "train/unscorable": 0, "train/grader_errors": 0, "train/grader_timeouts": 0,
}  # fmt: skip
CERO = {"budget.rule": "cero", "budget.epochs": 3}


def told(config, *changes, past=()):
    """The texts of each of the steps whose metrics are FINE but for the changes."""
    alarms = Alarms(config, past)
    return [alarms(FINE | change) for change in changes]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rollouts/truncated": 0.51}, ["51% of the rollouts were cut", "rollout.max_new_tokens"]),
        ({"cero/effective_prompt_ratio": 0.09}, ["only 9% of the prompts", "mean reward 0.5"]),
        ({"cero/effective_prompt_ratio": 0.0, "train/reward_mean": None}, ["only 0% of the prompts have rollouts of"]),
        ({"rollouts/entropy": 0.099}, ["fell from 1 to 0.099 nats", "loss.entropy_coef"]),
        ({"train/logprob_gap": 0.06}, ["disagree by 0.06 nats", "model.compute_dtype"]),
        ({"train/unscorable": 2}, ["2 rollouts could not be scored"]),
        ({"train/grader_timeouts": 3}, ["3 rollouts hung or crashed the grader"]),
        ({"train/grader_errors": 1, "train/first_error": "KeyError: 'x'"}, ["in 1 rollouts: KeyError: 'x'"]),
        ({"cero/spent": 0.91, "rollouts/epoch": 2.0}, ["91% of the rollouts are spent after 2.0 of 3 epochs"]),
        ({"eval/avg_at_k": 0.0}, ["held-out prompts has reward 0;"]),
        ({"eval/avg_at_k": 1.0}, ["held-out prompts has reward 1;"]),
    ],
)  # fmt: skip
def test_each_trouble_is_told(run_config, change, words):
    fine, (text,) = told(run_config(CERO), {}, change)
    assert fine == [] and all(word in text for word in words)


@pytest.mark.parametrize(
    "changes, config",
    [
        ({"rollouts/truncated": 0.5}, {}),
        ({"cero/effective_prompt_ratio": 0.1}, {}),
        ({"train/logprob_gap": 0.5}, {"actor.dtype": "int8"}),  # another model's rollouts have a gap
        ({"train/logprob_gap": 0.5}, {"rollout.staleness": 1, "loss.correction": "mask"}),  # and older weights' have
        ({"cero/spent": 0.95, "rollouts/epoch": 1.0}, {}),  # uniform allocation has no epochs to fill
        ({"cero/spent": 0.95, "rollouts/epoch": 2.2}, CERO),
        ({"eval/avg_at_k": 0.01}, {}),
    ],
)
def test_what_is_in_order_is_not_told(run_config, changes, config):
    assert told(run_config(config), {}, changes) == [[], []]


def test_a_trouble_is_told_when_it_begins_and_not_again_while_it_stays(run_config):
    bad = {"rollouts/truncated": 0.9}
    counts = [len(texts) for texts in told(run_config(), bad, bad, {}, bad, *[{}] * AWAY, bad, bad)]
    assert counts == [1, 0, 0, 0, *[0] * AWAY, 1, 0]  # one step without is not away


def test_the_first_evaluation_is_told_once(run_config):
    alarms = Alarms(run_config())
    (text,) = alarms({"eval/avg_at_k": 0.0, "eval/accuracy": 0.0})
    assert "look into eval/" in text
    for _ in range(AWAY + 5):
        assert alarms(FINE) == []  # a step without evaluation says nothing of it
    assert alarms(FINE | {"eval/avg_at_k": 0.0}) == []


def test_a_resumed_run_is_measured_by_its_first_step(run_config):
    past = [{"step": 0, "eval/avg_at_k": 0.5}, FINE | {"step": 1, "rollouts/entropy": 2.0}, FINE | {"step": 2}]
    low = {"rollouts/entropy": 0.19}
    assert [len(texts) for texts in told(run_config(), low, past=past)] == [1]
    assert told(run_config(), low) == [[]]  # without a past, this step is the first
