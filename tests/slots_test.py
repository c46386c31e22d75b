"""What leaves the devices between segments: the rows that have ended, whole and alone."""

import types

import jax
import numpy as np
import pytest

from rljax import sharding, slots

LANES, SLOTS, COLUMNS, K = 16, 16, 4, 3
RINGS = ("tokens", "logprobs", "top_ids", "top_logprobs")


@pytest.fixture
def moved(monkeypatch):
    """Bytes of every array that is fetched."""
    sizes, real = [], sharding.fetch

    def fetch(tree):
        out = real(tree)
        sizes.extend(leaf.nbytes for leaf in jax.tree.leaves(out))
        return out

    monkeypatch.setattr(sharding, "fetch", fetch)
    return sizes


def begin(ended: int):
    """(board, its pool on the devices, the same by name on the host); rows began at clock 3, and `ended` have ended."""
    rng, grid = np.random.default_rng(0), (LANES, SLOTS)
    board = slots.Board(
        np.full(LANES, SLOTS), np.full(LANES * SLOTS, COLUMNS, np.int32),
        tokens=COLUMNS, lanes=LANES, slots=SLOTS, columns=COLUMNS, top_logprobs=K,
    )  # fmt: skip
    active = rng.permutation(LANES * SLOTS).reshape(grid) >= ended
    shapes = dict(zip(RINGS, [(), (), (K,), (K,)], strict=True))
    rings = {name: rng.integers(1, 99, (*grid, COLUMNS, *more)).astype(np.int32) for name, more in shapes.items()}
    host = rings | {"active": active, "index": rng.integers(1, COLUMNS + 1, grid), "truncated": ~active}
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    pool = types.SimpleNamespace(**sharding.put_by_prompt(mesh, host), clock=np.int32(3))
    assert len(board.harvest(pool)) == 0  # no row has begun
    assert len(board.bind()) == LANES and board.refill(np.ones(1, np.float32)).start.all()
    return board, pool, host


@pytest.mark.parametrize("ended", [1, 16, 17, 100, 128, 129, 256])
def test_rows_that_have_ended_are_copied_from_the_pool(monkeypatch, moved, ended):
    """A row's tokens stand in the ring from column 3 on, and past its length there is 0; the others stay."""
    monkeypatch.setattr(slots, "WHOLE", 0)
    board, pool, host = begin(ended)
    moved.clear()
    rows = board.harvest(pool)
    assert len(rows) == ended == np.count_nonzero(board.row < 0)
    for row in range(LANES * SLOTS):
        lane, slot = board.rollouts.group[row], board.rollouts.sample[row]
        length = 0 if host["active"][lane, slot] else host["index"][lane, slot]
        assert board.rollouts.lengths[row] == length and (row in rows) == (length > 0)
        for name in RINGS:
            want = np.roll(host[name][lane, slot], -3, axis=0)
            want[length:] = 0
            np.testing.assert_array_equal(getattr(board.rollouts, name)[row], want, err_msg=name)
    # Rings by sixteenths of their rows, unless most rows have ended; beside them a few numbers a row.
    whole = sum(host[name].nbytes for name in RINGS)
    few = sum(host[name].nbytes for name in ("active", "index", "truncated")) + 4
    assert sum(moved) - few <= whole * (-(-ended // 16) / 16 if ended <= 128 else 1)


def test_any_number_of_rows_is_fetched_by_one_program(monkeypatch):
    monkeypatch.setattr(slots, "WHOLE", 0)
    for ended in (1, 16, 40, 128):
        board, pool, _ = begin(ended)
        board.harvest(pool)
    assert slots._taker(sharding.mesh_of(pool.tokens))._cache_size() == 1


def test_a_small_pool_is_fetched_at_once_by_no_program(moved):
    board, pool, host = begin(1)
    moved.clear()
    board.harvest(pool)
    assert sum(moved) >= sum(host[name].nbytes for name in RINGS)


def test_rows_leave_the_devices_that_hold_them_without_their_neighbours():
    """Each device gives its own rows of those asked for; the rings are not gathered."""
    _, pool, _ = begin(1)
    rings = tuple(getattr(pool, name) for name in RINGS)
    mesh = sharding.mesh_of(rings)
    where = sharding.put(mesh, np.zeros((2, 16), np.int32), sharding.replicated(mesh))
    text = slots._taker(mesh).lower(rings, where).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text
