"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen model learns through A and B beside its projections.

Adapters are parameters of the decoder's own tree, `layers.q_lora_a` [L, in, r] and `layers.q_lora_b` [L, r, out]
beside `layers.q`, so that the engine and the learner know nothing of them. Only the optimizer's side does: it splits
the tree into what is trained and what is frozen.

Written here and not taken from qwix (0.1.8), which finds weights by intercepting products inside calls of nnx
modules: our layers are one stacked module, merged inside a scan, where its adapters would have no place to live.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rljax.types import LearnerState


@dataclasses.dataclass(frozen=True)
class Lora:
    """y = x W + α/r · x A B (eq. 3). rank: r. alpha: α. targets: projections with an adapter, of
    q, k, v, o, gate, up, down.

    A starts as N(0, 1/in) and B as 0, so that the first forward pass is the base model's. Both are float32.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def from_config(options: Any) -> Lora | None:
    """The adapters that a config's ``lora`` block (rank, alpha, targets: "q,v") asks for; None at rank 0."""
    return Lora(options.rank, options.alpha, tuple(options.targets.split(","))) if options.rank else None


def _is_adapter(name: str) -> bool:
    return name.endswith("_lora_a") or name.endswith("_lora_b")


def split(params) -> tuple[Any, Any]:
    """(trained, frozen) trees of a decoder's parameters: adapters and the rest; (all, None) without adapters."""
    adapters = {name: w for name, w in params.get("layers", {}).items() if _is_adapter(name)}
    if not adapters:
        return params, None
    rest = {name: w for name, w in params["layers"].items() if name not in adapters}
    return {"layers": adapters}, params | {"layers": rest}


def join(trained, frozen):
    """The tree that `split` took apart; arrays are shared, not copied."""
    if frozen is None:
        return trained
    return frozen | {"layers": frozen["layers"] | trained["layers"]}


def whole(state: LearnerState):
    """All parameters of a learner's model."""
    return join(state.params, state.frozen)


def merge(params, lora: Lora | None):
    """W + α/r · A B in W's place, in its dtype: the parameters of the decoder without adapters."""
    if lora is None:
        return params
    trained, base = split(params)
    layers = dict(base["layers"])
    for name in lora.targets:
        a, b = (trained["layers"][f"{name}_lora_{half}"] for half in "ab")
        layers[name] = (layers[name] + lora.scale * (a @ b)).astype(layers[name].dtype)
    return base | {"layers": layers}


merged = jax.jit(merge, static_argnames="lora")
