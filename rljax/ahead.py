"""The rollouts of a step: made when it begins, or, by weights that are a step older, while the step before is learned.

With rollout.staleness = 0 the rollouts of step s come of the weights after update s - 1. With 1 they come of those
after update s - 2 (of steps 1 and 2: of the first weights), in a thread of their own, beside update s - 1. Which
weights make which rollouts never depends on time; prompts, counts and CERO's posterior are never stale, since the
rewards of a step are known before its update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from rljax import budget, metrics, preemption
from rljax.parts import Parts
from rljax.step import Experience, collect, counted
from rljax.types import RunState


class Ahead(contextlib.AbstractContextManager):
    """Takes the experience of one step after the other; `begin` lets the next one be made beside an update.

    stages: where the time is counted. With staleness, `wait` is how long the main thread waited for rollouts, and the
    stages of their making are those of the thread, beside the main one's.
    Leaving it with an exception ends what is being made at its next safe point.
    """

    def __init__(self, parts: Parts, stages: metrics.Stages):
        self._parts, self._stages = parts, stages
        self._stale = parts.config.rollout.staleness > 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._next: Future[tuple[Experience, dict[str, float]]] | None = None

    def take(self, state: RunState, grants: budget.Grants) -> Experience:
        """Rollouts and rewards of the step after `state`; raises what their making raised."""
        if not self._stale:
            return collect(self._parts, state, grants, self._stages)
        making, self._next = self._next, None
        if making is None:  # the run's first step, or the first after a resume
            making = self._thread.submit(self._apart, state, grants)
        with self._stages("wait"):
            seen, seconds = making.result()
        self._stages.add(seconds)
        return seen

    def begin(self, state: RunState, seen: Experience, grants: budget.Grants | None) -> RunState:
        """The state with the weights of the next step's rollouts, which begin now where they may be stale.

        state: that of before the update by `seen`. grants: of the next step; None where there is none.
        """
        if not self._stale:
            return state
        state = dataclasses.replace(state, behaviour=self._parts.handover.weights(state.learner))
        if grants is not None:
            self._next = self._thread.submit(self._apart, counted(state, seen), grants)
        return state

    def _apart(self, state: RunState, grants: budget.Grants) -> tuple[Experience, dict[str, float]]:
        """(Experience, seconds by stage), in the thread.

        What is on no mesh is computed on a device of the rollouts: one of the learner's would end the update first.
        """
        stages = metrics.Stages()
        with jax.default_device(self._parts.rollout_mesh.devices.flat[0]):
            return collect(self._parts, state, grants, stages), stages.seconds

    def __exit__(self, kind, *_: object) -> None:
        if kind is not None and self._stale:
            preemption.tell()
        self._thread.shutdown(cancel_futures=True)
