"""GRPO: every prompt gets n rollouts and all of them train (arXiv 2402.03300; the token mean is DAPO's).

    python -m rljax.main --config=configs/grpo.py

The runs that the papers hold PODS and CERO against bear the names of their presets (configs/pods.py, cero.py): as many
updates, of as many rollouts as PODS learns from; or CERO's budget in equal parts.

    python -m rljax.main --config=configs/grpo.py:qwen25_3b_gsm8k
"""

from ml_collections import ConfigDict

from configs import cero, default, pods, presets

PAPERS = pods.PAPER | cero.PAPER


def get_config(preset: str = "tiny") -> ConfigDict:
    c = default.get_config()
    c.name = "grpo"
    presets.apply(c, preset, PAPERS)
    if preset in pods.PAPER:
        made, kept = c.rollout.samples, c.pods.keep
        c.rollout.samples = kept
        c.rollout.slots = kept
        c.budget.rollouts = c.budget.rollouts // made * kept
    c.budget.rule = "uniform"
    c.pods.rule = "all"
    return c
