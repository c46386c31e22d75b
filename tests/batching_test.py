"""Kept rollouts → TrainBatch: rows by index, masks from recorded lengths, declared widths."""

import jax
import numpy as np
import pytest

from rljax import batching, sharding
from rljax.types import Prompts, Rollouts

# Prompts 0, 1, 2 with 3, 1 and 2 rollouts. 2 is both EOS and what a careless batch would pad with.
GROUP, SAMPLE = [0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1]
TOKENS = [
    [5, 7, 2, 0, 0],
    [5, 7, 9, 9, 9],
    [2, 0, 0, 0, 0],
    [8, 8, 2, 0, 0],
    [1, 2, 0, 0, 0],
    [6, 6, 6, 2, 0],
]
LENGTHS = [3, 5, 1, 3, 2, 4]


@pytest.fixture
def prompts():
    return Prompts(
        ids=np.array([40, 41, 42]),
        draws=np.array([7, 8, 2**32 - 1]),
        tokens=([3, 1], [4, 4, 4, 4], [9]),
        examples=({}, {}, {}),
    )


@pytest.fixture
def rollouts():
    logprobs = -np.arange(30, dtype=np.float32).reshape(6, 5)
    return Rollouts(
        tokens=np.array(TOKENS, np.int32),
        logprobs=np.where(np.arange(5) < np.array(LENGTHS)[:, None], logprobs, 0),
        lengths=np.array(LENGTHS, np.int32),
        group=np.array(GROUP, np.int32),
        sample=np.array(SAMPLE, np.int32),
        truncated=np.array([False, True, False, False, False, False]),
        top_ids=np.zeros((6, 5, 0), np.int32),
        top_logprobs=np.zeros((6, 5, 0), np.float32),
    )


def pack(prompts, rollouts, **changes):
    settings = {
        "advantages": np.array([[0.5, -0.5], [1.0, 9.0], [0.25, -0.25]]),
        "indices": np.array([[2, 1], [0, 0], [1, 0]]),
        "kept": np.array([[True, True], [True, False], [True, True]]),
        "num_prompts": 4,
        "max_prompt_tokens": 16,
        "max_new_tokens": 8,
        "mesh": sharding.single_device_mesh(),
    } | changes
    arrays = [settings.pop(name) for name in ("advantages", "indices", "kept")]
    return batching.pack(prompts, rollouts, *arrays, **settings)


def test_every_array_is_gathered_by_the_same_indices(prompts, rollouts):
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts))
    assert batch.tokens.shape == (4, 2, 8) and batch.prompt_tokens.shape == (4, 16)
    for p, k, row in [(0, 0, 2), (0, 1, 1), (1, 0, 3), (2, 0, 5), (2, 1, 4)]:
        np.testing.assert_array_equal(batch.tokens[p, k, :5], TOKENS[row])  # the sampled ids themselves
        np.testing.assert_array_equal(batch.sampler_logprobs[p, k, :5], rollouts.logprobs[row])
        assert batch.lengths[p, k] == LENGTHS[row] and batch.samples[p, k] == SAMPLE[row]
    np.testing.assert_array_equal(batch.advantages, [[0.5, -0.5], [1.0, 0.0], [0.25, -0.25], [0.0, 0.0]])
    np.testing.assert_array_equal(batch.prompt_tokens[1, :5], [4, 4, 4, 4, 0])
    np.testing.assert_array_equal(batch.draws, [7, 8, 2**32 - 1, 0])


def test_rows_not_kept_and_padding_prompts_have_length_zero(prompts, rollouts):
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts))
    np.testing.assert_array_equal(batch.lengths, [[1, 5], [3, 0], [4, 2], [0, 0]])
    np.testing.assert_array_equal(batch.prompt_lengths, [2, 4, 1, 0])
    assert not batch.tokens[1, 1].any() and not batch.sampler_logprobs[1, 1].any() and not batch.tokens[3].any()


def test_masks_come_from_recorded_lengths_also_where_eos_is_the_pad_id(prompts, rollouts):
    # faults.md 14: [5, 7, 2, …] keeps its EOS and nothing after; [5, 7, 9, 9, 9] was cut by the limit.
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts, indices=np.array([[0, 1], [0, 0], [1, 0]])))
    mask = np.arange(8) < batch.lengths[0][:, None]
    np.testing.assert_array_equal(mask[:, :5].astype(int), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert batch.tokens[0, 0, 2] == 2 and mask[0, 2]  # the EOS is trained on


def test_a_batch_goes_without_the_prompts_that_have_no_advantage(prompts, rollouts):
    """Prompt 1 alone teaches, or 1 and 2; the lengths of the others' kept rows stay, to be counted."""
    advantages = np.array([[0.0, 0.0], [1.0, 9.0], [0.0, 0.0]])
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts, advantages=advantages, halve=True))
    np.testing.assert_array_equal(batch.lengths, [[3, 0], [0, 0]])
    np.testing.assert_array_equal(batch.tokens[0, 0, :3], TOKENS[3][:3])
    np.testing.assert_array_equal(batch.draws, [8, 0])
    assert batch.silent_lengths.shape == (2, 4)
    assert sorted(batch.silent_lengths[batch.silent_lengths > 0]) == [1, 2, 4, 5]
    advantages[2] = 0.25, -0.25
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts, advantages=advantages, halve=True))
    np.testing.assert_array_equal(batch.lengths, [[3, 0], [4, 2]])
    assert sorted(batch.silent_lengths[batch.silent_lengths > 0]) == [1, 5]


def test_a_batch_is_whole_where_more_than_half_of_it_teaches_or_nothing_may_go(prompts, rollouts):
    whole = pack(prompts, rollouts)
    assert whole.silent_lengths is None
    jax.tree.map(np.testing.assert_array_equal, pack(prompts, rollouts, halve=True), whole)
    silent = pack(prompts, rollouts, advantages=np.zeros((3, 2)))
    assert silent.lengths.shape == (4, 2) and silent.silent_lengths is None


def test_a_batch_without_any_advantage_keeps_a_prompt(prompts, rollouts):
    """An update is made then, as by the whole batch: on a gradient of 0."""
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts, advantages=np.zeros((3, 2)), halve=True))
    np.testing.assert_array_equal(batch.lengths, [[1, 5], [0, 0]])
    assert sorted(batch.silent_lengths[batch.silent_lengths > 0]) == [2, 3, 4]
    # Of prompt 0 no row is usable (all unscorable, or all cut): the batch is not to be empty for that.
    kept = np.array([[False, False], [True, False], [True, True]])
    batch = jax.tree.map(np.asarray, pack(prompts, rollouts, advantages=np.zeros((3, 2)), kept=kept, halve=True))
    np.testing.assert_array_equal(batch.lengths, [[3, 0], [0, 0]])
    assert sorted(batch.silent_lengths[batch.silent_lengths > 0]) == [2, 4]


def test_dtypes(prompts, rollouts):
    batch = pack(prompts, rollouts)
    for name in ("prompt_tokens", "prompt_lengths", "tokens", "lengths", "samples"):
        assert getattr(batch, name).dtype == np.int32, name
    assert batch.draws.dtype == np.uint32
    assert batch.sampler_logprobs.dtype == batch.advantages.dtype == np.float32


def test_a_batch_is_split_by_prompt_over_the_mesh(prompts, rollouts):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    batch = pack(prompts, rollouts, mesh=mesh)
    leaves = [leaf for leaf in jax.tree.leaves(batch) if leaf.size]  # top-k tables without entries lie whole
    assert len(leaves) >= 8
    for leaf in leaves:
        assert leaf.addressable_shards[0].data.shape == (1, *leaf.shape[1:])
    whole = pack(prompts, rollouts)
    jax.tree.map(np.testing.assert_array_equal, batch, whole)


@pytest.mark.parametrize(
    "size, limit, least, width",
    [
        (1, 10, 32, 10),
        (1, 100, 32, 32),
        (32, 100, 32, 32),
        (33, 100, 32, 64),
        (65, 100, 32, 100),
        (5, 64, 4, 8),
    ],
)
def test_bucket(size, limit, least, width):
    assert batching.bucket(size, limit, least) == width


def test_bucket_declares_few_widths():
    assert {batching.bucket(n, 1000) for n in range(1, 1001)} == {32, 64, 128, 256, 512, 1000}
    assert batching.buckets(1000) == [32, 64, 128, 256, 512, 1000]
    assert batching.buckets(6) == [6] and batching.buckets(64) == [32, 64]


def test_what_does_not_fit_is_an_error(prompts, rollouts):
    with pytest.raises(ValueError, match="11 tokens do not fit the limit of 10"):
        batching.bucket(11, 10)
    with pytest.raises(ValueError, match="4 tokens do not fit the limit of 3"):
        pack(prompts, rollouts, max_prompt_tokens=3)


def test_dense(rollouts):
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], np.float32)
    got = batching.dense(rollouts, values, 3, 3, np.nan)
    np.testing.assert_array_equal(got, [[1, 2, 3], [4, np.nan, np.nan], [5, 6, np.nan]])
    assert got.dtype == np.float32
