"""Fused attention kernels in place of attention.attend's own products: cuDNN's on NVIDIA, splash attention on TPU.

Both take what attention.attend takes and give what it gives. Neither shares a prefix among the rows of a prompt: its
keys are repeated for each row, before the row's own. Decoding, one token a row, keeps attend's own products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh

from rljax import sharding
from rljax.models.attention import Keys, visible

PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}  # what each runs on; "xla", attend's own products, runs everywhere
BLOCK = 128  # queries and keys of a tile of the splash kernel, at least
LARGEST_BLOCK = 512


def kernel(name: str, mesh: Mesh | None) -> Callable | None:
    """The function behind model.attention for attend's `kernel`; None is attend's own. mesh: of splash."""
    return {"xla": None, "cudnn": cudnn, "splash": functools.partial(splash, mesh=mesh)}[name]


def check(name: str, platform: str) -> None:
    """ValueError where model.attention is a kernel of another kind of device than `platform`."""
    if PLATFORMS.get(name, platform) != platform:
        raise ValueError(
            f"model.attention = {name!r} runs on {PLATFORMS[name]} alone and this process computes on {platform};"
            " set model.attention='xla'"
        )


def cudnn(q, positions, own: Keys, prefix: Keys | None, window):
    """attention.attend by cuDNN's flash attention, through jax.nn.dot_product_attention; float16 and bfloat16 alone."""
    return dot_product(q, positions, own, prefix, window, "cudnn")


def dot_product(q, positions, own: Keys, prefix: Keys | None, window, implementation: Literal["xla", "cudnn"]):
    """attention.attend by jax.nn.dot_product_attention, with an explicit mask bool[P · G, 1, T, C]."""
    P, G, T, H, D = q.shape
    k, v, key_positions, valid = _joined(own, prefix)
    # The backward pass of cuDNN with a mask takes even numbers of queries and of keys alone.
    odd_T, odd_C = T % 2, k.shape[3] % 2
    q, positions = _pad(q, 2, odd_T), _pad(positions, 2, odd_T)
    k, v, key_positions, valid = (
        _pad(k, 3, odd_C),
        _pad(v, 3, odd_C),
        _pad(key_positions, 2, odd_C),
        _pad(valid, 2, odd_C),
    )
    mask = visible(positions, key_positions, valid, window)
    keys, values = (x.transpose(0, 2, 3, 1, 4).reshape(P * G, x.shape[3], x.shape[1], D) for x in (k, v))
    out = jax.nn.dot_product_attention(
        q.reshape(P * G, T + odd_T, H, D),
        keys,
        values,
        mask=mask.reshape(P * G, 1, *mask.shape[2:]),
        implementation=implementation,
    )
    return out.reshape(P, G, T + odd_T, H, D)[:, :, :T]


def splash(q, positions, own: Keys, prefix: Keys | None, window, *, mesh: Mesh | None):
    """attention.attend by the splash attention kernel that ships with jax, for rows as Model.extend makes them.

    Their own keys are in order and one a query, so that causality is by column; padding is a segment of its own. The
    compiler cannot split the kernel, so it runs on each device's rows and heads of `mesh`. Off TPU it is interpreted.
    Raises ValueError for a sliding window.
    """
    if window is not None:
        raise ValueError("model.attention='splash' has no sliding windows, and this model has; use 'xla' or 'cudnn'")
    P, G, T, H, D = q.shape
    KV = own.k.shape[1]
    k, v, _, valid = _joined(own, prefix)
    C = k.shape[3]
    # A query that is padding sees the padding of its row, itself at least, and so never nothing.
    pad_T = -T % BLOCK
    pad_C = pad_T + -(C + pad_T) % BLOCK
    q = (q * jnp.asarray(D**-0.5, q.dtype)).reshape(P, G, T, KV, H // KV, D).transpose(0, 1, 3, 4, 2, 5)
    q = _pad(q, 4, pad_T)  # [P, G, KV, h, T, D]
    k, v = (_pad(x.transpose(0, 2, 1, 3, 4), 3, pad_C) for x in (k, v))  # [P, G, KV, C, D]
    segments = _pad(own.valid, 2, pad_T).astype(jnp.int32), _pad(valid, 2, pad_C).astype(jnp.int32)
    run: Callable[..., Any] = functools.partial(_splash_rows, offset=C - T)
    if mesh is not None:
        rows = "prompts" if P % sharding.size(mesh, "prompts") == 0 else None
        heads = "kv_heads" if KV % sharding.size(mesh, "kv_heads") == 0 else None
        split = sharding.partition_spec((rows, None, heads))
        whole = sharding.partition_spec((rows,))
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(split, split, split, (whole, whole)), out_specs=split, check_vma=False
        )
    out: Any = run(q, k, v, segments)
    return out[:, :, :, :, :T].transpose(0, 1, 4, 2, 3, 5).reshape(P, G, T, H, D)


def _splash_rows(q, k, v, segments, *, offset: int):
    """q[P, G, KV, h, T, D], k and v[P, G, KV, C, D], segments int32[P, G, T] and [P, G, C] → [P, G, KV, h, T, D]."""
    h, T, C = q.shape[3], q.shape[4], k.shape[3]
    block_q, block_kv = _block(T), _block(C)
    attend = splash_lib.make_splash_mqa_single_device(
        masks.MultiHeadMask([masks.CausalMask((T, C), offset)] * h),
        block_sizes=splash_lib.BlockSizes(
            block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv, block_q_dkv=block_q,
            block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv, block_q_dq=block_q, block_kv_dq=block_kv,
        ),
        interpret=jax.default_backend() != "tpu",
    )  # fmt: skip

    def row(q, k, v, segments):
        return jax.vmap(attend, in_axes=(0, 0, 0, None))(q, k, v, splash_lib.SegmentIds(*segments))

    return jax.vmap(jax.vmap(row))(q, k, v, segments)


def _block(size: int) -> int:
    """The largest tile up to LARGEST_BLOCK that divides a multiple of BLOCK."""
    return next(b for b in range(LARGEST_BLOCK, 0, -BLOCK) if size % b == 0)


def _joined(own: Keys, prefix: Keys | None):
    """(k, v [P, KV, G, C, D], positions and valid [P, G, C]) of prefix and row, the prefix repeated for each row."""
    if prefix is None:
        return own
    P, KV, G, _, D = own.k.shape
    S = prefix.k.shape[2]
    shared = (jnp.broadcast_to(x[:, :, None], (P, KV, G, S, D)) for x in (prefix.k, prefix.v))
    k, v = (jnp.concatenate(x, axis=3) for x in zip(shared, (own.k, own.v), strict=True))
    each = (jnp.broadcast_to(x, (P, G, S)) for x in (prefix.positions, prefix.valid))
    positions, valid = (jnp.concatenate(x, axis=2) for x in zip(each, (own.positions, own.valid), strict=True))
    return k, v, positions, valid


def _pad(x, axis: int, count: int):
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])
