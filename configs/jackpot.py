"""Jackpot: a small actor makes the rollouts, a larger policy learns from them, and both learn (arXiv 2602.06107).

A token of the actor counts with probability min(1, p / (λ q)) and weighs Z max(λ, p/q); the actor learns by the same
rewards and is drawn to the policy by KL. Peers, each a preset: none (no correction at all), tis, tis_kl, kl_only, and
on_policy (the policy makes its own rollouts). With smollm2, which has no smaller model of its vocabulary: the stale
form, one model and several updates a batch, whose older self is the actor.

    python -m rljax.main --config=configs/jackpot.py
    python -m rljax.main --config=configs/jackpot.py:tis

The paper's runs, a preset each, with data under data/ (configs/papers.py says which):

    python -m rljax.main --config=configs/jackpot.py:qwen3_1p7b_to_8b

Of these runs the abstract says up to 300 updates of batch size 64, here prompts. Eight answers a prompt and learning
rates of 1e-6 are ours. Scores are of the paper's main table as papernotes.org quotes it, in %.
"""

from ml_collections import ConfigDict

from configs import default, papers, presets


def none(c: ConfigDict) -> None:
    """The actor's rollouts taken for the policy's own."""
    c.jackpot.rule = "none"
    c.actor.distill_coef = 0.0


def tis(c: ConfigDict) -> None:
    """Truncated importance sampling."""
    none(c)
    c.loss.correction = "truncate"


def tis_kl(c: ConfigDict) -> None:
    """Truncated importance sampling, and the KL that draws the actor to the policy."""
    c.jackpot.rule = "none"
    c.loss.correction = "truncate"


def kl_only(c: ConfigDict) -> None:
    """The KL alone."""
    c.jackpot.rule = "none"


def on_policy(c: ConfigDict) -> None:
    """The large model makes its own rollouts: what all others are held against."""
    c.jackpot.rule = "none"
    c.actor.path = ""


def stale(c: ConfigDict) -> None:
    """One model, eight updates a batch without PPO's clip; accepted tokens follow the newest policy."""
    c.actor.path = ""
    c.jackpot.target = "new"
    c.learner.minibatches = 4
    c.learner.epochs = 2
    c.loss.clip_low = 1.0
    c.loss.clip_high = 1e9


def pair(c: ConfigDict, actor: str, policy: str) -> None:
    """An actor and a policy that both learn in full: 64 prompts × 8, one update a step, 300 steps; 8 × 80 GB."""
    papers.whole(c)
    c.model.path = policy
    c.actor.path = actor
    c.actor.learning_rate = 1e-6
    c.rollout.prompts = 64
    c.rollout.samples = 8
    c.rollout.lanes = 16
    c.rollout.slots = 8
    c.rollout.max_prompt_tokens = 1024
    c.rollout.max_new_tokens = 8192
    c.rollout.segment = 256
    c.budget.rollouts = 300 * 64 * 8
    c.learner.learning_rate = 1e-6
    c.learner.warmup_updates = 0
    c.learner.adam_b2 = 0.999
    c.learner.micro_batches = 8
    c.eval.every = 50
    c.checkpoint.every = 50


def qwen25_1p5b_to_3b(c: ConfigDict) -> None:
    """Qwen2.5-1.5B makes the rollouts of Qwen2.5-3B on MATH; answers of 2,048 tokens.

        python -m rljax.main --config=configs/jackpot.py:qwen25_1p5b_to_3b

    Paper, MATH-500 and GSM8K: Jackpot 62.75 and 84.28; on-policy 63.90 and 85.00; TIS with reverse KL 60.45 and 82.50.
    """
    papers.math(c)
    pair(c, "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B")
    c.rollout.max_new_tokens = 2048


def qwen3_1p7b_to_4b(c: ConfigDict) -> None:
    """Qwen3-1.7B-Base makes the rollouts of Qwen3-4B-Base on DeepScaleR.

        python -m rljax.main --config=configs/jackpot.py:qwen3_1p7b_to_4b

    Paper, MATH-500 and AIME 2024 (mean of 4): Jackpot 80.52 and 23.50; on-policy 80.82 and 25.00; TIS with reverse KL
    73.65 and 13.33.
    """
    papers.deepscaler(c)
    pair(c, "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-4B-Base")


def qwen3_1p7b_to_8b(c: ConfigDict) -> None:
    """Qwen3-1.7B-Base makes the rollouts of Qwen3-8B-Base on DeepScaleR.

        python -m rljax.main --config=configs/jackpot.py:qwen3_1p7b_to_8b

    Paper, MATH-500 and AIME 2024 (mean of 4): Jackpot 82.65 and 25.00; on-policy 79.50 and 24.37; TIS with reverse KL
    76.45 and 17.70.
    """
    papers.deepscaler(c)
    pair(c, "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-8B-Base")


PEERS = {f.__name__: f for f in (none, tis, tis_kl, kl_only, on_policy, stale)}
PAPER = {f.__name__: f for f in (qwen25_1p5b_to_3b, qwen3_1p7b_to_4b, qwen3_1p7b_to_8b)}


def build(preset: str, own: presets.Presets, name: str = "jackpot") -> ConfigDict:
    c = default.get_config()
    c.name = name
    c.jackpot.rule = "obrs"
    c.actor.path = "tiny-actor"
    presets.apply(c, preset, own)
    if preset == "smollm2":
        stale(c)
    return c


def get_config(preset: str = "tiny") -> ConfigDict:
    return build(preset, PEERS | PAPER)
