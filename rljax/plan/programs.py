"""The programs of a run as one device sees them, traced on abstract arrays: nothing is loaded or compiled."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from rljax import learner, plan, sampling, sharding
from rljax.models import lora, quantized
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.objectives import Settings
from rljax.options import Config
from rljax.plan import operations
from rljax.plan.operations import Program
from rljax.types import LearnerState, TrainBatch


def part(model: ModelConfig, mesh: Mesh | AbstractMesh) -> ModelConfig:
    """The decoder that a device computes: its share of heads, hidden units and vocabulary, by the axis table.

    Heads that do not divide stay whole: each device then computes all of them.
    """
    sizes = {
        "num_heads": (model.num_heads, "heads"),
        "num_kv_heads": (model.num_kv_heads, "kv_heads"),
        "intermediate_size": (model.intermediate_size, "mlp"),
        "vocab_size": (model.vocab_size, "vocab"),
    }
    own = {name: size // sharding.size(mesh, axis) for name, (size, axis) in sizes.items()}
    if any(sizes[name][0] % sharding.size(mesh, sizes[name][1]) for name in ("num_heads", "num_kv_heads")):
        own |= {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    return dataclasses.replace(model, head_dim=model.head_dim, **own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """A device's part of a run. policy, actor: of one device, and whole."""

    config: Config
    mesh: Any
    policy: Model
    actor: Model | None
    whole_policy: Model
    whole_actor: Model | None

    @property
    def prompts(self) -> int:
        return self.config.rollout.prompts // sharding.size(self.mesh, "prompts")

    def settings(self) -> Settings:
        c = self.config
        return Settings(
            model=self.policy,
            loss=c.loss,
            jackpot=c.jackpot,
            actor=c.actor,
            actor_model=self.actor,
            temperature=c.rollout.temperature,
            token_chunk=-(-c.model.token_chunk // sharding.size(self.mesh, "prompts")),  # of all devices
            max_length=c.rollout.max_new_tokens,
            micro_batches=c.learner.micro_batches,
            minibatches=c.learner.minibatches,
            epochs=c.learner.epochs,
            stale=c.rollout.staleness > 0,
        )

    def size(self, shape: tuple[int, ...], traced: int) -> int:
        """Bytes of an array on a device: what is shaped like a parameter is split as the parameter is."""
        return math.ceil(traced * self._shares.get(shape, 1.0))

    def is_parameter(self, shape: tuple[int, ...]) -> bool:
        """Whether an array is shaped like a matrix of the parameters: a gradient, or a copy in another dtype."""
        return len(shape) > 1 and shape in self._shares

    @functools.cached_property
    def _shares(self) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        for own, whole in ((self.policy, self.whole_policy), (self.actor, self.whole_actor)):
            if own is None or whole is None:
                continue
            where = sharding.params_shardings(self.mesh, whole.axes(), whole.abstract_params())
            for mine, leaf, place in zip(
                *map(jax.tree.leaves, (own.abstract_params(), whole.abstract_params(), where)), strict=True
            ):
                found[mine.shape] = math.prod(place.shard_shape(leaf.shape)) / math.prod(mine.shape)
        return found


def local(config: Config, policy: ModelConfig, actor: ModelConfig | None, mesh) -> Local:
    """Of shapes as plan.state_bytes takes them."""
    whole = plan.models(config, policy, actor)
    own = plan.models(config, part(policy, mesh), None if actor is None else part(actor, mesh))
    return Local(
        config=config, mesh=mesh, policy=own[0], actor=own[1], whole_policy=whole[0], whole_actor=whole[1]
    )  # fmt: skip


def _state(model: Model, config: Config, actor: LearnerState | None = None) -> LearnerState:
    params = model.abstract_params(config.model.dtype)
    trained, frozen = lora.split(params)
    optimizer = learner.make_optimizer(config.learner, total_updates=1)
    opt_state = jax.eval_shape(optimizer.init, trained)
    updates = _abstract(dtype=jnp.int32)
    return LearnerState(params=trained, frozen=frozen, opt_state=opt_state, updates=updates, actor=actor)


def batch(own: Local) -> TrainBatch:
    """A device's part of the largest batch of a step."""
    r, k = own.config.rollout, top_logprobs(own.config)
    P, K, S, T = own.prompts, own.config.pods.keep, r.max_prompt_tokens, r.max_new_tokens
    ints, floats = (functools.partial(_abstract, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    return TrainBatch(
        prompt_tokens=ints(P, S), prompt_lengths=ints(P), tokens=ints(P, K, T), lengths=ints(P, K),
        sampler_logprobs=floats(P, K, T), advantages=floats(P, K), draws=_abstract(P, dtype=jnp.uint32),
        samples=ints(P, K), top_ids=ints(P, K, T, k), top_logprobs=floats(P, K, T, k),
    )  # fmt: skip


def top_logprobs(config: Config) -> int:
    """How many likeliest tokens the sampler records a token."""
    j = config.jackpot
    return j.top_k if j.rule == "obrs" and j.table == "sampler" else 0


def _abstract(*shape: int, dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _key():
    return jax.eval_shape(lambda: jax.random.key(0))


def update_call(own: Local) -> tuple[Callable, tuple]:
    """(learner.train_step with its settings, its abstract arguments) of the largest batch; it overwrites the first."""
    c = own.config
    optimizer = learner.make_optimizer(c.learner, total_updates=1)
    state = _state(own.policy, c, None if own.actor is None else _state(own.actor, c))
    reference = own.policy.abstract_params(c.model.dtype) if c.loss.kl_coef > 0 else None
    how = {"settings": own.settings(), "optimizer": optimizer, "actor_optimizer": optimizer}
    arguments = dataclasses.replace(state, frozen=None), state.frozen, batch(own), reference, _key()
    return functools.partial(learner.train_step, **how), arguments


def update(own: Local) -> tuple[Program, range]:
    """(a step's update of the largest batch, the numbers of its arguments that it overwrites)."""
    step, arguments = update_call(own)
    return operations.of(jax.make_jaxpr(step)(*arguments), own.size), range(len(jax.tree.leaves(arguments[0])))


def behaviour(own: Local) -> tuple[Any, Any]:
    """(model, abstract parameters) that make a device's rollouts, in the dtype that they compute in."""
    model = own.policy if own.actor is None else own.actor
    found = []

    def rounded(params):
        behaving, params = quantized.rounded(model, params, own.config.actor.dtype)
        found.append(behaving)
        return behaving.cast(params)

    params = jax.eval_shape(rounded, model.abstract_params(own.config.model.dtype))
    return found[0], params


def shape(own: Local, columns: int) -> sampling.Shape:
    """A device's part of the engine's pool."""
    r, shards = own.config.rollout, sharding.size(own.mesh, "prompts")
    lanes, slots = r.decoding(shards)
    return sampling.Shape(
        lanes=lanes // shards,
        slots=slots,
        prompt_tokens=r.max_prompt_tokens,
        columns=columns,
        segment=r.segment,
        stop_ids=(0,),
        top_logprobs=top_logprobs(own.config),
    )


def decode(own: Local, columns: int) -> tuple[Program, range]:
    """(a segment of decoding, whose loop counts as one step; the numbers of its arguments that it overwrites)."""
    model, params = behaviour(own)
    traced = sampling.trace_decode(model, params, shape(own, columns))
    return _of_pool(traced, params, own)


def prefill(own: Local, columns: int) -> tuple[Program, range]:
    """(the prefill of all lanes' prompts, the numbers of its arguments that it overwrites)."""
    model, params = behaviour(own)
    lanes, _ = own.config.rollout.decoding(sharding.size(own.mesh, "prompts"))
    # Each device fills all lanes and keeps its own: sampling gives the prompts whole to all of them.
    return _of_pool(sampling.trace_prefill(model, params, shape(own, columns), lanes), params, own)


def pool(own: Local, columns: int) -> sampling.Pool:
    """A device's part of the engine's pool, abstract."""
    model, params = behaviour(own)
    return sampling.abstract_pool(model, params, shape(own, columns))


def _of_pool(traced, params, own: Local) -> tuple[Program, range]:
    first = len(jax.tree.leaves(params))
    pool = len(jax.tree.leaves(traced.out_info))
    return operations.of(traced.jaxpr, own.size), range(first, first + pool)
