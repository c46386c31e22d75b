"""All three: CERO (arXiv 2606.05606) says how many rollouts, Jackpot's actor (arXiv 2602.06107) makes them, and PODS
(arXiv 2504.13818) says which to learn from.

    python -m rljax.main --config=configs/full.py
"""

from ml_collections import ConfigDict

from configs import jackpot


def get_config(preset: str = "tiny") -> ConfigDict:
    c = jackpot.build(preset, jackpot.PEERS, name="full")
    c.budget.rule = "cero"
    c.rollout.samples = 32
    c.rollout.slots = 32
    c.pods.rule = "max_variance"
    c.pods.keep = 8
    return c
