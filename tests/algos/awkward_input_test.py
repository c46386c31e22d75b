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

from rljax.algos.advantages import (
    BASELINES,
    SCALES,
    group_advantages,
    group_statistics,
    overlong_penalty,
)
from rljax.algos.down_sampling import (
    NORMALIZE_OVER,
    RULES,
    down_sample,
    kept_advantages,
    reward_metrics,
    take_rows,
)
from rljax.algos.kl import ESTIMATORS, entropy, kl_estimate, kl_loss
from rljax.algos.losses import (
    AGGREGATES,
    LEVELS,
    MODES,
    aggregate_loss,
    importance_weights,
    loss_denominator,
    policy_loss,
)


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


def batch(P=2, n=4, keep=2, dtype=np.float32, **changed):
    """A well-behaved batch but for the arrays in `changed`; made by numpy, which compiles nothing."""
    T, V = 3, 5
    rng = np.random.default_rng(0)
    floats = {name: rng.normal(size=(P, n, T, V)) for name in ("logits", "old_logits", "actor_logits")}
    floats["rewards"] = np.tile([0.0, 1.0], (P, n // 2))
    floats["weights"] = rng.uniform(size=(P, n, T))
    other = dict(
        tokens=rng.integers(V, size=(P, n, T)).astype(np.int32),
        mask=np.arange(T) < rng.integers(1, T + 1, size=(P, n, 1)),
        accept=rng.uniform(size=(P, n, T)) < 0.7,
        valid=np.ones((P, n), bool),
        key=jax.random.key(1),
        keep=keep,
    )
    floats = {name: np.asarray(changed.pop(name, x), dtype) for name, x in floats.items()}
    return Batch(floats=floats, **(other | changed))


def scaled(factor):
    return {name: PLAIN.floats[name] * factor for name in ("logits", "old_logits", "actor_logits")}


NO_TOKEN, NO_ROW = np.zeros((2, 4, 3), bool), np.zeros((2, 4), bool)
FIRST_WORD = np.arange(5) == 0
PLAIN = batch()
BATCHES = {
    "plain": PLAIN,
    "empty mask": batch(mask=NO_TOKEN),
    "all rejected": batch(accept=NO_TOKEN),
    "all rows invalid": batch(valid=NO_ROW),
    "one prompt, n = 2, m = n": batch(P=1, n=2),
    "equal rewards": batch(rewards=np.full((2, 4), 0.1)),
    "NaN reward": batch(rewards=[[0, np.nan, 1, 1], [np.nan] * 4]),
    "huge rewards": batch(rewards=PLAIN.rewards * 1e15),
    "NaN behind the mask": batch(weights=np.where(PLAIN.mask & PLAIN.accept, PLAIN.weights, np.nan)),
    "far policies": batch(**scaled(100.0)),
    "the same policy": batch(old_logits=PLAIN.logits, actor_logits=PLAIN.logits),
    "a word of probability 0 under old": batch(old_logits=np.where(FIRST_WORD, -np.inf, PLAIN.old_logits)),
    "a word of probability 0 under new": batch(logits=np.where(FIRST_WORD, -np.inf, PLAIN.logits)),
    "a word of probability 0 under both": batch(
        logits=np.where(FIRST_WORD, -np.inf, PLAIN.logits),
        old_logits=np.where(FIRST_WORD, -np.inf, PLAIN.old_logits),
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


def kl(b):
    new, old = b.logprobs("logits"), b.logprobs("old_logits")
    return {k: kl_loss(new, old, b.mask, kind=k, accept=b.accept, weights=b.weights) for k in ESTIMATORS}


def weights(b):
    new, sampler = b.logprobs("logits"), b.logprobs("actor_logits")
    f = functools.partial(importance_weights, new, sampler, b.mask, low=0.5, high=2.0)
    return {f"{level} {mode}": f(level=level, mode=mode) for level in LEVELS for mode in MODES}


def advantages(b):
    P, n = b.rewards.shape
    args = (b.rewards.ravel(), jnp.repeat(jnp.arange(P), n), P)
    f = functools.partial(group_advantages, *args, valid=b.valid.ravel())
    return group_statistics(*args), {f"{x} {y}": f(baseline=x, scale=y) for x in BASELINES for y in SCALES}


def rules(b):
    rules = [rule for rule in RULES if rule != "all"]
    return {rule: down_sample(b.rewards, b.keep, rule=rule, valid=b.valid, key=b.key) for rule in rules}


def pods(b):
    indices, kept = down_sample(b.rewards, b.keep, rule="max_variance", valid=b.valid)
    f = functools.partial(kept_advantages, b.rewards, indices, kept, valid=b.valid)
    metrics = reward_metrics(b.rewards, indices, kept, valid=b.valid)
    return {over: f(normalize_over=over) for over in NORMALIZE_OVER}, metrics, take_rows(b.actor_logits, indices)


def aggregated(b):
    f = functools.partial(aggregate_loss, b.weights, b.mask, accept=b.accept, max_length=8)
    count = functools.partial(loss_denominator, b.mask, b.accept, max_length=8)
    return {a: (f(aggregate=a), count(aggregate=a)) for a in AGGREGATES}


ALGORITHMS = {
    "GRPO": policy("sequence"),
    "Dr. GRPO": policy("constant"),
    "DAPO with a dual clip": policy("token", dual_clip=3.0),
    "GSPO": policy("sequence", ratio="sequence"),
    "CISPO": policy("token", objective="cispo"),
    "KL loss": kl,
    "TIS and MIS": weights,
    "advantages": advantages,
    "PODS rules": rules,
    "PODS": pods,
    "aggregates": aggregated,
    "entropy": lambda b: entropy(b.logits),
    "KL estimates": lambda b: [kl_estimate(b.actor_logits, 2 * b.actor_logits, k) for k in ESTIMATORS],
    "overlong penalty": lambda b: overlong_penalty(b.mask.sum(-1), max_length=3, buffer=2),
}


@functools.cache
def step(name):
    """The jitted outputs and gradients of one algorithm; batches of one shape share a compilation."""

    def total(floats, b):
        outputs = ALGORITHMS[name](dataclasses.replace(b, floats=floats))
        reals = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(x.astype(jnp.float32)) for x in reals), 0.0), outputs

    # Finiteness needs no fast code: unoptimised, it compiles in half the time.
    return jax.jit(jax.grad(total, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_outputs_and_gradients_are_finite(name):
    for title, b in BATCHES.items():
        gradients, outputs = step(name)(b.floats, b)
        for what, tree in (("output", outputs), ("gradient", gradients)):
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                assert np.all(np.isfinite(x)), f"{title}: {what} {jax.tree_util.keystr(path)} = {x}"
