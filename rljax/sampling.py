"""Prefill and decode on token arrays: a pool of lanes × slots, refilled between segments. No text here.

A lane is bound to one prompt, whose keys and values it holds once; its slots decode that prompt's samples. A
slot whose row has ended takes the prompt's next sample; a lane with none left takes the next prompt. Rows
start at any time, so caches and outputs are rings that all rows write at the same column (Decoder.decode). The rings
begin short, and double when a row is about to outgrow them: a step costs what the rows are long, not what they may be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import drawing, preemption, sharding
from rljax.models.transformer import KV, Model, Prefix
from rljax.slots import Board, Refill
from rljax.types import Array, Rollouts, pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The static half of a pool. Each distinct value compiles once.

    prompt_tokens: S. columns: C, the tokens of a row that the rings hold. segment: decode steps between refills.
    top_k, top_p, min_p: filters of the sampled distribution (0, 1, 0 are off).
    top_logprobs: k recorded a token.
    """

    lanes: int
    slots: int
    prompt_tokens: int
    columns: int
    segment: int
    stop_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_logprobs: int = 0


RINGS = ("tokens", "logprobs", "top_ids", "top_logprobs")  # of a pool, beside its cache


@pytree
class Pool:
    """Device state of the engine; every array leads with lanes (caches: layers, then lanes)."""

    prefix: Prefix
    first: Array  # int32[lanes], the last prompt token: each row's first input
    draw: Array  # uint32[lanes]
    cache: KV  # [L, lanes, KV, slots, C, D]
    token: Array  # int32[lanes, slots], the next input
    index: Array  # int32[lanes, slots], tokens sampled so far
    limit: Array  # int32[lanes, slots], the most tokens of the row
    sample: Array  # int32[lanes, slots]
    temperature: Array  # float32[lanes, slots]
    active: Array  # bool[lanes, slots]
    truncated: Array  # bool[lanes, slots]
    tokens: Array  # int32[lanes, slots, C], a ring
    logprobs: Array  # float32[lanes, slots, C]
    top_ids: Array  # int32[lanes, slots, C, k]
    top_logprobs: Array  # float32[lanes, slots, C, k]
    clock: Array  # int32[], decode steps so far


def _new_pool(model: Model, dtype, shape: Shape) -> Pool:
    c, lanes, slots, C = model.config, shape.lanes, shape.slots, shape.columns

    def kv(*middle):
        return KV(*(jnp.zeros((c.num_layers, lanes, *middle, c.head_dim), dtype) for _ in KV._fields))

    S = shape.prompt_tokens
    ints = jnp.zeros((lanes, slots), jnp.int32)
    return Pool(
        prefix=Prefix(kv(c.num_kv_heads, S), jnp.zeros((lanes, S), bool), jnp.zeros((lanes, S), jnp.int32)),
        first=jnp.zeros(lanes, jnp.int32),
        draw=jnp.zeros(lanes, jnp.uint32),
        cache=kv(c.num_kv_heads, slots, C),
        token=ints,
        index=ints,
        limit=ints,
        sample=ints,
        temperature=jnp.ones((lanes, slots), jnp.float32),
        active=ints > 0,
        truncated=ints > 0,
        tokens=jnp.zeros((lanes, slots, C), jnp.int32),
        logprobs=jnp.zeros((lanes, slots, C), jnp.float32),
        top_ids=jnp.zeros((lanes, slots, C, shape.top_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((lanes, slots, C, shape.top_logprobs), jnp.float32),
        clock=jnp.zeros((), jnp.int32),
    )


@functools.lru_cache
def _pool_maker(model: Model, dtype, shape: Shape, mesh):
    make = functools.partial(_new_pool, model, dtype, shape)
    return jax.jit(make, out_shardings=_pool_shardings(mesh, jax.eval_shape(make)))


def _pool_shardings(mesh, pool: Pool) -> Pool:
    """Lanes are split as prompts are; the heads of the caches over the tensor axis where they divide."""
    heads = pool.cache.k.shape[2]
    split = "kv_heads" if heads % sharding.size(mesh, "kv_heads") == 0 else None
    spec = functools.partial(sharding.named, mesh, "layers", "prompts")
    rest = sharding.by_prompt(mesh, dataclasses.replace(pool, cache=(), clock=(), prefix=()))
    return dataclasses.replace(
        rest,
        cache=KV(*[spec(split, None, None, None)] * 2),
        prefix=Prefix(KV(*[spec(split, None, None)] * 2), *[sharding.named(mesh, "prompts", None)] * 2),
        clock=sharding.replicated(mesh),
    )


@functools.lru_cache
def _grower(model: Model, dtype, shape: Shape, mesh):
    """(cache, other rings by name, clock) → the same with shape.columns: every value stays at its clock."""

    def grow(cache: KV, rings: dict, clock):
        age = (clock - 1 - jnp.arange(shape.columns)) % shape.columns  # steps since a new column was to be written
        source = (clock - 1 - age) % rings["tokens"].shape[2]  # of columns older than the old ring nothing is read
        return (
            jax.tree.map(lambda kv: jnp.take(kv, source, axis=4), cache),
            jax.tree.map(lambda ring: jnp.take(ring, source, axis=2), rings),
        )

    where = _pool_shardings(mesh, jax.eval_shape(functools.partial(_new_pool, model, dtype, shape)))
    return jax.jit(grow, out_shardings=(where.cache, {name: getattr(where, name) for name in RINGS}))


def _grown(pool: Pool, model: Model, dtype, shape: Shape, mesh) -> Pool:
    rings = {name: getattr(pool, name) for name in RINGS}
    cache, rings = _grower(model, dtype, shape, mesh)(pool.cache, rings, pool.clock)
    return dataclasses.replace(pool, cache=cache, **rings)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="pool")
def _bind(params, pool: Pool, lanes, tokens, lengths, draws, *, model: Model) -> Pool:
    """Prefills W prompts into `lanes` int32[W]; a lane number past the end is padding and writes nothing."""
    S = tokens.shape[1]
    prefix = model.prefill(params, tokens, jnp.arange(S) < lengths[:, None] - 1)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]

    def put(old, new):
        return old.at[lanes].set(new.astype(old.dtype), mode="drop")

    def put_layers(old, new):
        return old.at[:, lanes].set(new.astype(old.dtype), mode="drop")

    return dataclasses.replace(
        pool,
        prefix=Prefix(
            jax.tree.map(put_layers, pool.prefix.kv, prefix.kv),
            put(pool.prefix.valid, prefix.valid),
            put(pool.prefix.positions, prefix.positions),
        ),
        first=put(pool.first, last),
        draw=put(pool.draw, draws),
    )


@functools.partial(jax.jit, static_argnames=("model", "shape"), donate_argnames="pool")
def _decode_segment(params, pool: Pool, refill: Refill, key, *, model: Model, shape: Shape) -> Pool:
    """Starts the refilled rows, then decodes until the segment's steps are done or no row is active."""
    new = refill.start
    pool = dataclasses.replace(
        pool,
        token=jnp.where(new, pool.first[:, None], pool.token),
        index=jnp.where(new, 0, pool.index),
        limit=jnp.where(new, refill.limit, pool.limit),
        sample=jnp.where(new, refill.sample, pool.sample),
        temperature=jnp.where(new, refill.temperature, pool.temperature),
        active=pool.active | new,
        truncated=pool.truncated & ~new,
    )
    prefix, prompt_end = pool.prefix, jnp.sum(pool.prefix.valid, axis=1, dtype=jnp.int32)[:, None]
    stops = jnp.asarray(shape.stop_ids, jnp.int32)

    def write(ring, value, column, active):
        # A row that has ended waits here for the segment's end: the ring may come round to its own columns.
        value = jnp.expand_dims(value, 2).astype(ring.dtype)
        old = jax.lax.dynamic_slice_in_dim(ring, column, 1, axis=2)
        value = jnp.where(active.reshape(*active.shape, *[1] * (value.ndim - 2)), value, old)
        return jax.lax.dynamic_update_slice_in_dim(ring, value, column, axis=2)

    def step(carry):
        steps, p = carry
        column = p.clock % shape.columns
        hidden, cache = model.decode(params, p.token, prompt_end + p.index, p.index, prefix, p.cache, column)
        uniforms = drawing.row_uniforms(key, p.draw, p.sample, p.index)
        ids, chosen, top_ids, top = drawing.choose(
            model.unembed(params, hidden),
            p.temperature,
            uniforms,
            top_k=shape.top_k,
            top_p=shape.top_p,
            min_p=shape.min_p,
            top_logprobs=shape.top_logprobs,
        )
        index = p.index + p.active
        ended = jnp.isin(ids, stops)
        full = index >= p.limit
        return steps + 1, dataclasses.replace(
            p,
            cache=cache,
            token=ids,
            index=index,
            truncated=p.truncated | (p.active & full & ~ended),
            active=p.active & ~ended & ~full,
            tokens=write(p.tokens, ids, column, p.active),
            logprobs=write(p.logprobs, chosen, column, p.active),
            top_ids=write(p.top_ids, top_ids, column, p.active),
            top_logprobs=write(p.top_logprobs, top, column, p.active),
            clock=p.clock + 1,
        )

    pool = dataclasses.replace(pool, prefix=())  # not in the loop's carry: it does not change
    _, pool = jax.lax.while_loop(
        lambda c: (c[0] < shape.segment) & jnp.any(c[1].active), step, (jnp.zeros((), jnp.int32), pool)
    )
    return dataclasses.replace(pool, prefix=prefix)


def abstract_pool(model: Model, params, shape: Shape) -> Pool:
    """Shapes and dtypes of a pool."""
    return jax.eval_shape(functools.partial(_new_pool, model, model.cache_dtype(params), shape))


def trace_decode(model: Model, params, shape: Shape) -> jax.stages.Traced:
    """The program of a segment of decoding, on abstract arrays. params: abstract, as `model.cast` gives them."""
    grid = (shape.lanes, shape.slots)
    kinds = {"start": bool, "sample": jnp.int32, "limit": jnp.int32, "temperature": jnp.float32}
    refill = jax.eval_shape(lambda: Refill(**{name: jnp.zeros(grid, kind) for name, kind in kinds.items()}))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _decode_segment.trace(params, abstract_pool(model, params, shape), refill, key, model=model, shape=shape)


def trace_prefill(model: Model, params, shape: Shape, prompts: int) -> jax.stages.Traced:
    """The program that binds so many prompts to lanes, likewise."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments = ints((prompts,)), ints((prompts, shape.prompt_tokens)), ints((prompts,))
    draws = jax.ShapeDtypeStruct((prompts,), jnp.uint32)
    return _bind.trace(params, abstract_pool(model, params, shape), *arguments, draws, model=model)


def generate(
    model: Model,
    params,
    prompts: Sequence[Sequence[int]],
    *,
    num_samples: int | Sequence[int] | np.ndarray,
    max_new_tokens: int | Sequence[int],
    key: jax.Array,
    temperature: float | Sequence[float] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_ids: Sequence[int] = (),
    top_logprobs: int = 0,
    draws: Sequence[int] | np.ndarray | None = None,
    lanes: int | None = None,
    slots: int | None = None,
    segment: int = 32,
    columns: int = 256,
    prompt_capacity: int | None = None,
    on_finished: Callable[[Rollouts, np.ndarray], None] | None = None,
) -> Rollouts:
    """Samples completions of P tokenised prompts; each prompt is prefilled once.

    num_samples: of every prompt, or P counts (0 skips a prompt). max_new_tokens: of every row, or one limit a
    row (rows sorted by prompt, then sample); a stop id counts. temperature: of every row, or one a sample
    (the last is repeated); 0 is greedy. stop_ids end a row and stay in it. top_k, top_p, min_p:
    drawing.filter_logits. top_logprobs: k most likely tokens recorded a step.
    draws: int[P], the coordinates of the random keys fold_in(key, draw, sample, position); default 0…P-1.
    lanes × slots rows decode at once (default: everything). columns: tokens of a row that its cache holds at first;
    doubled for rows that outgrow it. prompt_capacity: pads prompts to at least this.
    on_finished(rollouts, rows) is called between segments with the rows that have just ended.
    Returns Rollouts with R rows. Raises ValueError for an empty prompt or a number out of its range, and
    preemption.Preempted between segments where a run that watches for it was told to end.
    """
    counts = np.broadcast_to(np.asarray(num_samples, np.int64), (len(prompts),))
    streams = np.arange(len(prompts)) if draws is None else np.asarray(draws)
    _check_prompts(prompts, counts, streams)
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (int(counts.sum()),))
    T = int(np.max(max_new_tokens, initial=1))
    temperatures = np.atleast_1d(np.asarray(temperature, np.float32))
    mesh = sharding.mesh_of(params)
    model = model.on(mesh)
    shards = sharding.size(mesh, "prompts")
    lanes = -(-max(1, len(prompts)) // shards) * shards if lanes is None else lanes
    if lanes % shards:
        raise ValueError(f"lanes={lanes} does not divide over the {shards} devices that split prompts")
    longest = max((len(p) for p in prompts), default=1)
    shape = Shape(
        lanes=lanes,
        slots=max(1, int(counts.max(initial=1))) if slots is None else slots,
        prompt_tokens=max(longest, 1 if prompt_capacity is None else prompt_capacity),
        columns=min(columns, T),
        segment=segment,
        stop_ids=tuple(stop_ids),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        top_logprobs=top_logprobs,
    )
    _check_numbers(shape, limits, temperatures, model.config.vocab_size)
    rings = {"columns": shape.columns, "top_logprobs": top_logprobs}
    board = Board(counts, limits, tokens=T, lanes=lanes, slots=shape.slots, **rings)
    dtype = model.cache_dtype(params)
    pool = _pool_maker(model, dtype, shape, mesh)()
    params, key = model.cast(params), sharding.everywhere(mesh, key)
    while True:
        for chunk in _chunks(board.bind(), lanes):
            pool = _bind(params, pool, *_bind_arguments(chunk, prompts, streams, shape, mesh), model=model)
        refill = board.refill(temperatures)
        if not (board.row >= 0).any():
            return board.rollouts
        if (needed := board.outgrown(segment)) > shape.columns:
            shape = dataclasses.replace(shape, columns=needed)
            pool = _grown(pool, model, dtype, shape, mesh)
        refill = sharding.put_by_prompt(mesh, refill)
        pool = _decode_segment(params, pool, refill, key, model=model, shape=shape)
        ended = board.harvest(pool)
        if on_finished is not None and len(ended):
            on_finished(board.rollouts, ended)
        preemption.check()


def _check_prompts(prompts: Sequence[Sequence[int]], counts: np.ndarray, draws: np.ndarray) -> None:
    empty = [i for i, p in enumerate(prompts) if len(p) == 0]
    if empty:
        raise ValueError(f"prompt {empty[0]} has no tokens; a prompt needs at least one to continue from")
    if len(draws) != len(prompts):
        raise ValueError(f"{len(draws)} draws for {len(prompts)} prompts; give one a prompt")
    if counts.min(initial=0) < 0:
        raise ValueError(f"num_samples={counts.min()}; it must be at least 0")


def _check_numbers(shape: Shape, limits: np.ndarray, temperatures: np.ndarray, vocabulary: int) -> None:
    rules = [
        ("max_new_tokens", int(limits.min(initial=1)), limits.min(initial=1) >= 1, "at least 1"),
        ("temperature", float(temperatures.min()), temperatures.min() >= 0, "at least 0, which is greedy"),
        ("lanes", shape.lanes, shape.lanes >= 1, "at least 1"),
        ("slots", shape.slots, shape.slots >= 1, "at least 1"),
        ("segment", shape.segment, shape.segment >= 1, "at least 1"),
        ("columns", shape.columns, shape.columns >= 1, "at least 1"),
        ("top_k", shape.top_k, shape.top_k >= 0, "at least 0, which is off"),
        ("top_p", shape.top_p, 0 < shape.top_p <= 1, "above 0 and at most 1, which is off"),
        ("min_p", shape.min_p, 0 <= shape.min_p <= 1, "between 0, which is off, and 1"),
        ("top_logprobs", shape.top_logprobs, 0 <= shape.top_logprobs <= vocabulary, f"0 to {vocabulary}"),
    ]
    for name, value, ok, rule in rules:
        if not ok:
            raise ValueError(f"{name}={value}; it must be {rule}")


def _chunks(bound: list[tuple[int, int]], lanes: int) -> list[list[tuple[int, int] | None]]:
    """Lanes to bind in batches of one of two declared widths, so that prefill compiles at most twice."""
    narrow = max(1, lanes // 8)
    if len(bound) > 2 * narrow:
        return [bound + [None] * (lanes - len(bound))]
    parts = [bound[i : i + narrow] for i in range(0, len(bound), narrow)]
    return [part + [None] * (narrow - len(part)) for part in parts]


def _bind_arguments(chunk, prompts, draws, shape: Shape, mesh):
    """Padded, replicated arguments of _bind. Padding points past the last lane."""
    lanes = np.array([shape.lanes if c is None else c[0] for c in chunk], np.int32)
    tokens = np.zeros((len(chunk), shape.prompt_tokens), np.int32)
    lengths = np.ones(len(chunk), np.int32)
    ids = np.zeros(len(chunk), np.uint32)
    for i, c in enumerate(chunk):
        if c is not None:
            prompt = prompts[c[1]]
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
            ids[i] = draws[c[1]]
    return sharding.put(mesh, (lanes, tokens, lengths, ids), sharding.replicated(mesh))
