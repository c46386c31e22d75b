"""What a run is made of, built once from its config: models, prompts, allocator, learner step and first state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax import budget, learner, prompts, rewards, runs, sharding, tasks
from rljax import handover as handover_lib
from rljax import tokenizer as tokenizer_lib
from rljax.handover import Handover
from rljax.models import Model, hf, kernels, lora
from rljax.models.transformer import attach_lora
from rljax.objectives import Settings
from rljax.options import Config
from rljax.types import LearnerState, RunState

SAMPLES, EVALUATION, SELECTION, CONTROL, ACCEPTANCE, RECORDS = range(6)  # streams of random keys, folded from the seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, built once."""

    config: Config
    mesh: Any  # the learner's
    rollout_mesh: Any  # the same, or one of other devices
    handover: Handover
    model: Model
    actor_model: Model | None  # of the rollouts, where another model makes them
    tokenizer: tokenizer_lib.Tokenizer
    pool: rewards.RewardPool
    stream: prompts.Stream
    held_out: prompts.PromptSet
    allocator: budget.Uniform | budget.Cero
    step: Any  # learner.make_step's
    learning_rate: optax.Schedule  # of the number of updates made, jitted
    reference: Any  # parameters of the KL's reference policy, or None

    def key(self, stream: int) -> jax.Array:
        return key_of(self.config, stream)


def key_of(config: Config, stream: int) -> jax.Array:
    """The random key of one of the streams above."""
    return _key(config.seed, stream)


@functools.lru_cache
def _key(seed: int, stream: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), stream)


def make_mesh(config: Config):
    """The learner's mesh; raises what `make_meshes` does."""
    return make_meshes(config)[0]


def make_meshes(config: Config) -> tuple[Any, Any]:
    """(the learner's mesh, the rollouts') of config.mesh: one and the same, or two of different devices.

    Raises ValueError where the run does not divide over them, or they cannot do what it asks for.
    """
    m, stale = config.mesh, config.rollout.staleness
    if jax.process_count() > 1 and (m.rollout_devices or stale):
        raise ValueError(
            f"mesh.rollout_devices = {m.rollout_devices} and rollout.staleness = {stale} are of runs of one process,"
            f" and this one has {jax.process_count()}; set both to 0"
        )
    learners, makers = sharding.apart(m.rollout_devices) if m.rollout_devices else (None, [])
    mesh = rollout_mesh = sharding.make_mesh(data=m.data, fsdp=m.fsdp, tensor=m.tensor, devices=learners)
    if makers:
        lanes = m.rollout_devices // m.rollout_tensor
        rollout_mesh = sharding.make_mesh(data=lanes, tensor=m.rollout_tensor, devices=makers)
    elif stale and mesh.size > 1:
        raise ValueError(
            f"rollout.staleness = {stale} makes rollouts beside the update, but both would run on the same {mesh.size}"
            " devices, where two programs that communicate can wait for each other for ever; set mesh.rollout_devices,"
            " which the rollouts then have alone, or rollout.staleness to 0"
        )
    check_division(config, mesh, rollout_mesh)
    return mesh, rollout_mesh


def load_model(config: Config, mesh, path: str):
    """(Model, params) of a checkpoint, as config.model says."""
    m = config.model
    kernels.check(m.attention, jax.default_backend())
    how = {"remat": m.remat, "compute_dtype": m.compute_dtype, "attention_chunk": m.attention_chunk}
    return hf.load(path, dtype=m.dtype, mesh=mesh, attention=m.attention, **how)


def policy(config: Config, mesh):
    """(Model, params) of model.path, with new adapters where lora.rank asks for them."""
    model, params = load_model(config, mesh, config.model.path)
    check_sizes(config, model)
    adapters = lora.from_config(config.lora)
    if adapters is None:
        return model, params
    return attach_lora(model, params, adapters, jax.random.key(config.seed))


def make_tokenizer(config: Config, model, task: tasks.Task) -> tokenizer_lib.Tokenizer:
    """The tokenizer of model.path, stopping as the task asks; ValueError where the model cannot make a stop id."""
    tokenizer = tokenizer_lib.load(config.model.path)
    unknown = [i for i in tokenizer.eos_ids if i >= model.config.vocab_size]
    if unknown:
        raise ValueError(
            f"{config.model.path}: its end token {unknown[0]} is outside the model's vocabulary of"
            f" {model.config.vocab_size} tokens, so no completion could end; correct eos_token_id"
        )
    return tokenizer.stopping_at(task.stop)


def encode(config: Config, model, examples: list[dict], tokenizer, what: str) -> prompts.PromptSet:
    """The examples' prompts as token ids; `what` names them in messages.

    Raises ValueError where none fits, or where the model's vocabulary lacks a token of one.
    """
    limit, vocabulary = config.rollout.max_prompt_tokens, model.config.vocab_size
    found = prompts.encode(examples, tokenizer, limit, what, chat=config.task.chat, system=config.task.system)
    for example, ids in zip(found.examples, found.tokens, strict=True):
        if max(ids) >= vocabulary:
            raise ValueError(
                f"{config.model.path}: the {what} prompt {example['prompt'][:60]!r} has token {max(ids)}, but the"
                f" model's vocabulary has {vocabulary} tokens; tokenizer and weights are not of one model"
            )
    return found


def build(config: Config, task: tasks.Task, pool: rewards.RewardPool) -> tuple[Parts, RunState]:
    """The parts of a run, and its state before the first step."""
    mesh, rollout_mesh = make_meshes(config)
    load = functools.partial(load_model, config, mesh)
    model, params = policy(config, mesh)
    tokenizer = make_tokenizer(config, model, task)
    if not task.train:
        raise ValueError(f"task {task.name!r} has no training prompts; give it some, of a data file by task.path")
    train = encode(config, model, task.train, tokenizer, "training")
    updates = runs.total_steps(config) * config.learner.minibatches * config.learner.epochs
    optimizer, actor_model, actor, actor_optimizer = learner.make_optimizer(config.learner, updates), None, None, None
    if config.actor.path:
        actor_model, actor_params = load(config.actor.path)
        check_vocabulary(config, model.config, actor_model.config, tokenizer)
        options = dataclasses.replace(config.learner, learning_rate=config.actor.learning_rate)
        actor_optimizer = learner.make_optimizer(options, updates)
        actor = learner.init(actor_params, actor_optimizer)
    state, stale = learner.init(params, optimizer, actor), config.rollout.staleness > 0
    settings = Settings(
        model=model,
        loss=config.loss,
        jackpot=config.jackpot,
        actor=config.actor,
        actor_model=actor_model,
        temperature=config.rollout.temperature,
        token_chunk=config.model.token_chunk,
        max_length=config.rollout.max_new_tokens,
        micro_batches=config.learner.micro_batches,
        minibatches=config.learner.minibatches,
        epochs=config.learner.epochs,
        stale=stale,
    )
    maker = model if actor_model is None else actor_model
    parts = Parts(
        config=config,
        mesh=mesh,
        rollout_mesh=rollout_mesh,
        handover=handover_lib.make(maker, config.actor.dtype, state, rollout_mesh, copied=stale),
        model=model,
        actor_model=actor_model,
        tokenizer=tokenizer,
        pool=pool,
        stream=prompts.Stream(train, config.seed),
        held_out=encode(config, model, task.eval, tokenizer, "held-out"),
        allocator=budget.from_config(config, len(train)),
        step=learner.make_step(settings, optimizer, state, actor_optimizer),
        learning_rate=jax.jit(learner.make_schedule(config.learner, updates)),
        reference=reference(config, state, load) if config.loss.kl_coef > 0 else None,
    )
    totals = {"rollouts": 0, "wall_s": 0.0, "stage_s": {}, "eval": {}}
    behaviour = parts.handover.weights(state) if stale else None
    allocated = parts.allocator.init()
    return parts, RunState(learner=state, budget=allocated, draws=0, step=0, totals=totals, behaviour=behaviour)


def reference(config: Config, state: LearnerState, load):
    """The KL's frozen policy: the checkpoint once more, or the frozen base with a copy of the first adapters."""
    if state.frozen is None:
        return load(config.model.path)[1]
    return lora.join(jax.tree.map(jnp.copy, state.params), state.frozen)


def check_vocabulary(config: Config, policy, actor, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raises ValueError where the actor's tokens are not the policy's."""
    if policy.vocab_size != actor.vocab_size:
        raise ValueError(
            f"actor.path = {config.actor.path!r} has a vocabulary of {actor.vocab_size} tokens, model.path ="
            f" {config.model.path!r} one of {policy.vocab_size}; choose an actor with the policy's tokenizer"
        )
    if tokenizer_lib.load(config.actor.path).inner.get_vocab() != tokenizer.inner.get_vocab():
        raise ValueError(
            f"actor.path = {config.actor.path!r} and model.path = {config.model.path!r} have tokenizers of unlike"
            " vocabularies; choose an actor with the policy's tokenizer"
        )


def check_sizes(config: Config, model) -> None:
    """Raises ValueError where the config asks for more than the model has: positions, or tokens of a table."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > model.config.max_positions:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}, but {config.model.path} has"
            f" {model.config.max_positions} positions; lower them"
        )
    if config.jackpot.rule != "none" and config.jackpot.top_k > model.config.vocab_size:
        raise ValueError(
            f"jackpot.top_k = {config.jackpot.top_k} is more than the vocabulary of {config.model.path},"
            f" {model.config.vocab_size} tokens; lower it"
        )


def check_division(config: Config, mesh, rollout_mesh) -> None:
    """Raises ValueError where prompts, lanes or micro-batches do not divide over the devices of prompts."""
    per_update = config.rollout.prompts // (config.learner.minibatches * config.learner.micro_batches)
    own = "mesh.rollout_devices / mesh.rollout_tensor" if rollout_mesh != mesh else "mesh.data × mesh.fsdp"
    sizes = (
        ("rollout.lanes", config.rollout.lanes, rollout_mesh, own),
        (
            "rollout.prompts / (learner.minibatches × learner.micro_batches)",
            per_update, mesh, "mesh.data × mesh.fsdp",
        ),
    )  # fmt: skip
    for name, size, over, keys in sizes:
        shards = sharding.size(over, "prompts")
        if size % shards:
            raise ValueError(
                f"{name} = {size} does not divide over the {shards} devices that split prompts "
                f"({keys}); make it a multiple of {shards}, or change the mesh"
            )
