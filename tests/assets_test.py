"""The shipped checkpoints are what the README says of them: size, format, and skill before any training."""

import jax
import numpy as np
import pytest

from rljax import sampling, tokenizer
from rljax.models import hf
from rljax.tasks import arithmetic

NAMES = ("tiny-policy", "tiny-actor")


@pytest.fixture(scope="module")
def rates():
    """Success rate at temperature 1 of each of 96 training prompts, by checkpoint, and the share cut off."""
    examples = arithmetic.problems("train", 96, "", 0)
    out = {}
    for name in NAMES:
        model, params = hf.load(name)
        tok = tokenizer.load(name)
        prompts = [tok.encode(e["prompt"]) for e in examples]
        rollouts = sampling.generate(
            model, params, prompts, num_samples=16, max_new_tokens=6, key=jax.random.key(0), stop_ids=tok.stop_ids
        )
        texts = [tok.decode(t[:n]) for t, n in zip(rollouts.tokens, rollouts.lengths, strict=True)]
        right = [arithmetic.grade(t, examples[g]) for t, g in zip(texts, rollouts.group, strict=True)]
        out[name] = np.reshape(right, (96, 16)).mean(axis=1), rollouts.truncated.mean()
    return out


def test_both_are_small_and_public():
    files = [f for name in NAMES for f in (hf.ASSETS / name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12e6
    assert {f.name for f in files} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_policy_has_room_to_learn(rates):
    rate, truncated = rates["tiny-policy"]
    assert 0.2 < rate.mean() < 0.4
    assert np.mean((rate > 0.05) & (rate < 0.95)) > 1 / 3
    assert truncated < 0.05


def test_the_actor_is_weaker(rates):
    assert 0.08 < rates["tiny-actor"][0].mean() < 0.25
    assert rates["tiny-actor"][0].mean() < rates["tiny-policy"][0].mean() - 0.08
