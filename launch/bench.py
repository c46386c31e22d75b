"""Times one rollout and one update of a model shape, beside the machine's own speed; a JSON line for each case.

    python launch/bench.py --shape=smollm2 --prompt=64 --response=16 --prompts=8 --group=16 --rows=32
    python launch/bench.py --shape=smollm2 --vary=group:4,16,64        # the case once for each value, and a fit

P prompt tokens, T response tokens, B prompts, G samples of each, K rows of one update (K / B of each prompt). Random
weights, no stop id: every row runs T tokens, or with --lengths=lognormal:MEDIAN:SIGMA:MAX a length of its own (the same
seed draws the same lengths) and T is not used. Medians of --repeats runs after a warm-up (--nowarm_up: none, and the
first run counts, its compilation with it). The floor is the time that the matrix products of the parameters would take
at the speed of one large product, measured here. On a chip whose rates are published (rljax/plan/chips.py): the share
of its FLOP/s that the update takes (attention left out), and of its memory bandwidth that decoding takes, by weights
and caches read once a step. Peak memory is the process's own, or the device's where it counts it.
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
from rljax.plan import chips  # noqa: E402
from rljax.types import TrainBatch  # noqa: E402

SHAPES = {  # layers, vocabulary, hidden, intermediate, heads, kv heads, head dim, q/k/v biases
    "tiny": (4, 512, 256, 1024, 8, 4, 32, False),
    "smollm2": (30, 49_152, 576, 1536, 9, 3, 64, False),
    "qwen25_1p5b": (28, 151_936, 1536, 8960, 12, 2, 128, True),
}
SHAPE = flags.DEFINE_enum("shape", "tiny", list(SHAPES), "model shape")
PROMPT = flags.DEFINE_integer("prompt", 64, "P, tokens of a prompt", lower_bound=2)
RESPONSE = flags.DEFINE_integer("response", 32, "T, tokens of a response", lower_bound=1)
PROMPTS = flags.DEFINE_integer("prompts", 8, "B", lower_bound=1)
GROUP = flags.DEFINE_integer("group", 16, "G, samples of a prompt", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 32, "K, rows of one update, a multiple of B", lower_bound=1)
VARIED = ("prompt", "response", "prompts", "group", "rows")
VARY = flags.DEFINE_string("vary", "", f"NAME:VALUE,VALUE,… of one of {', '.join(VARIED)}")
LENGTHS = flags.DEFINE_string("lengths", "", "lognormal:MEDIAN:SIGMA:MAX; each response's own length")
SEED = flags.DEFINE_integer("seed", 0, "of weights, tokens and lengths")
LANES = flags.DEFINE_integer("lanes", 0, "prompts that decode at once; 0: all")
SLOTS = flags.DEFINE_integer("slots", 0, "samples of a prompt that decode at once; 0: all")
SEGMENT = flags.DEFINE_integer("segment", 32, "decode steps between refills", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights, products and caches")
ATTENTION = flags.DEFINE_enum("attention", "xla", ["xla", "cudnn", "splash"], "of prefill and learning")
ATTENTION_CHUNK = flags.DEFINE_integer("attention_chunk", 512, "queries whose scores are alive at once", lower_bound=0)
REMAT = flags.DEFINE_enum("remat", "dots", ["none", "dots", "layer"], "what the backward pass recomputes")
CHUNK = flags.DEFINE_integer("token_chunk", 512, "tokens whose logits are alive at once", lower_bound=1)
MICRO = flags.DEFINE_integer("micro_batches", 1, "parts of an update", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "timed runs", lower_bound=1)
WARM_UP = flags.DEFINE_bool("warm_up", True, "whether a run comes before the timed ones")


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement's numbers: P, T, B, G, K."""

    prompt: int
    response: int
    prompts: int
    group: int
    rows: int

    def __post_init__(self):
        if self.rows % self.prompts or self.rows // self.prompts > self.group:
            most = self.prompts * self.group
            raise app.UsageError(f"rows = {self.rows} must be a multiple of prompts = {self.prompts}, at most {most}")


def cases() -> list[Case]:
    """The case of the flags, once for each value of --vary."""
    own = {"prompt": PROMPT, "response": RESPONSE, "prompts": PROMPTS, "group": GROUP, "rows": ROWS}
    base = {name: flag.value for name, flag in own.items()}
    if not VARY.value:
        return [Case(**base)]
    name, _, values = VARY.value.partition(":")
    if name not in VARIED or not all(v.isdigit() and int(v) > 0 for v in values.split(",")):
        raise app.UsageError(f"--vary={VARY.value} is not NAME:NUMBER,NUMBER,… with a NAME of {', '.join(VARIED)}")
    return [Case(**base | {name: int(value)}) for value in values.split(",")]


def make_model(shape: str) -> Model:
    layers, vocab, hidden, mlp, heads, kv_heads, head_dim, bias = SHAPES[shape]
    config = ModelConfig(
        model_type="qwen2" if bias else "llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=100_000.0,
        norm_eps=1e-5, tie_embeddings=True, qkv_bias=bias, qk_norm=False, max_positions=8192,
    )  # fmt: skip
    how = {"remat": REMAT.value, "attention_chunk": ATTENTION_CHUNK.value, "attention": ATTENTION.value}
    return Model(config, **how)


def draw_lengths(spec: str, count: int, seed: int) -> np.ndarray:
    """int32[count] response lengths of "lognormal:MEDIAN:SIGMA:MAX", at least 1."""
    kind, *numbers = spec.split(":")
    if kind != "lognormal" or len(numbers) != 3:
        raise app.UsageError(f"--lengths={spec} is not lognormal:MEDIAN:SIGMA:MAX, such as lognormal:24:0.8:192")
    median, sigma, most = float(numbers[0]), float(numbers[1]), int(numbers[2])
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int32)


def medians(run) -> tuple[float, float]:
    """(median seconds of the timed runs, seconds of the first run, which compiles)."""
    seconds = []
    for i in range(REPEATS.value + WARM_UP.value):
        start = time.perf_counter()
        run(i)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP.value :]), seconds[0]


def gemm_gflops(size: int = 2048) -> float:
    """Speed of one product of [size, size] matrices of --dtype, the best of 5."""
    a = jnp.ones((size, size), DTYPE.value)
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


def decoded_bytes(config: ModelConfig, case: Case, lengths: np.ndarray) -> float:
    """Bytes that decoding reads if weights, prefixes and rows' keys and values are read once a step."""
    c, width = config, jnp.dtype(DTYPE.value).itemsize
    key_value = 2 * c.num_layers * c.num_kv_heads * c.head_dim * width
    steps = int(lengths.max())
    weights = (matrix_flops(c, 1, 1) / 2) * width
    own = (lengths.astype(np.float64) ** 2).sum() / 2
    return steps * (weights + case.prompts * case.prompt * key_value) + own * key_value


def bench_rollout(model: Model, params, case: Case, prompts, lengths: np.ndarray):
    """(seconds, seconds of the first run, seconds of the same with one token a row: prefill and one step)."""

    def run(i: int, limits=lengths) -> None:
        sampling.generate(
            model, params, prompts, num_samples=case.group, max_new_tokens=limits, key=jax.random.key(i),
            lanes=LANES.value if LANES.value else case.prompts,
            slots=SLOTS.value if SLOTS.value else case.group, segment=SEGMENT.value,
        )  # fmt: skip

    whole = medians(run)
    return *whole, medians(lambda i: run(i, np.ones_like(lengths)))[0]


def bench_update(model: Model, params, case: Case, prompts, lengths: np.ndarray):
    """The first K / B rows of each prompt, in one update: clipped loss, gradient norm, AdamW."""
    B = case.prompts
    lengths = lengths.reshape(B, -1)[:, : case.rows // B]
    shape = (*lengths.shape, int(lengths.max()))
    rng = np.random.default_rng(SEED.value)
    batch = TrainBatch(
        prompt_tokens=np.array(prompts, np.int32),
        prompt_lengths=np.full(B, case.prompt, np.int32),
        tokens=rng.integers(2, model.config.vocab_size, shape).astype(np.int32),
        lengths=lengths,
        sampler_logprobs=np.full(shape, -5.0, np.float32),
        advantages=rng.normal(size=lengths.shape).astype(np.float32),
        draws=np.zeros(B, np.uint32),
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
        token_chunk=CHUNK.value, max_length=shape[2], micro_batches=MICRO.value, minibatches=1, epochs=1,
    )  # fmt: skip
    step = learner.make_step(settings, optimizer, state)
    batch = sharding.put_by_prompt(sharding.mesh_of(params), batch)

    def run(_: int) -> None:
        nonlocal state
        state, sums = step(state, batch, None)
        jax.block_until_ready((state, sums))

    return (*medians(run), int(lengths.sum()))


def peak_bytes() -> int:
    """The most memory so far: the first device's, where it counts it, or this process's."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: Case) -> dict:
    """What the JSON line of a case says."""
    model = make_model(SHAPE.value)
    params = jax.jit(model.init, static_argnums=1)(jax.random.key(SEED.value), DTYPE.value)
    rng = np.random.default_rng(SEED.value)
    prompts = rng.integers(2, model.config.vocab_size, (case.prompts, case.prompt)).tolist()
    lengths = np.full(case.prompts * case.group, case.response, np.int32)
    if LENGTHS.value:
        lengths = draw_lengths(LENGTHS.value, len(lengths), SEED.value)
    gflops = gemm_gflops()
    rollout_s, rollout_first, prefill_s = bench_rollout(model, params, case, prompts, lengths)
    update_s, update_first, learned = bench_update(model, params, case, prompts, lengths)
    tokens, P = int(lengths.sum()), case.prompts * case.prompt
    update_flops = 3 * matrix_flops(model.config, P + learned, learned)
    floors = {"rollout": matrix_flops(model.config, P + tokens, tokens), "update": update_flops}
    floors = {name: flops / gflops / 1e9 for name, flops in floors.items()}
    out = {
        "system": "rljax", "shape": SHAPE.value, "P": case.prompt, "T": case.response, "B": case.prompts,
        "G": case.group, "K": case.rows, "lengths": LENGTHS.value, "dtype": DTYPE.value, "attention": ATTENTION.value,
        "tokens": tokens, "kept_tokens": learned, "rollout_s": rollout_s, "update_s": update_s,
        "decode_us_a_token": 1e6 * (rollout_s - prefill_s) / max(1, tokens - len(lengths)),
        "peak_gib": peak_bytes() / 2**30, "gemm_gflops": gflops,
        "rollout_floor_s": floors["rollout"], "update_floor_s": floors["update"],
        "rollout_roofline": floors["rollout"] / rollout_s, "update_roofline": floors["update"] / update_s,
    }  # fmt: skip
    if WARM_UP.value:
        out["compile_s"] = rollout_first - rollout_s + update_first - update_s
    if (name := chips.of_device(jax.devices()[0].device_kind)) is not None:
        chip = chips.CHIPS[name]
        out["update_mfu"] = update_flops / update_s / chip.flops
        seconds = rollout_s - prefill_s
        out["decode_bandwidth"] = decoded_bytes(model.config, case, lengths) / seconds / chip.bandwidth
    return out


def told(seen: dict) -> str:
    """A case's line for people."""
    line = (
        f"P={seen['P']} T={seen['T']} B={seen['B']} G={seen['G']} K={seen['K']}: rollout {seen['rollout_s']:.3f} s,"
        f" {seen['tokens'] / seen['rollout_s']:,.0f} tokens/s, {seen['rollout_roofline']:.0%} of the floor; decoding"
        f" {seen['decode_us_a_token']:.0f} µs a token; update {seen['update_s']:.3f} s,"
        f" {seen['update_roofline']:.0%} of the floor; {seen['peak_gib']:.2f} GiB"
    )
    if "update_mfu" in seen:
        line += f"; {seen['update_mfu']:.1%} MFU in the update, {seen['decode_bandwidth']:.1%} of bandwidth in decoding"
    return line


def fitted(seen: list[dict]) -> str:
    """Update time as an affine function of the tokens learned from: least squares, and the largest deviation."""
    kept, seconds = (np.array([one[key] for one in seen]) for key in ("kept_tokens", "update_s"))
    slope, intercept = np.polyfit(kept, seconds, 1)
    off = np.abs(intercept + slope * kept - seconds) / seconds
    return f"update ≈ {intercept:.3f} s + {1e6 * slope:.1f} µs a kept token; at most {off.max():.0%} off"


def main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; options are given as --prompt=64")
    asked, seen = cases(), []
    for case in asked:
        seen.append(measure(case))
        kind = jax.devices()[0].device_kind
        print(
            f"{kind}: {seen[-1]['gemm_gflops']:.0f} GFLOP/s in one {DTYPE.value} product\n{told(seen[-1])}", flush=True
        )
        print(json.dumps(seen[-1]), flush=True)
    if len({one["kept_tokens"] for one in seen}) > 2:
        print(fitted(seen))


if __name__ == "__main__":
    app.run(main)
