"""Weights of the model that makes the rollouts: from the learner's devices to the rollouts', from device to device."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from rljax import sharding
from rljax.models import Model, lora, quantized
from rljax.types import LearnerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handover:
    """model: of the rollouts, the actor's or the policy's. dtype: of the copy that makes them, of quantized.COPIES.

    where: NamedShardings, on the rollouts' mesh, of what is trained of it; None where the learner's arrays serve
    themselves, which the next update consumes. frozen: its other parameters on that mesh; None without adapters.
    """

    model: Model
    dtype: str
    where: Any
    frozen: Any

    def weights(self, learner: LearnerState) -> Any:
        """What is trained of the rollouts' model, on their mesh: copies that outlive the update, but for where=None."""
        trained = _maker(learner).params
        return trained if self.where is None else sharding.moved(trained, self.where)

    def behaviour(self, weights: Any) -> tuple[Any, Any]:
        """(model, params) that make rollouts, of such weights."""
        return quantized.rounded(self.model, lora.join(weights, self.frozen), self.dtype)


def make(model: Model, dtype: str, learner: LearnerState, mesh: Mesh, *, copied: bool) -> Handover:
    """The Handover from a learner to `mesh`. model: of the rollouts. copied: the weights must outlive the next update.

    Raises ValueError, with the parameter's name, where one does not divide over the mesh.
    """
    own = _maker(learner)
    if sharding.mesh_of(own.params) == mesh and not copied:
        return Handover(model=model, dtype=dtype, where=None, frozen=own.frozen)
    where, others = lora.split(sharding.params_shardings(mesh, model.axes(), lora.whole(own)))
    frozen = None if own.frozen is None else sharding.moved(own.frozen, others)
    return Handover(model=model, dtype=dtype, where=where, frozen=frozen)


def _maker(learner: LearnerState) -> LearnerState:
    return learner if learner.actor is None else learner.actor
