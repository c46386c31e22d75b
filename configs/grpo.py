"""GRPO: every prompt gets n rollouts and all of them train (arXiv 2402.03300; the token mean is DAPO's).

    python -m rljax.main --config=configs/grpo.py
"""

from ml_collections import ConfigDict

from configs import default, presets


def get_config(preset: str = "tiny") -> ConfigDict:
    c = presets.apply(default.get_config(), preset)
    c.name = "grpo"
    c.budget.rule = "uniform"
    c.pods.rule = "all"
    return c
