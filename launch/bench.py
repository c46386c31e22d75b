"""Times one rollout and one update of a model shape, beside the machine's own speed; one JSON line last.

    python launch/bench.py --shape=smollm2 --prompt=64 --response=16 --prompts=8 --group=16 --rows=32

P prompt tokens, T response tokens, B prompts, G samples of each, K rows of one update (K / B of each prompt). Random
weights, float32, no stop id: every row runs T tokens, or with --lengths=lognormal:MEDIAN:SIGMA:MAX a length of its own
(the same seed draws the same lengths) and T is not used. Medians of 3 runs after a warm-up. The floor is the time that
the matrix products of the parameters would take at the float32 speed of one large product, measured here.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # configs is no part of the package
from configs import default  # noqa: E402
from rljax import config as config_lib  # noqa: E402
from rljax import learner, sampling, sharding  # noqa: E402
from rljax.models.config import ModelConfig  # noqa: E402
from rljax.models.transformer import Model  # noqa: E402
from rljax.objectives import Settings  # noqa: E402
from rljax.types import TrainBatch  # noqa: E402

SHAPES = {  # layers, vocabulary, hidden, intermediate, heads, kv heads, head dim
    "tiny": (4, 512, 256, 1024, 8, 4, 32),
    "smollm2": (30, 49_152, 576, 1536, 9, 3, 64),
}
SHAPE = flags.DEFINE_enum("shape", "tiny", list(SHAPES), "model shape")
PROMPT = flags.DEFINE_integer("prompt", 64, "P, tokens of a prompt", lower_bound=2)
RESPONSE = flags.DEFINE_integer("response", 32, "T, tokens of a response", lower_bound=1)
PROMPTS = flags.DEFINE_integer("prompts", 8, "B", lower_bound=1)
GROUP = flags.DEFINE_integer("group", 16, "G, samples of a prompt", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 32, "K, rows of one update, a multiple of B", lower_bound=1)
LENGTHS = flags.DEFINE_string("lengths", "", "lognormal:MEDIAN:SIGMA:MAX; each response's own length")
SEED = flags.DEFINE_integer("seed", 0, "of weights, tokens and lengths")
LANES = flags.DEFINE_integer("lanes", 0, "prompts that decode at once; 0: all")
SLOTS = flags.DEFINE_integer("slots", 0, "samples of a prompt that decode at once; 0: all")
SEGMENT = flags.DEFINE_integer("segment", 32, "decode steps between refills", lower_bound=1)
REMAT = flags.DEFINE_enum("remat", "dots", ["none", "dots", "layer"], "what the backward pass recomputes")
CHUNK = flags.DEFINE_integer("token_chunk", 512, "tokens whose logits are alive at once", lower_bound=1)
REPEATS = 3


def make_model(shape: str, remat: str) -> Model:
    layers, vocab, hidden, mlp, heads, kv_heads, head_dim = SHAPES[shape]
    config = ModelConfig(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=100_000.0, norm_eps=1e-5,
        tie_embeddings=True, qkv_bias=False, qk_norm=False, max_positions=8192,
    )  # fmt: skip
    return Model(config, remat=remat)


def draw_lengths(spec: str, count: int, seed: int) -> np.ndarray:
    """int32[count] response lengths of "lognormal:MEDIAN:SIGMA:MAX", at least 1."""
    kind, *numbers = spec.split(":")
    if kind != "lognormal" or len(numbers) != 3:
        raise app.UsageError(f"--lengths={spec} is not lognormal:MEDIAN:SIGMA:MAX, such as lognormal:24:0.8:192")
    median, sigma, most = float(numbers[0]), float(numbers[1]), int(numbers[2])
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int32)


def medians(run) -> tuple[float, float]:
    """(median seconds of REPEATS runs, seconds of the first, which compiles)."""
    seconds = []
    for i in range(REPEATS + 1):
        start = time.perf_counter()
        run(i)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]), seconds[0]


def gemm_gflops(size: int = 2048) -> float:
    """Speed of one float32 product of [size, size] matrices, the best of 5."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def matrix_flops(config: ModelConfig, tokens: int, unembedded: int) -> float:
    """Multiplications and additions of one forward pass; the embedding is looked up, attention left out."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    return 2.0 * (tokens * c.num_layers * layer + unembedded * c.hidden_size * c.vocab_size)


def bench_rollout(model: Model, params, prompts, lengths: np.ndarray):
    def run(i: int) -> None:
        sampling.generate(
            model, params, prompts, num_samples=GROUP.value, max_new_tokens=lengths, key=jax.random.key(i),
            lanes=LANES.value if LANES.value else PROMPTS.value,
            slots=SLOTS.value if SLOTS.value else GROUP.value, segment=SEGMENT.value,
        )  # fmt: skip

    return medians(run)


def bench_update(model: Model, params, prompts, lengths: np.ndarray):
    """The first K / B rows of each prompt, in one update: clipped loss, gradient norm, AdamW."""
    per_prompt = ROWS.value // PROMPTS.value
    lengths = lengths.reshape(PROMPTS.value, -1)[:, :per_prompt]
    shape = (*lengths.shape, int(lengths.max()))
    rng = np.random.default_rng(SEED.value)
    batch = TrainBatch(
        prompt_tokens=np.array(prompts, np.int32),
        prompt_lengths=np.full(PROMPTS.value, PROMPT.value, np.int32),
        tokens=rng.integers(2, model.config.vocab_size, shape).astype(np.int32),
        lengths=lengths,
        sampler_logprobs=np.full(shape, -5.0, np.float32),
        advantages=rng.normal(size=lengths.shape).astype(np.float32),
        draws=np.zeros(PROMPTS.value, np.uint32),
        samples=np.zeros(lengths.shape, np.int32),
        top_ids=np.zeros((*shape, 0), np.int32),
        top_logprobs=np.zeros((*shape, 0), np.float32),
    )
    config = config_lib.resolve(default.get_config())
    options = dataclasses.replace(config.learner, learning_rate=1e-6, warmup_updates=0)
    optimizer = learner.make_optimizer(options, 100)
    state = learner.init(params, optimizer)
    settings = Settings(
        model=model, loss=config.loss, jackpot=config.jackpot, actor=config.actor, actor_model=None, temperature=1.0,
        token_chunk=CHUNK.value, max_length=shape[2], micro_batches=1, minibatches=1, epochs=1,
    )  # fmt: skip
    step = learner.make_step(settings, optimizer, state)
    batch = sharding.put_by_prompt(sharding.mesh_of(params), batch)

    def run(_: int) -> None:
        nonlocal state
        state, sums = step(state, batch, None)
        jax.block_until_ready((state, sums))

    return (*medians(run), int(lengths.sum()))


def main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; options are given as --prompt=64")
    P, B, G, K = PROMPT.value, PROMPTS.value, GROUP.value, ROWS.value
    if K % B or K // B > G:
        raise app.UsageError(f"--rows={K} must be a multiple of --prompts={B}, and at most B × G = {B * G}")
    model = make_model(SHAPE.value, REMAT.value)
    params = model.init(jax.random.key(SEED.value))
    rng = np.random.default_rng(SEED.value)
    prompts = rng.integers(2, model.config.vocab_size, (B, P)).tolist()
    lengths = np.full(B * G, RESPONSE.value, np.int32)
    if LENGTHS.value:
        lengths = draw_lengths(LENGTHS.value, B * G, SEED.value)
    gflops = gemm_gflops()
    rollout_s, rollout_first = bench_rollout(model, params, prompts, lengths)
    update_s, update_first, learned = bench_update(model, params, prompts, lengths)
    tokens = int(lengths.sum())
    floors = {
        "rollout": matrix_flops(model.config, B * P + tokens, tokens) / gflops / 1e9,
        "update": 3 * matrix_flops(model.config, B * P + learned, learned) / gflops / 1e9,
    }
    print(f"{jax.devices()[0].device_kind}: {gflops:.0f} GFLOP/s in one float32 product")
    print(
        f"rollout {rollout_s:.3f} s, {tokens / rollout_s:,.0f} tokens/s, {floors['rollout'] / rollout_s:.0%} of the "
        f"floor; update {update_s:.3f} s, {floors['update'] / update_s:.0%} of the floor"
    )
    print(json.dumps({
        "system": "rljax", "shape": SHAPE.value, "P": P, "T": RESPONSE.value, "B": B, "G": G, "K": K,
        "lengths": LENGTHS.value, "tokens": tokens, "rollout_s": rollout_s, "update_s": update_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "compile_s": rollout_first - rollout_s + update_first - update_s, "gemm_gflops": gflops,
        "rollout_floor_s": floors["rollout"], "update_floor_s": floors["update"],
        "rollout_roofline": floors["rollout"] / rollout_s, "update_roofline": floors["update"] / update_s,
    }))  # fmt: skip


if __name__ == "__main__":
    app.run(main)
