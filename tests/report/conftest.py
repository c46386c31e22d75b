"""Run folders of hand-made files: every file that a report reads, small enough to count by hand."""

import json
import pathlib

import pytest

from rljax.report import folders

CONFIG = {
    "name": "made", "seed": 0, "mesh": {"data": -1}, "rollout": {"samples": 4}, "learner": {"learning_rate": 1e-5},
    "cero": {"prior_alpha": 1.0, "prior_beta": 1.0, "success_threshold": 0.5},
}  # fmt: skip
LINES = (
    {"step": 0, "eval/accuracy": 0.25, "eval/avg_at_k": 0.2, "eval/accuracy_add": 0.5, "eval/accuracy_mul": 0.0,
     "time/eval_s": 2.0, "time/step_s": 2.0},
    {"step": 1, "train/reward_mean": 0.25, "train/grad_norm": 1.0, "train/clip_frac": 0.0, "rollouts/total": 8,
     "rollouts/step": 8, "pods/kept": 4, "rollouts/truncated": 0.75, "train/unscorable": 2,
     "jackpot/acceptance": 0.8, "jackpot/kl_before": 0.4, "jackpot/kl_after": 0.1,
     "time/rollout_s": 1.0, "time/update_s": 1.5, "time/step_s": 3.0},
    {"step": 2, "train/reward_mean": 0.75, "train/grad_norm": None, "train/clip_frac": 0.0, "rollouts/total": 16,
     "rollouts/step": 8, "pods/kept": 4, "rollouts/truncated": 0.5, "train/unscorable": 1,
     "train/first_error": "KeyError: <x>", "jackpot/acceptance": 0.9, "jackpot/kl_before": 0.3, "jackpot/kl_after": 0.1,
     "eval/accuracy": 0.75, "eval/avg_at_k": 0.6, "eval/accuracy_add": 1.0, "eval/accuracy_mul": 0.5,
     "time/rollout_s": 1.0, "time/update_s": 0.5, "time/eval_s": 2.0, "time/step_s": 4.0},
)  # fmt: skip


def held_out(*greedy: float) -> list[dict]:
    """Records of an evaluation: a greedy completion of the given reward and a wrong sample a prompt."""
    return [
        {
            "example": {"prompt": f"{i}</pre><script>boom()</script>", "answer": str(i), "kind": "add"},
            "completions": [
                {"text": f" got {reward}", "reward": reward, "tokens": 3, "truncated": False},
                {"text": " x", "reward": 0.0, "tokens": 6, "truncated": True},
            ],
        }
        for i, reward in enumerate(greedy)
    ]


def prompt(id, epoch, kind, rewards, kept) -> dict:
    return {
        "id": id, "epoch": epoch, "kind": kind, "rollouts": sum(rewards.values()), "rewards": rewards, "kept": kept,
    }  # fmt: skip


ROLLOUTS = (
    {"step": 1, "prompts": [prompt(7, 0, "add", {"0": 1, "1": 3}, {"0": 1, "1": 1}),
                            prompt(8, 0, "mul", {"0": 4}, {"0": 2})]},
    {"step": 2, "prompts": [prompt(7, 1, "add", {"1": 4}, {"1": 2}), prompt(9, 1, "mul", {"1": 4}, {"1": 2})]},
    {"step": 3, "prompts": [prompt(7, 2, "add", {"1": 99}, {"1": 99})]},  # of a step that the run did not end
)  # fmt: skip
SAMPLES = (
    {"step": 1, "prompt": "1+1=", "tokens": [" ", "<2>"], "acceptance": [1.0, 0.25], "reward": 1.0, "kept": True},
    {"step": 2, "prompt": "1+2=", "tokens": [" ", "4"], "reward": None, "kept": False},
)


def json_lines(records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def make_run(tmp_path):
    """make_run(folder, seed=1, …): a run folder of hand-made files; everything=False: config and metrics alone."""

    def make(folder="run", lines=LINES, everything=False, rollouts=ROLLOUTS, **changes) -> pathlib.Path:
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(CONFIG | changes))
        (path / "metrics.jsonl").write_text(json_lines(lines))
        if everything:
            (path / "summary.json").write_text("{}")
            (path / "eval").mkdir()
            (path / "eval" / "000000.jsonl").write_text(json_lines(held_out(0, 1, 1, 0)))
            (path / "eval" / "000001.jsonl").write_text(json_lines(held_out(0, 0, 0, 0)))  # neither first nor last
            (path / "eval" / "000002.jsonl").write_text(json_lines(held_out(1, 1, 0, 0)))
            measures = {"accuracy": {"value": 0.5, "low": 0.25, "high": 0.75}}
            outcome = {"model": "m", "task": "t", "prompts": 4, "measures": measures}
            (path / "eval" / "t-000002.json").write_text(json.dumps(outcome))
            (path / "rollouts.jsonl").write_text(json_lines(rollouts))
            (path / "samples.jsonl").write_text(json_lines(SAMPLES))
        return path

    return make


@pytest.fixture
def group(make_run):
    return folders.grouped([folders.read(make_run(everything=True))])[0]
