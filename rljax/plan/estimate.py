"""A run on paper: bytes a device, bytes between devices, operations, and the least time that a step can take."""

from __future__ import annotations

import dataclasses
import math

import jax

from rljax import plan, sharding
from rljax.models.config import ModelConfig
from rljax.options import Config
from rljax.plan import memory, programs, traffic
from rljax.plan.chips import Chip
from rljax.plan.operations import Array, Program

Bytes = dict[str, int]  # what takes them → bytes on a device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one device. flops: of matrix products. moved: bytes that they read from and write to memory, each array once.
    sent: bytes to other devices (plan/traffic.py)."""

    flops: float
    moved: float
    sent: float

    def seconds(self, chip: Chip) -> dict[str, float]:
        """At the chip's published rates, each as if it were alone."""
        return {
            "compute": self.flops / chip.flops,
            "memory": self.moved / chip.bandwidth,
            "interconnect": self.sent / chip.interconnect,
        }

    def least(self, chip: Chip) -> float:
        """Seconds of the slowest of the three, the others hidden behind it: a lower bound."""
        return max(self.seconds(chip).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """state: bytes a device that the learner holds always, by what takes them. rollout, update: what comes on top of
    it at the fullest moment of the stage. apart: the rollouts have devices of their own, and no state. together: the
    stages run at the same time. collectives: plan/traffic.py's. work: of prefill, decode and update, a step."""

    state: Bytes
    rollout: Bytes
    update: Bytes
    apart: bool
    together: bool
    collectives: traffic.Traffic
    work: dict[str, Work]
    tokens: int

    def stage(self, name: str) -> Bytes:
        """What takes a device's bytes in "rollout" or "update"."""
        if name == "rollout" and self.apart:
            return self.rollout
        other = getattr(self, "update" if name == "rollout" else "rollout") if self.together and not self.apart else {}
        own = getattr(self, name)
        return self.state | {key: own.get(key, 0) + other.get(key, 0) for key in (*own, *other)}

    @property
    def fullest(self) -> str:
        """The stage that takes more bytes."""
        return max(("rollout", "update"), key=lambda name: sum(self.stage(name).values()))

    @property
    def peak(self) -> int:
        """Bytes of a device in its fullest stage."""
        return sum(self.stage(self.fullest).values())

    def least_seconds(self, chip: Chip) -> float:
        """Of a step: each stage's least, one after the other, or rollouts beside the update."""
        rollout = self.work["prefill"].least(chip) + self.work["decode"].least(chip)
        update = self.work["update"].least(chip)
        return max(rollout, update) if self.together else rollout + update


def estimate(config: Config, policy: ModelConfig, actor: ModelConfig | None, mesh, rollout_mesh=None) -> Plan:
    """policy, actor: shapes of model.path and actor.path. mesh, rollout_mesh: of devices, or abstract; the rollouts'
    is the learner's where it is None.

    Every completion is taken to be as long as rollout.max_new_tokens, every prompt as rollout.max_prompt_tokens: what
    a step can be at most. Raises ValueError where a parameter does not divide over the mesh.
    """
    held = plan.state_bytes(config, policy, mesh, actor)
    own = programs.local(config, policy, actor, mesh)
    apart, stale = rollout_mesh is not None and rollout_mesh != mesh, config.rollout.staleness > 0
    decoding = Decoding(programs.local(config, policy, actor, rollout_mesh) if apart else own)
    state: Bytes = {"parameters": held.policy.parameters, "optimizer": held.policy.optimizer}
    if held.actor is not None:
        state |= {"actor": held.actor.parameters, "actor's optimizer": held.actor.optimizer}
    if held.reference:
        state |= {"reference": held.reference}
    collectives = traffic.update(own) | traffic.rollout(decoding.own, decoding.steps, decoding.prefills)
    sent = {stage: sum(size for key, size in collectives.items() if key[0] == stage) for stage in STAGES}
    update, overwritten = programs.update(own)
    flops, moved = cost(update)
    return Plan(
        state=state,
        rollout=decoding.bytes(copies=apart + stale),
        update=_update_bytes(own, update, overwritten),
        apart=apart,
        together=stale,
        collectives=collectives,
        work=decoding.work(sent) | {"update": Work(flops=flops, moved=moved, sent=sent["update"])},
        tokens=config.rollout.prompts * config.rollout.samples * config.rollout.max_new_tokens,
    )


STAGES = ("prefill", "decode", "update")


def _update_bytes(own: programs.Local, program: Program, overwritten: range) -> Bytes:
    peak = memory.peak(program, overwritten)
    out = {"batch": size_of(programs.batch(own))}
    out |= dict.fromkeys(("gradients", "activations kept", "logits", "other work"), 0)
    vocabularies = {model.config.vocab_size for model in (own.policy, own.actor) if model is not None}
    layers = {model.config.num_layers for model in (own.policy, own.actor) if model is not None}

    def kind(array: Array) -> str:
        if own.is_parameter(array.shape):
            return "gradients"
        if array.shape[-1:] and array.shape[-1] in vocabularies:
            return "logits"
        return "activations kept" if len(array.shape) > 2 and array.shape[0] in layers else "other work"

    for array, size in peak.arrays:
        out[kind(array)] += size
    return out


class Decoding:
    """A step's rollouts on one device: the pool of its lanes, and the programs that fill and advance it."""

    def __init__(self, own: programs.Local):
        self.own, r = own, own.config.rollout
        self.T, self.first = r.max_new_tokens, min(r.columns, r.max_new_tokens)
        lanes, slots = r.decoding(sharding.size(own.mesh, "prompts"))
        self.prefills = -(-r.prompts // lanes)
        self.waves = self.prefills * -(-r.samples // slots)
        self.steps = self.waves * self.T

    def bytes(self, copies: int) -> Bytes:
        """copies: of the weights in the learner's dtype, beside the learner's own."""
        out, config = {}, self.own.config
        model = self.own.policy if self.own.actor is None else self.own.actor
        if copies:
            out["weights handed over"] = copies * size_of(model.abstract_params(config.model.dtype), self.own)
        if config.actor.dtype or config.model.compute_dtype not in ("", config.model.dtype):
            out["copy to decode with"] = size_of(programs.behaviour(self.own)[1], self.own)
        pool = programs.pool(self.own, self.T)
        out["prompts' caches"] = size_of(pool.prefix)
        out["rows' caches"] = size_of(pool) - out["prompts' caches"]
        stages = programs.decode(self.own, self.T), programs.prefill(self.own, self.T)
        work = [memory.peak(*stage).bytes for stage in stages]
        if self.first < self.T:  # the rings before they grew are alive beside those after
            before = programs.pool(self.own, self.widths()[-2])
            work.append(size_of(before) - size_of(before.prefix))
        return out | {"other work": max(work)}

    def widths(self) -> list[int]:
        """Columns of the rings, from the first to those of the longest row."""
        widths = [self.first]
        while widths[-1] < self.T:
            widths.append(min(2 * widths[-1], self.T))
        return widths

    def work(self, sent: dict[str, float]) -> dict[str, Work]:
        """Rows of the first wave grow the rings; later ones find them grown. A step's cost is linear in their width."""
        last = cost(programs.decode(self.own, self.T)[0])
        first = last if self.first == self.T else cost(programs.decode(self.own, self.first)[0])
        flops = moved = 0.0
        before = 0
        for width in self.widths():
            steps = (width - before) + (self.waves - 1) * self.T * (width == self.T)
            share = 1.0 if self.first == self.T else (width - self.first) / (self.T - self.first)
            flops += steps * (first[0] + share * (last[0] - first[0]))
            moved += steps * (first[1] + share * (last[1] - first[1]))
            before = width
        fill = cost(programs.prefill(self.own, self.T)[0])
        return {
            "prefill": Work(flops=fill[0] * self.prefills, moved=fill[1] * self.prefills, sent=sent["prefill"]),
            "decode": Work(flops=flops, moved=moved, sent=sent["decode"]),
        }


def size_of(tree, own: programs.Local | None = None) -> int:
    """Bytes of abstract arrays; with `own`, of parameters as they are split over the mesh."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        total += size if own is None else own.size(leaf.shape, size)
    return total


def cost(program: Program) -> tuple[float, float]:
    """(operations, bytes read and written) of a program's matrix products. A while loop counts as one turn."""
    flops = moved = 0.0
    for op in program.operations:
        if op.name == "dot_general":
            flops += op.flops
            moved += sum(array.bytes for array in (*op.ins, *op.outs) if array is not None)
        elif op.bodies:
            inner = max(cost(body) for body in op.bodies)
            flops, moved = flops + op.trips * inner[0], moved + op.trips * inner[1]
    return flops, moved
