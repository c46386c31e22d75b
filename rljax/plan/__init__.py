"""What a run needs, from its config alone: nothing is loaded, allocated or compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from rljax import learner, sharding
from rljax.models import lora
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.options import Config, LearnerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerBytes:
    """Bytes that a learner holds on one device.

    parameters: the model's, frozen ones included. optimizer: its state. gradients: of one update, accumulated in
    float32 over micro-batches; they live during updates only. trained: the part of `parameters` that learns.
    """

    parameters: int
    optimizer: int
    gradients: int
    trained: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one device before any batch: without caches, activations and the rollouts' copy (actor.dtype).

    actor: of another model that makes the rollouts; None without. reference: the KL's frozen policy; 0 without.
    """

    policy: LearnerBytes
    actor: LearnerBytes | None
    reference: int

    @property
    def total(self) -> int:
        actor = 0 if self.actor is None else self.actor.total
        return self.policy.total + actor + self.reference


def count(model: Model) -> int:
    """Parameters of a model, adapters included."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract_params()))


def models(config: Config, policy: ModelConfig, actor: ModelConfig | None) -> tuple[Model, Model | None]:
    """The static halves of the policy, with its adapters, and of the actor.

    Their attention is model.attention = "xla", whichever the config names: the kernels take less memory.
    """
    m = config.model
    how = {"remat": m.remat, "compute_dtype": m.compute_dtype, "attention_chunk": m.attention_chunk}
    own = Model(policy, lora=lora.from_config(config.lora), **how)
    return own, None if actor is None else Model(actor, **how)


def state_bytes(
    config: Config, policy: ModelConfig, mesh: Mesh | AbstractMesh, actor: ModelConfig | None = None
) -> StateBytes:
    """What the learners of a run hold on each device of a mesh.

    policy, actor: shapes of model.path and actor.path. Raises ValueError where a parameter does not divide over the
    mesh, with its name.
    """
    policy_model, actor_model = models(config, policy, actor)
    own = learner_bytes(policy_model, config.learner, mesh, config.model.dtype)
    # Of a model with adapters, only the adapters' first values are kept beside it.
    reference = own.trained if config.loss.kl_coef > 0 else 0
    other = None if actor_model is None else learner_bytes(actor_model, config.learner, mesh, config.model.dtype)
    return StateBytes(policy=own, actor=other, reference=reference)


def learner_bytes(model: Model, options: LearnerOptions, mesh: Mesh | AbstractMesh, dtype: str) -> LearnerBytes:
    """What learner.init would hold on each device around parameters of that dtype, and its gradients."""
    params = model.abstract_params(dtype)
    where = sharding.params_shardings(mesh, model.axes(), params)
    trained, trained_where = lora.split(params)[0], lora.split(where)[0]
    optimizer = learner.make_optimizer(options, total_updates=1)  # how many there are changes no shape
    opt_state = jax.eval_shape(optimizer.init, trained)
    gradients = trained
    if options.micro_batches > 1:
        gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    return LearnerBytes(
        parameters=_bytes(params, where),
        optimizer=_bytes(opt_state, sharding.like_params(opt_state, trained_where, mesh)),
        gradients=_bytes(gradients, trained_where),
        trained=_bytes(trained, trained_where),
    )


def _bytes(tree: Any, where: Any) -> int:
    """Bytes of one device's part of a tree of abstract arrays, by its tree of shardings."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True)
    return sum(math.prod(sharded.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, sharded in pairs)
