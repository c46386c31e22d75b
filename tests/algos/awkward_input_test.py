"""Every algorithm on awkward input: outputs and gradients stay finite.

To add an algorithm, add a row to ALGORITHMS: a function of a ``Batch`` that returns any tree of arrays. Each row
runs on every batch of BATCHES, and its outputs are differentiated by every float array of the batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algos.advantages import group_advantages, group_statistics, overlong_penalty
from rljax.algos.down_sampling import down_sample, kept_advantages, reward_metrics, take_rows
from rljax.algos.kl import entropy, kl_estimate, kl_loss
from rljax.algos.losses import aggregate_loss, importance_weights, loss_denominator, policy_loss


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["floats", "tokens", "mask", "accept", "valid", "key"],
    meta_fields=["keep"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """P prompts × n rollouts × T tokens over V words.

    floats: logits, old_logits, actor_logits [P, n, T, V], rewards [P, n], weights [P, n, T].
    tokens: int32[P, n, T]. mask, accept: bool[P, n, T]. valid: bool[P, n]. keep: m of n.
    """

    floats: dict
    tokens: jax.Array
    mask: jax.Array
    accept: jax.Array
    valid: jax.Array
    key: jax.Array
    keep: int

    def __getattr__(self, name):
        if name == "floats" or name not in self.floats:
            raise AttributeError(name)
        return self.floats[name]

    def logprobs(self, name):
        """float[P, n, T] of the tokens under softmax of the named logits."""
        logp = jax.nn.log_softmax(self.floats[name], axis=-1)
        return jnp.take_along_axis(logp, self.tokens[..., None], axis=-1)[..., 0]

    def advantages(self):
        P, n = self.rewards.shape
        groups = jnp.repeat(jnp.arange(P), n)
        return group_advantages(self.rewards.ravel(), groups, P, valid=self.valid.ravel()).reshape(P, n)


def batch(P=2, n=4, keep=2, dtype=jnp.float32, **changed):
    T, V = 3, 5
    keys = jax.random.split(jax.random.key(0), 8)
    floats = {
        name: jax.random.normal(k, (P, n, T, V)).astype(dtype)
        for name, k in zip(("logits", "old_logits", "actor_logits"), keys[:3], strict=True)
    }
    floats["rewards"] = (
        jax.random.bernoulli(keys[3], 0.5, (P, n)).at[0, 0].set(False).at[0, 1].set(True).astype(dtype)
    )
    floats["weights"] = jax.random.uniform(keys[4], (P, n, T)).astype(dtype)
    whole = Batch(
        floats=floats,
        tokens=jax.random.randint(keys[5], (P, n, T), 0, V),
        mask=jnp.arange(T) < jax.random.randint(keys[6], (P, n, 1), 1, T + 1),
        accept=jax.random.bernoulli(keys[7], 0.7, (P, n, T)),
        valid=jnp.ones((P, n), bool),
        key=jax.random.key(1),
        keep=keep,
    )
    other = {k: changed.pop(k) for k in list(changed) if k not in floats}
    return dataclasses.replace(whole, floats=floats | changed, **other)


def scaled(factor):
    return {name: batch().floats[name] * factor for name in ("logits", "old_logits", "actor_logits")}


NO_TOKEN, NO_ROW = jnp.zeros((2, 4, 3), bool), jnp.zeros((2, 4), bool)
FIRST_WORD = jnp.arange(5) == 0
BATCHES = {
    "plain": batch(),
    "empty mask": batch(mask=NO_TOKEN),
    "all rejected": batch(accept=NO_TOKEN),
    "all rows invalid": batch(valid=NO_ROW),
    "one prompt": batch(P=1),
    "n = 2": batch(n=2),
    "m = n": batch(keep=4),
    "equal rewards": batch(rewards=jnp.full((2, 4), 0.1)),
    "NaN reward": batch(rewards=batch().rewards.at[0, 1].set(jnp.nan)),
    "NaN behind the mask": batch(weights=jnp.where(batch().mask & batch().accept, batch().weights, jnp.nan)),
    "huge rewards": batch(rewards=batch().rewards * 1e15),
    "far policies": batch(**scaled(100.0)),
    "the same policy": batch(old_logits=batch().logits, actor_logits=batch().logits),
    "a word of probability 0 under old": batch(
        old_logits=jnp.where(FIRST_WORD, -jnp.inf, batch().old_logits)
    ),
    "a word of probability 0 under new": batch(logits=jnp.where(FIRST_WORD, -jnp.inf, batch().logits)),
    "a word of probability 0 under both": batch(
        logits=jnp.where(FIRST_WORD, -jnp.inf, batch().logits),
        old_logits=jnp.where(FIRST_WORD, -jnp.inf, batch().old_logits),
    ),
    "bfloat16": batch(dtype=jnp.bfloat16),
}


def policy(aggregate, **settings):
    def row(b):
        new, old = b.logprobs("logits"), b.logprobs("old_logits")
        return policy_loss(
            new,
            old,
            b.advantages(),
            b.mask,
            clip_low=0.2,
            clip_high=0.28,
            aggregate=aggregate,
            max_length=8,
            weights=b.weights,
            accept=b.accept,
            **settings,
        )

    return row


def kl(kind):
    def row(b):
        return kl_loss(b.logprobs("logits"), b.logprobs("old_logits"), b.mask, kind=kind, accept=b.accept)

    return row


def weights(level, mode):
    def row(b):
        new, sampler = b.logprobs("logits"), b.logprobs("actor_logits")
        return importance_weights(new, sampler, b.mask, level=level, mode=mode, low=0.5, high=2.0)

    return row


def group(**settings):
    def row(b):
        groups = jnp.repeat(jnp.arange(b.rewards.shape[0]), b.rewards.shape[1])
        args = (b.rewards.ravel(), groups, b.rewards.shape[0])
        return group_advantages(*args, valid=b.valid.ravel(), **settings), group_statistics(*args)

    return row


def pods(rule, normalize_over="kept"):
    def row(b):
        keep = b.rewards.shape[1] if rule == "all" else b.keep
        indices, kept = down_sample(b.rewards, keep, rule=rule, valid=b.valid, key=b.key)
        advantages = kept_advantages(b.rewards, indices, kept, normalize_over=normalize_over, valid=b.valid)
        return (
            indices,
            advantages,
            reward_metrics(b.rewards, indices, kept, valid=b.valid),
            take_rows(b.logits, indices),
        )

    return row


def aggregated(aggregate):
    def row(b):
        loss = aggregate_loss(b.weights, b.mask, aggregate=aggregate, accept=b.accept, max_length=8)
        return loss, loss_denominator(b.mask, b.accept, aggregate=aggregate, max_length=8)

    return row


ALGORITHMS = {
    "GRPO": policy("sequence"),
    "Dr. GRPO": policy("constant"),
    "DAPO with a dual clip": policy("token", dual_clip=3.0),
    "GSPO": policy("sequence", ratio="sequence"),
    "CISPO": policy("token", objective="cispo"),
    "k1": kl("k1"),
    "k2": kl("k2"),
    "k3": kl("k3"),
    "TIS": weights("token", "truncate"),
    "MIS": weights("sequence", "mask"),
    "advantages": group(),
    "advantages, leave one out": group(baseline="loo"),
    "advantages, not scaled": group(scale="none"),
    "max_variance": pods("max_variance"),
    "max_variance over all": pods("max_variance", "all"),
    "max_reward": pods("max_reward"),
    "percentile": pods("percentile"),
    "random": pods("random"),
    "all": pods("all"),
    "token mean": aggregated("token"),
    "sequence mean": aggregated("sequence"),
    "constant": aggregated("constant"),
    "entropy": lambda b: entropy(b.logits),
    "KL estimate": lambda b: kl_estimate(b.logits, b.actor_logits, "k3"),
    "overlong penalty": lambda b: overlong_penalty(b.mask.sum(-1), max_length=3, buffer=2),
}
# What a batch hides in a given array is no part of the output of rows that have no mask for it.
UNMASKED = {"KL estimate": ("a word of probability 0 under new",), "all": ()}


@functools.cache
def step(name):
    """The jitted outputs and gradients of one algorithm; batches of one shape share a compilation."""

    def total(floats, b):
        outputs = ALGORITHMS[name](dataclasses.replace(b, floats=floats))
        reals = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(x.astype(jnp.float32)) for x in reals), 0.0), outputs

    return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_outputs_and_gradients_are_finite(name):
    for title, b in BATCHES.items():
        gradients, outputs = step(name)(b.floats, b)
        for what, tree in (("output", outputs), ("gradient", gradients)):
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                assert np.all(np.isfinite(x)), f"{title}: {what} {jax.tree_util.keystr(path)} = {x}"
