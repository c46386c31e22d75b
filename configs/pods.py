"""PODS: n rollouts a prompt, of which the m with the greatest reward variance train (arXiv 2504.13818).

Rollouts decode in parallel and are cheap; an update costs time and memory a row. Here n = 32 and m = 8: four
rollouts are made for each one that is learned from.

    python -m rljax.main --config=configs/pods.py
"""

from ml_collections import ConfigDict

from configs import default, presets


def get_config(preset: str = "tiny") -> ConfigDict:
    c = presets.apply(default.get_config(), preset)
    c.name = "pods"
    c.rollout.samples = 32
    c.rollout.slots = 32
    c.pods.rule = "max_variance"
    c.pods.keep = 8
    return c
