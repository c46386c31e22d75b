"""Which prompts a step takes from the stream, and how many rollouts each is granted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from rljax.algos import cero
from rljax.options import Config
from rljax.prompts import Stream
from rljax.types import Prompts

_init = jax.jit(cero.init, static_argnums=0)
_update = jax.jit(cero.update, static_argnums=0)
_allocate = jax.jit(cero.allocate, static_argnums=0)
_metrics = jax.jit(cero.metrics, static_argnums=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grants:
    """prompts: those granted rollouts. counts: int32[P]. state: the allocator's, every draw accounted.

    draws: prompts taken from the stream so far, those granted none included.
    """

    prompts: Prompts
    counts: np.ndarray
    state: Any
    draws: int


def from_config(config: Config, num_prompts: int) -> Uniform | Cero:
    """The allocator that budget.rule names, over the number of training prompts that there really are.

    Raises ValueError where their epochs cannot spend CERO's budget.
    """
    r, c, b = config.rollout, config.cero, config.budget
    if b.rule == "uniform":
        return Uniform(budget=b.rollouts, prompts=r.prompts, samples=r.samples)
    most = num_prompts * b.epochs * r.samples
    if b.rollouts > most:
        raise ValueError(
            f"budget.rollouts = {b.rollouts} can never be spent: {num_prompts} training prompts * budget.epochs *"
            f" rollout.samples = {num_prompts} * {b.epochs} * {r.samples} = {most}; raise budget.epochs or lower"
            " budget.rollouts"
        )
    return Cero(
        prompts=r.prompts,
        cero=cero.Cero(
            budget=b.rollouts,
            num_prompts=num_prompts,
            epochs=b.epochs,
            n_max=r.samples,
            eta=c.eta,
            step_theta=c.step_theta,
            step_mu=c.step_mu,
            prior=(c.prior_alpha, c.prior_beta),
            discount=c.discount,
            success_threshold=c.success_threshold,
            min_visits=c.min_visits,
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every prompt of the stream gets n rollouts, until the budget is spent: GRPO. Its state is ()."""

    budget: int
    prompts: int
    samples: int

    def init(self):
        return ()

    def draw(self, stream: Stream, draws: int, spent: int, state) -> Grants:
        """The next P prompts; the last grants may be a part, but never one rollout, which has no group."""
        left = self.budget - spent
        counts = np.clip(left - self.samples * np.arange(self.prompts), 0, self.samples)
        counts = counts[counts >= 2].astype(np.int32)
        prompts = stream.take(draws, len(counts))
        return Grants(prompts=prompts, counts=counts, state=state, draws=draws + len(counts))

    def update(self, state, ids, rewards, valid):
        return state

    def metrics(self, state) -> dict[str, float]:
        return {}

    def foreseen(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cero:
    """CERO's posterior and prices choose; prompts granted nothing use no slot (methods: algos/cero.py)."""

    prompts: int
    cero: cero.Cero

    def init(self):
        return _init(self.cero)

    def draw(self, stream: Stream, draws: int, spent: int, state) -> Grants:
        """Draws on until P prompts hold grants, the epochs are over or the budget is granted.

        The prices move with every draw, so that a stretch of prompts below the budget's price ends.
        """
        ids, where, counts = [], [], []
        last = self.cero.epochs * self.cero.num_prompts
        while len(ids) < self.prompts and draws < last and self.cero.budget - spent - sum(counts) >= 2:
            chunk = stream.take(draws, min(self.prompts - len(ids), last - draws))
            padded, reserved = jax.device_put((self._pad(chunk.ids, self.prompts), np.int32(sum(counts))))
            grants = _allocate(self.cero, state, padded, reserved=reserved)
            none = jax.device_put(self._no_rows())
            state = _update(self.cero, state, *none, drawn_ids=padded, drawn_counts=grants)
            granted = jax.device_get(grants)
            draws += len(chunk)
            taken = granted[: len(chunk)] > 0
            ids += chunk.ids[taken].tolist()
            where += chunk.draws[taken].tolist()
            counts += granted[: len(chunk)][taken].tolist()
        prompts = stream.prompts.take(np.array(ids, np.int64), np.array(where, np.int64))
        return Grants(prompts=prompts, counts=np.array(counts, np.int32), state=state, draws=draws)

    def update(self, state, ids: np.ndarray, rewards: np.ndarray, valid: np.ndarray):
        """Posterior and prices after the rewards [R] of a step's rollouts; ids are their prompts'."""
        R = self.prompts * self.cero.n_max
        none = self._pad(np.zeros(0, np.int64), self.prompts)
        rows = (
            self._pad(ids, R),
            np.pad(rewards.astype(np.float32), (0, R - len(rewards))),
            np.pad(valid, (0, R - len(valid))),
        )
        rows, drawn = jax.device_put((rows, {"drawn_ids": none, "drawn_counts": np.zeros(self.prompts, np.int32)}))
        return _update(self.cero, state, *rows, **drawn)

    def metrics(self, state) -> dict[str, float]:
        return {f"cero/{name}": float(value) for name, value in jax.device_get(_metrics(self.cero, state)).items()}

    def foreseen(self) -> list[str]:
        """What to warn of before the first step: a budget from which prices have nothing to choose."""
        c, first = self.cero, self.first_epoch()
        remedy = "raise budget.rollouts, or lower task.train_prompts"
        if c.budget < c.num_prompts * c.n_max:
            return [
                f"budget.rollouts = {c.budget:,} are {c.budget // c.n_max:,} groups of rollout.samples = {c.n_max} for"
                f" {c.num_prompts:,} training prompts: few prompts are met again once CERO knows what they are worth;"
                f" {remedy} or rollout.samples"
            ]
        if c.epochs > 1 and first > 0.9 * c.budget:
            return [
                f"the first of budget.epochs = {c.epochs} will spend about {first / c.budget:.0%} of budget.rollouts ="
                f" {c.budget:,}, before CERO knows what prompts are worth; {remedy} or budget.epochs, or raise"
                f" cero.step_mu (it is {c.rates.step_mu:.3g}), with which the budget's price rises sooner"
            ]
        return []

    def first_epoch(self) -> float:
        """Rollouts that the first epoch spends, whatever their rewards.

        All M prices begin at θ = η E[p(1-p)] of the prior, and a prompt's own moves only after it was drawn. Each draw
        is granted N until the budget's price, which rises by step_mu (N - t) a grant of a target of t = B / (K M), has
        reached θ, after D = θ / (step_mu (N - t)) draws; then as many are granted as keep it there, t a draw:
        N D + t (M - D).
        """
        c = self.cero
        target, theta = c.budget / (c.epochs * c.num_prompts), float(jax.device_get(self.init().theta)[0])
        rise = c.rates.step_mu * (c.n_max - target)
        draws = theta / rise if rise > 0 and c.min_visits == 0 else math.inf
        free = min(draws, c.num_prompts)
        return min(c.budget, c.n_max * free + target * (c.num_prompts - free))

    def _no_rows(self):
        R = self.prompts * self.cero.n_max
        return np.full(R, -1, np.int32), np.zeros(R, np.float32), np.zeros(R, bool)

    @staticmethod
    def _pad(ids: np.ndarray, size: int) -> np.ndarray:
        return np.pad(ids.astype(np.int32), (0, size - len(ids)), constant_values=-1)
