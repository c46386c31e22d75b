"""Jackpot: a small actor makes the rollouts, a larger policy learns from them, and both learn (arXiv 2602.06107).

A token of the actor counts with probability min(1, p / (λ q)) and weighs Z max(λ, p/q); the actor learns by the same
rewards and is drawn to the policy by KL. Peers, each a preset: none (no correction at all), tis, tis_kl, kl_only, and
on_policy (the policy makes its own rollouts). With smollm2, which has no smaller model of its vocabulary: the stale
form, one model and several updates a batch, whose older self is the actor.

    python -m rljax.main --config=configs/jackpot.py
    python -m rljax.main --config=configs/jackpot.py:tis
"""

from ml_collections import ConfigDict

from configs import default, presets


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


PEERS = {f.__name__: f for f in (none, tis, tis_kl, kl_only, on_policy, stale)}


def get_config(preset: str = "tiny") -> ConfigDict:
    c = default.get_config()
    c.name = "jackpot"
    c.jackpot.rule = "obrs"
    c.actor.path = "tiny-actor"
    presets.apply(c, preset, PEERS)
    if preset in PEERS:
        c.name = f"jackpot-{preset}"
    if preset == "smollm2":
        stale(c)
    return c
