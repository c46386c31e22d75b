"""Bytes that a device sends to others in a step, by the axis table: what the compiler must move, whatever it adds.

    gather     parameters that are split along an axis of the prompts, before each use of a layer
    scatter    their gradients, summed and split again (reduce-scatter)
    reduce     gradients over the axes that split prompts and not the parameter (all-reduce), and activations over those
               that split the parameter alone: after o and down, and in the backward pass before q, k, v and gate, up

Of B bytes over n devices a ring sends (n - 1) / n · B a device to gather or scatter them, twice that to reduce them.
A pass without gradient gathers every parameter once, and one with gradient twice, for each micro-batch.
"""

from __future__ import annotations

import collections
import math

import jax
import jax.numpy as jnp

from rljax import sharding
from rljax.models import lora
from rljax.models.transformer import Model
from rljax.options import Config
from rljax.plan.programs import Local

# (stage, mesh axes, kind) → bytes
Traffic = dict[tuple[str, tuple[str, ...], str], float]


def ring(size: float, devices: int) -> float:
    """Bytes that a device sends so that each has the `size` bytes that they hold together."""
    return size * (devices - 1) / devices


def axes_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that split an array with these logical axes."""
    return tuple(axis for name in names for axis in sharding.RULES[name])


class Counter:
    """Adds up what a model sends in a stage."""

    def __init__(self, own: Local):
        self.own, self.found = own, collections.defaultdict(float)
        self.prompts = set(sharding.RULES["prompts"])

    def add(self, stage: str, axes: tuple[str, ...], kind: str, size: float, times: float) -> None:
        devices = math.prod(self.own.mesh.shape[axis] for axis in axes)
        factor = 2 if kind == "all-reduce" else 1
        if devices > 1 and size * times > 0:
            axes = tuple(axis for axis in axes if self.own.mesh.shape[axis] > 1)
            self.found[stage, axes, kind] += factor * ring(size, devices) * times

    def parameters(self, stage: str, model: Model, whole: Model, *, uses: float, gradients: float) -> None:
        """uses, gradients: how often parameters are gathered, and their gradients summed."""
        config = self.own.config
        params = model.abstract_params(config.model.compute_dtype or config.model.dtype)
        trained = {id(leaf) for leaf in jax.tree.leaves(lora.split(params)[0])}
        names = jax.tree.leaves(whole.axes(), is_leaf=lambda x: isinstance(x, tuple))
        for leaf, name in zip(jax.tree.leaves(params), names, strict=True):
            size = math.prod(leaf.shape) * leaf.dtype.itemsize  # what a device computes with
            axes = axes_of(name)
            gathered = tuple(axis for axis in axes if axis in self.prompts)
            self.add(stage, gathered, "all-gather", size, uses)
            if gradients and id(leaf) in trained:
                self.add(stage, gathered, "reduce-scatter", size, gradients)
                others = tuple(axis for axis in sharding.RULES["prompts"] if axis not in axes)
                split = math.prod(self.own.mesh.shape[axis] for axis in gathered)
                self.add(stage, others, "all-reduce", size / split, gradients)

    def activations(self, stage: str, model: Model, *, tokens: float, sums: float) -> None:
        """tokens: of a device. sums: all-reduces of a layer's [tokens, hidden] over the axes of heads and units."""
        c, config = model.config, self.own.config
        width = jnp.dtype(config.model.compute_dtype or config.model.dtype).itemsize
        size = tokens * c.hidden_size * width
        self.add(stage, sharding.RULES["mlp"], "all-reduce", size, sums * c.num_layers)
        # Of the embedding's rows, and in the backward pass of the head's.
        self.add(stage, sharding.RULES["vocab"], "all-reduce", size, sums // 2)


def passes(config: Config) -> dict[str, tuple[float, float]]:
    """Of policy, actor and reference: passes over a step's batch without gradient, and with it."""
    o, j = config.learner, config.jackpot
    updates, other = o.minibatches * o.epochs, bool(config.actor.path)
    obrs = j.rule == "obrs"
    policy = float(obrs or updates > 1) + float(obrs and j.budget is not None)
    policy += o.epochs * float(obrs and j.target == "new")
    proposal = float(obrs and j.table == "union")
    if not other:
        policy += proposal  # its own copy
    return {
        "policy": (policy, o.epochs),
        "actor": (proposal + float(updates > 1), o.epochs) if other else (0.0, 0.0),
        "reference": (float(config.loss.kl_coef > 0), 0.0),
    }


# All-reduces that the backward pass makes again of what it computes again: after o. What down gives nobody needs.
AGAIN = {"none": 0.0, "dots": 0.0, "layer": 1.0}


def update(own: Local) -> Traffic:
    """Of a step's update."""
    config, counter = own.config, Counter(own)
    r, o = config.rollout, config.learner
    tokens = own.prompts * (r.max_prompt_tokens + config.pods.keep * r.max_new_tokens)
    models = {
        "policy": (own.policy, own.whole_policy),
        "actor": (own.actor, own.whole_actor),
        "reference": (own.policy, own.whole_policy),
    }
    pieces = o.minibatches * o.micro_batches  # each gathers parameters anew
    for name, (plain, learned) in passes(config).items():
        model, whole = models[name]
        if model is None or whole is None:
            continue
        uses, sums = pieces * (plain + 2 * learned), 2 * plain + (4 + AGAIN[config.model.remat]) * learned
        counter.parameters("update", model, whole, uses=uses, gradients=pieces * learned)
        counter.activations("update", model, tokens=tokens, sums=sums)
    return dict(counter.found)


def rollout(own: Local, steps: float, prefills: float) -> Traffic:
    """Of a step's rollouts: `steps` of decoding, and `prefills` of all lanes' prompts."""
    counter, shards = Counter(own), sharding.size(own.mesh, "prompts")
    model, whole = own.actor, own.whole_actor
    if model is None or whole is None:
        model, whole = own.policy, own.whole_policy
    lanes, slots = own.config.rollout.decoding(shards)
    for stage, times, tokens in (
        ("prefill", prefills, lanes * own.config.rollout.max_prompt_tokens),
        ("decode", steps, lanes // shards * slots),
    ):
        counter.parameters(stage, model, whole, uses=times, gradients=0)
        counter.activations(stage, model, tokens=times * tokens, sums=2)
    return dict(counter.found)
