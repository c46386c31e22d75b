"""What in a run's metrics deserves a loud word, said when it begins and not at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljax.options import Config

AWAY = 10  # times in a row that a trouble must have been looked for in vain before it is told again
Troubles = dict[str, str | None]  # name of each that was looked for → what to say of it; None where there is none


class Alarms:
    """Called with the metrics of each step and evaluation; gives the texts of the troubles that have just begun.

    Args:
        config: the run's.
        past: lines of metrics.jsonl that a resumed run goes on from. Its first step is the measure of later ones;
            nothing of the past is told.
    """

    def __init__(self, config: Config, past: Sequence[Mapping[str, Any]] = ()):
        self._config = config
        self._first: Mapping[str, Any] | None = next((line for line in past if "rollouts/step" in line), None)
        self._told: dict[str, int] = {}  # trouble → times that it has been looked for in vain since

    def __call__(self, line: Mapping[str, Any]) -> list[str]:
        if self._first is None and "rollouts/step" in line:
            self._first = line
        found = troubles(line, self._config, self._first)
        new = [text for name, text in found.items() if text is not None and name not in self._told]
        for name, text in found.items():
            if text is not None:
                self._told[name] = 0
            elif name in self._told:
                self._told[name] += 1
        self._told = {name: times for name, times in self._told.items() if times < AWAY}
        return new


def troubles(line: Mapping[str, Any], config: Config, first: Mapping[str, Any] | None) -> Troubles:
    """What is wrong by the metrics of a step, of an evaluation, or of both in one.

    first: metrics of the run's first step.
    """
    found: Troubles = {}
    if "rollouts/step" in line and first is not None:
        found |= _of_rollouts(line, config, first) | _of_budget(line, config) | _of_grading(line)
    if "eval/avg_at_k" in line:
        score = line["eval/avg_at_k"]
        found["evaluation"] = _if(
            score in (0, 1),
            f"every sampled answer to the held-out prompts has reward {score:g}; where training prompts fare like them,"
            " nothing is learned: look into eval/, at the task's template and its grader",
        )
    return found


def _of_rollouts(line: Mapping[str, Any], config: Config, first: Mapping[str, Any]) -> Troubles:
    cut, effective, mean = (
        line[name] for name in ("rollouts/truncated", "cero/effective_prompt_ratio", "train/reward_mean")
    )
    entropy, before = line["rollouts/entropy"], first["rollouts/entropy"]
    others = config.actor.path or config.actor.dtype or config.rollout.staleness  # than the policy as it is
    gap, by_policy = line["train/logprob_gap"], not others
    rewards = "" if mean is None else f" (mean reward {mean:.3g})"
    return {
        "truncated": _if(
            cut > 0.5, f"{cut:.0%} of the rollouts were cut at the token limit; raise rollout.max_new_tokens"
        ),
        "effective": _if(
            effective < 0.1,
            f"only {effective:.0%} of the prompts have rollouts of unlike rewards{rewards}, and the others teach"
            " nothing; take easier or harder prompts, or raise rollout.samples",
        ),
        "entropy": _if(
            entropy < 0.1 * before,
            f"the entropy of the rollouts fell from {before:.3g} to {entropy:.3g} nats a token: samples of a prompt"
            " become alike; raise loss.clip_high or loss.entropy_coef, or stop here",
        ),
        "gap": _if(
            by_policy and gap > 0.05,
            f"sampler and learner disagree by {gap:.2g} nats a token on the same model; raise the precision"
            " (model.compute_dtype), or set loss.correction",
        ),
    }


def _of_budget(line: Mapping[str, Any], config: Config) -> Troubles:
    if config.budget.rule != "cero":  # uniform allocation has no epochs to spread the budget over
        return {}
    spent, passed, epochs = line["cero/spent"], line["rollouts/epoch"], config.budget.epochs
    return {
        "early": _if(
            spent > 0.9 and passed < 0.7 * epochs,
            f"{spent:.0%} of the rollouts are spent after {passed:.1f} of {epochs} epochs, and the last epochs will get"
            " none; raise budget.rollouts, or lower budget.epochs or task.train_prompts",
        )
    }


def _of_grading(line: Mapping[str, Any]) -> Troubles:
    unscorable, timeouts, errors = (
        line[f"train/{name}"] for name in ("unscorable", "grader_timeouts", "grader_errors")
    )
    return {
        "unscorable": _if(unscorable > 0, f"{unscorable} rollouts could not be scored; they carry no gradient"),
        "timeouts": _if(
            timeouts > 0, f"{timeouts} rollouts hung or crashed the grader and scored 0; see rewards.cpu_seconds"
        ),
        "errors": _if(errors > 0, f"the grader raised, in {errors} rollouts: {line.get('train/first_error')}"),
    }


def _if(condition: bool, text: str) -> str | None:
    return text if condition else None
