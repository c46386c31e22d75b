"""Which slot of the engine's pool decodes which sample: host-side bookkeeping between segments."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from rljax import sharding
from rljax.types import Array, Rollouts, pytree


@pytree
class Refill:
    """Rows that start at a segment's begin, by slot. start: bool[lanes, slots]; the rest: sampling.Pool."""

    start: Array
    sample: Array
    limit: Array
    temperature: Array


WHOLE = 2**20  # bytes of rings up to which all rows are fetched: starting a transfer costs more than these bytes
PIECES = 16  # into how many of its rows a larger pool is fetched


def fetch_rows(rings: Sequence[jax.Array], lanes: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
    """Rows of a pool's rings [lanes, slots, C, …] as host arrays [n, C, …]; lanes, slots: int[n], where they stand.

    Of rings above WHOLE bytes only these rows leave the devices, unless they are most of all, in pieces of one
    declared size, so that one program serves any n. On several hosts all processes call this.
    """
    most, n = rings[0].shape[0] * rings[0].shape[1], len(lanes)
    if sum(ring.nbytes for ring in rings) <= WHOLE or 2 * n > most:
        return [ring[lanes, slots] for ring in sharding.fetch(rings)]
    size, mesh = -(-most // PIECES), sharding.mesh_of(rings)
    where = np.zeros((2, -(-n // size) * size), np.int32)
    where[:, :n] = lanes, slots
    pieces = sharding.put(mesh, np.split(where, where.shape[1] // size, axis=1), sharding.replicated(mesh))
    parts = sharding.fetch([_taker(mesh)(rings, piece) for piece in pieces])
    return [np.concatenate(part)[:n] for part in zip(*parts, strict=True)]


@functools.lru_cache
def _taker(mesh):
    """(rings, int32[2, N] lanes and slots) → the rings' rows [N, C, …] there, whole on every device."""

    def take(rings, where):
        return [ring.at[where[0], where[1]].get(mode="promise_in_bounds") for ring in rings]

    return jax.jit(take, out_shardings=sharding.replicated(mesh))


class Board:
    """Host-side bookkeeping: which lane holds which prompt, which slot which sample, and what has ended."""

    def __init__(
        self,
        counts: np.ndarray,
        limits: np.ndarray,
        *,
        tokens: int,
        lanes: int,
        slots: int,
        columns: int,
        top_logprobs: int,
    ):
        """counts: int[P], samples of each prompt. limits: int[R], most tokens of each row. tokens: T, most of any.
        columns: C of the pool's rings at first. top_logprobs: k."""
        self.counts, self.limits, self.most, self.columns = counts, limits, tokens, columns
        self.offset = np.concatenate([[0], np.cumsum(counts)])  # first row of each prompt
        R, T, k = int(self.offset[-1]), tokens, top_logprobs
        group = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.rollouts = Rollouts(
            tokens=np.zeros((R, T), np.int32),
            logprobs=np.zeros((R, T), np.float32),
            lengths=np.zeros(R, np.int32),
            group=group,
            sample=(np.arange(R) - self.offset[group]).astype(np.int32),
            truncated=np.zeros(R, bool),
            top_ids=np.zeros((R, T, k), np.int32),
            top_logprobs=np.zeros((R, T, k), np.float32),
        )
        self.waiting = [p for p in range(len(counts)) if counts[p] > 0][::-1]  # next prompt last
        self.lane_prompt = np.full(lanes, -1)
        self.next_sample = np.zeros(len(counts), np.int64)
        self.row = np.full((lanes, slots), -1)  # row that a slot decodes, -1 idle
        self.start = np.zeros((lanes, slots), np.int64)  # clock at which it began
        self.clock = 0

    def bind(self) -> list[tuple[int, int]]:
        """(lane, prompt) of the lanes that take a new prompt now."""
        bound = []
        for lane in np.flatnonzero((self.row < 0).all(axis=1)):
            held = self.lane_prompt[lane]
            if held >= 0 and self.next_sample[held] < self.counts[held]:
                continue
            self.lane_prompt[lane] = self.waiting.pop() if self.waiting else -1
            if self.lane_prompt[lane] >= 0:
                bound.append((int(lane), int(self.lane_prompt[lane])))
        return bound

    def refill(self, temperatures: np.ndarray) -> Refill:
        """Fills idle slots with their lane's next samples. temperatures: by sample, the last is repeated."""
        grid = self.row.shape
        out = Refill(
            start=np.zeros(grid, bool),
            sample=np.zeros(grid, np.int32),
            limit=np.zeros(grid, np.int32),
            temperature=np.ones(grid, np.float32),
        )
        for lane, prompt in enumerate(self.lane_prompt):
            if prompt < 0:
                continue
            free = np.flatnonzero(self.row[lane] < 0)[: self.counts[prompt] - self.next_sample[prompt]]
            samples = self.next_sample[prompt] + np.arange(len(free))
            self.next_sample[prompt] += len(free)
            self.row[lane, free] = self.offset[prompt] + samples
            self.start[lane, free] = self.clock
            out.start[lane, free] = True
            out.sample[lane, free] = samples
            out.limit[lane, free] = self.limits[self.row[lane, free]]
            out.temperature[lane, free] = temperatures[np.minimum(samples, len(temperatures) - 1)]
        return out

    def outgrown(self, steps: int) -> int:
        """Columns of rings that hold every row for `steps` more steps: the present ones, doubled as often as needed."""
        live = self.row >= 0
        lengths = np.minimum(self.clock - self.start[live] + steps, self.limits[self.row[live]])
        while self.columns < lengths.max(initial=0):
            self.columns = min(2 * self.columns, self.most)
        return self.columns

    def harvest(self, pool) -> np.ndarray:
        """Copies rows that have ended out of the pool (sampling.Pool); returns their row numbers."""
        active, clock, index, truncated = sharding.fetch((pool.active, pool.clock, pool.index, pool.truncated))
        self.clock = int(clock)
        lanes, slots = np.nonzero((self.row >= 0) & ~active)
        if len(lanes) == 0:
            return np.zeros(0, np.int64)
        rows, r = self.row[lanes, slots], self.rollouts
        r.lengths[rows] = index[lanes, slots]
        r.truncated[rows] = truncated[lanes, slots]
        steps = np.arange(r.tokens.shape[1])
        columns = (self.start[lanes, slots][:, None] + steps) % self.columns  # past a row's length they mean nothing
        inside = steps < r.lengths[rows][:, None]
        rings = fetch_rows((pool.tokens, pool.logprobs, pool.top_ids, pool.top_logprobs), lanes, slots)
        for ring, out in zip(rings, (r.tokens, r.logprobs, r.top_ids, r.top_logprobs), strict=True):
            values = ring[np.arange(len(rows))[:, None], columns]
            out[rows] = np.where(inside.reshape(*inside.shape, *[1] * (values.ndim - 2)), values, 0)
        self.row[lanes, slots] = -1
        return rows
