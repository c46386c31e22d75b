"""Compiled programs' memory at the vocabulary of a real model: no [rows, T, V] array in rollout or update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from rljax import config as config_lib
from rljax import learner, sampling
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.objectives import Settings
from rljax.types import LearnerState, TrainBatch

pytestmark = pytest.mark.slow

DEFAULT = config_lib.resolve(default.get_config())
V = 49_152
P, K, S, T = 4, 8, 64, 256  # 32 rows × 256 tokens
LOGITS = P * K * T * V * 4  # bytes of [rows, T, V] in float32: 1.5 GiB
SMOLLM2 = ModelConfig(
    model_type="llama", vocab_size=V, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, rope_theta=1e5, norm_eps=1e-5, tie_embeddings=True, qkv_bias=False, qk_norm=False,
    max_positions=8192,
)  # fmt: skip


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def working_memory(compiled) -> int:
    """Bytes of arguments and temporaries; outputs that are no donated argument come on top."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


@functools.cache
def update_memory(
    rule: str, table: str = "union", num_layers: int = 30, P: int = P, T: int = T, micro: int = 1, chunk: int = 0
) -> tuple[int, int]:
    """(working memory, temporaries) of one update; with obrs by a table of the sampler or of the policy in bfloat16."""
    model = Model(dataclasses.replace(SMOLLM2, num_layers=num_layers), remat="layer", attention_chunk=chunk)
    optimizer = learner.make_optimizer(DEFAULT.learner, 100)
    params = model.abstract_params()
    opt_state = jax.eval_shape(optimizer.init, params)
    state = LearnerState(params=params, opt_state=opt_state, updates=ints())
    top = DEFAULT.jackpot.top_k if rule == "obrs" and table == "sampler" else 0
    batch = TrainBatch(
        prompt_tokens=ints(P, S), prompt_lengths=ints(P), tokens=ints(P, K, T), lengths=ints(P, K),
        sampler_logprobs=floats(P, K, T), advantages=floats(P, K), draws=jax.ShapeDtypeStruct((P,), jnp.uint32),
        samples=ints(P, K), top_ids=ints(P, K, T, top), top_logprobs=floats(P, K, T, top),
    )  # fmt: skip
    settings = Settings(
        model=model, loss=DEFAULT.loss, jackpot=dataclasses.replace(DEFAULT.jackpot, rule=rule, table=table),
        actor=dataclasses.replace(DEFAULT.actor, dtype="" if rule == "none" else "bfloat16"), actor_model=None,
        temperature=1.0, token_chunk=256, max_length=T, micro_batches=micro, minibatches=1, epochs=1,
    )  # fmt: skip
    step = functools.partial(learner.train_step, settings=settings, optimizer=optimizer)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(step, donate_argnums=0).lower(state, None, batch, None, key).compile()
    return working_memory(compiled), compiled.memory_analysis().temp_size_in_bytes


def test_the_update_holds_no_logits_of_all_tokens():
    """Two layers, so that what else there is stays small: the temporaries have no room for [rows, T, V]."""
    _, temporaries = update_memory("none", num_layers=2)
    assert temporaries < 0.75 * LOGITS


def test_the_update_holds_one_tree_of_gradients_beside_the_state():
    """Prompts and rows share each weight's gradient, and neither clipping nor the optimizer copies a tree."""
    _, temporaries = update_memory("none", T=16)
    parameters = sum(np.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(Model(SMOLLM2).abstract_params()))
    assert parameters < temporaries < 1.5 * parameters


def test_memory_of_long_completions_is_linear_in_their_length():
    """2 prompts × 8 rows of 1,024, 2,048 and 4,096 tokens, their update in two micro-batches: at most 12 GiB."""
    one, two, four = (update_memory("none", P=2, T=n, micro=2, chunk=512)[0] for n in (1024, 2048, 4096))
    print([f"{size / 2**30:.2f} GiB" for size in (one, two, four)])
    assert four < 12 * 2**30
    assert four - two < 2.1 * (two - one)  # quadratic: 4 times


@pytest.mark.parametrize("table", ["sampler", "union"])
def test_jackpots_policy_update_takes_little_more_than_grpos(table):
    plain, _ = update_memory("none")
    jackpot, _ = update_memory("obrs", table)
    assert jackpot <= 1.15 * plain


def test_decoding_holds_one_token_of_logits_a_row():
    """The segment's temporaries: a few [rows, V], never [rows, T, V], and no second copy of the caches."""
    model = Model(dataclasses.replace(SMOLLM2, num_layers=2))
    lanes, slots = 4, 8
    shape = sampling.Shape(
        lanes=lanes, slots=slots, prompt_tokens=S, columns=T, segment=32, stop_ids=(0,), top_logprobs=20
    )
    params = model.abstract_params()
    pool = sampling.abstract_pool(model, params, shape)
    compiled = sampling.trace_decode(model, params, shape).lower().compile()
    memory = compiled.memory_analysis()
    caches = sum(np.prod(x.shape) * 4 for x in pool.cache)
    assert memory.alias_size_in_bytes >= caches  # donated, and written in place
    assert memory.temp_size_in_bytes < 20 * lanes * slots * V * 4 < lanes * slots * T * V * 4 / 10
