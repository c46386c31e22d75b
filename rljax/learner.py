"""The learner: LearnerState and TrainBatch → LearnerState and metrics, in one jitted step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax import correction, sharding
from rljax.algos import losses, obrs
from rljax.models import logprobs, lora
from rljax.models.quantized import behaviour_of
from rljax.objectives import Prior, Settings, actor_loss, completion_mask, policy_loss
from rljax.options import LearnerOptions
from rljax.types import LearnerState, TrainBatch


def make_schedule(options: LearnerOptions, total_updates: int) -> optax.Schedule:
    """Number of updates made → learning rate of the next: linear warm-up, then the schedule that is named."""
    rate, warmup = options.learning_rate, options.warmup_updates
    later = {
        "constant": optax.constant_schedule(rate),
        "cosine": optax.cosine_decay_schedule(rate, max(1, total_updates - warmup)),
    }[options.schedule]
    if not warmup:
        return later
    # The first update already has a rate above 0: a step at rate 0 would teach nothing.
    rise = optax.linear_schedule(rate / (warmup + 1), rate, warmup)
    return optax.join_schedules([rise, later], [warmup])


def make_optimizer(options: LearnerOptions, total_updates: int) -> optax.GradientTransformation:
    """AdamW or Adafactor after clipping by global norm, with `make_schedule`'s rate; norms and biases do not decay.

    Its state is float32 whatever the parameters are, but for AdamW's first moment in `moment_dtype`.
    """
    clip = _clip_by_global_norm(options.max_grad_norm) if options.max_grad_norm > 0 else optax.identity()
    scale = {
        "adamw": lambda: optax.scale_by_adam(
            b1=options.adam_b1, b2=options.adam_b2, eps=options.adam_eps, mu_dtype=options.moment_dtype
        ),
        # Adafactor (1804.04235) without its own learning rate: second moments by rows and columns, update clipping.
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    }[options.optimizer]()
    decay = optax.add_decayed_weights(options.weight_decay, mask=_decays)
    rate = optax.scale_by_learning_rate(make_schedule(options, total_updates))
    return _in_float32(optax.chain(clip, scale, decay, rate))


def _clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Gradients times min(1, most / their global norm).

    optax's own, which chooses between two trees, makes XLA hold a third one.
    """

    def update(updates, state, params=None):
        factor = jnp.minimum(1.0, most / jnp.maximum(optax.tree.norm(updates), 1e-30))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with gradients and parameters of any dtype taken as float32."""

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates, state, params=None):
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


def _decays(params):
    def is_matrix(path, _):
        name = path[-1].key
        return not (name.endswith("norm") or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def init(params, optimizer: optax.GradientTransformation, actor: LearnerState | None = None) -> LearnerState:
    """A state around `params`, which it takes over; the optimizer's moments are born sharded as they are.

    Adapters among the parameters (models/lora.py) are what is trained then, and the rest is frozen.
    """
    mesh = sharding.mesh_of(params)
    trained, frozen = lora.split(params)
    where = jax.tree.map(lambda p: p.sharding, trained)
    abstract = jax.eval_shape(optimizer.init, trained)
    opt_state = jax.jit(optimizer.init, out_shardings=sharding.like_params(abstract, where, mesh))(trained)
    updates = sharding.put(mesh, np.zeros((), np.int32), sharding.replicated(mesh))
    return LearnerState(params=trained, frozen=frozen, opt_state=opt_state, updates=updates, actor=actor)


def make_step(
    settings: Settings,
    optimizer: optax.GradientTransformation,
    state: LearnerState,
    actor_optimizer: optax.GradientTransformation | None = None,
):
    """step(state, batch, reference, key) → (state, metrics), jitted; the given state is consumed, but for `frozen`.

    reference: parameters of the KL's frozen policy, or None where loss.kl_coef is 0. key: of OBRS's
    acceptance, the same for every batch (its tokens' coordinates are folded in), or None.
    """
    mesh = sharding.mesh_of(state.params)
    actor_model = None if settings.actor_model is None else settings.actor_model.on(mesh)
    settings = dataclasses.replace(settings, model=settings.model.on(mesh), actor_model=actor_model)
    where = jax.tree.map(lambda leaf: leaf.sharding, dataclasses.replace(state, frozen=None))
    compiled = jax.jit(
        functools.partial(train_step, settings=settings, optimizer=optimizer, actor_optimizer=actor_optimizer),
        donate_argnames="state",
        out_shardings=(where, sharding.replicated(mesh)),
    )

    def step(state: LearnerState, batch: TrainBatch, reference, key=None):
        new, sums = compiled(dataclasses.replace(state, frozen=None), state.frozen, batch, reference, key)
        return dataclasses.replace(new, frozen=state.frozen), sums

    return step


def train_step(
    state: LearnerState, frozen, batch: TrainBatch, reference, key=None, *, settings: Settings, optimizer,
    actor_optimizer=None,
):  # fmt: skip
    """All updates of one batch: epochs × minibatches, each over micro_batches accumulated gradients.

    With more than one update the log-probs of the old policy are taken before the first; with one, the old
    policy is the policy itself, and the ratio is 1. A minibatch without a token makes no update.
    The state comes and goes without its frozen parameters, which are an argument of their own and never copied.
    With OBRS the sums hold "acceptance" [P, K, T], each token's probability before the first update, and "obrs" what
    obrs.summarise makes of the step's.
    """
    updates = settings.minibatches * settings.epochs
    batches = _split(batch, settings.minibatches * settings.micro_batches)
    prior, states, lam = before(dataclasses.replace(state, frozen=frozen), batches, reference, settings)
    named = {} if states is None else {"acceptance": _joined(correction.acceptance(batches, states, lam))}
    # [minibatches, micro_batches, P', …]
    shape = (settings.minibatches, settings.micro_batches)
    minis = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (batches, prior, states))

    def update(state, mini) -> tuple[LearnerState, dict]:
        own, own_prior, own_states = mini
        weighed, sums = None, {}
        if settings.jackpot.rule == "obrs":
            params = lora.join(state.params, frozen)
            weighed, sums = _weigh(params, own, own_prior, own_states, lam, key, settings)
        grads, more = accumulate(state, frozen, own, own_prior, weighed, settings)
        norms = {"grad_norm_sum": optax.tree.norm(grads[0])}
        if state.actor is not None:
            norms["actor_grad_norm_sum"] = optax.tree.norm(grads[1])
        # On a gradient of nothing, momentum and weight decay would move the parameters.
        new = jax.lax.cond(
            more["importance_count"] > 0,
            lambda state, grads: _apply(state, grads, optimizer, actor_optimizer),
            lambda state, grads: state,
            state,
            grads,
        )
        return new, more | sums | norms | {"updates": jnp.ones(())}

    if updates == 1:
        state, sums = update(state, jax.tree.map(lambda x: x[0], minis))
    else:
        state, sums = jax.lax.scan(lambda state, _: jax.lax.scan(update, state, minis), state, length=settings.epochs)
        sums = _merge_stacked(sums, axes=2)
    if "obrs" in sums:  # here and not on the host, where each of its operations would be a program of its own
        sums["obrs"] = obrs.summarise(sums["obrs"])
    return state, sums | named


def before(state: LearnerState, batches: TrainBatch, reference, settings: Settings):
    """(Prior, obrs.States or None, λ or None) of all parts [parts, P', …], at the parameters of the step's start."""
    updates, jackpot, params = settings.minibatches * settings.epochs, settings.jackpot, lora.whole(state)

    def values(model, params):
        take = functools.partial(logprobs.completion_logprobs, temperature=settings.temperature)
        return jax.lax.map(lambda b: take(model, params, b, chunk=settings.token_chunk), batches)

    def prior(old):
        actor = state.actor if settings.actor_model is not None and updates > 1 else None
        return Prior(
            old=old,
            ref=None if reference is None else values(settings.model, reference),
            actor=None if actor is None else values(settings.actor_model, actor.params),
        )

    if jackpot.rule == "none":
        return prior(values(settings.model, params) if updates > 1 else None), None, None
    lam = jnp.float32(jackpot.lam)
    if jackpot.budget is not None:
        old, mask = values(settings.model, params), completion_mask(batches)
        lam = correction.budget_lambda(old, batches.sampler_logprobs, mask, jackpot.budget)
    policy = settings.model, params
    behaviour = behaviour_of(settings.model, state, settings.actor_model, settings.actor.dtype)
    states = jax.lax.map(
        lambda b: correction.tables(policy, behaviour, b, lam, jackpot, settings.temperature, settings.token_chunk),
        batches,
    )
    return prior(states.target_logprobs), states, lam


def _weigh(params, batches: TrainBatch, prior: Prior, states: obrs.States, lam, key, settings: Settings):
    """(Weighed, sums) of a minibatch [micro, P', …], by its target's values now."""
    old = None
    if settings.jackpot.target == "new":
        old, policy, how = prior.old, (settings.model, params), (settings.temperature, settings.token_chunk)
        states = jax.lax.map(lambda x: correction.renewed(policy, x[0], x[1], *how), (batches, states))
    mask = completion_mask(batches)
    weighed, sums, kappa = correction.weigh(batches, mask, states, old, lam, key, settings.jackpot)
    return weighed, {"obrs": sums, "kappa_sum": kappa, "lambda_sum": lam}


def accumulate(state: LearnerState, frozen, batches: TrainBatch, prior: Prior, weighed, settings: Settings):
    """((policy's, actor's or None) gradients, sums) of one minibatch [micro, P', …].

    The denominators are the whole minibatch's, with the rows that it was spared.
    """
    mask = completion_mask(batches)

    def count(aggregate: str):
        how = {"aggregate": aggregate, "max_length": settings.max_length}
        total = losses.loss_denominator(mask, **how)
        if batches.silent_lengths is not None:
            total += losses.loss_denominator(completion_mask(batches, batches.silent_lengths), **how)
        return total

    denominator = plain = count(settings.loss.aggregate)
    if weighed is not None and settings.jackpot.normalise == "accepted":
        denominator = losses.loss_denominator(
            mask, weighed.accept, aggregate=settings.loss.aggregate, max_length=settings.max_length
        )
    grad = functools.partial(jax.value_and_grad, has_aux=True)

    def loss_of_trained(trained, *rest):
        return policy_loss(lora.join(trained, frozen), *rest)

    def gradients(xs):
        batch, own_prior, own_weighed = xs
        (_, (sums, hidden)), grads = grad(loss_of_trained)(
            state.params, batch, own_prior, own_weighed, denominator, settings
        )
        if state.actor is None:
            return (grads, None), sums
        policy = lora.join(state.params, frozen)
        (_, more), actor_grads = grad(actor_loss)(
            state.actor.params, batch, own_prior, policy, hidden, (plain, count("token")), settings
        )
        return (grads, actor_grads), sums | more

    def one(total, xs):
        grads, sums = gradients(xs)
        return jax.tree.map(jnp.add, total, grads), sums

    parts = batches, prior, weighed
    if mask.shape[0] == 1:
        return gradients(jax.tree.map(lambda x: x[0], parts))
    params = state.params, None if state.actor is None else state.actor.params
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    grads, sums = jax.lax.scan(one, zeros, parts)
    return grads, _merge_stacked(sums, axes=1)


def _apply(state: LearnerState, grads, optimizer, actor_optimizer) -> LearnerState:
    """The state after one update of each learner."""

    def one(own, gradient, transformation, actor):
        changes, opt_state = transformation.update(gradient, own.opt_state, own.params)
        params = optax.apply_updates(own.params, changes)
        return LearnerState(params=params, opt_state=opt_state, updates=own.updates + 1, actor=actor)

    actor = None if state.actor is None else one(state.actor, grads[1], actor_optimizer, None)
    return one(state, grads[0], optimizer, actor)


def metrics(sums: dict) -> dict[str, float]:
    """Host-side means of a step's sums, under the names of metrics.jsonl.

    Of a batch that was halved (batching.pack, where step.may_halve allows it) what is counted or averaged over tokens
    is of the prompts that teach alone: tokens, clip_frac, ratio_max, logprob_gap, sampler_nll, importance_mean and
    importance_max. Loss and gradient norm are those of the whole batch.
    """
    s = {name: float(value) for name, value in sums.items() if name not in ("obrs", "acceptance")}
    tokens = max(s["tokens"], 1.0)
    out = {
        "train/loss": s["total_loss"] / s["updates"],
        "train/grad_norm": s["grad_norm_sum"] / s["updates"],
        "train/clip_frac": s["clipped_tokens"] / tokens,
        "train/ratio_max": s["ratio_max"],
        "train/logprob_gap": s["logprob_gap_sum"] / max(s["importance_count"], 1.0),
        "train/sampler_nll": s["sampler_nll_sum"] / max(s["importance_count"], 1.0),
        "train/tokens": s["tokens"],
        "train/importance_mean": s["importance_ratio_sum"] / max(s["importance_count"], 1.0),
        "train/importance_max": s["importance_ratio_max"],
    }
    if "kl_sum" in s:
        out["train/kl_ref"] = s["kl_sum"] / max(s["kl_tokens"], 1.0)
    if "entropy_sum" in s:
        out["train/entropy"] = s["entropy_sum"] / tokens
    if "obrs" in sums:
        out |= {f"jackpot/{name}": float(value) for name, value in sums["obrs"].items()}
        out |= {f"jackpot/{name}": s[f"{name}_sum"] / s["updates"] for name in ("kappa", "lambda")}
    if "actor_tokens" in s:
        actor_tokens = max(s["actor_tokens"], 1.0)
        out |= {
            "actor/loss": s["actor_total_loss"] / s["updates"],
            "actor/grad_norm": s["actor_grad_norm_sum"] / s["updates"],
            "actor/clip_frac": s["actor_clipped_tokens"] / actor_tokens,
            "actor/logprob_gap": s["actor_logprob_gap_sum"] / actor_tokens,
        }
        if "actor_distill_sum" in s:
            out["actor/distill_kl"] = s["actor_distill_sum"] / actor_tokens
    return out


def _merge_stacked(sums: dict, axes: int) -> dict:
    """masked.merge_sums of what `axes` nested scans have stacked in front."""
    over = tuple(range(axes))

    def merge(path, x):
        return (jnp.max if path[-1].key.endswith("_max") else jnp.sum)(x, axis=over)

    return jax.tree_util.tree_map_with_path(merge, sums)


def _split(tree, parts: int):
    """[P, …] → [parts, P / parts, …]; every part takes prompts of every device, so that none is idle."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def _joined(x):
    """[parts, P', …] → [P, …], in the order before `_split`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
