"""The learner: LearnerState and TrainBatch → LearnerState and metrics, in one jitted step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from rljax import sharding
from rljax.algos import kl, losses, masked
from rljax.models import Model, logprobs
from rljax.options import LearnerOptions, LossOptions
from rljax.types import LearnerState, TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The static half of a step: what is compiled in.

    max_length: tokens, of aggregate="constant". temperature: that the sampler used. micro_batches, minibatches
    and epochs as in configs/default.py.
    """

    model: Model
    loss: LossOptions
    temperature: float
    token_chunk: int
    max_length: int
    micro_batches: int
    minibatches: int
    epochs: int


def make_optimizer(options: LearnerOptions, total_updates: int) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, with linear warm-up; norms and biases do not decay."""
    rate, warmup = options.learning_rate, options.warmup_updates
    later = {
        "constant": optax.constant_schedule(rate),
        "cosine": optax.cosine_decay_schedule(rate, max(1, total_updates - warmup)),
    }[options.schedule]
    # The first update already has a rate above 0: a step at rate 0 would teach nothing.
    rise = optax.linear_schedule(rate / (warmup + 1), rate, warmup)
    schedule = optax.join_schedules([rise, later], [warmup])
    clip = optax.clip_by_global_norm(options.max_grad_norm) if options.max_grad_norm > 0 else optax.identity()
    adamw = optax.adamw(
        schedule if warmup else later,
        b1=options.adam_b1,
        b2=options.adam_b2,
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
        mask=_decays,
    )
    return optax.chain(clip, adamw)


def _decays(params):
    def is_matrix(path, _):
        name = path[-1].key
        return not (name.endswith("norm") or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def init(params, optimizer: optax.GradientTransformation) -> LearnerState:
    """A state around `params`, which it takes over; the optimizer's moments are born sharded as they are."""
    mesh = sharding.mesh_of(params)
    where = jax.tree.map(lambda p: p.sharding, params)
    abstract = jax.eval_shape(optimizer.init, params)
    opt_state = jax.jit(optimizer.init, out_shardings=sharding.like_params(abstract, where, mesh))(params)
    updates = jax.device_put(jnp.zeros((), jnp.int32), sharding.replicated(mesh))
    return LearnerState(params=params, opt_state=opt_state, updates=updates)


def make_step(settings: Settings, optimizer: optax.GradientTransformation, state: LearnerState):
    """step(state, batch, reference) → (state, metrics), jitted; the given state is consumed.

    reference: parameters of the KL's frozen policy, or None where loss.kl_coef is 0.
    """
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        functools.partial(train_step, settings=settings, optimizer=optimizer),
        donate_argnames="state",
        out_shardings=(where, sharding.replicated(sharding.mesh_of(state.params))),
    )


def train_step(state: LearnerState, batch: TrainBatch, reference, *, settings: Settings, optimizer):
    """All updates of one batch: epochs × minibatches, each over micro_batches accumulated gradients.

    With more than one update the log-probs of the old policy are taken before the first; with one, the old
    policy is the policy itself, and the ratio is exactly 1. A minibatch without a token makes no update.
    """
    split = functools.partial(_split, parts=settings.minibatches * settings.micro_batches)
    updates = settings.minibatches * settings.epochs
    batches = split(batch)
    old = None
    if updates > 1:
        old = jax.lax.map(lambda b: _logprobs(state.params, b, settings), batches)
    ref = None
    if reference is not None:
        ref = jax.lax.map(lambda b: _logprobs(reference, b, settings), batches)
    # [minibatches, micro_batches, P', …]
    shape = (settings.minibatches, settings.micro_batches)
    minis = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (batches, old, ref))

    def update(state, mini):
        own, own_old, own_ref = mini
        grads, sums = accumulate(state.params, own, own_old, own_ref, settings)
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = LearnerState(
            params=optax.apply_updates(state.params, changes), opt_state=opt_state, updates=state.updates + 1
        )
        # Without this, momentum and weight decay would move the parameters on a gradient of nothing.
        some = sums["tokens"] > 0
        new = jax.tree.map(lambda a, b: jnp.where(some, a, b), new, state)
        return new, sums | {"grad_norm_sum": optax.tree.norm(grads), "updates": jnp.ones(())}

    def epoch(state, _):
        return jax.lax.scan(update, state, minis)

    if updates == 1:
        state, sums = update(state, jax.tree.map(lambda x: x[0], minis))
    else:
        state, sums = jax.lax.scan(epoch, state, length=settings.epochs)
        sums = _merge_stacked(sums)
    return state, sums


def accumulate(params, batches: TrainBatch, old, ref, settings: Settings):
    """(gradients, sums) of one minibatch [micro, P', …]; the denominator is the whole minibatch's."""
    mask = completion_mask(batches)
    denominator = losses.loss_denominator(
        mask, aggregate=settings.loss.aggregate, max_length=settings.max_length
    )
    grad = jax.value_and_grad(micro_loss, has_aux=True)

    def one(carry, xs):
        (_, sums), grads = grad(params, *xs, denominator, settings)
        return jax.tree.map(jnp.add, carry, grads), sums

    if mask.shape[0] == 1:
        first = jax.tree.map(lambda x: x[0], (batches, old, ref))
        (_, sums), grads = grad(params, *first, denominator, settings)
        return grads, sums
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    grads, parts = jax.lax.scan(one, zeros, (batches, old, ref))
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), _merge_stacked(parts)


def micro_loss(params, batch: TrainBatch, old, ref, denominator, settings: Settings):
    """(loss, sums) of a micro-batch [P', K, T]: its share of the minibatch's loss."""
    options, mask = settings.loss, completion_mask(batch)
    new = _logprobs(params, batch, settings)
    old = jax.lax.stop_gradient(new) if old is None else old
    weights, importance = losses.importance_weights(
        old,
        batch.sampler_logprobs,
        mask,
        level=options.correction_level,
        mode=options.correction,
        low=options.correction_low,
        high=options.correction_high,
    )
    shared = {
        "aggregate": options.aggregate,
        "denominator": denominator,
        "max_length": settings.max_length,
        "weights": weights,
    }
    loss, sums = losses.policy_loss(
        new,
        old,
        batch.advantages,
        mask,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        ratio=options.ratio,
        objective=options.objective,
        dual_clip=options.dual_clip,
        **shared,
    )
    sums |= importance
    gap = masked.fill(jnp.abs(jax.lax.stop_gradient(old) - batch.sampler_logprobs), mask)
    sums["logprob_gap_sum"] = jnp.sum(gap)
    sums["sampler_nll_sum"] = -jnp.sum(masked.fill(batch.sampler_logprobs, mask))
    if ref is not None:
        penalty, kl_sums = kl.kl_loss(new, ref, mask, kind=options.kl_kind, **shared)
        loss += options.kl_coef * penalty
        sums |= kl_sums
    return loss, sums | {"total_loss": jax.lax.stop_gradient(loss)}


def completion_mask(batch: TrainBatch):
    """bool[…, K, T]: real completion tokens, from the recorded lengths."""
    return jnp.arange(batch.tokens.shape[-1]) < batch.lengths[..., None]


def metrics(sums: dict) -> dict[str, float]:
    """Host-side means of a step's sums, under the names of metrics.jsonl."""
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(s["tokens"], 1.0)
    out = {
        "train/loss": s["total_loss"] / s["updates"],
        "train/grad_norm": s["grad_norm_sum"] / s["updates"],
        "train/clip_frac": s["clipped_tokens"] / tokens,
        "train/ratio_max": s["ratio_max"],
        "train/logprob_gap": s["logprob_gap_sum"] / tokens,
        "train/sampler_nll": s["sampler_nll_sum"] / tokens,
        "train/tokens": s["tokens"],
        "train/importance_mean": s["importance_ratio_sum"] / max(s["importance_count"], 1.0),
        "train/importance_max": s["importance_ratio_max"],
    }
    if "kl_sum" in s:
        out["train/kl_ref"] = s["kl_sum"] / max(s["kl_tokens"], 1.0)
    return out


def _logprobs(params, batch: TrainBatch, settings: Settings):
    return logprobs.completion_logprobs(
        settings.model, params, batch, settings.temperature, settings.token_chunk
    )


def _merge_stacked(sums: dict) -> dict:
    """masked.merge_sums of what a scan has stacked: one scalar a name."""
    return {name: jnp.max(x) if name.endswith("_max") else jnp.sum(x) for name, x in sums.items()}


def _split(tree, parts: int):
    """[P, …] → [parts, P / parts, …]; every part takes prompts of every device, so that none is idle."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)
