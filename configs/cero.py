"""CERO: one rollout budget for the whole run, spent where rewards vary (arXiv 2606.05606). The main job.

Prompts whose price lies above the budget's get rollout.samples rollouts, others none; prices follow online
gradient descent on the dual over budget.epochs passes of the training prompts.

    python -m rljax.main --config=configs/cero.py
"""

from ml_collections import ConfigDict

from configs import default, presets


def get_config(preset: str = "tiny") -> ConfigDict:
    c = presets.apply(default.get_config(), preset)
    c.name = "cero"
    c.budget.rule = "cero"
    return c
